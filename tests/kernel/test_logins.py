"""An ordinary user runs ``penroot login`` and ``logout``. skopeo and penroot find the same logins."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakeregistry import Fault, Faulty, Login, faulty
from tests.kernel.conftest import User, require
from tests.kernel.registry import serve

SECRET = "pass word:%$1"


@pytest.fixture
def front(tmp_path: pathlib.Path) -> Iterator[Faulty]:
    """Serve a registry that only ``me`` can read."""
    with serve(tmp_path / "registry") as server, faulty(server.host, login=Login({"me": SECRET})) as proxy:
        yield proxy


def log_in(user: User, *words: str, secret: str = SECRET, **options: Any) -> subprocess.CompletedProcess[str]:
    done = user.penroot("login", *words, stdin=secret, **options)
    assert SECRET not in done.stdout + done.stderr
    return done


def stored_logins(user: User) -> dict[str, object]:
    config: dict[str, object] = json.loads((user.home / ".docker/config.json").read_text())["auths"]
    return config


@pytest.mark.parity("login --username", "logout --authfile")
@pytest.mark.parametrize("basic", [False, True], ids=["token", "basic"])
def test_in_and_out(user: User, front: Faulty, basic: bool) -> None:
    assert front.login
    front.login.basic = basic
    image = f"docker://me@{front.host}#x"
    assert "401 from" in user.penroot("digest", image, status=1).stderr
    done = log_in(user, "-u", "me", front.host, secret=SECRET + "\n")
    assert f"logged in to {front.host} as me: {user.home}/.docker/config.json" in done.stderr and not done.stdout
    # The registry accepts the login, but the image does not exist.
    assert "401 from" not in user.penroot("digest", image, status=1).stderr
    assert list(stored_logins(user)) == [front.host]
    assert f"logged out of {front.host}" in user.penroot("logout", front.host).stderr
    assert not stored_logins(user)
    again = user.penroot("logout", front.host, status=1).stderr
    assert f"config.json has no login for {front.host}" in again and f"to add one: penroot login {front.host}" in again


@pytest.mark.parity("login: not stored if the registry refuses it or cannot be asked")
@pytest.mark.parametrize("basic", [False, True], ids=["token", "basic"])
def test_a_login_that_the_registry_refuses_is_not_kept(user: User, front: Faulty, basic: bool) -> None:
    assert front.login
    front.login.basic = basic
    stderr = log_in(user, "-u", "me", front.host, secret="wrong", status=1).stderr
    assert f"{front.host} refuses the login of 'me'" in stderr and "check user and password" in stderr
    assert not (user.home / ".docker").exists()


@pytest.mark.parity("login: not stored if the registry refuses it or cannot be asked")
@pytest.mark.security("G2")
def test_unknown_token_server_gets_no_password(user: User, tmp_path: pathlib.Path) -> None:
    """The registry refers to a token server that gives everyone a token and is not in penroot's registries.conf."""
    with (
        serve(tmp_path / "registry") as server,
        faulty(server.host, bind="127.0.0.2", login=Login({"": ""})) as other,
        faulty(server.host) as front,
    ):
        realm = {"WWW-Authenticate": f'Bearer realm="http://{other.host}/token",service="x"'}
        front.faults.append(Fault("/v2/", status=401, headers=realm))
        stderr = log_in(user, "-u", "me", front.host, status=1).stderr
        assert f"the login for {front.host} is not sent to the unknown token server {other.host}" in stderr
        assert f"registries.conf: {front.host} token={other.host}" in stderr
        assert [request.authorization for request in other.seen] == [""]
    assert not (user.home / ".docker").exists()


def test_login_to_an_open_registry_is_stored_untested(user: User, tmp_path: pathlib.Path) -> None:
    with serve(tmp_path / "registry") as server:
        assert "does not ask for a login: storing it untested" in log_in(user, "-u", "me", server.host).stderr
        assert list(stored_logins(user)) == [server.host]


@pytest.mark.parity("login: not stored if the registry refuses it or cannot be asked")
def test_login_to_an_unreachable_registry_is_not_stored(user: User) -> None:
    stderr = log_in(user, "-u", "me", "127.0.0.1:1", status=1, env={"ENROOT_TRANSFER_RETRIES": "0"}).stderr
    assert "cannot reach the registry 127.0.0.1:1" in stderr
    assert not (user.home / ".docker").exists()


@pytest.mark.parity("login --password-stdin")
@pytest.mark.parametrize(
    ("words", "secret", "error", "hint"),
    [
        (("-u", "me", "reg.io"), "", "no password on stdin", "penroot login --username USER"),
        (("-u", "me", "reg.io"), "\n", "no password on stdin", "printf"),
        (("-u", "me", "reg.io"), "a\nb", "is not one line with a password", "printf"),
        (("-u", "me", "reg.io"), 70_000 * "x", "is not one line with a password", "printf"),
        (("reg.io",), "x", "no user name given", "--username"),
        (("-u", "a:b", "reg.io"), "x", "bad user name 'a:b'", "':'"),
        (("-u", "me", "reg.io/team"), "x", "'reg.io/team' is not a registry", "HOST:PORT"),
        (("-u", "me", "-p", "x", "reg.io"), "", "all users of the machine can see a password", "on stdin"),
    ],
)
def test_impossible_logins_are_refused(user: User, words: tuple[str, ...], secret: str, error: str, hint: str) -> None:
    stderr = log_in(user, *words, secret=secret, status=1).stderr
    assert error in stderr and hint in stderr, stderr


@pytest.mark.parity("login --username")
def test_prompt_at_a_terminal_hides_the_password(user: User, front: Faulty) -> None:
    primary, terminal = pty.openpty()
    if os.geteuid() == 0:
        os.fchown(terminal, user.uid, user.uid)
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    login = user.begin("penroot", "login", front.host, prefix=("setsid", "--ctty"), **ends)
    os.close(terminal)
    shown = b""
    try:
        for prompt, answer in ((b"Username: ", b"me\n"), (b"Password: ", SECRET.encode() + b"\n")):
            while prompt not in shown:
                shown += os.read(primary, 4096)
            os.write(primary, answer)
        while b"logged in to" not in shown:
            shown += os.read(primary, 4096)
        assert login.wait(60) == 0
    finally:
        login.kill()
        login.wait()
        os.close(primary)
    assert SECRET.encode() not in shown
    assert list(stored_logins(user)) == [front.host]


@pytest.mark.parity("login, logout: report another login that takes precedence")
def test_login_that_another_overrides_is_reported(user: User, front: Faulty) -> None:
    netrc = user.write(".config/enroot/.credentials", f"machine {front.host} login you password other\n")
    assert f"another login for {front.host} in {netrc} takes precedence" in log_in(user, "-u", "me", front.host).stderr
    assert f"{netrc} still has a login for {front.host}" in user.penroot("logout", front.host).stderr
    assert f"another login is in {netrc}" in user.penroot("logout", front.host, status=1).stderr


@pytest.mark.parity("login --authfile", "logout --authfile")
def test_skopeo_and_penroot_read_each_others_logins(user: User, front: Faulty) -> None:
    require(shutil.which("skopeo"), "skopeo is not installed")
    auth = str(user.home / "auth.json")
    log_in(user, "-u", "me", "--authfile", auth, front.host)
    assert user.run("skopeo", "login", "--authfile", auth, "--get-login", front.host).stdout == "me\n"
    user.penroot("logout", "--authfile", auth, front.host)
    user.run("skopeo", "login", "--authfile", auth, "--get-login", front.host, status=1)
    login = ("skopeo", "login", "--tls-verify=false", "-u", "me", "-p", SECRET, front.host)
    env = {"REGISTRY_AUTH_FILE": auth}
    user.run(*login, env=env)
    assert "401 from" not in user.penroot("digest", f"docker://{front.host}#x", env=env, status=1).stderr
    user.penroot("logout", front.host, env=env)
    user.run("skopeo", "login", "--get-login", front.host, env=env, status=1)


HELPERS = {
    "one": """#!/bin/sh\nread host; echo '{"ServerURL":"x","Username":"one","Secret":"SECRET"}'\n""",
    "none": "#!/bin/sh\necho credentials not found in native keychain; exit 1\n",
    "broken": "#!/bin/sh\necho 'the keyring is locked'; exit 2\n",
}
# Situation -> (registries.conf, further keys of auth.json, expected user). auth.json also has a login of user "file".
HELPED: dict[str, tuple[str, dict[str, object], str]] = {
    "no helper": ("", {}, "file"),
    "a comment": ("# credential-helpers = ['one']", {}, "file"),
    "empty": ("credential-helpers = []", {}, "file"),
    "helper": ("credential-helpers = ['one']", {}, "one"),
    "file before helper": ("credential-helpers = ['containers-auth.json', 'one']", {}, "file"),
    "without a login": ("credential-helpers = ['none', 'containers-auth.json']", {}, "file"),
    "broken": ("credential-helpers = ['broken', 'containers-auth.json']", {}, "file"),
    "without the file": ("credential-helpers = ['none']", {}, ""),
    "not installed": ("credential-helpers = ['missing']", {}, ""),
    "a path": ("credential-helpers = ['../one']", {}, ""),
    "wrong type": ("credential-helpers = 'one'", {}, ""),
    "not a name": ("credential-helpers = [1]", {}, ""),
    "credHelpers": ("", {"credHelpers": {"HOST": "one"}}, "one"),
    "credHelpers of another": ("", {"credHelpers": {"other.test": "one"}}, "file"),
}


@pytest.mark.parity("credential-helpers and credHelpers of podman and skopeo")
@pytest.mark.parametrize("situation", HELPED)
def test_credential_helpers_mean_the_same_to_skopeo(user: User, front: Faulty, situation: str) -> None:
    require(shutil.which("skopeo"), "skopeo is not installed")
    text, more, name = HELPED[situation]
    user.write(".config/containers/registries.conf", text)
    login = {"auths": {front.host: {"auth": base64.b64encode(f"file:{SECRET}".encode()).decode()}}, **more}
    auth = user.write("auth.json", json.dumps(login).replace("HOST", front.host))
    for helper, script in HELPERS.items():
        user.write(f"bin/docker-credential-{helper}", script.replace("SECRET", SECRET), 0o755)
    env = {"REGISTRY_AUTH_FILE": str(auth), "PATH": f"{user.home}/bin:{user.environ['PATH']}"}
    check_login(user, front, "x", name, ("file", "one"), env)


def check_login(
    user: User, front: Faulty, repository: str, name: str, candidates: tuple[str, ...], env: dict[str, str]
) -> None:
    """Check that skopeo and penroot log in as ``name``, or without a login if ``name`` is "".

    For each user in ``candidates`` in turn, the registry accepts only this user. Only ``name`` must get in.
    """
    done = user.run("skopeo", "login", "--get-login", f"{front.host}/{repository}", env=env, status=None)
    assert front.login and done.stdout.strip() == name, done.stderr
    for candidate in candidates:
        front.login.users = {candidate: SECRET}
        stderr = user.penroot("digest", f"docker://{front.host}#{repository}", env=env, status=1).stderr
        assert stderr.count("[ERROR]") == 1 and "Traceback" not in stderr
        assert (f"has no repository {repository}" in stderr) == (candidate == name), stderr


# Situation -> (repository, {key in auth.json: user of the login under this key}, expected user).
KEYED: dict[str, tuple[str, dict[str, str], str]] = {
    "host": ("team/x", {"HOST": "one"}, "one"),
    "repository": ("team/x", {"HOST": "one", "HOST/team": "two", "HOST/team/x": "three"}, "three"),
    "part": ("team/y", {"HOST": "one", "HOST/team": "two", "HOST/team/x": "three"}, "two"),
    "part of a word": ("teams/y", {"HOST": "one", "HOST/team": "two"}, "one"),
    "another part": ("other/y", {"HOST/team": "two"}, ""),
    "address": ("team/x", {"https://HOST/v1/": "one"}, "one"),
    "another host": ("team/x", {"other.test": "one"}, ""),
}


@pytest.mark.parity("auth.json of podman and skopeo")
@pytest.mark.parametrize("situation", KEYED)
def test_keys_of_logins_mean_the_same_to_skopeo(user: User, front: Faulty, situation: str) -> None:
    require(shutil.which("skopeo"), "skopeo is not installed")
    repository, keys, name = KEYED[situation]
    auths = {
        key: {"auth": base64.b64encode(f"{login_user}:{SECRET}".encode()).decode()} for key, login_user in keys.items()
    }
    auth = user.write("auth.json", json.dumps({"auths": auths}).replace("HOST", front.host))
    check_login(user, front, repository, name, ("one", "two", "three"), {"REGISTRY_AUTH_FILE": str(auth)})


@pytest.mark.parity("credential-helpers and credHelpers of podman and skopeo")
def test_login_goes_to_the_first_credential_helper(user: User, front: Faulty) -> None:
    """skopeo finds the login that penroot stores in the helper. After penroot logout, skopeo finds none."""
    require(shutil.which("skopeo"), "skopeo is not installed")
    helper = """#!/bin/sh
case $1 in
store) exec cat > "$HOME/box";;
get) cat "$HOME/box" 2>/dev/null || { echo credentials not found in native keychain; exit 1; };;
erase) rm "$HOME/box";;
esac
"""
    user.write("bin/docker-credential-box", helper, 0o755)
    user.write(".config/containers/registries.conf", "credential-helpers = ['box']\n")
    env = {"PATH": f"{user.home}/bin:{user.environ['PATH']}"}
    assert "as me: docker-credential-box" in log_in(user, "-u", "me", front.host, env=env).stderr
    assert stored_logins(user) == {front.host: {}}
    assert user.run("skopeo", "login", "--get-login", front.host, env=env).stdout == "me\n"
    assert "401 from" not in user.penroot("digest", f"docker://{front.host}#x", env=env, status=1).stderr
    user.penroot("logout", front.host, env=env)
    user.run("skopeo", "login", "--get-login", front.host, env=env, status=1)


@pytest.mark.parity("login --password-stdin")
@pytest.mark.security("G2")
def test_no_process_shows_the_password(user: User, front: Faulty) -> None:
    require(shutil.which("strace"), "strace is not installed")
    user.write("docker-credential-box", "#!/bin/sh\nexec cat > /dev/null\n", 0o755)
    user.write(".docker/config.json", '{"credsStore": "box"}')
    trace = user.home / "trace"
    strace = ("strace", "-f", "-v", "-s", "4096", "-e", "trace=execve", "-o", str(trace))
    path = {"PATH": f"{user.home}:{user.environ['PATH']}"}
    done = user.run(*strace, "penroot", "login", "-u", "me", front.host, env=path, stdin=SECRET)
    assert "docker-credential-box" in done.stderr
    assert "docker-credential-box" in trace.read_text() and SECRET not in trace.read_text()
    assert stored_logins(user) == {front.host: {}}


@pytest.mark.parity("the example of docs/howto/private-registry.md")
def test_the_example_of_the_documentation(user: User, front: Faulty) -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs/howto/private-registry.md").read_text()
    (example,) = re.findall(r"```console\n(\$ [^`]*penroot login[^`]*)```", text)
    assert front.login
    front.login.users["jane"] = "her token"
    commands = example.replace("registry.example.org", front.host).replace("$ ", "").strip().replace("\n", " && ")
    done = user.run("sh", "-c", commands, env={"TOKEN": "her token"})
    assert done.stderr.splitlines()[0].startswith(f"[INFO] logged in to {front.host} as jane")
    assert done.stderr.splitlines()[1] == f"[INFO] logged out of {front.host}"
