"""HTTP connections to untrusted servers: proxies, certificate authorities, time limits, a check of peer addresses.

http.client does not limit time and length of a response before its body. A server that sends a header byte by byte, or
``100 Continue`` again and again, would hold a process for ever. Therefore _LimitedReader sets limits.
"""

from __future__ import annotations

import base64
import http.client
import io
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import urllib3
from urllib3 import exceptions
from urllib3.connection import HTTPConnection, HTTPSConnection

from enroot_py.base.errors import ConfigError, RegistryError
from enroot_py.config.settings import Settings
from enroot_py.registry import addresses, containersconf, site
from enroot_py.registry.addresses import Address

_MAX_HEAD_BYTES = 1 << 20  # before the body
_MAX_SHOWN_CHARS = 200  # of an exception
_MIN_BYTES_PER_S = 1000
_BATCH_S, _MAX_BATCH_BYTES = 0.1, 48 << 10  # wait for the bytes of this time at once, but for at most so many
_BATCH_UNIT_BYTES = 4 << 10
_BUFFERED_BYTES = 32 << 10  # more than Python and OpenSSL (one record: RFC 8446) hold in their buffers


class _LimitedReader(io.RawIOBase):
    """A reader of a socket. It raises an error for a large head, and for a rate below _MIN_BYTES_PER_S.

    ``stall_s`` is the time in seconds over which the rate is measured, or 0 for no limit.
    """

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, stall_s: float) -> None:
        """``raw`` reads ``sock``."""
        self._raw = raw
        self._socket = sock if isinstance(sock, socket.socket) else None  # urllib3 has another class for TLS in TLS
        self._stall_s = stall_s
        self._low_water = 1  # SO_RCVLOWAT, socket(7)
        self._body_started = 0.0
        self._body_bytes = 0
        self._head_bytes_left = _MAX_HEAD_BYTES  # 0 from the body on
        self._waited_s = 0.0
        self._received_bytes = 0  # within _waited_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        started = time.monotonic()
        count = self._raw.readinto(buffer)
        self._waited_s += time.monotonic() - started
        self._received_bytes += count or 0
        self._body_bytes += count or 0
        if self._head_bytes_left:
            self._head_bytes_left = max(0, self._head_bytes_left - (count or 0))
            if not self._head_bytes_left:
                raise http.client.HTTPException(f"more than {_MAX_HEAD_BYTES >> 20} MiB before the body")
        if count and self._waited_s > self._stall_s > 0:
            if self._received_bytes < _MIN_BYTES_PER_S * self._waited_s:
                raise http.client.HTTPException(f"only {self._received_bytes} bytes within ENROOT_STALL_TIMEOUT")
            self._waited_s, self._received_bytes = 0.0, 0
        return int(count) if count is not None else None

    def begin_body(self) -> None:
        self._head_bytes_left, self._waited_s, self._received_bytes = 0, 0.0, 0
        self._body_started, self._body_bytes = time.monotonic(), 0

    def expect(self, count: int) -> None:
        """Prepare to read a body of which ``count`` bytes are left: wait for a batch of bytes in each read.

        One read for each packet would cost more CPU. Near the end of the body, do not wait for a batch: the buffers may
        already have some of the last bytes.
        """
        rate = self._body_bytes / max(time.monotonic() - self._body_started, _BATCH_S)
        batch = min(rate * _BATCH_S, _MAX_BATCH_BYTES)
        if self._stall_s > 0:  # the rate may fall to _MIN_BYTES_PER_S
            batch = min(batch, _MIN_BYTES_PER_S * self._stall_s / 2)
        batch = int(batch) // _BATCH_UNIT_BYTES * _BATCH_UNIT_BYTES
        low_water = batch if batch and count > batch + _BUFFERED_BYTES else 1
        # http.client may have closed the socket.
        if low_water != self._low_water and self._socket is not None and self._socket.fileno() >= 0:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def close(self) -> None:
        self._raw.close()
        super().close()


class Connections:
    """Connections to the server ``host`` (HOST or HOST:PORT), and to the servers that it redirects to."""

    def __init__(self, host: str, settings: Settings, *, is_insecure: bool = False) -> None:
        """With ``is_insecure``, the server's own certificate is not verified, unless a rule ``ca`` applies to it."""
        self._host = host
        self._is_insecure = is_insecure
        self._own = addresses.read(f"https://{host}/")
        self._settings = settings
        self._environ = {**settings.passed_on, **os.environ}
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._contexts: dict[bool, ssl.SSLContext] = {}  # made once: reading the certificates takes 30 ms
        self._pid = os.getpid()

    def is_own(self, address: Address) -> bool:
        """Return whether an address is on the server's own host."""
        return address.host == self._own.host

    def proxy(self, address: Address) -> str:
        """Return the proxy for an address, or ""."""
        proxies = _proxies(self._environ)
        proxy = proxies.get(address.scheme) or proxies.get("all") or ""
        return "" if addresses.bypasses(address.netloc, proxies.get("no", "")) else proxy

    def pool(self, address: Address) -> urllib3.PoolManager:
        """Return the pool of connections for an address. Raises ConfigError for a bad proxy or certificate file."""
        if self._pid != os.getpid():  # a forked worker must not share its parent's connections
            self._pools, self._pid = {}, os.getpid()
        proxy, is_own = self.proxy(address), self.is_own(address)
        key = f"{'own' if is_own else 'others'} {proxy}"
        if key not in self._pools:
            if is_own not in self._contexts:
                self._contexts[is_own] = self._tls_context(is_own)
            context = self._contexts[is_own]
            pools = _proxy_manager(proxy, context) if proxy else urllib3.PoolManager(ssl_context=context)
            check = None if proxy or is_own else self._check_other
            pools.pool_classes_by_scheme = _pool_classes(self._settings.stall_timeout, check)
            self._pools[key] = pools
        return self._pools[key]

    def _check_other(self, connection: HTTPConnection, peer: str) -> None:
        """Refuse a redirect to this machine or a link-local address, unless the server itself has such an address.

        Services on this machine, or at a link-local address, may trust every client that connects from this machine.
        """
        if addresses.is_of_this_machine(peer) and not self._is_local():
            raise RegistryError(
                f"{self._host} redirects to {connection.host} ({peer}): this machine or a link-local address"
            )

    def _is_local(self) -> bool:
        """Return whether the server itself is this machine or has a link-local address."""
        try:
            entries = socket.getaddrinfo(self._own.host.strip("[]"), self._own.port, type=socket.SOCK_STREAM)
        except OSError:  # only the proxy can resolve the name of the server
            return False
        return any(addresses.is_of_this_machine(str(address[0])) for *_, address in entries)

    def _tls_context(self, is_own: bool) -> ssl.SSLContext:
        """Return a TLS context that trusts the authorities of the system and of the configuration.

        OpenSSL itself reads SSL_CERT_* from the environment. Only the server itself gets the client's certificate.
        With ``is_insecure`` and without a rule ``ca``, only the server itself may have an untrusted certificate.
        """
        context = site.tls()
        ca = site.rules(self._host, self._settings).ca
        certificates = containersconf.certificates(self._host, os.environ)
        passed_on = self._settings.passed_on
        _load(context, passed_on.get("SSL_CERT_FILE"))
        _load(context, None, passed_on.get("SSL_CERT_DIR"))
        for file in (ca,) if ca or not certificates else certificates.authorities:
            _load(context, file or None)
        for file, key in certificates.pairs if certificates and is_own else ():
            try:
                context.load_cert_chain(file, key, _no_passphrase)
            except (OSError, ssl.SSLError) as e:
                raise ConfigError(f"cannot use the client's certificate {file} with its key: {reason(e)}") from e
        if self._is_insecure and is_own and not ca:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            urllib3.disable_warnings(exceptions.InsecureRequestWarning)
        return context


def _load(context: ssl.SSLContext, file: str | None, directory: str | None = None) -> None:
    if file or directory:
        try:
            context.load_verify_locations(file, directory)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"cannot read the certificates in {file or directory}: {reason(e)}") from e


def _no_passphrase() -> str:
    """Return an empty passphrase. Without this function, OpenSSL would ask for a passphrase at the terminal."""
    return ""


def proxy_name(proxy: str) -> str:
    """Return HOST[:PORT] of a proxy for messages, without a password."""
    return proxy.rpartition("://")[2].rpartition("@")[2].partition("/")[0]


def is_untrusted(error: BaseException | None) -> bool:
    """Return whether ``error`` means that the server speaks TLS, but its certificate is not trusted."""
    text = str(error)
    return isinstance(error, exceptions.SSLError) and ("CERTIFICATE" in text.upper() or "hostname" in text)


def reason(error: BaseException) -> str:
    """Return the message of a urllib3 exception, without Python object names."""
    inner = error.args[-1] if error.args else error
    if isinstance(inner, BaseException):
        return reason(inner) if inner is not error else type(error).__name__
    if isinstance(error, ssl.SSLError):
        return getattr(error, "verify_message", "") or error.reason or str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, exceptions.ReadTimeoutError):
        return "no data within ENROOT_STALL_TIMEOUT"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended early"
    if type(error) is exceptions.ConnectTimeoutError:  # but not its subclass NewConnectionError
        return "no connection within ENROOT_CONNECT_TIMEOUT"
    if isinstance(error.__cause__, OSError):
        return reason(error.__cause__)
    text = " ".join(str(inner).split())
    return (text.partition(">: ")[2] or text.partition("): ")[2] or text)[:_MAX_SHOWN_CHARS]


def _proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Map schemes, "all" and "no" to the values of the ``*_proxy`` variables; lower case wins, as in curl(1)."""
    names = sorted((name for name in environ if name.lower().endswith("_proxy")), key=str.islower)
    return {name.lower().removesuffix("_proxy"): environ[name] for name in names if environ[name]}


def _proxy_manager(proxy: str, context: ssl.SSLContext) -> urllib3.ProxyManager:
    """Return the pool of connections through a proxy. Raises ConfigError.

    The proxy has the form [http://][USER:PASSWORD@]HOST[:PORT], with ``%40`` for ``@``.
    """
    url = proxy if "://" in proxy else f"http://{proxy}"
    try:
        parts = urllib3.util.parse_url(url)
        headers = {}
        if parts.auth:
            login = unquote(parts.auth)
            headers["Proxy-Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        return urllib3.ProxyManager(url, ssl_context=context, proxy_headers=headers)
    except ValueError:  # do not quote the proxy: it may have a password
        raise ConfigError(
            f"http_proxy, https_proxy or all_proxy is not an HTTP proxy: {url.partition('://')[0]}://…",
            hint="write http://[USER:PASSWORD@]HOST:PORT",
        ) from None


def _pool_classes(
    stall_s: float, check: Callable[[HTTPConnection, str], None] | None = None
) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Return pool classes by scheme. ``check`` gets a new connection and its peer's address, and raises to refuse."""

    class LimitedResponse(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
            super().__init__(sock, *arguments, **options)
            self._reader = _LimitedReader(self.fp.detach(), sock, stall_s)
            self.fp = io.BufferedReader(self._reader)

        def begin(self) -> None:
            super().begin()
            self._reader.begin_body()

        def read1(self, n: int = -1) -> bytes:
            self._reader.expect(self.length or 0)
            data = super().read1(n)
            if not self.length:
                self._reader.expect(0)  # the connection's next response may be short
            return data

    def checked(connection: HTTPConnection, sock: socket.socket) -> socket.socket:
        if check is not None:
            try:
                check(connection, str(sock.getpeername()[0]))
            except BaseException:
                sock.close()
                raise
        return sock

    class Plain(HTTPConnection):
        response_class = LimitedResponse

        def _new_conn(self) -> socket.socket:
            return checked(self, super()._new_conn())

    class Secure(HTTPSConnection):
        response_class = LimitedResponse

        def _new_conn(self) -> socket.socket:
            return checked(self, super()._new_conn())

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": Pool, "https": SecurePool}
