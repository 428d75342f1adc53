"""Fixtures for tests with a real kernel: an ordinary user, a container, an image and a registry."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.installation import IS_INSTALLED, LIBRARY
from tests.installation import PREFIX as PREFIX
from tests.installation import require as require
from tests.kernel.registry import Server, serve

# The UID has no entry in passwd, so the tests need no account. Test runs at the same time use UIDs that differ by at
# least 100, so a test may treat every process of its UID as its own.
UID = 3_000_000 + 100 * (os.getpid() % 30_000)


def require_penroot() -> None:
    """Skip the test unless every user can run penroot."""
    fix = f"make install PREFIX={PREFIX}" if IS_INSTALLED else "make dev"
    require(glob.glob(f"{LIBRARY}/enroot_py/base/_linux.*so"), f"no penroot in {PREFIX}: {fix}")
    closed = [str(path) for path in (PREFIX, *pathlib.Path(PREFIX).parents) if not os.stat(path).st_mode & 0o001]
    require(not closed or os.geteuid() != 0, f"ordinary users cannot enter {', '.join(closed)}: chmod o+x")


class User:
    """An ordinary user with its own home directory, who runs penroot."""

    def __init__(self, home: pathlib.Path, uid: int = UID) -> None:
        self.home = home
        self.uid = uid
        self.gid: int | None = None  # None: the same number as the UID
        self.data = home / "data"
        self.groups: tuple[int, ...] = ()  # supplementary groups
        self.environ = {
            "HOME": str(home),
            "PATH": f"{PREFIX}/bin:/usr/bin:/bin",
            "TERM": "xterm",
            "ENROOT_SYSCONF_PATH": str(home / "etc"),
            "ENROOT_DATA_PATH": str(self.data),
            "ENROOT_CACHE_PATH": str(home / "cache"),
            "ENROOT_RUNTIME_PATH": str(home / "run"),
        }

    def command(self, *words: str) -> list[str]:
        """Return ``words`` as a command of this user. If root runs the tests, prefix it with setpriv."""
        groups = "--groups=" + ",".join(map(str, self.groups)) if self.groups else "--clear-groups"
        ids = (f"--reuid={self.uid}", f"--regid={self.uid if self.gid is None else self.gid}", groups)
        return [*(("setpriv", *ids, "--") if os.geteuid() == 0 else ()), *words]

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        status: int | None = 0,
        cwd: pathlib.Path | None = None,
        prefix: Sequence[str] = (),
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as this user, and check that its exit status is ``status``. If that is None, check nothing."""
        words = [*prefix, *self.command(*command)]
        environ, directory = {**self.environ, **(env or {})}, cwd or self.home
        stdin_options: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        done = subprocess.run(
            words, env=environ, cwd=directory, capture_output=True, text=True, timeout=300, check=False, **stdin_options
        )
        message = f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert status in (None, done.returncode), message
        return done

    def begin(
        self, *command: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = (), **streams: Any
    ) -> subprocess.Popen[str]:
        """Start a command as this user, by default with an empty stdin. ``streams`` takes all options of Popen."""
        words, environ = [*prefix, *self.command(*command)], {**self.environ, **(env or {})}
        streams.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(words, env=environ, cwd=self.home, text=True, **streams)

    @contextlib.contextmanager
    def running(self, *command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
        """Run a command of this user until the ``with`` block ends."""
        with self.begin(*command, **options) as process:
            try:
                yield process
            finally:
                process.kill()

    def penroot(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        return self.run(f"{PREFIX}/bin/penroot", *arguments, **options)  # type: ignore[arg-type]

    def start(self, *arguments: str, **options: object) -> str:
        """Return the stdout of ``penroot start``."""
        return self.penroot("start", *arguments, **options).stdout

    def write(self, name: str, text: str, mode: int = 0o644) -> pathlib.Path:
        """Create a file of this user below its home, with its parent directories."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        self.own(self.home / name.partition("/")[0])
        return path

    def own(self, path: pathlib.Path) -> None:
        """Change the owner of a tree to this user. Without root, the user owns it already."""
        if os.geteuid() == 0:
            subprocess.run(["chown", "-hR", f"{self.uid}:{self.uid}", str(path)], check=True)


@contextlib.contextmanager
def ordinary_user(uid: int) -> Iterator[User]:
    """Yield a user with this UID and a new home directory."""
    require_penroot()
    # Other users cannot enter pytest's own directories.
    home = pathlib.Path(tempfile.mkdtemp(prefix="penroot-test-", dir="/var/tmp"))
    home.chmod(0o755)
    user = User(home, uid)
    user.own(home)
    yield user
    subprocess.run(
        ["rm", "-rf", str(home)], check=True
    )  # unlike rmtree, ignores files that the user's programs delete meanwhile


@pytest.fixture
def user() -> Iterator[User]:
    with ordinary_user(UID) as ordinary:
        yield ordinary


def busybox_rootfs(path: pathlib.Path) -> None:
    """Create a root file system with static busybox and links to it."""
    busybox = shutil.which("busybox")
    require(busybox, "busybox-static is not installed")
    assert busybox is not None
    for directory in ("bin", "dev", "etc", "opt/work", "proc", "sys", "tmp", "usr/bin"):
        (path / directory).mkdir(parents=True)
    shutil.copy(busybox, path / "bin/busybox")
    names = (
        "cat chown cut echo env false grep head id ln ls mkdir mount ps pwd readlink rm sh sleep stat touch true umount"
    )
    for name in names.split():
        (path / "bin" / name).symlink_to("busybox")
    (path / "etc/environment").write_text("FROM_IMAGE=yes\nPATH=/opt/bin:/bin:/usr/bin\n")


def box(user: User) -> pathlib.Path:
    """Make a container named ``box`` as a plain directory."""
    path = user.data / "box"
    busybox_rootfs(path)
    user.own(user.data)
    return path


@pytest.fixture
def rootfs(user: User) -> pathlib.Path:
    """Return a container named ``box`` as a plain directory."""
    return box(user)


@contextlib.contextmanager
def small_filesystem(directory: pathlib.Path, options: str) -> Iterator[pathlib.Path]:
    """Create ``directory`` and mount a tmpfs on it, with ``options`` of mount(8)."""
    require(os.geteuid() == 0, "only root can mount a small file system")
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def squashed(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """Make a squashfs image in the user's home, and require that the user can mount it."""
    require_squashfuse()
    path = pack(rootfs, user.home / f"{rootfs.name}.sqsh")
    user.own(path)
    return path


def require_squashfuse() -> None:
    """Skip the test without squashfuse or /dev/fuse. Let ordinary users open /dev/fuse."""
    require(shutil.which("squashfuse") or shutil.which("squashfuse_ll"), "squashfuse is not installed")
    require(os.path.exists("/dev/fuse"), "this machine has no /dev/fuse")
    if os.geteuid() == 0:
        os.chmod("/dev/fuse", 0o666)


def pack(tree: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Make the squashfs image ``path`` of a tree, with root as the owner of every file."""
    require(shutil.which("mksquashfs"), "squashfs-tools is not installed")
    options = ["-all-root", "-quiet", "-no-progress", "-Xcompression-level", "1"]
    subprocess.run(["mksquashfs", str(tree), str(path), *options], check=True)
    return path


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Make one squashfs image of the busybox root file system for all tests."""
    require_squashfuse()
    directory = tmp_path_factory.mktemp("packed")  # numbered: the attack tier imports this fixture, so it may run twice
    busybox_rootfs(directory / "box")
    return pack(directory / "box", directory / "box.sqsh")


@pytest.fixture
def image(user: User, rootfs: pathlib.Path, packed: pathlib.Path) -> pathlib.Path:
    """Copy the squashfs image to the user's home, and return its path."""
    path = user.home / "box.sqsh"
    shutil.copy(packed, path)
    user.own(path)
    return path


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a registry for the tests of a module. The module may redefine this fixture to add images."""
    with serve(tmp_path_factory.mktemp("registry")) as server:
        yield server


def servers(path: pathlib.Path | str) -> dict[int, str]:
    """Return PID -> name of each FUSE server that uses a file at or below ``path``."""
    names = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            name = (process / "comm").read_text().strip()
            if name.startswith(("squashfuse", "fuse-overlayfs")):
                opened = [os.readlink(fd) for fd in (process / "fd").iterdir()]
                if str(path) in " ".join([(process / "cmdline").read_text(), *opened]):
                    names[int(process.name)] = name.removesuffix("_ll")
    return names


def mounts_under(path: pathlib.Path) -> list[str]:
    """Return the mounts beneath ``path`` in this process's mount namespace."""
    return [line for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines() if f" {path}" in line]
