"""Who we are to a registry: enroot's ``.credentials`` (netrc), docker's config.json, podman's auth.json.

Sources: enroot-import(1), "Description"; netrc(5); docker-login(1); containers-auth.json(5). A
secret is never part of a message, nor of the arguments of a program; where it came from is.
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
from enroot_py.registry.reference import DOCKER_HUB, Reference, spelling

_HUB_KEY = "https://index.docker.io/v1/"
_NOTHING = "credentials not found"  # of docker-credential-*
_WRITTEN = "it is written by: docker login"
_LARGEST = 4 << 20  # bytes of a program's answer
_PATIENCE = 60.0  # seconds for a program that knows a secret; some ask their user


@dataclass(frozen=True, slots=True)
class Credential:
    """A login for one registry. ``source`` names the file, for messages."""

    user: str
    secret: str = field(repr=False)
    source: str
    identity_token: bool = False  # the secret is an OAuth2 refresh token, not a password

    def basic(self) -> str:
        """The Authorization header of RFC 7617."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a login is for: hosts that it may be filed under, the most exact first; the user may be "", which is any.

    ``environ`` is for passwords that are variables, and for programs.
    """

    hosts: Sequence[str]
    repository: str
    user: str
    environ: Mapping[str, str]


def find(
    reference: Reference, settings: Settings, *, realm: str = "", environ: Mapping[str, str] = os.environ
) -> Credential | None:
    """The credential for the registry of ``reference``, of its user where one is given.

    A login may be for a part of a registry. ``realm`` is a host that is known to hand out the
    registry's tokens, for enroot's files may name that instead. Raises ConfigError for a file
    that cannot be read or understood.
    """
    if reference.secret:
        return Credential(reference.user, reference.secret, "the command line")
    hosts = _hosts(reference.registry)
    realm = spelling(realm)
    if realm and realm not in hosts:
        hosts += _hosts(realm)
    wanted = _Wanted(hosts, reference.repository, reference.user, environ)
    credential = _Netrc(netrc_path(settings)).find(wanted)
    for path in _docker_paths(environ):
        credential = credential or _from_docker(path, wanted)
    return credential


def places(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Where find() looks, for messages."""
    return ", ".join((netrc_path(settings), *_docker_paths(environ)))


def writable(environ: Mapping[str, str] = os.environ) -> str:
    """The file that a login is written to: the one that the user names, or docker's."""
    return _docker_paths(environ)[0]


def key(registry: str) -> str:
    """The name under which docker files a registry; the Hub is under the address of its first version."""
    return _HUB_KEY if registry == DOCKER_HUB else registry


def keys(auths: Mapping[str, object], registry: str) -> Iterator[str]:
    """The names under which a registry itself is in auths; a login for a part of one is another one."""
    hosts = (registry, *(_hosts(registry) if registry == DOCKER_HUB else ()))
    for host in hosts:
        yield from _keys(auths, host, "")


def config(path: str) -> dict[str, Any]:
    """What a file in docker's format says; nothing where there is none. Raises ConfigError."""
    text, _ = _read(path)
    try:
        said = json.loads(text or "{}")
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: {e}", hint=_WRITTEN) from e
    if not isinstance(said, dict):
        raise ConfigError(f"{path} is not a table", hint=_WRITTEN)
    return said


def helper_of(config: Mapping[str, Any], registry: str) -> str:
    """The program that keeps the logins for a registry, docker-credential-NAME; "" where the file does."""
    helpers = _helpers(config)
    return str(next((helpers[host] for host in _hosts(registry) if host in helpers), config.get("credsStore") or ""))


def _helpers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The programs that keep logins, by registry."""
    return {spelling(str(host)): name for host, name in (config.get("credHelpers") or {}).items()}


def tell_helper(name: str, verb: str, said: str, environ: Mapping[str, str]) -> bool:
    """Have a program keep or forget a login; whether it had something to forget. Raises ConfigError."""
    program = f"docker-credential-{name}"
    path = shutil.which(program, path=environ.get("PATH"))
    if path is None or "/" in name:
        raise ConfigError(f"{program} is not in PATH", hint="install it, or take it out of the file that names it")
    answer, failure = _ask([path, verb], environ, said)
    if failure and verb == "erase" and _NOTHING in f"{answer}{failure}":
        return False
    if failure:
        raise failure  # what it wrote may have the secret in it
    return True


def netrc_path(settings: Settings) -> str:
    return settings.config_path + "/.credentials"


def _docker_paths(environ: Mapping[str, str]) -> list[str]:
    """Files in docker's format: the one that the user names, docker's, and podman's."""
    base = base_directories(environ)
    podmans = [base["XDG_CONFIG_HOME"]]
    if environ.get("XDG_RUNTIME_DIR"):
        podmans.insert(0, environ["XDG_RUNTIME_DIR"])
    return [
        *filter(None, [environ.get("REGISTRY_AUTH_FILE")]),
        (environ.get("DOCKER_CONFIG") or base["HOME"] + "/.docker") + "/config.json",
        *(f"{directory}/containers/auth.json" for directory in podmans),
    ]


def _hosts(registry: str) -> list[str]:
    """Names under which a registry may be filed, the most exact first."""
    hosts = [registry]
    host, colon, port = registry.rpartition(":")
    if colon and port.isdigit():
        hosts.append(host)
    if registry == DOCKER_HUB:
        hosts += ["docker.io", "index.docker.io"]
    return hosts


class _Netrc:
    """A file in the form of netrc(5), with passwords that may be variables or commands."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text, self._safe = _read(path)

    def find(self, wanted: _Wanted) -> Credential | None:
        entries = list(self._entries())
        for host in wanted.hosts:
            for machine, login, password in entries:
                if spelling(machine) == host and wanted.user in ("", login):
                    return Credential(login, self._secret(machine, password, wanted.environ), self._path)
        return None

    def _entries(self) -> Iterator[tuple[str, str, str]]:
        """Yield (machine, login, password). A password that is a command goes on to the end of its line."""
        entry: dict[str, str] = {}
        for number, line in enumerate(self._text.splitlines(), 1):
            rest = line.strip()
            if rest.startswith("#"):
                continue
            while rest:
                key, *more = rest.split(None, 1)
                value, *after = more[0].split(None, 1) if more else ("",)
                known = key in ("machine", "login", "password", "account")
                if not known or not value or not entry and key != "machine":
                    raise ConfigError(
                        f"{self._path}, line {number}: not of the form 'machine HOST login USER password SECRET'",
                        hint="one entry a line, see enroot-import(1)",
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
        """The password; where all of it is ``$NAME``, ``${NAME}`` or ``$(COMMAND)``, what that stands for.

        A backslash before the ``$`` makes it an ordinary character. Any other ``$`` is one.
        """
        if password.lstrip("\\").startswith("$") and password.startswith("\\"):
            return password[1:]
        if password.startswith("$("):
            return self._command(machine, password, environ)
        written, name, default, _ = [*cut(password)][-1]
        if not name or written != password or default is not None:
            return password
        secret = environ.get(name, "")
        if not secret:
            raise ConfigError(
                f"{self._path}: the password of {machine} is that of a variable which is not set",
                hint="a password that begins with $ is written with a backslash before it",
            )
        return secret

    def _command(self, machine: str, password: str, environ: Mapping[str, str]) -> str:
        """What ``$(COMMAND)`` writes, by a shell. Only a file that nobody else can write has commands run."""
        if not self._safe:
            raise ConfigError(
                f"{self._path}: the password of {machine} is a command, but others can write to the file",
                hint=f"chmod 600 {self._path}, and own it",
            )
        if not password.endswith(")"):
            raise ConfigError(
                f"{self._path}: the password of {machine} does not parse", hint="write: password $(COMMAND)"
            )
        # Not an argument, which everybody on the machine sees: it may have a secret in it.
        script = f"{{ {password[2:-1]}\n}} </dev/null\n"
        answer, failure = _ask(["/bin/sh"], environ, script)
        if failure:
            raise ConfigError(f"{self._path}: the command for the password of {machine}: {failure}")
        secret = answer.strip()
        if not secret:
            raise ConfigError(f"{self._path}: the command for the password of {machine} writes nothing")
        return secret


def _ask(command: Sequence[str], environ: Mapping[str, str], question: str = "") -> tuple[str, ConfigError | None]:
    """What a program writes to stdout, which is a secret and part of no message; and why it failed."""
    with open(os.memfd_create("question"), "w+b") as stdin, open(os.memfd_create("answer"), "w+b") as stdout:
        stdin.write(question.encode())
        stdin.seek(0)
        failure = None
        try:
            run.Program(
                command,
                error=ConfigError,
                environ=environ,
                stdin=stdin.fileno(),
                stdout=stdout.fileno(),
                timeout=_PATIENCE,
            ).run()
        except ConfigError as e:
            failure = e
        stdout.seek(0)
        return stdout.read(_LARGEST).decode("utf-8", "replace"), failure


def _from_docker(path: str, wanted: _Wanted) -> Credential | None:
    text, _ = _read(path)
    if not text:
        return None
    try:
        for credential in _docker_credentials(json.loads(text), path, wanted):
            if credential and (not wanted.user or credential.user in (wanted.user, "")):
                return credential
    except (ValueError, AttributeError, TypeError, RecursionError) as e:
        raise ConfigError(f"{path}: {e}", hint=_WRITTEN) from e
    return None


def _docker_credentials(config: Any, path: str, wanted: _Wanted) -> Iterator[Credential | None]:
    """What a file knows of the hosts, and programs that it names; these are asked as late as can be."""
    auths = config.get("auths") or {}
    helpers = _helpers(config)
    for host in wanted.hosts:
        for key in _keys(auths, host, wanted.repository):
            yield _docker_auth(auths[key], path) if auths[key] else None
        helper = helpers.get(host) or config.get("credsStore")
        if helper:
            yield _ask_helper(str(helper), host, wanted.environ)


def _keys(auths: Mapping[str, object], host: str, repository: str) -> list[str]:
    """The keys of auths for a repository of a host, the most exact first: containers-auth.json(5).

    ``https://index.docker.io/v1/`` and ``HOST`` mean all of a host, ``HOST/PATH`` what is beneath PATH.
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
    """What the program docker-credential-NAME knows: docker-login(1), "Credential helper protocol"."""
    program = f"docker-credential-{name}"
    path = shutil.which(program, path=environ.get("PATH"))
    if path is None or "/" in name:
        log.warn(f"{program} is not in PATH: it may know a login for {host}")
        return None
    answer, failure = _ask([path, "get"], environ, key(host))
    if failure:
        if _NOTHING not in f"{answer}{failure}":
            log.warn(str(failure))
        return None
    try:
        login = json.loads(answer)
        user, secret = str(login["Username"]), str(login["Secret"])
    except (ValueError, KeyError, TypeError, RecursionError):
        log.warn(f"{program} answers what is no login for {host}")
        return None
    if not secret:
        return None
    return Credential("" if user == "<token>" else user, secret, program, identity_token=user == "<token>")


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
    """What a file says, "" where there is none, and whether nobody else could have written it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), encoding="utf-8") as f:
            status = os.fstat(f.fileno())
            files.check_regular(status, path)
            if stat.S_IMODE(status.st_mode) & 0o077:
                log.debug(f"{path} holds secrets and can be read by others: chmod 600 {path}")
            safe = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
            return f.read(), safe
    except (OSError, UnicodeDecodeError) as e:
        files.refuse_unless_absent(path, e)
        return "", False
