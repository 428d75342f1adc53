"""Plan a container's NVIDIA GPUs: by CDI, by the driver's files on the host, or by nvidia-container-cli."""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import HookError
from enroot_py.features.devices import allocation, cdi
from enroot_py.features.devices.nvidia import driver
from enroot_py.features.devices.nvidia.selection import GPUs, Selection
from enroot_py.features.devices.settings import SETTINGS
from enroot_py.runtime.edits import Edits, Host, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.runtime.hooks import Context

KIND = "nvidia.com/gpu"
_MODES = ("auto", "cdi", "native", "nvidia-container-cli")


class Plan:
    """The host's GPUs, the requested GPUs, and the edits of the container."""

    def __init__(self, context: Context, visible: str, *, by_option: bool) -> None:
        """``visible`` is the value of --device if ``by_option``, else of NVIDIA_VISIBLE_DEVICES. Raises HookError."""
        self.context = context
        self.visible = visible
        self.by_option = by_option
        self.mode = context.host.get("PENROOT_NVIDIA_MODE") or "auto"
        if self.mode not in _MODES:
            message = f"PENROOT_NVIDIA_MODE={self.mode} is not a mode"
            raise HookError(message, hint="set one of " + ", ".join(_MODES))
        self.edits = Edits("98-nvidia")
        self.host = Host.of(context.host)
        self.has_driver = self.host.exists("/proc/driver/nvidia") or self.host.exists("/dev/nvidiactl")
        self.capabilities: set[str] = set()
        self.driver = driver.Driver(self.host, "", {})
        if self.has_driver:
            self.capabilities = driver.capabilities(context.value("NVIDIA_DRIVER_CAPABILITIES"))
            self.driver = driver.Driver.of(self.host, context.host)
        self.gpus = GPUs(self.host, self.driver.nvml)

    def build(self, allocated: str) -> Edits:
        """Return the edits. ``allocated`` are the GPU numbers from Slurm, or "". Raises HookError."""
        if self.has_driver:
            self._with_driver(allocated)
        else:
            self._without_driver()
        return self.edits

    @property
    def _origin(self) -> str:
        """The option or variable that selects GPUs, for messages."""
        name = "--device " + KIND if self.by_option else "NVIDIA_VISIBLE_DEVICES"
        return shown(f"{name}={self.visible}")

    @property
    def _words(self) -> list[str]:
        """The names of GPUs in ``visible``."""
        words = [word.strip().removeprefix(KIND + "=") for word in self.visible.split(",")]
        return [word for word in words if word not in ("", "none")]

    def _selected(self) -> Selection:
        """Return the GPUs that the caller or the image selects. Raises HookError."""
        return self.gpus.select(self._words, self._origin)

    def _without_driver(self) -> None:
        """Add GPUs by CDI only, as on WSL2 and Jetson, whose drivers differ from a server's. Raises HookError."""
        if self._words and self.mode != "native" and self._by_cdi(self._words, must=False):
            return
        reason, hint = driver.absence(self.host)
        if self.by_option or self.context.host.get("NVIDIA_VISIBLE_DEVICES", "") not in ("", "all", "none"):
            reason = f" ({reason})" if reason else ""
            if self.by_option:
                origin = self.context.settings.origin(SETTINGS["ENROOT_DEVICES"])
                hint = hint.replace("unset the variable", f"remove it from {origin}")
            raise HookError(f"{self._origin}: {os.uname().nodename} has no NVIDIA driver{reason}", hint=hint)
        # The image, not the caller, selects GPUs: start without them, as other runtimes do.
        report = log.warn if reason and self._words else log.explain or log.debug
        report("98-nvidia: no NVIDIA driver on this node" + (f"; {reason}: {hint}" if reason else ""))

    def _with_driver(self, allocated: str) -> None:
        """Add devices, driver and related files. Raises HookError."""
        selection = self._select_allocated(allocated) if allocated else None
        if self.mode == "nvidia-container-cli":
            self._run_container_cli(selection or self._selected())
            self._add_direct()
            return
        self._check_requirements()
        words = selection.names() if selection else self._words
        by_cdi = self.mode != "native" and self.visible != "none" and self._by_cdi(words, must=self.mode == "cdi")
        if not by_cdi:
            selection = selection or self._selected()
            if self.visible != "none":
                self.gpus.add(self.edits, selection, self.capabilities)
            else:
                self.gpus.hide_others(self.edits, set())
            self.driver.add(self.edits, self.context, self.capabilities)
        if "compute" in self.capabilities:
            driver.add_compat(self.edits, self.context, self.driver.version, self.gpus.all)
        self._add_optional()
        self._add_direct()

    def _select_allocated(self, allocated: str) -> Selection:
        """Return the selected GPUs of the step. Warn about selected GPUs that the step does not have.

        If Slurm counts all GPUs of the node in CUDA_VISIBLE_DEVICES, set PENROOT_GPUS in the container's environment:
        pyxis_py/node/gpus.py then changes CUDA_VISIBLE_DEVICES of each task to count the container's GPUs.
        """
        step, counts_all = self._step_gpus(allocated)
        selection = self._narrowed(step, allocated)
        if counts_all and not selection.migs:
            minors = [str(gpu.minor) for gpu in self.gpus.all if gpu in selection.gpus]
            self.context.environ["PENROOT_GPUS"] = ",".join(minors)
        return selection

    def _narrowed(self, step: Selection, allocated: str) -> Selection:
        """Return the selected GPUs of the step, or all GPUs of the step if the selection contains others."""
        if allocated == allocation.UNNUMBERED:
            allocated = ",".join(str(gpu.minor) for gpu in step.gpus)
        if step.every or self.visible in ("", "all"):
            return step
        try:
            chosen = self._selected()
        except HookError as e:
            # The variable may have been set on another node.
            log.warn(f"{e}; the GPUs of the step are {allocated}")
            return step
        beyond = ", ".join(sorted(self.gpus.nodes(chosen) - self.gpus.nodes(step)))
        if not beyond:
            return chosen
        log.warn(f"{self._origin} is ignored: the step has no {beyond}; the GPUs of the step are {allocated}")
        return step

    def _step_gpus(self, allocated: str) -> tuple[Selection, bool]:
        """Return the GPUs of the step's tasks on this node. If they are unknown, return all GPUs of the node.

        In that case, only the device cgroup keeps the container from GPUs that the step does not have. The second value
        tells whether Slurm counts all GPUs of the node in CUDA_VISIBLE_DEVICES, not only GPUs of the step.
        """
        caller = self.context.host
        everything = Selection(tuple(self.gpus.all), every=True)
        masks = [word for word in caller.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        if any(mask.startswith("MIG-") for mask in masks):
            # For MIG devices, Slurm's numbers are not the minor numbers of /dev/nvidia*.
            try:
                bound = allocation.is_bound(caller, allocated)
                return everything if bound else self.gpus.select(masks, "CUDA_VISIBLE_DEVICES"), False
            except HookError:
                return everything, False
        numbers, counts_all = allocation.gpus_of_step(caller, allocated, masks) or ([], False)
        gpus = tuple(gpu for gpu in self.gpus.all if str(gpu.minor) in numbers)
        if not gpus or len(gpus) != len(numbers):
            return everything, False
        if counts_all and "CUDA_VISIBLE_DEVICES" in self.context.environ:
            # The user or the image has set the variable. penroot keeps its numbers, so add all GPUs that they may mean.
            return everything, False
        return Selection(gpus), counts_all

    def _by_cdi(self, words: list[str], *, must: bool) -> bool:
        """Add the devices by a CDI specification. Return False if no valid specification describes them.

        With ``must``, raise HookError instead of returning False.
        """
        if not must and not any(self.host.list(directory) for directory in cdi.DIRECTORIES):
            return False
        specifications = cdi.Specifications(self.host, self.context.settings.cache_path)
        names = specifications.names(KIND)
        if "all" in words:
            words = ["all"] if "all" in names else names
        words = [self.gpus.translate_name(word, names) for word in words]
        if error := self._cdi_error(specifications, words):
            if must:
                raise error
            return False
        folders = specifications.add(self.edits, KIND, words)
        self.gpus.hide_others(self.edits, set(self.edits.nodes))
        self.driver.link(self.edits, folders)
        return True

    def _cdi_error(self, specifications: cdi.Specifications, words: list[str]) -> HookError | None:
        """Return why the specifications cannot provide the devices ``words``, or None. Warn if they are outdated."""
        names = specifications.names(KIND)
        missing = [word for word in words if word not in names]
        stale = "" if missing else specifications.missing_path(KIND, words)
        if names and not missing and not stale:
            return None
        reason = f"there is no device {KIND}={shown(missing[0])}" if missing else f"{stale} does not exist"
        if not names:
            reason = f"there is no specification of {KIND}"
        reason = "; ".join([reason, *specifications.failures()])
        if stale and self.driver.version and self.mode != "cdi":
            log.warn(f"the CDI specification of {KIND} is outdated: {reason}; using the driver's files instead")
        return HookError(f"CDI: {reason}", hint="nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")

    def _run_container_cli(self, selection: Selection) -> None:
        """Let nvidia-container-cli(1) configure the container, as PENROOT_NVIDIA_MODE requests."""
        self.gpus.hide_others(self.edits, self.gpus.nodes(selection))
        command = ["nvidia-container-cli", "--user"]
        command += ["--debug=/dev/stderr"] if "NVIDIA_DEBUG_LOG" in self.context.host else []
        command += [f"--root={self.driver.tree.prefix}"] if self.driver.tree.prefix else []
        # Ubuntu's /sbin/ldconfig is a script that runs ldconfig.real.
        ldconfig = "/sbin/ldconfig.real" if os.path.exists("/sbin/ldconfig.real") else "/sbin/ldconfig"
        command += ["configure", "--no-cgroups", f"--ldconfig=@{ldconfig}"]
        words = selection.names()
        command += [f"--device={','.join(words)}"] if words else []
        for name in ("config", "monitor"):
            if devices := self.context.value(f"NVIDIA_MIG_{name.upper()}_DEVICES"):
                command.append(f"--mig-{name}={devices}")
        command += [f"--{name}" for name in sorted(self.capabilities)]
        command += [f"--require={text}" for text in _requirements(self.context).values()]
        self.edits.programs.append(command)

    def _add_optional(self) -> None:
        """Add the device nodes for MIG management if requested, and the sockets of NVIDIA daemons."""
        for name, number in (("NVIDIA_MIG_CONFIG_DEVICES", 1), ("NVIDIA_MIG_MONITOR_DEVICES", 2)):
            if self.context.value(name):
                self.edits.node(self.host, f"/dev/nvidia-caps/nvidia-cap{number}")
        if "utility" in self.capabilities:
            for name in ("nvidia-persistenced", "nvidia-fabricmanager"):
                path = f"/var/run/{name}/socket"
                if not self.edits.file(self.host, path) and self.driver.tree is not self.host:
                    self.edits.file(self.driver.tree, path)

    def _add_direct(self) -> None:
        """Add the files of GPUDirect and MPS, also in the mode nvidia-container-cli: that program adds few of them."""
        if "compute" in self.capabilities:
            driver.add_direct_nodes(self.edits, self.host)
            self.edits.file(self.host, "/etc/cufile.json")
            pipes = os.path.normpath(self.context.host.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
            if pipes.strip("/") and pipes[0] == "/" and self.edits.file(self.host, pipes, writable=True):
                self.edits.environ.update({"CUDA_MPS_PIPE_DIRECTORY": pipes} if pipes != "/tmp/nvidia-mps" else {})

    def _check_requirements(self) -> None:
        """Raises HookError if NVIDIA_REQUIRE_* is not met."""
        if requirements := _requirements(self.context):
            driver.check_requirements(requirements, self.driver.version, self.gpus.all)


def _requirements(context: Context) -> dict[str, str]:
    """Return the variables NVIDIA_REQUIRE_*, or none if NVIDIA_DISABLE_REQUIRE is set."""
    if context.value("NVIDIA_DISABLE_REQUIRE") not in ("", "0", "false"):
        return {}
    names = {name for name in (*context.environ, *context.host) if name.startswith("NVIDIA_REQUIRE_")}
    return {name: context.value(name) for name in sorted(names)}
