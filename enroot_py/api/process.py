"""A program in a container, with the interface of subprocess.Popen."""

from __future__ import annotations

import asyncio
import io
import locale
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from enroot_py.api.messages import STATUS_BYTES
from enroot_py.base.errors import UsageError

# Start a program, and return its PID. Arguments: words, working directory, variables, and descriptors (the socket of
# the exit status, stdin, stdout, stderr).
Launch = Callable[[list[str], str, dict[str, str], Sequence[int]], int]
# Send a signal to the program of a Process, or with True to its process group.
Signal = Callable[["Process", int, bool], None]


class Process(subprocess.Popen[Any]):
    """A program that runs in a container.

    It has the attributes and methods of subprocess.Popen: ``stdin``, ``stdout``, ``stderr``, ``pid``, ``returncode``,
    ``poll()``, ``wait()``, ``communicate()``, ``send_signal()``, ``terminate()`` and ``kill()``. The program is not a
    child of this process, and has its own session. The end of the container kills the program.
    """

    def __init__(self, launch: Launch, send_signal: Signal, argv: Sequence[str], **options: Any) -> None:
        self._launch, self._send_signal = launch, send_signal
        self._waiting = threading.Lock()
        super().__init__(checked_argv(argv), **options)

    # Popen.__init__() creates the pipes, and calls this method, which asks the launcher instead of calling fork(2).
    def _execute_child(self, *arguments: Any) -> None:
        argv, cwd, env, handles = arguments[0], arguments[5], arguments[6], arguments[10:16]
        standard = [
            handle if handle != -1 else number for number, handle in enumerate((handles[0], handles[3], handles[5]))
        ]
        ours, theirs = socket.socketpair()
        self._status = ours
        try:
            with theirs:
                self.pid = self._launch(argv, cwd or "", env or {}, (theirs.fileno(), *standard))
        except BaseException as e:
            ours.close()
            if not isinstance(e, Exception):  # interrupted: the program may already run
                self._send_signal(self, signal.SIGKILL, True)
            raise
        self._child_created = True
        devnull = getattr(self, "_devnull", None)
        for theirs_end, ours_end in ((handles[0], handles[1]), (handles[3], handles[2]), (handles[5], handles[4])):
            if theirs_end != -1 and ours_end != -1 and theirs_end != devnull:
                os.close(theirs_end)
        if devnull is not None:
            os.close(devnull)
        self._closed_child_pipe_fds = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._await(0)

    def _wait(self, timeout: float | None) -> int:
        if self._await(timeout) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def _await(self, timeout: float | None) -> int | None:
        """Wait for the exit status. If the launcher was killed, the program was killed too."""
        if not self._waiting.acquire(timeout=-1 if timeout is None else timeout):
            return self.returncode  # another thread is waiting
        try:
            if self.returncode is None:
                self._status.settimeout(timeout)
                try:
                    data = self._status.recv(STATUS_BYTES)
                except (BlockingIOError, TimeoutError):
                    return None
                except OSError:
                    data = b""
                self._note(data)
        finally:
            self._waiting.release()
        return self.returncode

    def _note(self, data: bytes) -> None:
        self.returncode = int.from_bytes(data, sys.byteorder, signed=True) if data else -signal.SIGKILL
        self._status.close()

    def ask(self, number: int) -> None:
        """Send a signal to the program, through the process that waits for the program's end."""
        try:
            self._status.send(bytes((number,)))
        except OSError:
            return  # the program has ended

    def send_signal(self, sig: int) -> None:
        """Send a signal to the program, unless it has ended."""
        if self.poll() is None:
            self._send_signal(self, sig, False)

    def kill_group(self) -> None:
        """Kill the program and the processes that it has started, except those with their own sessions."""
        if self.poll() is None:
            self._send_signal(self, signal.SIGKILL, True)

    async def wait_async(self) -> int:
        """Wait for the exit status without blocking the event loop."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        if self.poll() is None:
            loop.add_reader(self._status.fileno(), ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._status.fileno())
        status = self.poll()
        assert status is not None
        return status


def checked_argv(argv: Sequence[str]) -> list[str]:
    """Return the words of a command. Raises UsageError for a single string, and for words that are not text."""
    if isinstance(argv, (str, bytes)) or not argv:
        raise UsageError(
            f"the command {argv!r} is not a list of words", hint="run(['ls', '-l']), or ['sh', '-c', TEXT]"
        )
    words = [os.fspath(word) for word in argv]
    if bad := next((word for word in words if not isinstance(word, str) or "\0" in word), None):
        raise UsageError(f"{bad!r} in the command is not text", hint="give strings without NUL")
    return words


def checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return ``env`` as a dict. Raises UsageError for names or values that no environment can hold."""
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise UsageError(f"{name!r}: {value!r} cannot be a variable", hint="env={'NAME': 'VALUE'}, both strings")
    return dict(env or {})


def finish(
    process: Process, input_data: Any, timeout: float | None, *, check: bool
) -> subprocess.CompletedProcess[Any]:
    """Return the result of a process as subprocess.run() does. When this returns or raises, the process has ended.

    Raises subprocess.TimeoutExpired, subprocess.CalledProcessError.
    """
    with process:
        try:
            out, err = process.communicate(input_data, timeout=timeout)
        except BaseException as e:
            process.kill_group()
            process.wait()
            if isinstance(e, subprocess.TimeoutExpired) and timeout is not None:
                e.timeout = timeout  # communicate() has replaced it by the remaining time
            raise
    return result(process, out, err, check=check)


def result(process: Process, out: Any, err: Any, *, check: bool) -> subprocess.CompletedProcess[Any]:
    """Return the result of a process that has ended. Raises subprocess.CalledProcessError."""
    done = subprocess.CompletedProcess(process.args, process.wait(), out, err)
    if check:
        done.check_returncode()
    return done


async def finish_async(
    process: Process, input_data: Any, timeout: float | None, *, check: bool, text: bool | None
) -> subprocess.CompletedProcess[Any]:
    """Do the same as finish(), without blocking the event loop. Cancellation ends the process.

    The pipes of ``process`` are binary. With ``text``, ``input_data`` and the output are strings.
    """
    if text and input_data is not None:
        input_data = input_data.encode(locale.getpreferredencoding(False))
    streams = (process.stdout, process.stderr)
    readers = [await _reader(stream) if stream else None for stream in streams]
    try:
        output = asyncio.gather(*(_content(reader) for reader in readers))
        work = asyncio.gather(_feed(process.stdin, input_data), output, process.wait_async())
        _, (out, err), _ = await asyncio.wait_for(work, timeout)
    except BaseException as e:
        process.kill_group()
        await asyncio.shield(process.wait_async())
        if isinstance(e, (TimeoutError, asyncio.TimeoutError)):
            raise subprocess.TimeoutExpired(process.args, timeout or 0) from None
        raise
    finally:
        for stream in (process.stdin, *streams):
            if stream:
                stream.close()
    if text:
        return result(process, _decoded(out), _decoded(err), check=check)
    return result(process, out, err, check=check)


def _decoded(output: bytes | None) -> str | None:
    return io.TextIOWrapper(io.BytesIO(output)).read() if output is not None else None


async def _reader(stream: IO[bytes]) -> asyncio.StreamReader:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    duplicate = os.fdopen(os.dup(stream.fileno()), "rb", 0)  # closed by the transport
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), duplicate)
    return reader


async def _content(reader: asyncio.StreamReader | None) -> bytes | None:
    return await reader.read() if reader else None


async def _feed(stream: IO[bytes] | None, data: bytes | None) -> None:
    """Write ``data`` to the program's stdin, and close it."""
    if stream is None:
        return
    loop = asyncio.get_running_loop()
    os.set_blocking(stream.fileno(), False)
    rest = memoryview(data or b"")
    try:
        while rest:
            try:
                rest = rest[os.write(stream.fileno(), rest) :]
            except BlockingIOError:
                ready = asyncio.Event()
                loop.add_writer(stream.fileno(), ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_writer(stream.fileno())
    except BrokenPipeError:
        pass  # the program has ended, or has closed its stdin
    stream.close()
