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


OWN_ERROR = 125  # exit status if penroot itself fails, not the command; docker uses the same number


def with_status(error: PenrootError, status: int) -> PenrootError:
    """Set the exit status of an error, unless the error has a status other than 1."""
    if error.exit_code == PenrootError.exit_code:
        error.exit_code = status
    return error


class UsageError(PenrootError):
    """The command line is wrong. main() prints ``usage`` to stdout if penroot was called as enroot."""

    def __init__(self, message: str, *, hint: str = "", usage: str = "") -> None:
        super().__init__(message, hint=hint)
        self.usage = usage


class ConfigError(PenrootError):
    """A setting is wrong. The message names its file or variable."""


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
    """A policy rejects an image. The message names the rule."""


class ContainerError(PenrootError):
    """A container already exists, is missing, has ended, or cannot be read or written."""


class MountError(PenrootError):
    """A mount failed."""


class NamespaceError(PenrootError):
    """The kernel or its settings do not allow containers."""


class HookError(PenrootError):
    """A hook failed."""


class CommandError(PenrootError):
    """The command in the container cannot be executed (exit status 126), or is missing (127)."""

    exit_code = 126


# Set by runtime/squashfuse.py when it mounts an image. If the image or its FUSE server caused the given error, the
# function returns an error that explains it, else None.
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
