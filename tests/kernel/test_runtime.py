"""What programs of all kinds find in a container, on the real kernel as an ordinary user."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import threading

import pytest

from tests.kernel.conftest import User, require

CALLS = r"""
#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
int main(void)
{
    FILE *f = fopen("/tmp/file", "w");
    if (!f || fclose(f)) return 2;
    gid_t group = 7;
    printf("%d %d %d %d %d %d\n", chown("/tmp/file", 12, 34), lchown("/tmp/file", 12, 34), setgroups(1, &group),
           setresgid(5, 5, 5), setresuid(5, 5, 5), (int)sizeof(long));
    return 0;
}
"""


@pytest.mark.parametrize("bits", [32, 64])
def test_32_bit_program(user: User, rootfs: pathlib.Path, bits: int) -> None:
    """The filter answers the calls of both, each by its own numbers."""
    compiler = shutil.which("gcc")
    require(compiler, "gcc is not installed")
    source = user.home / "calls.c"
    source.write_text(CALLS)
    command = ["gcc", f"-m{bits}", "-static", "-o", str(rootfs / "bin/calls"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"gcc -m{bits} makes no static program: gcc-multilib is not installed")
    assert user.start("box", "calls") == f"0 0 0 0 0 {bits // 8}\n"
    assert user.start("--root", "box", "calls") == f"0 0 0 0 0 {bits // 8}\n"


def test_package_scripts(user: User, rootfs: pathlib.Path) -> None:
    """What maintainer scripts of packages do, in a writable container, as root inside."""
    script = (
        "set -e; mkdir -p /var/lib/thing; touch /var/lib/thing/f; "
        "chown -R 101:102 /var/lib/thing; chgrp 43 /var/lib/thing/f; "
        "chmod 2755 /var/lib/thing/f; chmod 4755 /bin/busybox; "
        "echo 'thing:x:101:102::/:/bin/false' > /etc/passwd.new; cat /etc/passwd >> /etc/passwd.new; "
        "mv /etc/passwd.new /etc/passwd; ln /etc/passwd /etc/passwd-; mv /opt/work /opt/worked; rmdir /opt/worked; "
        "mkdir /opt/work; ln -s a /opt/link; rm -r /usr/bin; echo done"
    )
    names = ("chgrp", "chmod", "mv", "rmdir")
    for name in names:
        (rootfs / "bin" / name).symlink_to("busybox")
    assert user.start("--root", "--rw", "box", "sh", "-c", script) == "done\n"


def test_options_behind_the_name(user: User, rootfs: pathlib.Path) -> None:
    done = user.penroot("start", "box", "--env", "X=1", "env", status=127)
    assert "--env" in done.stderr
    assert "options go before it" in done.stderr


def test_list_while_processes_vanish(user: User, rootfs: pathlib.Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            user.start("box", "true")

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            user.penroot("list", "-f")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_limits_and_priorities_are_the_callers(user: User, rootfs: pathlib.Path) -> None:
    prefix = ("prlimit", "--nofile=123:456", "--stack=1048576:2097152", "nice", "-n", "5")
    out = user.start(
        "box", "sh", "-c", "ulimit -n; ulimit -Hn; ulimit -s; cut -d' ' -f19 /proc/self/stat", prefix=prefix
    )
    assert out.split() == ["123", "456", "1024", "5"]


def test_signals_that_python_ignores_are_not_ignored(user: User, rootfs: pathlib.Path) -> None:
    question = ("grep", "SigIgn", "/proc/self/status")
    assert user.start("box", *question) == user.run(*question).stdout


def test_no_new_privileges_and_no_capabilities(user: User, rootfs: pathlib.Path) -> None:
    out = user.start("box", "grep", "-E", "^(NoNewPrivs|Cap|Seccomp:)", "/proc/self/status")
    fields = {line.split(":")[0]: line.split()[1] for line in out.splitlines()}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert all(
        int(value, 16) == 0 for name, value in fields.items() if name in ("CapPrm", "CapEff", "CapInh", "CapAmb")
    )


def test_descriptors_of_the_caller_reach_the_program_and_ours_do_not(user: User, rootfs: pathlib.Path) -> None:
    out = user.run("sh", "-c", "exec 7</etc/hostname; penroot start box sh -c 'ls /proc/self/fd; cat <&7'").stdout
    name = pathlib.Path("/etc/hostname").read_text().strip()
    assert out.split()[-1] == name
    # 0, 1, 2, the caller's, and that of the directory which ls reads
    assert set(out.split()[:-1]) == {"0", "1", "2", "7", "3"}


def test_a_user_beyond_2_31(user: User, rootfs: pathlib.Path) -> None:
    require(os.geteuid() == 0, "needs root to become another user")
    uid = 2**31 + 5
    subprocess.run(["chown", "-R", f"{uid}:{uid}", str(user.home)], check=True)
    command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "penroot", "start", "box", "id", "-u"]
    done = subprocess.run(command, env=user.environ, capture_output=True, text=True, check=False)
    assert done.stdout == f"{uid}\n", done.stderr
