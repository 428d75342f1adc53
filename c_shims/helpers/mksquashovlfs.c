/* penroot-mksquashovlfs: write what an overlay of directories shows to a squashfs image, with mksquashfs(1).
 *
 * The first directory is on top. An ordinary user is root of a user namespace
 * meanwhile, so that every file is readable; MOUNTPOINT, /mnt, is a directory
 * to mount upon in a mount namespace of our own.
 */
#include "common.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	const char *mountpoint = getenv("MOUNTPOINT");
	bool root = geteuid() == 0;

	if (argc < 3) {
		printf("Usage: %s DIR[:DIR...] IMAGE [mksquashfs options]\n", program_invocation_short_name);
		return EXIT_SUCCESS;
	}
	if (!mountpoint)
		mountpoint = "/mnt";
	if (*mountpoint != '/')
		errx(EXIT_FAILURE, "MOUNTPOINT must be an absolute path, not %s", mountpoint);
	if (!root)
		enter_user(0, 0);
	enter_namespaces(CLONE_NEWNS);
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		err(EXIT_FAILURE, "cannot detach mounts from the host's");
	if (strchr(argv[1], ':')) {
		AUTO_FREE data = text("lowerdir=%s%s", argv[1], root ? "" : ",userxattr");

		if (mount("overlay", mountpoint, "overlay", MS_RDONLY, data) < 0)
			err(EXIT_FAILURE, "cannot mount an overlay of %s", argv[1]);
	} else if (mount(argv[1], mountpoint, NULL, MS_BIND, NULL) < 0) {
		err(EXIT_FAILURE, "cannot mount %s", argv[1]); /* an overlay has at least two */
	}
	argv[0] = "mksquashfs";
	argv[1] = (char *)mountpoint;
	execvp(argv[0], argv);
	err(errno == ENOENT ? 127 : 126, "cannot run mksquashfs");
}
