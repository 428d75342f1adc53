"""Containers get libfabric, UCX and the NCCL plugin from the host, which is this Debian or a fake host."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import socket
import subprocess

import pytest

from tests import releases
from tests.fakefabric import CRAY, FABRIC, LIB, build, efa, slingshot
from tests.installation import LIBRARY
from tests.kernel.conftest import PREFIX, User, busybox_rootfs, require, squashed
from tests.kernel.test_devices import LOADER, become, box, require_nodes
from tests.waiting import until

__all__ = ["box"]

REAL = {"ENROOT_FABRIC": "libfabric"}


@pytest.fixture
def info(box: pathlib.Path) -> pathlib.Path:
    """Return the container ``box`` with fi_info and fi_pingpong, but without libfabric."""
    for name in ("fi_info", "fi_pingpong"):
        program = shutil.which(name)
        require(program, "libfabric-bin is not installed")
        assert program
        shutil.copy(program, box / "bin" / name)
    return box


@pytest.fixture
def newer(user: User) -> pathlib.Path:
    """Return the container ``newer``, with glibc of the next Debian release, and libfabric of an older release."""
    root = user.data / "newer"
    busybox_rootfs(root)
    releases.unpack(root, releases.newer(), "libc6")
    releases.unpack(root, "bullseye", "libfabric1", "libfabric-bin")
    return owned(user, root)


@pytest.fixture
def older(user: User) -> pathlib.Path:
    """Return the container ``older``, of a Debian release whose glibc is too old for the host's libfabric."""
    root = user.data / "older"
    busybox_rootfs(root)
    releases.unpack(root, "bullseye", "libc6", "libfabric1", "libfabric-bin")
    return owned(user, root)


def owned(user: User, root: pathlib.Path) -> pathlib.Path:
    require(os.geteuid() == 0, "only root can write to the directory for packages of other releases")
    user.own(user.data)
    return root


def annotated(user: User, *lines: str) -> list[str]:
    """Return the options that start a container with an environment file that has these annotations."""
    file = user.home / "it.toml"
    file.write_text("writable = false\n[annotations]\n" + "".join(f"{line}\n" for line in lines))
    return ["--environment", str(file)]


CXI = 'com.hooks.cxi.enabled = "true"'


@pytest.mark.parity("99-fabric")
def test_debians_libfabric_where_the_image_has_none(user: User, info: pathlib.Path) -> None:
    done = user.penroot("start", "box", "fi_info", "-p", "tcp", status=127)
    assert "libfabric.so.1" in done.stderr
    assert "provider: tcp" in user.start("box", "fi_info", "-p", "tcp", env=REAL)


@pytest.mark.parity("99-fabric")
def test_an_image_in_a_file(user: User, info: pathlib.Path) -> None:
    """penroot checks the owners of the host's files before it enters a user namespace for the image's FUSE server."""
    path = squashed(user, info)
    assert "provider: tcp" in user.start(str(path), "fi_info", "-p", "tcp", env=REAL)
    assert "provider: tcp" in user.start("--root", str(path), "fi_info", "-p", "tcp", env=REAL)


@pytest.mark.parity("start --explain: each library")
def test_explain_shows_libraries_and_who_requested_them(user: User, info: pathlib.Path) -> None:
    library = os.path.realpath(f"{LIB}/libfabric.so.1")
    out = user.start("--explain", *annotated(user, CXI), "box", "true")
    assert f"fabric   libfabric of {os.uname().nodename}: {library}  (com.hooks.cxi.enabled)" in out
    assert f"file     {LIB}/libfabric.so.1 from {library}" in out
    assert "libfabric" not in user.start("--explain", "box", "true")
    require_nodes()
    become(user, slingshot(user.home / "cray"))
    out = user.start("--explain", *annotated(user, CXI), "box", "true", env={"ENROOT_FABRIC_PATH": CRAY})
    assert "without  libother-fi.so: " in out and f"variable FI_PROVIDER_PATH={LIB}/libfabric" in out


@pytest.mark.parity("never by default")
def test_start_without_fabric_imports_no_module_of_it(user: User, rootfs: pathlib.Path) -> None:
    library = f"import sys; sys.path.insert(0, {LIBRARY!r}); from enroot_py.cli.start import main; "
    words = ("python3", "-IS", "-X", "importtime", "-c", f"{library}main(['--explain', 'box', 'true'])")
    plain = user.run(*words).stderr
    of_devices = ("devices.cdi", "devices.nvidia", "fabric.fabric", "runtime.edits", "base.ldcache", "base.elf")
    assert not [name for name in of_devices if name in plain]
    requested = user.run(*words, env={"ENROOT_FABRIC": "libfabric", "ENROOT_FABRIC_UNFIT": "warn"})
    assert "enroot_py.features.fabric.fabric" in requested.stderr


@pytest.mark.parity("files that others could have made are not added")
@pytest.mark.security("I5")
def test_library_directory_that_is_a_link_is_refused(user: User, info: pathlib.Path) -> None:
    """The image's library directory is a link to the host's /dev/shm. The start fails, and writes nothing there."""
    shutil.rmtree(info / LIB[1:])
    (info / LIB[1:]).symlink_to("/dev/shm")
    done = user.penroot("start", "box", "true", env=REAL, status=1)
    assert "[ERROR] cannot add libfabric of " in done.stderr and "cannot mount it on" in done.stderr
    assert not list(pathlib.Path("/dev/shm").glob("libfabric*"))


def test_library_that_another_user_owns_is_not_added(user: User, info: pathlib.Path) -> None:
    require(os.geteuid() == 0, "only root makes files of another user")
    directory = user.home / "opt"
    directory.mkdir()
    shutil.copy(f"{LIB}/libfabric.so.1", directory)
    user.own(directory)
    done = user.penroot(
        "start", *annotated(user, CXI), "box", "fi_info", "-p", "tcp", env={"ENROOT_FABRIC_PATH": str(directory)}
    )
    assert "provider: tcp" in done.stdout
    listed = user.start("--explain", *annotated(user, CXI), "box", "true", env={"ENROOT_FABRIC_PATH": str(directory)})
    assert str(directory) not in "\n".join(line for line in listed.splitlines() if line.startswith("file "))


@pytest.mark.parity("the host's libfabric replaces an older one")
def test_newer_library_replaces_one_of_an_old_image(user: User, newer: pathlib.Path) -> None:
    """The image's libfabric needs a missing library. With the host's libfabric, two programs connect."""
    done = user.penroot("start", "newer", "fi_info", "--version", status=127)
    assert "librdmacm.so.1: cannot open shared object file" in done.stderr
    out = user.start("newer", "fi_info", "--version", env=REAL)
    host = subprocess.run(["fi_info", "--version"], capture_output=True, text=True, check=True).stdout
    assert f"libfabric: {host.partition('libfabric: ')[2].split()[0]}\n" in out and out != host
    words = ("start", "newer", "fi_pingpong", "-p", "tcp", "-e", "msg", "-I", "10", "-S", "1024")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = {**user.environ, **REAL}
    server = subprocess.Popen(user.command(f"{PREFIX}/bin/penroot", *words, "-B", port), env=environ, cwd=user.home)
    try:
        until(lambda: f":{int(port):04X} 00000000:0000 0A" in pathlib.Path("/proc/net/tcp").read_text(), "the server")
        out = user.penroot(*words, "-P", port, "127.0.0.1", env=REAL).stdout
        assert out.splitlines()[-1].split()[:3] == ["1k", "10", "=10"]
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_debians_ucx_with_its_modules(user: User, newer: pathlib.Path) -> None:
    """The host's UCX modules are mounted over the image's module directory, which is of another release."""
    require(os.path.exists(f"{LIB}/libucp.so.0") and shutil.which("gcc"), "libucx0 or gcc is not installed")
    (newer / LIB[1:] / "ucx").mkdir(parents=True)
    (newer / LIB[1:] / "ucx/libuct_old.so.0").touch()
    source = newer / "loader.c"
    source.write_text(LOADER)
    subprocess.run(["gcc", "-o", newer / "bin/loader", source], check=True)
    user.own(newer)
    modules = [f"{LIB}/ucx/libuct_{name}.so.0" for name in ("ib", "cma")]  # Debian 14 has no ib
    names = ("libucp.so.0", next(module for module in modules if os.path.exists(module)))
    script = 'loader "$@"; echo $UCX_MODULE_DIR; test -e $UCX_MODULE_DIR/libuct_old.so.0 || echo covered'
    out = user.start("newer", "sh", "-c", script, "sh", *names, env={"ENROOT_FABRIC": "ucx"})
    assert out.splitlines() == [*(f"{name} loaded" for name in names), f"{LIB}/ucx", "covered"]
    assert (newer / LIB[1:] / "ucx/libuct_old.so.0").exists()


@pytest.mark.parity("no replacement if the image's glibc is too old")
def test_older_release_does_not_get_the_hosts_libfabric(user: User, older: pathlib.Path) -> None:
    """The host's libfabric cannot load in the image. The error names the missing symbol version."""
    library = os.path.realpath(f"{LIB}/libfabric.so.1")
    done = user.penroot("start", "older", "true", env=REAL, status=1)
    assert re.search(
        rf"{library} needs GLIBC_2\.\d+ of libc\.so\.6, but the image provides only up to GLIBC_2\.30", done.stderr
    )
    out = user.penroot("fabric", "older").stdout
    assert (
        f"libfabric  the image's {LIB}/libfabric.so.1.14.0" in out
        and "but the image provides only up to GLIBC_2.30" in out
    )


@pytest.mark.parity("com.hooks.cxi")
def test_cray_libfabric_with_its_provider(user: User, box: pathlib.Path) -> None:
    require_nodes()
    become(user, slingshot(user.home / "cray"))
    names = ("libfabric.so.1", "libcxi.so.1", f"{LIB}/libfabric/libcxi-fi.so")
    script = 'loader "$@"; echo $FI_PROVIDER_PATH; ls /dev/cxi*'
    command = ("box", "sh", "-c", script, "sh", *names)
    path = {"ENROOT_FABRIC_PATH": CRAY, "ENROOT_RESTRICT_DEV": "yes"}
    expected = [*(f"{name} loaded" for name in names), f"{LIB}/libfabric", "/dev/cxi0", "/dev/cxi1"]
    assert user.start(*annotated(user, CXI), *command, env=path).splitlines() == expected
    assert user.start(*command, env={**path, "ENROOT_FABRIC": "libfabric"}).splitlines() == expected


@pytest.mark.parity("ENROOT_FABRIC_PATH", "the examples of docs/howto/fabric.md")
def test_the_settings_of_the_documentation(user: User, box: pathlib.Path) -> None:
    """The site's setting adds the NCCL plugin without a variant. An annotation selects a variant."""
    require_nodes()
    host = become(user, slingshot(user.home / "cray"))
    for directory in ("/opt/site/ofi-nccl", "/opt/site/ofi-nccl/cuda12"):
        build(host.root, f"{directory}/libnccl-net.so", needs=[f"{CRAY}/libfabric.so.1"])
    docs = (pathlib.Path(__file__).parents[2] / "docs/howto/fabric.md").read_text()
    settings = re.search(r"```yaml\n(.*?)```", docs, re.S)
    assert settings
    (user.home / "etc/penroot.yaml").write_text(settings[1])
    out = user.start("--explain", "box", "true")
    assert f"fabric   nccl of {os.uname().nodename}: /opt/site/ofi-nccl/libnccl-net.so  (ENROOT_FABRIC, " in out
    assert "etc/penroot.yaml:" in out.partition("ENROOT_FABRIC, ")[2].partition(")")[0]
    assert f"fabric   libfabric of {os.uname().nodename}: {CRAY}/libfabric.so.1.27.0" in out
    plugin = ('com.hooks.aws_ofi_nccl.enabled = "true"', 'com.hooks.aws_ofi_nccl.variant = "cuda12"')
    out = user.start("--explain", *annotated(user, *plugin), "box", "true")
    assert f"library  libnccl-net-ofi.so at {LIB}/libnccl-net-ofi.so" in out
    assert f"nccl of {os.uname().nodename}: /opt/site/ofi-nccl/cuda12/libnccl-net.so" in out
    off = user.start("--explain", *annotated(user, 'com.hooks.aws_ofi_nccl.enabled = "false"'), "box", "true")
    assert "libnccl-net" not in off and "libfabric.so.1" in off


@pytest.mark.parity("ENROOT_FABRIC_UNFIT")
def test_unfit_library_is_an_error_or_a_warning(user: User, box: pathlib.Path) -> None:
    require_nodes()
    host = become(user, slingshot(user.home / "cray"))
    libc = build(user.home / "future", "/libc.so.6", versions=["GLIBC_9.99"])
    build(user.home / "future", "/libfabric.so.1", versions=FABRIC, needs=[libc])
    shutil.copy(user.home / "future/libfabric.so.1", host.root / CRAY[1:] / "libfabric.so.1.27.0")
    path = {"ENROOT_FABRIC_PATH": CRAY}
    why = f"{CRAY}/libfabric.so.1.27.0 needs GLIBC_9.99 of libc.so.6, but the image provides only up to GLIBC_2."
    done = user.penroot("start", *annotated(user, CXI), "box", "echo", "ran", env=path, status=1)
    assert why in done.stderr and "[ERROR] cannot add libfabric of " in done.stderr and not done.stdout
    assert 'without: set com.hooks.cxi.enabled = "false"' in done.stderr
    path["ENROOT_FABRIC"] = "libfabric"
    assert why in user.penroot("start", "box", "echo", "ran", env=path, status=1).stderr
    done = user.penroot("start", "box", "echo", "ran", env={**path, "ENROOT_FABRIC_UNFIT": "warn"})
    assert why in done.stderr and "[WARN]" in done.stderr and done.stdout == "ran\n"


@pytest.mark.parity("fabric --environment")
def test_preflight_of_an_image(user: User, info: pathlib.Path) -> None:
    """penroot fabric shows the host's libraries, with and without a request."""
    library = os.path.realpath(f"{LIB}/libfabric.so.1")
    assert f"libfabric  {library}" in user.penroot("fabric").stdout
    unasked = user.penroot("fabric", "box").stdout
    assert "libfabric  none: programs linked with it do not start" in unasked
    assert " would fit: set ENROOT_FABRIC=libfabric, or com.hooks.cxi.enabled" in unasked
    requested = user.penroot("fabric", "box", env=REAL).stdout
    assert (
        f"the host's {library}" in requested
        and "the image has none: requested by ENROOT_FABRIC, environment" in requested
    )
    assert "with its dependencies " in requested and "libibverbs.so.1" in requested and "libc.so" not in requested
    assert "providers: efa," in requested


@pytest.mark.parity("fabric --environment")
def test_preflight_names_devices_and_providers(user: User, box: pathlib.Path) -> None:
    require_nodes()
    become(user, slingshot(user.home / "cray"))
    path = {"ENROOT_FABRIC_PATH": CRAY}
    out = user.penroot("fabric", *annotated(user, CXI), "box", env=path).stdout
    assert "/dev/cxi0 (cxi), /dev/cxi1 (cxi)" in out and "providers: cxi, tcp" in out
    assert "left out: libother-fi.so: " in out and "libgone.so.1, which the image lacks, and " in out
    build(box, f"{LIB}/libfabric.so.1.11.0", soname="libfabric.so.1", versions=FABRIC[:3])
    out = user.penroot("fabric", "box", env=path).stdout
    assert f"libfabric  the image's {LIB}/libfabric.so.1.11.0" in out and "providers: tcp\n" in out
    assert "no cxi provider for /dev/cxi0: programs use another provider, such as tcp" in out


@pytest.mark.parity("fabric --environment")
def test_preflight_of_mpi_and_nccl(user: User, box: pathlib.Path) -> None:
    """penroot fabric shows MPI's transports and NCCL's plugin, as the image's variables select them."""
    require_nodes()
    become(user, efa(user.home / "efa"))
    assert "mpi        none in the loader's directories" in user.penroot("fabric", "box").stdout
    mpi = build(box, f"{LIB}/libmpi.so.40.30.4", soname="libmpi.so.40")
    assert f"mpi        {mpi} can use neither libfabric nor UCX" in user.penroot("fabric", "box").stdout
    (box / LIB[1:] / "openmpi/lib/openmpi3").mkdir(parents=True)
    (box / LIB[1:] / "openmpi/lib/openmpi3/mca_mtl_ofi.so").touch()
    (box / LIB[1:] / "openmpi/lib/openmpi3/mca_pml_ucx.so").touch()
    plugin = build(box, "/opt/hpcx/lib/libnccl-net.so")
    out = user.penroot("fabric", "box", env={"ENROOT_FABRIC": "libfabric"}).stdout
    assert f"mpi        {mpi} can use UCX and libfabric" in out
    assert "node       " in out and "/dev/infiniband/uverbs0 (efa)" in out and "providers: efa, tcp" in out
    assert "nccl       none: NCCL uses its built-in transports" in out
    (box / "etc/environment").write_text("LD_LIBRARY_PATH=/opt/hpcx/lib\nPATH=/bin\n")
    assert f"nccl       the image's {plugin}" in user.penroot("fabric", "box").stdout
    (box / "etc/environment").write_text("LD_LIBRARY_PATH=/opt/hpcx/lib\nPATH=/bin\nNCCL_NET_PLUGIN=other\n")
    assert "nccl       none: " in user.penroot("fabric", "box").stdout


@pytest.mark.parity("fabric --environment")
def test_preflight_fails_if_the_start_would_fail(user: User, box: pathlib.Path) -> None:
    require_nodes()
    become(user, slingshot(user.home / "cray"))
    done = user.penroot("fabric", "box", env={"ENROOT_FABRIC": "ucx"}, status=1)
    assert "but ENROOT_FABRIC, environment requests it (error): " in done.stdout
    assert "[ERROR] cannot start box: a required library does not fit" in done.stderr
    assert (
        "requests it (warning): "
        in user.penroot("fabric", "box", env={"ENROOT_FABRIC": "ucx", "ENROOT_FABRIC_UNFIT": "warn"}).stdout
    )
