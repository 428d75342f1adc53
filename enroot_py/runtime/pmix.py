"""Make PMIx work in a container: the server's rendezvous files, and a credential that both sides support.

Slurm's mpi/pmix and mpirun listen on a socket and keep files under PMIX_SERVER_TMPDIR; a client needs both. PMI2 needs
only its inherited file descriptor. Source: slurm.conf(5), MpiDefault; PMIx client environment.
"""

from __future__ import annotations

import os

from enroot_py.base.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

# Library directories of distributions, which ld.so(8) searches.
_LIBRARIES = (*(f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib"), "/usr/local/lib")
_OPEN_MPI = ("libpmix.so.2", "libmpi.so.40")
_MPICH = ("libmpich.so.12", "libmpi.so.12", "libmpi_cray.so.12")


def used(environ: Mapping[str, str]) -> bool:
    """Return whether the step or rank runs under PMIx. Stray PMIX_ variables of the user do not count.

    A rank of mpirun runs under PMIx, whatever plugin srun used for mpirun's daemon.
    """
    kind = "pmix" if "OMPI_COMM_WORLD_RANK" in environ else environ.get("SLURM_MPI_TYPE", "pmix")
    return kind.startswith("pmix") and "PMIX_NAMESPACE" in environ


MUNGE = "/run/munge"
_CRAY = "cray_shasta"


def directories(environ: Mapping[str, str], *, remap_root: bool) -> list[tuple[str, str, str]]:
    """Return the node paths that a client needs: path, "rw" or "ro", and purpose.

    Root of a user namespace needs MUNGE, which asks the kernel for the client's user ID: munge(7). With PMIx's "native"
    credential, the client itself sends its user ID: root sends 0, which the server refuses (psec_native.c). Only on the
    socket of PMIx 2 does the server ask the kernel. The credential "none" would admit any user of the node. Cray's PMI
    reads the ranks from a directory of PALS or Slurm: mpi_cray_shasta.c, _create_app_dir().
    """
    needed = []
    spool = environ.get("PALS_SPOOL_DIR", "")
    if environ.get("SLURM_MPI_TYPE", _CRAY) == _CRAY and os.path.isdir(spool):
        needed.append((spool, "rw", "PALS_SPOOL_DIR"))
    if not used(environ):
        return needed
    server = environ.get("PMIX_SERVER_TMPDIR", "")
    if os.path.isdir(server):
        needed.append((server, "rw", "PMIX_SERVER_TMPDIR"))
    if remap_root and not _without_munge(environ):
        needed.append((MUNGE, "ro", "PMIx with --container-remap-root"))
    return needed


def _without_munge(environ: Mapping[str, str]) -> str:
    """Return why MUNGE cannot authenticate a client, with the fix, or ""."""
    offered = environ.get("PMIX_SECURITY_MODE", "")
    if "munge" not in offered.split(","):
        return f"it offers no MUNGE here (PMIX_SECURITY_MODE={offered}): the nodes need a PMIx built with MUNGE"
    return "" if os.path.isdir(MUNGE) else f"there is no {MUNGE} on this node: start munged"


def withheld(environ: Mapping[str, str], *, remap_root: bool) -> tuple[str, ...]:
    """If the server would refuse the client, return the variables to remove. A client that has them would hang."""
    if not (remap_root and used(environ) and _without_munge(environ)):
        return ()
    return tuple(name for name in environ if name.startswith(("PMIX_SERVER_", "PMIX_NAMESPACE", "PMIX_RANK")))


def check_root(environ: Mapping[str, str], tasks: int, option: str = "--container-remap-root") -> str:
    """Return a warning if a PMIx client cannot connect as root of a user namespace, else "".

    Raises ConfigError if the step has several ``tasks``, because they would wait for each other for ever. A single task
    only gets the warning: it may be a shell on a cluster whose MpiDefault is pmix.
    """
    lack = _without_munge(environ) if used(environ) else ""
    if not lack:
        return ""
    reason = f"PMIx refuses clients that are root of a user namespace, because {lack}"
    if tasks > 1:
        hint = "omit --root, or set ENROOT_MPI=no for a program without MPI"
        if option != "--root":
            hint = (
                "use --no-container-remap-root, or --mpi=pmi2 if the image's MPI supports it; without MPI, use "
                "--mpi=none"
            )
        raise ConfigError(f"{option}: {reason}", hint=hint)
    return f"MPI will not work with {option}: {reason}"


class Libraries:
    """Find libraries as a program of the container does; ``exists`` checks a path, ``search`` is LD_LIBRARY_PATH."""

    def __init__(self, exists: Callable[[str], bool], search: str) -> None:
        self._exists = exists
        self._directories = [*filter(None, search.split(":")), *_LIBRARIES]

    def have(self, *names: str) -> bool:
        return any(self._exists(f"{directory}/{name}") for directory in self._directories for name in names)


# Variables in which the server offers PMIx components. The client must support a component of each variable.
FITTED = ("PMIX_SECURITY_MODE", "PMIX_GDS_MODULE")
# name to which pyxis's hook copies a variable of FITTED -> the variable
_COPIES = {"PMIX_MCA_psec": "PMIX_SECURITY_MODE", "PMIX_MCA_gds": "PMIX_GDS_MODULE"}


def is_copy(name: str, value: str, environ: Mapping[str, str]) -> bool:
    """Return whether a variable is an unchanged copy, by a site's hook, of a variable in FITTED."""
    return name in _COPIES and environ.get(_COPIES[name]) == value


def fitted(environ: Mapping[str, str], libraries: Libraries, *, remap_root: bool) -> dict[str, str]:
    """Return the variables of FITTED with only those components that the client supports.

    Variables that need no change may be left out. Raises ConfigError if the client supports no component of a variable.
    """
    return {**security(environ, libraries, remap_root=remap_root), **stores(environ)}


def stores(environ: Mapping[str, str]) -> dict[str, str]:
    """Return PMIX_GDS_MODULE without the components that need the node's /tmp. Return {} if it has no such component.

    PMIx 5 keeps the data in a file in the node's /tmp, which processes map as shared memory. A client that does not
    find the file gives up, and a client of PMIx 4 complains. All servers and clients support "hash".
    """
    modules = environ.get("PMIX_GDS_MODULE", "").split(",")
    kept = [module for module in modules if not module.startswith("shmem")]
    return {} if kept == modules else {"PMIX_GDS_MODULE": ",".join(kept) or "hash"}


def client_variables(
    environ: Mapping[str, str], libraries: Libraries, inside: Mapping[str, str], *, remap_root: bool
) -> dict[str, str]:
    """Return fitted(), and copies() under names that ``environ`` and ``inside`` lack. Raises ConfigError."""
    fit = fitted(environ, libraries, remap_root=remap_root)
    offers = {name: environ[name] for name in FITTED if name in environ}
    return {**copies({**offers, **fit}, libraries, {**environ, **inside}), **fit}


_EVERYWHERE = frozenset(("native", "hash"))  # components that every PMIx has


def copies(fit: Mapping[str, str], libraries: Libraries, has: Container[str]) -> dict[str, str]:
    """Return the variables ``fit`` under the names of _COPIES, which scripts read. Leave out names in ``has``.

    PMIx fails if a value under these names lists a component that PMIx lacks. So copy a value only if every PMIx has
    its components, or if the image has no Open MPI.
    """
    copied = {copy: fit[name] for copy, name in _COPIES.items() if name in fit and copy not in has}
    alone = not libraries.have(*_OPEN_MPI)
    return {copy: value for copy, value in copied.items() if alone or _EVERYWHERE.issuperset(value.split(","))}


def security(environ: Mapping[str, str], libraries: Libraries, *, remap_root: bool) -> dict[str, str]:
    """Return PMIX_SECURITY_MODE without components that the image lacks: a client would complain about them.

    Raises ConfigError if no component is left for the image's MPI.
    """
    modes = environ.get("PMIX_SECURITY_MODE", "").split(",")
    if "munge" not in modes or libraries.have("libmunge.so.2"):
        return {"PMIX_SECURITY_MODE": ",".join(modes)} if modes[0] else {}
    kept = [mode for mode in modes if mode != "munge"]
    if (remap_root or not kept) and libraries.have(*_OPEN_MPI):
        reason = "root of a user namespace needs MUNGE with PMIx" if kept else "PMIx accepts only MUNGE here"
        hint = "install libmunge (Debian: libmunge2) and a PMIx with MUNGE in the image"
        if remap_root:
            hint += ", or do not become root in the container"
        if not kept:
            hint += ", or let the site offer more: PMIxEnv=PMIX_MCA_psec=munge,native in mpi.conf"
        raise ConfigError(
            f"{reason}, and the image has no libmunge.so.2 (PMIX_SECURITY_MODE={','.join(modes)})", hint=hint
        )
    return {"PMIX_SECURITY_MODE": ",".join(kept)} if kept else {}


def mismatch(kind: str, libraries: Libraries) -> str:
    """Return "" if the image's MPI supports ``srun --mpi=kind``, else why each task would run alone as rank 0."""
    if kind.startswith("pmix") and libraries.have(*_MPICH) and not libraries.have(*_OPEN_MPI):
        return "the image's MPI is MPICH or related, without PMIx, so each task would be rank 0 of 1: use --mpi=pmi2"
    if kind == "pmi2" and libraries.have(*_OPEN_MPI) and not libraries.have(*_MPICH):
        return "the image's MPI is Open MPI, whose ranks find each other only with PMIx: use --mpi=pmix"
    return ""
