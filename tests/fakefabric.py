"""Fake hosts with Slingshot and EFA, and images: trees of minimal libraries with symbol versions."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

from tests.fakehost import TRIPLET, FakeHost

LIB = f"/usr/lib/{TRIPLET}"
CRAY = "/opt/cray/libfabric/1.22.0/lib64"
EFA = "/opt/amazon/efa/lib64"
OFI_NCCL = "/opt/aws-ofi-nccl"
FABRIC = tuple(f"FABRIC_1.{number}" for number in range(8))


def build(
    root: pathlib.Path,
    path: str,
    *,
    soname: str = "",
    versions: Sequence[str] = (),
    needs: Sequence[str] = (),
    symbols: Sequence[str] = (),
    private: bool = False,
) -> str:
    """Compile the library ``path`` beneath ``root``, with a link ``soname`` beside it. Return ``path``.

    The library has one function per version. Without ``versions``, it has one function and the ``symbols``. It calls
    all functions of the libraries that it ``needs``, but functions of private versions only if ``private`` is set.
    """
    made = root / path.lstrip("/")
    made.parent.mkdir(parents=True, exist_ok=True)
    name = soname or made.name
    defined = [_function(name, version) for version in versions] or [_function(name, ""), *symbols]
    called = [function for each in needs for function in _functions(root / each.lstrip("/"))]
    called = [function for function in called if "PRIVATE" not in function or private]
    source = "".join(f"int {function}(void);\n" for function in called)
    body = "".join(f" + {function}()" for function in called)
    source += "".join(f"int {function}(void) {{ return 0{body}; }}\n" for function in defined)
    script = ""
    for number, version in enumerate(versions):
        before = f" {versions[number - 1]}" if number else ""
        script += f"{version} {{ global: {_function(name, version)};{' local: *;' if not number else ''} }}{before};\n"
    with tempfile.NamedTemporaryFile("w", suffix=".map") as version_script:
        version_script.write(script)
        version_script.flush()
        versioned = [f"-Wl,--version-script={version_script.name}"] if versions else []
        link = ["gcc", "-shared", "-fPIC", "-nostdlib", *versioned, f"-Wl,-soname,{name}", "-Wl,--no-as-needed"]
        link += ["-o", str(made), "-x", "c", "-", "-x", "none", *(str(root / each.lstrip("/")) for each in needs)]
        link += ["-Wl,--allow-shlib-undefined"]
        subprocess.run(link, input=source, text=True, check=True)
    if made.name != name:
        (made.parent / name).unlink(missing_ok=True)
        (made.parent / name).symlink_to(made.name)
    return path


def _function(name: str, version: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in f"{name}_{version}")


def _functions(path: pathlib.Path) -> list[str]:
    """Return the functions of a library from build()."""
    done = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    words = [line.split() for line in done.stdout.splitlines()]
    return [fields[2].partition("@")[0] for fields in words if fields[1] == "T"]


def slingshot(root: pathlib.Path) -> FakeHost:
    """Build a host with two Slingshot adapters, Cray's libfabric, provider modules, and variants of the NCCL plugin."""
    host = FakeHost(root)
    host.standard_nodes()
    for number in range(2):
        host.node(f"/dev/cxi{number}", 240, number)
    json = build(root, "/usr/lib64/libjson-c.so.5.3.0", soname="libjson-c.so.5", versions=["JSONC_0.14"])
    cxi = build(root, "/usr/lib64/libcxi.so.1.5.0", soname="libcxi.so.1", needs=[json])
    main = build(root, f"{CRAY}/libfabric.so.1.27.0", soname="libfabric.so.1", versions=FABRIC)
    build(root, f"{CRAY}/libfabric/libcxi-fi.so", needs=[cxi])
    lost = build(root, "/usr/lib64/libgone.so.1")
    build(root, f"{CRAY}/libfabric/libother-fi.so", needs=[lost])
    (root / lost.lstrip("/")).unlink()
    for variant in ("cuda12", "rocm6"):
        build(root, f"{OFI_NCCL}/{variant}/lib/libnccl-net.so", needs=[main])
    return host


def efa(root: pathlib.Path) -> FakeHost:
    """Build a host with an EFA verbs device, Amazon's libfabric, and rdma-core's libraries with private symbols."""
    host = FakeHost(root)
    host.standard_nodes()
    host.hca(0, "00:1e", driver="efa", mad=False)
    host.file("/sys/devices/pci0000:00/0000:00:1e:00.0/vendor", "0x1d0f\n")
    host.node("/dev/infiniband/rdma_cm", 10, 58)
    host.file("/etc/libibverbs.d/efa.driver", "driver efa\n")
    verbs = build(root, f"{LIB}/libibverbs.so.1.14.44", soname="libibverbs.so.1",
                  versions=["IBVERBS_1.0", "IBVERBS_1.1", "IBVERBS_PRIVATE_44"])  # fmt: skip
    of_efa = build(root, f"{LIB}/libefa.so.1.2.44", soname="libefa.so.1", versions=["EFA_1.0", "EFA_1.1"],
                   needs=[verbs], private=True)  # fmt: skip
    (root / LIB.lstrip("/") / "libibverbs").mkdir()
    (root / LIB.lstrip("/") / "libibverbs/libefa-rdmav34.so").symlink_to("../libefa.so.1.2.44")
    build(root, f"{EFA}/libfabric.so.1.26.2", soname="libfabric.so.1", versions=FABRIC, needs=[of_efa, verbs])
    return host


def ucx(root: pathlib.Path) -> FakeHost:
    """Build a host with UCX: four unversioned libraries, a module, and their dependencies."""
    host = FakeHost(root)
    host.standard_nodes()
    numa = build(root, f"{LIB}/libnuma.so.1", versions=["libnuma_1.1"])
    ucm = build(root, f"{LIB}/libucm.so.0", symbols=["ucm_init"])
    ucs = build(root, f"{LIB}/libucs.so.0", symbols=["ucs_init"], needs=[ucm, numa])
    uct = build(root, f"{LIB}/libuct.so.0", symbols=["uct_init"], needs=[ucs])
    build(root, f"{LIB}/libucp.so.0", symbols=["ucp_init", "ucp_put"], needs=[uct])
    build(root, f"{LIB}/ucx/libuct_ib.so.0", needs=[ucs])
    return host


def image(root: pathlib.Path, *glibc: str) -> pathlib.Path:
    """Build an image's tree: a C library with these symbol versions, in Debian's library directory."""
    build(root, f"{LIB}/libc.so.6", versions=glibc or ["GLIBC_2.2.5", "GLIBC_2.34"])
    return root
