/* penroot-aufs2ovlfs: turn the whiteouts of an unpacked OCI layer into those of overlayfs, in place.
 *
 * ".wh.NAME" hides NAME of the layers below: a character device 0:0.
 * ".wh..wh..opq" hides all of its directory below: an xattr "overlay.opaque".
 * Sources: OCI image specification, "Whiteouts"; the kernel's
 * filesystems/overlayfs, "whiteouts and opaque directories".
 */
#include "common.h"

#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char prefix[] = ".wh.", opaque[] = ".wh..wh..opq";

/* overlayfs reads trusted.* for root, and user.* where a user namespace mounts it with userxattr. */
static void mark_opaque(int directory, const char *path)
{
	bool trusted = fsetxattr(directory, "trusted.overlay.opaque", "y", 1, 0) == 0;

	if ((!trusted || getenv("ENROOT_SET_USER_XATTRS")) && fsetxattr(directory, "user.overlay.opaque", "y", 1, 0) < 0)
		err(EXIT_FAILURE, "cannot mark %s as opaque", path);
}

static void convert(int directory, const char *path, dev_t device)
{
	int fd = fcntl(directory, F_DUPFD_CLOEXEC, 0);
	CLEANUP(close_dir) DIR *entries = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *entry;

	if (!entries)
		err(EXIT_FAILURE, "cannot read %s", path);
	while ((entry = readdir(entries))) {
		const char *name = entry->d_name;
		AUTO_FREE inner = text("%s/%s", path, name);
		AUTO_CLOSE next = -1;
		struct stat is;

		if (!strcmp(name, ".") || !strcmp(name, "..") || fstatat(directory, name, &is, AT_SYMLINK_NOFOLLOW) < 0)
			continue;
		if (!strncmp(name, prefix, strlen(prefix))) {
			const char *hidden = name + strlen(prefix);

			if (!strncmp(hidden, prefix, strlen(prefix)) && strcmp(name, opaque))
				errx(EXIT_FAILURE, "%s is no whiteout of the OCI image format", inner);
			if (!*hidden || !strcmp(hidden, ".") || !strcmp(hidden, ".."))
				errx(EXIT_FAILURE, "%s hides nothing that can be", inner);
			if (unlinkat(directory, name, S_ISDIR(is.st_mode) ? AT_REMOVEDIR : 0) < 0)
				err(EXIT_FAILURE, "cannot remove %s", inner);
			if (!strcmp(name, opaque))
				mark_opaque(directory, path);
			else if (mknodat(directory, hidden, S_IFCHR | 0600, makedev(0, 0)) < 0 && errno != EEXIST)
				err(EXIT_FAILURE, "cannot create the whiteout %s/%s", path, hidden);
			continue; /* EEXIST: the layer itself has a file of that name, which wins */
		}
		if (!S_ISDIR(is.st_mode) || is.st_dev != device)
			continue;
		next = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (next < 0 && errno == EACCES && fchmodat(directory, name, is.st_mode | 0700, 0) == 0)
			next = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (next < 0)
			err(EXIT_FAILURE, "cannot open %s", inner);
		convert(next, inner, device);
	}
}

int main(int argc, char **argv)
{
	AUTO_CLOSE fd = -1;
	struct stat is;

	if (argc < 2 || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
		printf("Usage: %s DIR\n\nTurn AUFS whiteouts of an unpacked layer into those of overlayfs.\n",
		       program_invocation_short_name);
		return EXIT_SUCCESS;
	}
	if (argc > 2 || argv[1][0] == '-')
		errx(EXIT_FAILURE, "one directory, and no options: %s --help", program_invocation_short_name);
	fd = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &is) < 0)
		err(EXIT_FAILURE, "cannot open %s", argv[1]);
	convert(fd, argv[1], is.st_dev);
	return EXIT_SUCCESS;
}
