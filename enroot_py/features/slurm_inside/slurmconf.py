"""Read a node's slurm.conf and plugstack.conf, and write them for Slurm's client programs in a container.

slurm.conf(5): keys are case-insensitive, may have spaces around "=", and may share a line. A backslash continues the
line. "Include" reads another file; %c in its name is the cluster name. spank(8): an include in plugstack.conf names a
file pattern.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping

from enroot_py.base import trusted
from enroot_py.base.errors import ConfigError
from enroot_py.base.frozen import Frozen

_MAX_INCLUDE_DEPTH = 10
_MAX_BYTES = 16 << 20  # of all files together: a large cluster has many node lines
_HINT = "check that this is Slurm's configuration; otherwise set SLURM_CONF to the right file"
_CONTINUED = re.compile(r"\\\r?\n")
_PAIR = r"(?:(?<=\s)|^)({})\s*=\s*(\"[^\"]*\"|[^\s#]*)"
_INCLUDE = re.compile(r"\s*include\s+(\S.*?)\s*", re.IGNORECASE)


class Plugin(Frozen):
    """A line of plugstack.conf: ``need`` is required or optional, ``words`` are the plugin's arguments."""

    need: str
    path: str
    words: tuple[str, ...]


class SlurmConf:
    """A slurm.conf and its plugstack.conf, with all included files. ``is_open``: all these files are world-readable."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self.directory = os.path.dirname(path)
        self.is_open = True
        self._size = 0
        self._lines = list(self._read(path, path, 0))
        stack_path = self.value("PlugStackConfig")
        self.plugstack = list(
            self._read_plugstack(stack_path or f"{self.directory}/plugstack.conf", path, stack_path != "", 0)
        )

    def value(self, key: str) -> str:
        """Return the last value of a key, or ""."""
        pair = _pairs(key)
        values = [match[2].strip('"') for line in self._lines for match in pair.finditer(_without_comment(line))]
        return values[-1] if values else ""

    def changed(self, values: Mapping[str, str]) -> str:
        """Return the text of slurm.conf and its included files, with the keys in ``values`` set to these values."""
        pair = _pairs("|".join(values))
        kept = (pair.sub("", _without_comment(line)).rstrip() for line in self._lines)
        return "".join(f"{line}\n" for line in (*kept, *(f"{key}={value}" for key, value in values.items())) if line)

    def _text(self, path: str, origin: str) -> str:
        if "\0" in path:
            raise ConfigError(f"{origin}: invalid file name: {path!r}", hint=_HINT)
        try:
            fd = trusted.regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), path)
            with open(fd, encoding="utf-8", errors="surrogateescape") as f:
                self.is_open = self.is_open and bool(os.fstat(f.fileno()).st_mode & 0o004)
                text = f.read(_MAX_BYTES + 1)
        except OSError as e:
            source = f" (named in {origin})" if origin != path else ""
            if e.strerror == trusted.IRREGULAR:
                raise ConfigError(f"{path}{source} {e.strerror}", hint=_HINT) from e
            hint = "check its permissions on this node: Slurm's commands must be able to read it too"
            raise ConfigError(f"cannot read {path}{source}: {e.strerror}", hint=hint) from e
        self._size += len(text)
        if self._size > _MAX_BYTES:
            raise ConfigError(f"{path}: Slurm's configuration is larger than {_MAX_BYTES >> 20} MiB", hint=_HINT)
        return text

    def _read(self, path: str, origin: str, depth: int) -> Iterator[str]:
        """Yield the lines of a file and of the files that it includes."""
        if depth > _MAX_INCLUDE_DEPTH:
            raise ConfigError(f"{origin}: more than {_MAX_INCLUDE_DEPTH} nested includes", hint=_HINT)
        cluster = ""
        for line in _CONTINUED.sub("", self._text(path, origin)).splitlines():
            for match in _pairs("ClusterName").finditer(_without_comment(line)):
                cluster = match[2].strip('"')
            if included := _INCLUDE.fullmatch(_without_comment(line)):
                name = included[1].replace("%c", cluster)
                yield from self._read(os.path.join(self.directory, name), path, depth + 1)
            else:
                yield line

    def _read_plugstack(self, path: str, origin: str, must_exist: bool, depth: int) -> Iterator[Plugin]:
        if depth > _MAX_INCLUDE_DEPTH:
            raise ConfigError(f"{origin}: more than {_MAX_INCLUDE_DEPTH} nested includes", hint=_HINT)
        if not must_exist and not os.path.exists(path):
            return
        for line in self._text(path, origin).splitlines():
            words = line.partition("#")[0].split()
            if words[:1] == ["include"] and words[1:]:
                for inner in sorted(glob.glob(os.path.join(os.path.dirname(path), words[1]))):
                    yield from self._read_plugstack(inner, path, True, depth + 1)
            elif words[1:] and words[0] in ("required", "optional"):
                yield Plugin(need=words[0], path=words[1], words=tuple(words[2:]))


def _pairs(keys: str) -> re.Pattern[str]:
    return re.compile(_PAIR.format(keys), re.IGNORECASE)


def _without_comment(line: str) -> str:
    """Return a line without its comment."""
    return re.split(r"(?<!\\)#", line, maxsplit=1)[0]


def stack_text(plugins: Mapping[Plugin, str]) -> str:
    """Return the text of a plugstack.conf that loads each plugin from its path in ``plugins``."""
    return "".join(f"{' '.join((p.need, path, *p.words))}\n" for p, path in plugins.items())
