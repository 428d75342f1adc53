"""The standard hooks on a directory that stands for a root: reading and writing beneath it is all they do."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import pwd
from collections.abc import Callable
from types import ModuleType

import pytest

from enroot_py.base.errors import HookError
from enroot_py.config import settings
from enroot_py.runtime import hooks

HOOKS = pathlib.Path(__file__).parent.parent.parent / "hooks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def context(tmp_path: pathlib.Path) -> Callable[..., hooks.Context]:
    def make(uid: int = 1234) -> hooks.Context:
        user = pwd.struct_passwd(("me", "x", uid, 1234, "Me", "/home/me", "/bin/zsh"))
        root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
        loaded = settings.load({"HOME": "/home/me", "ENROOT_SYSCONF_PATH": str(tmp_path)})
        return hooks.Context(root, "", loaded, {}, hooks.Caller(host={"HOME": "/home/me"}, user=user))

    return make


@pytest.mark.parity("10-shadow: passwd")
def test_the_caller_is_in_passwd_before_others(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/r:/s\nme:x:7:7::/:/\nother:x:1234:1::/:/\ndaemon:x:1:1::/:/\n")
    load("10-shadow").run(context())
    lines = (tmp_path / "etc/passwd").read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == ["root", "nobody", "me", "other", "daemon"]
    assert lines[2] == "me:x:1234:1234:Me:/home/me:/bin/sh"
    assert (tmp_path / "home/me").is_dir()


@pytest.mark.parity("10-shadow: passwd")
def test_groups_of_the_image_with_the_number_of_the_callers_stay(
    context: Callable[..., hooks.Context], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text("root:x:0:\nwheel:x:0:other\nstaff:x:1234:other\n")
    load("10-shadow").run(context())
    lines = (tmp_path / "etc/group").read_text().splitlines()
    assert lines[0].startswith("root:x:0")
    assert lines[2].split(":")[2] == "1234"
    assert lines[3:] == ["wheel:x:0:other", "staff:x:1234:other"]


@pytest.mark.parity("10-shadow: shadow")
@pytest.mark.security("I8")
def test_who_is_in_no_shadow_file_is_added(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    (tmp_path / "etc").mkdir()
    for name, text in {
        "passwd": "root:x:0:0::/r:/s\napp:x:7:7::/:/\n",
        "shadow": "root:*:19000:0:99999:7:::\napp:!$6$x:19000::::::",
        "group": "app:x:7:\n",
        "gshadow": "app:!::\n",
    }.items():
        (tmp_path / "etc" / name).write_text(text)
    (tmp_path / "etc/shadow").chmod(0)  # as in images of Fedora; root and the owner of the namespace read it
    load("10-shadow").run(context())
    assert (tmp_path / "etc/shadow").read_text().splitlines() == [
        "root:*:19000:0:99999:7:::",
        "app:!$6$x:19000::::::",
        "nobody:*:::::::",
        "me:*:::::::",
    ]
    assert (tmp_path / "etc/shadow").stat().st_mode & 0o777 == 0o600
    names = [line.split(":")[0] for line in (tmp_path / "etc/group").read_text().splitlines()]
    assert [line.split(":")[0] for line in (tmp_path / "etc/gshadow").read_text().splitlines()] == [
        "app",
        *(name for name in names if name != "app"),
    ]
    before = (tmp_path / "etc/shadow").read_bytes()
    load("10-shadow").run(context())
    assert (tmp_path / "etc/shadow").read_bytes() == before


@pytest.mark.parity("10-shadow: shadow")
def test_an_image_without_shadow_files_gets_none(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    load("10-shadow").run(context())
    assert not list((tmp_path / "etc").glob("*shadow*"))


@pytest.mark.parity("10-aptfix")
def test_apt_has_no_user_of_its_own(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("_apt:x:100:65534::/nonexistent:/usr/sbin/nologin\n")
    load("10-shadow").run(context())
    assert "_apt" not in (tmp_path / "etc/passwd").read_text()


def test_root_is_not_listed_twice(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    load("10-shadow").run(context(uid=0))
    assert (tmp_path / "etc/passwd").read_text().count(":0:0:") == 1


@pytest.mark.parity("10-localtime")
def test_time_zone_of_the_host(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    if not os.path.islink("/etc/localtime"):
        pytest.skip("this machine has no time zone to hand on")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/localtime").symlink_to("/usr/share/zoneinfo/Nowhere/None")
    load("10-localtime").run(context())
    assert (tmp_path / "etc/localtime").read_bytes() == pathlib.Path("/etc/localtime").read_bytes()


def test_links_of_the_image_do_not_lead_out(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (tmp_path / "etc").symlink_to(outside)
    made = context()
    made.write("/etc/passwd", b"x")
    assert list(outside.iterdir()) == []
    assert made.read("/etc/passwd") == b"x"


def load_all(directory: pathlib.Path) -> list[hooks.Hook]:
    host = {"HOME": "/home/me", "ENROOT_SYSCONF_PATH": str(directory / "etc")}
    return hooks.load(settings.load(host), host, [str(directory)])


def test_a_broken_hook_is_named(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    (tmp_path / "10-x.py").write_text("def run(context):\n    open('/no/such/file')\n")
    with pytest.raises(HookError, match=r"10-x\.py.*no/such/file"):
        hooks.run(load_all(tmp_path), context())
    (tmp_path / "10-x.py").write_text("x = 1\n")
    with pytest.raises(HookError, match="no function run"):
        hooks.run(load_all(tmp_path), context())


@pytest.mark.parity("10-shadow: home")
def test_home_is_made_as_the_image_says(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    for name, text in {
        "etc/skel/.bashrc": "bashrc",
        "etc/skel/.config/deep/file": "deep",
        "etc/login.defs": "# UMASK 000\nUMASK\t027\nMAIL_DIR /var/spool/post\n",
        "etc/default/useradd": "SHELL=/bin/fish\nCREATE_MAIL_SPOOL=yes\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "etc/skel/link").symlink_to(".bashrc")
    load("10-shadow").run(context())
    home = tmp_path / "home/me"
    assert home.stat().st_mode & 0o777 == 0o750
    assert (home / ".bashrc").read_text() == (home / "link").read_text() == "bashrc"
    assert (home / ".config/deep/file").read_text() == "deep"
    assert (tmp_path / "var/spool/post/me").read_bytes() == b""
    assert (tmp_path / "etc/passwd").read_text().splitlines()[2].endswith(":/bin/fish")


@pytest.mark.parity("10-shadow: home")
def test_no_home_where_the_image_wants_none(context: Callable[..., hooks.Context], tmp_path: pathlib.Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/login.defs").write_text("CREATE_HOME no\n")
    load("10-shadow").run(context())
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "var").exists()


@pytest.mark.parity("10-aptfix")
@pytest.mark.parametrize(("debian", "root"), [(True, True), (True, False), (False, True)])
def test_apt_stays_root(
    context: Callable[..., hooks.Context], tmp_path: pathlib.Path, debian: bool, root: bool
) -> None:
    (tmp_path / "etc").mkdir()
    if debian:
        (tmp_path / "etc/debian_version").write_text("12\n")
    here = context()
    here.settings = here.settings.replace("test", remap_root=root)
    load("10-aptfix").run(here)
    path = tmp_path / "etc/apt/apt.conf.d/enroot"
    assert path.exists() == (debian and root)
    assert not path.exists() or path.read_text() == 'APT::Sandbox::User "root";\n'
