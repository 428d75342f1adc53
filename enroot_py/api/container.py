"""Containers for programs in Python: enroot_py.pull(), enroot_py.Container and enroot_py.run()."""

from __future__ import annotations

import asyncio
import os
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Union

from enroot_py.api import client
from enroot_py.api.process import Process, checked_env, finish, finish_async
from enroot_py.base.errors import ContainerError, UsageError

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
Stream = Union[int, "IO[Any]", None]
Path = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True)
class Image:
    """An image in this user's store, returned by pull().

    Attributes:
        reference: the pulled name, such as ``docker://ubuntu:24.04``.
        digest: digest of the manifest, ``sha256:`` and 64 hexadecimal digits.
        config: the ``config`` object of the OCI image config: Env, Entrypoint, Cmd, WorkingDir, Labels and so on.
        layers: a mapping for each layer, lowest first: digest, size in bytes, diff_id and mediaType.
        size: total size of the compressed layers in bytes.
    """

    reference: str
    digest: str
    config: Mapping[str, Any] = field(compare=False, repr=False)
    layers: tuple[Mapping[str, Any], ...] = field(compare=False, repr=False)
    size: int = field(compare=False)


def pull(reference: str, *, arch: str | None = None) -> Image:
    """Pull an image into the store and return it. A stored image costs one request to the registry.

    Args:
        reference: a URI as for ``penroot import``, such as ``docker://ubuntu:24.04`` or ``dockerd://IMAGE``.
        arch: architecture as in Debian or OCI, such as ``amd64`` (default: this machine's).

    Raises:
        enroot_py.PenrootError: ImageReferenceError, RegistryError, ImageError, PolicyError or ConfigError.
    """
    launcher = client.launcher()
    number = next(launcher.numbers)
    body = {"act": "pull", "arguments": {"uri": reference, "arch": arch}, **client.surroundings()}
    with _Ending(launcher, number):
        pulled = launcher.request("act", number, body=[body])
    return Image(**{**pulled, "layers": tuple(pulled["layers"])})


class Container:
    """A running container. It ends with the ``with`` block, with close(), or with this process.

    Process 1 of the container is a program of penroot. Your programs join the container. The end of the container kills
    all its processes and leaves no mount or directory behind. Threads may share a container.

    Args:
        image: an Image, a reference such as ``docker://ubuntu:24.04``, the path of a squashfs image, or the name of a
            container that ``penroot create`` made. The container never changes this image.
        mounts: ``SOURCE:TARGET[:OPTIONS]``, as for ``penroot start --mount``.
        env: variables for all programs. They override the image's variables.
        writable: keep changes in a directory below ENROOT_DATA_PATH until the container ends. With False (default),
            the root file system is read-only.
        root: let programs be root inside the container (default: ENROOT_REMAP_ROOT).
        net: the network, as for ``penroot start --net``: none, host, pasta, proxy=SOCKET (default: ENROOT_UNSHARE_NET).
        publish: host ports for the container with net="pasta", as for ``penroot start --publish``.

    The settings are those of ``penroot start``, from files and from ENROOT_* in ``os.environ``. A container always has
    a PID namespace. It does not run the image's entrypoint.

    Raises:
        enroot_py.PenrootError: a subclass for the cause, such as ImageError, MountError, ContainerError.
    """

    def __init__(
        self,
        image: Image | Path,
        *,
        mounts: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        writable: bool = False,
        root: bool | None = None,
        net: str | None = None,
        publish: Sequence[str] = (),
    ) -> None:
        self._launcher = client.launcher()
        self._number = next(self._launcher.numbers)
        self._end = weakref.finalize(self, _end, self._launcher, self._number)
        body = _described(image, mounts, env, writable=writable, root=root, net=net, publish=publish)
        try:
            facts = self._launcher.request("start", self._number, body=[body])
        except BaseException:
            self._end()
            raise
        self._confinement, self._directories, self._file = facts["confinement"], facts["directories"], facts["image"]

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Return whether close() was called."""
        return not self._end.alive

    def close(self) -> None:
        """End the container, and return when it is gone. Further calls do nothing."""
        self._end()

    def popen(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        text: bool | None = None,
        encoding: str | None = None,
        errors: str | None = None,
        bufsize: int = -1,
    ) -> Process:
        """Start a program in the container. By default it uses stdin, stdout and stderr of this process.

        Args:
            argv: the words of the command; the first word is looked up in the container's PATH.
            cwd: working directory in the container (default: the image's).
            env: variables, in addition to the container's.
            stdin, stdout, stderr, text, encoding, errors, bufsize: as for subprocess.Popen.

        Raises:
            enroot_py.CommandError: the program is missing (``exit_code`` 127) or cannot be executed (126).
            enroot_py.ContainerError: the container has ended, or the directory ``cwd`` is missing.
        """
        self._check_open()
        launcher, number, program = self._launcher, self._number, next(self._launcher.numbers)

        def launch(words: list[str], workdir: str, variables: dict[str, str], fds: Sequence[int]) -> int:
            body = {"argv": words, "workdir": workdir, "env": variables, "confinement": self._confinement}
            pid: int = launcher.request("join", number, program, body=[body], fds=fds)
            return pid

        def send_signal(_: Process, signal: int, group: bool) -> None:
            launcher.send("signal", program, signal, int(group))

        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "bufsize": bufsize}
        return Process(
            launch,
            send_signal,
            argv,
            cwd=os.fspath(cwd) if cwd is not None else None,
            env=checked_env(env),
            text=text,
            encoding=encoding,
            errors=errors,
            **streams,
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: Any = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        capture_output: bool = False,
        text: bool | None = None,
        timeout: float | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[Any]:
        """Run a program in the container and wait for it, as subprocess.run() does.

        Args:
            input: bytes, or a string with ``text``, for the program's stdin.
            capture_output: return stdout and stderr.
            timeout: seconds, after which the program and its process group are killed.
            check: raise subprocess.CalledProcessError unless the program exits with 0.

        For other arguments and errors see popen().

        Raises:
            subprocess.TimeoutExpired: after ``timeout`` seconds.
            subprocess.CalledProcessError: with ``check``.
        """
        streams = _streams(input, stdin, stdout, stderr, capture_output=capture_output)
        return finish(self.popen(argv, cwd=cwd, env=env, text=text, **streams), input, timeout, check=check)

    async def run_async(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: Any = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        capture_output: bool = False,
        text: bool | None = None,
        timeout: float | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[Any]:
        """Do the same as run(), without blocking the event loop of asyncio.

        If the task is cancelled, the program and its process group are killed.
        """
        streams = _streams(input, stdin, stdout, stderr, capture_output=capture_output)
        process = await asyncio.to_thread(self.popen, argv, cwd=cwd, env=env, **streams)
        return await finish_async(process, input, timeout, check=check, text=text)

    def copy_to(self, source: Path, target: str) -> None:
        """Copy a file or a directory of this machine into the container; see copy_from()."""
        self._copy(os.path.abspath(source), target, into=True)

    def copy_from(self, source: str, target: Path) -> None:
        """Copy a file or a directory out of the container.

        If the target is a directory, or ends with ``/``, the copy goes into it; otherwise the copy becomes the target.
        Missing directories are created, files are replaced, and directories are merged. Symbolic links are copied as
        links. Other kinds of files in a directory are skipped with a warning. No link below the target is followed.

        Raises:
            enroot_py.ContainerError: a file cannot be read or written, or the container has ended.
        """
        path = os.path.abspath(target) + ("/" if os.fspath(target).endswith("/") else "")
        self._copy(source, path, into=False)

    def export(self, path: Path, *, overwrite: bool = False) -> None:
        """Write the root file system, without the mounts, to a squashfs image. Programs may run meanwhile.

        Args:
            path: the new file, an image for ``penroot start``.
            overwrite: replace an existing file.

        Raises:
            enroot_py.ImageError: the file exists or cannot be written.
        """
        self._check_open()
        number = next(self._launcher.numbers)
        arguments = {"directories": self._directories, "image": self._file, "overwrite": overwrite}
        body = {"act": "export", "arguments": {"output": os.path.abspath(path), **arguments}, **client.surroundings()}
        with _Ending(self._launcher, number):
            self._launcher.request("act", number, body=[body])

    def _copy(self, source: str, target: str, *, into: bool) -> None:
        self._check_open()
        self._launcher.request("copy", self._number, body=[{"source": source, "target": target, "into": into}])

    def _check_open(self) -> None:
        if self.closed:
            raise ContainerError("the container is closed", hint="use it within its `with` block")


def run(
    image: Image | Path,
    argv: Sequence[str],
    *,
    mounts: Sequence[str] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    writable: bool = False,
    root: bool | None = None,
    net: str | None = None,
    publish: Sequence[str] = (),
    input: Any = None,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    capture_output: bool = False,
    text: bool | None = None,
    timeout: float | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[Any]:
    """Run one program in a new container and wait for it. This is twice as fast as Container(image).run(argv).

    The program is process 1 of the container, so the kernel drops all signals for which it has no handler, except
    SIGKILL and SIGSTOP. For arguments and errors see Container and Container.run().
    """
    launcher = client.launcher()
    number = next(launcher.numbers)
    body = _described(image, mounts, env, writable=writable, root=root, net=net, publish=publish)
    is_watched = False

    def launch(words: list[str], workdir: str, _: dict[str, str], fds: Sequence[int]) -> int:
        nonlocal is_watched
        facts = launcher.request("once", number, body=[body, {"argv": words, "workdir": workdir}], fds=fds)
        is_watched, pid = facts["is_watched"], facts["pid"]
        return int(pid)

    def send_signal(process: Process, signal: int, group: bool) -> None:
        if is_watched:
            process.ask(signal)
        else:
            launcher.send("signal", number, signal, int(group))

    streams = _streams(input, stdin, stdout, stderr, capture_output=capture_output)
    workdir = os.fspath(cwd) if cwd is not None else None
    process = Process(launch, send_signal, argv, cwd=workdir, text=text, **streams)
    return finish(process, input, timeout, check=check)


class _Ending:
    """End a request to the launcher if KeyboardInterrupt or SystemExit ends the wait for the answer."""

    def __init__(self, launcher: client.Launcher, number: int) -> None:
        self._launcher, self._number = launcher, number

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, Exception):
            _end(self._launcher, self._number)


def _end(launcher: client.Launcher, number: int) -> None:
    """End a container or another request. If the launcher was killed, all its requests have ended already."""
    try:
        launcher.request("end", number)
    except client.LauncherEnded:
        return


def _described(
    image: Image | Path,
    mounts: Sequence[str],
    env: Mapping[str, str] | None,
    *,
    writable: bool,
    root: bool | None,
    net: str | None,
    publish: Sequence[str],
) -> dict[str, Any]:
    """Return the request for a container. Raises UsageError."""
    for name, value in (("mounts", mounts), ("publish", publish)):
        if isinstance(value, str):
            raise UsageError(f"{name}={value!r} is not a list", hint=f"{name}=[{value!r}]")
    if not isinstance(image, Image):
        image = os.fspath(image)
    return {
        "image": image if isinstance(image, str) else {"reference": image.reference, "digest": image.digest},
        "mounts": [os.fspath(mount) for mount in mounts],
        "env": checked_env(env),
        "writable": bool(writable),
        "remap_root": root,
        "flags": [*([("--net", net)] if net is not None else []), *(("--publish", port) for port in publish)],
        **client.surroundings(),
    }


def _streams(input: Any, stdin: Stream, stdout: Stream, stderr: Stream, *, capture_output: bool) -> dict[str, Any]:
    """Return stdin, stdout and stderr for popen(), by the rules of subprocess.run(). Raises UsageError."""
    if input is not None and stdin is not None:
        raise UsageError("stdin and input exclude each other", hint="give one of them")
    if capture_output and (stdout is not None or stderr is not None):
        raise UsageError("capture_output excludes stdout and stderr", hint="give stdout=PIPE, stderr=PIPE or STDOUT")
    return {
        "stdin": PIPE if input is not None else stdin,
        "stdout": PIPE if capture_output else stdout,
        "stderr": PIPE if capture_output else stderr,
    }
