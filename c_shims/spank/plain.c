/* What srun is asked for in words so plain that pyxis_py/submit.py would have nothing to say against them. That process
 * takes as long as a step without a container, and srun would wait for it before it asks for nodes, which check all of it
 * again. Nothing is refused here: whatever is not surely plain, that process judges. */
#define _GNU_SOURCE
#include "plugin.h"

#include <stdlib.h>
#include <string.h>

#define POLICY "/etc/enroot/policy.json"
#define WORD   "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"

enum { LONGEST = 128 };

static bool is_of(const char *characters, const char *text)
{
	return *text && strlen(text) <= LONGEST && !text[strspn(text, characters)];
}

/* The path of a squashfs file, which may be on the nodes alone. */
static bool is_plain_file(const char *image)
{
	static const char end[] = ".sqsh";
	size_t length = strlen(image);

	return is_of(WORD "-./", image) && (*image == '/' || strncmp(image, "./", 2) == 0) && length >= sizeof(end) &&
	       strcmp(image + length - (sizeof(end) - 1), end) == 0;
}

/* Whether srun has no option that goes with a container in its own way, -v and --wait-for-children; of several components,
 * with a colon between them, only those of the last can be told from the words of the program. */
static bool words_are_plain(void)
{
	static const char *const others[] = { "-v", "--v", "--wait-" };
	FILE *words = fopen("/proc/self/cmdline", "re");
	char *word = NULL;
	size_t size = 0;
	bool plain = words;

	for (int i = 0; plain && getdelim(&word, &size, '\0', words) > 0; i++) {
		plain = strcmp(word, ":") != 0;
		for (size_t j = 0; plain && i < optind && j < LENGTH(others); j++)
			plain = strncmp(word, others[j], strlen(others[j])) != 0;
	}
	free(word);
	if (words)
		(void)fclose(words);
	return plain;
}

/* Variables of ours may change what is found, and a slip in one is told. */
static bool variables_are_plain(void)
{
	static const char *const ours[] = { "PYXIS_", "ENROOT_", "PENROOT_" };

	for (char **variable = environ; variable && *variable; variable++) {
		for (size_t i = 0; i < LENGTH(ours); i++) {
			if (strncmp(*variable, ours[i], strlen(ours[i])) == 0)
				return false;
		}
	}
	return true;
}

/* Whether a container by its name, or an image in a file of the nodes, is all that is asked for. */
bool is_plain(const char *context)
{
	const char *name = NULL, *image = NULL;
	struct stat info;

	return strcmp(context, "srun") == 0 && get_only(&name, &image) && (!name || is_of(WORD "-.", name)) &&
	       (!image || is_plain_file(image)) && variables_are_plain() && lstat(POLICY, &info) < 0 && words_are_plain();
}
