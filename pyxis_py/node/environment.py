"""The environment of a step's tasks: the image's, the environment file's, --container-env's, Slurm's and PMIx's."""

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

# Languages of the host mean nothing in an image that has other locales.
_LANGUAGES = ("LANG", "LANGUAGE", "LC_ALL")
_OF_TASKS = ("SLURM_", "PMI_", "PMIX_", "PALS_")


class Environment:
    """What tasks of a step find in their environment, in a container that has variables of its own."""

    def __init__(self, step: Step) -> None:
        self._job, self._file, self._env = step.job, step.request.file, step.request.env
        # If the type is none, Slurm takes it away, mpi_process_env(), but not the variables of a PMIx around it.
        self.mpi = {"SLURM_MPI_TYPE": "none", **step.job.environ}

    def chosen(self) -> dict[str, str]:
        """The variables of --container-env."""
        return options.chosen(self._env, self._job.environ)

    def of_file(self, image: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
        """What the environment file sets and unsets if the image sets ``image``; --container-env goes before it."""
        names = self.in_file()
        said = self._file.variables(image, self._job.environ) if self._file else {}
        return {name: variable for name, variable in said.items() if name in names}

    def in_file(self) -> set[str]:
        """The variables that the environment file sets or unsets, whatever to."""
        return set(self._file.by_name("env")) - self.chosen().keys() if self._file else set()

    def of_task(
        self, image: Mapping[str, str], task: Job, *, remap_root: bool
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """What to set and what to unset in a task: the image wins, except for --container-env."""
        kept = self.chosen()
        assign = {name: value for name, value in image.items() if name not in kept}
        if ("PYTORCH_VERSION" in image or "PYTORCH_VERSION" in self._job.environ) and self._tells_pytorch:
            from pyxis_py.node import pytorch

            assign.update(pytorch.variables(task, image))
        if "PENROOT_GPUS" in image:
            from pyxis_py.node import gpus

            assign.update(gpus.variables(task, image))
        # Of the names that are not here the task has the job's values.
        assign.update({name: value for name, value in kept.items() if self._job.environ.get(name) != value})
        drop = tuple(name for name in (*_LANGUAGES, *self.in_file()) if name not in kept and name not in assign)
        # In a batch script each srun is to have the file, and the tags, as sbatch has read them.
        ours = (RESOLVED, VERBOSE) if self._job.is_batch else (RESOLVED, VERBOSE, CARRIED, PINNED)
        return assign, (*drop, *pmix.withheld(self.mpi, remap_root=remap_root), *ours)

    @property
    def _tells_pytorch(self) -> bool:
        """Whether PyTorch gets its own names for what Slurm says of tasks; at CSCS a file has to ask for that."""
        said = self._file.annotation("com.pyxis.pytorch_remap_vars") if self._file else None
        wanted, _ = said or (True, "")
        return wanted

    def search(self, inside: Mapping[str, str]) -> str:
        """Return the PATH of a task in a container that has the variables ``inside``."""
        return {**self._job.environ, **inside, **self.chosen()}.get("PATH", "")

    def without_task(self, inside: Mapping[str, str]) -> dict[str, str]:
        """``inside`` without Slurm's variables of this task that a hook has copied: other tasks have their own."""
        own = self._job.environ
        return {
            name: value
            for name, value in inside.items()
            if not (name.startswith(_OF_TASKS) and own.get(name) == value or pmix.is_copy(name, value, own))
        }

    def fit_pmix(self, inside: Mapping[str, str], *, remap_root: bool) -> dict[str, str]:
        """In the container: what its PMIx needs to get on with the server. Raises ConfigError if it would not."""
        libraries = pmix.Libraries(os.path.exists, inside.get("LD_LIBRARY_PATH", ""))
        if self._job.is_first_of_several_tasks and (why := pmix.mismatch(self.mpi["SLURM_MPI_TYPE"], libraries)):
            log.warn(why)
        if not pmix.used(self.mpi):
            return {}
        return pmix.told(self.mpi, libraries, inside, remap_root=remap_root)

    def pmix_stores(self) -> dict[str, str]:
        """What a task is told of PMIx in a container that runs already, whose files are not looked at."""
        return pmix.stores(self.mpi) if pmix.used(self.mpi) else {}

    def check_pmix(self) -> None:
        """Warn if root of a container cannot reach the PMIx server."""
        if why := pmix.check_root(self.mpi, self._job.tasks):
            log.warn(why)
