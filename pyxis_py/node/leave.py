"""The end of a step: its container is saved, and removed if it goes with its steps. And the end of a job.

In a container that goes with its steps a file says which boot of which node has made it.
"""

from __future__ import annotations

import errno
import os

from enroot_py.base import linux, log
from enroot_py.base.errors import ImageError, PenrootError
from enroot_py.base.fds import Fd
from enroot_py.base.features import parts
from enroot_py.store import claims, containers, records
from pyxis_py.node.running import BusyError, Notes, RunningContainers
from pyxis_py.request import settings as plugin_settings
from pyxis_py.request.channel import tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.config.settings import Settings
    from pyxis_py.node.step import Step
    from pyxis_py.request.job import Job

_MARK = ".step"
_NAME_MAX = 255  # bytes: limits.h
_PATIENCE = 2  # seconds that the end of a step, or job, waits for another step
_MOST = 10  # failures of an epilog that are printed


def mark(step: Step) -> None:
    """Let the container of a step go with its steps. Raises OSError."""
    with open(f"{step.directory}/{_MARK}", "w") as f:
        f.write(f"{step.job.node} {linux.boot_id()}\n")


def maker(name: str, settings: Settings) -> list[str]:
    """The node and the boot that made a container which goes with its steps; of another one nothing. Raises OSError."""
    container = f"{settings.data_path}/{name}"
    if records.of(container) is None:
        return []  # its root may hold a file of that name
    return records.text(f"{container}/{_MARK}").split()


def sweep(step: Step) -> None:
    """Remove what steps of this node have left that a reboot ended: nothing else knows of them then."""
    for name in containers.names(step.settings):
        jobid, _, stepid = name.removeprefix("pyxis_").partition("@")[0].rpartition("_")[2].partition(".")
        if not (name.startswith("pyxis_") and jobid.isdecimal() and stepid.isdecimal()):
            continue
        try:
            node, boot = maker(name, step.settings)
        except (OSError, ValueError):
            continue  # another user's idea of a name, or removed in this moment
        if node == step.job.node and boot != linux.boot_id():
            containers.remove_if_there(name, step.settings)


def remove(name: str, settings: Settings) -> None:
    """Delete a container of a step, and what was killed while it made or deleted one. Raises PenrootError."""
    containers.remove_if_there(name, settings)
    containers.sweep(settings)


def save(step: Step) -> None:
    """Save the container for the last task of a step, once. Raises PenrootError."""
    step.save_attempted = True
    if not step.goes_with_steps:
        Save(step).write()
        return
    with step.running.lock(step.name):  # nobody removes it meanwhile
        Save(step).write()


def finish(step: Step, *, failed: bool, killed: bool) -> None:
    """After the last task: save the container and remove what the step leaves behind. Raises PenrootError.

    ``failed``: not every task of the node has entered, so there is nothing to save. ``killed``: there is no time
    to save it.
    """
    if not step.request.wants_container:
        return
    if not step.goes_with_steps:
        step.running.forget(step.name, step.job.step)
        _leave(step, failed, killed)
        return
    # Others may have attached to it by JOB.STEP: the last one removes it, and not while it is being saved.
    saves = step.request.save and not step.save_attempted and not failed and not killed
    try:
        lock = step.running.lock(step.name, None if saves else _PATIENCE)
    except BusyError as e:
        # Whoever has it may be suspended with its job: the epilog removes the container, which is noted.
        log.warn(f"the container {step.name} is left to the end of the job: {e}")
        step.running.forget(step.name, step.job.step)
        return
    except PenrootError as e:
        log.warn(f"{e}: no other step can have joined this container")
        _leave(step, failed, killed)
        return
    with lock:
        try:
            _leave(step, failed, killed)
        finally:
            step.running.forget(step.name, step.job.step)


def _leave(step: Step, failed: bool, killed: bool) -> None:
    try:
        if step.request.save and not step.save_attempted and not failed:
            late = Save(step)
            if killed:
                hint = "it is saved when the last task ends by itself"
                raise late.error("the container is not saved: its step was killed", hint)
            late.write()
    finally:
        if importer := step.importer:
            importer.release()
        if step.leaves_a_directory and step.goes_with_steps and not step.running.others(step.name, step.job.step):
            remove(step.container, step.settings)
        if failed and step.request.image:
            from enroot_py.store.store import Store

            Store(step.settings.cache_path).sweep()  # of an import that was killed
        if step.directory_id() is None:
            claims.forget(step.container, step.settings.data_path, made=False)
        step.notes.erase(step.own_note)


class Save:
    """--container-save: the file to which the container of a step goes at its end."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.asked = step.request.save or ""
        self.file = os.path.join(step.job.cwd or "/", self.asked)

    def error(self, why: str, hint: str) -> ImageError:
        return ImageError(f"--container-save={self.asked}: {why}", hint=hint)

    def check(self) -> None:
        """Before the container is made: raise ImageError or ConfigError where it could not be saved."""
        from enroot_py.base import filesystems, memory
        from enroot_py.store import mksquashfs

        try:
            directory, name = os.path.split(mksquashfs.destination(self.file))
        except ImageError as wrong:
            raise self.error(str(wrong), "name a file of your own") from wrong
        if not os.path.isdir(directory):
            raise self.error(f"no such directory: {directory}", f"it must be there on the node {self.step.job.node}")
        if not os.access(directory, os.W_OK | os.X_OK):
            why = f"the directory is not writable for you: {directory}"
            raise self.error(why, "save to a directory of your own")
        if len(os.fsencode(name)) > _NAME_MAX:
            raise self.error(f"the name has more than {_NAME_MAX} bytes", "give a shorter name")
        if e := _try_to_write(directory):
            raise self.error(f"{directory}: {e.strerror}", filesystems.way_out(e, directory))
        if refused := memory.refusal():
            raise self.error(*refused)
        mksquashfs.check_options(self.step.settings)

    def write(self) -> None:
        """Write the file. Raises ImageError."""
        step = self.step
        try:
            containers.export(step.container, self.file, step.settings.replace("option", force_override=True))
        except PenrootError as e:
            raise self.error(f"the container is not saved: {e}", e.hint) from e
        tell(f"exported container {step.container} to {self.asked}")
        # Slurm goes to /tmp where the directory of the job is missing on a node.
        submitted = step.job.environ.get("PWD", "")
        elsewhere = submitted and os.path.realpath(submitted) != os.path.realpath(step.job.cwd)
        if elsewhere and not self.asked.startswith("/"):
            log.warn(f"--container-save={self.asked} is {self.file}")


def _try_to_write(directory: str) -> OSError | None:
    """Why not a megabyte can be written there: the disk is full, or a quota used up."""
    try:
        with Fd(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)) as fd:
            os.posix_fallocate(fd, 0, 1 << 20)
    except OSError as e:
        return e if e.errno in (errno.ENOSPC, errno.EDQUOT) else None  # NFS has no O_TMPFILE, open(2)
    return None


def clean_up(job: Job) -> None:
    """After a job: remove the containers that were to go with it. Raises PenrootError where some of it is left.

    At the end of its extern step Slurm may just have killed others: what they still hold is left to them. What takes
    time comes last: if this process is killed then, what is left of a container has no name any more.
    """
    from enroot_py.base import making

    plugin = plugin_settings.load(job.arguments)
    steps = RunningContainers(plugin.runtime_path, job.uid)
    notes = Notes(plugin.runtime_path, job.uid)
    failures = _Failures()
    trash: list[containers.Trash] = []
    places: set[str] = set()
    with failures:
        if job.context == "epilog":
            steps.forget_job(job.jobid)
        else:
            steps.await_job(job.jobid, _PATIENCE)
    for note in notes.of_job(job.jobid):
        with failures:
            path = notes.directory(note)
            of_job, _, step = note.partition(".")
            if of_job == f"pyxis_{job.jobid}" and not step.isdecimal():
                continue  # of a feature
            if path.startswith("/"):
                data_path, container = os.path.split(path)
                places.add(data_path)
                name = container.removesuffix(f"@{os.uname().nodename}")
                users = steps.others(name, "")
                if any(step.startswith(f"{job.jobid}.") for step in users):
                    continue
                if not users:  # else another job, which has noted it too
                    nameless = containers.set_aside(container, data_path)
                    claims.forget(container, data_path, made=nameless is not None)
                    trash += [nameless] if nameless else []
            notes.erase(note)
    for each in trash:
        with failures:
            each.delete()
    for data_path in places:
        with failures:
            making.sweep(data_path)
    for clean_up_of_feature in parts("clean_up"):
        with failures:
            clean_up_of_feature(job, notes)
    if failures.lines:
        raise PenrootError("\n".join(failures.lines[:_MOST]))


class _Failures:
    """Collects failures: of several things in a ``with`` each, one is done whether the others fail or not."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, (PenrootError, OSError)):
            self.lines.append(str(error))
            return True
        return False
