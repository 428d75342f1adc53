/* Find LIBRARY, the directory of the Python packages, and their interpreter. The plugin is LIBRARY/spank_pyxis.so or
 * LIBRARY/plugins/RELEASE/spank_pyxis.so. If no packages are there, LIBRARY is the directory given at build time. */
#include "plugin.h"

#include <dlfcn.h>

#ifndef PENROOT_LIB
#define PENROOT_LIB "/nowhere"
#endif

/* An installation has this directory of versions, and a link to the version in use: enroot_py/base/versions.py. */
#define VERSIONS "/penroot-versions"
#define LINK "/penroot"

enum { MAX_PARENTS = 3 };

static char library_path[PATH_MAX] = PENROOT_LIB;

static bool has_packages(const char *directory)
{
	char helper[PATH_MAX + sizeof("/pyxis_py/__init__.py")];

	(void)snprintf(helper, sizeof(helper), "%s/pyxis_py/__init__.py", directory);
	return access(helper, F_OK) == 0;
}

/* Cut the last name off a path. Returns false if there is none. */
static bool cut(char *path)
{
	char *slash = strrchr(path, '/');

	if (!slash || slash == path)
		return false;
	*slash = '\0';
	return true;
}

/* Run when Slurm loads the plugin: later the links may lead to another version, and a step must not mix versions. */
__attribute__((constructor)) static void find_library(void)
{
	Dl_info self;
	char path[PATH_MAX];

	if (dladdr(library_path, &self) && realpath(self.dli_fname, path)) {
		for (int i = 0; i < MAX_PARENTS && cut(path); i++) {
			if (has_packages(path)) {
				(void)strcpy(library_path, path);
				return;
			}
		}
	}
	if (realpath(PENROOT_LIB, path))
		(void)strcpy(library_path, path);
}

/* If slurmd has loaded a version of the plugin that was then removed, use the current version. This version speaks the same
 * protocol, or reports that its protocol differs. */
static void follow_link(void)
{
	char path[PATH_MAX + sizeof(LINK)], target[PATH_MAX];

	if (has_packages(library_path))
		return;
	(void)strcpy(path, library_path);
	size_t length = cut(path) ? strlen(path) : 0;
	if (length < sizeof(VERSIONS) || strcmp(path + length - strlen(VERSIONS), VERSIONS) != 0)
		return;
	(void)cut(path);
	(void)strcat(path, LINK);
	if (!realpath(path, target))
		return;
	slurm_info("pyxis: %s is gone, and %s is used instead", library_path, target);
	(void)strcpy(library_path, target);
}

/* enroot_py/features/slurm_inside puts the plugin into a container only for srun, sbatch and salloc. Check the plugin's own path,
 * which no variable can change. slurmstepd loads the plugin from another path, on the node. */
bool is_in_container(void)
{
	Dl_info self;

	return dladdr(is_in_container, &self) && has_prefix(self.dli_fname, SLURM_HERE "/");
}

const char *library(void)
{
	if (is_in_container())
		return SLURM_HERE "/penroot";
	follow_link();
	return library_path;
}

const char *interpreter(void)
{
	if (is_in_container())
		return SLURM_HERE "/python3";
#ifdef PENROOT_PYTHON
	return PENROOT_PYTHON;
#else
	static char python[PATH_MAX + sizeof("/python3")];

	(void)snprintf(python, sizeof(python), "%s/python3", library());
	return python;
#endif
}
