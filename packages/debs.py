"""Unpack Debian packages without installing them.

They are for another machine or release, or conflict with installed packages.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from packages.place import run


def unpack(to: Path, *names: str, architecture: str = "", source: str = "") -> None:
    """Unpack packages in ``to``. ``source`` is a line of sources.list(5); the default is this machine's sources."""
    with tempfile.TemporaryDirectory() as work:
        apt = ["apt-get", "-qq"]
        if architecture or source:  # do not use or change the package lists of this machine
            Path(work, "lists/partial").mkdir(parents=True)
            settings = {
                "Dir::State::Lists": f"{work}/lists",
                "Dir::State::status": "/dev/null",
                "Dir::Cache::pkgcache": "",
                "Dir::Cache::srcpkgcache": "",
            }
            if architecture:
                settings |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
            if source:
                Path(work, "sources.list").write_text(f"{source}\n")
                settings |= {"Dir::Etc::SourceList": f"{work}/sources.list", "Dir::Etc::SourceParts": "/dev/null"}
            apt += [f"-o{name}={value}" for name, value in settings.items()]
            run(*apt, "update")
        run(*apt, "download", *names, cwd=Path(work))
        for package in Path(work).glob("*.deb"):
            run("dpkg-deb", "--extract", package, to)
