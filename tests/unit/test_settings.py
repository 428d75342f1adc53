import os
import pathlib

import pytest

from enroot_py import settings
from enroot_py.errors import ConfigError


@pytest.fixture
def environ(tmp_path: pathlib.Path) -> dict[str, str]:
    (tmp_path / "etc").mkdir()
    return {"HOME": "/home/x", "ENROOT_SYSCONF_PATH": str(tmp_path / "etc")}


def conf(environ: dict[str, str], text: str, name: str = "enroot.conf") -> None:
    path = pathlib.Path(environ["ENROOT_SYSCONF_PATH"], name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_defaults_follow_xdg(environ: dict[str, str]) -> None:
    assert settings.load(environ).cache_path == "/home/x/.cache/enroot"
    assert settings.load({**environ, "XDG_CACHE_HOME": "/c"}).cache_path == "/c/enroot"


def test_conf_beats_default_and_environment_beats_conf(environ: dict[str, str]) -> None:
    conf(environ, "# comment\n\nENROOT_DATA_PATH /data/$(id -u)/${NAME:-none}\nENROOT_REMAP_ROOT=yes\n")
    loaded = settings.load(environ)
    assert loaded.data_path == f"/data/{os.geteuid()}/none"
    assert loaded.remap_root is True
    assert loaded.origin(settings.SETTINGS["ENROOT_DATA_PATH"]).endswith("enroot.conf:3")
    assert settings.load({**environ, "ENROOT_REMAP_ROOT": "n"}).remap_root is False


def test_conf_d_comes_after_conf(environ: dict[str, str]) -> None:
    conf(environ, "ENROOT_MAX_CONNECTIONS 3\n")
    conf(environ, "ENROOT_MAX_CONNECTIONS 4\n", "enroot.conf.d/a.conf")
    conf(environ, "nonsense", "enroot.conf.d/README")
    assert settings.load(environ).max_connections == 4


@pytest.mark.parametrize(
    "line",
    [
        "ENROOT_REMAP_ROOT maybe",
        "ENROOT_MAX_CONNECTIONS many",
        "ENROOT_DATA_PATH relative",
        "ENROOT_DATA_PATH $(rm -rf /)",
        "ENROOT_DATA_PATH ${HOME",
        "FOO bar",
    ],
)
def test_mistakes_name_file_and_line(environ: dict[str, str], line: str) -> None:
    conf(environ, "\n" + line)
    with pytest.raises(ConfigError, match=r"enroot\.conf:2"):
        settings.load(environ)


def test_replace_says_where_from(environ: dict[str, str]) -> None:
    changed = settings.load(environ).replace("--rw", rootfs_writable=True)
    assert changed.rootfs_writable is True
    assert changed.origin(settings.SETTINGS["ENROOT_ROOTFS_WRITABLE"]) == "--rw"


def test_expand_leaves_other_dollars() -> None:
    assert settings.expand("a$b${c}$", {"b": "1", "c": "2"}) == "a12$"


def test_conf_speaks_to_hooks(environ: dict[str, str]) -> None:
    conf(environ, "MELLANOX_VISIBLE_DEVICES all\nNVIDIA_DRIVER_CAPABILITIES=compute,video\n")
    loaded = settings.load(environ).replace("option", remap_root=True)
    assert loaded.passed_on == {"MELLANOX_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,video"}
