/* In srun, salloc and sbatch: a mistake ends them before anything is queued. For srun the process goes on
 * meanwhile: it resolves a tag, and what it found is there when the allocation is. Of several components of
 * a heterogeneous job only one would get it then, so there srun waits. */
#define _GNU_SOURCE
#include "plugin.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct coprocess resolving = COPROCESS_NONE;

/* What all nodes of the step are to know goes to them with the environment of its tasks. */
int take_resolved(void)
{
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = resolving;

	resolving = COPROCESS_NONE;
	if (process.socket < 0)
		return 0;
	bool answered = listen_to(&process, &answer) == ANSWERED;
	close_fd(&process.socket);
	(void)coprocess_wait(&process);
	/* Without it each node resolves the tag, and says so. */
	const char *resolved = answered ? answer_get(&answer, "resolved") : NULL;
	if (resolved && setenv(RESOLVED, resolved, 1) < 0)
		return fail("cannot set " RESOLVED ": %s", strerror(errno));
	return 0;
}

int check(const char *context)
{
	static bool checked;
	char cwd[PATH_MAX];
	cleanup(request_free) struct request request = { 0 };
	cleanup(answer_free) struct answer answer = { 0 };
	cleanup(coprocess_free) struct coprocess process = COPROCESS_NONE;

	/* An srun in a container may have the plugin and no more of us. The nodes check it all again. */
	if (access(PENROOT_PYTHON, X_OK) < 0 || access(PENROOT_LIB "/pyxis_py/helper.py", R_OK) < 0) {
		slurm_debug("pyxis: nothing is checked here: " PENROOT_PYTHON " or " PENROOT_LIB ": %s", strerror(errno));
		return 0;
	}
	begin_request(&request, "check", context, getcwd(cwd, sizeof(cwd)) ? cwd : "");
	/* It is of a step around this one; but Slurm comes here once for each component, and what the first has found
	 * holds for all. */
	if (!checked)
		(void)unsetenv(RESOLVED);
	checked = true;
	add_environ(&request, environ, true);
	request_add(&request, "optind", "%d", optind);
	if (coprocess_start(&process, "check", -1, NULL, false) < 0)
		return fail("cannot start " PENROOT_PYTHON ": %s", strerror(errno));
	int rc = ask(&process, &request, &answer);
	const char *later = rc == ANSWERED ? answer_get(&answer, "later") : NULL;
	if (later) {
		resolving = process;
		process = COPROCESS_NONE;
		return *later ? take_resolved() : 0;
	}
	close_fd(&process.socket);
	(void)coprocess_wait(&process);
	return rc;
}
