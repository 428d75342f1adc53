"""Write logins into docker's and podman's files, and remove them. Other entries of the files stay."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from enroot_py.base.errors import ConfigError, UsageError
from enroot_py.registry import credentials
from enroot_py.registry.credentials import Credential
from enroot_py.registry.logins import AuthFile, registry

LOGIN = Credential("me", "s3cret:x", "stdin")
AUTH = {"auth": base64.b64encode(b"me:s3cret:x").decode()}
HELPER = """#!/bin/sh
read -r line
echo "$1 $line" >> {log}
case $1-$line in
erase-nothing.io) echo 'credentials not found in native keychain'; exit 1 ;;
*-broken.io|*broken.io*) echo "cannot keep $line" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def file(tmp_path: Path) -> AuthFile:
    bin = tmp_path / "bin"
    bin.mkdir()
    helper = bin / "docker-credential-box"
    helper.write_text(HELPER.format(log=tmp_path / "log"))
    helper.chmod(0o755)
    return AuthFile(str(tmp_path / "home/.docker/config.json"), {"PATH": f"{bin}:/usr/bin:/bin"})


def content(file: AuthFile) -> Any:
    return json.loads(Path(file.path).read_text())


def write(file: AuthFile, config: object) -> None:
    Path(file.path).parent.mkdir(parents=True)
    Path(file.path).write_text(config if isinstance(config, str) else json.dumps(config))


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("reg.io", "reg.io"),
        ("REG.io:5000", "reg.io:5000"),
        ("https://reg.io/", "reg.io"),
        ("docker.io", "registry-1.docker.io"),
        ("https://index.docker.io/v1/", "registry-1.docker.io"),
        ("[::1]:5000", "[::1]:5000"),
        ("localhost", "localhost"),
    ],
)
def test_names_of_registries(text: str, host: str) -> None:
    assert registry(text).registry == host


@pytest.mark.parametrize("text", ["", "reg.io/team", "http://reg.io", "me@reg.io", "a b", "reg.io:x", "-x", "reg.io#a"])
def test_invalid_registry_names(text: str) -> None:
    with pytest.raises(UsageError, match="is not a registry") as caught:
        registry(text)
    assert "HOST:PORT" in caught.value.hint


def test_login_is_private_and_keeps_other_entries(file: AuthFile) -> None:
    other = {"auths": {"other.io": {"auth": "eA=="}, "reg.io/team": {"auth": "eQ=="}}, "HttpHeaders": {"X": "1"}}
    write(file, other)
    Path(file.path).chmod(0o644)
    assert file.add(registry("reg.io"), LOGIN) == file.path
    assert content(file) == {**other, "auths": {**other["auths"], "reg.io": AUTH}}
    assert stat.S_IMODE(Path(file.path).stat().st_mode) == 0o600
    assert file.remove(registry("reg.io"))
    assert content(file) == other
    assert not file.remove(registry("reg.io"))
    assert [path.name for path in Path(file.path).parent.iterdir()] == ["config.json"]


def test_a_first_login_makes_the_file_and_its_directory(file: AuthFile) -> None:
    assert not file.remove(registry("reg.io")) and not Path(file.path).parent.exists()
    file.add(registry("reg.io"), LOGIN)
    assert content(file) == {"auths": {"reg.io": AUTH}}
    assert stat.S_IMODE(Path(file.path).parent.stat().st_mode) == 0o700


def test_docker_hub_has_the_key_that_docker_uses(file: AuthFile) -> None:
    write(file, {"auths": {"docker.io": {"auth": "eA=="}, "https://reg.io/v2/": {"auth": "eA=="}}})
    file.add(registry("docker.io"), LOGIN)
    assert content(file)["auths"]["https://index.docker.io/v1/"] == AUTH
    assert file.remove(registry("index.docker.io")) and file.remove(registry("reg.io"))
    assert content(file) == {"auths": {}}


def test_missing_login_is_not_removed(file: AuthFile) -> None:
    """A login for HOST does not count for HOST:PORT. A helper may lack the login."""
    write(file, {})
    file.add(registry("reg.io"), LOGIN)
    assert not file.remove(registry("reg.io:5000"))
    Path(file.path).write_text('{"credsStore": "box"}')
    assert not file.remove(registry("nothing.io"))


@pytest.mark.parity("login: stored by the helper program that docker's file names")
@pytest.mark.parametrize("config", [{"credsStore": "box"}, {"credHelpers": {"reg.io": "box"}, "credsStore": "other"}])
def test_login_is_stored_by_the_helper(file: AuthFile, tmp_path: Path, config: dict[str, Any]) -> None:
    write(file, config)
    assert file.add(registry("reg.io"), LOGIN) == "docker-credential-box"
    assert content(file) == {**config, "auths": {"reg.io": {}}}
    assert file.remove(registry("reg.io"))
    verb, login = (tmp_path / "log").read_text().splitlines()[0].split(" ", 1)
    assert verb == "store" and json.loads(login) == {"ServerURL": "reg.io", "Username": "me", "Secret": "s3cret:x"}
    assert (tmp_path / "log").read_text().splitlines()[1] == "erase reg.io"


def test_failing_helper_changes_nothing(file: AuthFile) -> None:
    write(file, {"credsStore": "box"})
    with pytest.raises(ConfigError) as caught:
        file.add(registry("broken.io"), LOGIN)
    assert "docker-credential-box" in str(caught.value) and content(file) == {"credsStore": "box"}
    without_helper = AuthFile(file.path, {"PATH": "/usr/bin"})
    with pytest.raises(ConfigError, match="docker-credential-box is not in PATH"):
        without_helper.add(registry("reg.io"), LOGIN)


@pytest.mark.parametrize("text", ["{", "[]", '{"auths": []}', "nonsense", '"x"', "\x00"])
def test_a_file_that_is_not_understood_is_left_alone(file: AuthFile, text: str) -> None:
    write(file, text)
    with pytest.raises(ConfigError) as caught:
        file.add(registry("reg.io"), LOGIN)
    assert file.path in str(caught.value) and caught.value.hint
    assert Path(file.path).read_text() == text


def test_a_link_stays_a_link(file: AuthFile, tmp_path: Path) -> None:
    write(file, {})
    link = tmp_path / "link.json"
    link.symlink_to(file.path)
    AuthFile(str(link), {}).add(registry("reg.io"), LOGIN)
    assert link.is_symlink() and content(file) == {"auths": {"reg.io": AUTH}}


def test_simultaneous_logins_are_all_stored(file: AuthFile) -> None:
    children = []
    for number in range(12):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                file.add(registry(f"reg{number}.io"), LOGIN)
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 12
    assert len(content(file)["auths"]) == 12


def test_lock_file_of_a_killed_login_does_not_block(file: AuthFile) -> None:
    write(file, {})
    lock = Path(file.path).parent / ".config.json.lock"
    lock.touch(0o600)
    file.add(registry("reg.io"), LOGIN)
    assert content(file) == {"auths": {"reg.io": AUTH}} and not lock.exists()
    lock.touch(0o644)  # other users could lock this file
    with pytest.raises(ConfigError, match="is open to other users: remove it"):
        file.add(registry("reg.io"), LOGIN)


@pytest.mark.security("G2")
def test_a_directory_that_others_write_to_gets_no_secret(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="cannot write") as caught:
        AuthFile(str(directory / "auth.json"), {}).add(registry("reg.io"), LOGIN)
    assert "REGISTRY_AUTH_FILE" in caught.value.hint and not list(directory.iterdir())
    directory.chmod(0o1777)  # the mode of /tmp
    AuthFile(str(directory / "auth.json"), {}).add(registry("reg.io"), LOGIN)


def test_written_login_is_found(file: AuthFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from enroot_py.config import settings

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert credentials.writable() == file.path
    for host in ("reg.io:5000", "docker.io"):
        file.add(registry(host), LOGIN)
        credential = credentials.find(registry(host), settings.load())
        assert credential and (credential.user, credential.secret, credential.source) == ("me", "s3cret:x", file.path)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/other")
    assert credentials.writable() == "/other"
