"""Connections of HTTP to servers that may be hostile: proxies, authorities, patience, and a look at where peers are.

What http.client reads before a body has no limit in time, and none in length either: a header that comes
byte by byte, or ``100 Continue`` for ever, would hold a process until somebody kills it.
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
from enroot_py.registry import addresses, site
from enroot_py.registry.addresses import Address

_HEAD = 1 << 20  # bytes before the body
_SHOWN = 200  # characters of an exception
_LEAST = 1000  # bytes a second: less is no transfer


class _Patient(io.RawIOBase):
    """What comes from a socket, while it comes: less than _LEAST bytes a second for ``stall`` seconds is an error."""

    def __init__(self, raw: io.RawIOBase, stall: float) -> None:
        self._raw = raw
        self._stall = stall
        self._head = _HEAD  # bytes left; None from the body on
        self._waited = 0.0  # seconds, and the bytes that came in them
        self._came = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        began = time.monotonic()
        count = self._raw.readinto(buffer)
        self._waited += time.monotonic() - began
        self._came += count or 0
        if self._head:
            self._head = max(0, self._head - (count or 0))
            if not self._head:
                raise http.client.HTTPException(f"more than {_HEAD >> 20} MiB before the body")
        if count and self._waited > self._stall > 0:
            if self._came < _LEAST * self._waited:
                raise http.client.HTTPException(f"only {self._came} bytes within ENROOT_STALL_TIMEOUT")
            self._waited, self._came = 0.0, 0
        return int(count) if count is not None else None

    def begin_body(self) -> None:
        self._head, self._waited, self._came = 0, 0.0, 0

    def close(self) -> None:
        self._raw.close()
        super().close()


class Connections:
    """Connections to the server ``host`` (HOST or HOST:PORT), and to where it sends us."""

    def __init__(self, host: str, settings: Settings) -> None:
        self._host = host
        self._own = addresses.read(f"https://{host}/")
        self._settings = settings
        self._environ = {**settings.passed_on, **os.environ}
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._context: ssl.SSLContext | None = None  # made once: reading the authorities takes 30 ms
        self._pid = os.getpid()

    def is_own(self, address: Address) -> bool:
        """Whether an address is on the server's own host."""
        return address.host == self._own.host

    def proxy(self, address: Address) -> str:
        """The proxy for an address, or ""."""
        proxies = _proxies(self._environ)
        proxy = proxies.get(address.scheme) or proxies.get("all") or ""
        return "" if addresses.bypasses(address.netloc, proxies.get("no", "")) else proxy

    def pool(self, address: Address) -> urllib3.PoolManager:
        """Connections for an address. Raises ConfigError for a bad proxy or file of authorities."""
        if self._pid != os.getpid():  # a forked worker must not share its parent's connections
            self._pools, self._pid = {}, os.getpid()
        proxy = self.proxy(address)
        kind = proxy if proxy or self.is_own(address) else "others"
        if kind not in self._pools:
            context = self._context = self._context or self._trust()
            pools = _proxy_manager(proxy, context) if proxy else urllib3.PoolManager(ssl_context=context)
            check = self._check_other if kind == "others" else None
            pools.pool_classes_by_scheme = _classes(self._settings.stall_timeout, check)
            self._pools[kind] = pools
        return self._pools[kind]

    def _check_other(self, connection: HTTPConnection, peer: str) -> None:
        """Whether the server may send us there: not to this machine, if it is not here itself.

        What listens here, or at a link-local address, may trust whoever comes from here.
        """
        if addresses.is_of_this_machine(peer) and not self._is_here():
            raise RegistryError(
                f"{self._host} sends us to {connection.host}, which is {peer}: "
                "an address of this machine or of its link"
            )

    def _is_here(self) -> bool:
        """Whether the server itself is on this machine or its link."""
        try:
            places = socket.getaddrinfo(self._own.host.strip("[]"), self._own.port, type=socket.SOCK_STREAM)
        except OSError:  # it is behind a proxy
            return False
        return any(addresses.is_of_this_machine(str(place[0])) for *_, place in places)

    def _trust(self) -> ssl.SSLContext:
        """The system's authorities, and those that are named. OpenSSL reads SSL_CERT_* of the environment itself."""
        context = site.tls()
        passed_on = self._settings.passed_on
        for file, directory in (
            (passed_on.get("SSL_CERT_FILE"), None),
            (None, passed_on.get("SSL_CERT_DIR")),
            (site.rules(self._host, self._settings).ca or None, None),
        ):
            if file or directory:
                try:
                    context.load_verify_locations(file, directory)
                except (OSError, ssl.SSLError) as e:
                    raise ConfigError(f"cannot read the authorities in {file or directory}: {reason(e)}") from e
        return context


def proxy_name(proxy: str) -> str:
    """A proxy for messages, without a password."""
    return proxy.rpartition("://")[2].rpartition("@")[2].partition("/")[0]


def is_untrusted(error: BaseException | None) -> bool:
    """Whether TLS was spoken, but with somebody whose certificate is no good."""
    text = str(error)
    return isinstance(error, exceptions.SSLError) and ("CERTIFICATE" in text.upper() or "hostname" in text)


def reason(error: BaseException) -> str:
    """The words of an exception of urllib3 without its names of Python objects."""
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
    if type(error) is exceptions.ConnectTimeoutError:  # NewConnectionError is one too
        return "no connection within ENROOT_CONNECT_TIMEOUT"
    if isinstance(error.__cause__, OSError):
        return reason(error.__cause__)
    text = " ".join(str(inner).split())
    return (text.partition(">: ")[2] or text.partition("): ")[2] or text)[:_SHOWN]


def _proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Scheme -> proxy, and ``no``, from http_proxy and its like; lower case wins, as in curl(1)."""
    names = sorted((name for name in environ if name.lower().endswith("_proxy")), key=str.islower)
    return {name.lower().removesuffix("_proxy"): environ[name] for name in names if environ[name]}


def _proxy_manager(proxy: str, context: ssl.SSLContext) -> urllib3.ProxyManager:
    """Connections through a proxy: [http://][USER:PASSWORD@]HOST[:PORT], where ``%40`` is an ``@``."""
    url = proxy if "://" in proxy else f"http://{proxy}"
    try:
        parts = urllib3.util.parse_url(url)
        headers = {}
        if parts.auth:
            login = unquote(parts.auth)
            headers["Proxy-Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
        return urllib3.ProxyManager(url, ssl_context=context, proxy_headers=headers)
    except ValueError:  # without its words, which may have the password
        raise ConfigError(
            f"http_proxy, https_proxy or all_proxy is no proxy of HTTP: {url.partition('://')[0]}://…",
            hint="write http://[USER:PASSWORD@]HOST:PORT",
        ) from None


def _classes(
    stall: float, check: Callable[[HTTPConnection, str], None] | None = None
) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Pools for a PoolManager, by scheme; ``check`` is told the address of a new connection's peer, and may refuse."""

    class PatientResponse(http.client.HTTPResponse):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._patient = _Patient(self.fp.detach(), stall)
            self.fp = io.BufferedReader(self._patient)

        def begin(self) -> None:
            super().begin()
            self._patient.begin_body()

    def checked(connection: HTTPConnection, made: socket.socket) -> socket.socket:
        if check is not None:
            try:
                check(connection, str(made.getpeername()[0]))
            except BaseException:
                made.close()
                raise
        return made

    class Plain(HTTPConnection):
        response_class = PatientResponse

        def _new_conn(self) -> socket.socket:
            return checked(self, super()._new_conn())

    class Secure(HTTPSConnection):
        response_class = PatientResponse

        def _new_conn(self) -> socket.socket:
            return checked(self, super()._new_conn())

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": Pool, "https": SecurePool}
