"""What a tag means now, asked in the cheapest way that there is.

For the start of an image that is stored, and for srun: one request whose answer has no body. To
import http.client alone takes longer than the interpreter's own start, and repository.py four
times as long again.
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

_SILENCE = 2.0  # seconds without an answer, where a stored image can be used instead
_CHECK = 10.0  # seconds for all answers: a login takes more than one
_LATE_S = 2.0
_MOST = 1 << 16  # bytes of an answer without a body
_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def now(reference: Reference, base: str, settings: Settings) -> str:
    """The digest of a tag whose image is stored. Servers that do not answer are waited for only a moment.

    ``base`` is where its registry was reached last. Raises RegistryError, as Unreachable after that moment.
    """

    def ask(once: Settings, heard: Callable[[bool], None]) -> str:
        return at_once(reference, base, once) or _by_client(reference, once, heard)

    return _apart(reference.registry, settings, ask, _CHECK, _SILENCE)


def soon(reference: Reference, settings: Settings, seconds: float, silence: float) -> str:
    """The digest of a tag, or "" where its registry does not tell, within ``seconds``; see hurry().

    Raises PenrootError, as Unreachable where that takes longer.
    """
    return _apart(reference.registry, settings, lambda once, heard: resolve(reference, once, heard), seconds, silence)


def _apart(
    registry: str,
    settings: Settings,
    ask: Callable[[Settings, Callable[[bool], None]], str],
    seconds: float,
    silence: float,
) -> str:
    """What ``ask`` finds, in a process of its own that ends in time. Raises PenrootError."""
    # Only the end of the process ends the wait for a name server, so a child asks. A thread would not do: a process
    # with threads gets no user namespace, see unshare(2).
    result, answer = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _answer(ask, settings, answer, seconds, silence)
    os.close(answer)
    try:
        with open(result, "rb") as f:
            if not _ends_within(seconds + _LATE_S, f):  # its own alarm is no help when it is stopped
                raise errors.Unreachable(f"{registry}: the process {pid} that asks it is stopped")
            kind, _, words = f.read().decode("utf-8", "surrogateescape").partition("\0")
    finally:
        for group in (pid, -pid):  # with the programs that know logins
            try:
                os.kill(group, _signal.SIGKILL)
            except ProcessLookupError:
                continue
        _, status = os.waitpid(pid, 0)
    if kind == "digest":
        return words
    if kind:
        message, _, hint = words.partition("\0")
        error: type[errors.PenrootError] = getattr(errors, kind, errors.PenrootError)
        raise error(message, hint=hint)
    if os.WIFSIGNALED(status):
        raise errors.Unreachable(f"{registry} does not answer within {silence:g} s")
    raise RuntimeError("a process that asks a registry failed, see above")


def _ends_within(seconds: float, pipe: BufferedReader) -> bool:
    """Whether a pipe has something to read, or its end, within some seconds."""
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
        heard = hurry(seconds, silence)
        # So short that of two addresses the second one is tried, too.
        once = settings.replace("a stored image", connect_timeout=1, transfer_retries=0)
        words = f"digest\0{ask(once, heard)}"
    except errors.PenrootError as e:
        words = "\0".join((type(e).__name__, str(e).replace("\0", ""), e.hint))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        words = ""
    os.write(answer, words.encode("utf-8", "surrogateescape"))
    sys.stderr.flush()
    os._exit(0 if words else 1)


def hurry(seconds: float, silence: float = _SILENCE) -> Callable[[bool], None]:
    """End this process by SIGALRM after ``seconds``, or after a silence of ``silence`` seconds.

    Call what this returns after each answer, and with True before what is not the registry's silence: a program of the
    user, or our imports.
    """
    until = time.monotonic() + seconds

    def heard(asks: bool) -> None:
        left = until - time.monotonic()
        _signal.setitimer(_signal.ITIMER_REAL, max(0.001, left if asks else min(silence, left)))

    _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGALRM})
    heard(False)
    return heard


def at_once(reference: Reference, base: str, settings: Settings) -> str:
    """The digest of a tag from a registry at ``base`` (SCHEME://HOST) that wants no login and no proxy; else "".

    Whatever else comes is for the real client to see, and to report.
    """
    if any(os.environ.get(name) or settings.passed_on.get(name) for name in _PROXIES):
        return ""
    scheme, _, host = base.partition("://")
    if scheme == "http" and not site.may_be_plain(host, settings) or scheme not in ("http", "https"):
        return ""

    try:
        status, headers = _head(host, reference.manifest_path(), scheme == "https", settings.connect_timeout or None)
    except (OSError, ValueError) as e:
        log.debug(f"{host}: {e}; asking again")
        return ""
    digest = headers.get("docker-content-digest", "") if status == 200 else ""
    return digest if is_digest(digest) else ""


def _head(host: str, path: str, tls: bool, timeout: float | None) -> tuple[int, dict[str, str]]:
    """Status and headers, by names in lower case, of a HEAD request (RFC 9110). Raises OSError, ValueError."""
    lines = [f"HEAD {path} HTTP/1.1", f"Host: {host}", f"Accept: {', '.join(MANIFEST_TYPES)}"]
    lines += [f"User-Agent: penroot/{__version__}", "Connection: close", "", ""]
    connection = _connect(host, 443 if tls else 80, tls, timeout)
    try:
        connection.sendall("\r\n".join(lines).encode("ascii"))
        reply = b""
        while b"\r\n\r\n" not in reply:
            more = connection.recv(_MOST)
            reply += more
            if not more or len(reply) > _MOST:
                raise ValueError("no complete answer")
    finally:
        connection.close()
    head, *fields = reply.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    version, _, status = head.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"not HTTP: {head[:40]!r}")
    headers = (field.partition(":") for field in fields)
    return int(status[:3]), {name.strip().lower(): value.strip() for name, _, value in headers}


def _connect(host: str, port: int, tls: bool, timeout: float | None) -> socket:
    """A connection to HOST[:PORT], or [IPV6]:PORT. Raises OSError, ValueError."""
    import _socket

    name, colon, its_port = host.rpartition(":")
    if colon and not host.endswith("]"):
        port = int(its_port)
    else:
        name = host
    name = name.strip("[]")
    if tls:
        import socket

        return site.tls().wrap_socket(socket.create_connection((name, port), timeout), server_hostname=name)
    error = OSError("no address")
    # As bytes, or Python imports its tables of international domain names.
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
    """Which digest counts for a name, decided here alone; None if the name itself has one, or nobody says one.

    A step of Slurm has the same image on all its nodes, so what it was pinned to, ``of_step``, comes first. Next is
    what the settings say, by a lock file. Raises ConfigError.
    """
    if isinstance(reference, LocalImage) or reference.digest:
        return None
    if of_step is not None or not settings.is_extended:
        return of_step
    for feature in plugged("pin"):
        if known := feature.pin(reference, settings):
            return known  # type: ignore[no-any-return]
    return None


def resolve(reference: Reference, settings: Settings, heard: Callable[[bool], None] = lambda asks: None) -> str:
    """The digest of a tag, or "" where its registry does not tell; ``heard``: see hurry(). Raises PenrootError."""
    if known := pin(reference, settings):
        return known.digest
    host = reference.registry
    if host != DOCKER_HUB and not site.rules(host, settings).mirrors:  # Docker's wants a token
        # Nothing secret is sent, and what speaks TLS says so: then the real client asks.
        plain = is_local(host) or ":" in host and site.may_be_plain(host, settings)
        digest = at_once(reference, f"{'http' if plain else 'https'}://{host}", settings)
        if digest:
            return digest
    return _by_client(reference, settings, heard)


def _by_client(reference: Reference, settings: Settings, heard: Callable[[bool], None]) -> str:
    """The digest of a tag by the client that knows logins, proxies and mirrors. Raises PenrootError."""
    heard(True)  # on a busy node our own imports may take longer than a registry that is well
    from enroot_py.registry.sources import open_source

    source = open_source(reference, settings, heard)
    heard(False)
    return source.digest()
