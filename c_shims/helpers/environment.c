#include "environment.h"

#include "common.h"

#include <ctype.h>
#include <err.h>
#include <stdlib.h>
#include <string.h>

static const char exact_mark[] = "# penroot-exact: ";

/* "\n" and "\\" of etc.write_environment(): values that one line cannot hold. */
static void unescape(char *value)
{
	char *to = value;

	for (const char *at = value; *at; at++) {
		if (*at == '\\' && (at[1] == 'n' || at[1] == '\\'))
			*to++ = *++at == 'n' ? '\n' : '\\';
		else
			*to++ = *at;
	}
	*to = '\0';
}

/* Whether a line is what a comment with the exact value stands for. */
static bool stands_for(const char *line, const char *exact)
{
	while (*line && *exact && (*line == *exact || (*line == ' ' && *exact == '\n'))) {
		line++;
		exact++;
	}
	return !*line && !*exact;
}

bool next_variable(char **rest, struct variable *variable)
{
	char *line, *exact = NULL;

	while ((line = strsep(rest, "\n"))) {
		if (*line == '#') {
			exact = NULL;
			if (!strncmp(line, exact_mark, strlen(exact_mark))) {
				exact = line + strlen(exact_mark);
				unescape(exact);
			}
			continue;
		}
		line += strspn(line, " \t");
		variable->exact = exact && stands_for(line, exact);
		variable->name = variable->exact ? exact : line;
		variable->value = strchr(variable->name, '=');
		exact = NULL;
		if (!variable->value || variable->value == variable->name)
			continue;
		*variable->value++ = '\0';
		return true;
	}
	return false;
}

static size_t name_length(const char *text)
{
	size_t n = 0;

	while (isalpha((unsigned char)text[n]) || text[n] == '_' || (n && isdigit((unsigned char)text[n])))
		n++;
	return n;
}

/* Whether the upper-case word names a secret: environ.secret_lists() has the form of the list. */
static bool is_secret_word(const char *list, const char *word, size_t length, bool several)
{
	bool secret = false;

	for (size_t n; *list; list += n + (list[n] == ' ')) {
		n = strcspn(list, " ");
		if (*list == '!' && n - 1 == length && !memcmp(list + 1, word, length))
			return false;
		if (*list == '*')
			secret |= length > n - 1 && !memcmp(list + 1, word + length - (n - 1), n - 1);
		else
			secret |= several && n == length && !memcmp(list, word, n);
	}
	return secret;
}

static bool contains_part(const char *name, const char *parts)
{
	for (size_t n; *parts; parts += n + (parts[n] == ' ')) {
		n = strcspn(parts, " ");
		if (memmem(name, strlen(name), parts, n))
			return true;
	}
	return false;
}

static bool is_secret_name(const char *name, size_t length, bool several, const struct secrets *secrets)
{
	AUTO_FREE upper = strndup(name, length);

	if (!upper)
		err(EXIT_FAILURE, "cannot allocate memory");
	for (char *at = upper; *at; at++)
		*at = (char)toupper((unsigned char)*at);
	if (contains_part(upper, secrets->parts))
		return true;
	for (size_t n, at = 0; upper[at]; at += n + (upper[at + n] == '_')) {
		n = strcspn(upper + at, "_");
		if (is_secret_word(secrets->words, upper + at, n, several))
			return true;
	}
	return false;
}

/* Whether one of the names before "=" in a value names a secret, as in "Server=db;Password=...". */
static bool has_secret_name(const char *value, const struct secrets *secrets)
{
	for (const char *at = strchr(value, '='); at; at = strchr(at + 1, '=')) {
		const char *start = at;

		while (start > value && (isalnum((unsigned char)start[-1]) || start[-1] == '_'))
			start--;
		if (is_secret_name(start, (size_t)(at - start), true, secrets))
			return true;
	}
	return false;
}

/* Whether a text begins with USER:PASSWORD@, or :PASSWORD@ behind a `scheme`, or TOKEN@ if `token`. */
static bool begins_with_login(const char *text, size_t length, bool scheme, bool token)
{
	const char *at = memchr(text, '@', length), *colon, *end = text + length;
	size_t user, before;
	bool port = true;

	if (!at)
		return false;
	colon = memchr(text, ':', (size_t)(at - text));
	user = (size_t)((colon ? colon : at) - text);
	for (size_t n = 0; n < user; n++) {
		if (strchr("/?#", text[n]) || isspace((unsigned char)text[n]))
			return false;
	}
	if (!colon || (!user && !scheme))
		return !colon && user && token;
	for (before = 0; colon + 1 + before < at && !strchr("/?#", colon[1 + before]); before++)
		port = port && isdigit((unsigned char)colon[1 + before]);
	if (colon + 1 == at || isspace((unsigned char)colon[1]) || (port && colon + 1 + before < at))
		return false;
	return !(end - at >= 8 && (!memcmp(at, "@sha256:", 8) || !memcmp(at, "@sha512:", 8)));
}

/* environ._has_login() */
static bool has_login(const char *text, size_t length)
{
	bool scheme = false, token = false;

	for (const char *next; length; text = next) {
		const char *mark = memmem(text, length, "://", 3);
		size_t piece = mark ? (size_t)(mark - text) : length;

		if (begins_with_login(text, piece, scheme, token))
			return true;
		scheme = piece > 0;
		token = (piece >= 4 && !memcmp(text + piece - 4, "http", 4)) || (piece >= 5 && !memcmp(text + piece - 5, "https", 5));
		next = text + piece + (mark ? 3 : 0);
		length -= piece + (mark ? 3 : 0);
	}
	return false;
}

/* environ.is_secret() */
static bool is_secret(const char *name, const char *value, const struct secrets *secrets)
{
	static const char separators[] = ",; \t\n\v\f\r";

	if (is_secret_name(name, strlen(name), strchr(name, '_'), secrets) || has_secret_name(value, secrets) ||
	    strstr(value, "PRIVATE KEY-----") || has_login(value, strlen(value)))
		return true;
	for (const char *at = value + strspn(value, separators); *at; at += strspn(at, separators)) {
		size_t n = strcspn(at, separators);

		if (has_login(at, n))
			return true;
		at += n;
	}
	return false;
}

/* A variable of the caller; none for a secret, which is told once. */
static const char *given(const char *name, const struct secrets *secrets)
{
	const char *value = getenv(name);

	if (!value || !secrets || !is_secret(name, value, secrets))
		return value;
	fprintf(stderr, "[WARN] /etc/environment of the image asks for %s, which looks like a secret: --env %s would give it\n", name,
		name);
	unsetenv(name);
	return NULL;
}

/* All but ${NAME}, and ${NAME:-DEFAULT} in files of the site, stands as it is. */
static char *replaced(const char *from, const struct secrets *secrets)
{
	char *out = NULL;
	size_t size;
	FILE *to = open_memstream(&out, &size);
	const char *mark;

	if (!to)
		err(EXIT_FAILURE, "cannot allocate memory");
	while ((mark = strstr(from, "${"))) {
		const char *inner = mark + 2, *rest = inner + name_length(inner);
		size_t length = strcspn(rest, "}");
		bool fallback = !secrets && !strncmp(rest, ":-", 2), closed = rest[length] && !memmem(rest, length, "${", 2);

		fwrite(from, 1, (size_t)(mark - from), to);
		if (rest > inner && closed && (!length || fallback)) {
			AUTO_FREE name = strndup(inner, (size_t)(rest - inner));
			const char *value = name ? given(name, secrets) : NULL;

			if (value && *value)
				fputs(value, to);
			else if (fallback)
				fwrite(rest + 2, 1, length - 2, to);
			from = rest + length + 1;
		} else {
			fputs("${", to);
			from = inner;
		}
	}
	fputs(from, to);
	if (fclose(to) != 0)
		err(EXIT_FAILURE, "cannot allocate memory");
	return out;
}

/* How long a text is without the white space at its end. */
static size_t stripped(const char *text)
{
	size_t n = strlen(text);

	while (n && isspace((unsigned char)text[n - 1]))
		n--;
	return n;
}

/* The value without the quotes around it, in its own memory. */
static const char *unquoted(char *value)
{
	size_t n = stripped(value);

	if (n < 2 || !strchr("\"'", value[0]) || !strchr("\"'", value[n - 1]))
		return value;
	value[n - 1] = '\0';
	return value + 1;
}

/* The reverse of unescape(). */
static void print_escaped(const char *text)
{
	for (; *text; text++) {
		if (*text == '\n' || *text == '\\')
			printf("\\%c", *text == '\n' ? 'n' : '\\');
		else
			putchar(*text);
	}
}

static void print_variable(const char *name, const char *value)
{
	if (strchr(value, '\n')) {
		fputs(exact_mark, stdout);
		print_escaped(name);
		putchar('=');
		print_escaped(value);
		putchar('\n');
	}
	printf("%s=", name);
	for (const char *at = value; *at; at++)
		putchar(*at == '\n' ? ' ' : *at);
	putchar('\n');
}

void print_environment(char *text, const struct secrets *secrets)
{
	struct variable variable;

	while (next_variable(&text, &variable)) {
		AUTO_FREE value = NULL;

		if (!strncmp(variable.name, "ENROOT_", strlen("ENROOT_")))
			continue;
		if (!secrets && variable.name[name_length(variable.name)])
			continue;
		if (!variable.exact)
			value = replaced(variable.value, secrets);
		print_variable(variable.name, value ? unquoted(value) : variable.value);
	}
}
