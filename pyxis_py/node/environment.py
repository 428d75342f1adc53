"""The environment of tasks, from the image, the environment file, --container-env, Slurm and PMIx."""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.runtime import pmix
from pyxis_py.request import options
from pyxis_py.request.job import CARRIED, PINNED, RESOLVED, VERBOSE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyxis_py.node.step import Step
    from pyxis_py.request.job import Job

# The image may not have the locales of the host.
_LANGUAGES = ("LANG", "LANGUAGE", "LC_ALL")
_OF_TASKS = ("SLURM_", "PMI_", "PMIX_", "PALS_")


class Environment:
    """Compute the environment of a step's tasks from the variables of the job and of the container."""

    def __init__(self, step: Step) -> None:
        self._job, self._file, self._env = step.job, step.request.file, step.request.env
        # With --mpi=none, mpi_process_env() of Slurm unsets SLURM_MPI_TYPE, but keeps PMIx variables of an outer step.
        self.mpi = {"SLURM_MPI_TYPE": "none", **step.job.environ}

    def chosen(self) -> dict[str, str]:
        """Return the variables of --container-env."""
        return options.chosen(self._env, self._job.environ)

    def of_file(self, image: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
        """Return the variables that the environment file sets and unsets. --container-env takes precedence over it."""
        names = self.in_file()
        variables = self._file.variables(image, self._job.environ) if self._file else {}
        return {name: variable for name, variable in variables.items() if name in names}

    def in_file(self) -> set[str]:
        """Return the names that the environment file sets or unsets, except names that --container-env selects."""
        return set(self._file.by_name("env")) - self.chosen().keys() if self._file else set()

    def of_task(
        self, image: Mapping[str, str], task: Job, *, remap_root: bool
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return variables to set and to unset in a task. Precedence: --container-env, then the image, then the job."""
        kept = self.chosen()
        assign = {name: value for name, value in image.items() if name not in kept}
        if ("PYTORCH_VERSION" in image or "PYTORCH_VERSION" in self._job.environ) and self._sets_pytorch:
            from pyxis_py.node import pytorch

            assign.update(pytorch.variables(task, image))
        if "PENROOT_GPUS" in image:
            from pyxis_py.node import gpus

            assign.update(gpus.variables(task, image))
        # Omit values that the task already has from the job.
        assign.update({name: value for name, value in kept.items() if self._job.environ.get(name) != value})
        drop = tuple(name for name in (*_LANGUAGES, *self.in_file()) if name not in kept and name not in assign)
        # A batch script keeps CARRIED and PINNED: each of its sruns uses the file and the tags as sbatch read them.
        ours = (RESOLVED, VERBOSE) if self._job.is_batch else (RESOLVED, VERBOSE, CARRIED, PINNED)
        return assign, (*drop, *pmix.withheld(self.mpi, remap_root=remap_root), *ours)

    @property
    def _sets_pytorch(self) -> bool:
        """Return whether to set the PyTorch variables: yes, unless an annotation of the environment file says no.

        The container engine of CSCS sets them only if the annotation says yes.
        """
        annotation = self._file.annotation("com.pyxis.pytorch_remap_vars") if self._file else None
        wanted, _ = annotation or (True, "")
        return wanted

    def search(self, inside: Mapping[str, str]) -> str:
        """Return the PATH of a task in a container that has the variables ``inside``."""
        return {**self._job.environ, **inside, **self.chosen()}.get("PATH", "")

    def without_task(self, inside: Mapping[str, str]) -> dict[str, str]:
        """Return ``inside`` without Slurm variables that a hook copied from this task: they differ between tasks."""
        own = self._job.environ
        return {
            name: value
            for name, value in inside.items()
            if not (name.startswith(_OF_TASKS) and own.get(name) == value or pmix.is_copy(name, value, own))
        }

    def fit_pmix(self, inside: Mapping[str, str], *, remap_root: bool) -> dict[str, str]:
        """Return the variables for the PMIx library of the container, which this process has entered.

        Raises ConfigError if this library cannot use Slurm's PMIx server.
        """
        libraries = pmix.Libraries(os.path.exists, inside.get("LD_LIBRARY_PATH", ""))
        if self._job.is_first_of_several_tasks and (why := pmix.mismatch(self.mpi["SLURM_MPI_TYPE"], libraries)):
            log.warn(why)
        if not pmix.used(self.mpi):
            return {}
        return pmix.client_variables(self.mpi, libraries, inside, remap_root=remap_root)

    def pmix_stores(self) -> dict[str, str]:
        """Return the PMIx variables of a task in a running container, without checking its libraries."""
        return pmix.stores(self.mpi) if pmix.used(self.mpi) else {}

    def check_pmix(self) -> None:
        """Warn if root of a container cannot reach the PMIx server."""
        if why := pmix.check_root(self.mpi, self._job.tasks):
            log.warn(why)
