"""CDI: specifications as vendors write them, and what a container gets of them."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

from enroot_py import cdi
from enroot_py.devices import Edits, Host
from enroot_py.errors import HookError
from tests import fakehost
from tests.fakehost import MINORS, TRIPLET, VERSION, FakeHost, cap_number, mig_uuid, uuid
from tests.unit.test_nvidia import caps, gpus, planned

LIB = f"/usr/lib/{TRIPLET}"


@pytest.fixture
def dgx(tmp_path: pathlib.Path) -> FakeHost:
    return fakehost.dgx_a100(tmp_path / "dgx")


@pytest.fixture
def box(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / f"box/usr/lib/{TRIPLET}").mkdir(parents=True)
    return tmp_path / "box"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: two\n", {"a": 1, "b": "two"}),
        (
            "---\n# comment\na:\n- x\n- y: 1\n  z: 'it''s'\n- - p\n  - q\n",
            {"a": ["x", {"y": 1, "z": "it's"}, ["p", "q"]]},
        ),
        ("a:\n  - b:\n      c: d\n    e: f\n", {"a": [{"b": {"c": "d"}, "e": "f"}]}),
        ("a:\nb: []\nc: {}\nd: null\ne: true\n", {"a": None, "b": [], "c": {}, "d": None, "e": True}),
        ('a: "x: y # z"  # comment\n"b c": d::e\n', {"a": "x: y # z", "b c": "d::e"}),
        (
            "- --link\n- ../x::/y/z\n- A=b c\n- 0:1\n- '0'\n- 0660\n",
            ["--link", "../x::/y/z", "A=b c", "0:1", "0", "0660"],
        ),
        ("-\n  a: b\n-\n  - c\n", [{"a": "b"}, ["c"]]),
        ("", None),
    ],
)
def test_yaml_that_generators_write(text: str, value: Any) -> None:
    assert cdi.parse_yaml(text) == value


@pytest.mark.parametrize("text", ["a: &x 1\n", "a: |\n  b\n", "a: [1, 2]\n", "a: 1\n  b: 2\n", "a: 1\nb\n", "\ta: 1\n"])
def test_other_yaml_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ValueError, match="line [12]"):
        cdi.parse_yaml(text)


@pytest.mark.parametrize(
    ("visible", "minors"),
    [("all", set(MINORS)), ("0,3", {2, 1}), (uuid(4), {6}), ("nvidia.com/gpu=5", {7})],
)
def test_devices_of_a_specification(dgx: FakeHost, box: pathlib.Path, visible: str, minors: set[int]) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})
    assert gpus(edits) == minors
    assert edits.environ == {"FROM_CDI": "yes"}
    gone = {path for path in edits.hidden if "caps" not in path}
    assert gone == {f"/dev/nvidia{minor}" for minor in set(MINORS) - minors}
    assert len(edits.hidden) - len(gone) == (0 if visible == "all" else 12)
    assert f"{LIB}/libnvcuvid.so.{VERSION}" in edits.files  # all that is written there, whatever the capabilities
    assert f"{LIB}/libnvidia-opencl.so.{VERSION}" not in edits.files
    assert edits.links[f"{LIB}/libcuda.so"] == "libcuda.so.1"
    assert edits.links[f"{LIB}/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert (0x303, "libnvcuvid.so.1", f"{LIB}/libnvcuvid.so.1") in edits.libraries


@pytest.mark.parametrize("visible", ["6:1", mig_uuid(6, 1)])
def test_mig_devices_of_a_specification(dgx: FakeHost, box: pathlib.Path, visible: str) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})
    assert gpus(edits) == {4}
    assert caps(edits) == {cap_number(4, 2), cap_number(4, 2, 0)}
    assert edits.environ == {"FROM_CDI": "yes"}
    assert f"/dev/nvidia-caps/nvidia-cap{cap_number(4, 1)}" in edits.hidden


def test_specification_that_has_indices_alone(dgx: FakeHost, box: pathlib.Path) -> None:
    path = dgx.cdi()
    path.write_text(path.read_text().replace("- name: GPU-", "- name: other-"))
    for visible in (uuid(3), "GPU-00000003", "0000:4e:00.0"):
        edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})
        assert gpus(edits) == {1}
        assert edits.environ == {"FROM_CDI": "yes"}


def test_specification_of_a_driver_container(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = fakehost.driver_container(tmp_path / "host")
    path = host.cdi()
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "all"})
    assert edits.files[f"{LIB}/libcuda.so.{VERSION}"][0] == f"{host.root}/run/nvidia/driver{LIB}/libcuda.so.{VERSION}"
    assert (0x303, "libcuda.so.1", f"{LIB}/libcuda.so.1") in edits.libraries
    by_option = fakehost.hook("97-devices.py")["plan"](
        fakehost.context(host, box, {"ENROOT_DEVICES": "nvidia.com/gpu=all"}, {})
    )
    assert by_option.files == {path: edits.files[path] for path in by_option.files}
    assert by_option.libraries == edits.libraries
    assert by_option.links == edits.links
    path.write_text(path.read_text().replace(VERSION, "470.10"))
    with pytest.raises(HookError, match=r"470\.10"):
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "cdi"})


def test_slurm_allocation_through_cdi(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert gpus(edits) == {2, 3}
    assert edits.environ == {"FROM_CDI": "yes"}
    # Of a step with a GPU that is cut up the caller wants one part.
    asked = {"SLURM_STEP_GPUS": "4,3", "CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": mig_uuid(6, 1)}
    edits = planned(dgx, box, asked)
    assert (gpus(edits), caps(edits)) == ({4}, {cap_number(4, 2), cap_number(4, 2, 0)})


def test_json_says_the_same(dgx: FakeHost, box: pathlib.Path) -> None:
    path = dgx.cdi()
    before = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "1"}).describe()
    dgx.file("/etc/cdi/nvidia.json", json.dumps(cdi.parse_yaml(path.read_text())))
    path.unlink()
    assert planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "1"}).describe() == before


def test_run_beats_etc(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    text = (
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n  containerEdits:\n    env:\n    - WHO=run\n"
    )
    dgx.directory("run/cdi")
    (dgx.root / "var/run").unlink()
    (dgx.root / "var/run").symlink_to("../run")
    dgx.file("/run/cdi/other.yaml", text)
    edits = Edits("test")
    cdi.Registry(Host(str(dgx.root))).add(edits, "nvidia.com/gpu", ["0"])
    assert edits.environ == {"WHO": "run"}


def test_specification_of_another_driver_is_not_used(
    dgx: FakeHost, box: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dgx.cdi()
    path.write_text(path.read_text().replace(VERSION, "470.10"))
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert "out of date" in capsys.readouterr().err
    assert f"{LIB}/libcuda.so.{VERSION}" in edits.files
    with pytest.raises(HookError, match=r"470\.10"):
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "cdi"})


def test_device_that_no_specification_has_is_looked_for_natively(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "6"})  # whole, though it is cut up
    assert gpus(edits) == {4}
    assert len(caps(edits)) == 6
    assert not edits.environ


def test_native_on_request(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    assert not planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "native"}).environ


def test_broken_specification_hurts_only_who_needs_it(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.file("/etc/cdi/broken.yaml", "kind: acme.com/x\ndevices: &anchor\n")
    assert gpus(planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})) == {2}
    with pytest.raises(HookError) as caught:
        cdi.Registry(Host(str(dgx.root))).add(Edits("test"), "acme.com/x", ["1"])
    assert "broken.yaml: line 2" in caught.value.hint


def test_parsed_once_while_the_file_stays(dgx: FakeHost, tmp_path: pathlib.Path) -> None:
    path = dgx.cdi()
    host, cache = Host(str(dgx.root)), str(tmp_path / "cache")
    names = cdi.Registry(host, cache).names("nvidia.com/gpu")
    kept = next((tmp_path / "cache/cdi").iterdir())
    info = path.stat()
    # Same size and time: what is read now is what was kept.
    path.write_text("#" * info.st_size)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert cdi.Registry(host, cache).names("nvidia.com/gpu") == names
    path.write_text("kind: acme.com/x\ndevices: []\n")
    assert cdi.Registry(host, cache).names("nvidia.com/gpu") == []
    kept.write_bytes(b"garbage")
    assert cdi.Registry(host, cache).names("nvidia.com/gpu") == []


def test_any_vendor(tmp_path: pathlib.Path, box: pathlib.Path) -> None:
    host = FakeHost(tmp_path / "amd")
    for name in ("kfd", "dri/card0", "dri/renderD128"):
        host.node(f"/dev/{name}", 226, 0)
    nodes = [{"path": "/dev/kfd"}, {"path": "/dev/dri/renderD128", "hostPath": "/dev/dri/renderD128"}]
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "amd.com/gpu",
        "devices": [{"name": "0", "containerEdits": {"deviceNodes": nodes}}],
    }
    host.file("/etc/cdi/amd.json", json.dumps(spec))
    plan = fakehost.hook("97-devices.py")["plan"]

    def nodes_for(devices: str) -> set[str]:
        return set(plan(fakehost.context(host, box, {"ENROOT_DEVICES": devices}, {})).nodes)

    assert nodes_for("amd.com/gpu=0") == {"/dev/kfd", "/dev/dri/renderD128"}
    assert nodes_for("amd.com/gpu=all") == {"/dev/kfd", "/dev/dri/renderD128"}
    assert nodes_for("/dev/kfd, /dev/dri") == {"/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD128"}
    for wrong, said in (
        ("amd.com/gpu=1", "there are 0"),
        ("intel.com/gpu=0", "/etc/cdi"),
        ("kfd", "vendor.com"),
        ("/dev/x", ""),
    ):
        with pytest.raises(HookError) as caught:
            nodes_for(wrong)
        assert said in caught.value.hint
