"""The error of a program that cannot run names the missing loader, for ELF files of both classes."""

from __future__ import annotations

import os
import pathlib
import struct

import pytest

from enroot_py.runtime import interpreters

LOADER = b"/none/ld.so\0"
MACHINES = {"x86_64": {1: 3, 2: 62}, "aarch64": {1: 40, 2: 183}}  # EM_386, EM_X86_64; EM_ARM, EM_AARCH64


def program(elf_class: int, machine: int, *, interp_size: int = len(LOADER)) -> bytes:
    """Return an ELF file whose second program header is PT_INTERP: elf(5)."""
    identity = struct.pack("=4sBBB9x", b"\x7fELF", elf_class, 1, 1)
    if elf_class == 2:
        head = identity + struct.pack("=HHIQQQIHHHHHH", 2, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
        headers = struct.pack("=IIQQQQQQ", 6, 4, 64, 0, 0, 112, 112, 8)
        headers += struct.pack("=IIQQQQQQ", 3, 4, 176, 0, 0, interp_size, interp_size, 1)
    else:
        head = identity + struct.pack("=HHIIIIIHHHHHH", 2, machine, 1, 0, 52, 0, 0, 52, 32, 2, 0, 0, 0)
        headers = struct.pack("=IIIIIIII", 6, 52, 0, 0, 64, 64, 4, 4)
        headers += struct.pack("=IIIIIIII", 3, 116, 0, 0, interp_size, interp_size, 4, 1)
    return head + headers + LOADER


@pytest.mark.skipif(os.uname().machine not in MACHINES, reason="programs of other machines are not looked at")
@pytest.mark.parametrize("elf_class", [1, 2])
def test_missing_loader_is_named_for_both_elf_classes(tmp_path: pathlib.Path, elf_class: int) -> None:
    machine = MACHINES[os.uname().machine][elf_class]
    path = tmp_path / "program"
    path.write_bytes(program(elf_class, machine))
    path.chmod(0o755)
    assert interpreters.explain(str(path)) == "its interpreter /none/ld.so does not exist in the container"
    path.write_bytes(program(elf_class, machine, interp_size=1 << 20))
    assert interpreters.explain(str(path)) == ""
    path.write_bytes(program(elf_class, 0xFFFF))
    assert interpreters.explain(str(path)) == ""
