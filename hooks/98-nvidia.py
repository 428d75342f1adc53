"""GPUs of NVIDIA, by NVIDIA_VISIBLE_DEVICES or by what Slurm allocated to the step."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.devices import Edits, Host
    from enroot_py.hooks import Context
    from enroot_py.nvidia import GPU, Selection

KIND = "nvidia.com/gpu"
MODES = ("auto", "cdi", "native", "nvidia-container-cli")


def run(context: "Context") -> None:
    visible, allocated = wanted(context)
    if visible or allocated:
        plan(context, visible, allocated).execute(context)


def value(context: "Context", name: str) -> str:
    """A variable of the caller, else of the image."""
    return context.host.get(name, context.environ.get(name, ""))


def wanted(context: "Context") -> "tuple[str, str]":
    """NVIDIA_VISIBLE_DEVICES, and the numbers of the GPUs that Slurm allocated; two empty strings for neither."""
    visible = value(context, "NVIDIA_VISIBLE_DEVICES")
    if visible == "void":
        return "", ""
    if visible == "none" or value(context, "PENROOT_SLURM_GPUS").lower() in ("no", "n", "false", "f", "0", "off"):
        return visible, ""
    # Numbers of the nodes in /dev, whatever the task sees. Those of the job are
    # of the batch script's node, and every step inherits them.
    numbers = context.host.get("SLURM_STEP_GPUS", "")
    if not numbers and "SLURM_STEP_ID" not in context.host:
        numbers = context.host.get("SLURM_JOB_GPUS", "")
    return visible, numbers


def plan(context: "Context", visible: str, allocated: str) -> "Edits":
    """What the container needs for these GPUs. Raises HookError."""
    from enroot_py import devices, log, nvidia
    from enroot_py.errors import HookError

    host = devices.Host.of(context.host)
    edits = devices.Edits("98-nvidia")
    if not host.exists("/proc/driver/nvidia") and not host.exists("/dev/nvidiactl"):
        asked = context.host.get("NVIDIA_VISIBLE_DEVICES", "")
        if asked not in ("", "all", "none"):
            raise HookError(
                f"NVIDIA_VISIBLE_DEVICES={asked}: {os.uname().nodename} has no NVIDIA driver",
                hint="its kernel module makes /proc/driver/nvidia; unset the variable to start without GPUs",
            )
        # An image made for GPUs runs without them too, as it does elsewhere.
        log.debug("98-nvidia: no NVIDIA driver on this node")
        return edits
    mode = value(context, "PENROOT_NVIDIA_MODE") or "auto"
    if mode not in MODES:
        raise HookError(f"PENROOT_NVIDIA_MODE={mode} is no way to find GPUs", hint="there are " + ", ".join(MODES))
    capabilities = nvidia.capabilities(value(context, "NVIDIA_DRIVER_CAPABILITIES"))
    driver = nvidia.Driver(host, driver_root(context, host), nvidia.driver_version(host))
    known = nvidia.gpus(host)
    check_requirements(context, driver.version, known)
    if mode == "nvidia-container-cli":
        run_cli(context, visible or "all", capabilities)
        return edits
    words = [word.removeprefix(KIND + "=") for word in visible.split(",") if word and word != "none"]
    selection = None
    if allocated:
        asked = None
        if context.host.get("NVIDIA_VISIBLE_DEVICES", "") not in ("", "all"):
            asked = nvidia.select(words, known, host, f"NVIDIA_VISIBLE_DEVICES={visible}", driver.nvml)
        selection = of_slurm(context, known, allocated, asked)
    if mode == "native" or visible == "none" or not by_cdi(context, host, edits, driver, words, selection, known, mode):
        if selection is None:
            selection = nvidia.select(words, known, host, f"NVIDIA_VISIBLE_DEVICES={visible}", driver.nvml)
        if visible != "none":
            nvidia.add_nodes(edits, host, selection, known, capabilities)
        driver.add(edits, context, capabilities)
    if "compute" in capabilities:
        nvidia.add_compat(edits, context, driver.version)
    add_optional(context, host, edits, capabilities)
    return edits


def driver_root(context: "Context", host: "Host") -> str:
    """Where the user's part of the driver is: NVIDIA_DRIVER_ROOT, a driver container, or the host itself."""
    root = value(context, "NVIDIA_DRIVER_ROOT").rstrip("/")
    if not root and host.exists("/run/nvidia/driver/usr/bin/nvidia-smi"):
        return "/run/nvidia/driver"
    return root


def of_slurm(context: "Context", known: "list[GPU]", allocated: str, asked: "Selection | None") -> "Selection":
    """The GPUs of the step, of them those that the caller asks for; others that he asks for are reported."""
    from enroot_py import log, nvidia

    everything = nvidia.Selection(tuple(known), every=True)
    masks = context.host.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [word for word in allocated.split(",") if word]
    gpus = tuple(gpu for gpu in known if str(gpu.minor) in numbers)
    bound = context.host.get("SLURMD_TRES_BIND", "").startswith("gpu")
    if bound or "MIG-" in masks or len(gpus) != len(numbers):
        # Where tasks are bound to GPUs, a task is told its own and the container
        # is for all. Numbers of MIG devices are not those of nodes. The device
        # cgroup hides what is not the step's.
        return everything
    if asked is not None:
        beyond = asked.minors - {gpu.minor for gpu in gpus}
        if not beyond:
            return asked
        log.warn(
            f"NVIDIA_VISIBLE_DEVICES={context.host['NVIDIA_VISIBLE_DEVICES']} names GPUs that are not of this step "
            f"({', '.join(f'/dev/nvidia{minor}' for minor in sorted(beyond))}): it has {allocated}"
        )
    if any(word.isdecimal() and int(word) >= len(gpus) for word in masks.split(",")):
        # Without ConstrainDevices Slurm counts all GPUs of the node, and so
        # must CUDA: with the others hidden, these numbers would mean none.
        return everything
    return nvidia.Selection(gpus)


def by_cdi(
    context: "Context",
    host: "Host",
    edits: "Edits",
    driver: "object",
    words: "list[str]",
    selection: "Selection | None",
    known: "list[GPU]",
    mode: str,
) -> bool:
    """Add the devices as a CDI specification describes them; False where none does and another way is open."""
    if mode == "auto" and not any(host.list(directory) for directory in ("/etc/cdi", "/var/run/cdi")):
        return False
    from enroot_py import cdi, log, nvidia
    from enroot_py.errors import HookError

    registry = cdi.Registry(host, context.settings.cache_path)
    names = registry.names(KIND)
    if selection is not None:
        words = ["all"] if selection.every else [cdi_name(gpu, names) for gpu in selection.gpus]
    if "all" in words:
        words = ["all"] if "all" in names else names
    missing = [word for word in words if word not in names]
    stale = "" if missing else registry.stale(KIND, words)
    if not names or missing or stale:
        why = f"there is no device {KIND}={missing[0]}" if missing else f"{stale} does not exist"
        if not names:
            why = "; ".join(registry.failures()) or f"there is no specification of {KIND}"
        if mode == "cdi":
            raise HookError(f"CDI: {why}", hint="nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
        if stale:
            log.warn(f"the CDI specification of {KIND} is out of date: {why}; the driver is used as it is found")
        return False
    folders = registry.add(edits, KIND, words)
    nvidia.hide_others(edits, known)
    assert isinstance(driver, nvidia.Driver)
    driver.link(edits, folders)
    return True


def cdi_name(gpu: "GPU", names: "list[str]") -> str:
    return gpu.uuid if gpu.uuid in names else str(gpu.index)


def add_optional(context: "Context", host: "Host", edits: "Edits", capabilities: "set[str]") -> None:
    """What a host may have besides: rights over MIG, sockets of daemons, GPUDirect Storage."""
    for name, number in (("NVIDIA_MIG_CONFIG_DEVICES", 1), ("NVIDIA_MIG_MONITOR_DEVICES", 2)):
        if value(context, name):
            edits.node(host, f"/dev/nvidia-caps/nvidia-cap{number}")
    if "utility" in capabilities:
        for name in ("nvidia-persistenced", "nvidia-fabricmanager"):
            edits.file(host, f"/var/run/{name}/socket")
    if "compute" in capabilities:
        from enroot_py import nvidia

        nvidia.add_direct_nodes(edits, host)
        edits.file(host, "/etc/cufile.json")
        edits.file(host, context.host.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", writable=True)


def check_requirements(context: "Context", version: str, known: "list[GPU]") -> None:
    names = {name for name in (*context.environ, *context.host) if name.startswith("NVIDIA_REQUIRE_")}
    if names and value(context, "NVIDIA_DISABLE_REQUIRE") in ("", "0", "false"):
        from enroot_py import nvidia

        nvidia.check_requirements({name: value(context, name) for name in names}, version, known)


def run_cli(context: "Context", visible: str, capabilities: "set[str]") -> None:
    """NVIDIA's own program, where a site insists on it. Raises HookError."""
    from enroot_py import run
    from enroot_py.errors import HookError

    program = run.find("nvidia-container-cli", package="libnvidia-container-tools")
    command = [program, "--user", "configure", "--no-cgroups", "--ldconfig=@/sbin/ldconfig"]
    command += [f"--device={visible}"] if visible != "none" else []
    command += [f"--{name}" for name in sorted(capabilities)]
    for name, option in (("NVIDIA_MIG_CONFIG_DEVICES", "mig-config"), ("NVIDIA_MIG_MONITOR_DEVICES", "mig-monitor")):
        command += [f"--{option}={value(context, name)}"] if value(context, name) else []
    run.run([*command, context.settings.runtime_path + "/root"], error=HookError)
