"""Build the cffi API module enroot_py.base._linux from the headers beside this file."""

from __future__ import annotations

import os
import sys

import cffi

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from enroot_py.base.filter import c_filter  # noqa: E402

ffibuilder = cffi.FFI()
ffibuilder.cdef(
    """
    int unshare(int flags);
    int setns(int fd, int nstype);
    int mount(const char *source, const char *target, const char *fstype, unsigned long flags, const char *data);
    int umount2(const char *target, int flags);
    int linux_pidfd_getfd(int pidfd, int fd);
    int linux_open_tree(int dirfd, const char *path, unsigned int flags);
    int linux_move_mount(int from_dirfd, const char *from, int to_dirfd, const char *to, unsigned int flags);
    int linux_fsopen(const char *fstype, unsigned int flags);
    int linux_fsconfig(int fd, unsigned int command, const char *key, const char *value, int aux);
    int linux_fsmount(int fd, unsigned int flags, unsigned int attributes);
    int linux_mount_setattr(int dirfd, const char *path, unsigned int flags, uint64_t set, uint64_t clear,
                            uint64_t propagation);
    int linux_openat2(int dirfd, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve);
    int renameat2(int old_dirfd, const char *old, int new_dirfd, const char *new, unsigned int flags);
    int linux_clone3(uint64_t flags);
    int linux_pivot_root(const char *new_root, const char *put_old);
    int linux_close_range(unsigned int first, unsigned int last, unsigned int flags);
    int syncfs(int fd);
    int flock(int fd, int operation);
    int linux_prctl(int operation, unsigned long a, unsigned long b, unsigned long c, unsigned long d);
    int linux_capset(uint64_t effective, uint64_t permitted, uint64_t inheritable);
    int linux_capget_permitted(uint64_t *permitted);
    int penroot_drop_capabilities(void);
    int penroot_install_filter(void);
    int penroot_withhold_descriptors(void);
    int penroot_renew_keyring(void);
    int penroot_digest_format(const char *path, char *word);
    int penroot_start_background(const char *path, char *const argv[], const int fds[], int count,
                                 int delay_ms, int orphan);
    int penroot_fork_below(const char *path, const char *name, const char *word, int fd);
    """
)
ffibuilder.set_source(
    "enroot_py.base._linux",
    f'{c_filter()}#include "seccomp.h"\n#include "background.h"\n#include "guard.h"\n#include "digest.h"'
    "\n#include <sys/file.h>",
    include_dirs=[HERE],
    depends=[os.path.join(HERE, f"{name}.h") for name in ("linux", "seccomp", "background", "guard", "digest")],
    define_macros=[("_GNU_SOURCE", None)],
    extra_compile_args=["-O2", "-Wall", "-Wextra", "-Werror"],
)

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=os.path.dirname(HERE), verbose=True)
