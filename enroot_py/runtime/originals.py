"""Bash hooks of a site beside ours: which of them ours stand for, and which run in place of ours.

A node that had enroot has the files of its hooks, most of them as they were shipped: those
are known by their digests in originals.b2sum, over all versions that enroot has had.
"""

from __future__ import annotations

import os
from _blake2 import blake2b
from _collections_abc import Mapping

from enroot_py.config import files
from enroot_py.config.settings import Settings
from enroot_py.runtime import environ
from enroot_py.runtime.hooks import STANDARD, Hook

_RENAMED = {"10-cgroup": "10-cgroups", "99-nvidia": "98-nvidia"}  # in old versions of enroot


def judge(
    path: str, found: dict[str, Hook], directory: str, settings: Settings, host: Mapping[str, str]
) -> Hook | None:
    """The hook that the script ``path`` of a site is, if it is to run; ``found``, by file name, is made to fit.

    The site has the last word on a hook of ours: one of that name which cannot run switches it off,
    as that does for enroot, and one that is not as enroot shipped it runs in its place. Raises ConfigError.
    """
    name = path.rpartition("/")[2][:-3]
    current = _RENAMED.get(name, name)
    ours = found.get(current + ".py")
    if ours is not None and ours.path != f"{directory}/{current}.py":
        ours = None  # the site or the user has said already what becomes of it
    if reason := _idle(path):
        if ours is not None and current == name:
            found[name + ".py"] = Hook(name, "", f"switched off: {path} {reason}")
        return None
    if _is_original(path, name):
        instead = ours or _instead(name, directory, settings, host)
        if instead is not None:
            instead.why, instead.original = f"for {path}, which is enroot's own", path
            found.setdefault(instead.name + ".py", instead)
            return None
    if ours is not None and current == name:
        del found[name + ".py"]
        return Hook(name, path, "in place of ours")
    return Hook(name, path)


def _idle(path: str) -> str:
    """Why a script does not run, which is no mistake: that is how one switches it off."""
    try:
        if not os.path.getsize(path):  # that of /dev/null is 0
            return "is empty"
    except OSError as e:
        return f"cannot be read: {e.strerror}"
    return "" if os.access(path, os.X_OK) else "is not executable"


def _is_original(path: str, name: str) -> bool:
    line = f"{blake2b(files.content(path) or b'', digest_size=16).hexdigest()}  {name}.sh\n"
    with open(STANDARD + "/originals.b2sum") as known:
        return line in known.read()


def _instead(name: str, directory: str, settings: Settings, host: Mapping[str, str]) -> Hook | None:
    """What does the work of one of enroot's optional hooks, if anything of ours does."""
    step = "PYXIS_VERSION" in host
    if name == "50-slurm-pmi" and (step or settings.mpi and environ.is_rank(host)):
        return Hook(name, "")
    if name == "50-slurm-pytorch" and step:
        return Hook(name, "")
    path = f"{directory}/extra/{name}.py"
    return Hook(name, path) if os.path.exists(path) else None
