"""Log in and out: try a login at its registry, and store the login in the files of docker and podman.

Sources: docker-login(1), "Credential helper protocol"; containers-auth.json(5); OCI distribution specification,
"Determining Support", for the request that tries a login.
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
from enroot_py.registry import credentials, refusals, site
from enroot_py.registry.authorization import Authorization
from enroot_py.registry.credentials import Credential
from enroot_py.registry.http import HttpClient, Response, Retries
from enroot_py.registry.reference import Reference, parse

_MAX_ANSWER_BYTES = 1 << 16
_TRIAL_PATH = "/v2/"


def registry(text: str) -> Reference:
    """Parse HOST[:PORT] of a registry. Return a reference to an image "x" in it. Raises UsageError."""
    host = text.removeprefix("https://").rstrip("/").removesuffix("/v1")
    try:
        reference = parse(f"docker://{host}#x")
        if "@" in host or not isinstance(reference, Reference):
            raise ImageReferenceError("")
    except ImageReferenceError:
        raise UsageError(
            f"{text!r} is not a registry", hint="write HOST or HOST:PORT; for Docker Hub write docker.io"
        ) from None
    return reference


def check(reference: Reference, login: Credential, settings: Settings) -> bool:
    """Try a login. Return False if the registry needs no login. Raises RefusedError (a bad login), RegistryError."""
    is_insecure = site.places(reference, settings)[-1].is_insecure
    client = HttpClient(reference.registry, settings, lambda busy: None, is_insecure=is_insecure)
    authorization = Authorization(reference, settings, client, lambda busy: None)
    authorization.new_login = login

    def ask() -> Response:
        response = client.request("GET", _TRIAL_PATH, authorization.headers)
        with response:
            answer = response.document(_MAX_ANSWER_BYTES)
        if response.status == 200:
            response.refuse_page(reference.registry, answer)
        if response.status == 401 and not authorization.headers:
            authorization.answer(response.header("WWW-Authenticate"))
            return ask()
        return response

    try:
        response = Retries(settings).run(reference.registry, ask)
    except RefusedError as e:
        raise _refused(login, reference, authorization.unknown_token_server, settings) from e
    if authorization.unknown_token_server or response.status in (401, 403):
        raise _refused(login, reference, authorization.unknown_token_server, settings)
    if response.status not in (200, 404):  # some registries have nothing at this path
        raise refusals.failure(response, reference.registry, _TRIAL_PATH)
    return bool(authorization.headers)


def _refused(login: Credential, reference: Reference, unknown_server: str, settings: Settings) -> RefusedError:
    host = reference.registry
    if unknown_server:
        message = f"the login for {host} is not sent to the unknown token server {unknown_server}"
        return RefusedError(message, hint=refusals.how_to_trust(reference, unknown_server, settings))
    return RefusedError(
        f"{host} refuses the login of {login.user!r}",
        hint="check user and password; many registries want an access token from their web site as the password",
    )


class AuthFile:
    """A file of logins in docker's format. Methods raise ConfigError."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self.path = os.path.realpath(path)
        self._environ = environ

    def add(self, reference: Reference, login: Credential) -> str:
        """Store a login with the registry's credential helper or in the file. Return the name of the helper or file."""
        key = credentials.key(reference.registry)
        with self._changed() as config:
            auths = _table(config, "auths", self.path)
            if helper := credentials.helper_of(config, reference.registry, self._environ):
                secret = {"ServerURL": key, "Username": login.user, "Secret": login.secret}
                credentials.tell_helper(helper, "store", json.dumps(secret), self._environ)
                auths[key] = {}  # docker takes its list of registries from these keys
                return f"docker-credential-{helper}"
            auths[key] = {"auth": base64.b64encode(f"{login.user}:{login.secret}".encode()).decode()}
        return self.path

    def remove(self, reference: Reference) -> bool:
        """Remove the logins for a registry. Return whether there was one."""
        if not os.path.exists(self.path):
            return False
        with self._changed() as config:
            auths = _table(config, "auths", self.path)
            keys = list(credentials.keys(auths, reference.registry))
            for key in keys:
                del auths[key]
            helper = credentials.helper_of(config, reference.registry, self._environ)
            erased = bool(helper) and credentials.tell_helper(
                helper, "erase", credentials.key(reference.registry), self._environ
            )
        return bool(keys) or erased

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """Yield the file's content for changes. If it was changed, replace the file atomically with mode 0600."""
        directory = os.path.dirname(self.path)
        umask = os.umask(0o077)  # so that no other user can open the file while it is empty
        try:
            _make(directory)
            with waits.changing(self.path):  # two logins at the same time must both be stored
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
                f"cannot write {self.path}: {e.strerror}",
                hint="name another file with REGISTRY_AUTH_FILE or --authfile",
            ) from e
        finally:
            os.umask(umask)


def _make(directory: str) -> None:
    """Make the directory of a file with secrets, if missing. Raises OSError if other users could replace the file."""
    try:
        trusted.place(directory, make=True)
    except PermissionError:
        if not os.path.isdir(directory) or not os.stat(directory).st_mode & stat.S_ISVTX:
            raise


def _table(config: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    table = config.setdefault(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} is not a JSON object", hint=credentials.HINT)
    return table
