"""Who we are to a registry: enroot's ``.credentials`` (netrc), then docker's config.json.

Sources: enroot-import(1), "Description"; netrc(5); docker-login(1). A secret is never
part of a message; where it came from is.
"""

import base64
import binascii
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from enroot_py import configs, log, run
from enroot_py.errors import ConfigError
from enroot_py.reference import DOCKER_HUB
from enroot_py.settings import Settings, base_directories, expand

_HUB_KEY = "https://index.docker.io/v1/"
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


def find(
    registry: str, user: str, settings: Settings, *, realm: str = "", environ: Mapping[str, str] = os.environ
) -> Credential | None:
    """The credential for ``registry`` (HOST or HOST:PORT), of ``user`` where one is given.

    ``realm`` is the host that hands out its tokens, for enroot's files may name
    that instead. Raises ConfigError for a file that cannot be read or understood.
    """
    hosts = _hosts(registry)
    if realm and realm not in hosts:
        hosts += _hosts(realm)
    return _from_netrc(netrc_path(settings), hosts, user, environ) or _from_docker(
        docker_path(environ), hosts, user, environ
    )


def places(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Where find() looks, for messages."""
    return f"{netrc_path(settings)}, {docker_path(environ)}"


def netrc_path(settings: Settings) -> str:
    return settings.config_path + "/.credentials"


def docker_path(environ: Mapping[str, str]) -> str:
    return (environ.get("DOCKER_CONFIG") or base_directories(environ)["HOME"] + "/.docker") + "/config.json"


def _hosts(registry: str) -> list[str]:
    """Names under which a registry may be filed, the most exact first."""
    hosts = [registry]
    host, colon, port = registry.rpartition(":")
    if colon and port.isdigit():
        hosts.append(host)
    if registry == DOCKER_HUB:
        hosts += ["docker.io", "index.docker.io"]
    return hosts


def _from_netrc(path: str, hosts: Sequence[str], user: str, environ: Mapping[str, str]) -> Credential | None:
    text = _read(path)
    if text is None:
        return None
    entries = list(_netrc(text, path))
    for host in hosts:
        for machine, login, password in entries:
            if machine.lower() == host and (not user or login == user):
                return Credential(login, _secret(password, path, machine, environ), path)
    return None


def _netrc(text: str, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield (machine, login, password). A password goes on to the end of its line where it begins with ``$``."""
    for number, line in enumerate(_joined(text), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        found = dict.fromkeys(("machine", "login", "password"), "")
        at = 0
        while at < len(words):
            key = words[at]
            if key not in (*found, "account") or at + 1 >= len(words):
                raise ConfigError(
                    f"{path}, entry {number}: not of the form 'machine HOST login USER password SECRET'",
                    hint="one entry a line, see enroot-import(1)",
                )
            value = words[at + 1]
            if key == "password" and value.startswith("$"):
                value = " ".join(words[at + 1 :])
                at = len(words)
            if key in found:
                found[key] = value
            at += 2
        yield found["machine"], found["login"], found["password"]


def _joined(text: str) -> list[str]:
    """Entries, one each: netrc(5) lets an entry go over several lines, ``machine`` begins the next."""
    entries: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if stripped.split()[0] == "machine" or not entries:
            entries.append(stripped)
        else:
            entries[-1] += " " + stripped
    return entries


def _secret(password: str, path: str, machine: str, environ: Mapping[str, str]) -> str:
    if not password.startswith("$"):
        return password
    if password.startswith("$("):
        return _command(password, path, machine, environ)
    try:
        secret = expand(password, environ)
    except ValueError:
        raise ConfigError(f"{path}: the password of {machine} does not parse") from None
    if not secret:
        raise ConfigError(f"{path}: the password of {machine} is that of a variable which is not set")
    return secret


def _command(password: str, path: str, machine: str, environ: Mapping[str, str]) -> str:
    """What ``$(COMMAND)`` writes, by a shell. Only a file that nobody else can write has commands run."""
    found = os.stat(path)
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise ConfigError(
            f"{path}: the password of {machine} is a command, but others can write to the file",
            hint=f"chmod 600 {path}, and own it",
        )
    if not password.endswith(")"):
        raise ConfigError(f"{path}: the password of {machine} does not parse", hint="write: password $(COMMAND)")
    answer, failure = _ask(["/bin/sh", "-c", password[2:-1]], environ)
    if failure:
        raise ConfigError(f"{path}: the command for the password of {machine}: {failure}")
    secret = answer.strip()
    if not secret:
        raise ConfigError(f"{path}: the command for the password of {machine} writes nothing")
    return secret


def _ask(command: Sequence[str], environ: Mapping[str, str], question: str = "") -> tuple[str, ConfigError | None]:
    """What a program writes to stdout, which no message quotes, for it is a secret; and why it failed."""
    with open(os.memfd_create("question"), "w+b") as given, open(os.memfd_create("answer"), "w+b") as taken:
        given.write(question.encode())
        given.seek(0)
        failure = None
        try:
            run.run(
                command,
                error=ConfigError,
                environ=environ,
                stdin=given.fileno(),
                stdout=taken.fileno(),
                timeout=_PATIENCE,
            )
        except ConfigError as e:
            failure = e
        taken.seek(0)
        return taken.read().decode("utf-8", "replace"), failure


def _from_docker(path: str, hosts: Sequence[str], user: str, environ: Mapping[str, str]) -> Credential | None:
    text = _read(path)
    if text is None:
        return None
    try:
        config = json.loads(text)
        auths = config.get("auths") or {}
        # podman's HOST/PATH is for a part of HOST only: the shortest key of a host counts
        auths = {_docker_host(key): auths[key] for key in sorted(auths, key=len, reverse=True)}
        helpers = config.get("credHelpers") or {}
        for host in hosts:
            if host in auths and auths[host]:
                found = _docker_auth(auths[host], path)
                if found and (not user or found.user in (user, "")):
                    return found
            helper = helpers.get(host) or config.get("credsStore")
            if helper:
                found = _ask_helper(str(helper), host, environ)
                if found and (not user or found.user in (user, "")):
                    return found
    except (ValueError, AttributeError, TypeError, RecursionError) as e:
        raise ConfigError(f"{path}: {e}", hint="it is written by: docker login") from e
    return None


def _ask_helper(name: str, host: str, environ: Mapping[str, str]) -> Credential | None:
    """What the program docker-credential-NAME knows: docker-login(1), "Credential helper protocol"."""
    program = f"docker-credential-{name}"
    path = shutil.which(program, path=environ.get("PATH"))
    if path is None or "/" in name:
        log.warn(f"{program} is not in PATH: it may know a login for {host}")
        return None
    # Docker files the Hub under the address of its first version.
    answer, failure = _ask([path, "get"], environ, _HUB_KEY if host == DOCKER_HUB else host)
    if failure:
        if "credentials not found" not in f"{answer}{failure}":
            log.warn(str(failure))
        return None
    try:
        found = json.loads(answer)
        user, secret = str(found["Username"]), str(found["Secret"])
    except (ValueError, KeyError, TypeError, RecursionError):
        log.warn(f"{program} answers what is no login for {host}")
        return None
    if not secret:
        return None
    return Credential("" if user == "<token>" else user, secret, program, identity_token=user == "<token>")


def _docker_host(key: str) -> str:
    """``https://index.docker.io/v1/`` and ``HOST`` are both keys of auths."""
    return key.partition("://")[2].partition("/")[0].lower() if "://" in key else key.partition("/")[0].lower()


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


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as f:
            if stat.S_IMODE(os.fstat(f.fileno()).st_mode) & 0o077:
                log.debug(f"{path} holds secrets and can be read by others: chmod 600 {path}")
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        configs.refuse_unless_absent(path, e)
        return None
