"""Find, read and edit plugstack.conf, the list of SPANK plugins.

The file is in the directory of slurm.conf, unless PlugStackConfig names another path (spank_stack_init() of spank.c). A
machine without a slurm.conf gets both files from slurmctld. slurmd or sackd keeps them in CACHE. If neither runs, srun
fetches them each time (_establish_config_source() of read_config.c).

Up to 26.05, slurmctld does not send the files that plugstack.conf includes (slurmd_config_files and
client_config_files, in slurmctld's proc_req.c until 23.02 and in fetch_config.c since then). Slurm searches for a
relative include beside the copy, and for an absolute include on the node. Slurm ignores a missing include without a
message. So if slurmctld sends plugstack.conf, our line must be in plugstack.conf itself: configure_sent().
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enroot_py.base import making
from enroot_py.base.errors import ConfigError
from pyxis_py.request.settings import PLUGIN

DIRECTORY = "/etc/slurm"
CACHE = "/run/slurm/conf"
_MARK = "# pyxis-py install"  # marks our line in a file of the site
HINT = "on the host of slurmctld: pyxis-py install (it adds a line to plugstack.conf); then scontrol reconfigure"


@dataclass(frozen=True, slots=True)
class Line:
    """One plugin of plugstack.conf."""

    file: str
    number: int
    path: str
    arguments: tuple[str, ...]

    @property
    def origin(self) -> str:
        return f"{self.file}:{self.number}"


def directories(slurm: Mapping[str, str]) -> list[str]:
    """Return the configuration directories of srun and slurmd on this machine, the directory of slurmd last.

    Usually both directories are the same. ``slurm`` is the output of scontrol show config. The list is empty if srun
    fetches the files each time.
    """
    if conf := os.environ.get("SLURM_CONF"):
        return [os.path.dirname(conf)]
    local = os.path.dirname(slurm.get("SLURM_CONF", f"{DIRECTORY}/slurm.conf"))
    present = [directory for directory in dict.fromkeys((local, CACHE)) if os.path.exists(f"{directory}/slurm.conf")]
    return present if present or slurm else [local]


def files(slurm: Mapping[str, str]) -> list[str]:
    """Return the plugstack.conf of each configuration directory, or the one that PlugStackConfig names."""
    configured = slurm.get("PlugStackConfig")
    return [configured] if configured else [f"{directory}/plugstack.conf" for directory in directories(slurm)]


def is_copy(path: str) -> bool:
    """Return whether a configuration file is a copy that slurmctld sent."""
    return os.path.dirname(path) == CACHE


def supersedes_copy(path: str) -> bool:
    """Return whether Slurm reads a plugstack.conf here instead of the copy that slurmctld sent."""
    return not is_copy(path) and os.path.exists(f"{CACHE}/slurm.conf")


def is_sent(path: str) -> bool:
    """Return whether slurmctld sends this plugstack.conf to nodes (SlurmctldParameters=enable_configless)."""
    return not is_copy(path) and _sends(f"{os.path.dirname(path)}/slurm.conf")


def _sends(slurm_conf: str) -> bool:
    try:
        with open(slurm_conf, errors="surrogateescape") as file:
            text = re.sub(r"#.*", "", file.read()).replace("\\\n", "")
    except OSError:
        return False
    if re.search(r"^\s*SlurmctldParameters\s*=.*enable_configless", text, re.MULTILINE | re.IGNORECASE):
        return True
    included = re.findall(r"^\s*Include\s+(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return any(_sends(os.path.join(os.path.dirname(slurm_conf), path)) for path in included)


def _read(path: str) -> list[str]:
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _words(line: str) -> list[str]:
    return line.partition("#")[0].split()


def includes(path: str) -> list[str]:
    """Return the include patterns of a plugstack.conf as absolute paths."""
    lines = [_words(line) for line in _read(path)]
    return [os.path.join(os.path.dirname(path), words[1]) for words in lines if words[:1] == ["include"] and words[1:]]


def stack(path: str) -> Iterator[Line]:
    """Yield the plugins that a plugstack.conf and its includes load, in order: spank(7), CONFIGURATION."""
    try:
        lines = _read(path)
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        words = _words(line)
        if words[:1] == ["include"]:
            for pattern in words[1:]:
                for included in sorted(glob.glob(os.path.join(os.path.dirname(path), pattern))):
                    yield from stack(included)
        elif words[:1] in (["required"], ["optional"]):
            yield Line(path, number, words[1] if len(words) > 1 else "", tuple(words[2:]))


def main_file(directory: str) -> str:
    """Return the plugstack.conf that should include ``directory``: the file beside it, or the copy from slurmctld."""
    beside = os.path.dirname(os.path.abspath(directory))
    copied = not os.path.exists(f"{beside}/slurm.conf") and os.path.exists(f"{CACHE}/slurm.conf")
    return f"{CACHE if copied else beside}/plugstack.conf"


def reads(path: str, directory: str) -> bool:
    """Return whether a plugstack.conf includes the file that configure() writes into ``directory``."""
    return any(fnmatch.fnmatch(f"{os.path.abspath(directory)}/pyxis.conf", pattern) for pattern in includes(path))


def configure(directory: str, plugin: str, arguments: Sequence[str]) -> str:
    """Write pyxis.conf, which loads ``plugin``, into plugstack.conf.d; return its path.

    A pyxis.conf that loads ``plugin`` already is not changed. Raises ConfigError if there are ``arguments`` for such a
    file, or if the file loads another plugin: two plugins cannot register the same options.
    """
    path = f"{directory}/pyxis.conf"
    present = [words for line in _read(path) if (words := _words(line))]
    if any(plugin in words for words in present):
        _check_unchanged(path, arguments)
        return path
    if present:
        raise ConfigError(f"{path} loads another plugin: {' '.join(present[0])}", hint="remove the file first")
    os.makedirs(directory, exist_ok=True)
    _replace(path, [" ".join(("required", plugin, *arguments))], 0o644)
    return path


def configure_sent(path: str, plugin: str, arguments: Sequence[str]) -> None:
    """Add the line that loads ``plugin`` to a plugstack.conf itself, unless the line is there.

    Raises ConfigError if another line, or an included file, loads a pyxis plugin: slurmctld sends no included files.
    """
    for line in stack(path):
        if (line.file, line.path) == (path, plugin):
            return _check_unchanged(path, arguments)
        if os.path.basename(line.path) == PLUGIN:
            raise ConfigError(
                f"{line.origin} loads {line.path}", hint=f"remove that line first: slurmctld sends only {path} to nodes"
            )
    lines = _read(path)
    mode = os.stat(path).st_mode & 0o7777 if lines else 0o644
    _replace(path, [*lines, " ".join(("required", plugin, *arguments, _MARK))], mode)


def _check_unchanged(path: str, arguments: Sequence[str]) -> None:
    if arguments:
        raise ConfigError(f"{path} exists and is not changed", hint=f"add {' '.join(arguments)} to it yourself")


def _replace(path: str, lines: Sequence[str], mode: int) -> None:
    """Write a file atomically: Slurm may read it at any moment."""
    making.write(path, "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"), mode)


def unconfigure(directory: str, plugin: str) -> list[str]:
    """Remove the file that ``configure`` wrote, and return its path in a list.

    Call this before the plugin is removed: Slurm runs no job while a required plugin is missing. Raises ConfigError if
    another file of the directory loads ``plugin``, or if pyxis.conf has further lines.
    """
    removed = []
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        path = f"{directory}/{name}"
        with open(path, errors="surrogateescape") as file:
            present = [words for line in file if (words := _words(line))]
        if not any(_is_same(word, plugin) for words in present for word in words):
            continue
        if len(present) > 1 or name != "pyxis.conf":
            raise ConfigError(f"{path} loads {plugin}", hint="pyxis-py did not write that line: remove it first")
        os.unlink(path)
        removed.append(path)
    return removed


def unconfigure_sent(path: str, plugin: str) -> list[str]:
    """Remove the line that ``configure_sent`` wrote, and return descriptions of removed lines."""
    lines = _read(path)
    other_lines = [line for line in lines if not _is_ours(line, plugin)]
    if other_lines == lines:
        return []
    _replace(path, other_lines, os.stat(path).st_mode & 0o7777)
    return [f"the line in {path}"]


def _is_ours(line: str, plugin: str) -> bool:
    return line.endswith(_MARK) and any(_is_same(word, plugin) for word in _words(line))


def _is_same(path: str, plugin: str) -> bool:
    """Return whether a path leads to ``plugin``, directly or through a link to its version."""
    names = os.path.basename(path), os.path.realpath(path)
    return path == plugin or names == (os.path.basename(plugin), os.path.realpath(plugin))


def check_place(directory: str) -> None:
    """Raise ConfigError if ``directory`` looks like a typo: Slurm would never read it."""
    beside = os.path.dirname(os.path.abspath(directory))
    if not any(map(os.path.exists, (directory, f"{beside}/slurm.conf", f"{beside}/plugstack.conf"))):
        raise ConfigError(
            f"there is no {directory}, and no slurm.conf beside it",
            hint=f"set --plugstack-dir to the directory that plugstack.conf includes, or create it: mkdir {directory}",
        )


def check_unused(plugin: str, directory: str) -> None:
    """Raise ConfigError if a line that uninstall does not remove still loads ``plugin``."""
    directory = os.path.abspath(directory)
    places = [f"{place}/plugstack.conf" for place in dict.fromkeys((os.path.dirname(directory), DIRECTORY, CACHE))]
    for path in places + sorted(glob.glob(f"{DIRECTORY}/plugstack.conf.d/*")):
        for line in stack(path):
            if not _is_same(line.path, plugin) or os.path.dirname(line.file) == directory:
                continue
            if is_copy(line.file):
                hint = "first, on the host of slurmctld: pyxis-py uninstall; then scontrol reconfigure"
            elif line.file == places[0] and _is_ours(_read(line.file)[line.number - 1], plugin):
                continue
            else:
                hint = f"first: pyxis-py uninstall --plugstack-dir {os.path.dirname(line.origin)}"
            raise ConfigError(f"{line.origin} loads {plugin}", hint=hint)
