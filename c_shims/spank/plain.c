/* Find the requests to srun in which pyxis_py/submit/submission.py would find no fault, so that srun need not wait for it
 * before it asks for nodes. The nodes check every request again. Nothing is refused here. See README.md. */
#include "plugin.h"

#include <regex.h>

enum { LONGEST = 128 };

static const char a_name[] = "^[A-Za-z0-9_.-]+$";
/* The path of a squashfs file, which may be on the nodes alone. */
static const char a_file[] = "^(/|\\./)[A-Za-z0-9_./-]*\\.sqsh$";
/* An image of a registry, some of which would be others: enroot_py/registry/reference.py. */
static const char a_tag[] = "^(docker://)?([a-z0-9][a-z0-9.-]*(:[1-9][0-9]{0,3})?#)?"
			    "[a-z0-9]+([._/-][a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$";
static const char another[] = "^(bcast|oci|oci-archive|docker-archive):|\\.sqsh$";

static bool is(const char *pattern, const char *text)
{
	regex_t compiled;

	if (strlen(text) > LONGEST || regcomp(&compiled, pattern, REG_EXTENDED | REG_NOSUB) != 0)
		return false;
	bool found = regexec(&compiled, text, 0, NULL, 0) == 0;
	regfree(&compiled);
	return found;
}

/* Whether srun has no option that goes with a container in its own way: -v, --wait-for-children, and those with which
 * local_user_init comes too late for a digest, learns_later() of submit.py. Of several components, with a colon between them,
 * only those of the last can be told from the words of the program. */
static bool words_are_plain(void)
{
	static const char *const others[] = { "-v", "--v", "--wait-", "--as", "--het", "--pack" };
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

/* Whether the site says which images are let in, or the user for himself: _has_policy() of submit.py. */
static bool has_policy(void)
{
	static const char *const sites[] = { POLICY, SLURM_HERE POLICY };
	const char *home = getenv("HOME"), *config = getenv("XDG_CONFIG_HOME");
	bool said = config && *config;
	char path[PATH_MAX];
	struct stat info;

	for (size_t i = 0; i < LENGTH(sites); i++) {
		if (lstat(sites[i], &info) == 0)
			return true;
	}
	if (!said && (!home || !*home))
		return true;
	int length = snprintf(path, sizeof(path), "%s%s/enroot/policy.json", said ? config : home, said ? "" : "/.config");
	return length < 0 || (size_t)length >= sizeof(path) || lstat(path, &info) == 0;
}

/* A container by its name, or an image in a file of the nodes; or an image of a registry, whose tag is to be resolved. */
enum plainness judge(struct step *step, const char *context)
{
	const char *name = NULL, *image = NULL;

	if (strcmp(context, "srun") != 0 || !get_only(step, &name, &image) || (name && !is(a_name, name)) || !variables_are_plain() ||
	    has_policy() || !words_are_plain())
		return NOT_PLAIN;
	if (!image || is(a_file, image))
		return PLAIN;
	return is(a_tag, image) && !is(another, image) ? PLAIN_TAG : NOT_PLAIN;
}
