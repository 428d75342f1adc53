"""``penroot login`` and ``logout``."""

from __future__ import annotations

import os
import sys

import click

from enroot_py.base import log
from enroot_py.base.errors import ConfigError, UsageError
from enroot_py.cli.commands import CONTEXT, synopsis, there
from enroot_py.config import settings

_LONGEST = 64 << 10  # bytes of a password; tokens are long

_authfile = click.option(
    "--authfile", callback=there, metavar="FILE", help="Auth file, if not REGISTRY_AUTH_FILE or docker's config.json."
)


def _no_argument(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    """Raises UsageError: what is on a command line is in the list of processes, and in the shell's history."""
    if value is not None:
        raise UsageError(
            "a password on the command line is seen by everybody on the machine",
            hint="it is read from stdin: penroot login --username USER REGISTRY < FILE",
        )


@synopsis
@click.command("login", context_settings=CONTEXT)
@click.option("-u", "--username", callback=there, help="User; who sits at a terminal is asked.")
@click.option("--password-stdin", is_flag=True, help="Accepted, as docker has it: the password is read from stdin.")
@click.option("-p", "--password", hidden=True, expose_value=False, callback=_no_argument)
@_authfile
@click.argument("registry")
def login(username: str | None, password_stdin: bool, authfile: str | None, registry: str) -> None:
    """Log in to a REGISTRY, HOST[:PORT]: the password, or token, comes from stdin and is tried there.

    It is kept where docker and podman keep theirs, by the helper program that the file names for the registry,
    or else in the file.
    """
    from enroot_py.registry import credentials, logins

    reference = logins.registry(registry)
    asks = sys.stdin is not None and sys.stdin.isatty() and not password_stdin
    if not username:
        if not asks:
            raise UsageError("there is no user", hint="penroot login --username USER REGISTRY")
        username = click.prompt("Username", err=True)
    if ":" in username or not username.isprintable():
        raise UsageError(f"{username!r} is no user's name", hint="a name has neither ':' nor control characters")
    secret = click.prompt("Password", hide_input=True, err=True) if asks else _read()
    options = settings.load()
    made = credentials.Credential(username, secret, "stdin")
    if not logins.check(reference, made, options):
        log.warn(f"{reference.registry} asks nobody for a login: it is kept, and was not tried")
    where = logins.AuthFile(authfile or credentials.writable(), os.environ).add(reference, made)
    log.info(f"logged in to {reference.registry} as {username}: {where}")
    found = credentials.find(reference, options)
    if authfile is None and found and (found.user, found.secret) != (username, secret):
        log.warn(f"{found.source} has another login for {reference.registry}, and goes before")


@synopsis
@click.command("logout", context_settings=CONTEXT)
@_authfile
@click.argument("registry")
def logout(authfile: str | None, registry: str) -> None:
    """Forget the login for a REGISTRY, HOST[:PORT], that login or docker has kept."""
    from enroot_py.registry import credentials, logins

    reference = logins.registry(registry)
    file = logins.AuthFile(authfile or credentials.writable(), os.environ)
    forgotten = file.remove(reference)
    left = credentials.find(reference, settings.load()) if authfile is None else None
    if not forgotten:
        hint = f"there is one in {left.source}" if left else "penroot login makes one"
        raise ConfigError(f"{file.path} has no login for {reference.registry}", hint=hint)
    log.info(f"logged out of {reference.registry}")
    if left:
        log.warn(f"{left.source} still has a login for {reference.registry}")


def _read() -> str:
    """The password on stdin, without the end of its line. Raises UsageError."""
    hint = 'printf %s "$PASSWORD" | penroot login --username USER REGISTRY'
    data = sys.stdin.buffer.read(_LONGEST + 1) if sys.stdin is not None else b""
    try:
        secret = data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise UsageError("the password on stdin is not UTF-8", hint=hint) from None
    if not secret or len(data) > _LONGEST or not secret.isprintable():
        why = "there is no password on stdin" if not secret else "what is on stdin is no password of one line"
        raise UsageError(why, hint=hint)
    return secret
