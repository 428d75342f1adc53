"""Fit libraries of a host into an image, or say why they do not fit. The hosts are fake: Slingshot, EFA and UCX."""

from __future__ import annotations

import os
import pathlib

import pytest

from enroot_py.base.errors import HookError
from enroot_py.config import yaml
from enroot_py.config.settings import load
from enroot_py.features.fabric import fabric, fitting
from enroot_py.runtime.edits import Edits
from tests import fakehost
from tests.fakefabric import CRAY, EFA, FABRIC, LIB, OFI_NCCL, build, efa, image, slingshot, ucx
from tests.fakehost import FakeHost


@pytest.fixture(scope="module")
def cray(tmp_path_factory: pytest.TempPathFactory) -> FakeHost:
    return slingshot(tmp_path_factory.mktemp("cray"))


@pytest.fixture(scope="module")
def amazon(tmp_path_factory: pytest.TempPathFactory) -> FakeHost:
    return efa(tmp_path_factory.mktemp("efa"))


@pytest.fixture(scope="module")
def infiniband(tmp_path_factory: pytest.TempPathFactory) -> FakeHost:
    return ucx(tmp_path_factory.mktemp("ucx"))


CXI = "com.hooks.cxi.enabled=true"
PLUGIN = "com.hooks.aws_ofi_nccl.enabled=true"
CUDA12 = "com.hooks.aws_ofi_nccl.variant=cuda12"


def caller(*annotations: str, **variables: str) -> dict[str, str]:
    return {"PENROOT_ANNOTATIONS": "\n".join(annotations), "ENROOT_FABRIC_PATH": f"{CRAY}:{EFA}", **variables}


def fits(host: FakeHost, box: pathlib.Path, variables: dict[str, str]) -> tuple[list[fitting.Fit], Edits]:
    """Fit the requested parts into an image. Return the fit of each part, and the edits of the container."""
    context = fakehost.context(host, box, variables, {})
    stock = fabric.Stock(context.settings, context.host)
    parts = [stock.part(want) for want in fabric.wanted(context.settings, context.host)]
    fit, edits = fitting.Fitting(context, stock), Edits("99-fabric")
    results = []
    for part in parts:
        results.append(fit.fit(part))
        if not results[-1].reasons:
            fit.add(edits, results[-1])
    fitting.add_nodes(context, stock, edits)
    return results, edits


def test_libfabric_of_cray_with_its_provider(cray: FakeHost, tmp_path: pathlib.Path) -> None:
    [fit], edits = fits(cray, image(tmp_path), caller(CXI))
    assert fit.reasons == []
    assert set(edits.files) == {
        f"{LIB}/libfabric.so.1",
        f"{LIB}/libfabric/libcxi-fi.so",
        f"{LIB}/libcxi.so.1",
        f"{LIB}/libjson-c.so.5",
    }
    assert edits.environ == {"FI_PROVIDER_PATH": f"{LIB}/libfabric"}
    assert set(edits.nodes) == {"/dev/cxi0", "/dev/cxi1"}
    assert [why.partition(":")[0] for why in fit.left_out] == ["libother-fi.so"] and "libgone.so.1" in fit.left_out[0]


@pytest.mark.parity("libraries that the image has are kept")
def test_libraries_of_efa_with_the_drivers_of_verbs(amazon: FakeHost, tmp_path: pathlib.Path) -> None:
    [fit], edits = fits(amazon, image(tmp_path), caller(CXI))
    assert fit.reasons == [] and fit.left_out == []
    assert {path.rpartition("/")[2] for path in edits.files} == {
        *("libfabric.so.1", "libibverbs.so.1", "libefa.so.1", "libefa-rdmav34.so", "efa.driver"),
    }
    assert set(edits.nodes) == {"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"}


SETTING = "ENROOT_FABRIC, environment"
BY_CXI, BY_PLUGIN = "com.hooks.cxi.enabled", "com.hooks.aws_ofi_nccl.enabled"


@pytest.mark.parity("never by default")
@pytest.mark.parametrize(
    ("annotations", "setting", "wanted"),
    [
        ((), "", []),
        ((), "nccl,libfabric", [("libfabric", SETTING), ("nccl", SETTING)]),
        ((CXI,), "", [("libfabric", BY_CXI)]),
        ((CXI,), "libfabric,ucx", [("libfabric", BY_CXI), ("ucx", SETTING)]),
        ((PLUGIN,), "", [("libfabric", BY_PLUGIN), ("nccl", BY_PLUGIN)]),
        ((CXI, PLUGIN), "", [("libfabric", BY_CXI), ("nccl", BY_PLUGIN)]),
        (("com.hooks.cxi.enabled=false",), "libfabric ucx", [("ucx", SETTING)]),
        (("com.hooks.cxi.enabled=false", PLUGIN), "", [("nccl", BY_PLUGIN)]),
        (("com.hooks.aws_ofi_nccl.enabled=False",), "libfabric,nccl", [("libfabric", SETTING)]),
        (("com.hooks.cxi.enabled=", CUDA12), "", []),
    ],
)
def test_parts_and_who_requested_them(
    annotations: tuple[str, ...], setting: str, wanted: list[tuple[str, str]]
) -> None:
    """By default, nothing is requested. Annotations override the setting. NCCL's plugin also requests libfabric."""
    host = {"HOME": "/", "PENROOT_ANNOTATIONS": "\n".join(annotations)} | (
        {"ENROOT_FABRIC": setting} if setting else {}
    )
    wants = fabric.wanted(load(host), host)
    assert [(want.part, want.origin) for want in wants] == wanted
    assert all(want.required for want in wants)
    warned = fabric.wanted(load({**host, "ENROOT_FABRIC_UNFIT": "warn"}), host)
    assert [want.required for want in warned] == [want.origin != SETTING for want in wants]


@pytest.mark.parity("never by default")
@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        ("com.hooks.cxi.enabled=yes", "com.hooks.cxi.enabled=yes is not true or false"),
        ("com.hooks.aws_ofi_nccl.variant=../../tmp", "variant=../../tmp is not a variant name"),
        ("com.hooks.aws_ofi_nccl.variant=a/b", "variant=a/b is not a variant name"),
        ("com.hooks.aws_ofi_nccl.variant=..", "variant=.. is not a variant name"),
    ],
)
def test_annotations_that_make_no_sense(annotation: str, why: str) -> None:
    host = {"HOME": "/", "PENROOT_ANNOTATIONS": f"{PLUGIN}\n{annotation}"}
    with pytest.raises(HookError, match=why) as caught:
        fabric.wanted(load(host), host)
    assert caught.value.hint


@pytest.mark.parity("the host's libfabric replaces an older one")
def test_older_libfabric_of_the_image_is_covered_in_place(cray: FakeHost, tmp_path: pathlib.Path) -> None:
    """A mount covers each copy that programs can load. No library is added beside the copies."""
    image(tmp_path)
    for path in (f"{LIB}/libfabric.so.1.11.0", "/opt/amazon/efa/lib/libfabric.so.1.20"):
        build(tmp_path, path, soname="libfabric.so.1", versions=FABRIC[:4])
    [fit], edits = fits(cray, tmp_path, caller(CXI))
    covered = {target for target, (source, _) in edits.files.items() if source.endswith("/libfabric.so.1.27.0")}
    assert not fit.reasons and covered == {f"{LIB}/libfabric.so.1.11.0", "/opt/amazon/efa/lib/libfabric.so.1.20"}
    assert "libfabric.so.1" not in [name for _, name, _ in edits.libraries]


def test_providers_of_the_image_are_not_for_the_hosts(amazon: FakeHost, tmp_path: pathlib.Path) -> None:
    """The image's FI_PROVIDER_PATH is replaced: it is not for the host's libfabric. The user's value is kept."""
    image(tmp_path)
    for variables, value in (({}, ""), ({"FI_PROVIDER_PATH": "/mine"}, None)):
        context = fakehost.context(amazon, tmp_path, caller(CXI, **variables), {"FI_PROVIDER_PATH": "/opt/providers"})
        stock = fabric.Stock(context.settings, context.host)
        [want] = fabric.wanted(context.settings, context.host)
        fit, edits = fitting.Fitting(context, stock), Edits("99-fabric")
        fit.add(edits, fit.fit(stock.part(want)))
        assert edits.environ.get("FI_PROVIDER_PATH") == value


@pytest.mark.parity("no replacement if the image's glibc is too old")
def test_newer_libfabric_of_the_image_is_not_replaced(cray: FakeHost, tmp_path: pathlib.Path) -> None:
    image(tmp_path)
    build(
        tmp_path, f"{LIB}/libfabric.so.1.99", soname="libfabric.so.1", versions=[*FABRIC, "FABRIC_1.10", "FABRIC_1.9"]
    )
    [fit], edits = fits(cray, tmp_path, caller(CXI))
    path = f"{CRAY}/libfabric.so.1.27.0"
    assert fit.reasons == [
        f"{path} lacks FABRIC_1.10, which programs of the image may need from {LIB}/libfabric.so.1.99"
    ]
    assert not edits.files


@pytest.mark.parity("libraries that the image has are kept")
def test_libraries_of_the_image_are_kept(amazon: FakeHost, tmp_path: pathlib.Path) -> None:
    image(tmp_path)
    versions = ["IBVERBS_1.0", "IBVERBS_1.1", "IBVERBS_1.14", "IBVERBS_PRIVATE_56"]
    build(tmp_path, f"{LIB}/libibverbs.so.1", versions=versions)
    build(tmp_path, f"{LIB}/libefa.so.1", versions=["EFA_1.0", "EFA_1.1", "EFA_1.4"])
    [fit], edits = fits(amazon, tmp_path, caller(CXI))
    assert not fit.reasons and list(edits.files) == [f"{LIB}/libfabric.so.1"]


@pytest.mark.parity("libraries that the image has are kept")
def test_older_library_of_the_image_is_replaced_as_a_set(amazon: FakeHost, tmp_path: pathlib.Path) -> None:
    """The image's libefa is too old. The host's libefa also needs the host's libibverbs, for private symbols."""
    image(tmp_path)
    build(tmp_path, f"{LIB}/libibverbs.so.1", versions=["IBVERBS_1.0", "IBVERBS_1.1", "IBVERBS_PRIVATE_30"])
    build(tmp_path, f"{LIB}/libefa.so.1", versions=["EFA_1.0"])
    [fit], edits = fits(amazon, tmp_path, caller(CXI))
    assert not fit.reasons
    assert {f"{LIB}/libibverbs.so.1", f"{LIB}/libefa.so.1", f"{LIB}/libibverbs/libefa-rdmav34.so"} <= set(edits.files)


@pytest.mark.parity("no replacement if the image's glibc is too old")
def test_an_image_with_an_older_c_library(cray: FakeHost, tmp_path: pathlib.Path) -> None:
    host = fakehost.FakeHost(tmp_path / "host")
    libc = build(host.root, "/stub/libc.so.6", versions=["GLIBC_2.4", "GLIBC_2.38"])
    build(host.root, f"{LIB}/libfabric.so.1", versions=FABRIC, needs=[libc])
    [fit], _ = fits(host, image(tmp_path / "image", "GLIBC_2.4", "GLIBC_2.9"), caller(CXI))
    assert fit.reasons == [
        f"{LIB}/libfabric.so.1 needs GLIBC_2.38 of libc.so.6, but the image provides only up to GLIBC_2.9"
    ]
    [fit], edits = fits(host, image(tmp_path / "newer", "GLIBC_2.4", "GLIBC_2.38", "GLIBC_2.41"), caller(CXI))
    assert not fit.reasons and [path.rpartition("/")[2] for path in edits.files] == ["libfabric.so.1"]


@pytest.mark.parity("no replacement if the image's glibc is too old")
def test_images_without_glibc_and_for_another_machine(cray: FakeHost, tmp_path: pathlib.Path) -> None:
    (tmp_path / "musl/lib").mkdir(parents=True)
    [fit], _ = fits(cray, tmp_path / "musl", caller(CXI))
    assert fit.reasons[0].endswith("needs libc.so.6, and the image has no glibc")
    libc = image(tmp_path / "other") / LIB[1:] / "libc.so.6"
    data = bytearray(libc.read_bytes())
    data[18] = 243
    libc.write_bytes(data)
    [fit], _ = fits(cray, tmp_path / "other", caller(CXI))
    assert fit.reasons[0].endswith(f"is for {os.uname().machine}, but the image is for riscv64")


@pytest.mark.parity("UCX, with all its modules")
def test_ucx_comes_as_a_whole(infiniband: FakeHost, tmp_path: pathlib.Path) -> None:
    """The host's modules cover the image's modules, in the directory of the image's library."""
    image(tmp_path)
    directory = "/opt/hpcx/ucx/lib"
    for name in ("ucp", "uct", "ucs", "ucm"):
        build(tmp_path, f"{directory}/lib{name}.so.0", symbols=[f"{name}_init"])
    build(tmp_path, f"{directory}/ucx/libuct_cuda.so.0")
    context = fakehost.context(infiniband, tmp_path, {"ENROOT_FABRIC": "ucx"}, {"LD_LIBRARY_PATH": directory})
    stock = fabric.Stock(context.settings, context.host)
    [want] = fabric.wanted(context.settings, context.host)
    fit, edits = fitting.Fitting(context, stock), Edits("99-fabric")
    result = fit.fit(stock.part(want))
    assert not result.reasons
    fit.add(edits, result)
    libraries = {f"{directory}/lib{name}.so.0" for name in ("ucp", "uct", "ucs", "ucm")}
    assert set(edits.files) == {*libraries, f"{directory}/ucx/libuct_ib.so.0", f"{LIB}/libnuma.so.1"}
    assert edits.tmpfs == [f"{directory}/ucx"] and edits.environ == {"UCX_MODULE_DIR": f"{directory}/ucx"}


@pytest.mark.parity("UCX, with all its modules")
def test_ucx_that_lacks_what_the_images_gives(infiniband: FakeHost, tmp_path: pathlib.Path) -> None:
    image(tmp_path)
    build(tmp_path, f"{LIB}/libucp.so.0", symbols=["ucp_init", "ucp_new_call"])
    [fit], _ = fits(infiniband, tmp_path, {"ENROOT_FABRIC": "ucx"})
    assert len(fit.reasons) == 1 and "lacks ucp_new_call" in fit.reasons[0]


@pytest.mark.parity("com.hooks.aws_ofi_nccl")
def test_the_plugin_of_nccl_has_its_own_name_and_variant(cray: FakeHost, tmp_path: pathlib.Path) -> None:
    image(tmp_path)
    results, edits = fits(cray, tmp_path, caller(PLUGIN, CUDA12))
    assert [fit.part.want.part for fit in results] == ["libfabric", "nccl"] and not any(fit.reasons for fit in results)
    assert edits.files[f"{LIB}/libnccl-net-ofi.so"][0] == f"{cray.root}{OFI_NCCL}/cuda12/lib/libnccl-net.so"
    assert edits.environ["NCCL_NET_PLUGIN"] == "ofi"
    assert edits.links == {f"{LIB}/librccl-net-ofi.so": f"{LIB}/libnccl-net-ofi.so"}
    _, edits = fits(cray, tmp_path, caller(PLUGIN, CUDA12, NCCL_NET_PLUGIN="mine", FI_PROVIDER_PATH="/mine"))
    assert not edits.environ
    [_, fit], _ = fits(cray, tmp_path, caller(PLUGIN, CUDA12.replace("12", "13")))
    assert " has no libnccl-net-ofi.so, variant cuda13, in " in fit.reasons[0]
    assert fit.reasons[0].endswith("; it has variant cuda12, variant rocm6")
    [_, fit], _ = fits(cray, tmp_path, caller(PLUGIN))
    assert " has no libnccl-net-ofi.so in " in fit.reasons[0]


@pytest.mark.parity("com.hooks.cxi")
def test_devices_that_slurm_names_and_those_of_mellanox(
    cray: FakeHost, amazon: FakeHost, tmp_path: pathlib.Path
) -> None:
    """SLINGSHOT_DEVICES, from Slurm, and MELLANOX_VISIBLE_DEVICES limit the device nodes."""
    image(tmp_path)
    _, edits = fits(cray, tmp_path, caller(CXI, SLINGSHOT_DEVICES="cxi1"))
    assert set(edits.nodes) == {"/dev/cxi1"}
    _, edits = fits(amazon, tmp_path, caller(CXI, MELLANOX_VISIBLE_DEVICES="none"))
    assert not edits.nodes


@pytest.mark.parity("files that others could have made are not added")
@pytest.mark.security("I5")
def test_files_that_others_could_have_made_are_not_added(tmp_path: pathlib.Path) -> None:
    image(tmp_path / "image")
    host = slingshot(tmp_path / "host")
    library = host.root / CRAY[1:] / "libfabric.so.1.27.0"
    library.chmod(0o666)
    [fit], _ = fits(host, tmp_path / "image", caller(CXI))
    assert f"{library} can be written by others (mode 666)" in fit.reasons[0]
    library.chmod(0o755)
    library.parent.chmod(0o777)
    [fit], _ = fits(host, tmp_path / "image", caller(CXI))
    assert f"{library.parent} can be written by others (mode 777)" in fit.reasons[0]
    library.parent.chmod(0o755)
    cxi = host.root / "usr/lib64/libcxi.so.1.5.0"
    cxi.chmod(0o757)
    [fit], edits = fits(host, tmp_path / "image", caller(CXI))
    assert not fit.reasons and f"{cxi} can be written by others" in fit.left_out[0]
    assert not any("libcxi" in path for path in edits.files)
    if os.geteuid() == 0:
        os.chown(library, 4711, 0)
        [fit], _ = fits(host, tmp_path / "image", caller(CXI))
        assert f"{library} belongs to uid 4711, not to uid 0" in fit.reasons[0]


@pytest.mark.parity("files that others could have made are not added")
@pytest.mark.security("I5")
@pytest.mark.parametrize("trap", ["fifo", "directory", "loop", "outside", "device", "garbage"])
def test_invalid_library_of_an_image_counts_as_missing(cray: FakeHost, tmp_path: pathlib.Path, trap: str) -> None:
    """If the library is a FIFO, a directory, a damaged file or a link out of the image, it counts as missing."""
    image(tmp_path)
    path = tmp_path / LIB[1:] / "libfabric.so.1"
    if trap == "fifo":
        os.mkfifo(path)
    elif trap == "directory":
        path.mkdir()
    elif trap == "garbage":
        path.write_bytes(b"\x7fELF\2\1\1" + bytes(range(200)))
    else:
        path.symlink_to({"loop": "libfabric.so.1", "outside": "../" * 20 + "etc/passwd", "device": "/dev/zero"}[trap])
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 100)
    [fit], edits = fits(cray, tmp_path, caller(CXI))
    assert not fit.reasons and f"{LIB}/libfabric.so.1" in edits.files


def test_directories_in_penroot_yaml_are_a_list() -> None:
    assert yaml.parse("x", b"fabric_path: [/a, /b]\n") == [("ENROOT_FABRIC_PATH", 1, "/a:/b")]
