"""GPUs of NVIDIA, by NVIDIA_VISIBLE_DEVICES or by what Slurm allocated to the step."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.devices.edits import Edits, Host
    from enroot_py.devices.nvidia import GPU, Driver, Selection
    from enroot_py.runtime.hooks import Context

KIND = "nvidia.com/gpu"
UNTOLD = "all"  # where Slurm tells a step how many GPUs it has, but not which: with --gpu-bind=none
MODES = ("auto", "cdi", "native", "nvidia-container-cli")


def run(context: Context) -> None:
    visible, allocated = wanted(context)
    if visible or allocated:
        plan(context, visible, allocated).execute(context)


def value(context: Context, name: str) -> str:
    """A variable of the caller, else of the image."""
    return context.host.get(name, context.environ.get(name, ""))


def by_option(context: Context) -> str:
    """GPUs that the caller names in the words of CDI: with --device, or in ENROOT_DEVICES."""
    words = [word.strip() for word in context.settings.devices.split(",")] if context.settings.devices else []
    return ",".join(word.removeprefix(KIND + "=") for word in words if word.startswith(KIND + "="))


def named(visible: str) -> list[str]:
    return [word.strip().removeprefix(KIND + "=") for word in visible.split(",") if word.strip()]


def asked(context: Context) -> str:
    """What the caller names; empty where only the image does."""
    return by_option(context) or context.host.get("NVIDIA_VISIBLE_DEVICES", "")


def wanted(context: Context) -> tuple[str, str]:
    """NVIDIA_VISIBLE_DEVICES, and the numbers of the GPUs that Slurm allocated; two empty strings for neither."""
    visible = by_option(context) or value(context, "NVIDIA_VISIBLE_DEVICES")
    if visible == "void":
        return "", ""
    # What is not of an image is asked of the caller alone: it would be done on the host.
    if visible == "none" or context.host.get("PENROOT_SLURM_GPUS", "").lower() in ("no", "n", "false", "f", "0", "off"):
        return visible, ""
    # Numbers of the nodes in /dev, whatever the task sees. Those of the job are
    # of the batch script's node, and every step inherits them.
    numbers, of_job = context.host.get("SLURM_STEP_GPUS", ""), context.host.get("SLURM_JOB_GPUS", "")
    if "SLURM_STEP_ID" not in context.host:
        return visible, numbers or of_job
    if not numbers and context.host.get("SLURM_GPUS_ON_NODE", "0") != "0":
        return visible, UNTOLD
    if of_job and not numbers and not by_option(context) and "NVIDIA_VISIBLE_DEVICES" not in context.host:
        return "", ""  # a step that was given none of its job's, whatever the image says
    return visible, numbers


def plan(context: Context, visible: str, allocated: str) -> Edits:
    """What the container needs for these GPUs. Raises HookError."""
    from enroot_py.base import log
    from enroot_py.base.errors import HookError
    from enroot_py.devices import nvidia
    from enroot_py.devices.edits import Edits, Host

    host = Host.of(context.host)
    edits = Edits("98-nvidia")
    mode = context.host.get("PENROOT_NVIDIA_MODE") or "auto"
    if mode not in MODES:
        raise HookError(f"PENROOT_NVIDIA_MODE={mode} is no way to find GPUs", hint="there are " + ", ".join(MODES))
    words = [word for word in named(visible) if word != "none"]
    if not host.exists("/proc/driver/nvidia") and not host.exists("/dev/nvidiactl"):
        # Other systems than servers have other drivers, which a specification describes.
        driver = nvidia.Driver(host, "", "")
        if words and mode != "native" and by_cdi(context, host, edits, driver, words, [], "auto"):
            return edits
        why, hint = nvidia.absence(host)
        if by_option(context) or asked(context) not in ("", "all", "none"):
            why = f" ({why})" if why else ""
            raise HookError(f"{origin(context, visible)}: {os.uname().nodename} has no NVIDIA driver{why}", hint=hint)
        # An image made for GPUs runs without them too, as it does elsewhere.
        (log.warn if why and words else log.debug)(f"98-nvidia: no NVIDIA driver on this node; {why}: {hint}")
        return edits
    capabilities = nvidia.capabilities(value(context, "NVIDIA_DRIVER_CAPABILITIES"))
    driver = nvidia.Driver.of(host, context.host)
    known = nvidia.gpus(host)
    selection = None
    if allocated:
        selection = of_slurm(context, known, host, allocated, driver)
        words = ["all"] if selection.every else nvidia.names(selection)
    if mode == "nvidia-container-cli":
        chosen = selection or nvidia.select(words, known, host, origin(context, visible), driver.nvml)
        words = ["all"] if chosen.every else nvidia.names(chosen)
        caps = nvidia.cap_nodes(host)
        nvidia.hide_others(edits, host, known, nvidia.nodes(chosen, caps), caps)
        edits.programs.append(cli_command(context, driver, words, capabilities))
        add_direct(context, host, edits, capabilities)
        return edits
    check_requirements(context, driver.version, known)
    if mode == "native" or visible == "none" or not by_cdi(context, host, edits, driver, words, known, mode):
        if selection is None:
            selection = nvidia.select(words, known, host, origin(context, visible), driver.nvml)
        if visible != "none":
            nvidia.add_nodes(edits, host, selection, known, capabilities)
        else:
            nvidia.hide_others(edits, host, known, set(), nvidia.cap_nodes(host))
        driver.add(edits, context, capabilities)
    if "compute" in capabilities:
        nvidia.add_compat(edits, context, driver.version, known)
    add_optional(context, host, driver, edits, capabilities)
    add_direct(context, host, edits, capabilities)
    return edits


def origin(context: Context, visible: str) -> str:
    from enroot_py.devices.edits import shown

    return shown(f"{'--device ' + KIND if by_option(context) else 'NVIDIA_VISIBLE_DEVICES'}={visible}")


def of_slurm(context: Context, known: list[GPU], host: Host, allocated: str, driver: Driver) -> Selection:
    """The GPUs of the step, of them those that the caller asks for; others that he asks for are reported.

    PENROOT_GPUS is set in the container where its tasks are told numbers that count others too.
    """
    step, counts_all = of_step(context, known, host, allocated, driver)
    selection = narrowed(context, known, host, allocated, driver, step)
    if counts_all and not selection.migs:
        context.environ["PENROOT_GPUS"] = ",".join(str(gpu.minor) for gpu in known if gpu in selection.gpus)
    return selection


def narrowed(
    context: Context, known: list[GPU], host: Host, allocated: str, driver: Driver, step: Selection
) -> Selection:
    """Of the step's GPUs those that the caller asks for."""
    from enroot_py.base import log
    from enroot_py.base.errors import HookError
    from enroot_py.devices import nvidia

    allocated = ",".join(str(gpu.minor) for gpu in step.gpus) if allocated == UNTOLD else allocated
    visible = by_option(context) or value(context, "NVIDIA_VISIBLE_DEVICES")  # of --env too
    if step.every or visible in ("", "all"):
        return step
    words = named(visible)
    try:
        chosen = nvidia.select(words, known, host, origin(context, visible), driver.nvml)
    except HookError as e:
        # A variable of another node, or of another day.
        log.warn(f"{e}: the step has {allocated}")
        return step
    caps = nvidia.cap_nodes(host)
    beyond = ", ".join(sorted(nvidia.nodes(chosen, caps) - nvidia.nodes(step, caps)))
    if not beyond:
        return chosen
    log.warn(f"{origin(context, visible)} names GPUs that are not of this step ({beyond}): it has {allocated}")
    return step


def of_step(context: Context, known: list[GPU], host: Host, allocated: str, driver: Driver) -> tuple[Selection, bool]:
    """What Slurm gives the tasks of this step on this node: all GPUs where it cannot be known.

    What of them is not the step's, the device cgroup keeps from it. And whether the tasks are told
    numbers that count all GPUs of the node, as they are without ConstrainDevices.
    """
    from enroot_py.base.errors import HookError
    from enroot_py.devices import nvidia

    everything = nvidia.Selection(tuple(known), every=True)
    masks = [word for word in context.host.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    numbers = [word for word in allocated.split(",") if word and word != UNTOLD]
    # "gres/gpu:…" since Slurm 23.11
    bound = allocated == UNTOLD or context.host.get("SLURMD_TRES_BIND", "").startswith(("gpu", "gres/gpu"))
    if any(mask.startswith("MIG-") for mask in masks):
        # Numbers of MIG devices are not those of nodes.
        try:
            mine = everything if bound else nvidia.select(masks, known, host, "CUDA_VISIBLE_DEVICES", driver.nvml)
        except HookError:
            mine = everything
        return mine, False
    own = numbers
    if bound:
        numbers = of_all_tasks(context, own)
    gpus = tuple(gpu for gpu in known if str(gpu.minor) in numbers)
    if not gpus or len(gpus) != len(numbers):
        return everything, False
    counted = [str(number) for number in range(len(gpus))]
    counts_all = any(mask.isdecimal() and mask not in counted for mask in masks)
    if bound and masks and masks == own and set(numbers) != set(counted):
        if masks == [str(sorted(map(int, numbers)).index(int(number))) for number in own]:
            return everything, False  # of 0 and 2 the first: that is its number either way
        counts_all = True
    if counts_all and "CUDA_VISIBLE_DEVICES" in context.environ:
        return everything, False  # somebody has said what it is inside, and the tasks are not told another
    return nvidia.Selection(gpus), counts_all


def of_all_tasks(context: Context, own: list[str]) -> list[str]:
    """The GPUs of all tasks, of which each is told its own where tasks are bound to GPUs; none where nobody says."""
    if context.host.get("SLURM_GPUS_ON_NODE") == str(len(own)):
        return own
    of_job = context.host.get("SLURM_JOB_GPUS", "").split(",")
    # Of the node on which the batch script runs.
    here = context.host.get("SLURM_JOB_NUM_NODES") == "1" and set(own) <= set(of_job)
    return of_job if here else []


def by_cdi(
    context: Context,
    host: Host,
    edits: Edits,
    driver: Driver,
    words: list[str],
    known: list[GPU],
    mode: str,
) -> bool:
    """Add the devices as a CDI specification describes them; False where none does and another way is open."""
    from enroot_py.devices import cdi

    if mode == "auto" and not any(host.list(directory) for directory in cdi.DIRECTORIES):
        return False
    from enroot_py.base import log
    from enroot_py.base.errors import HookError
    from enroot_py.devices import nvidia
    from enroot_py.devices.edits import shown

    specifications = cdi.Specifications(host, context.settings.cache_path)
    names = specifications.names(KIND)
    if "all" in words:
        words = ["all"] if "all" in names else names
    words = [nvidia.also_named(word, known, names) for word in words]
    missing = [word for word in words if word not in names]
    stale = "" if missing else specifications.stale(KIND, words)
    if not names or missing or stale:
        why = f"there is no device {KIND}={shown(missing[0])}" if missing else f"{stale} does not exist"
        if not names:
            why = f"there is no specification of {KIND}"
        why = "; ".join([why, *specifications.failures()])
        if mode == "cdi":
            raise HookError(f"CDI: {why}", hint="nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
        if stale and driver.version:
            log.warn(f"the CDI specification of {KIND} is out of date: {why}; the driver is used as it is found")
        return False
    folders = specifications.add(edits, KIND, words)
    nvidia.hide_others(edits, host, known, set(edits.nodes), nvidia.cap_nodes(host))
    driver.link(edits, folders)
    return True


def add_optional(context: Context, host: Host, driver: Driver, edits: Edits, capabilities: set[str]) -> None:
    """What a host may have besides: rights over MIG, and sockets of daemons."""
    for name, number in (("NVIDIA_MIG_CONFIG_DEVICES", 1), ("NVIDIA_MIG_MONITOR_DEVICES", 2)):
        if value(context, name):
            edits.node(host, f"/dev/nvidia-caps/nvidia-cap{number}")
    if "utility" in capabilities:
        for name in ("nvidia-persistenced", "nvidia-fabricmanager"):
            path = f"/var/run/{name}/socket"
            if not edits.file(host, path) and driver.tree is not host:
                edits.file(driver.tree, path)


def add_direct(context: Context, host: Host, edits: Edits, capabilities: set[str]) -> None:
    """GPUDirect, which nvidia-container-cli knows little of, and MPS."""
    if "compute" in capabilities:
        from enroot_py.devices import nvidia

        nvidia.add_direct_nodes(edits, host)
        edits.file(host, "/etc/cufile.json")
        pipes = os.path.normpath(context.host.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
        if pipes.strip("/") and pipes[0] == "/" and edits.file(host, pipes, writable=True):
            edits.environ.update({"CUDA_MPS_PIPE_DIRECTORY": pipes} if pipes != "/tmp/nvidia-mps" else {})


def requirements(context: Context) -> dict[str, str]:
    """NVIDIA_REQUIRE_*, unless NVIDIA_DISABLE_REQUIRE says that they do not count."""
    if value(context, "NVIDIA_DISABLE_REQUIRE") not in ("", "0", "false"):
        return {}
    names = {name for name in (*context.environ, *context.host) if name.startswith("NVIDIA_REQUIRE_")}
    return {name: value(context, name) for name in sorted(names)}


def check_requirements(context: Context, version: str, known: list[GPU]) -> None:
    if required := requirements(context):
        from enroot_py.devices import nvidia

        nvidia.check_requirements(required, version, known)


def cli_command(context: Context, driver: Driver, words: list[str], capabilities: set[str]) -> list[str]:
    """NVIDIA's own program, where a site insists on it, as nvidia-container-cli(1) takes its arguments."""
    command = ["nvidia-container-cli", "--user"]
    command += ["--debug=/dev/stderr"] if "NVIDIA_DEBUG_LOG" in context.host else []
    command += [f"--root={driver.tree.prefix}"] if driver.tree.prefix else []
    # Ubuntu's /sbin/ldconfig is a script that looks for this one.
    ldconfig = "/sbin/ldconfig.real" if os.path.exists("/sbin/ldconfig.real") else "/sbin/ldconfig"
    command += ["configure", "--no-cgroups", f"--ldconfig=@{ldconfig}"]
    command += [f"--device={','.join(words)}"] if words else []
    for name, option in (("NVIDIA_MIG_CONFIG_DEVICES", "mig-config"), ("NVIDIA_MIG_MONITOR_DEVICES", "mig-monitor")):
        command += [f"--{option}={value(context, name)}"] if value(context, name) else []
    command += [f"--{name}" for name in sorted(capabilities)]
    return command + [f"--require={text}" for text in requirements(context).values()]
