"""The kept result of a parse is believed while file and keeper are the same, and never from a place of others."""

from __future__ import annotations

import marshal
import os
import pathlib
import subprocess
import sys

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.config import parsed, settings, yaml

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def conf(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "penroot.yaml"
    write(path, "max_connections: 3\n")
    return path


def write(path: pathlib.Path, text: str, seconds: int = 1000) -> None:
    path.write_text(text)
    os.utime(path, (seconds, seconds))


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a change cannot be set back: let it count as old."""
    monkeypatch.setattr(parsed, "_SETTLED", -(10**18))


def kept(directory: pathlib.Path) -> list[pathlib.Path]:
    return list(directory.iterdir()) if directory.exists() else []


def forge(directory: pathlib.Path) -> pathlib.Path:
    """Change what is kept, so that it shows whether it is believed."""
    (path,) = kept(directory)
    state, _ = marshal.loads(path.read_bytes())
    path.write_bytes(marshal.dumps((state, [("ENROOT_MAX_CONNECTIONS", 1, "9")])))
    return path


def read(conf: pathlib.Path, directory: pathlib.Path | str) -> list[tuple[str, int, str]] | None:
    return parsed.read(str(conf), str(directory), yaml.parse)


def test_the_second_read_is_the_kept_one(
    conf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    directory = tmp_path / "run"
    assert read(conf, directory) == [("ENROOT_MAX_CONNECTIONS", 1, "3")]
    forge(directory)
    assert read(conf, directory) == [("ENROOT_MAX_CONNECTIONS", 1, "9")]


@pytest.mark.parametrize("change", ["content", "time", "replaced"])
def test_a_changed_file_is_parsed_again(
    conf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    settle(monkeypatch)
    directory = tmp_path / "run"
    read(conf, directory)
    forge(directory)
    if change == "content":
        write(conf, "max_connections: 44\n")
    elif change == "time":
        os.utime(conf, (2000, 2000))
    else:
        other = tmp_path / "other"
        write(other, "max_connections: 5\n")
        os.rename(other, conf)
    value = {"content": "44", "time": "3", "replaced": "5"}[change]
    assert read(conf, directory) == [("ENROOT_MAX_CONNECTIONS", 1, value)]


@pytest.mark.parity("penroot.yaml and penroot.yaml.d/*.yaml")
@pytest.mark.parametrize("how", ["open directory", "open file", "link", "link to the directory"])
def test_what_others_can_write_is_not_believed(
    conf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    settle(monkeypatch)
    directory = tmp_path / "run"
    read(conf, directory)
    path = forge(directory)
    if how == "open directory":
        directory.chmod(0o777)
    elif how == "open file":
        path.chmod(0o666)
    elif how == "link":
        path.rename(tmp_path / "planted")
        path.symlink_to(tmp_path / "planted")
    else:
        directory.rename(tmp_path / "planted")
        directory.symlink_to(tmp_path / "planted")
    assert read(conf, directory) == [("ENROOT_MAX_CONNECTIONS", 1, "3")]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_belongs_to_others_is_not_believed(
    conf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    settle(monkeypatch)
    directory = tmp_path / "run"
    read(conf, directory)
    path = forge(directory)
    os.chown(directory if what == "directory" else path, 27002, 27002)
    assert read(conf, directory) == [("ENROOT_MAX_CONNECTIONS", 1, "3")]


def test_a_file_that_changed_just_now_is_not_kept(conf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its times may stay the same over the next change."""
    directory = tmp_path / "run"
    os.utime(conf, ns=(4 * 10**18, 4 * 10**18))  # the future is as good as now
    read(conf, directory)
    assert kept(directory) == []


def test_a_place_that_cannot_be_written_does_no_harm(conf: pathlib.Path) -> None:
    assert read(conf, "/proc/nowhere") == [("ENROOT_MAX_CONNECTIONS", 1, "3")]


def test_mistakes_are_not_kept(conf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    write(conf, "max_connections: 3\nno_such_key: 1\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"penroot\.yaml:2"):
            read(conf, tmp_path / "run")


@pytest.mark.parametrize("data", [b"", b"garbage", marshal.dumps(1), marshal.dumps((1,)), marshal.dumps((1, []))])
def test_what_is_no_kept_parse_is_passed_by(
    conf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    settle(monkeypatch)
    read(conf, tmp_path / "run")
    forge(tmp_path / "run").write_bytes(data)
    assert read(conf, tmp_path / "run") == [("ENROOT_MAX_CONNECTIONS", 1, "3")]


def test_a_kept_parse_imports_no_yaml(
    conf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    (tmp_path / "run").mkdir(0o700)
    environ = {"HOME": "/home/x", "XDG_RUNTIME_DIR": f"{tmp_path}/run", "ENROOT_SYSCONF_PATH": str(conf.parent)}
    assert settings.load(environ).max_connections == 3
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from enroot_py.config import settings; "
        "assert settings.load().max_connections == 3; print(*sys.modules)"
    )
    command = [sys.executable, "-IS", "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert "enroot_py.config.parsed" in done.stdout.split()
    assert not {"yaml", "enroot_py.config.yaml"} & set(done.stdout.split())
