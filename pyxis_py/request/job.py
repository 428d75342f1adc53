"""A submission, step or job, as the plugin describes it."""

from __future__ import annotations

from enroot_py.base.digests import Pin, is_digest
from enroot_py.base.features import parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from enroot_py.config.description import Description
    from enroot_py.registry.reference import LocalImage, Reference
    from pyxis_py.request.options import Request

# Variables of the job that are hidden from imports and from the settings of starts: they belong to one task, or they
# select programs, directories or limits that a job must not choose.
_DENIED = frozenset(
    (
        "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "PMIX_RANK",
        "PMI_FD", "ENROOT_LIBRARY_PATH", "ENROOT_SYSCONF_PATH", "ENROOT_RUNTIME_PATH", "ENROOT_CONFIG_PATH",
        "ENROOT_CACHE_PATH", "ENROOT_DATA_PATH", "ENROOT_TEMP_PATH", "ENROOT_ZSTD_OPTIONS", "ENROOT_TRANSFER_RETRIES",
        "ENROOT_CONNECT_TIMEOUT", "ENROOT_MAX_CONNECTIONS", "ENROOT_ALLOW_HTTP",
    )
)  # fmt: skip

# "REFERENCE DIGEST": the digest that srun resolved for all nodes of the step. Slurm passes on SLURM_* even with
# --export=NONE. A step with another image ignores this variable.
RESOLVED = "SLURM_PYXIS_RESOLVED"
# Port of srun's tracker, and the key of the swarm. The plugin passes this variable to the helper, but not to tasks.
SWARM = "SLURM_PYXIS_SWARM"
VERBOSE = "SLURM_PYXIS_VERBOSE"  # srun -v: print how long the container took
REFUSED = "refused"  # instead of a digest: the registry refused the image, and srun has printed the reason

# The content of the environment file at submission, in the format of the feature that reads such files.
CARRIED = "PYXIS_EDF"
# The digests of tags at submission, and the lock file, in the format of the feature that pins tags.
PINNED = "PYXIS_PINNED"

# Version of the messages between plugin and helper. Increase this number if a message changes its meaning: slurmd may
# have loaded an older plugin months ago.
PROTOCOL = 1

_BATCH_STEP_ID = 0xFFFFFFFB  # SLURM_BATCH_SCRIPT of slurm.h


class Job:
    """One request of the plugin; the protocol is in c_shims/spank/README.md."""

    __slots__ = (
        *("verb", "context", "arguments", "options", "environ", "caller", "cwd", "node", "numbers", "command"),
        *("swarm", "nodelist"),
    )

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Read the pairs of a message. Raises KeyError if a mandatory key is missing."""
        single: dict[str, str] = {}
        self.arguments: list[str] = []
        self.options: list[tuple[str, str]] = []
        self.environ: dict[str, str] = {}
        self.caller: dict[str, str] = {}  # the submitter's environment, if an environment file must be read
        assigned = {"environ": self.environ, "caller": self.caller}
        for key, value in pairs:
            if key == "arg":
                self.arguments.append(value)
            elif key == "option":
                name, _, text = value.partition("=")
                self.options.append((name, text))
            elif key in assigned:
                name, _, text = value.partition("=")
                assigned[key][name] = text
            else:
                single[key] = value
        self.verb = single["verb"]
        self.context = single.get("context", "stepd")
        self.cwd = single.get("cwd", "")
        self.node = single.get("node", "")
        self.command = single.get("command", "")
        self.nodelist = single.get("nodelist", "")
        self.swarm = single.get("swarm", "")  # port of srun's tracker, and the key of the swarm
        self.numbers = {key: int(value) for key, value in single.items() if value.isdecimal()}

    @property
    def protocol(self) -> int:
        return self.numbers.get("protocol", 1)  # the first plugins sent no number

    @property
    def jobid(self) -> int:
        return self.numbers["jobid"]

    @property
    def stepid(self) -> int:
        return self.numbers["stepid"]

    @property
    def step(self) -> str:
        """Return JOB.STEP."""
        return f"{self.jobid}.{self.stepid}"

    @property
    def uid(self) -> int:
        return self.numbers["uid"]

    @property
    def ending(self) -> dict[str, bool]:
        """Return how the step ended, as arguments of leave.finish(). Only requests to finish a step have this."""
        return {how: self.numbers[how] != 0 for how in ("failed", "killed")}

    @property
    def is_batch(self) -> bool:
        """Return whether this is the batch script of a job."""
        return self.numbers.get("stepid") == _BATCH_STEP_ID

    @property
    def is_verbose(self) -> bool:
        """Return whether srun has -v."""
        return VERBOSE in self.environ

    @property
    def tasks(self) -> int:
        """Return the number of tasks on all nodes: 1 for a batch script, whatever its sbatch -n is."""
        return 1 if self.is_batch else self.numbers.get("totaltasks", 0)

    @property
    def script(self) -> str:
        """Return the path of the batch script, which the container must mount, or "" in other steps."""
        return self.command if self.is_batch else ""

    def describe(self, name: str, origin: str) -> Description:
        """Return the container description that ``origin`` requests. Raises UsageError, ConfigError."""
        describe: Callable[[Job, str, str], Description] = next(parts("describe"))
        return describe(self, name, origin)

    def pin(self, request: Request, image: Reference | LocalImage) -> Pin | None:
        """Return the digest of a tag for all nodes of the step, from a feature or from srun, or None.

        Raises UsageError, ConfigError, and ImageError if the digest must be known and is not.
        """
        resolved = self.resolved(image.uri())
        for pin_of in parts("pin"):
            if known := pin_of(self, request, image, resolved):
                return known  # type: ignore[no-any-return]
        return Pin(resolved) if is_digest(resolved) else None

    def resolved(self, uri: str) -> str:
        """Return the digest that srun resolved for the image ``uri``, REFUSED, or "" if srun could not resolve it."""
        resolved, _, digest = self.environ.get(RESOLVED, "").rpartition(" ")
        return digest if uri == resolved and (digest == REFUSED or is_digest(digest)) else ""

    @property
    def is_first_of_several_nodes(self) -> bool:
        several = self.tasks > self.numbers.get("localtasks", 0)
        return several and self.environ.get("SLURM_NODEID") == "0"

    @property
    def is_first_of_several_tasks(self) -> bool:
        return self.tasks > 1 and self.environ.get("SLURM_NODEID") == "0"

    def host(self) -> dict[str, str]:
        """Return the job's environment without the variables that must not reach an import or a start."""
        return {key: value for key, value in self.environ.items() if key and key not in _DENIED}
