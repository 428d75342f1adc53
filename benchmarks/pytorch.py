"""Make an image like PyTorch's: Python, CUDA's libraries and torch, from this machine and from wheels.

The image has 14 layers: 4.5 GB compressed, 8.4 GB unpacked. Most bytes are in a few large files; most files are small.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from isal import igzip

from tests.images import DOCKER, Pusher, digest, directory, symlink, tar

TORCH = "torch==2.8.0"  # the last release for CUDA 12
PACKAGES = "usr/local/lib/python{}/dist-packages"
# Contents of layers: directories of this machine, or wheels by the start of their names.
BASE = (
    ("/usr/bin", "/usr/sbin", "/usr/lib64"),
    ("/usr/lib/x86_64-linux-gnu",),
    ("/usr/lib/python3", "/usr/lib/python3.11"),
)
WHEELS = (
    ("numpy", "setuptools", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing"),
    ("nvidia_cublas",),
    ("nvidia_cudnn",),
    ("nvidia_cufft", "nvidia_curand", "nvidia_cuda", "nvidia_cufile", "nvidia_nvtx", "nvidia_nvjitlink"),
    ("nvidia_cusolver",),
    ("nvidia_cusparse_",),
    ("nvidia_cusparselt",),
    ("nvidia_nccl",),
    ("triton",),
    ("torch",),
)


def download(directory: pathlib.Path) -> None:
    """Download the wheels of torch and its dependencies, unless they exist."""
    if not list(directory.glob("torch-*.whl")):
        version = ["--only-binary=:all:", "--python-version", _python()]
        command = [sys.executable, "-m", "pip", "download", "-q", *version, "-d", str(directory), TORCH, "numpy"]
        subprocess.run(command, check=True)


def push(pusher: Pusher, repository: str, wheels: pathlib.Path, scratch: pathlib.Path) -> None:
    """Push the image with the tag 1, layer by layer: it may not fit into memory."""
    files = sorted(wheels.glob("*.whl"))
    layers = [_links(), *map(_of_machine, BASE), *(_of_wheels(files, names, scratch / "root") for names in WHEELS)]
    blobs, diff_ids = [], []
    packed = scratch / "blob"
    for layer in layers:
        diff_ids.append(_compress(layer, packed))
        data = packed.read_bytes()
        pusher.blob(repository, data)
        blobs.append({"mediaType": DOCKER["layer"], "size": len(data), "digest": digest(data)})
        packed.unlink()
    settings = {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["python3"]}
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": settings, "rootfs": rootfs}).encode()
    pusher.blob(repository, config)
    head = {"mediaType": DOCKER["config"], "size": len(config), "digest": digest(config)}
    manifest = {"schemaVersion": 2, "mediaType": DOCKER["manifest"], "config": head, "layers": blobs}
    pusher.manifest(repository, "1", json.dumps(manifest).encode())


def _compress(layer: Iterator[bytes], packed: pathlib.Path) -> str:
    """Write a layer to a gzip file. Return its diff_id."""
    diff_id = hashlib.sha256()
    with igzip.open(packed, "wb", compresslevel=1) as out:  # type: ignore[no-untyped-call]
        for data in layer:
            diff_id.update(data)
            out.write(data)
    return "sha256:" + diff_id.hexdigest()


def _links() -> Iterator[bytes]:
    names = [name for name in ("bin", "sbin", "lib", "lib64") if os.path.islink(f"/{name}")]
    links = [symlink(name, os.readlink(f"/{name}")) for name in names]
    yield tar([*map(directory, ("dev", "etc", "proc", "sys", "usr")), directory("tmp", 0o1777), *links])


def _of_machine(paths: Sequence[str]) -> Iterator[bytes]:
    yield from _tar("/", [path.lstrip("/") for path in paths if os.path.isdir(path)])


def _of_wheels(wheels: Sequence[pathlib.Path], names: Sequence[str], root: pathlib.Path) -> Iterator[bytes]:
    """Yield a layer of installed wheels with bytecode, made in the directory ``root``."""
    packages = root / PACKAGES.format(_python())
    chosen = [str(wheel) for wheel in wheels if wheel.name.startswith(tuple(names))]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    install += ["--only-binary=:all:", "--python-version", _python(), "--target", str(packages)]
    subprocess.run([*install, *chosen], check=True)
    # Ignore the exit status, as pip does: some .py files of torch are templates, not Python.
    compile_all = ["/usr/bin/python3", "-m", "compileall", "-q", "-s", str(root), "-p", "/", str(packages)]
    subprocess.run(compile_all, stdout=subprocess.DEVNULL)
    yield from _tar(str(root), ["usr"])
    shutil.rmtree(root)


def _tar(directory: str, names: Sequence[str]) -> Iterator[bytes]:
    """Yield a tar of directories, sorted by name like docker's layers."""
    command = ["tar", "-C", directory, "--sort=name", "--owner=0", "--group=0", "-cf", "-", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield from iter(partial(process.stdout.read, 1 << 20), b"")
    if process.returncode:
        raise RuntimeError(f"tar failed for {names}")


def _python() -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    command = ["/usr/bin/python3", "-ISc", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
