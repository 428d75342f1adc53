"""The cached result of a parse is used while file and parser are unchanged, and never from another user's directory."""

from __future__ import annotations

import marshal
import os
from pathlib import Path

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.config import parsed, settings, yaml
from tests.unit.test_imports import loaded_by


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "penroot.yaml"
    write(path, "max_connections: 3\n")
    return path


def write(path: Path, text: str, seconds: int = 1000) -> None:
    path.write_text(text)
    os.utime(path, (seconds, seconds))


Entries = list[tuple[str, int, str]]


class Kept:
    """The parse of a configuration file, and the directory of its cached result."""

    def __init__(self, conf: Path, directory: Path) -> None:
        self.conf, self.directory = conf, directory

    def read(self) -> Entries:
        return parsed.read(str(self.conf), str(self.directory), yaml.parse)

    def value(self) -> str:
        [(name, line, value)] = self.read()
        assert (name, line) == ("ENROOT_MAX_CONNECTIONS", 1)
        return value

    def forge(self) -> Path:
        """Change the cached result to 9, which shows whether it is used."""
        (path,) = self.directory.iterdir()
        state, _ = marshal.loads(path.read_bytes())
        path.write_bytes(marshal.dumps((state, [("ENROOT_MAX_CONNECTIONS", 1, "9")])))
        return path


@pytest.fixture
def fresh(conf: Path, tmp_path: Path) -> Kept:
    return Kept(conf, tmp_path / "run")


@pytest.fixture
def kept(fresh: Kept, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Parse a file with the value 3 once. Its change time cannot be set back, so the test lets it count as old."""
    monkeypatch.setattr(parsed, "_MIN_AGE_NS", -(10**18))
    assert fresh.value() == "3"
    return fresh


def test_the_second_read_is_the_kept_one(kept: Kept) -> None:
    kept.forge()
    assert kept.value() == "9"


@pytest.mark.parametrize(("change", "value"), [("content", "44"), ("time", "3"), ("replaced", "5")])
def test_a_changed_file_is_parsed_again(kept: Kept, tmp_path: Path, change: str, value: str) -> None:
    kept.forge()
    if change == "content":
        write(kept.conf, "max_connections: 44\n")
    elif change == "time":
        os.utime(kept.conf, (2000, 2000))
    else:
        write(tmp_path / "other", "max_connections: 5\n")
        os.rename(tmp_path / "other", kept.conf)
    assert kept.value() == value


OF_OTHERS = ["open directory", "open file", "link", "link to the directory", "another's directory", "another's file"]


@pytest.mark.parity("penroot.yaml and penroot.yaml.d/*.yaml")
@pytest.mark.parametrize("how", OF_OTHERS)
def test_cache_that_others_can_write_is_not_trusted(kept: Kept, tmp_path: Path, how: str) -> None:
    path, directory = kept.forge(), kept.directory
    if how.startswith("another's"):
        if os.geteuid() != 0:
            pytest.skip("needs root to give files away")
        os.chown(directory if how.endswith("directory") else path, 27002, 27002)
    elif how.startswith("open"):
        directory.chmod(0o777) if how.endswith("directory") else path.chmod(0o666)
    else:
        linked = directory if how.endswith("directory") else path
        linked.rename(tmp_path / "planted")
        linked.symlink_to(tmp_path / "planted")
    assert kept.value() == "3"


def test_a_file_that_changed_just_now_is_not_kept(fresh: Kept) -> None:
    """The file's times may stay the same over the next change."""
    os.utime(fresh.conf, ns=(4 * 10**18, 4 * 10**18))  # a future time counts as now
    fresh.read()
    assert not fresh.directory.exists() or not list(fresh.directory.iterdir())


def test_a_place_that_cannot_be_written_does_no_harm(conf: Path) -> None:
    assert Kept(conf, Path("/proc/nowhere")).value() == "3"


def test_mistakes_are_not_kept(kept: Kept) -> None:
    write(kept.conf, "max_connections: 3\nno_such_key: 1\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"penroot\.yaml:2"):
            kept.read()


@pytest.mark.parametrize("data", [b"", b"garbage", marshal.dumps(1), marshal.dumps((1,)), marshal.dumps((1, []))])
def test_invalid_cache_entry_is_ignored(kept: Kept, data: bytes) -> None:
    kept.forge().write_bytes(data)
    assert kept.value() == "3"


def test_a_kept_parse_imports_no_yaml(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed, "_MIN_AGE_NS", -(10**18))
    (tmp_path / "run").mkdir(0o700)
    environ = {"HOME": "/home/x", "XDG_RUNTIME_DIR": f"{tmp_path}/run", "ENROOT_SYSCONF_PATH": str(conf.parent)}
    assert settings.load(environ).max_connections == 3
    code = "from enroot_py.config import settings; assert settings.load().max_connections == 3"
    modules = loaded_by(code, environ=environ)
    assert "enroot_py.config.parsed" in modules and not {"yaml", "enroot_py.config.yaml"} & modules
