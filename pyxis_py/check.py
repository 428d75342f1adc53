"""``pyxis-py check``: whether this node can run container steps, and for what is wrong the way to mend it.

Looks, and tries what only a try can tell; changes nothing.
"""

from __future__ import annotations

import glob
import os
import pwd
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from enroot_py.base.errors import PenrootError
from enroot_py.base.run import Program, find
from enroot_py.cli import doctor
from enroot_py.cli.doctor import Finding
from enroot_py.config import settings as enroot_settings
from pyxis_py import settings
from pyxis_py.settings import PLUGIN

_MARK = rb"penroot plugin for Slurm 0x([0-9a-f]+)"
# Plugins that give a job a /tmp of its own. One that does so after ours changes what the mounts meant.
_PRIVATE_TMP = ("auto_tmpdir", "private-tmpdir", "private_tmpdir", "spank-private-tmp", "spank_private_tmp", "tmpdir")
_PATIENCE = 10  # seconds with a program of Slurm: without a slurm.conf, or a slurmctld, each tries for a minute
_JOB_CONTAINER_DIRECTORIES = "/tmp,/dev/shm"  # job_container.conf(5), Dirs


@dataclass(frozen=True, slots=True)
class Line:
    """One plugin of plugstack.conf."""

    origin: str
    path: str
    arguments: tuple[str, ...]


def findings(plugstack: str | None) -> Iterator[Finding]:
    """Everything that is worth a look, in the order in which a step meets it."""
    slurm = slurm_configuration()
    if not slurm:
        yield Finding(
            "warn",
            "scontrol cannot tell the configuration of Slurm: proctrack and job_container are not looked at",
            "is slurmctld up, and this node one of its cluster? scontrol show config",
        )
    lines = list(stack(plugstack or slurm.get("PlugStackConfig") or "/etc/slurm/plugstack.conf"))
    ours = [line for line in lines if os.path.basename(line.path) == PLUGIN]
    yield from _loaded(ours, lines, plugstack or slurm.get("PlugStackConfig", "/etc/slurm/plugstack.conf"))
    yield from doctor.machine()
    yield from _slurm(slurm, settings.load(ours[0].arguments if ours and not _bad_arguments(ours[0]) else ()))
    loaded = enroot_settings.load()
    yield doctor.data_path(loaded.data_path)
    yield from doctor.inodes(dict.fromkeys((loaded.data_path, loaded.cache_path)))
    yield from root_squash(users_home())


def slurm_configuration() -> dict[str, str]:
    """What slurmctld says, as scontrol(1) shows it; empty where nobody answers."""
    try:
        text = Program([find("scontrol", package="slurm-client"), "show", "config"], timeout=_PATIENCE).run()
    except PenrootError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def stack(path: str) -> Iterator[Line]:
    """The plugins that a plugstack.conf loads, in order, those of included files too: spank(8), CONFIGURATION."""
    try:
        with open(path, errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words[:1] == ["include"]:
            for pattern in words[1:]:
                for included in sorted(glob.glob(os.path.join(os.path.dirname(path), pattern))):
                    yield from stack(included)
        elif words[:1] in (["required"], ["optional"]):
            yield Line(f"{path}:{number}", words[1] if len(words) > 1 else "", tuple(words[2:]))


def built_for(plugin: str) -> int | None:
    """The SLURM_VERSION_NUMBER of the headers that a plugin was built with. Raises OSError."""
    with open(plugin, "rb") as file:
        mark = re.search(_MARK, file.read())
    return int(mark[1], 16) if mark else None


def _installed() -> str:
    """The version of the Slurm on this machine, as 22.05.8; empty where there is none.

    Raises PenrootError where none tells it: before it does, srun wants a slurm.conf, and slurmd does not.
    """
    error = None
    for program in ("slurmd", "srun"):
        path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin:/opt/slurm/sbin")
        if path:
            try:
                return Program([path, "-V"], timeout=_PATIENCE).run().split()[-1]
            except PenrootError as e:
                error = e
    if error:
        raise error
    return ""


def _bad_arguments(line: Line) -> PenrootError | None:
    try:
        settings.load(line.arguments)
    except PenrootError as e:
        return e
    return None


def _loaded(ours: list[Line], lines: list[Line], plugstack: str) -> Iterator[Finding]:
    if not ours:
        what = f"{plugstack} does not load {PLUGIN}" if os.path.isfile(plugstack) else f"there is no file {plugstack}"
        yield Finding("bad", what, "pyxis-py install, and include plugstack.conf.d/*")
        return
    if len(ours) > 1:
        where = ", ".join(line.origin for line in ours)
        yield Finding("bad", f"{PLUGIN} is loaded more than once: {where}", "remove all lines but one")
    line = ours[0]
    if error := _bad_arguments(line):
        yield Finding("bad", f"{line.origin}: {error}", error.hint)
    try:
        number = built_for(line.path)
    except OSError as e:
        yield Finding("bad", f"{line.origin}: {line.path}: {e.strerror}", "pyxis-py install, on this node too")
        return
    try:
        version = _installed()
    except PenrootError as e:
        yield Finding("bad", f"the version of Slurm is not known: {e}", "is there a slurm.conf? " + e.hint)
        return
    has = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not has:
        yield Finding("bad", "there is no Slurm on this machine", "install it, or add it to PATH")
    elif number is None:
        yield Finding("bad", f"{line.path} is not penroot's, or older", "pyxis-py install")
    elif (number >> 16, number >> 8 & 0xFF) != has:
        built = f"{number >> 16}.{number >> 8 & 0xFF:02}"
        yield Finding("bad", f"{line.path} is for Slurm {built}, this is {version}", "pyxis-py install")
    else:
        yield Finding("ok", f"{line.origin} loads {line.path}, for Slurm {version}")
    for other in lines[lines.index(line) + 1 :]:
        if any(name in os.path.basename(other.path) for name in _PRIVATE_TMP):
            yield Finding(
                "warn",
                f"{other.origin}: {other.path} comes after {PLUGIN}: containers have the node's /tmp, not the job's",
                f"move it above {line.origin}",
            )


def _slurm(slurm: Mapping[str, str], plugin: settings.PluginSettings) -> Iterator[Finding]:
    tracking = slurm.get("ProctrackType")
    if tracking == "proctrack/cgroup":
        yield Finding("ok", f"ProctrackType={tracking}")
    elif tracking:
        fix = "ProctrackType=proctrack/cgroup in slurm.conf"
        yield Finding(
            "bad", f"ProctrackType={tracking} loses the helper of a step: what it holds may outlive jobs", fix
        )
    if "tmpfs" in slurm.get("JobContainerType", ""):
        private = _job_container_directories(slurm.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
        inside = [path for path in private if (plugin.runtime_path + "/").startswith(path.rstrip("/") + "/")]
        if inside:
            what = (
                f"runtime_path={plugin.runtime_path} is in {inside[0]}, of which job_container/tmpfs gives each job one"
            )
            yield Finding("bad", what, f"runtime_path={settings.SETTINGS['runtime_path'].default} in plugstack.conf")
        else:
            yield Finding("ok", f"runtime_path={plugin.runtime_path} is outside of job_container/tmpfs")


def _job_container_directories(slurm_conf: str) -> list[str]:
    try:
        with open(os.path.join(os.path.dirname(slurm_conf), "job_container.conf"), errors="surrogateescape") as file:
            setting = re.search(r"^\s*Dirs\s*=\s*(\S+)", file.read(), re.MULTILINE | re.IGNORECASE)
    except OSError:
        setting = None
    return (setting[1] if setting else _JOB_CONTAINER_DIRECTORIES).split(",")


def users_home() -> str:
    """The home of whoever asks, or for root of some user: it stands for all."""
    if os.getuid() != 0:
        return os.path.expanduser("~")  # of whom no database knows, too
    homes = [user.pw_dir for user in pwd.getpwall() if 1000 <= user.pw_uid < 60000]
    return next((home for home in homes if home.startswith("/home/")), "/home")


def root_squash(home: str) -> Iterator[Finding]:
    """Whether root may read homes: on NFS with root_squash it is nobody there, exports(5). Known to root alone."""
    if os.getuid() != 0:
        return
    try:
        os.listdir(home)
    except PermissionError:
        yield Finding(
            "warn",
            f"root cannot read {home} (root_squash?): what a step needs there is read as its user, "
            "but nothing of Slurm's own may be there",
            "keep the plugin, runtime_path and an importer out of home directories",
        )
    except FileNotFoundError:
        return
    else:
        yield Finding("ok", f"root can read {home}")
