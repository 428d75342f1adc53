"""Logins that users make: tried at the registry, and kept where docker and podman keep theirs.

Sources: docker-login(1), "Credential helper protocol"; containers-auth.json(5); OCI distribution specification,
"Determining Support", for what is asked.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from enroot_py.base import making, trusted, waits
from enroot_py.base.errors import ConfigError, ImageReferenceError, RefusedError, UsageError
from enroot_py.config.settings import Settings
from enroot_py.registry import credentials, refusals
from enroot_py.registry.authorization import Authorization
from enroot_py.registry.credentials import Credential
from enroot_py.registry.http import HttpClient, Patience, Response
from enroot_py.registry.reference import Reference, parse

_MAX_ANSWER_BYTES = 1 << 16
_ASKED = "/v2/"  # what a registry lets in only whom it knows


def registry(text: str) -> Reference:
    """The registry that HOST[:PORT] names, as a reference to an image in it. Raises UsageError."""
    host = text.removeprefix("https://").rstrip("/").removesuffix("/v1")
    try:
        reference = parse(f"docker://{host}#x")
        if "@" in host or not isinstance(reference, Reference):
            raise ImageReferenceError("")
    except ImageReferenceError:
        raise UsageError(
            f"{text!r} is not a registry", hint="it is HOST or HOST:PORT, and for Docker Hub docker.io"
        ) from None
    return reference


def check(reference: Reference, login: Credential, settings: Settings) -> bool:
    """Whether the registry asks for a login, and takes this one. Raises RefusedError where not, RegistryError."""
    client = HttpClient(reference.registry, settings, lambda asks: None)
    trial = Authorization(reference, settings, client, lambda asks: None)
    trial.given = login

    def ask() -> Response:
        response = client.request("GET", _ASKED, trial.headers)
        with response:
            answer = response.document(_MAX_ANSWER_BYTES)
        if response.status == 200:
            response.refuse_page(reference.registry, answer)
        if response.status == 401 and not trial.headers:
            trial.answer(response.header("WWW-Authenticate"))
            return ask()
        return response

    try:
        response = Patience(settings).outlast(reference.registry, ask)
    except RefusedError as e:
        raise _refused(login, reference, trial.stranger, settings) from e
    if trial.stranger or response.status in (401, 403):
        raise _refused(login, reference, trial.stranger, settings)
    if response.status not in (200, 404):  # some have nothing there
        raise refusals.failure(response, reference.registry, _ASKED)
    return bool(trial.headers)


def _refused(login: Credential, reference: Reference, stranger: str, settings: Settings) -> RefusedError:
    host = reference.registry
    if stranger:
        message = f"{stranger}, which hands out the tokens of {host}, gets no login for it"
        return RefusedError(message, hint=refusals.introduction(reference, stranger, settings))
    return RefusedError(
        f"{host} refuses the login of {login.user!r}",
        hint="check user and password: many registries want a token of their web site for that",
    )


class AuthFile:
    """A file in docker's format that logins are written to. Methods raise ConfigError."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self.path = os.path.realpath(path)
        self._environ = environ

    def add(self, reference: Reference, login: Credential) -> str:
        """Keep a login, by the helper program of its registry or in the file, and say where."""
        key = credentials.key(reference.registry)
        with self._changed() as config:
            auths = _table(config, "auths", self.path)
            if helper := credentials.helper_of(config, reference.registry):
                secret = {"ServerURL": key, "Username": login.user, "Secret": login.secret}
                credentials.tell_helper(helper, "store", json.dumps(secret), self._environ)
                auths[key] = {}  # as docker does, which looks for names here
                return f"docker-credential-{helper}"
            auths[key] = {"auth": base64.b64encode(f"{login.user}:{login.secret}".encode()).decode()}
        return self.path

    def remove(self, reference: Reference) -> bool:
        """Forget the logins for a registry; whether there was one."""
        if not os.path.exists(self.path):
            return False
        with self._changed() as config:
            auths = _table(config, "auths", self.path)
            keys = list(credentials.keys(auths, reference.registry))
            for key in keys:
                del auths[key]
            helper = credentials.helper_of(config, reference.registry)
            told = bool(helper) and credentials.tell_helper(
                helper, "erase", credentials.key(reference.registry), self._environ
            )
        return bool(keys) or told

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """What the file says, to be changed; then it is written, whole or not at all, for its user alone."""
        directory = os.path.dirname(self.path)
        before = os.umask(0o077)  # nobody else may open it while it is empty
        try:
            _make(directory)
            with waits.changing(self.path):  # two logins at once: neither is lost
                config = credentials.config(self.path)
                unchanged = json.dumps(config)
                yield config
                if json.dumps(config) == unchanged:
                    return
                with making.File(self.path) as file:
                    file.write((json.dumps(config, indent="\t") + "\n").encode())
                    file.publish(replace=True)
        except OSError as e:
            raise ConfigError(
                f"cannot write {self.path}: {e.strerror}", hint="REGISTRY_AUTH_FILE or --authfile names another file"
            ) from e
        finally:
            os.umask(before)


def _make(directory: str) -> None:
    """Make the directory of a file with secrets, if there is none. Raises OSError where others could swap the file."""
    try:
        trusted.place(directory, make=True)
    except PermissionError:
        if not os.path.isdir(directory) or not os.stat(directory).st_mode & stat.S_ISVTX:
            raise


def _table(config: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    table = config.setdefault(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} is not a table", hint="it is written by: docker login")
    return table
