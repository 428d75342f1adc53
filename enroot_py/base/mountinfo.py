"""Read the mounts of a mount namespace: proc_pid_mountinfo(5)."""

from __future__ import annotations

import os
from _collections_abc import Iterator


class Mounted:
    """One mount: the directory ``root`` of a file system is mounted at ``target``.

    ``options`` are the mount's options. ``data`` are the file system's options in the kernel's format. ``is_first`` is
    True for the lowest mount of a mount namespace.
    """

    __slots__ = ("number", "is_first", "device", "root", "target", "options", "fstype", "source", "data")

    def __init__(self, line: str) -> None:
        before, _, after = line.partition(" - ")
        number, parent, self.device, root, target, options = before.split(" ")[:6]
        self.fstype, source, self.data = after.split(" ", 2)
        self.number = int(number)
        self.is_first = number == parent
        self.root, self.target, self.source = unescape(root), unescape(target), unescape(source)
        self.options = options.split(",")

    def settings(self) -> list[tuple[str, str]]:
        """Return name and value of each option of the file system."""
        pairs = (option.partition("=") for option in self.data.split(","))
        return [(name, unescape(value)) for name, _, value in pairs]


def read(path: str = "/proc/self/mountinfo") -> Iterator[Mounted]:
    """Yield the mounts in a file of /proc. Raises OSError."""
    with open(path, "rb") as f:
        yield from parse(f.read())


def parse(text: bytes) -> Iterator[Mounted]:
    """Yield the mounts in the content of a mountinfo file."""
    return map(Mounted, os.fsdecode(text).split("\n")[:-1])


def unescape(field: str) -> str:
    """Replace each ``\\ooo``, three octal digits, by the byte of this number. fstab(5) has the same escapes."""
    if "\\" not in field:
        return field
    out, rest = b"", os.fsencode(field)
    while (at := rest.find(b"\\")) >= 0:
        out, digits = out + rest[:at], rest[at + 1 : at + 4]
        if len(digits) == 3 and not digits.strip(b"01234567") and digits < b"400":
            out, rest = out + bytes((int(digits, 8),)), rest[at + 4 :]
        else:
            out, rest = out + b"\\", rest[at + 1 :]
    return os.fsdecode(out + rest)
