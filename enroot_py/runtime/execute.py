"""Execute the program of a container."""

from __future__ import annotations

import errno
import os

from enroot_py.base import linux, log, signals
from enroot_py.base.errors import CommandError, ContainerError
from enroot_py.runtime import interpreters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from enroot_py.runtime.environ import Variables
    from enroot_py.runtime.etc import Exec

_RC = ("/bin/sh", "/etc/rc")
# Variables of sd_listen_fds(3) and MPICH that name descriptors.
_NAME_DESCRIPTORS = ("LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "PMI_FD")
# For sh(1), after /etc/profile: if /etc/profile has only added to PATH, keep the additions, else restore PATH ($1).
_KEEP_PATH = 'case ":$PATH:" in *":$1:"*) ;; *) PATH=$1 ;; esac; shift; '


class Container:
    """A container that this process has entered, with the environment and the command for execve(2).

    ``workdir`` overrides the image's working directory.
    """

    def __init__(self, variables: Variables, image: Exec | None, *, login_shell: bool) -> None:
        self.environ = variables.values
        self.origins = variables.origins
        self.below = variables.below
        self.image = image
        self.workdir = ""
        self.runs_entrypoint = True
        self._login_shell = login_shell

    def argv(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words to execute for ``command``, which may be empty."""
        if self.image is not None and not self._login_shell:
            return self.image.argv(command, self.image.entrypoint if self.runs_entrypoint else ()) or ("/bin/sh",)
        # Only a shell can run /etc/rc, or /etc/rc is missing, or the settings demand a login shell.
        keep = ""
        path: tuple[str, ...] = ()
        if self._login_shell and "PATH" in self.origins:
            keep, path = _KEEP_PATH, (self.environ["PATH"],)
        if self.runs_entrypoint and os.path.exists("/etc/rc"):
            return ("/bin/sh", "-c", keep + ". /etc/rc", "/etc/rc", *path, *command) if keep else _RC + command
        if command[:1] == ("--",):
            command = command[1:]
        if command and " " in command[0] and not os.path.exists(command[0]):
            return ("/bin/sh", "-c", keep + command[0], "sh", *path, *command[1:])
        if command and not self._login_shell:
            return command
        return ("/bin/sh", "-c", keep + 'exec "$@"', "sh", *path, *command) if command else ("/bin/sh",)

    def execute(self, command: tuple[str, ...]) -> NoReturn:
        """Execute ``command``, or the image's command if ``command`` is empty. Raises CommandError, ContainerError."""
        argv = self.argv(command)
        self.enter_workdir()
        self.environ.setdefault("SHLVL", "0")  # as a shell would
        execute(argv, self.environ, argv0="-sh" if self._login_shell else "")

    def enter_workdir(self) -> None:
        """Enter the working directory: the caller's, the image's, or the user's home. Raises ContainerError."""
        if not self.workdir and (self.image is None or self._login_shell):
            directory = self.environ["HOME"]
            try:
                os.chdir(directory)
            except OSError:
                directory = "/"  # as login(1) does
                os.chdir(directory)
        else:
            directory = self.workdir or (self.image.workdir if self.image else "/")
            try:
                os.chdir(directory)
            except OSError as e:
                owner = "the" if self.workdir else "the image's"
                hint = f"asked for by {self.origins['PWD']}" if self.workdir else ""
                raise ContainerError(
                    f"cannot enter {owner} working directory {directory}: {e.strerror}", hint=hint
                ) from e
        self.environ["PWD"] = os.path.normpath(directory)


def execute(argv: tuple[str, ...], env: dict[str, str], argv0: str = "") -> NoReturn:
    """Execute ``argv``, looked up in the container's PATH as by a shell. Raises CommandError with status 126 or 127."""
    signals.restore()
    name, refused = argv[0], ""
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    try:
        for path in [name] if "/" in name else candidates(name, env.get("PATH", "")):
            try:
                _execve(path, [argv0 or name, *argv[1:]], env)
            except OSError as e:  # try the next directory: execvp(3)
                if path == name or not refused and os.path.lexists(path) and not os.path.isdir(path):
                    failure, refused = e, path
    except (TypeError, ValueError) as e:
        # The image, environ.d and hooks may set values that no environment can hold.
        bad = next((key for key, value in env.items() if "\0" in f"{key}{value}" or "=" in key), "")
        hint = "find its origin: penroot start --explain"
        raise CommandError(f"cannot run {name}: the variable {bad!r}: {e}", hint=hint) from e
    missing = failure.errno in (errno.ENOENT, errno.ENOTDIR)
    if reason := refused and interpreters.explain(refused):
        error = CommandError(f"cannot run {refused}: {reason}")
    else:
        hint = _advice(refused or name, failure.errno)
        error = CommandError(f"cannot run {name}: {failure.strerror}", hint=hint)
    error.exit_code = 127 if missing else 126
    raise error from failure


def _execve(path: str, argv: list[str], env: dict[str, str]) -> NoReturn:
    try:
        os.execve(path, argv, env)
    except OSError as e:
        if e.errno == errno.E2BIG and _drop_long_variables(env):
            _execve(path, argv, env)
        if e.errno != errno.ENOEXEC or _is_elf(path) or not os.path.exists("/bin/sh"):
            raise
    os.execve("/bin/sh", ["sh", path, *argv[1:]], env)  # a script without #!: execvp(3)


def _is_elf(path: str) -> bool:
    """Return whether a file is an ELF program. A shell would read it as a script, and report syntax errors."""
    try:
        with open(path, "rb") as f:
            return f.read(4) == b"\x7fELF"
    except OSError:
        return False  # the user can execute the file, but not read it


def _drop_long_variables(env: dict[str, str]) -> bool:
    """Remove the variables that are too long for execve(2), and warn. Return whether there were any."""
    limit = 32 * os.sysconf("SC_PAGE_SIZE")  # MAX_ARG_STRLEN of execve(2), with the NUL at the end
    long = [name for name, value in env.items() if len(os.fsencode(f"{name}={value}")) >= limit]
    for name in long:
        del env[name]
    if long:
        log.warn(f"variables above the kernel's limit of {limit >> 10} KiB are not set: {', '.join(long)}")
    return bool(long)


def withhold(*, new_keyring: bool) -> None:
    """Let execve(2) close the caller's descriptors of directories and namespaces.

    With ``new_keyring``, replace the caller's keyring. Call this while /proc is the node's. Raises ContainerError.
    """
    try:
        linux.withhold_descriptors()
    except OSError as e:
        raise ContainerError(f"cannot check the open descriptors: {e.strerror}") from e
    if not new_keyring:
        return
    try:
        linux.renew_keyring()
    except OSError as e:
        hint = "raise the sysctls kernel.keys.maxkeys and maxbytes" if e.errno == errno.EDQUOT else ""
        raise ContainerError(f"cannot create a session keyring: {e.strerror}", hint=hint) from e


def close_descriptors(environ: dict[str, str]) -> None:
    """Let execve(2) close all descriptors except stdin, stdout and stderr. Remove variables that name descriptors."""
    linux.close_range(3, 0xFFFFFFFF, linux.CLOSE_RANGE_CLOEXEC)
    for name in _NAME_DESCRIPTORS:
        environ.pop(name, None)


def candidates(name: str, search: str) -> list[str]:
    """Return the paths of ``name`` in the colon-separated ``search``; an empty element is the working directory."""
    return [f"{directory or '.'}/{name}" for directory in search.split(":")]


def _advice(path: str, error: int | None) -> str:
    if error == errno.ENOEXEC:
        return f"check it with file(1); programs of this node are for {os.uname().machine}"
    if error not in (errno.ENOENT, errno.ENOTDIR):
        return ""
    if os.path.exists(path):
        return "the file exists, but its interpreter (#! line or ELF loader) is missing or for another architecture"
    if path.startswith("-"):
        return "put options before the name of the container: words after the name are its command"
    return "the command is looked up inside the container"
