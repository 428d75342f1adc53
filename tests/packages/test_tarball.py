"""The archive: unpacked at any path, moved, shared by several machines, and with its own plugin."""

from __future__ import annotations

import glob
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages import vendored
from tests.packages.conftest import NEEDS, bring_lab, demo, machine

# Use each compiled module.
COMPILED = """
import sys
sys.path.insert(0, sys.argv[1])
import _cffi_backend, isal.igzip_lib, isal.isal_zlib, yaml, zstandard
from enroot_py.base import linux
from isal import isal_zlib
text = b"word " * 99
assert isal_zlib.decompress(isal_zlib.compress(text)) == text
assert zstandard.backend == "cext"
assert zstandard.ZstdDecompressor().decompress(zstandard.ZstdCompressor().compress(text)) == text
assert yaml.load("[1, {a: b}]", Loader=yaml.CSafeLoader) == [1, {"a": "b"}]
import asyncssh, click, cryptography, urllib3
from cryptography.hazmat.primitives.asymmetric import ec
assert ec.generate_private_key(ec.SECP256R1()).key_size == 256
assert asyncssh.generate_private_key("ssh-ed25519").get_algorithm() == "ssh-ed25519"
for module in (asyncssh, click, cryptography, isal, urllib3, yaml, zstandard, linux):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
if sys.version_info < (3, 11):
    import tomli
print("%d.%d" % sys.version_info[:2])
"""


@pytest.fixture(scope="module")
def unpacked(packages: Path) -> Iterator[Path]:
    (archive,) = packages.glob("penroot-*-x86_64.tar.xz")
    with tempfile.TemporaryDirectory(prefix="any place ", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        subprocess.run(["tar", "--extract", "--file", archive, "--directory", place], check=True)
        (made,) = Path(place).iterdir()
        yield made


def pythons() -> dict[str, str]:
    """Return this machine's interpreters by version: Debian's and pyenv's."""
    found = {}
    for path in [
        *glob.glob("/usr/bin/python3.*[0-9]"),
        *glob.glob(f"{os.environ.get('HOME')}/.pyenv/versions/3.*/bin/python3"),
    ]:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-IS", "-c", code], capture_output=True, text=True)
        found.setdefault(done.stdout.strip(), path)
    return {version: path for version, path in found.items() if version in vendored.PYTHONS}


@pytest.mark.parity("one package for Python 3.10 to 3.14")
def test_each_python_here_loads_its_compiled_module(unpacked: Path) -> None:
    found = pythons()
    assert found
    for version, python in found.items():
        command = [python, "-IBS", "-c", COMPILED, unpacked / "lib/penroot"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"{version}\n", "")
    print("Python", *sorted(found))


@pytest.mark.parity("one package for Python 3.10 to 3.14")
@pytest.mark.parametrize(("release", "version"), [("trixie", "3.13"), ("forky", "3.14")])
def test_each_python_of_debian_loads_what_is_compiled_for_it(unpacked: Path, release: str, version: str) -> None:
    with machine(release, f"python-{release}", slurm=False) as debian:
        debian.run("apt-get -qq update; apt-get -qq install --yes --no-install-recommends python3")
        subprocess.run(["cp", "-a", unpacked, debian.path / "srv/penroot"], check=True)
        (debian.path / "srv/compiled").write_text(COMPILED)
        done = debian.run("python3 -IBS /srv/compiled /srv/penroot/lib/penroot; /srv/penroot/bin/penroot --version")
        first, second = done.stdout.splitlines()
        assert first == version
        assert second.endswith(", tarball)")


def test_a_python_that_is_too_old_finds_a_newer_one_or_says_so(unpacked: Path) -> None:
    old = glob.glob(f"{os.environ.get('HOME')}/.pyenv/versions/3.[6-9].*/bin/python3")
    if not old:
        pytest.skip("no Python of this machine is too old")
    for python in old:
        done = subprocess.run([python, "-IS", unpacked / "bin/penroot", "--version"], capture_output=True, text=True)
        assert done.stdout.endswith(", tarball)\n"), done.stderr


@pytest.mark.parity("an archive that runs from any path")
def test_read_only_tarball_runs_through_a_link(unpacked: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="penroot-link-", dir="/var/tmp") as home:
        os.chmod(home, 0o777)
        os.symlink(unpacked / "bin/penroot", f"{home}/penroot")
        before = sorted(unpacked.rglob("*"))
        user = {"user": 2001, "group": 2001, "extra_groups": []}
        environ = {"HOME": home, "PATH": "/usr/bin:/bin"}
        for command in ([f"{home}/penroot", "info"], [unpacked / "bin/penroot-unshare", "true"]):
            done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd="/", **user)  # type: ignore[call-overload]
            assert done.returncode == 0, done.stderr
            if "info" in command:
                assert f"{unpacked}/lib/penroot" in done.stdout  # the archive's own hooks
        assert sorted(unpacked.rglob("*")) == before


@pytest.mark.parity("an archive that runs from any path")
def test_plugin_of_a_shared_place_runs_a_job(packages: Path) -> None:
    with machine("trixie", "tarball", slurm=True) as debian:
        environ = bring_lab(debian)
        debian.run(f"apt-get -qq install --yes --no-install-recommends python3 xz-utils {NEEDS}")
        (archive,) = packages.glob("penroot-*-x86_64.tar.xz")
        shared, link = "/opt/shared", "/opt/shared/penroot"

        def bring(version: str) -> None:  # as in docs/howto/install.md
            debian.run(f"{shared}/{version}/bin/pyxis-py choose; ln -sfn {version} {link}")
            assert debian.run(f"readlink -f {link}/lib/penroot/spank_pyxis.so").stdout.startswith(
                f"{shared}/{version}/"
            )

        debian.run(f"mkdir {shared}; tar -xf {debian.put(archive)} -C {shared}")
        bring(archive.name.removesuffix(".tar.xz"))
        said = debian.run(f"{link}/bin/pyxis-py install --prefix {link} 2>&1").stdout
        assert f"{link}/lib/penroot/spank_pyxis.so is the prebuilt plugin for Slurm 24.11" in said
        demo(debian, {**environ, "PENROOT_PREFIX": link})
        debian.run(f"cd {shared}; cp -a penroot-*-x86_64 penroot-9.9; rm penroot-9.9/lib/penroot/spank_pyxis.so")
        bring("penroot-9.9")
        line = debian.run("cat /etc/slurm/plugstack.conf.d/pyxis.conf").stdout
        assert line == f"required {link}/lib/penroot/spank_pyxis.so\n"
        # uninstall removes the line, which names the link: Slurm runs no job while a required plugin is missing.
        assert debian.run(f"{link}/bin/pyxis-py uninstall 2>&1").stdout.count("[INFO] removed ") == 2
        assert debian.run("ls /etc/slurm/plugstack.conf.d").stdout == ""
