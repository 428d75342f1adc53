from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from enroot_py.base.errors import ConfigError
from enroot_py.config import settings
from enroot_py.registry import credentials
from enroot_py.registry.credentials import Credential
from enroot_py.registry.reference import Reference
from tests.unit.test_reference import SPELLINGS


class Home:
    """A home directory with credential files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environ = {"HOME": str(path), "XDG_RUNTIME_DIR": str(path)}

    def netrc(self, text: str) -> None:
        (self.path / ".config/enroot").mkdir(parents=True, exist_ok=True)
        (self.path / ".config/enroot/.credentials").write_text(text)

    def docker(self, config: object) -> None:
        (self.path / ".docker").mkdir(exist_ok=True)
        (self.path / ".docker/config.json").write_text(config if isinstance(config, str) else json.dumps(config))

    def find(
        self, registry: str, user: str = "", realm: str = "", repository: str = "x", **more: str
    ) -> tuple[str, str] | None:
        credential = self.credential(registry, user, realm, more, repository)
        return (credential.user, credential.secret) if credential else None

    def credential(
        self, registry: str, user: str, realm: str, more: Mapping[str, str], repository: str = "x"
    ) -> Credential | None:
        loaded = settings.load(self.environ)
        environ = {**self.environ, **more}
        reference = Reference(registry, repository, "latest", user=user)
        return credentials.find(reference, loaded, realm=realm, environ=environ)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.parity(
    "credentials with a port take precedence over credentials without", ".credentials: has the form of netrc"
)
def test_netrc_by_host_port_and_user(home: Home) -> None:
    """An entry with the port takes precedence over an entry without a port, which matches every port."""
    assert home.find("a.io") is None  # the file does not exist
    home.netrc("# comment\n\nmachine a.io login me password one\nmachine a.io login you password two\n"
               "machine b.io login $oauthtoken password three\nmachine auth.docker.io login me password hub\n"
               "machine d.io\n  login me\n  password any\nmachine d.io:5000 login me password exact\n")  # fmt: skip
    assert home.find("a.io") == ("me", "one")
    assert home.find("a.io", "you") == ("you", "two")
    assert home.find("b.io") == ("$oauthtoken", "three")
    assert home.find("a.io", "nobody") is None
    assert home.find("c.io", "me") is None  # the file has "me" only for other hosts
    assert (home.find("d.io:443"), home.find("d.io:5000")) == (("me", "any"), ("me", "exact"))
    assert home.find("registry-1.docker.io", realm="auth.docker.io") == ("me", "hub")  # the entry of the token server


@pytest.mark.parametrize(("registry", "written"), [(n, t) for n, texts in SPELLINGS.items() for t in texts])
def test_login_is_found_by_each_spelling_of_its_registry(home: Home, registry: str, written: str) -> None:
    home.netrc(f"machine {written} login me password one\n")
    if not written.lower().startswith("registry.hub"):  # docker does not use this name as a key
        assert home.find(registry) == ("me", "one")
        home.netrc("")
        home.docker({"auths": {written: {"auth": base64.b64encode(b"me:two").decode()}}})
        assert home.find(registry) == ("me", "two")


@pytest.mark.parity(".credentials: a password may be $VARIABLE or $(command)")
def test_password_from_a_variable(home: Home) -> None:
    home.netrc("machine a.io login me password $TOKEN\nmachine b.io login me password ${TOKEN}\n")
    assert home.find("a.io", TOKEN="t$(x)'") == ("me", "t$(x)'")
    assert home.find("b.io", TOKEN="two") == ("me", "two")
    with pytest.raises(ConfigError, match="not set"):
        home.find("a.io")


@pytest.mark.parity(".credentials: a password may be $VARIABLE or $(command)")
@pytest.mark.parametrize(
    ("written", "password"),
    [
        ("$2y$10$abcdef", "$2y$10$abcdef"),
        ("pa$TOKEN", "pa$TOKEN"),
        ("$TOKEN$TOKEN", "$TOKEN$TOKEN"),
        ("$TOKEN-x", "$TOKEN-x"),
        ("${TOKEN", "${TOKEN"),
        ("${TOKEN:-x}", "${TOKEN:-x}"),
        ("$", "$"),
        ("$$", "$$"),
        (r"\$TOKEN", "$TOKEN"),
        (r"\$(TOKEN)", "$(TOKEN)"),
        (r"\\$TOKEN", r"\$TOKEN"),
        (r"\x$", r"\x$"),
    ],
)
def test_dollar_within_a_password_is_literal(home: Home, written: str, password: str) -> None:
    """A password is expanded only if it consists of nothing but $NAME or $(command)."""
    home.netrc(f"machine a.io password {written} login me\n")
    assert home.find("a.io", TOKEN="wrong") == ("me", password)


def test_password_command_keeps_spaces_and_is_hidden(home: Home) -> None:
    """The command is not among the arguments of the shell, which other users can see."""
    home.netrc("machine a.io login me password $(printf '%s' 'a  b'; tr '\\0' ' ' </proc/$$/cmdline)\nmachine b.io\n")
    assert home.find("a.io", PATH="/bin:/usr/bin") == ("me", "a  b/bin/sh")


def test_special_file_is_refused_at_once(home: Home) -> None:
    home.netrc("")
    path = home.path / ".config/enroot/.credentials"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        home.find("a.io")


def test_password_command_is_run_only_for_its_registry(home: Home) -> None:
    home.netrc(
        f"machine a.io login me password $(touch {home.path}/ran; echo secret words)\nmachine b.io login x password y\n"
    )
    assert home.find("b.io") == ("x", "y")
    assert not (home.path / "ran").exists()
    assert home.find("a.io", PATH="/bin") == ("me", "secret words")


@pytest.mark.parametrize(
    "text",
    [
        "machine a.io login me password $(echo hunter2; false)\n",
        "machine a.io login me password $hunter2\n",
        "password hunter2 machine\n",
    ],
)
def test_secret_in_a_failure_is_not_shown(home: Home, text: str) -> None:
    home.netrc(text)
    with pytest.raises(ConfigError) as caught:
        home.find("a.io", PATH="/bin")
    assert "hunter2" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize("command", ["$(false)", "$(true)", "$(echo x", "$(/nonexistent)"])
def test_command_that_gives_no_password(home: Home, command: str) -> None:
    home.netrc(f"machine a.io login me password {command}\n")
    with pytest.raises(ConfigError, match="the password of a.io"):
        home.find("a.io", PATH="/bin")


def test_docker_config(home: Home) -> None:
    auth = base64.b64encode(b"me:pass:word").decode()
    home.docker({"auths": {"a.io": {"auth": auth}, "https://index.docker.io/v1/": {"auth": auth}, "b.io": {},
                           "c.io": {"identitytoken": "refresh", "username": "u"}}})  # fmt: skip
    assert home.find("a.io") == ("me", "pass:word")
    assert home.find("a.io", "other") is None
    assert home.find("registry-1.docker.io") == ("me", "pass:word")
    assert home.find("b.io") is None
    credential = home.credential("c.io", "", "", {})
    assert credential is not None and credential.identity_token and credential.secret == "refresh"


def test_docker_config_elsewhere_and_behind_netrc(home: Home, tmp_path: Path) -> None:
    """DOCKER_CONFIG names another directory. .credentials, in netrc format, takes precedence over docker's file."""
    (tmp_path / "other").mkdir()
    config = {"auths": {"a.io": {"username": "u", "password": "p"}}}
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    assert home.find("a.io", DOCKER_CONFIG=str(tmp_path / "other")) == ("u", "p")
    home.netrc("machine a.io login u password netrc\n")
    assert home.find("a.io", DOCKER_CONFIG=str(tmp_path / "other")) == ("u", "netrc")


def test_docker_config_with_nulls_and_paths(home: Home) -> None:
    home.docker({"auths": None, "credHelpers": None, "credsStore": None})
    assert home.find("a.io") is None
    home.docker({"auths": {"a.io": {"username": "u", "password": "all"},
                           "a.io/team": {"username": "u", "password": "t"},
                           "b.io/team": {"username": "u", "password": "team"}}})  # fmt: skip
    assert home.find("a.io", repository="x") == ("u", "all")
    assert home.find("a.io", repository="team/x") == ("u", "t")
    assert home.find("a.io", repository="teams/x") == ("u", "all")
    assert home.find("b.io", repository="team/x") == ("u", "team")
    assert home.find("b.io", repository="x") is None  # the login is only for b.io/team


def test_precedence_of_login_files(home: Home) -> None:
    """Docker's file takes precedence over podman's files. REGISTRY_AUTH_FILE takes precedence over all of them."""

    def write(path: Path, password: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"auths": {"a.io": {"username": "u", "password": password}}}))

    write(home.path / ".config/containers/auth.json", "kept")
    assert home.find("a.io") == ("u", "kept")
    write(home.path / "containers/auth.json", "session")
    assert home.find("a.io", XDG_RUNTIME_DIR=str(home.path)) == ("u", "session")
    write(home.path / ".docker/config.json", "docker")
    assert home.find("a.io", XDG_RUNTIME_DIR=str(home.path)) == ("u", "docker")
    write(home.path / "named", "named")
    assert home.find("a.io", REGISTRY_AUTH_FILE=str(home.path / "named")) == ("u", "named")


@pytest.mark.parametrize(
    "script",
    [
        """#!/bin/sh\necho '{"Username": "me", "Secret": "hunter2"}'; exit 1\n""",
        "#!/bin/sh\necho hunter2\n",
        "#!/bin/sh\nprintf '%0100000d' 0 | tr 0 [; echo hunter2\n",
        "#!/none/such\n",
        "#!/bin/sh\necho hunter2; sleep 100\n",
    ],
)
def test_failing_helper_is_reported_without_its_output(
    home: Home, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(credentials, "_HELPER_TIMEOUT_S", 1.0)
    (home.path / "docker-credential-bad").write_text(script)
    (home.path / "docker-credential-bad").chmod(0o755)
    home.docker({"credsStore": "bad"})
    assert home.find("a.io", PATH=f"{home.path}:/bin") is None
    stderr = capsys.readouterr().err
    assert "docker-credential-bad" in stderr and "hunter2" not in stderr


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, "[]", '{"auths": [1]}', '{"auths": {"a.io": {"auth": "%%"}}}', '{"auths": {"a.io": 3}}'],
)
def test_damaged_docker_config_is_an_error_with_its_name(home: Home, text: str) -> None:
    home.docker(text)
    with pytest.raises(ConfigError, match="config.json"):
        home.find("a.io")


def test_secret_is_never_shown() -> None:
    assert "hunter2" not in repr(Credential("me", "hunter2", "file"))
    assert Credential("me", "p:w", "file").basic() == "Basic " + base64.b64encode(b"me:p:w").decode()
