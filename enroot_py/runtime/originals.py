"""Check a site's bash hook that has the name of our hook: does it run, and is it an unchanged file of enroot?

A node that had enroot still has the files of enroot's hooks, mostly unchanged. originals.b2sum has the digests of these
files in all versions of enroot.
"""

from __future__ import annotations

import os
from _blake2 import blake2b
from _collections_abc import Mapping, Sequence

from enroot_py.config import files
from enroot_py.config.settings import Settings
from enroot_py.runtime import environ

RENAMED = {"10-cgroup": "10-cgroups", "99-nvidia": "98-nvidia"}  # name in old versions of enroot -> new name


def idle(path: str) -> str:
    """Return why a script does not run, or ""."""
    try:
        if not os.path.getsize(path):  # 0 for /dev/null too
            return "is empty"
    except OSError as e:
        return f"cannot be read: {e.strerror}"
    return "" if os.access(path, os.X_OK) else "is not executable"


def is_original(path: str, name: str, digests: str) -> bool:
    """Return whether the file ``digests`` has the digest of ``path`` under the name ``name``.sh. Raises ConfigError."""
    line = f"{blake2b(files.content(path) or b'', digest_size=16).hexdigest()}  {name}.sh\n"
    with open(digests) as known:
        return line in known.read()


def substitute(name: str, hook_directories: Sequence[str], settings: Settings, host: Mapping[str, str]) -> str | None:
    """Return the path of our hook that replaces enroot's optional hook ``name``.

    Returns "" if the SPANK plugin or our hook 20-mpi does the work of the hook, and None if penroot has no replacement.
    """
    step = "PYXIS_VERSION" in host
    if name == "50-slurm-pmi" and (step or settings.mpi and environ.is_rank(host)):
        return ""
    if name == "50-slurm-pytorch" and step:
        return ""
    paths = (f"{directory}/extra/{name}.py" for directory in hook_directories)
    return next((path for path in paths if os.path.exists(path)), None)
