"""Users of directory services. Their names, GECOS fields and homes may not fit into a line of passwd(5)."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

from tests.kernel.conftest import PREFIX, User, require
from tests.kernel.test_mounts import fstab

# A module for nsswitch.conf(5). It knows one user. Variables hold the fields of the user's entry in passwd.
MODULE = r"""
#include <grp.h>
#include <nss.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>

#define NUMBER atoi(getenv("NSS_UID"))

enum nss_status _nss_one_getpwuid_r(uid_t uid, struct passwd *entry, char *buffer, size_t size, int *error)
{
	(void)buffer, (void)size, (void)error;
	*entry = (struct passwd){.pw_name = getenv("NSS_NAME"), .pw_passwd = "x", .pw_uid = NUMBER, .pw_gid = NUMBER,
		.pw_gecos = getenv("NSS_GECOS"), .pw_dir = getenv("NSS_HOME"), .pw_shell = getenv("NSS_SHELL")};
	return (int)uid == NUMBER ? NSS_STATUS_SUCCESS : NSS_STATUS_NOTFOUND;
}

enum nss_status _nss_one_getgrgid_r(gid_t gid, struct group *entry, char *buffer, size_t size, int *error)
{
	static char *nobody[1];

	(void)buffer, (void)size, (void)error;
	*entry = (struct group){.gr_name = getenv("NSS_GROUP"), .gr_passwd = "x", .gr_gid = NUMBER, .gr_mem = nobody};
	return (int)gid == NUMBER ? NSS_STATUS_SUCCESS : NSS_STATUS_NOTFOUND;
}
"""
SHOW = 'grep ":$(id -u):" /etc/passwd; grep ":$(id -g):" /etc/group; echo "$HOME|$USER|$SHELL"; cd; pwd'


class Directory:
    """A directory service that knows only ``user``. ``fields`` are the fields of the user's entry in passwd."""

    def __init__(self, user: User) -> None:
        require(os.geteuid() == 0, "only root can put nsswitch.conf in place")
        require(shutil.which("gcc") is not None, "gcc is not installed")
        self.user = user
        self.library = user.home / "nss"
        self.library.mkdir(mode=0o755)
        (self.library / "one.c").write_text(MODULE)
        command = ["gcc", "-shared", "-fPIC", "-o", self.library / "libnss_one.so.2", self.library / "one.c"]
        subprocess.run(command, check=True)
        (self.library / "nsswitch.conf").write_text("passwd: files one\ngroup: files one\n")
        self.fields = {"NAME": "ace@corp.example", "GECOS": "", "HOME": str(user.home)}
        self.fields |= {"SHELL": "/bin/sh", "GROUP": "all"}

    def run(self, *command: str, status: int = 0, env: dict[str, str] | None = None) -> str:
        """Run a command as the user. Return its stdout, or its stderr if ``status`` is not 0."""
        fields = {f"NSS_{name}": value for name, value in self.fields.items()}
        variables = {"HOME": self.fields["HOME"], "LD_LIBRARY_PATH": str(self.library), "NSS_UID": str(self.user.uid)}
        setup = f"mount --bind {self.library}/nsswitch.conf /etc/nsswitch.conf"
        prefix = ("unshare", "--mount", "sh", "-c", f'{setup} && exec "$@"', "sh")
        done = self.user.run(*command, env={**fields, **variables, **(env or {})}, prefix=prefix, status=status)
        assert "Traceback" not in done.stderr
        return done.stdout if status == 0 else done.stderr

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> list[str]:
        return self.run(f"{PREFIX}/bin/penroot", "start", *arguments, env=env).splitlines()

    def home(self, name: str) -> str:
        home = self.user.home / name
        home.mkdir()
        self.user.own(home)
        self.fields["HOME"] = str(home)
        return str(home)


@pytest.fixture
def directory(user: User, rootfs: pathlib.Path) -> Directory:
    return Directory(user)


@pytest.mark.parity("10-shadow, 10-home")
def test_gecos_with_separators_leaves_seven_fields(directory: Directory) -> None:
    directory.fields.update(GECOS="A: B, Room: 1\nC", GROUP="domain users, x: y")
    home, uid = directory.fields["HOME"], directory.user.uid
    assert directory.start("box", "sh", "-c", SHOW) == [
        f"ace@corp.example:x:{uid}:{uid}:A  B, Room  1 C:{home}:/bin/sh",
        f"domain users, x  y:x:{uid}:",
        f"{home}|ace@corp.example|/bin/sh",
        home,
    ]


@pytest.mark.parity("10-shadow, 10-home")
@pytest.mark.parametrize("name", ["CORP\\ace", "ace o'neil", "a,b", "é@corp"])
def test_user_name_of_a_directory_service(directory: Directory, name: str) -> None:
    directory.fields["NAME"] = name
    lines = directory.start("box", "sh", "-c", SHOW)
    assert lines[0].startswith(f"{name}:x:{directory.user.uid}:")
    assert f"|{name}|" in lines[2]


@pytest.mark.parity("10-shadow, 10-home")
@pytest.mark.parametrize("name", ["a b", "a,b", "a\\b", "a\\040b", "$HOME", "é", "a:b"])
def test_home_directory_of_any_name(directory: Directory, name: str) -> None:
    home, uid = directory.home(name), directory.user.uid
    lines = directory.start("box", "sh", "-c", SHOW)
    assert lines[0].split(":")[5:] == ["/" if ":" in name else home, "/bin/sh"]
    assert lines[2:] == [f"{home}|ace@corp.example|/bin/sh", home]
    with_home = {"ENROOT_MOUNT_HOME": "yes"}
    directory.start("box", "sh", "-c", 'echo "$HOME" > "$HOME/made"', env=with_home)
    assert pathlib.Path(home, "made").read_text() == f"{home}\n"
    assert directory.start("--root", "box", "cat", "/root/made", env=with_home) == [home]
    # A line of the user's fstab can mount such a home too.
    fstab(directory.user, "${HOME} /mine none x-create=dir,bind\n")
    assert directory.start("box", "cat", "/mine/made") == [home]
    assert uid == os.stat(f"{home}/made").st_uid


@pytest.mark.parity("10-shadow, 10-home")
def test_containers_and_images_in_a_home_of_an_odd_name(directory: Directory) -> None:
    home = directory.home("a b,c:d\\e@f")
    env = dict.fromkeys(("ENROOT_DATA_PATH", "ENROOT_CACHE_PATH", "ENROOT_CONFIG_PATH", "ENROOT_RUNTIME_PATH"), "")
    penroot = f"{PREFIX}/bin/penroot"
    directory.run(penroot, "export", "-o", f"{home}/image.sqsh", "box")
    directory.run(penroot, "create", "--name", "own", f"{home}/image.sqsh", env=env)
    assert directory.start("--rw", "own", "sh", "-c", "echo 1 > /kept; cat /kept", env=env) == ["1"]
    assert directory.start("own", "cat", "/kept", env=env) == ["1"]
    assert directory.start(f"{home}/image.sqsh", "echo", "served", env=env) == ["served"]
    assert directory.run(penroot, "list", env=env) == "own\n"
    directory.run(penroot, "remove", "-f", "own", env=env)
    directory.run(penroot, "bundle", "-o", f"{home}/image.run", f"{home}/image.sqsh")
    show = directory.run(f"{home}/image.run", "sh", "-c", 'ls "$HOME/image.run"', env={**env, "ENROOT_MOUNT_HOME": "y"})
    assert show == f"{home}/image.run\n"


@pytest.mark.parity("10-shadow, 10-home")
def test_user_without_home_and_shell(directory: Directory) -> None:
    directory.fields.update(HOME="", SHELL="")
    uid = directory.user.uid
    lines = directory.start("box", "sh", "-c", SHOW, env={"HOME": str(directory.user.home)})
    assert lines[0] == f"ace@corp.example:x:{uid}:{uid}::/:/bin/sh"
    assert lines[2:] == ["/|ace@corp.example|/bin/sh", "/"]


@pytest.mark.parametrize("name", ["a b", "a:b"])
def test_hint_explains_a_separator_in_a_path(directory: Directory, name: str) -> None:
    home = directory.home(name)
    penroot = (f"{PREFIX}/bin/penroot", "start", "--mount")
    for target in ("/mnt", "/mnt:none:x-create=dir,bind"):
        stderr = directory.run(*penroot, f"{home}:{target}", "box", "true", status=1)
        assert "a space in a path is \\040, a colon \\072" in stderr
    quoted = home.replace(" ", "\\040").replace(":", "\\072")
    pathlib.Path(home, "file").write_text("here\n")
    assert directory.run(*penroot, f"{quoted}:/mnt", "box", "cat", "/mnt/file") == "here\n"
