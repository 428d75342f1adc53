"""PMIx and PMI2 reach into the container: variables, and the server's rendezvous files.

Slurm's mpi/pmix listens on a socket and keeps files under PMIX_SERVER_TMPDIR;
a client needs both, and the same modules as the server. PMI2's open file
descriptor passes as it is. Source: slurm.conf(5) MpiDefault, PMIx client
environment.
"""

import os

from enroot_py.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# What the server announces, and the MCA parameter by which a client follows.
_MODULES = (
    ("PMIX_PTL_MODULE", "PMIX_MCA_ptl"),
    ("PMIX_SECURITY_MODE", "PMIX_MCA_psec"),
    ("PMIX_GDS_MODULE", "PMIX_MCA_gds"),
)


def used(environ: "Mapping[str, str]") -> bool:
    """True where the step runs under PMIx; stray PMIX_ variables of the user do not count."""
    kind = environ.get("SLURM_MPI_TYPE")
    return (kind is None or kind.startswith("pmix")) and "PMIX_NAMESPACE" in environ


_MUNGE = "/run/munge"


def variables(environ: "Mapping[str, str]") -> "dict[str, str]":
    """Variables that a client in the container needs besides those of the job."""
    if not used(environ):
        return {}
    return {mca: environ[said] for said, mca in _MODULES if environ.get(said) and mca not in environ}


def munge(environ: "Mapping[str, str]", *, remap_root: bool) -> str:
    """The directory of munged's socket where a client must have it, else empty.

    PMIx's "native" credential is what the client takes for its own user id. That is 0 for root
    of a user namespace, and the server refuses it. MUNGE asks the kernel, munge(7).
    """
    return _MUNGE if remap_root and used(environ) and _munge_serves(environ) else ""


def _munge_serves(environ: "Mapping[str, str]") -> bool:
    return "munge" in environ.get("PMIX_SECURITY_MODE", "").split(",") and os.path.isdir(_MUNGE)


def check_root(environ: "Mapping[str, str]", tasks: int) -> str:
    """Why no PMIx client can connect as root of a user namespace, else empty: it would hang, not fail.

    Raises ConfigError where several tasks, ``tasks`` in the step, would wait for each other. One task may
    well be a shell on a cluster whose MpiDefault is pmix, and is told only.
    """
    if not used(environ) or _munge_serves(environ):
        return ""
    why = (
        "PMIx refuses clients that are root of a user namespace, as it does not offer MUNGE here "
        f"(PMIX_SECURITY_MODE={environ.get('PMIX_SECURITY_MODE', '')})"
    )
    if tasks > 1:
        hint = "with MPI: --no-container-remap-root; a program without: --mpi=none"
        raise ConfigError(f"--container-remap-root: {why}", hint=hint)
    return f"MPI will not work with --container-remap-root: {why}"


def directory(environ: "Mapping[str, str]") -> str:
    """The server's directory, which a client expects at the same path; empty where there is none."""
    path = environ.get("PMIX_SERVER_TMPDIR", "")
    return path if used(environ) and os.path.isdir(path) else ""
