"""Errors for users, most of them with a hint."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class PenrootError(Exception):
    """A failure with a cause that the user can act on.

    main() prints one ``[ERROR]`` line, and the ``hint`` if it is not empty. Any other exception is a bug and shows its
    traceback.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


OWN_ERROR = 125  # exit status, as in docker: penroot failed, not the command


def with_status(error: PenrootError, status: int) -> PenrootError:
    """Set the exit status of an error, unless the error's class defines a status."""
    if error.exit_code == PenrootError.exit_code:
        error.exit_code = status
    return error


class UsageError(PenrootError):
    """The command line is wrong: look at the options. ``usage`` goes to stdout if penroot was called as enroot."""

    def __init__(self, message: str, *, hint: str = "", usage: str = "") -> None:
        super().__init__(message, hint=hint)
        self.usage = usage


class ConfigError(PenrootError):
    """A setting is wrong: look at the file or variable in the message."""


class ImageReferenceError(PenrootError):
    """An image reference is invalid."""


class RegistryError(PenrootError):
    """A registry refused a request, failed, or could not be reached."""


class Unreachable(RegistryError):
    """The registry does not answer, or sends an invalid answer: the caller may use a stored image."""


class WebPage(Unreachable):
    """The answer is a web page: a proxy, a login portal or a host without a registry has sent it."""


class RefusedError(RegistryError):
    """A registry has refused definitely: the image does not exist, or this user may not read it."""


class ImageError(PenrootError):
    """An image is invalid: wrong digest, unknown format, missing layer."""


class PolicyError(PenrootError):
    """A policy rejects an image: look at the rule in the message."""


class ContainerError(PenrootError):
    """A container exists, does not exist, or cannot be stored."""


class MountError(PenrootError):
    """A mount failed: look at its source, target and flags."""


class NamespaceError(PenrootError):
    """The kernel or its settings do not allow containers."""


class HookError(PenrootError):
    """A hook failed: look at the hook."""


class CommandError(PenrootError):
    """The command in the container cannot be executed (126) or found (127)."""

    exit_code = 126


# A function that returns the error of the image's mount if that error caused the function's argument, else None.
# runtime/squashfuse.py sets the function when it mounts an image.
of_image: Callable[[BaseException], PenrootError | None] | None = None


def cause(error: BaseException) -> PenrootError | None:
    """Return an error that explains the root cause of ``error``, or None if the root cause is unknown.

    Known causes are a limit of open files and a failed image mount.
    """
    import errno

    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__cause__ or reason.__context__
    hint = ""
    if reason is not None and reason.errno in (errno.EMFILE, errno.ENFILE):
        try:
            from enroot_py.base import filesystems
        except ImportError:  # in the container, after rootfs.import_no_files()
            return None
        hint = filesystems.OF_PROCESS[reason.errno]
    elif reason is not None and reason.errno == errno.ENOTCONN and isinstance(error, CommandError) and not of_image:
        hint = "its squashfuse was killed (out of memory? see dmesg): start the container again"
    if reason is None or not hint:
        return of_image(error) if of_image else None
    message = str(error) if isinstance(error, PenrootError) else f"cannot open a file: {reason.strerror}"
    named = PenrootError(message, hint=hint)
    named.exit_code = getattr(error, "exit_code", 1)
    return named
