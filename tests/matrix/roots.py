"""A directory for each release of Debian, with the tests' prerequisites; kept from one run to the next.

Packages, certificates and Python packages come from the sources that this machine uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENTER = Path(__file__).parent / "enter"
PROJECT = Path(__file__).parents[2]
CHECKOUT = "/usr/src/penroot"  # the working tree within a root, where ordinary users can read it
MIRROR = "http://deb.debian.org/debian"
# debootstrap lacks scripts for releases younger than itself; its script for unstable works for all.
SCRIPT = "/usr/share/debootstrap/scripts/sid"
INCLUDED = ("ca-certificates", "git", "make")
BUNDLE = "etc/ssl/certs/ca-certificates.crt"
# Settings of this machine's access to the mirror that other releases support too: apt.conf(5).
FETCHING = re.compile(r"Acquire::(https?|Retries|ForceIPv4|Check-Valid-Until|Check-Date)\b")
# Variables for pip and other programs that download, unless they name files of this machine.
PASSED = re.compile(r"PIP_(?!FIND_LINKS|CONFIG|TARGET|PREFIX)\w+|\w+_proxy|\w+_PROXY")


class MatrixError(Exception):
    """A release cannot be prepared."""


@dataclass(frozen=True)
class Root:
    """A directory with a release of Debian; ``over`` replaces /usr/local in it."""

    release: str
    path: Path
    over: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        """Return the argument list that runs ``words`` in the root with root's login environment."""
        home = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "LANG": "C.UTF-8", "TERM": "dumb"}
        home |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **self.environ}
        return [str(ENTER), str(self.path), "env", "-i", *(f"{k}={v}" for k, v in home.items()), *words]

    def popen(self, script: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a shell command in the checkout, with its output in ``log``."""
        environ = {**os.environ, "OVER": self.over}
        with log.open("ab") as file:
            command = self.command("sh", "-c", f"cd {CHECKOUT} && {script}")
            return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def run(self, script: str, log: Path) -> int:
        process = self.popen(script, log)
        try:
            return process.wait()
        finally:
            process.kill()  # unshare's --kill-child ends its children too

    def must(self, script: str, log: Path) -> None:
        """Run a shell command. Raises MatrixError if it fails."""
        if self.run(script, log) != 0:
            raise MatrixError(f"{self.release}: {script}: failed; its output is in {log}\n{tail(log)}")


def place_of_roots() -> Path:
    top = Path(os.environ.get("PENROOT_MATRIX") or "/var/cache/penroot-matrix")
    top.mkdir(parents=True, exist_ok=True)
    return top


@contextlib.contextmanager
def prepared(
    release: str, log: Path, say: Callable[[str], None], *, arch: str = "", kind: str = "", packages: Sequence[str] = ()
) -> Iterator[Root]:
    """Yield a root of this release for one run, with the working tree and its prerequisites. Raises MatrixError.

    A root of another ``arch``, or of a ``kind`` with extra ``packages``, has its own directory.
    """
    path = place_of_roots() / "-".join(filter(None, (release, arch, kind)))
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            say(f"{release}: making {path} (once)")
            bootstrap(release, path, (*INCLUDED, *packages), log, arch)
        # A lab names its cgroups after its directory, so two roots must not use the same directory.
        lab = f"/srv/matrix-{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
        environ = {**passed, "CI": "true", "PENROOT_LAB": lab, "PENROOT_PREFIX": "/opt/penroot"}
        root = Root("-".join(filter(None, (release, arch))), path, environ=environ)
        settle(path)
        copy_checkout(path / CHECKOUT[1:])
        root.must("tests/prerequisites", log)
        settle(path)  # installing ca-certificates may have overwritten the bundle
        try:
            yield root
        finally:
            root.run(f"for l in {lab} {lab}-*; do PENROOT_LAB=$l .venv/bin/python -m tests.slurm.lab down; done", log)


def bootstrap(release: str, path: Path, packages: Sequence[str], log: Path, arch: str = "") -> None:
    """Make a root by debootstrap(8)."""
    if not shutil.which("debootstrap"):
        raise MatrixError("not installed: debootstrap: apt-get install debootstrap")
    new = Path(f"{path}.new")
    shutil.rmtree(new, ignore_errors=True)
    environ = dict(os.environ)
    if proxy := apt_config().get("Acquire::http::Proxy"):
        environ.setdefault("http_proxy", proxy)
    include = f"--include={','.join(packages)}"
    # Hide the /proc that debootstrap mounts: the lab reports leftover mounts.
    apart = ["unshare", "--mount"]
    options = ["--variant=minbase", include, *([f"--arch={arch}"] if arch else [])]
    command = [*apart, "debootstrap", *options, release, str(new), mirror(), SCRIPT]
    with log.open("ab") as file:
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(command)}: failed; its output is in {log}\n{tail(log)}")
    new.rename(path)


def mirror() -> str:
    """Return the mirror of this machine's apt, or Debian's own on another distribution."""
    system = platform.freedesktop_os_release()
    if system["ID"] != "debian":
        return MIRROR
    targets = output("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages")
    uris = [line.split() for line in targets.splitlines()]
    return next((uri for uri, release in uris if release == system.get("VERSION_CODENAME")), MIRROR)


def apt_config() -> dict[str, str]:
    lines = (line.rstrip(";").split(" ", 1) for line in output("apt-config", "dump").splitlines())
    return {name: value.strip('"') for name, value in lines if FETCHING.match(name) and value != '""'}


def settle(path: Path) -> None:
    """Configure name resolution, certificates and package sources as on this machine."""
    for name in ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", BUNDLE):
        if os.path.exists(f"/{name}"):
            shutil.copyfile(f"/{name}", path / name)
    settings = "".join(f'{name} "{value}";\n' for name, value in apt_config().items())
    (path / "etc/apt/apt.conf.d/90matrix").write_text(settings)


def copy_checkout(to: Path) -> None:
    """Copy the working tree, without ignored files, as a new git repository: tests list its files."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    listed = output("git", "-C", str(PROJECT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(PROJECT / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, to / name, follow_symlinks=False)
    output("git", "-C", str(to), "init", "--quiet")
    output("git", "-C", str(to), "add", "--all")


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
