/* Where the packages and their interpreter are: around the plugin, as LIBRARY/spank_pyxis.so or
 * LIBRARY/plugins/RELEASE/spank_pyxis.so, or else where the build was told. */
#include "plugin.h"

#include <dlfcn.h>

#ifndef PENROOT_LIB
#define PENROOT_LIB "/nowhere"
#endif

/* Of an installation this is a directory, and a link to the one of them that is in use: enroot_py/base/versions.py. */
#define VERSIONS "/penroot-versions"
#define LINK "/penroot"

enum { DIRECTORIES = 3 };

static char place[PATH_MAX] = PENROOT_LIB;

static bool has_packages(const char *directory)
{
	char helper[PATH_MAX + sizeof("/pyxis_py/__init__.py")];

	(void)snprintf(helper, sizeof(helper), "%s/pyxis_py/__init__.py", directory);
	return access(helper, F_OK) == 0;
}

/* Cut the last name off a path; false where there is none. */
static bool cut(char *path)
{
	char *slash = strrchr(path, '/');

	if (!slash || slash == path)
		return false;
	*slash = '\0';
	return true;
}

/* As Slurm loads us: later the links may lead to another version, and all of a step is of one. */
__attribute__((constructor)) static void find_place(void)
{
	Dl_info ours;
	char path[PATH_MAX];

	if (dladdr(place, &ours) && realpath(ours.dli_fname, path)) {
		for (int i = 0; i < DIRECTORIES && cut(path); i++) {
			if (has_packages(path)) {
				(void)strcpy(place, path);
				return;
			}
		}
	}
	if (realpath(PENROOT_LIB, path))
		(void)strcpy(place, path);
}

/* A slurmd may have had us for longer than our version was kept: what is in use now talks as we do, or says that not. */
static void follow_link(void)
{
	char path[PATH_MAX + sizeof(LINK)];

	if (has_packages(place))
		return;
	(void)strcpy(path, place);
	size_t length = cut(path) ? strlen(path) : 0;
	if (length < sizeof(VERSIONS) || strcmp(path + length - strlen(VERSIONS), VERSIONS) != 0)
		return;
	(void)cut(path);
	(void)strcat(path, LINK);
	char found[PATH_MAX];
	if (!realpath(path, found))
		return;
	slurm_info("pyxis: %s is gone, and %s in its place", place, found);
	(void)strcpy(place, found);
}

/* In a container the plugin is where enroot_py/features/slurm_inside has put it, for srun and its like alone: nothing that a
 * variable could say. slurmstepd has loaded it from where it is on the node. */
bool is_brought(void)
{
	static const char here[] = SLURM_HERE "/";
	Dl_info self;

	return dladdr(is_brought, &self) && strncmp(self.dli_fname, here, sizeof(here) - 1) == 0;
}

const char *library(void)
{
	if (is_brought())
		return SLURM_HERE "/penroot";
	follow_link();
	return place;
}

const char *interpreter(void)
{
#ifdef PENROOT_PYTHON
	return is_brought() ? SLURM_HERE "/python3" : PENROOT_PYTHON;
#else
	static char python[PATH_MAX + sizeof("/python3")];

	if (is_brought())
		return SLURM_HERE "/python3";
	(void)snprintf(python, sizeof(python), "%s/python3", library());
	return python;
#endif
}
