"""The helper process, which the SPANK plugin executes. The helper makes and holds the container of a step.

``main`` is entered with a socket as fd 3; c_shims/spank/README.md has the protocol. Each process serves one verb:

check   at submit
step    during a step on a node
ahead   like step, but started before the first task
finish  after the last task, if the helper of the step was killed
epilog  after a job that left containers or other files
"""

from __future__ import annotations

import _signal
import _socket
import gc
import os
import select
import sys

from enroot_py import __version__
from enroot_py.base import log, operations, signals
from enroot_py.base.errors import PenrootError, RefusedError
from enroot_py.base.features import PARTS, parts
from pyxis_py.request.channel import CONTROL, SOCKET, Channel, numbers, tell, unexpected
from pyxis_py.request.job import PROTOCOL, REFUSED, Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyxis_py.request.options import Request
    from pyxis_py.submit.submission import Wish

_OFFER_TIMEOUT_S = 3.0
# Modules that only some steps need, in the order of their use.
_LATER = (
    "pyxis_py.node.service", "enroot_py.store.crash", "pwd", "grp",
    "enroot_py.registry.reference", "enroot_py.store.pull", "enroot_py.store.format",
    "enroot_py.store.squashfs", "enroot_py.runtime.squashfuse",
)  # fmt: skip


def main() -> None:
    """Serve the verb of the command line; exit with 0 after an answer."""
    if sys.argv[1] == "ahead":
        _await_task()
    channel = Channel(_socket.socket(fileno=SOCKET))
    log.sink = channel.log
    try:
        job = Job(channel.receive())
        if job.protocol != PROTOCOL:
            raise PenrootError(
                f"the plugin does not match penroot {__version__}: it has protocol {job.protocol}, not {PROTOCOL}",
                hint="systemctl restart slurmd; if you built the plugin yourself: pyxis-py install",
            )
        # The job's variables choose logins, proxies and credential helpers. PATH and LC_ALL keep the plugin's values.
        os.environ.update({**job.host(), **os.environ})
        serve = _VERBS.get(sys.argv[1])
        if serve is None:
            raise PenrootError(
                f"the plugin asks for {sys.argv[1]!r}", hint="install the plugin of this package: pyxis-py install"
            )
        serve(job, channel)
    except PenrootError as e:
        channel.fail(e)
    except OSError as e:
        channel.fail(unexpected(e))
    # Not sys.exit: srun waits for this process, and nothing needs cleanup.
    os._exit(0)


def check(job: Job, channel: Channel) -> None:
    """Check a submission; then resolve the tag for all nodes while srun waits for its allocation."""
    from pyxis_py.submit import submission

    request, wish = submission.check(job)
    answer = [("ok", ""), *[("verbose", "")] * submission.is_verbose(job)]
    for at_submit in parts("at_submit"):
        answer += at_submit(job, request)
    if wish is None:
        channel.send(answer)
        return
    answer.append(("later", "" if submission.learns_later(job) else "wait"))
    channel.send(answer)
    log.sink = log.silent
    if not isinstance(wish, submission.Wish):
        wish.serve(channel)
        return
    digest = _resolved(job, request, wish, channel) if wish.resolve and not wish.waits else wish.digest
    allocation = Job(channel.receive())
    has_several_nodes = allocation.numbers.get("nodes", 0) != 1
    offer = _offer(job, wish, digest, allocation) if has_several_nodes and (digest or wish.waits) else None
    if wish.waits and has_several_nodes and offer is None:  # no node can ask this process for the digest
        digest = _resolved(job, request, wish, channel)
    sends_digest = digest and not wish.image.digest
    answer = [("ok", ""), *([("resolved", f"{wish.image.uri()} {digest}")] if sends_digest else [])]
    if offer is None:
        channel.send(answer)
        return
    channel.send([*answer, ("swarm", offer.invitation)])
    offer.serve(channel)


def _resolved(job: Job, request: Request, wish: Wish, channel: Channel) -> str:
    """Resolve a tag for all nodes: return its digest, "" if the registry does not answer here, or REFUSED."""
    from pyxis_py.submit import submission

    digest = ""
    try:
        digest = submission.resolve(job, wish.image)
    except RefusedError as e:
        if not request.name:  # with a name, a node may have the container and need no image
            digest = REFUSED
            why = str(e).removeprefix(f"{request.image}: ")
            line = f"failed to import docker image: {request.image}: {why} ({request.origins['image']})"
            channel.log("ERROR", line)
            if e.hint:
                channel.log("ERROR", e.hint)
    # Stop the timer of resolve(): it would end this process while srun waits in the queue.
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    return digest


def _offer(job: Job, wish: Wish, digest: str, allocation: Job) -> Any:
    """Return a tracker for several nodes, or None. Without a digest, the tracker resolves the tag when a node asks."""
    if not wish.shares or allocation.numbers.get("nodes", 0) < 2 or digest == REFUSED:
        return None
    _signal.setitimer(_signal.ITIMER_REAL, _OFFER_TIMEOUT_S)  # an offer reads the store, whose disk may hang
    offers = (offer(job, wish.image, digest, allocation) for offer in parts("offer"))
    offer = next(filter(None, offers), None)
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    return offer


def hold(job: Job, channel: Channel) -> None:
    """Make the step's container, answer the first task, then admit the other tasks until the step ends."""
    from pyxis_py.node.container import Container
    from pyxis_py.node.held import Held
    from pyxis_py.node.step import Step

    _signal.signal(_signal.SIGTERM, _cancel)
    step = Step(job)
    if not step.request.wants_container:
        channel.send((("ok", ""),))
        return
    with step.operation() as event:
        container = Container(step)
        container.begin()
        # If two steps use the same name, the first makes the container and the second finds it.
        with step.running.lock(step.name):
            operations.phase("wait")
            try:
                held = Held(container, _load_service)
                if held.joined:
                    from pyxis_py.node import attached

                    held.added_mounts = attached.prepare(held)
                    operations.phase("attach")
                listener = step.running.listen(step.name, job.step)
            except BaseException:
                step.running.forget(step.name, job.step)
                raise
    if step.plugin.show_image and job.is_batch and container.used:
        from pyxis_py.node import comment

        comment.add(job, container.used)
    if event is not None and job.is_verbose:
        tell(f"{job.node}: the container took {event.words()}")
    # Ignore signals from now on: a program that writes a checkpoint on SIGTERM still needs its root file system.
    for number in signals.UNHEARD:
        _signal.signal(number, _signal.SIG_IGN)
    held.answer(channel, job)
    held.reap()  # after the answer, for which the first task waits
    log.sink = log.silent
    gc.freeze()  # otherwise the collector would scan all loaded modules while the first program starts
    gc.enable()
    from pyxis_py.node.service import Service

    Service(held, listener).serve()


def finish(job: Job, channel: Channel) -> None:
    """Finish a step whose helper was killed."""
    _own_group()
    from pyxis_py.node import leave
    from pyxis_py.node.container import Container
    from pyxis_py.node.step import Step

    leave.finish(Container(Step(job)), **job.ending)
    channel.send((("ok", ""),))


def epilog(job: Job, channel: Channel) -> None:
    """Remove leftovers of a job."""
    _own_group()
    from pyxis_py.node import leave

    leave.clean_up(job)
    channel.send((("ok", ""),))


def _load_service() -> None:
    """Import the next module early, before a program of the step needs this processor."""
    from pyxis_py.node import service  # noqa: F401


def _await_task() -> None:
    """Import the modules of a step, and wait until the first task sends its socket or slurmstepd ends.

    With an MPI plugin, slurmstepd first starts its MPI server, which gives the imports about 40 ms.
    """
    from pyxis_py.node import container, held, step  # noqa: F401

    for name in PARTS:
        tuple(parts(name))

    control = _socket.socket(fileno=CONTROL)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    for module in _LATER:
        if poll.poll(0):
            break
        __import__(module)
    _, controls, _, _ = control.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)
    control.detach()
    if not controls:
        os._exit(0)
    (request_fd,) = numbers(controls[0][2])
    os.dup2(request_fd, SOCKET, inheritable=False)
    os.close(request_fd)
    _own_group()  # this process is in the step's cgroups now


_VERBS = {"check": check, "step": hold, "ahead": hold, "finish": finish, "epilog": epilog}


def _own_group() -> None:
    """Restore the real group ID. The plugin has changed the ID to prevent tracing: helper.c."""
    os.setresgid(os.getegid(), os.getegid(), os.getegid())


def _cancel(number: int, frame: object) -> None:
    raise PenrootError("cancelled while the container was being set up")
