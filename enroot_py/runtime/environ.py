"""Compute the environment of a container from the variables of the image, the site and the user.

The container gets only these variables of the caller: variables for MPI ranks, variables that --env names, and
variables that a line of an environment file names as ``${VAR}``. In the image's /etc/environment, a ``${VAR}``
that looks like a secret (secrets.py) counts as unset.
"""

from __future__ import annotations

import os
from _collections_abc import Mapping

from enroot_py.base import log, paths
from enroot_py.base.errors import UsageError
from enroot_py.config import files
from enroot_py.config.settings import Settings, directories
from enroot_py.config.words import DEFAULT_PATH, cut
from enroot_py.runtime.etc import assignment, image_digest, no_variables, read_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    Wanted = Mapping[str, tuple[str | None, str]]  # name -> (value, or None to unset the variable; origin)

SHIPPED = {"10-terminal.env": "TERM=${TERM:-dumb}\n"}
# Slurm, Open MPI and PRRTE set PMIX_ variables. Slurm, Hydra (of MPICH and Intel MPI) and MVAPICH2 set PMI_ variables.
_RANK = ("PMIX_RANK", "PMI_RANK", "PMI_ID", "PMIX_NAMESPACE", "PMI_FD")

# Variables that name files or directories that programs use; ':' separates several paths.
_PATHS = (
    "AWS_CA_BUNDLE AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE CURL_CA_BUNDLE GIT_SSL_CAINFO "
    "GOOGLE_APPLICATION_CREDENTIALS KRB5_CONFIG KUBECONFIG NCCL_CONF_FILE NCCL_GRAPH_FILE NCCL_TOPO_FILE "
    "NCCL_TUNER_CONFIG_FILE NETRC NODE_EXTRA_CA_CERTS OPENSSL_CONF PIP_CERT PIP_CONFIG_FILE REQUESTS_CA_BUNDLE "
    "SSL_CERT_DIR SSL_CERT_FILE TEMP TMP TMPDIR TZDIR"
).split()


class Variables:
    """The environment of a container, while the start adds variables.

    ``origins`` has the origin of each variable, for --explain. ``below`` has the values that variables of the caller
    have replaced.
    """

    def __init__(self, values: dict[str, str] | None = None, origins: dict[str, str] | None = None) -> None:
        self.values = values or {}
        self.origins = origins or {}
        self.below: dict[str, str] = {}
        self._known = dict(self.values)  # the values whose origins are recorded

    def set(self, new: Mapping[str, str], origin: str) -> None:
        self.values.update(new)
        self._known.update(new)
        self.origins.update(dict.fromkeys(new, origin))

    def cover(self, wanted: Wanted) -> None:
        """Set the caller's variables, and remember the previous values."""
        self.below = {name: self.values[name] for name in wanted if name in self.values}
        self.assign(wanted)

    def assign(self, wanted: Wanted) -> None:
        for name, (value, origin) in wanted.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.set({name: value}, origin)

    def note(self, origin: str) -> None:
        """Record ``origin`` for variables that have changed in ``values`` since the last record."""
        changed = {name: value for name, value in self.values.items() if self._known.get(name) != value}
        self.set(changed, origin)


def of_image(root: int, host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the image's /etc/environment, and the image's digest. Expand ``${VAR}`` from ``host``."""
    text = paths.text(root, "/etc/environment")
    if "${" in text:
        from enroot_py.runtime import secrets

        host = secrets.left_out(text, host)
    ignored: list[str] = []
    variables = read_environment(text, lambda value: unquoted(substitute(value, host)), ignored)
    if ignored:
        log.warn(f"/etc/environment of the image has {no_variables(ignored)}")
    if digest := image_digest(paths.text(root, "/etc/rc.local")):
        variables["PENROOT_IMAGE_DIGEST"] = digest
    return {key: value for key, value in variables.items() if not key.startswith("ENROOT_")}


def of_site(settings: Settings, host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the system's and the user's environ.d. Expand ``${VAR}`` from ``host``."""
    environ = {}
    for origin, text in files.fragments(directories("environ.d", settings, host), ".env", SHIPPED):
        for number, line in enumerate(text.split("\n"), 1):
            key, equals, value = assignment(line)
            if not line.strip() or key.startswith("#"):
                continue
            if not equals or not is_name(key):
                log.warn(f"{origin}:{number}: {line.strip()!r} is not KEY=VALUE: ignored")
            elif not key.startswith("ENROOT_"):
                environ[key] = unquoted(substitute(value, host, defaults=True))
    return environ


def substitute(text: str, variables: Mapping[str, str], *, defaults: bool = False) -> str:
    """Replace ``${NAME}``; an unset variable is empty. With ``defaults``, replace ``${NAME:-DEFAULT}`` too.

    Other shell syntax stays unchanged, as in enroot.
    """
    if "${" not in text:
        return text
    out = ""
    for written, name, default, after in cut(text):
        if written.startswith("${") and (defaults or default is None):
            written = variables.get(name) or default or ""
        out += written + after
    return out


def unquoted(value: str) -> str:
    """Return a value without surrounding shell quotes."""
    inner = value.rstrip()
    return inner[1:-1] if len(inner) > 1 and inner[0] in "\"'" and inner[-1] in "\"'" else value


def is_name(key: str) -> bool:
    return bool(key) and (key[0].isalpha() or key[0] == "_") and key.replace("_", "a").isalnum()


def of_options(options: tuple[str, ...], host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``--env``: ``KEY=VALUE``, or ``KEY`` alone for the caller's value.

    A name may have characters that a shell refuses, as in ``discovery.type``. Raises UsageError for an empty name.
    """
    environ = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key:
            raise UsageError(f"--env {option!r} has no name", hint="write KEY=VALUE, or KEY")
        environ[key] = value if equals else host.get(key, "")
    return environ


def warn_of_missing_paths(environ: Mapping[str, str]) -> None:
    """Warn about variables of ``environ`` whose files or directories the container lacks. Call it in the container."""
    missing = [f"{name}={environ[name]}" for name in _PATHS if name in environ and not _has_one(environ[name])]
    if missing:
        log.warn(f"no such file or directory in the container: {', '.join(missing)}; mount it, or unset the variable")


def _has_one(paths: str) -> bool:
    """Return whether one of the ``paths`` exists or cannot be checked."""
    for path in paths.split(":"):
        try:
            if path.startswith("/"):
                os.stat(path)
            return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True
    return False


def is_rank(host: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher started the caller."""
    return any(name in host for name in _RANK[:3])


def rank(host: Mapping[str, str]) -> list[str]:
    """Return words that identify a rank and its launcher, or empty words if the caller is not a rank."""
    return [host.get(name, "") for name in _RANK]


def complete(environ: dict[str, str], name: str, home: str, shell: str) -> None:
    """Set those variables of login(1) that are not in ``environ``."""
    for key, value in (
        ("HOME", home),
        ("USER", name),
        ("LOGNAME", name),
        ("SHELL", shell),
        ("PATH", DEFAULT_PATH),
    ):
        environ.setdefault(key, value)
