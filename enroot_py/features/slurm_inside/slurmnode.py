"""What a node has of Slurm: client programs, loader and libraries, plugins, configuration, the socket that vouches.

Libraries come as whole directories: plugins are loaded by name, and load others. Programs of another C library than the
image's run by the loader that they name themselves, ld.so(8), which takes --library-path.
Source: slurm.conf(5), sack_api.c and read_config.c of Slurm. Off the start path.
"""

from __future__ import annotations

import _socket
import errno
import glob
import os
import stat
import sys
from collections.abc import Iterator, Mapping

from enroot_py import LIBRARY
from enroot_py.base import versions
from enroot_py.base.elf import interpreter
from enroot_py.base.errors import ConfigError
from enroot_py.features.slurm_inside.slurmconf import Plugin, SlurmConf

PROGRAMS = (
    "srun sbatch salloc squeue sinfo scancel scontrol sacct sacctmgr sattach sbcast sstat sprio sshare sreport sdiag "
    "scrontab strigger"
).split()
_PREFIXES = ("/usr", "/usr/local", "/opt/slurm", "/usr/local/slurm")
_CONF = ("/etc/slurm", "/run/slurm/conf", "/etc/slurm-llnl")
_MUNGE = "/run/munge/munge.socket.2"
_SACK = ("/run/slurm-{}/sack.socket", "/run/slurm/sack.socket", "/run/slurmctld/sack.socket")
_AUTHORITIES = (  # of Debian, Red Hat and SUSE
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)
_PLUGIN = "spank_pyxis.so"


class SlurmNode:
    """Slurm's clients on this node, where ``host`` is the environment of the caller. Raises ConfigError."""

    def __init__(self, host: Mapping[str, str]) -> None:
        self._host = host
        self.programs = self._find_programs()
        self._prefix = os.path.dirname(os.path.dirname(os.path.realpath(next(iter(self.programs.values())))))
        self.loader = interpreter(next(iter(self.programs.values())))
        self.conf = SlurmConf(self._find_conf())
        self.libraries = self._find_libraries()
        self.plugins = self._find_plugins()
        self.socket = self._find_socket()
        #: Where the Python of our plugin is, if plugstack.conf loads that.
        self.library = next(map(_library, filter(_is_ours, self.conf.plugstack)), "")

    @property
    def uses_munge(self) -> bool:
        return self._auth == "auth/munge"

    @property
    def _auth(self) -> str:
        return self.conf.value("AuthType") or "auth/munge"

    @property
    def python(self) -> tuple[str, list[str]]:
        """This interpreter, and the directories of its library, as paths beneath sys.base_prefix."""
        prefix = sys.base_prefix
        paths = sorted({os.path.dirname(os.__file__), *(p for p in sys.path if p.startswith(f"{prefix}/lib"))})
        tops = [p for p in paths if os.path.isdir(p) and not any(p.startswith(f"{other}/") for other in paths)]
        executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
        return executable, [os.path.relpath(path, prefix) for path in tops]

    @property
    def authorities(self) -> str:
        """The certificates that this node trusts, for registries; "" where they are elsewhere."""
        return next(filter(os.path.exists, _AUTHORITIES), "")

    def _find_programs(self) -> dict[str, str]:
        """A script around one of them, as some sites have it, is passed by."""
        search = [*self._host.get("PATH", "").split(":"), *(f"{prefix}/bin" for prefix in _PREFIXES)]
        search = [directory for directory in dict.fromkeys(search) if directory.startswith("/")]
        found = {}
        for name in PROGRAMS:
            for directory in search:
                if os.access(f"{directory}/{name}", os.X_OK) and interpreter(f"{directory}/{name}"):
                    found[name] = f"{directory}/{name}"
                    break
        if not found:
            raise ConfigError(
                f"{_node()} has no client programs of Slurm, as srun and squeue, in {', '.join(search)}",
                hint="install them there (Debian: slurm-client), or add their directory to PATH",
            )
        return found

    def _find_conf(self) -> str:
        """The file that SLURM_CONF names, which slurmd sets for each step, or one where Slurm looks."""
        if given := self._host.get("SLURM_CONF"):
            return given
        places = [*_CONF, f"{self._prefix}/etc", f"{self._prefix}/etc/slurm"]
        for place in places:
            if os.path.exists(f"{place}/slurm.conf"):
                return f"{place}/slurm.conf"
        raise ConfigError(
            f"{_node()} has no slurm.conf in {', '.join(dict.fromkeys(places))}",
            hint="set SLURM_CONF=FILE; on a configless login node, run sackd(8)",
        )

    def _find_libraries(self) -> list[str]:
        """Where the loader looks, in its order: ld.so.conf, and its own directories."""
        named = _directories("/etc/ld.so.conf", 0)
        beside = [f"{self._prefix}/{name}" for name in ("lib64", "lib")]
        places = dict.fromkeys(map(os.path.realpath, (*named, "/lib64", "/usr/lib64", "/lib", "/usr/lib", *beside)))
        return [place for place in places if os.path.isdir(place)]

    def _find_plugins(self) -> list[str]:
        if said := self.conf.value("PluginDir"):
            if there := [place for place in said.split(":") if os.path.isdir(place)]:
                return there
            raise ConfigError(
                f"{_node()} has no directory {said}, in which Slurm has its plugins",
                hint=f"PluginDir= in {self.conf.directory}/slurm.conf names it",
            )
        for place in self.libraries:
            for name in ("slurm", "slurm-wlm"):
                if glob.glob(f"{place}/{name}/auth_*.so"):
                    return [f"{place}/{name}"]
        raise ConfigError(
            f"{_node()}: no plugins of Slurm beneath {', '.join(self.libraries)}",
            hint=f"let PluginDir= in {self.conf.directory}/slurm.conf name their directory",
        )

    def _find_socket(self) -> str:
        """By which programs prove who their user is."""
        if self.uses_munge:
            said = [word for word in self.conf.value("AuthInfo").split(",") if word.startswith("socket=")]
            places = [said[-1].removeprefix("socket=") if said else _MUNGE]
        elif self._auth == "auth/slurm":
            given = self._host.get("SLURM_SACK_SOCKET")
            places = [given] if given else [place.format(self.conf.value("ClusterName")) for place in _SACK]
        else:
            return ""
        daemon = "munged" if self.uses_munge else "slurmd or sackd"
        by = f"by which {self._auth} authenticates users"
        for place in places:
            if _is_socket(place):
                if why := _silence(place):
                    raise ConfigError(f"{_node()}: the socket {place}, {by}: {why}", hint=f"does {daemon} run there?")
                return place
        raise ConfigError(f"{_node()} has no socket {' or '.join(places)}, {by}", hint=f"does {daemon} run there?")


def _directories(path: str, depth: int) -> Iterator[str]:
    """The directories that an ld.so.conf(5) lists."""
    try:
        with open(path, errors="surrogateescape") as f:
            lines = f.read().splitlines()
    except OSError:
        return
    for line in lines:
        words = line.partition("#")[0].replace(",", " ").replace(":", " ").split()
        if words[:1] == ["include"] and depth < 10:
            for pattern in words[1:]:
                for inner in sorted(glob.glob(os.path.join(os.path.dirname(path), pattern))):
                    yield from _directories(inner, depth + 1)
        elif words[:1] != ["hwcap"]:
            yield from (word for word in words if word.startswith("/"))


def _is_ours(plugin: Plugin) -> bool:
    return os.path.basename(plugin.path) == _PLUGIN


def own(path: str) -> str:
    """A file of the installation that this is, as our version has it: its link may lead to another one by now."""
    beside, name = os.path.split(path)
    return f"{LIBRARY}/{name}" if beside == versions.link() and os.path.exists(f"{LIBRARY}/{name}") else path


def _library(plugin: Plugin) -> str:
    """Where the packages are that belong to our plugin: beside it, or those that run now."""
    beside = os.path.dirname(own(plugin.path))
    return beside if os.path.exists(f"{beside}/pyxis_py/__init__.py") else LIBRARY


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _silence(path: str) -> str:
    """Why nobody can be asked by a socket, as where a daemon has left it behind: programs of Slurm try for minutes."""
    # By a datagram, which is not for these daemons: they notice nothing, and the kernel says whether somebody is there.
    client = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        client.connect(path)
    except OSError as e:
        return "" if e.errno == errno.EPROTOTYPE else str(e.strerror)
    finally:
        client.close()
    return ""


def _node() -> str:
    return os.uname().nodename
