"""Find out why a file is missing: the FUSE server of the root file system was killed, or its image is damaged."""

from __future__ import annotations

import errno
import os

import pytest

from enroot_py.runtime import squashfuse

ENOENT = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def failing(number: int, failed: str) -> object:
    """Return a replacement for a function of os. It fails with the errno ``number`` for the path ``failed``."""

    def call(path: str) -> list[str]:
        if path == failed:
            raise OSError(number, os.strerror(number), path)
        return ["bin"]

    return call


@pytest.mark.parametrize(
    ("listdir", "lstat", "message"),
    [
        (failing(0, ""), failing(0, ""), None),
        (lambda path: [], failing(0, ""), "damaged"),
        (failing(0, ""), failing(errno.ENOENT, "//bin"), "damaged"),
        (failing(0, ""), failing(errno.EIO, "//bin"), "damaged"),
        (failing(errno.ENOTCONN, "/"), failing(0, ""), "was killed"),
        (failing(0, ""), failing(errno.ENOTCONN, "/usr/bin"), "was killed"),
        (failing(errno.ENOENT, "/usr"), failing(0, ""), None),
        (failing(errno.EACCES, "/bin"), failing(0, ""), None),
    ],
)
def test_cause_of_a_missing_file(
    monkeypatch: pytest.MonkeyPatch, listdir: object, lstat: object, message: str | None
) -> None:
    monkeypatch.setattr(squashfuse, "_served", "x.sqsh")
    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os, "lstat", lstat)
    cause = squashfuse.why(ENOENT)
    assert (message in str(cause)) if message else cause is None, cause
