"""Move a starting container into a new control group with limits.

Normally systemd makes the group, as a scope unit. In a Slurm job, a scope would move the process out of the job's
group. So in a job, or without systemd, this module makes the group itself, within a group that is delegated to the
user. Sources: cgroups(7), admin-guide/cgroup-v2, systemd-run(1).
"""

from __future__ import annotations

import os
import sys

from enroot_py.base import cgroups
from enroot_py.base.errors import ContainerError
from enroot_py.features.limits.settings import SETTINGS, LimitSettings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from enroot_py.config.settings import Settings

_SYSTEMD_RUN = "/usr/bin/systemd-run"
_PERIOD_US = 100_000  # the period in cpu.max
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PREFIX = "penroot-"


class _Limit:
    """A limit: ``value`` for the file CONTROLLER.max of a control group, and ``properties`` for a systemd unit."""

    __slots__ = ("controller", "value", "properties")

    def __init__(self, controller: str, value: str, *properties: str) -> None:
        self.controller, self.value, self.properties = controller, value, properties


def prepare(settings: Settings) -> None:
    """Move this process into a control group with the limits in the settings. Without limits, do nothing.

    If systemd makes the group, execute this command again by systemd-run. Raises ContainerError.
    """
    limits = _limits(LimitSettings(settings))
    if not limits:
        return
    origin = next(settings.origin(row) for row in SETTINGS.values() if settings.text(row) not in ("", "0"))
    group = _own_group()
    if group and os.path.basename(group).startswith(f"{_PREFIX}{os.getpid()}-"):  # second execution, in the scope
        _check(group, limits, origin)
        return
    is_in_job = "SLURM_JOB_ID" in os.environ
    if group and not is_in_job and (manager := _manager()):
        _execute_again(manager, limits)
    parent = _delegated(group, {limit.controller for limit in limits}, is_in_job=is_in_job) if group else ""
    if not parent:
        hint = "start it in a login session of systemd, or let root run: loginctl enable-linger USER"
        hint = "limit the step instead: srun --mem, --cpus-per-task" if is_in_job else hint
        raise ContainerError(f"{origin}: no permission to make control groups on {os.uname().nodename}", hint=hint)
    _create(parent, limits, origin)


def _limits(settings: LimitSettings) -> list[_Limit]:
    limits = []
    if memory := settings.limit_memory // _PAGE_BYTES * _PAGE_BYTES:  # round down to pages, as the kernel does
        limits.append(_Limit("memory", str(memory), f"MemoryMax={memory}", "MemorySwapMax=0"))
    if cpus := settings.limit_cpus:
        limits.append(_Limit("cpu", f"{round(cpus * _PERIOD_US)} {_PERIOD_US}", f"CPUQuota={cpus * 100:g}%"))
    if pids := settings.limit_pids:
        limits.append(_Limit("pids", str(pids), f"TasksMax={pids}"))
    return limits


def _own_group() -> str:
    """Return the directory of this process's control group of version 2, or "" if there is none."""
    return next((mount + path for mount, path, is_v2 in cgroups.hierarchies("self", "") if is_v2), "")


def _manager() -> list[str]:
    """Return the option that selects the user's service manager or, for root, the system's. Return [] if none runs."""
    uid = os.geteuid()
    directory = "/run" if uid == 0 else os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    if not os.path.exists(f"{directory}/systemd/private") or not os.access(_SYSTEMD_RUN, os.X_OK):
        return []
    return ["--system" if uid == 0 else "--user"]


def _execute_again(manager: list[str], limits: list[_Limit]) -> NoReturn:
    """Execute this command again, in a scope. The process keeps its PID, descriptors and environment."""
    unit = f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    words = [_SYSTEMD_RUN, *manager, "--scope", "--quiet", "--collect", f"--unit={unit}"]
    words += [f"--property={text}" for limit in limits for text in limit.properties]
    environ = {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}", **os.environ}
    os.execve(words[0], [*words, "--", sys.executable, *sys.orig_argv[1:]], environ)


def _check(group: str, limits: list[_Limit], origin: str) -> None:
    """Raise ContainerError for a limit that systemd did not set: the controller is not delegated to the user."""
    for limit in limits:
        if _read(f"{group}/{limit.controller}.max").split() != limit.value.split():
            hint = f"add {limit.controller} to Delegate= of user@.service: systemctl edit user@.service"
            raise ContainerError(f"{origin}: systemd does not limit {limit.controller} for users", hint=hint)


def _delegated(group: str, controllers: set[str], *, is_in_job: bool) -> str:
    """Return the nearest group above ``group`` in which the user may make groups with ``controllers``, or "".

    For root in a job, return "": root may write to groups above the job's group too, and so could leave the job.
    """
    if is_in_job and os.geteuid() == 0:
        return ""
    while (group := os.path.dirname(group)) != "/":
        enabled = _read(f"{group}/cgroup.subtree_control").split()
        if controllers <= {*enabled} and os.access(group, os.W_OK) and os.access(f"{group}/cgroup.procs", os.W_OK):
            return group
    return ""


def _create(parent: str, limits: list[_Limit], origin: str) -> None:
    """Make a group with the limits and enter it. Remove the groups of ended containers."""
    group = f"{parent}/{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    try:
        for name in os.listdir(parent):
            if name.startswith(_PREFIX):
                _remove(f"{parent}/{name}")
        os.mkdir(group)
        for limit in limits:
            _write(f"{group}/{limit.controller}.max", limit.value)
        if os.path.exists(f"{group}/memory.swap.max"):
            _write(f"{group}/memory.swap.max", "0")
        _write(f"{group}/cgroup.procs", "0")  # this process
    except OSError as e:
        _remove(group)
        raise ContainerError(f"{origin}: cannot make the control group {group}: {e.strerror}") from e


def _remove(group: str) -> None:
    try:
        os.rmdir(group)
    except OSError:  # a container is running in the group, or the group does not exist
        return


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
