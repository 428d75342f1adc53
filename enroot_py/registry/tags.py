"""Resolve a tag to its current digest as cheaply as possible: with one HEAD request on a plain socket.

srun and the start of a stored image use this module. Importing http.client alone takes about as long as the start of
the interpreter. Importing repository.py takes four times as long as importing http.client.
"""

from __future__ import annotations

import _signal
import os
import sys
import time

from enroot_py import __version__
from enroot_py.base import errors, log
from enroot_py.base.digests import Pin, is_digest
from enroot_py.base.features import plugged
from enroot_py.registry import site
from enroot_py.registry.reference import DOCKER_HUB, MANIFEST_TYPES, LocalImage, is_local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _collections_abc import Callable
    from _io import BufferedReader
    from _socket import socket
    from typing import NoReturn

    from enroot_py.config.settings import Settings
    from enroot_py.registry.reference import Reference

_SILENCE_S = 2.0  # time to wait for one response, if a stored image can be used instead
_CHECK_TIMEOUT_S = 10.0  # time for all responses: a login takes several responses
_LATE_S = 2.0  # a child ends within this time after its alarm, unless a signal such as SIGSTOP has stopped it
_MAX_RESPONSE_BYTES = 1 << 16  # a response to HEAD has no body
_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def now(reference: Reference, base: str, settings: Settings) -> str:
    """Resolve the tag of a stored image, with a short timeout.

    ``base`` is SCHEME://HOST of the last import. Raises RegistryError, and Unreachable after the timeout.
    """

    def ask(impatient: Settings, on_progress: Callable[[bool], None]) -> str:
        is_direct = site.places(reference, impatient) == [site.Place(reference)]
        return is_direct and at_once(reference, base, impatient) or _by_client(reference, impatient, on_progress)

    return _in_child(reference.registry, settings, ask, _CHECK_TIMEOUT_S, _SILENCE_S)


def soon(reference: Reference, settings: Settings, seconds: float, silence: float) -> str:
    """Resolve a tag within ``seconds``, or return "" if the registry sends no digest. ``silence``: see hurry().

    Raises PenrootError, and Unreachable after ``seconds``.
    """
    return _in_child(reference.registry, settings, lambda *arguments: resolve(reference, *arguments), seconds, silence)


def _in_child(
    registry: str,
    settings: Settings,
    ask: Callable[[Settings, Callable[[bool], None]], str],
    seconds: float,
    silence: float,
) -> str:
    """Return the result of ``ask`` from a child process with a time limit. Raises PenrootError."""
    # Only the end of a process interrupts its wait for a name server, so a child process asks the registry. Do not use
    # a thread: a process with threads cannot create a user namespace, see unshare(2).
    result, answer = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _answer(ask, settings, answer, seconds, silence)
    os.close(answer)
    try:
        with open(result, "rb") as f:
            if not _is_readable_within(seconds + _LATE_S, f):  # SIGALRM does not end a stopped child
                raise errors.Unreachable(f"cannot ask {registry}: the child process {pid} is stopped")
            kind, _, value = f.read().decode("utf-8", "surrogateescape").partition("\0")
    finally:
        for target in (pid, -pid):  # the child, and its process group, which includes credential helpers
            try:
                os.kill(target, _signal.SIGKILL)
            except ProcessLookupError:
                continue
        _, status = os.waitpid(pid, 0)
    if kind == "digest":
        return value
    if kind:
        message, _, hint = value.partition("\0")
        error: type[errors.PenrootError] = getattr(errors, kind, errors.PenrootError)
        raise error(message, hint=hint)
    if os.WIFSIGNALED(status):
        raise errors.Unreachable(f"{registry} does not answer within {silence:g} s")
    raise RuntimeError("the child process that asks the registry failed, see above")


def _is_readable_within(seconds: float, pipe: BufferedReader) -> bool:
    """Wait until a pipe has data or is closed. Return False after ``seconds``."""
    import select

    readable = select.poll()  # select(2) takes no descriptor above 1023
    readable.register(pipe, select.POLLIN)
    return bool(readable.poll(seconds * 1000))


def _answer(
    ask: Callable[[Settings, Callable[[bool], None]], str],
    settings: Settings,
    answer: int,
    seconds: float,
    silence: float,
) -> NoReturn:
    try:
        os.setpgid(0, 0)
        for number in (_signal.SIGTERM, _signal.SIGINT):
            _signal.signal(number, _signal.SIG_DFL)
        on_progress = hurry(seconds, silence)
        # A connect timeout of 1 s leaves time to try the second of two addresses within ``silence``.
        impatient = settings.replace("a stored image", connect_timeout=1, transfer_retries=0)
        reply = f"digest\0{ask(impatient, on_progress)}"
    except errors.PenrootError as e:
        reply = "\0".join((type(e).__name__, str(e).replace("\0", ""), e.hint))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        reply = ""
    os.write(answer, reply.encode("utf-8", "surrogateescape"))
    sys.stderr.flush()
    os._exit(0 if reply else 1)


def hurry(seconds: float, silence: float = _SILENCE_S) -> Callable[[bool], None]:
    """End this process by SIGALRM after ``seconds``, or when the registry is silent for ``silence`` seconds.

    Call the returned function with False after each response. Call it with True before work of this node that must not
    count as silence of the registry: running a credential helper, or importing modules.
    """
    deadline = time.monotonic() + seconds

    def on_progress(busy: bool) -> None:
        left = deadline - time.monotonic()
        _signal.setitimer(_signal.ITIMER_REAL, max(0.001, left if busy else min(silence, left)))

    _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGALRM})
    on_progress(False)
    return on_progress


def at_once(reference: Reference, base: str, settings: Settings) -> str:
    """Resolve a tag at ``base`` (SCHEME://HOST) without login and proxy, or return "".

    If the result is "", the caller uses the full client (repository.py), which also reports errors.
    """
    if any(os.environ.get(name) or settings.passed_on.get(name) for name in _PROXIES):
        return ""
    scheme, _, host = base.partition("://")
    if scheme == "http" and not site.may_be_plain(host, settings) or scheme not in ("http", "https"):
        return ""

    path = reference.manifest_path()
    began = time.monotonic()
    try:
        status, headers = _head(host, path, scheme == "https", settings.connect_timeout or None)
    except (OSError, ValueError) as e:
        log.debug(f"{host}: {e}; trying the full client")
        return ""
    log.debug(f"HEAD {base}{path}: {status} after {time.monotonic() - began:.3f} s")
    digest = headers.get("docker-content-digest", "") if status == 200 else ""
    return digest if is_digest(digest) else ""


def _head(host: str, path: str, tls: bool, timeout: float | None) -> tuple[int, dict[str, str]]:
    """Send a HEAD request (RFC 9110). Return status, and headers by lower-case name. Raises OSError, ValueError."""
    lines = [f"HEAD {path} HTTP/1.1", f"Host: {host}", f"Accept: {', '.join(MANIFEST_TYPES)}"]
    lines += [f"User-Agent: penroot/{__version__}", "Connection: close", "", ""]
    connection = _connect(host, 443 if tls else 80, tls, timeout)
    try:
        connection.sendall("\r\n".join(lines).encode("ascii"))
        reply = b""
        while b"\r\n\r\n" not in reply:
            more = connection.recv(_MAX_RESPONSE_BYTES)
            reply += more
            if not more or len(reply) > _MAX_RESPONSE_BYTES:
                raise ValueError("incomplete response")
    finally:
        connection.close()
    head, *fields = reply.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    version, _, status = head.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not HTTP: {head[:40]!r}")
    headers = (field.partition(":") for field in fields)
    return int(status[:3]), {name.strip().lower(): value.strip() for name, _, value in headers}


def _connect(host: str, port: int, tls: bool, timeout: float | None) -> socket:
    """Connect to HOST[:PORT] or [IPV6]:PORT. Raises OSError, ValueError."""
    import _socket

    name, colon, digits = host.rpartition(":")
    if colon and not host.endswith("]"):
        port = int(digits)
    else:
        name = host
    name = name.strip("[]")
    if tls:
        import socket

        return site.tls().wrap_socket(socket.create_connection((name, port), timeout), server_hostname=name)
    error = OSError("no address")
    # Pass the name as bytes: for a str, Python imports its IDNA tables.
    for family, kind, protocol, _, address in _socket.getaddrinfo(name.encode("ascii"), port, 0, _socket.SOCK_STREAM):
        connection = _socket.socket(family, kind, protocol)
        connection.settimeout(timeout)
        try:
            connection.connect(address)
            return connection
        except OSError as e:
            connection.close()
            error = e
    raise error


def pin(reference: Reference | LocalImage, settings: Settings, of_step: Pin | None = None) -> Pin | None:
    """Return the pin of a tag: the digest that the tag must have. Return None if there is no tag or no pin.

    The pin of the Slurm step, ``of_step``, takes precedence over the lock file in the settings, because all nodes of a
    step use the same image. No other function chooses between the two. Raises ConfigError.
    """
    if isinstance(reference, LocalImage) or reference.digest:
        return None
    if of_step is not None or not settings.is_extended:
        return of_step
    for feature in plugged("pin"):
        if known := feature.pin(reference, settings):
            return known  # type: ignore[no-any-return]
    return None


def resolve(reference: Reference, settings: Settings, on_progress: Callable[[bool], None] = lambda busy: None) -> str:
    """Resolve a tag, or return "" if the registry sends no digest. Raises PenrootError.

    ``on_progress``: see hurry().
    """
    if known := pin(reference, settings):
        return known.digest
    places = site.places(reference, settings)
    first = places[0].reference
    host = first.registry
    if host != DOCKER_HUB and len(places) == 1:  # Docker Hub always asks for a token
        # The request has no secret, so plain HTTP is safe. If the registry refuses HTTP, the full client tries again.
        plain = is_local(host) or ":" in host and site.may_be_plain(host, settings)
        digest = at_once(first, f"{'http' if plain else 'https'}://{host}", settings)
        if digest:
            return digest
    return _by_client(reference, settings, on_progress)


def _by_client(reference: Reference, settings: Settings, on_progress: Callable[[bool], None]) -> str:
    """Resolve a tag with the full client, which supports logins, proxies and mirrors. Raises PenrootError."""
    on_progress(True)  # on a busy node, importing the modules may take longer than the registry
    from enroot_py.registry.sources import open_source

    source = open_source(reference, settings, on_progress)
    on_progress(False)
    return source.digest()
