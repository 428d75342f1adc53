"""``penroot login`` and ``logout``."""

from __future__ import annotations

import os
import sys

import click

from enroot_py.base import log
from enroot_py.base.errors import ConfigError, UsageError
from enroot_py.cli.commands import CONTEXT, synopsis, there
from enroot_py.config import settings

_MAX_PASSWORD_BYTES = 64 << 10  # tokens are long

_authfile = click.option(
    "--authfile",
    callback=there,
    metavar="FILE",
    help="Login file (default: REGISTRY_AUTH_FILE, or docker's config.json).",
)


def _no_argument(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    """Raise UsageError for a password on the command line: process list and shell history show it."""
    if value is not None:
        raise UsageError(
            "all users of the machine can see a password on the command line",
            hint="pass it on stdin: penroot login --username USER REGISTRY < FILE",
        )


@synopsis
@click.command("login", context_settings=CONTEXT)
@click.option("-u", "--username", callback=there, help="User name (default: ask on the terminal).")
@click.option(
    "--password-stdin", is_flag=True, help="Read the password from stdin (default if stdin is not a terminal)."
)
@click.option("-p", "--password", hidden=True, expose_value=False, callback=_no_argument)
@_authfile
@click.argument("registry")
def login(username: str | None, password_stdin: bool, authfile: str | None, registry: str) -> None:
    """Log in to a REGISTRY, HOST[:PORT].

    Reads a password or token from stdin or the terminal, and tries it at the registry. Stores it like docker and
    podman: with the credential helper that the login file names for the registry, else in the login file itself.
    """
    from enroot_py.registry import credentials, logins

    reference = logins.registry(registry)
    is_interactive = sys.stdin is not None and sys.stdin.isatty() and not password_stdin
    if not username:
        if not is_interactive:
            raise UsageError("no user name given", hint="penroot login --username USER REGISTRY")
        username = click.prompt("Username", err=True)
    if ":" in username or not username.isprintable():
        raise UsageError(f"bad user name {username!r}", hint="leave out ':' and control characters")
    secret = click.prompt("Password", hide_input=True, err=True) if is_interactive else _read()
    options = settings.load()
    new = credentials.Credential(username, secret, "stdin")
    if not logins.check(reference, new, options):
        log.warn(f"{reference.registry} does not ask for a login: storing it untested")
    place = logins.AuthFile(authfile or credentials.writable(), os.environ).add(reference, new)
    log.info(f"logged in to {reference.registry} as {username}: {place}")
    first = credentials.find(reference, options)
    if authfile is None and first and (first.user, first.secret) != (username, secret):
        log.warn(f"another login for {reference.registry} in {first.source} takes precedence")


@synopsis
@click.command("logout", context_settings=CONTEXT)
@_authfile
@click.argument("registry")
def logout(authfile: str | None, registry: str) -> None:
    """Remove the stored login for a REGISTRY, HOST[:PORT]."""
    from enroot_py.registry import credentials, logins

    reference = logins.registry(registry)
    file = logins.AuthFile(authfile or credentials.writable(), os.environ)
    removed = file.remove(reference)
    other = credentials.find(reference, settings.load()) if authfile is None else None
    if not removed:
        hint = f"another login is in {other.source}" if other else f"to add one: penroot login {reference.registry}"
        raise ConfigError(f"{file.path} has no login for {reference.registry}", hint=hint)
    log.info(f"logged out of {reference.registry}")
    if other:
        log.warn(f"{other.source} still has a login for {reference.registry}")


def _read() -> str:
    """Read one line with a password from stdin. Raises UsageError."""
    hint = 'printf %s "$PASSWORD" | penroot login --username USER REGISTRY'
    data = sys.stdin.buffer.read(_MAX_PASSWORD_BYTES + 1) if sys.stdin is not None else b""
    try:
        secret = data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise UsageError("the password on stdin is not UTF-8", hint=hint) from None
    if not secret or len(data) > _MAX_PASSWORD_BYTES or not secret.isprintable():
        raise UsageError("stdin is not one line with a password" if secret else "no password on stdin", hint=hint)
    return secret
