"""CDI specifications in the forms that vendors write, and the edits that a container gets from them."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
import yaml

from enroot_py.base import ldcache, linux
from enroot_py.base.errors import HookError
from enroot_py.config import parsed
from enroot_py.config import yaml as settings_file
from enroot_py.features.devices import cdi
from enroot_py.runtime.edits import Edits, Host
from tests import fakehost
from tests.fakehost import MINORS, TRIPLET, VERSION, FakeHost, cap_number, mig_uuid, uuid
from tests.unit.test_nvidia import caps, gpus, planned

LIB = f"/usr/lib/{TRIPLET}"


@pytest.fixture
def dgx(tmp_path: pathlib.Path) -> FakeHost:
    return fakehost.dgx_a100(tmp_path / "dgx")


@pytest.mark.parametrize("name", ["0", "0:1", "on", "0660", "2024-05-01", "1_0", "true", "it''s"])
def test_names_are_words_in_yaml(dgx: FakeHost, name: str) -> None:
    """The names are not quoted. YAML would read some of them as a number, a truth value or a date."""
    dgx.file("/etc/cdi/x.yaml", f"kind: acme.com/x\ndevices:\n- name: {name}\n  containerEdits:\ncontainerEdits: ~\n")
    specifications = cdi.Specifications(Host(str(dgx.root)))
    assert specifications.names("acme.com/x") == [name]
    specifications.add(Edits("test"), "acme.com/x", [name])


@pytest.mark.parametrize(
    ("visible", "minors"),
    [("all", set(MINORS)), ("0,3", {2, 1}), (uuid(4), {6}), ("nvidia.com/gpu=5", {7})],
)
def test_devices_of_a_specification(dgx: FakeHost, box: pathlib.Path, visible: str, minors: set[int]) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})
    assert gpus(edits) == minors
    assert edits.environ == {"FROM_CDI": "yes"}
    hidden = {path for path in edits.hidden if "caps" not in path}
    assert hidden == {f"/dev/nvidia{minor}" for minor in set(MINORS) - minors}
    assert len(edits.hidden) - len(hidden) == (0 if visible == "all" else 12)
    assert (
        f"{LIB}/libnvcuvid.so.{VERSION}" in edits.files
    )  # driver capabilities do not filter the files of a specification
    assert f"{LIB}/libnvidia-opencl.so.{VERSION}" not in edits.files
    assert edits.links[f"{LIB}/libcuda.so"] == "libcuda.so.1"
    assert edits.links[f"{LIB}/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert (ldcache.NATIVE, "libnvcuvid.so.1", f"{LIB}/libnvcuvid.so.1") in edits.libraries


@pytest.mark.parametrize("visible", ["6:1", mig_uuid(6, 1)])
def test_mig_devices_of_a_specification(dgx: FakeHost, box: pathlib.Path, visible: str) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})
    assert gpus(edits) == {4}
    assert caps(edits) == {cap_number(4, 2), cap_number(4, 2, 0)}
    assert edits.environ == {"FROM_CDI": "yes"}
    assert f"/dev/nvidia-caps/nvidia-cap{cap_number(4, 1)}" in edits.hidden


def test_specification_with_only_indices(dgx: FakeHost, box: pathlib.Path) -> None:
    """The specification names devices only by index. They are also found by UUID and PCI address."""
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
    assert (ldcache.NATIVE, "libcuda.so.1", f"{LIB}/libcuda.so.1") in edits.libraries
    path.write_text(path.read_text().replace(VERSION, "470.10"))
    with pytest.raises(HookError, match=r"470\.10"):
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "cdi"})


def test_slurm_allocation_through_cdi(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert gpus(edits) == {2, 3}
    assert edits.environ == {"FROM_CDI": "yes"}
    # The caller selects one MIG device of the step's GPU.
    variables = {"SLURM_STEP_GPUS": "4,3", "CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": mig_uuid(6, 1)}
    edits = planned(dgx, box, variables)
    assert (gpus(edits), caps(edits)) == ({4}, {cap_number(4, 2), cap_number(4, 2, 0)})


def test_json_has_the_same_effect(dgx: FakeHost, box: pathlib.Path) -> None:
    path = dgx.cdi()
    before = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "1"}).describe()
    dgx.file("/etc/cdi/nvidia.json", json.dumps(yaml.safe_load(path.read_text())))
    path.unlink()
    assert planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "1"}).describe() == before


def test_run_takes_precedence_over_etc(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    text = (
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: '0'\n  containerEdits:\n    env:\n    - WHO=run\n"
    )
    dgx.file("/run/cdi/other.yaml", text)
    edits = Edits("test")
    cdi.Specifications(Host(str(dgx.root))).add(edits, "nvidia.com/gpu", ["0"])
    assert edits.environ == {"WHO": "run"}


def test_specification_of_another_driver_is_not_used(
    dgx: FakeHost, box: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dgx.cdi()
    path.write_text(path.read_text().replace(VERSION, "470.10"))
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert "is outdated" in capsys.readouterr().err
    assert f"{LIB}/libcuda.so.{VERSION}" in edits.files
    with pytest.raises(HookError, match=r"470\.10"):
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "cdi"})


def test_device_missing_in_specifications_is_found_natively(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "6"})  # GPU 6 as a whole, although it has MIG devices
    assert gpus(edits) == {4}
    assert len(caps(edits)) == 6
    assert not edits.environ


def test_native_on_request(dgx: FakeHost, box: pathlib.Path) -> None:
    """PENROOT_NVIDIA_MODE=native makes penroot ignore specifications."""
    dgx.cdi()
    assert not planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "native"}).environ


def test_broken_specification_affects_only_its_devices(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.file("/etc/cdi/broken.yaml", "kind: acme.com/x\ndevices: *nothing\n")
    assert gpus(planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})) == {2}
    with pytest.raises(HookError) as caught:
        cdi.Specifications(Host(str(dgx.root))).add(Edits("test"), "acme.com/x", ["1"])
    assert "broken.yaml" in caught.value.hint
    assert "line 2" in caught.value.hint


NODE = '{"path": "/dev/null"}'


def with_edits(edits: str) -> str:
    return f'{{"kind": "acme.com/x", "devices": [{{"name": "a", "containerEdits": {edits}}}]}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", ""),
        ("x.yaml", "just a word\n"),
        ("x.yaml", "kind: acme.com/x\n"),
        ("x.yaml", "kind: acme.com/x\ndevices:\n"),
        ("x.yaml", "kind: acme.com/x\ndevices: 1\n"),
        ("x.yaml", "devices:\n- name: a\n"),
        ("x.yaml", "kind: acme.com/x\ndevices:\n- containerEdits: {}\n"),
        ("x.yaml", "kind: acme.com/x\ndevices:\n- a\n"),
        ("x.yaml", "kind: acme.com/x\ndevices:\n- name: a\n- name: a\n"),
        ("x.yaml", "- " * 20000 + "a\n"),
        ("x.json", "[" * 200000),
        ("x.json", '{"kind": "acme.com/x", "devices": [{"name": "a"}]'),
        ("x.json", with_edits('"no"')),
        ("x.json", with_edits('{"deviceNodes": [{}]}')),
        ("x.json", with_edits('{"deviceNodes": {"a": 1}}')),
        ("x.json", with_edits('{"mounts": [{"hostPath": 1}]}')),
        ("x.json", with_edits('{"mounts": 3}')),
        ("x.json", f'{{"kind": "acme.com/x", "devices": [{{"name": "a"}}], "containerEdits": [{NODE}]}}'),
        ("x.json", with_edits('{"hooks": [{"args": 4}]}')),
        ("x.json", with_edits('{"deviceNodes": [{"path": "/"}]}')),
    ],
)
def test_invalid_specification_is_one_line(dgx: FakeHost, box: pathlib.Path, name: str, text: str) -> None:
    """NVIDIA GPUs also work without the specification. For other devices, the HookError names the file."""
    path = dgx.file(f"/etc/cdi/{name}", text)
    plan = fakehost.hook("97-devices.py")["plan"]
    with pytest.raises(HookError) as caught:
        plan(fakehost.context(dgx, box, {"ENROOT_DEVICES": "acme.com/x=a"}, {}))
    assert str(path) in str(caught.value) + caught.value.hint
    path.write_text(text.replace("acme.com/x", "nvidia.com/gpu").replace('"a"', '"0"'))
    for visible, minors in (("all", set(MINORS)), ("0", {2})):
        try:
            assert gpus(planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": visible})) == minors
        except HookError as e:
            assert str(path) in str(e)


def test_special_file_is_not_read(dgx: FakeHost, box: pathlib.Path) -> None:
    (dgx.root / "etc/cdi/directory.yaml").mkdir(parents=True)
    (dgx.root / "etc/cdi/nowhere.yaml").symlink_to("/nowhere")
    os.mkfifo(dgx.root / "etc/cdi/pipe.yaml")
    with open(dgx.root / "etc/cdi/huge.json", "wb") as f:
        f.truncate(1 << 40)
    assert gpus(planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})) == {2}
    with pytest.raises(HookError) as caught:
        cdi.Specifications(Host(str(dgx.root))).add(Edits("test"), "acme.com/x", ["1"])
    for name in ("directory.yaml", "nowhere.yaml", "pipe.yaml", "huge.json"):
        assert f"/etc/cdi/{name}" in caught.value.hint


def test_unreadable_directory_is_named(dgx: FakeHost, box: pathlib.Path) -> None:
    (dgx.root / "etc/cdi").symlink_to("cdi")  # a loop, which even root cannot open
    assert gpus(planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})) == {2}
    with pytest.raises(HookError, match=r"/etc/cdi: Too many levels"):
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "cdi"})


def test_device_in_two_files_is_in_neither(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi()
    other = dgx.cdi(name="old.yaml")
    other.write_text(other.read_text().replace("FROM_CDI=yes", "FROM_CDI=old"))
    edits = planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert gpus(edits) == {2}
    assert not edits.environ
    with pytest.raises(HookError, match=r"old\.yaml: nvidia\.com/gpu=\S+ is also in \S+nvidia\.yaml"):
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "cdi"})


def test_paths_cannot_leave_the_container(dgx: FakeHost) -> None:
    edit = {
        "deviceNodes": [{"path": "/dev/../../../dev/x/../gdrdrv", "hostPath": "/dev/gdrdrv"}],
        "mounts": [{"hostPath": "/etc/cufile.json", "containerPath": "../../../etc/./cufile.json/"}],
        "hooks": [{"args": ["nvidia-ctk", "hook", "create-symlinks", "--link", "x::../../../usr/y"]}],
    }
    spec = {"kind": "acme.com/x", "devices": [{"name": "a", "containerEdits": edit}]}
    dgx.file("/etc/cdi/x.json", json.dumps(spec))
    edits = Edits("test")
    cdi.Specifications(Host(str(dgx.root))).add(edits, "acme.com/x", ["a"])
    assert list(edits.nodes) == ["/dev/gdrdrv"]
    assert list(edits.files) == ["/etc/cufile.json"]
    assert list(edits.links) == ["/usr/y"]


def test_yaml_of_any_form(dgx: FakeHost, tmp_path: pathlib.Path) -> None:
    """People who write a specification by hand use more forms of YAML than programs do."""
    text = """
cdiVersion: "0.6.0"
kind: acme.com/x
annotations: {made: 2024-05-01}
devices:
  - name: "0"
    containerEdits: &edits
      deviceNodes: [{path: /dev/gdrdrv}]
      env: ["A=b", "C=d e"]
  - {name: "1", containerEdits: *edits}
containerEdits:
  env:
    - >-
      LONG=one
      two
"""
    dgx.file("/etc/cdi/x.yaml", text)
    for _ in range(2):
        edits = Edits("test")
        cdi.Specifications(Host(str(dgx.root)), str(tmp_path / "cache")).add(edits, "acme.com/x", ["1"])
        assert list(edits.nodes) == ["/dev/gdrdrv"]
        assert edits.environ == {"A": "b", "C": "d e", "LONG": "one two"}


def test_mounts_are_writable_unless_they_say_ro(dgx: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    mounts = [
        {"hostPath": "/etc/cufile.json", "containerPath": "/a", "options": ["ro", "nosuid", "bind"]},
        {"hostPath": "/etc/cufile.json", "containerPath": "/b", "options": ["nosuid", "nodev", "rbind"]},
        {"hostPath": "/etc/cufile.json", "containerPath": "/c"},
        {"hostPath": "tmpfs", "containerPath": "/etc", "type": "tmpfs"},
        {"hostPath": "proc", "containerPath": "/d", "type": "proc"},
    ]
    spec = {"kind": "acme.com/x", "devices": [{"name": "a", "containerEdits": {"mounts": mounts}}]}
    dgx.file("/etc/cdi/x.json", json.dumps(spec))
    edits, registry = Edits("test"), cdi.Specifications(Host(str(dgx.root)))
    assert registry.missing_path("acme.com/x", ["a"]) == ""
    registry.add(edits, "acme.com/x", ["a"])
    assert {path: bool(flags & linux.MOUNT_ATTR_RDONLY) for path, (_, flags) in edits.files.items()} == {
        "/a": True, "/b": False, "/c": False,
    }  # fmt: skip
    assert edits.tmpfs == ["/etc"]
    assert "cannot mount proc on /d" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["A", "=b", ""])
def test_invalid_variable(dgx: FakeHost, variable: str) -> None:
    """The error names the specification, and not the program that was to start."""
    spec = {"kind": "acme.com/x", "devices": [{"name": "a", "containerEdits": {"env": [variable]}}]}
    dgx.file("/etc/cdi/x.json", json.dumps(spec))
    with pytest.raises(HookError, match=f"x.json is not a valid CDI specification: .*'{variable}'"):
        cdi.Specifications(Host(str(dgx.root))).add(Edits("test"), "acme.com/x", ["a"])


# A specification as NVIDIA's toolkit writes it on a Kubernetes host, where the loader cache lacks the driver.
GKE = """
cdiVersion: 0.7.0
containerEdits:
    additionalGids:
        - 44
    deviceNodes:
        - fileMode: 438
          major: 195
          minor: 255
          path: /dev/nvidiactl
          permissions: rwm
        - path: /dev/nvidia-uvm
    env:
        - NVIDIA_CTK_LIBCUDA_DIR=/home/kubernetes/bin/nvidia/lib64
        - NVIDIA_VISIBLE_DEVICES=void
    hooks:
        - args:
            - nvidia-cdi-hook
            - enable-cuda-compat
            - --host-driver-version=535.104.05
          env:
            - NVIDIA_CTK_DEBUG=false
          hookName: createContainer
          path: /usr/bin/nvidia-cdi-hook
        - args:
            - nvidia-cdi-hook
            - update-ldcache
            - --folder
            - /home/kubernetes/bin/nvidia/lib64
            - --folder
            - /home/kubernetes/bin/nvidia/lib64/vdpau
          hookName: createContainer
          path: /usr/bin/nvidia-cdi-hook
        - args:
            - nvidia-cdi-hook
            - disable-device-node-modification
          hookName: createContainer
          path: /usr/bin/nvidia-cdi-hook
    mounts:
        - containerPath: /home/kubernetes/bin/nvidia/lib64/libcuda.so.535.104.05
          hostPath: /home/kubernetes/bin/nvidia/lib64/libcuda.so.535.104.05
          options: &options
            - ro
            - nosuid
            - nodev
            - rbind
            - rprivate
        - containerPath: /home/kubernetes/bin/nvidia/lib64/libnvidia-nvvm.so.535.104.05
          hostPath: /home/kubernetes/bin/nvidia/lib64/libnvidia-nvvm.so.535.104.05
devices:
    - containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
        hooks:
            - args:
                - nvidia-cdi-hook
                - create-symlinks
                - --link
                - ../card1::/dev/dri/by-path/pci-0000:07:00.0-card
              hookName: createContainer
              path: /usr/bin/nvidia-cdi-hook
      name: gpu0
    - containerEdits:
        deviceNodes:
            - path: /dev/nvidia0
      name: all
kind: nvidia.com/gpu
"""


@pytest.mark.parametrize("anchors", [True, False])
@pytest.mark.parametrize("visible", ["0", "gpu0", "all", uuid(0)])
def test_libraries_that_no_loader_of_the_host_knows(
    tmp_path: pathlib.Path, box: pathlib.Path, capsys: pytest.CaptureFixture[str], visible: str, anchors: bool
) -> None:
    host = fakehost.FakeHost(tmp_path / "host")
    host.gpu(0, "07", 0)
    directory = "/home/kubernetes/bin/nvidia/lib64"
    host.driver(libraries=directory, cache=False)
    host.file("/etc/cdi/nvidia.yaml", GKE if anchors else GKE.replace("&options", ""))
    edits = planned(host, box, {"NVIDIA_VISIBLE_DEVICES": visible})
    assert edits.environ["NVIDIA_CTK_LIBCUDA_DIR"] == directory
    assert gpus(edits) == {0}
    assert (ldcache.NATIVE, "libcuda.so.1", f"{directory}/libcuda.so.1") in edits.libraries
    assert (ldcache.NATIVE, "libnvidia-nvvm.so.4", f"{directory}/libnvidia-nvvm.so.4") in edits.libraries
    assert edits.links[f"{directory}/libcuda.so.1"] == f"libcuda.so.{VERSION}"
    assert "WARN" not in capsys.readouterr().err


@pytest.mark.parametrize(("node", "word"), [("/dev/dxg", "WSL2"), ("/dev/nvmap", "Jetson")])
def test_systems_whose_driver_only_a_specification_knows(
    tmp_path: pathlib.Path, box: pathlib.Path, capsys: pytest.CaptureFixture[str], node: str, word: str
) -> None:
    host = fakehost.FakeHost(tmp_path / "host")
    host.node(node, 10, 1)
    spec = {
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "all", "containerEdits": {"deviceNodes": [{"path": node}]}}],
        "containerEdits": {"mounts": [{"hostPath": "/usr/lib/wsl/x.so.1", "containerPath": "/usr/lib/wsl/x.so.1"}]},
    }
    image = {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert planned(host, box, {}, image).describe() == []
    stderr = capsys.readouterr().err
    assert word in stderr
    assert "nvidia-ctk cdi generate" in stderr
    with pytest.raises(HookError, match=word) as caught:
        planned(host, box, {"NVIDIA_VISIBLE_DEVICES": "0"})
    assert "nvidia-ctk cdi generate" in caught.value.hint
    host.file("/etc/cdi/nvidia.json", json.dumps(spec))
    host.file("/usr/lib/wsl/x.so.1")
    assert set(planned(host, box, {}, image).nodes) == {node}
    # In a cluster, nodes without a GPU can have the specification too.
    (host.root / node.lstrip("/")).unlink()
    assert planned(host, box, {}, image).describe() == []
    assert "WARN" not in capsys.readouterr().err


def test_device_option_takes_precedence_over_the_image(dgx: FakeHost, box: pathlib.Path) -> None:
    """CUDA images select "all", but --device nvidia.com/gpu=0 gives only one GPU, with and without CDI."""
    image = {"NVIDIA_VISIBLE_DEVICES": "all"}
    for _ in range(2):
        for devices, minors in (
            ("nvidia.com/gpu=0", {2}),
            ("/dev/knem, nvidia.com/gpu=0,nvidia.com/gpu=3", {2, 1}),
            (f"nvidia.com/gpu={uuid(4)}", {6}),
        ):
            edits = planned(dgx, box, {"ENROOT_DEVICES": devices}, image)
            assert gpus(edits) == minors
            assert {path for path in edits.hidden if "caps" not in path} == {
                f"/dev/nvidia{minor}" for minor in set(MINORS) - minors
            }
            plan = fakehost.hook("97-devices.py")["plan"]
            assert not gpus(plan(fakehost.context(dgx, box, {"ENROOT_DEVICES": devices}, image)))
        dgx.cdi()
    with pytest.raises(HookError, match="--device nvidia.com/gpu=9"):
        planned(dgx, box, {"ENROOT_DEVICES": "nvidia.com/gpu=9"}, image)
    with pytest.raises(HookError, match="--device nvidia.com/gpu=all"):
        planned(fakehost.FakeHost(dgx.root / "none"), box, {"ENROOT_DEVICES": "nvidia.com/gpu=all"})
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert gpus(planned(dgx, box, {**step, "ENROOT_DEVICES": "nvidia.com/gpu=0"}, image)) == {2}
    assert gpus(planned(dgx, box, {**step, "ENROOT_DEVICES": "nvidia.com/gpu=all"}, image)) == {2, 3}
    of_job = {"SLURM_STEP_ID": "0", "SLURM_JOB_GPUS": "2,3"}
    assert gpus(planned(dgx, box, {**of_job, "ENROOT_DEVICES": "nvidia.com/gpu=0"}, image)) == {2}


def test_parsed_once_while_the_file_stays(
    dgx: FakeHost, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsed, "_MIN_AGE_NS", -(10**18))
    path = dgx.cdi()

    def kinds() -> list[bool]:
        specifications = cdi.Specifications(Host(str(dgx.root)), str(tmp_path / "cache"))
        return [bool(specifications.names(kind)) for kind in ("nvidia.com/gpu", "forged.com/gpu")]

    assert kinds() == [True, False]
    (kept,) = (tmp_path / "cache/cdi").iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"nvidia.com/gpu", b"forged.com/gpu"))
    assert kinds() == [False, True]
    path.write_text(path.read_text())
    assert kinds() == [True, False]
    kept.write_bytes(b"garbage")
    assert kinds() == [True, False]


def test_a_specification_that_others_can_write_is_not_used(dgx: FakeHost, box: pathlib.Path) -> None:
    dgx.cdi().chmod(0o666)
    assert not planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0"}).environ
    with pytest.raises(HookError, match=r"etc/cdi/nvidia\.yaml can be written by others"):
        planned(dgx, box, {"NVIDIA_VISIBLE_DEVICES": "0", "PENROOT_NVIDIA_MODE": "cdi"})


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
    for wrong, hint in (
        ("amd.com/gpu=1", "available: 0"),
        ("intel.com/gpu=0", "/etc/cdi"),
        ("kfd", "vendor.com"),
        ("/dev/x", ""),
    ):
        with pytest.raises(HookError) as caught:
            nodes_for(wrong)
        assert hint in caught.value.hint


def test_devices_in_penroot_yaml_are_a_list() -> None:
    text = b"devices: [nvidia.com/gpu=all, /dev/kfd]\n"
    assert settings_file.parse("x", text) == [("ENROOT_DEVICES", 1, "nvidia.com/gpu=all,/dev/kfd")]
