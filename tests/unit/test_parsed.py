"""A cached parse result is used until the file changes, but not if another user could have written the result."""

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


class Cache:
    """A configuration file, and the directory with its cached parse."""

    def __init__(self, conf: Path, directory: Path) -> None:
        self.conf, self.directory = conf, directory

    def read(self) -> Entries:
        return parsed.read(str(self.conf), str(self.directory), yaml.parse)

    def value(self) -> str:
        [(name, line, value)] = self.read()
        assert (name, line) == ("ENROOT_MAX_CONNECTIONS", 1)
        return value

    def forge(self) -> Path:
        """Change the value in the cached result to 9, to see whether it is used."""
        (path,) = self.directory.iterdir()
        state, _ = marshal.loads(path.read_bytes())
        path.write_bytes(marshal.dumps((state, [("ENROOT_MAX_CONNECTIONS", 1, "9")])))
        return path


@pytest.fixture
def fresh(conf: Path, tmp_path: Path) -> Cache:
    return Cache(conf, tmp_path / "run")


@pytest.fixture
def cache(fresh: Cache, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Parse a file with the value 3 once. A new file counts as old, because a test cannot set its change time."""
    monkeypatch.setattr(parsed, "_MIN_AGE_NS", -(10**18))
    assert fresh.value() == "3"
    return fresh


def test_second_read_uses_the_cached_result(cache: Cache) -> None:
    cache.forge()
    assert cache.value() == "9"


@pytest.mark.parametrize(("change", "value"), [("content", "44"), ("time", "3"), ("replaced", "5")])
def test_a_changed_file_is_parsed_again(cache: Cache, tmp_path: Path, change: str, value: str) -> None:
    cache.forge()
    if change == "content":
        write(cache.conf, "max_connections: 44\n")
    elif change == "time":
        os.utime(cache.conf, (2000, 2000))
    else:
        write(tmp_path / "other", "max_connections: 5\n")
        os.rename(tmp_path / "other", cache.conf)
    assert cache.value() == value


DEFECTS = ["open directory", "open file", "link", "link to the directory", "another's directory", "another's file"]


@pytest.mark.parity("penroot.yaml and penroot.yaml.d/*.yaml")
@pytest.mark.parametrize("defect", DEFECTS)
def test_cache_that_others_can_write_is_not_trusted(cache: Cache, tmp_path: Path, defect: str) -> None:
    path, directory = cache.forge(), cache.directory
    if defect.startswith("another's"):
        if os.geteuid() != 0:
            pytest.skip("needs root to give files away")
        os.chown(directory if defect.endswith("directory") else path, 27002, 27002)
    elif defect.startswith("open"):
        directory.chmod(0o777) if defect.endswith("directory") else path.chmod(0o666)
    else:
        linked = directory if defect.endswith("directory") else path
        linked.rename(tmp_path / "planted")
        linked.symlink_to(tmp_path / "planted")
    assert cache.value() == "3"


def test_parse_of_a_file_just_changed_is_not_cached(fresh: Cache) -> None:
    """If the file changes again at once, its times may stay the same."""
    os.utime(fresh.conf, ns=(4 * 10**18, 4 * 10**18))  # a time in the future counts as now
    fresh.read()
    assert not fresh.directory.exists() or not list(fresh.directory.iterdir())


def test_unwritable_cache_directory_is_ignored(conf: Path) -> None:
    assert Cache(conf, Path("/proc/nowhere")).value() == "3"


def test_mistakes_are_not_cached(cache: Cache) -> None:
    write(cache.conf, "max_connections: 3\nno_such_key: 1\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"penroot\.yaml:2"):
            cache.read()


@pytest.mark.parametrize("data", [b"", b"garbage", marshal.dumps(1), marshal.dumps((1,)), marshal.dumps((1, []))])
def test_invalid_cache_entry_is_ignored(cache: Cache, data: bytes) -> None:
    cache.forge().write_bytes(data)
    assert cache.value() == "3"


def test_cached_parse_imports_no_yaml(conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed, "_MIN_AGE_NS", -(10**18))
    (tmp_path / "run").mkdir(0o700)
    environ = {"HOME": "/home/x", "XDG_RUNTIME_DIR": f"{tmp_path}/run", "ENROOT_SYSCONF_PATH": str(conf.parent)}
    assert settings.load(environ).max_connections == 3
    code = "from enroot_py.config import settings; assert settings.load().max_connections == 3"
    modules = loaded_by(code, environ=environ)
    assert "enroot_py.config.parsed" in modules and not {"yaml", "enroot_py.config.yaml"} & modules
