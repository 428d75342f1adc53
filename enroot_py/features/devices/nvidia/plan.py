"""What a container needs for GPUs of NVIDIA: by CDI, by the driver as it is found, or by nvidia-container-cli."""

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
    """What is known of the GPUs and asked for, and what a container needs for that."""

    def __init__(self, context: Context, visible: str, *, by_option: bool) -> None:
        """``visible`` names GPUs, ``by_option`` of the caller's or else in a variable. Raises HookError."""
        self.context = context
        self.visible = visible
        self.by_option = by_option
        self.mode = context.host.get("PENROOT_NVIDIA_MODE") or "auto"
        if self.mode not in _MODES:
            message = f"PENROOT_NVIDIA_MODE={self.mode} is no way to find GPUs"
            raise HookError(message, hint="there are " + ", ".join(_MODES))
        self.edits = Edits("98-nvidia")
        self.host = Host.of(context.host)
        self.has_driver = self.host.exists("/proc/driver/nvidia") or self.host.exists("/dev/nvidiactl")
        self.capabilities: set[str] = set()
        self.driver = driver.Driver(self.host, "", {})
        if self.has_driver:
            self.capabilities = driver.capabilities(context.value("NVIDIA_DRIVER_CAPABILITIES"))
            self.driver = driver.Driver.of(self.host, context.host)
        self.gpus = GPUs(self.host, self.driver.nvml)

    def made(self, allocated: str) -> Edits:
        """What the container needs, where Slurm has ``allocated`` GPUs by their numbers. Raises HookError."""
        if self.has_driver:
            self._with_driver(allocated)
        else:
            self._without_driver()
        return self.edits

    @property
    def _origin(self) -> str:
        """The words that name GPUs, for messages."""
        name = "--device " + KIND if self.by_option else "NVIDIA_VISIBLE_DEVICES"
        return shown(f"{name}={self.visible}")

    @property
    def _words(self) -> list[str]:
        """The GPUs that are named."""
        words = [word.strip().removeprefix(KIND + "=") for word in self.visible.split(",")]
        return [word for word in words if word not in ("", "none")]

    def _selected(self) -> Selection:
        """Raises HookError."""
        return self.gpus.select(self._words, self._origin)

    def _without_driver(self) -> None:
        """Other systems than servers have other drivers, which a specification describes. Raises HookError."""
        if self._words and self.mode != "native" and self._by_cdi(self._words, must=False):
            return
        why, hint = driver.absence(self.host)
        if self.by_option or self.context.host.get("NVIDIA_VISIBLE_DEVICES", "") not in ("", "all", "none"):
            why = f" ({why})" if why else ""
            if self.by_option:
                by = self.context.settings.origin(SETTINGS["ENROOT_DEVICES"])
                hint = hint.replace("unset the variable", f"leave it out of what {by} asks for")
            raise HookError(f"{self._origin}: {os.uname().nodename} has no NVIDIA driver{why}", hint=hint)
        # An image made for GPUs runs without them too, as it does elsewhere.
        say = log.warn if why and self._words else log.debug
        say(f"98-nvidia: no NVIDIA driver on this node; {why}: {hint}")

    def _with_driver(self, allocated: str) -> None:
        """Devices, driver and what goes with them. Raises HookError."""
        selection = self._of_slurm(allocated) if allocated else None
        if self.mode == "nvidia-container-cli":
            self._by_program(selection or self._selected())
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

    def _of_slurm(self, allocated: str) -> Selection:
        """The GPUs of the step, of them those that the caller asks for; others that he asks for are reported.

        PENROOT_GPUS is set in the container where its tasks are told numbers that count others too.
        """
        step, counts_all = self._of_step(allocated)
        selection = self._narrowed(step, allocated)
        if counts_all and not selection.migs:
            minors = [str(gpu.minor) for gpu in self.gpus.all if gpu in selection.gpus]
            self.context.environ["PENROOT_GPUS"] = ",".join(minors)
        return selection

    def _narrowed(self, step: Selection, allocated: str) -> Selection:
        """Of the step's GPUs those that the caller asks for."""
        if allocated == allocation.UNTOLD:
            allocated = ",".join(str(gpu.minor) for gpu in step.gpus)
        if step.every or self.visible in ("", "all"):
            return step
        try:
            chosen = self._selected()
        except HookError as e:
            # A variable of another node, or of another day.
            log.warn(f"{e}: the step has {allocated}")
            return step
        beyond = ", ".join(sorted(self.gpus.nodes(chosen) - self.gpus.nodes(step)))
        if not beyond:
            return chosen
        log.warn(f"{self._origin} names GPUs outside of this step ({beyond}): it has {allocated}")
        return step

    def _of_step(self, allocated: str) -> tuple[Selection, bool]:
        """What Slurm gives the tasks of this step on this node: all GPUs where it cannot be known.

        What of them is not the step's, the device cgroup keeps from it. And whether the tasks are told
        numbers that count all GPUs of the node, as they are without ConstrainDevices.
        """
        caller = self.context.host
        everything = Selection(tuple(self.gpus.all), every=True)
        masks = [word for word in caller.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
        if any(mask.startswith("MIG-") for mask in masks):
            # Numbers of MIG devices are not those of nodes.
            try:
                bound = allocation.is_bound(caller, allocated)
                return everything if bound else self.gpus.select(masks, "CUDA_VISIBLE_DEVICES"), False
            except HookError:
                return everything, False
        numbers, counts_all = allocation.shared(caller, allocated, masks) or ([], False)
        gpus = tuple(gpu for gpu in self.gpus.all if str(gpu.minor) in numbers)
        if not gpus or len(gpus) != len(numbers):
            return everything, False
        if counts_all and "CUDA_VISIBLE_DEVICES" in self.context.environ:
            return everything, False  # somebody has said what it is inside, and the tasks are not told another
        return Selection(gpus), counts_all

    def _by_cdi(self, words: list[str], *, must: bool) -> bool:
        """Add the devices as a CDI specification describes them; False where none does and another way is open.

        Raises HookError where there ``must`` be one.
        """
        if not must and not any(self.host.list(directory) for directory in cdi.DIRECTORIES):
            return False
        specifications = cdi.Specifications(self.host, self.context.settings.cache_path)
        names = specifications.names(KIND)
        if "all" in words:
            words = ["all"] if "all" in names else names
        words = [self.gpus.also_named(word, names) for word in words]
        if why := self._unfit(specifications, words):
            if must:
                raise why
            return False
        folders = specifications.add(self.edits, KIND, words)
        self.gpus.hide_others(self.edits, set(self.edits.nodes))
        self.driver.link(self.edits, folders)
        return True

    def _unfit(self, specifications: cdi.Specifications, words: list[str]) -> HookError | None:
        """Why the devices ``words`` cannot be had of the specifications, which a warning says of old ones."""
        names = specifications.names(KIND)
        missing = [word for word in words if word not in names]
        stale = "" if missing else specifications.stale(KIND, words)
        if names and not missing and not stale:
            return None
        why = f"there is no device {KIND}={shown(missing[0])}" if missing else f"{stale} does not exist"
        if not names:
            why = f"there is no specification of {KIND}"
        why = "; ".join([why, *specifications.failures()])
        if stale and self.driver.version and self.mode != "cdi":
            log.warn(f"the CDI specification of {KIND} is out of date: {why}; using the driver as found on the host")
        return HookError(f"CDI: {why}", hint="nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")

    def _by_program(self, selection: Selection) -> None:
        """NVIDIA's own program, where a site insists on it, as nvidia-container-cli(1) takes its arguments."""
        self.gpus.hide_others(self.edits, self.gpus.nodes(selection))
        command = ["nvidia-container-cli", "--user"]
        command += ["--debug=/dev/stderr"] if "NVIDIA_DEBUG_LOG" in self.context.host else []
        command += [f"--root={self.driver.tree.prefix}"] if self.driver.tree.prefix else []
        # Ubuntu's /sbin/ldconfig is a script that looks for this one.
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
        """What a host may have besides: rights over MIG, and sockets of daemons."""
        for name, number in (("NVIDIA_MIG_CONFIG_DEVICES", 1), ("NVIDIA_MIG_MONITOR_DEVICES", 2)):
            if self.context.value(name):
                self.edits.node(self.host, f"/dev/nvidia-caps/nvidia-cap{number}")
        if "utility" in self.capabilities:
            for name in ("nvidia-persistenced", "nvidia-fabricmanager"):
                path = f"/var/run/{name}/socket"
                if not self.edits.file(self.host, path) and self.driver.tree is not self.host:
                    self.edits.file(self.driver.tree, path)

    def _add_direct(self) -> None:
        """GPUDirect, which nvidia-container-cli knows little of, and MPS."""
        if "compute" in self.capabilities:
            driver.add_direct_nodes(self.edits, self.host)
            self.edits.file(self.host, "/etc/cufile.json")
            pipes = os.path.normpath(self.context.host.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
            if pipes.strip("/") and pipes[0] == "/" and self.edits.file(self.host, pipes, writable=True):
                self.edits.environ.update({"CUDA_MPS_PIPE_DIRECTORY": pipes} if pipes != "/tmp/nvidia-mps" else {})

    def _check_requirements(self) -> None:
        """Raises HookError for one that is not met."""
        if required := _requirements(self.context):
            driver.check_requirements(required, self.driver.version, self.gpus.all)


def _requirements(context: Context) -> dict[str, str]:
    """NVIDIA_REQUIRE_*, unless NVIDIA_DISABLE_REQUIRE says that they do not count."""
    if context.value("NVIDIA_DISABLE_REQUIRE") not in ("", "0", "false"):
        return {}
    names = {name for name in (*context.environ, *context.host) if name.startswith("NVIDIA_REQUIRE_")}
    return {name: context.value(name) for name in sorted(names)}
