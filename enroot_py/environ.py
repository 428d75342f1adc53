"""The environment of a container: the image's, then the site's, then the user's.

Nothing of the caller's environment comes in by itself, but for ranks of MPI what
tells them who they are.
"""

from _collections_abc import Mapping

from enroot_py import configs, paths
from enroot_py.errors import ConfigError, UsageError
from enroot_py.imagefiles import decode_environment
from enroot_py.settings import Settings, expand, sysconf_path

SHIPPED = {"10-terminal.env": "TERM=${TERM:-dumb}\n"}
# PMIx: Slurm, Open MPI, PRRTE. PMI: Slurm, Hydra, which is MPICH's and Intel MPI's, and MVAPICH2.
_RANK = ("PMIX_RANK", "PMI_RANK", "PMI_ID", "PMIX_NAMESPACE", "PMI_FD")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def of_image(root: int) -> "dict[str, str]":
    """Variables of the image's /etc/environment, each value exactly as it stands."""
    return decode_environment(paths.text(root, "/etc/environment"))


def of_site(settings: Settings, host: "Mapping[str, str]") -> "dict[str, str]":
    """Variables of environ.d, the system's and the user's, with ``${VAR}`` from ``host``."""
    environ = {}
    directories = (sysconf_path(host) + "/environ.d", settings.config_path + "/environ.d")
    for origin, text in configs.fragments(directories, ".env", SHIPPED):
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, equals, value = line.partition("=")
            if not equals or not key:
                raise ConfigError(f"{origin}:{number}: {line!r} is not KEY=VALUE")
            try:
                environ[key] = unquoted(expand(value, host))
            except ValueError as e:
                raise ConfigError(f"{origin}:{number}: {e}") from None
    return environ


def unquoted(value: str) -> str:
    """A value without the quotes around it, which a person or a script wrote as for a shell."""
    inner = value.rstrip()
    return inner[1:-1] if len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "\"'" else value


def is_name(key: str) -> bool:
    return bool(key) and (key[0].isalpha() or key[0] == "_") and key.replace("_", "a").isalnum()


def of_options(options: "tuple[str, ...]", host: "Mapping[str, str]") -> "dict[str, str]":
    """Variables of ``--env``: ``KEY=VALUE``, or ``KEY`` alone for the caller's value."""
    environ = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not is_name(key):
            raise UsageError(f"--env {option!r}: {key!r} is not a name", hint="write KEY=VALUE, or KEY")
        environ[key] = value if equals else host.get(key, "")
    return environ


def is_rank(host: "Mapping[str, str]") -> bool:
    """Whether a launcher of MPI has started the caller."""
    return any(name in host for name in _RANK[:3])


def rank(host: "Mapping[str, str]") -> "list[str]":
    """What tells a rank from the other ranks and from its launcher; empty words in other processes."""
    return [host.get(name, "") for name in _RANK]


def complete(environ: "dict[str, str]", name: str, home: str, shell: str) -> None:
    """Add what a login would set and the image did not (login(1))."""
    for key, value in (
        ("HOME", home),
        ("USER", name),
        ("LOGNAME", name),
        ("SHELL", shell),
        ("PATH", _DEFAULT_PATH),
    ):
        environ.setdefault(key, value)
