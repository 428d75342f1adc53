"""Parse mountinfo: proc_pid_mountinfo(5)."""

from __future__ import annotations

import os

import pytest

from enroot_py.base import mountinfo
from enroot_py.base.mountinfo import Mounted


def test_all_fields_of_a_line() -> None:
    line = r"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 shared:7 - ext3 /dev/my\040disk rw,errors=continue"
    mount = Mounted(line)
    assert (mount.number, mount.device, mount.root, mount.target) == (36, "98:0", "/mnt1", "/mnt 2")
    assert (mount.options, mount.fstype, mount.source) == (["rw", "noatime"], "ext3", "/dev/my disk")
    assert mount.settings() == [("rw", ""), ("errors", "continue")]


def test_an_empty_source_and_no_propagation() -> None:
    mount = Mounted("36 35 0:30 / / rw - overlay  rw,userxattr")
    assert (mount.fstype, mount.source, mount.data) == ("overlay", "", "rw,userxattr")


@pytest.mark.parametrize("name", ["a - b", "tab\tand\nline", "back\\slash", "return\r", "\u2028", os.fsdecode(b"\xff")])
def test_any_name_of_a_directory(name: str) -> None:
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in name)
    text = f"36 35 0:30 /{escaped} /x/{escaped} rw - tmpfs tmpfs rw,size=1k\n37 35 0:31 / /y rw - proc proc rw\n"
    first, second = mountinfo.parse(os.fsencode(text))
    assert (first.root, first.target, second.target) == (f"/{name}", f"/x/{name}", "/y")


def test_options_are_split_before_commas_are_unescaped() -> None:
    mount = Mounted(r"36 35 0:30 / / rw - overlay x rw,lowerdir=/a\054b\134:c,upperdir=/u")
    assert dict(mount.settings()) == {"rw": "", "lowerdir": "/a,b\\:c", "upperdir": "/u"}


def test_the_root_of_this_process_is_mounted() -> None:
    assert any(mount.target == "/" for mount in mountinfo.read())
