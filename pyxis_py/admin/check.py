"""``pyxis-py check``: check whether this node can run container steps, and print a fix for each problem.

The check changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Iterator, Mapping

import yaml

from enroot_py.base.errors import PenrootError
from enroot_py.base.features import plugged
from enroot_py.base.run import Program, find
from enroot_py.cli import doctor, places
from enroot_py.cli.findings import Finding
from enroot_py.config import settings as enroot_settings
from enroot_py.runtime import pods
from pyxis_py.admin import plugstack, prebuilt
from pyxis_py.admin.plugstack import Line
from pyxis_py.request import settings
from pyxis_py.request.settings import PLUGIN

# Plugins that give each job a private /tmp. If one is loaded after ours, containers mount the /tmp of the node.
_PRIVATE_TMP = ("auto_tmpdir", "private-tmpdir", "private_tmpdir", "spank-private-tmp", "spank_private_tmp", "tmpdir")
_TIMEOUT_S = 10  # a Slurm program without a slurm.conf or a slurmctld retries for a minute
_PRIVATE_DIRECTORIES = ("/tmp", "/dev/shm")  # by default: job_container.conf(5), namespace.yaml(5)
_DIRS = re.compile(r"^\s*Dirs\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)


def findings(plugstack_conf: str | None) -> Iterator[Finding]:
    """Yield all findings, in the order in which a step needs the checked parts.

    ``plugstack_conf`` is the file to check, or None for the files that Slurm reads.
    """
    slurm = slurm_configuration()
    if not slurm:
        yield Finding(
            "warn",
            "scontrol cannot show the configuration of Slurm: proctrack and private directories are not checked",
            "check that slurmctld runs and knows this node: scontrol show config",
        )
    stacks = _stacks(plugstack_conf, slurm)
    for path, lines in stacks.items():
        yield from _loaded(path, lines)
    if not stacks:
        yield _fetched()
    yield from doctor.machine()
    yield from _slurm(slurm, _plugin(stacks))
    loaded = enroot_settings.load(in_job=False)
    yield places.data_path(loaded.data_path)
    yield from places.cache_path(loaded)
    yield from places.inodes(dict.fromkeys((loaded.data_path, loaded.cache_path)))
    yield from doctor.of_features(loaded)
    for feature in plugged("reach"):
        yield from feature.libraries(_plugin(stacks))
    yield from root_squash(users_home())


def findings_of_nodes(plugstack_conf: str | None, nodes: str) -> Iterator[Finding]:
    """Check the connections between these nodes and this host. Raises PenrootError."""
    slurm = slurm_configuration()
    for feature in plugged("reach"):
        yield from feature.findings(nodes, _plugin(_stacks(plugstack_conf, slurm)), slurm)


def _stacks(plugstack_conf: str | None, slurm: Mapping[str, str]) -> dict[str, list[Line]]:
    paths = [plugstack_conf] if plugstack_conf else plugstack.files(slurm)
    return {path: list(plugstack.stack(path)) for path in paths}


def _plugin(stacks: Mapping[str, list[Line]]) -> settings.PluginSettings:
    """Return the settings from the last valid plugstack.conf line that loads the plugin."""
    our_lines = [line for lines in stacks.values() for line in lines if _is_ours(line) and not _bad_arguments(line)]
    return settings.load(our_lines[-1].arguments if our_lines else ())


def slurm_configuration() -> dict[str, str]:
    """Return the output of scontrol(1) show config, or an empty dict if scontrol fails or is missing."""
    try:
        text = Program([find("scontrol", package="slurm-client"), "show", "config"], timeout=_TIMEOUT_S).run()
    except PenrootError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs if value.strip() != "(null)"}


def _is_ours(line: Line) -> bool:
    return os.path.basename(line.path) == PLUGIN


def _bad_arguments(line: Line) -> PenrootError | None:
    try:
        settings.load(line.arguments)
    except PenrootError as e:
        return e
    return None


def _loaded(path: str, lines: list[Line]) -> Iterator[Finding]:
    """Check the line of a plugstack.conf that loads the plugin, and its position."""
    our_lines = [line for line in lines if _is_ours(line)]
    if not our_lines:
        yield _not_loaded(path)
        return
    if len(our_lines) > 1:
        origins = ", ".join(line.origin for line in our_lines)
        yield Finding("bad", f"{PLUGIN} is loaded more than once: {origins}", "keep only one of the lines")
    line = our_lines[0]
    if error := _bad_arguments(line):
        yield Finding("bad", f"{line.origin}: {error}", error.hint)
    yield _built(line)
    if plugstack.is_sent(path) and line.file != path:
        yield Finding(
            "warn",
            f"slurmctld sends {path} to nodes, but not the included {line.file}: "
            "on nodes without the included file, steps run on the host",
            f"write the line into {path} itself: remove {line.file}, then pyxis-py install",
        )
    for other in lines[lines.index(line) + 1 :]:
        if any(name in os.path.basename(other.path) for name in _PRIVATE_TMP):
            yield Finding(
                "warn",
                f"{other.origin}: {other.path} comes after {PLUGIN}: containers have the node's /tmp, not the job's",
                f"move it above {line.origin}",
            )


def _not_loaded(path: str) -> Finding:
    exists = os.path.isfile(path)
    if not exists and plugstack.supersedes_copy(path):
        message = f"there is no file {path}, which Slurm reads instead of slurmctld's copy: steps run on the host"
        return Finding("bad", message, "remove PlugStackConfig from slurm.conf, or create the file")
    if not plugstack.is_copy(path):
        message = f"{path} does not load {PLUGIN}" if exists else f"there is no file {path}"
        return Finding("bad", message, "pyxis-py install; plugstack.conf needs the line: include plugstack.conf.d/*")
    message = f"{path} does not load {PLUGIN}" if exists else "slurmctld has no plugstack.conf to send"
    if included := plugstack.includes(path):
        message += f": slurmctld does not send included files, and there is no {', '.join(included)} here"
    return Finding("bad", f"{message}; steps run on the host", plugstack.HINT)


def _fetched() -> Finding:
    """Check whether srun loads the plugin, on a machine where srun fetches its configuration from slurmctld."""
    if "--container-image" in Program([find("srun", package="slurm-client"), "--help"], timeout=_TIMEOUT_S).run():
        return Finding("ok", f"srun loads {PLUGIN}: slurmctld sends it a plugstack.conf")
    message = f"srun does not load {PLUGIN}, and this machine has no plugstack.conf"
    return Finding("bad", message, plugstack.HINT)


def _built(line: Line) -> Finding:
    """Check that the plugin file exists and matches the Slurm release of this machine."""
    try:
        number = prebuilt.built_for(line.path)
    except OSError as e:
        return Finding("bad", f"{line.origin}: {line.path}: {e.strerror}", "pyxis-py install, on this node too")
    try:
        version = prebuilt.installed()
    except PenrootError as e:
        return Finding("bad", f"cannot determine the version of Slurm: {e}", "check slurm.conf: " + e.hint)
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not release:
        return Finding("bad", "Slurm is not installed on this machine", "install Slurm, or add its programs to PATH")
    if number is None:
        return Finding("bad", f"{line.path} is not a penroot plugin, or too old", "pyxis-py install")
    if (number >> 16, number >> 8 & 0xFF) != release:
        built = f"{number >> 16}.{number >> 8 & 0xFF:02}"
        return Finding("bad", f"{line.path} is for Slurm {built}, this is {version}", "pyxis-py install")
    return Finding("ok", f"{line.origin} loads {line.path}, for Slurm {version}")


def _slurm(slurm: Mapping[str, str], plugin: settings.PluginSettings) -> Iterator[Finding]:
    tracking = slurm.get("ProctrackType")
    if tracking == "proctrack/cgroup":
        yield Finding("ok", f"ProctrackType={tracking}")
    elif tracking:
        verdict, fix = "bad", "set ProctrackType=proctrack/cgroup in slurm.conf"
        if pods.cgroups_are_read_only():  # proctrack/cgroup cannot start in such a pod
            verdict = "warn"
            fix = "make control groups writable in this pod (privileged: true), then set proctrack/cgroup"
        message = f"ProctrackType={tracking} does not track the helper of a step: its mounts may outlive the job"
        yield Finding(verdict, message, fix)
    kind = slurm.get("NamespaceType") or slurm.get("JobContainerType", "")  # renamed in 25.11
    if not kind.endswith(("tmpfs", "linux")):
        return
    private = _private_directories(kind, (plugstack.directories(slurm) or [plugstack.DIRECTORY])[-1])
    inside = [path for path in private if (plugin.runtime_path + "/").startswith(path.rstrip("/") + "/")]
    if inside:
        message = f"runtime_path={plugin.runtime_path} is in {inside[0]}, which {kind} makes private to each job"
        yield Finding("bad", message, f"set runtime_path={settings.SETTINGS['runtime_path'].default} in plugstack.conf")
    else:
        yield Finding("ok", f"runtime_path={plugin.runtime_path} is outside of the directories of {kind}")


def _private_directories(kind: str, directory: str) -> list[str]:
    """Return the directories that a Slurm plugin makes private to each job, on any node."""
    with contextlib.suppress(OSError, yaml.YAMLError):
        if kind.endswith("linux"):
            with open(f"{directory}/namespace.yaml", "rb") as file:
                document = yaml.safe_load(file)
            dirs = [*_all_of("dirs", document), *_all_of("path", document)]  # dir_confs of Slurm 26.11 has the key path
        else:
            with open(f"{directory}/job_container.conf", errors="surrogateescape") as conf:
                dirs = _DIRS.findall(conf.read())
        if dirs:
            return ",".join(dirs).split(",")
    return list(_PRIVATE_DIRECTORIES)


def _all_of(name: str, node: object) -> Iterator[str]:
    """Yield the values of a key at any depth."""
    if isinstance(node, dict):
        yield from (str(node[name]),) if name in node else ()
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _all_of(name, inner)


def users_home() -> str:
    """Return the home of the caller, or for root the home of any user as a sample."""
    if os.getuid() != 0:
        return os.path.expanduser("~")  # works for users without a passwd entry, too
    homes = [user.pw_dir for user in pwd.getpwall() if 1000 <= user.pw_uid < 60000]
    return next((home for home in homes if home.startswith("/home/")), "/home")


def root_squash(home: str) -> Iterator[Finding]:
    """Check as root whether root can read homes: NFS with root_squash maps root to nobody, exports(5)."""
    if os.getuid() != 0:
        return
    try:
        os.listdir(home)
    except PermissionError:
        yield Finding(
            "warn",
            f"root cannot read {home} (root_squash?): steps read it as the user, but slurmd, as root, cannot read it",
            "keep the plugin, runtime_path and an importer out of home directories",
        )
    except FileNotFoundError:
        return
    else:
        yield Finding("ok", f"root can read {home}")
