"""Run the standard hooks with a directory as the container's root. Hooks read and write only beneath this directory."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from enroot_py.base.errors import HookError
from enroot_py.config import settings
from enroot_py.runtime import hooks
from tests import fakehost


class Box:
    """The root of an image, in which hooks run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "etc").mkdir()

    def write(self, **files: str) -> None:
        """Write files in /etc."""
        for name, text in files.items():
            (self.root / "etc" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / "etc" / name).write_text(text)

    def lines(self, name: str) -> list[str]:
        return (self.root / "etc" / name).read_text().splitlines()

    def names(self, name: str) -> list[str]:
        return [line.split(":")[0] for line in self.lines(name)]

    def context(self, uid: int = 1234, **changes: bool) -> hooks.Context:
        user = pwd.struct_passwd(("me", "x", uid, 1234, "Me", "/home/me", "/bin/zsh"))
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY)
        loaded = settings.load({"HOME": "/home/me", "ENROOT_SYSCONF_PATH": str(self.root)}).replace("test", **changes)
        return hooks.Context(root, "", loaded, {}, hooks.Caller(host={"HOME": "/home/me"}, user=user, group="us"))

    def run(self, hook: str, uid: int = 1234, **changes: bool) -> None:
        fakehost.hook(f"{hook}.py")["run"](self.context(uid, **changes))


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.mark.parity("10-shadow: adds the caller to passwd and group", "10-aptfix")
def test_the_caller_is_in_passwd_before_others(box: Box) -> None:
    """The hook also removes the user _apt."""
    apt = "_apt:x:100:65534::/nonexistent:/usr/sbin/nologin\n"
    box.write(passwd=f"root:x:0:0::/r:/s\nme:x:7:7::/:/\nother:x:1234:1::/:/\n{apt}daemon:x:1:1::/:/\n")
    box.run("10-shadow")
    assert box.names("passwd") == ["root", "nobody", "me", "other", "daemon"]
    assert box.lines("passwd")[2] == "me:x:1234:1234:Me:/home/me:/bin/sh"
    assert (box.root / "home/me").is_dir()


@pytest.mark.parity("10-shadow: adds the caller to passwd and group")
def test_groups_of_the_image_with_the_number_of_the_callers_stay(box: Box) -> None:
    box.write(group="root:x:0:\nwheel:x:0:other\nstaff:x:1234:other\n")
    box.run("10-shadow")
    lines = box.lines("group")
    assert lines[0].startswith("root:x:0") and lines[2].split(":")[2] == "1234"
    assert lines[3:] == ["wheel:x:0:other", "staff:x:1234:other"]


@pytest.mark.parity("10-shadow: adds the caller to shadow and gshadow")
@pytest.mark.security("I8")
def test_users_missing_in_the_shadow_files_are_added(box: Box) -> None:
    lines = ["root:*:19000:0:99999:7:::", "app:!$6$x:19000::::::"]
    box.write(passwd="root:x:0:0::/r:/s\napp:x:7:7::/:/\n", group="app:x:7:\n")
    box.write(shadow="\n".join(lines), gshadow="app:!::\n")
    shadow = box.root / "etc/shadow"
    shadow.chmod(0)  # as in images of Fedora
    box.run("10-shadow")
    assert box.lines("shadow") == [*lines, "nobody:*:::::::", "me:*:::::::"]
    assert shadow.stat().st_mode & 0o777 == 0o600
    assert box.names("gshadow") == ["app", *(name for name in box.names("group") if name != "app")]
    before = shadow.read_bytes()
    box.run("10-shadow")
    assert shadow.read_bytes() == before


@pytest.mark.parity("10-shadow: adds the caller to shadow and gshadow")
def test_an_empty_image_gets_one_root_and_no_shadow_files(box: Box) -> None:
    box.run("10-shadow", uid=0)
    assert not list((box.root / "etc").glob("*shadow*"))
    assert "\n".join(box.lines("passwd")).count(":0:0:") == 1


@pytest.mark.parity("10-localtime")
def test_time_zone_of_the_host(box: Box) -> None:
    if not os.path.islink("/etc/localtime"):
        pytest.skip("this machine has no time zone to hand on")
    (box.root / "etc/localtime").symlink_to("/usr/share/zoneinfo/Nowhere/None")
    box.run("10-localtime")
    assert (box.root / "etc/localtime").read_bytes() == Path("/etc/localtime").read_bytes()


def test_links_of_the_image_do_not_lead_out(box: Box, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (box.root / "etc").rmdir()
    (box.root / "etc").symlink_to(outside)
    context = box.context()
    context.write("/etc/passwd", b"x")
    assert list(outside.iterdir()) == []
    assert context.read("/etc/passwd") == b"x"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def run(context):\n    open('/no/such/file')\n", r"10-x\.py.*no/such/file"),
        ("x = 1\n", "no function run"),
    ],
)
def test_a_broken_hook_is_named(box: Box, text: str, why: str) -> None:
    (box.root / "10-x.py").write_text(text)
    host = {"HOME": "/home/me", "ENROOT_SYSCONF_PATH": str(box.root / "etc")}
    with pytest.raises(HookError, match=why):
        hooks.run(hooks.load(settings.load(host), host, [str(box.root)]), box.context())


@pytest.mark.parity("10-shadow: makes the home directory and mail file")
def test_home_is_made_as_the_image_configures_it(box: Box) -> None:
    files = {
        "skel/.bashrc": "bashrc",
        "skel/.config/deep/file": "deep",
        "login.defs": "# UMASK 000\nUMASK\t027\nMAIL_DIR /var/spool/post\n",
        "default/useradd": "SHELL=/bin/fish\nCREATE_MAIL_SPOOL=yes\n",
    }
    box.write(**files)
    (box.root / "etc/skel/link").symlink_to(".bashrc")
    box.run("10-shadow")
    home = box.root / "home/me"
    assert home.stat().st_mode & 0o777 == 0o750
    assert (home / ".bashrc").read_text() == (home / "link").read_text() == "bashrc"
    assert (home / ".config/deep/file").read_text() == "deep"
    assert (box.root / "var/spool/post/me").read_bytes() == b""
    assert box.lines("passwd")[2].endswith(":/bin/fish")


@pytest.mark.parity("10-shadow: makes the home directory and mail file")
def test_home_is_not_made_if_the_image_forbids_it(box: Box) -> None:
    box.write(**{"login.defs": "CREATE_HOME no\n"})
    box.run("10-shadow")
    assert not (box.root / "home").exists() and not (box.root / "var").exists()


@pytest.mark.parity("10-aptfix")
@pytest.mark.parametrize(("debian", "root"), [(True, True), (True, False), (False, True)])
def test_apt_stays_root(box: Box, debian: bool, root: bool) -> None:
    if debian:
        box.write(debian_version="12\n")
    box.run("10-aptfix", remap_root=root)
    path = box.root / "etc/apt/apt.conf.d/enroot"
    assert path.exists() == (debian and root)
    assert not path.exists() or path.read_text() == 'APT::Sandbox::User "root";\n'
