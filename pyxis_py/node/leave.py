"""Save and remove containers at the end of a step, and remove leftovers at the end of a job."""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.errors import PenrootError
from enroot_py.base.features import parts
from enroot_py.store import claims, containers
from pyxis_py.node import owned
from pyxis_py.node.image import site_importer
from pyxis_py.node.running import BusyError, Notes, RunningContainers
from pyxis_py.node.save import Save
from pyxis_py.request import settings as plugin_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyxis_py.node.container import Container
    from pyxis_py.request.job import Job

_LOCK_TIMEOUT_S = 2  # how long the end of a step or a job waits for another step
_MAX_PRINTED_FAILURES = 10  # by an epilog


def save(container: Container) -> None:
    """Save the container, before the last task of a step ends. finish() does not save it again. Raises PenrootError."""
    container.save_attempted = True
    step = container.step
    if not container.goes_with_steps:
        Save(step).write(container.name)
        return
    with step.running.lock(step.name):  # no other step may remove the container during the save
        Save(step).write(container.name)


def finish(container: Container, *, failed: bool, killed: bool) -> None:
    """After the last task: save the container and remove what the step leaves behind. Raises PenrootError.

    With ``failed``, some task of the node has not entered the container, so save nothing. With ``killed``, there is no
    time for a save.
    """
    step = container.step
    if not step.request.wants_container:
        return
    if not container.goes_with_steps:
        step.running.forget(step.name, step.job.step)
        _leave(container, failed, killed)
        return
    # Other steps may have joined this container by its name JOB.STEP. The last step removes it, but not during a save.
    saves = step.request.save and not container.save_attempted and not failed and not killed
    try:
        lock = step.running.lock(step.name, None if saves else _LOCK_TIMEOUT_S)
    except BusyError as e:
        # The holder of the lock may be suspended with its job. The epilog finds the container in the note of this step.
        log.warn(f"the container {step.name} will be removed at the end of the job: {e}")
        step.running.forget(step.name, step.job.step)
        return
    except PenrootError as e:
        log.warn(f"{e}; the step ends without this lock, as no other step can have joined the container")
        _leave(container, failed, killed)
        return
    with lock:
        try:
            _leave(container, failed, killed)
        finally:
            step.running.forget(step.name, step.job.step)


def _leave(container: Container, failed: bool, killed: bool) -> None:
    step = container.step
    try:
        if step.request.save and not container.save_attempted and not failed:
            late = Save(step)
            if killed:
                hint = "let the last task exit by itself: only then is the container saved"
                raise late.error("the container is not saved: its step was killed", hint)
            late.write(container.name)
    finally:
        if importer := site_importer(step):
            importer.release()
        goes = step.leaves_a_directory and container.goes_with_steps
        if goes and not step.running.others(step.name, step.job.step):
            owned.remove(container.name, step.settings)
        if failed and step.request.image:
            from enroot_py.store.store import Store

            Store(step.settings.cache_path).sweep()  # files of a killed import
        if container.directory_id() is None:
            claims.forget(container.name, step.settings.data_path, made=False)
        step.notes.erase(step.own_note)


def clean_up(job: Job) -> None:
    """After a job, remove its containers. Raises PenrootError if something could not be removed.

    At the end of a job's extern step, other steps may still be ending: the containers of these steps stay. First take
    the names from all containers, then delete the containers: this process may be killed during the slow deletion.
    """
    from enroot_py.base import making

    plugin = plugin_settings.load(job.arguments)
    steps = RunningContainers(plugin.runtime_path, job.uid)
    notes = Notes(plugin.runtime_path, job.uid)
    failures = _Failures()
    trash: list[containers.Trash] = []
    data_paths: set[str] = set()
    with failures:
        if job.context == "epilog":
            steps.forget_job(job.jobid)
        else:
            steps.await_job(job.jobid, _LOCK_TIMEOUT_S)
    for note in notes.of_job(job.jobid):
        with failures:
            path = notes.directory(note)
            of_job, _, step = note.partition(".")
            if of_job == f"pyxis_{job.jobid}" and not step.isdecimal():
                continue  # written by a feature, whose clean_up() runs below
            if path.startswith("/"):
                data_path, container = os.path.split(path)
                data_paths.add(data_path)
                name = container.removesuffix(f"@{os.uname().nodename}")
                users = steps.others(name, "")
                if any(step.startswith(f"{job.jobid}.") for step in users):
                    continue
                if not users:  # otherwise another job runs the container, and has a note
                    nameless = containers.set_aside(container, data_path)
                    claims.forget(container, data_path, made=nameless is not None)
                    trash += [nameless] if nameless else []
            notes.erase(note)
    for each in trash:
        with failures:
            each.delete()
    for data_path in data_paths:
        with failures:
            making.sweep(data_path)
    for clean_up_of_feature in parts("clean_up"):
        with failures:
            clean_up_of_feature(job, notes)
    if failures.lines:
        raise PenrootError("\n".join(failures.lines[:_MAX_PRINTED_FAILURES]))


class _Failures:
    """Collect the errors of independent actions. Each action runs in a ``with``, even after the failure of another."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, (PenrootError, OSError)):
            self.lines.append(str(error))
            return True
        return False
