"""Find registry logins in enroot's ``.credentials`` (netrc), docker's config.json and podman's auth.json.

Messages and program arguments never contain a secret. Messages name the file that a login comes from.
Sources: enroot-import(1), "Description"; netrc(5); docker-login(1); containers-auth.json(5).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enroot_py.base import log, run
from enroot_py.base.errors import ConfigError
from enroot_py.config import files
from enroot_py.config.settings import Settings
from enroot_py.config.words import base_directories, cut
from enroot_py.registry import containersconf
from enroot_py.registry.reference import DOCKER_HUB, Reference, spelling

_HUB_KEY = "https://index.docker.io/v1/"
_NOT_FOUND = "credentials not found"  # message of docker-credential-*
HINT = "correct the file, or move it away and log in again: penroot login REGISTRY"
_MAX_ANSWER_BYTES = 4 << 20  # of a credential helper or command
_HELPER_TIMEOUT_S = 60.0  # some helpers prompt the user


@dataclass(frozen=True, slots=True)
class Credential:
    """A login for one registry. ``source`` names its file or program, for messages."""

    user: str
    secret: str = field(repr=False)
    source: str
    identity_token: bool = False  # the secret is an OAuth2 refresh token, not a password

    def basic(self) -> str:
        """Return the Authorization header of RFC 7617."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


@dataclass(frozen=True, slots=True)
class _Query:
    """A search for a login. ``hosts`` are names of the registry, the most exact first.

    ``user`` is "" if any user is accepted. ``environ`` has the variables that passwords may refer to, and is the
    environment of the programs that return logins.
    """

    hosts: Sequence[str]
    repository: str
    user: str
    environ: Mapping[str, str]


def find(
    reference: Reference, settings: Settings, *, realm: str = "", environ: Mapping[str, str] = os.environ
) -> Credential | None:
    """Find the credential for the registry of ``reference``, and for the user if the reference names one.

    A login may be limited to a part of a registry. ``realm`` is the registry's known token server, or "". Some files
    have the login under the token server's name. Raises ConfigError for an unreadable or invalid file.
    """
    if reference.secret:
        return Credential(reference.user, reference.secret, "the command line")
    hosts = _hosts(reference.registry)
    realm = spelling(realm)
    if realm and realm not in hosts:
        hosts += _hosts(realm)
    query = _Query(hosts, reference.repository, reference.user, environ)
    credential = _Netrc(netrc_path(settings)).find(query)
    for helper in () if credential else containersconf.credential_helpers(environ):
        credential = credential or _from_helper(helper, query)
    return credential


def searched_files(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return the list of files that find() reads, for messages."""
    return ", ".join((netrc_path(settings), *_docker_paths(environ)))


def writable(environ: Mapping[str, str] = os.environ) -> str:
    """Return the file that logins are written to: REGISTRY_AUTH_FILE, or docker's config.json."""
    return _docker_paths(environ)[0]


def key(registry: str) -> str:
    """Return docker's key for a registry. Docker Hub's key is its old address."""
    return _HUB_KEY if registry == DOCKER_HUB else registry


def keys(auths: Mapping[str, object], registry: str) -> Iterator[str]:
    """Yield the keys of a login file's ``auths`` for a whole registry, without keys for a part of the registry."""
    hosts = (registry, *(_hosts(registry) if registry == DOCKER_HUB else ()))
    for host in hosts:
        yield from _keys(auths, host, "")


def config(path: str) -> dict[str, Any]:
    """Return the content of a file in docker's format, or {} if the file does not exist. Raises ConfigError."""
    text, _ = _read(path)
    try:
        document = json.loads(text or "{}")
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: {e}", hint=HINT) from e
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object", hint=HINT)
    return document


def helper_of(config: Mapping[str, Any], registry: str, environ: Mapping[str, str]) -> str:
    """Return the NAME of the program docker-credential-NAME that stores the registry's login, or "".

    ``config`` is the content of a login file. As in podman, the first entry of ``credential-helpers`` in
    registries.conf takes precedence over the helpers in ``config``.
    """
    first = containersconf.credential_helpers(environ)[0]
    if first != containersconf.AUTH_FILES:
        return first
    helpers = _helpers(config)
    return str(next((helpers[host] for host in _hosts(registry) if host in helpers), config.get("credsStore") or ""))


def _helpers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {spelling(str(host)): name for host, name in (config.get("credHelpers") or {}).items()}


def tell_helper(name: str, verb: str, stdin: str, environ: Mapping[str, str]) -> bool:
    """Let a credential helper store or erase a login. Return False if it has no login to erase. Raises ConfigError."""
    path = _helper_path(name, environ)
    if path is None:
        hint = "install it, or remove it from credHelpers, credsStore and credential-helpers"
        raise ConfigError(f"docker-credential-{name} is not in PATH", hint=hint)
    answer, failure = _run([path, verb], environ, stdin)
    if failure and verb == "erase" and _NOT_FOUND in f"{answer}{failure}":
        return False
    if failure:
        raise failure  # its text omits the program's stdout, which may have the secret
    return True


def netrc_path(settings: Settings) -> str:
    return settings.config_path + "/.credentials"


def _docker_paths(environ: Mapping[str, str]) -> list[str]:
    base = base_directories(environ)
    podman_directories = [base["XDG_CONFIG_HOME"]]
    if environ.get("XDG_RUNTIME_DIR"):
        podman_directories.insert(0, environ["XDG_RUNTIME_DIR"])
    return [
        *filter(None, [environ.get("REGISTRY_AUTH_FILE")]),
        (environ.get("DOCKER_CONFIG") or base["HOME"] + "/.docker") + "/config.json",
        *(f"{directory}/containers/auth.json" for directory in podman_directories),
    ]


def _hosts(registry: str) -> list[str]:
    """Return the names that files may use for a registry, the most exact first."""
    hosts = [registry]
    host, colon, port = registry.rpartition(":")
    if colon and port.isdigit():
        hosts.append(host)
    if registry == DOCKER_HUB:
        hosts += ["docker.io", "index.docker.io"]
    return hosts


class _Netrc:
    """A netrc(5) file whose passwords may be variables or commands."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text, self._is_safe = _read(path)

    def find(self, query: _Query) -> Credential | None:
        entries = list(self._entries())
        for host in query.hosts:
            for machine, login, password in entries:
                if spelling(machine) == host and query.user in ("", login):
                    return Credential(login, self._secret(machine, password, query.environ), self._path)
        return None

    def _entries(self) -> Iterator[tuple[str, str, str]]:
        """Yield (machine, login, password). A password that is a command extends to the end of its line."""
        entry: dict[str, str] = {}
        for number, line in enumerate(self._text.splitlines(), 1):
            rest = line.strip()
            if rest.startswith("#"):
                continue
            while rest:
                key, *more = rest.split(None, 1)
                value, *after = more[0].split(None, 1) if more else ("",)
                is_known = key in ("machine", "login", "password", "account")
                if not is_known or not value or not entry and key != "machine":
                    raise ConfigError(
                        f"{self._path}, line {number}: not of the form 'machine HOST login USER password SECRET'",
                        hint="write one entry a line, see enroot-import(1)",
                    )
                rest = after[0] if after else ""
                if key == "password" and value.startswith("$("):
                    value, rest = more[0].rstrip(), ""
                if key == "machine":
                    if entry:
                        yield entry["machine"], entry["login"], entry["password"]
                    entry = dict.fromkeys(("machine", "login", "password"), "")
                entry[key] = value
        if entry:
            yield entry["machine"], entry["login"], entry["password"]

    def _secret(self, machine: str, password: str, environ: Mapping[str, str]) -> str:
        """Return the password. A password of the form ``$NAME``, ``${NAME}`` or ``$(COMMAND)`` is expanded.

        A leading backslash before the ``$`` prevents the expansion, and is removed. All other passwords are returned
        unchanged.
        """
        if password.lstrip("\\").startswith("$") and password.startswith("\\"):
            return password[1:]
        if password.startswith("$("):
            return self._command(machine, password, environ)
        expression, name, default, _ = [*cut(password)][-1]
        if not name or expression != password or default is not None:
            return password
        secret = environ.get(name, "")
        if not secret:
            raise ConfigError(
                f"{self._path}: the password of {machine} is a variable that is not set",
                hint="set the variable; if the password itself begins with $, write \\$",
            )
        return secret

    def _command(self, machine: str, password: str, environ: Mapping[str, str]) -> str:
        """Return the output of ``$(COMMAND)``, run by a shell. Refuse if other users can write the file."""
        if not self._is_safe:
            raise ConfigError(
                f"{self._path}: the password of {machine} is a command, but others can write to the file",
                hint=f"deny others access: chmod 600 {self._path} (and chown, if it is not your file)",
            )
        if not password.endswith(")"):
            raise ConfigError(
                f"{self._path}: the password of {machine} has no closing parenthesis", hint="write: password $(COMMAND)"
            )
        # The command may have a secret in it, and all users of the machine can see program arguments: use stdin.
        script = f"{{ {password[2:-1]}\n}} </dev/null\n"
        answer, failure = _run(["/bin/sh"], environ, script)
        if failure:
            raise ConfigError(f"{self._path}: the command for the password of {machine} failed: {failure}")
        secret = answer.strip()
        if not secret:
            raise ConfigError(f"{self._path}: the command for the password of {machine} printed nothing")
        return secret


def _run(command: Sequence[str], environ: Mapping[str, str], text: str = "") -> tuple[str, ConfigError | None]:
    """Run a program with ``text`` on stdin. Return its stdout, which is a secret, and the error or None."""
    with open(os.memfd_create("stdin"), "w+b") as stdin, open(os.memfd_create("stdout"), "w+b") as stdout:
        stdin.write(text.encode())
        stdin.seek(0)
        failure = None
        try:
            run.Program(
                command,
                error=ConfigError,
                environ=environ,
                stdin=stdin.fileno(),
                stdout=stdout.fileno(),
                timeout=_HELPER_TIMEOUT_S,
            ).run()
        except ConfigError as e:
            failure = e
        stdout.seek(0)
        return stdout.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace"), failure


def _from_helper(name: str, query: _Query) -> Credential | None:
    """Find a login through ``name``, an entry of credential-helpers: containers-registries.conf(5)."""
    if name == containersconf.AUTH_FILES:
        logins = (_from_docker(path, query) for path in _docker_paths(query.environ))
    else:
        logins = (_ask_helper(name, host, query.environ) for host in query.hosts)
    return next((login for login in logins if login and query.user in ("", login.user)), None)


def _from_docker(path: str, query: _Query) -> Credential | None:
    document = config(path)
    try:
        for credential in _docker_credentials(document, path, query):
            if credential and (not query.user or credential.user in (query.user, "")):
                return credential
    except (ValueError, AttributeError, TypeError) as e:
        raise ConfigError(f"{path}: {e}", hint=HINT) from e
    return None


def _docker_credentials(config: Any, path: str, query: _Query) -> Iterator[Credential | None]:
    """Yield the logins for each host in podman's order: from credHelpers, then auths, then credsStore."""
    auths = config.get("auths") or {}
    helpers, store = _helpers(config), config.get("credsStore")
    for host in query.hosts:
        if helper := helpers.get(host):
            yield _ask_helper(str(helper), host, query.environ)
        for key in _keys(auths, host, query.repository):
            yield _docker_auth(auths[key], path) if auths[key] else None
        if store and not helper:
            yield _ask_helper(str(store), host, query.environ)


def _keys(auths: Mapping[str, object], host: str, repository: str) -> list[str]:
    """Return the keys of ``auths`` for a repository of a host, the most exact first: containers-auth.json(5).

    ``https://index.docker.io/v1/`` and ``HOST`` match the whole host. ``HOST/PATH`` matches the
    repository PATH, and the repositories beneath PATH.
    """
    keys = []
    for key in auths:
        _, separator, rest = key.rpartition("://")
        name, _, part = rest.rstrip("/").partition("/")
        if separator or part in ("v1", "v2"):
            part = ""
        if spelling(name) == host and (not part or f"{repository}/".startswith(f"{part}/")):
            keys.append((len(part), key))
    return [key for _, key in sorted(keys, reverse=True)]


def _ask_helper(name: str, host: str, environ: Mapping[str, str]) -> Credential | None:
    """Get a login from docker-credential-NAME: docker-login(1), "Credential helper protocol"."""
    program, path = f"docker-credential-{name}", _helper_path(name, environ)
    if path is None:
        log.warn(f"{program} is not in PATH, so penroot cannot ask it for a login for {host}")
        return None
    answer, failure = _run([path, "get"], environ, key(host))
    if failure:
        if _NOT_FOUND not in f"{answer}{failure}":
            log.warn(str(failure))
        return None
    try:
        login = json.loads(answer)
        user, secret = str(login["Username"]), str(login["Secret"])
    except (ValueError, KeyError, TypeError, RecursionError):
        log.warn(f"{program} returned an invalid login for {host}")
        return None
    if not secret:
        return None
    return Credential("" if user == "<token>" else user, secret, program, identity_token=user == "<token>")


def _helper_path(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of docker-credential-NAME in PATH, or None. A NAME with unusual characters is not looked up."""
    is_usual = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    return shutil.which(f"docker-credential-{name}", path=environ.get("PATH")) if is_usual else None


def _docker_auth(entry: Mapping[str, str], path: str) -> Credential | None:
    if entry.get("identitytoken"):
        return Credential(entry.get("username", ""), entry["identitytoken"], path, identity_token=True)
    if entry.get("auth"):
        try:
            user, colon, secret = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise ValueError("an auth is not base64 of USER:PASSWORD") from None
        return Credential(user, secret, path) if colon else None
    if entry.get("username") and entry.get("password"):
        return Credential(entry["username"], entry["password"], path)
    return None


def _read(path: str) -> tuple[str, bool]:
    """Return the text of a file ("" if it is missing), and whether only this user and root can write to the file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), encoding="utf-8") as f:
            status = os.fstat(f.fileno())
            files.check_regular(status, path)
            if stat.S_IMODE(status.st_mode) & 0o077:
                log.debug(f"other users can read the secrets in {path}: chmod 600 {path}")
            is_safe = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
            return f.read(), is_safe
    except (OSError, UnicodeDecodeError) as e:
        files.refuse_unless_absent(path, e)
        return "", False
