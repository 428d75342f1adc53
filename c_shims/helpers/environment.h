/* Files of variables, lines KEY=VALUE, read as etc.py and environ.py in enroot_py/runtime read them. */
#ifndef PENROOT_ENVIRONMENT_H
#define PENROOT_ENVIRONMENT_H

#include <stdbool.h>

struct variable {
	char *name, *value;
	bool exact; /* a comment before the line says the value, as one line could not */
};

/* The next variable of a text, which it cuts up; *rest moves on. False at the end. */
bool next_variable(char **rest, struct variable *variable);

/* What names of secrets contain: environ.secret_lists(). */
struct secrets {
	const char *words, *parts;
};

/* Prints the variables of a text with ${NAME} replaced and quotes around values left out. A text of an image comes with
 * what secrets are called: it gets none, and a warning says so. One of the site may have ${NAME:-DEFAULT} too. */
void print_environment(char *text, const struct secrets *secrets);

#endif
