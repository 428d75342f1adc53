"""Find a node's Slurm: client programs, loader, libraries, plugins, configuration and authentication socket.

penroot binds whole library directories, because Slurm loads plugins by name, and plugins load other libraries.
Programs run with the node's loader, ld.so(8), and its option --library-path: the image may have another C library.
Sources: slurm.conf(5), sack_api.c and read_config.c of Slurm.
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
_AUTHORITIES = (  # on Debian, Red Hat and SUSE
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)
_PLUGIN = "spank_pyxis.so"


class SlurmNode:
    """Slurm's clients on this node. ``host`` is the caller's environment. Raises ConfigError."""

    def __init__(self, host: Mapping[str, str]) -> None:
        self._host = host
        self.programs = self._find_programs()
        self._prefix = os.path.dirname(os.path.dirname(os.path.realpath(next(iter(self.programs.values())))))
        self.loader = interpreter(next(iter(self.programs.values())))
        self.conf = SlurmConf(self._find_conf())
        self.libraries = self._find_libraries()
        self.plugins = self._find_plugins()
        self.socket = self._find_socket()
        #: Directory of our SPANK plugin's Python packages, if plugstack.conf loads the plugin, else "".
        self.library = next(map(_library, filter(_is_ours, self.conf.plugstack)), "")

    @property
    def uses_munge(self) -> bool:
        return self._auth == "auth/munge"

    @property
    def _auth(self) -> str:
        return self.conf.value("AuthType") or "auth/munge"

    @property
    def python(self) -> tuple[str, list[str]]:
        """This interpreter, and its library directories relative to sys.base_prefix."""
        prefix = sys.base_prefix
        paths = sorted({os.path.dirname(os.__file__), *(p for p in sys.path if p.startswith(f"{prefix}/lib"))})
        tops = [p for p in paths if os.path.isdir(p) and not any(p.startswith(f"{other}/") for other in paths)]
        executable = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
        return executable, [os.path.relpath(path, prefix) for path in tops]

    @property
    def authorities(self) -> str:
        """The node's file of trusted certificates, for registries, or ""."""
        return next(filter(os.path.exists, _AUTHORITIES), "")

    def _find_programs(self) -> dict[str, str]:
        """Find the client programs. Skip scripts, which some sites install as wrappers."""
        search = [*self._host.get("PATH", "").split(":"), *(f"{prefix}/bin" for prefix in _PREFIXES)]
        search = [directory for directory in dict.fromkeys(search) if directory.startswith("/")]
        programs = {}
        for name in PROGRAMS:
            for directory in search:
                if os.access(f"{directory}/{name}", os.X_OK) and interpreter(f"{directory}/{name}"):
                    programs[name] = f"{directory}/{name}"
                    break
        if not programs:
            raise ConfigError(
                f"{_node()} has no Slurm commands, such as srun and squeue, in {', '.join(search)}",
                hint="install them there (Debian: slurm-client), or add their directory to PATH",
            )
        return programs

    def _find_conf(self) -> str:
        """Return SLURM_CONF, which slurmd sets for each step, or slurm.conf in one of Slurm's default directories."""
        if path := self._host.get("SLURM_CONF"):
            return path
        candidates = [*_CONF, f"{self._prefix}/etc", f"{self._prefix}/etc/slurm"]
        for directory in candidates:
            if os.path.exists(f"{directory}/slurm.conf"):
                return f"{directory}/slurm.conf"
        raise ConfigError(
            f"{_node()} has no slurm.conf in {', '.join(dict.fromkeys(candidates))}",
            hint="set SLURM_CONF=FILE; on a configless node, run sackd(8), which stores the file",
        )

    def _find_libraries(self) -> list[str]:
        """Return library directories in search order: of ld.so.conf, then of the loader, then of Slurm's prefix."""
        configured = _directories("/etc/ld.so.conf", 0)
        in_prefix = [f"{self._prefix}/{name}" for name in ("lib64", "lib")]
        usual = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
        candidates = dict.fromkeys(map(os.path.realpath, (*configured, *usual, *in_prefix)))
        return [directory for directory in candidates if os.path.isdir(directory)]

    def _find_plugins(self) -> list[str]:
        if plugin_dir := self.conf.value("PluginDir"):
            if directories := [directory for directory in plugin_dir.split(":") if os.path.isdir(directory)]:
                return directories
            raise ConfigError(
                f"{_node()} has no Slurm plugin directory {plugin_dir}",
                hint=f"correct PluginDir= in {self.conf.directory}/slurm.conf",
            )
        for directory in self.libraries:
            for name in ("slurm", "slurm-wlm"):
                if glob.glob(f"{directory}/{name}/auth_*.so"):
                    return [f"{directory}/{name}"]
        raise ConfigError(
            f"{_node()}: no Slurm plugins beneath {', '.join(self.libraries)}",
            hint=f"set PluginDir= in {self.conf.directory}/slurm.conf to their directory",
        )

    def _find_socket(self) -> str:
        """Return the socket of the authentication daemon; "" for an unknown AuthType."""
        if self.uses_munge:
            sockets = [word for word in self.conf.value("AuthInfo").split(",") if word.startswith("socket=")]
            paths = [sockets[-1].removeprefix("socket=") if sockets else _MUNGE]
        elif self._auth == "auth/slurm":
            socket = self._host.get("SLURM_SACK_SOCKET")
            paths = [socket] if socket else [path.format(self.conf.value("ClusterName")) for path in _SACK]
        else:
            return ""
        daemon = "munged" if self.uses_munge else "slurmd or sackd"
        hint = f"check that {daemon} runs there"
        for path in paths:
            if _is_socket(path):
                if reason := _connect_error(path):
                    message = f"{_node()}: cannot connect to the socket {path} of {self._auth}: {reason}"
                    raise ConfigError(message, hint=hint)
                return path
        raise ConfigError(f"{_node()} has no socket {' or '.join(paths)} for {self._auth}", hint=hint)


def _directories(path: str, depth: int) -> Iterator[str]:
    """Yield the directories in an ld.so.conf and its included files."""
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


def in_this_version(path: str) -> str:
    """Return ``path``, but replace the link to the current version by the directory of the running version.

    After an upgrade, the link points to another version than the running version (see base/versions.py).
    """
    directory, name = os.path.split(path)
    return f"{LIBRARY}/{name}" if directory == versions.link() and os.path.exists(f"{LIBRARY}/{name}") else path


def _library(plugin: Plugin) -> str:
    """Return the directory of the plugin's Python packages: the plugin's own directory, else this installation's."""
    directory = os.path.dirname(in_this_version(plugin.path))
    return directory if os.path.exists(f"{directory}/pyxis_py/__init__.py") else LIBRARY


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _connect_error(path: str) -> str:
    """Return why no process listens on a socket, or "". Without this check, Slurm's programs retry for minutes."""
    # Connect a datagram socket, which the daemon does not notice. If a process listens on the stream socket,
    # connect(2) fails with EPROTOTYPE.
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
