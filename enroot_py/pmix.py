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
    """True where the step or rank runs under PMIx; stray PMIX_ variables of the user do not count.

    A rank of mpirun does, whatever srun has started mpirun's daemon with.
    """
    kind = "pmix" if "OMPI_COMM_WORLD_RANK" in environ else environ.get("SLURM_MPI_TYPE", "pmix")
    return kind.startswith("pmix") and "PMIX_NAMESPACE" in environ


_MUNGE = "/run/munge"


def variables(environ: "Mapping[str, str]") -> "dict[str, str]":
    """Variables that a client in the container needs besides those of the job."""
    if not used(environ):
        return {}
    return {mca: environ[said] for said, mca in _MODULES if environ.get(said) and mca not in environ}


def directories(environ: "Mapping[str, str]", *, remap_root: bool) -> "list[tuple[str, str, str]]":
    """What a client needs of the node at the same paths: path, "rw" or "ro", and what for.

    PMIx's "native" credential is what the client sends as its own user id (psec_native.c; the server
    asks the kernel only on the socket of PMIx 2). That is 0 for root of a user namespace, and the
    server refuses it. MUNGE asks the kernel, munge(7). "none" would let any user of the node in.
    """
    if not used(environ):
        return []
    found = []
    server = environ.get("PMIX_SERVER_TMPDIR", "")
    if os.path.isdir(server):
        found.append((server, "rw", "PMIX_SERVER_TMPDIR"))
    if remap_root and not _without_munge(environ):
        found.append((_MUNGE, "ro", "PMIx with --container-remap-root"))
    return found


def _without_munge(environ: "Mapping[str, str]") -> str:
    """Why MUNGE cannot vouch for a client, and how the site makes it; else empty."""
    offered = environ.get("PMIX_SECURITY_MODE", "")
    if "munge" not in offered.split(","):
        return f"it offers no MUNGE here (PMIX_SECURITY_MODE={offered}): the nodes need a PMIx built with MUNGE"
    return "" if os.path.isdir(_MUNGE) else f"there is no {_MUNGE} on this node: munged must run there"


def withheld(environ: "Mapping[str, str]", *, remap_root: bool) -> "tuple[str, ...]":
    """Variables that lead a client to a server that refuses it: the slurmstepd of that one would never end."""
    if not (remap_root and used(environ) and _without_munge(environ)):
        return ()
    return tuple(name for name in environ if name.startswith(("PMIX_SERVER_", "PMIX_NAMESPACE", "PMIX_RANK")))


def check_root(environ: "Mapping[str, str]", tasks: int, option: str = "--container-remap-root") -> str:
    """Why no PMIx client can connect as root of a user namespace, else empty: it would hang, not fail.

    Raises ConfigError where several tasks, ``tasks`` in the step, would wait for each other. One task may
    well be a shell on a cluster whose MpiDefault is pmix, and is told only.
    """
    lack = _without_munge(environ) if used(environ) else ""
    if not lack:
        return ""
    why = f"PMIx refuses clients that are root of a user namespace, as {lack}"
    if tasks > 1:
        hint = "with MPI: leave out --root; a program without: ENROOT_MPI=no"
        if option != "--root":
            hint = (
                "with MPI: --no-container-remap-root, or --mpi=pmi2 where the image's MPI speaks it; "
                "a program without: --mpi=none"
            )
        raise ConfigError(f"{option}: {why}", hint=hint)
    return f"MPI will not work with {option}: {why}"
