"""slurm.conf and plugstack.conf of a node, and what they are to say to Slurm's client programs in a container.

slurm.conf(5): a key may be written in any case, with spaces around "=", and several on a line; a backslash goes on
with the next line, "Include" with another file, in whose name %c is the cluster's. spank(8): plugstack.conf includes
patterns of files. Off the start path.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping

from enroot_py.base import trusted
from enroot_py.base.errors import ConfigError
from enroot_py.base.frozen import Frozen

_DEEPEST = 10  # files that include each other
_LARGEST = 16 << 20  # bytes, with all that is included: nodes of a large cluster take some
_WHICH = "set SLURM_CONF to Slurm's configuration file"
_CONTINUED = re.compile(r"\\\r?\n")
_PAIR = r"(?:(?<=\s)|^)({})\s*=\s*(\"[^\"]*\"|[^\s#]*)"
_INCLUDE = re.compile(r"\s*include\s+(\S.*?)\s*", re.IGNORECASE)


class Plugin(Frozen):
    """A line of plugstack.conf: ``need`` is required or optional, ``words`` are the plugin's arguments."""

    need: str
    path: str
    words: tuple[str, ...]


class SlurmConf:
    """A slurm.conf with all that it includes. ``is_open`` says whether everybody may read all of it."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self.directory = os.path.dirname(path)
        self.is_open = True
        self._size = 0
        self._lines = list(self._read(path, path, 0))
        named = self.value("PlugStackConfig")
        self.plugstack = list(self._stack(named or f"{self.directory}/plugstack.conf", path, named != "", 0))

    def value(self, key: str) -> str:
        """What is said of a key, of several the last; "" where nothing is."""
        pair = _pairs(key)
        said = [match[2].strip('"') for line in self._lines for match in pair.finditer(_bare(line))]
        return said[-1] if said else ""

    def changed(self, values: Mapping[str, str]) -> str:
        """The text of the file, with other values of some keys."""
        pair = _pairs("|".join(values))
        kept = (pair.sub("", _bare(line)).rstrip() for line in self._lines)
        return "".join(f"{line}\n" for line in (*kept, *(f"{key}={value}" for key, value in values.items())) if line)

    def _text(self, path: str, origin: str) -> str:
        if "\0" in path:
            raise ConfigError(f"{origin} has an impossible file name: {path}", hint=_WHICH)
        try:
            fd = trusted.regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), path)
            with open(fd, encoding="utf-8", errors="surrogateescape") as f:
                self.is_open = self.is_open and bool(os.fstat(f.fileno()).st_mode & 0o004)
                text = f.read(_LARGEST + 1)
        except OSError as e:
            by = f", which {origin} names" if origin != path else ""
            if e.strerror == trusted.IRREGULAR:
                raise ConfigError(f"{path}{by}{',' * bool(by)} {e.strerror}", hint=_WHICH) from e
            hint = "make it readable on this node: Slurm's own programs need it too"
            raise ConfigError(f"cannot read {path}{by}: {e.strerror}", hint=hint) from e
        self._size += len(text)
        if self._size > _LARGEST:
            raise ConfigError(f"{path}: the configuration of Slurm has more than {_LARGEST >> 20} MiB", hint=_WHICH)
        return text

    def _read(self, path: str, origin: str, depth: int) -> Iterator[str]:
        """The lines of a file, and where it includes another, those of that."""
        if depth > _DEEPEST:
            raise ConfigError(f"{origin}: more than {_DEEPEST} files include each other", hint=_WHICH)
        cluster = ""
        for line in _CONTINUED.sub("", self._text(path, origin)).splitlines():
            for match in _pairs("ClusterName").finditer(_bare(line)):
                cluster = match[2].strip('"')
            if included := _INCLUDE.fullmatch(_bare(line)):
                name = included[1].replace("%c", cluster)
                yield from self._read(os.path.join(self.directory, name), path, depth + 1)
            else:
                yield line

    def _stack(self, path: str, origin: str, named: bool, depth: int) -> Iterator[Plugin]:
        if depth > _DEEPEST:
            raise ConfigError(f"{origin}: more than {_DEEPEST} files include each other", hint=_WHICH)
        if not named and not os.path.exists(path):
            return
        for line in self._text(path, origin).splitlines():
            words = line.partition("#")[0].split()
            if words[:1] == ["include"] and words[1:]:
                for inner in sorted(glob.glob(os.path.join(os.path.dirname(path), words[1]))):
                    yield from self._stack(inner, path, True, depth + 1)
            elif words[1:] and words[0] in ("required", "optional"):
                yield Plugin(need=words[0], path=words[1], words=tuple(words[2:]))


def _pairs(keys: str) -> re.Pattern[str]:
    return re.compile(_PAIR.format(keys), re.IGNORECASE)


def _bare(line: str) -> str:
    """A line without its comment."""
    return re.split(r"(?<!\\)#", line, maxsplit=1)[0]


def stack_text(plugins: Mapping[Plugin, str]) -> str:
    """A plugstack.conf that loads plugins from other places."""
    return "".join(f"{' '.join((p.need, path, *p.words))}\n" for p, path in plugins.items())
