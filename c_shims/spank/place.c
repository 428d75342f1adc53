/* Where the packages and their interpreter are: as the build was told, or around a plugin that was built before that was
 * known, as LIBRARY/plugins/RELEASE/spank_pyxis.so, which LIBRARY/spank_pyxis.so is a link to. */
#define _GNU_SOURCE
#include "plugin.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "brought.h"

#ifndef PENROOT_LIB

enum { DIRECTORIES = 3 };

static char place[PATH_MAX] = "/nowhere";
static char python[PATH_MAX + sizeof("/python3")] = "/nowhere/python3";

#define PENROOT_LIB    place
#define PENROOT_PYTHON python

/* As Slurm loads us: later the link may lead to another one. */
__attribute__((constructor)) static void find_place(void)
{
	Dl_info ours;
	char path[PATH_MAX];

	if (!dladdr(place, &ours) || !realpath(ours.dli_fname, path))
		return;
	for (int i = 0; i < DIRECTORIES; i++) {
		char *slash = strrchr(path, '/');
		if (!slash || slash == path)
			return;
		*slash = '\0';
	}
	(void)snprintf(place, sizeof(place), "%s", path);
	(void)snprintf(python, sizeof(python), "%s/python3", path);
}

#endif

/* In a container the plugin is where enroot_py/runtime/slurm.py has put it, for srun and its like alone: nothing that a
 * variable could say. slurmstepd has loaded it from where it is on the node. */
bool is_brought(void)
{
	static const char here[] = SLURM_HERE "/";
	Dl_info self;

	return dladdr(is_brought, &self) && strncmp(self.dli_fname, here, sizeof(here) - 1) == 0;
}

const char *interpreter(void)
{
	return is_brought() ? SLURM_HERE "/python3" : PENROOT_PYTHON;
}

const char *library(void)
{
	return is_brought() ? SLURM_HERE "/penroot" : PENROOT_LIB;
}
