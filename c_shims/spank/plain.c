/* Recognize requests to srun in which pyxis_py/submit/submission.py would find no error: then srun asks for nodes without waiting
 * for submission.py. The nodes check every request again. This file refuses nothing. See README.md. */
#include "plugin.h"

#include <regex.h>

enum { MAX_PATTERN_TEXT_BYTES = 128 };

static const char name_pattern[] = "^[A-Za-z0-9_.-]+$";
/* The path of a squashfs file, which may exist on the nodes only. */
static const char file_pattern[] = "^(/|\\./)[A-Za-z0-9_./-]*\\.sqsh$";
/* A registry image, unless the text also matches other_pattern: enroot_py/registry/reference.py. */
static const char tag_pattern[] = "^(docker://)?([a-z0-9][a-z0-9.-]*(:[1-9][0-9]{0,3})?#)?"
				  "[a-z0-9]+([._/-][a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$";
static const char other_pattern[] = "^(bcast|oci|oci-archive|docker-archive):|\\.sqsh$";

static bool matches(const char *pattern, const char *text)
{
	regex_t compiled;

	if (strlen(text) > MAX_PATTERN_TEXT_BYTES || regcomp(&compiled, pattern, REG_EXTENDED | REG_NOSUB) != 0)
		return false;
	bool is_match = regexec(&compiled, text, 0, NULL, 0) == 0;
	regfree(&compiled);
	return is_match;
}

/* Check that srun has no option that changes the check: -v, --wait-for-children, or an option with which local_user_init comes too
 * late for a digest (learns_later() of submission.py). A command with several components, separated by colons, is not plain:
 * `optind` belongs to the last component, and in the other components options look like words of the programs. */
static bool words_are_plain(void)
{
	static const char *const prefixes[] = { "-v", "--v", "--wait-", "--as", "--het", "--pack" };
	FILE *words = fopen("/proc/self/cmdline", "re");
	char *word = NULL;
	size_t size = 0;
	bool plain = words;

	for (int i = 0; plain && getdelim(&word, &size, '\0', words) > 0; i++) {
		plain = strcmp(word, ":") != 0;
		for (size_t j = 0; plain && i < optind && j < LENGTH(prefixes); j++)
			plain = !has_prefix(word, prefixes[j]);
	}
	free(word);
	if (words)
		(void)fclose(words);
	return plain;
}

/* Check that none of our variables is set: a variable may change the image, and only the check reports a misspelled one. */
static bool variables_are_plain(void)
{
	static const char *const prefixes[] = { "PYXIS_", "ENROOT_", "PENROOT_" };

	for (char **variable = environ; variable && *variable; variable++) {
		for (size_t i = 0; i < LENGTH(prefixes); i++) {
			if (has_prefix(*variable, prefixes[i]))
				return false;
		}
	}
	return true;
}

/* Check whether the site or the user has, or may have, a policy about images: _has_policy() of submission.py. */
static bool has_policy(void)
{
	static const char *const sites[] = { POLICY, SLURM_HERE POLICY };
	const char *home = getenv("HOME"), *config = getenv("XDG_CONFIG_HOME");
	bool has_config = config && *config;
	char path[PATH_MAX];
	struct stat info;

	for (size_t i = 0; i < LENGTH(sites); i++) {
		if (lstat(sites[i], &info) == 0)
			return true;
	}
	if (!has_config && (!home || !*home))
		return true;
	int length = snprintf(path, sizeof(path), "%s%s/enroot/policy.json", has_config ? config : home, has_config ? "" : "/.config");
	return length < 0 || (size_t)length >= sizeof(path) || lstat(path, &info) == 0;
}

/* PLAIN: a container by its name, or an image in a file of the nodes. PLAIN_TAG: a registry image with a tag to resolve. */
enum plainness classify_request(struct step *step, const char *context)
{
	const char *name = NULL, *image = NULL;

	if (strcmp(context, "srun") != 0 || !get_name_and_image(step, &name, &image) || (name && !matches(name_pattern, name)) ||
	    !variables_are_plain() || has_policy() || !words_are_plain())
		return NOT_PLAIN;
	if (!image || matches(file_pattern, image))
		return PLAIN;
	return matches(tag_pattern, image) && !matches(other_pattern, image) ? PLAIN_TAG : NOT_PLAIN;
}
