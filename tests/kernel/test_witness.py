"""python-prctl reads the capabilities and other attributes of a program in a container.

python-prctl shares no code with penroot's C module, which sets these attributes.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

from tests.kernel.conftest import User, require

PYTHON = "/usr/bin/python3"
WITNESS = """
import json, prctl
names = set(prctl.ALL_CAP_NAMES) - {"last_cap"}
said = {each: sorted(name for name in names if getattr(getattr(prctl, each), name))
        for each in ("cap_effective", "cap_permitted", "cap_inheritable", "capbset")}
said["all"] = sorted(names)
said |= {each: int(getattr(prctl, f"get_{each}")())
         for each in ("no_new_privs", "dumpable", "securebits", "seccomp")}
try:
    prctl.cap_effective.sys_admin = True
except PermissionError:
    said["refused"] = True
print(json.dumps(said))
"""
# Mount Python and libcap of this machine, because the image has neither.
MOUNTS = [f"--mount=/{name}:/{name}:none:x-create=dir,rbind,ro" for name in ("usr", "lib", "lib64")]
CAPABILITIES = ("cap_effective", "cap_permitted", "cap_inheritable", "capbset")


@pytest.fixture
def witness(user: User, rootfs: pathlib.Path) -> User:
    is_installed = any(pathlib.Path("/usr/lib/python3/dist-packages").glob("_prctl.*"))
    require(is_installed and os.path.isdir("/lib64"), "python3-prctl is not installed: tests/prerequisites")
    return user


def outside(user: User) -> dict[str, Any]:
    attributes: dict[str, Any] = json.loads(user.run(PYTHON, "-c", WITNESS).stdout)
    return attributes


def inside(user: User, *options: str) -> dict[str, Any]:
    attributes: dict[str, Any] = json.loads(user.start(*options, *MOUNTS, "box", PYTHON, "-c", WITNESS))
    return attributes


@pytest.mark.parity("programs cannot gain privileges: no_new_privs is set")
def test_user_of_a_container_has_no_privileges(witness: User) -> None:
    before, within = outside(witness), inside(witness)
    assert (before["no_new_privs"], before["seccomp"]) == (0, 0)
    assert before["capbset"]
    assert (within["no_new_privs"], within["seccomp"]) == (1, 1)
    assert [within[each] for each in CAPABILITIES] == [[], [], [], []]
    assert within["refused"]
    assert (within["dumpable"], within["securebits"]) == (1, 0)


def test_root_of_a_container_is_filtered_as_well(witness: User) -> None:
    within = inside(witness, "--root")
    assert (within["no_new_privs"], within["seccomp"]) == (1, 1)
    assert [within[each] for each in CAPABILITIES] == [within["all"], within["all"], [], within["all"]]
    assert (within["dumpable"], within["securebits"]) == (1, 0)
