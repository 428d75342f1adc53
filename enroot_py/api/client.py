"""Start the launcher of the API process, send it requests, and raise its errors.

The API process is the program that uses enroot_py. A request is a packet on one socket, which all threads use, and a
conversation on a new socket. Threads share nothing else.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from enroot_py import LIBRARY
from enroot_py.api.messages import Conversation, encoded
from enroot_py.base import errors
from enroot_py.base.errors import ContainerError, PenrootError

# Search our dependencies first in penroot's directory, then where the API process searches.
_MAIN = """
import sys
sys.path.insert(0, {library!r})
import enroot_py
sys.path += {path}
from enroot_py.api import launcher
launcher.main({fd})
"""
_SHORT_BYTES = 1 << 15
_END_TIMEOUT_S = 30.0  # for the launcher to end all containers
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING}
_log = logging.getLogger("penroot")


class LauncherEnded(ContainerError):
    """The launcher was killed, which also ended its containers."""


class Launcher:
    """The launcher process of this process. Raises PenrootError if it cannot be started."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)  # of containers, programs and other requests
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [os.path.abspath(place) for place in sys.path if place]
        program = _MAIN.format(library=LIBRARY, path=path, fd=theirs.fileno())
        try:
            with theirs:
                # A separate session: Ctrl-C in the terminal reaches only the API process, which ends its containers.
                self._process = subprocess.Popen(
                    [sys.executable, "-IS", "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as e:
            self._socket.close()
            raise PenrootError(f"cannot start the launcher {sys.executable}: {e.strerror}") from e

    def is_alive(self) -> bool:
        """Return whether the launcher runs. The kernel closes the socket of a killed launcher at once."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return not poll.poll(0)

    def send(self, verb: str, *numbers: int, fds: Sequence[int] = ()) -> None:
        """Send a packet. Raises LauncherEnded."""
        try:
            socket.send_fds(self._socket, [" ".join((verb, *map(str, numbers))).encode()], fds)
        except OSError as e:
            raise _ended() from e

    def request(self, verb: str, *numbers: int, body: Sequence[Mapping[str, Any]] = (), fds: Sequence[int] = ()) -> Any:
        """Send a request with the messages ``body`` and return the answer. Raises PenrootError."""
        ours, theirs = socket.socketpair()
        with ours:
            conversation, result = Conversation(ours), None
            lines = b"".join(encoded(message) for message in body)
            try:
                with theirs:
                    # The launcher reads the messages after the packet. Send long messages after the packet too: before
                    # it, they would fill the socket, and sendall() would wait.
                    is_short = len(lines) <= _SHORT_BYTES
                    if is_short:
                        ours.sendall(lines)
                    self.send(verb, *numbers, fds=(theirs.fileno(), *fds))
                if not is_short:
                    ours.sendall(lines)
                for message in conversation.receive():
                    if "log" in message:
                        _log.log(_LEVELS.get(message["level"], logging.WARNING), "%s", message["log"])
                    elif "error" in message:
                        raise _error(message)
                    else:
                        result = message["ok"]
            except (OSError, json.JSONDecodeError) as e:
                raise _ended() from e
            if result is None and body:
                raise _ended()
            return result

    def close(self) -> None:
        """End the launcher, and wait until it has ended all containers."""
        self._socket.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def forget(self) -> None:
        """In a child of fork(2), close the socket of the launcher, and leave the launcher to the parent."""
        self._socket.close()
        self._process.returncode = 0


def _ended() -> LauncherEnded:
    hint = "it was killed (out of memory? see dmesg); the next container gets a new launcher"
    return LauncherEnded("the launcher of this process has ended, and its containers with it", hint=hint)


def _error(message: Mapping[str, Any]) -> PenrootError:
    kind = getattr(errors, message["kind"], PenrootError)
    error: PenrootError = kind(message["error"], hint=message["hint"])
    error.exit_code = message["exit_code"]
    return error


def surroundings() -> dict[str, Any]:
    """Return the environment and the working directory of this process, for a child of the launcher."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = "/"
    return {"environ": dict(os.environ), "cwd": cwd}


_current: Launcher | None = None
_lock = threading.Lock()


def launcher() -> Launcher:
    """Return the launcher of this process. Start one if none runs. Raises PenrootError."""
    global _current
    with _lock:
        if _current is not None and not _current.is_alive():
            _current.close()
            _current = None
        if _current is None:
            _current = Launcher()
        return _current


def _close() -> None:
    if _current is not None:
        _current.close()


def _forget() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.forget()
        _current = None


atexit.register(_close)
os.register_at_fork(after_in_child=_forget)
