"""Files of other Debian releases, for images. apt fetches the packages once, and verifies them with Debian's keys.

No package is installed, and no maintainer script runs. tests/matrix makes whole roots that run tests.
"""

from __future__ import annotations

import fcntl
import pathlib
import platform
import subprocess

from tests.matrix.roots import mirror
from tests.slurm.lab.images import cache_directory

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def newer() -> str:
    """Return the release after this machine's."""
    known = ("bullseye", "bookworm", "trixie", "forky")
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    return known[known.index(codename) + 1] if codename in known[:-1] else "sid"


def unpack(root: pathlib.Path, release: str, *packages: str) -> None:
    """Unpack packages of a release into the directory ``root``."""
    cache = pathlib.Path(cache_directory(), "releases", release)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archives = [_archive(cache, release, package) for package in packages]
    root.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        subprocess.run(["dpkg-deb", "--extract", archive, root], check=True)
    for name in ("lib", "lib64"):  # since Debian 12 no package contains them
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")


def _archive(cache: pathlib.Path, release: str, package: str) -> pathlib.Path:
    """Return the .deb file of a package. All packages are of the state that the release had at the first request."""
    if not list(cache.glob(f"{package}_*.deb")):
        for name in ("state/lists/partial", "cache/archives/partial"):
            (cache / name).mkdir(parents=True, exist_ok=True)
        (cache / "status").touch()
        (cache / "sources.list").write_text(f"deb [signed-by={KEYS}] {mirror()} {release} main\n")
        options = [f"Dir::State={cache}/state", f"Dir::State::status={cache}/status", f"Dir::Cache={cache}/cache"]
        options += [f"Dir::Etc::sourcelist={cache}/sources.list", "Dir::Etc::sourceparts=-", "APT::Sandbox::User=root"]
        apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
        if not list(cache.glob("state/lists/*Packages*")):
            subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "download", package], cwd=cache, check=True)
    [archive] = cache.glob(f"{package}_*.deb")
    return archive
