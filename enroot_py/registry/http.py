"""A client of HTTP for servers that fail, stall, redirect us or lie: tries, limits, and secrets for one server alone.

Sources: RFC 9110 for redirects, Retry-After and Authorization; RFC 9112.
"""

from __future__ import annotations

import contextlib
import email.utils
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import urllib3
from urllib3 import exceptions

from enroot_py import __version__
from enroot_py.base import log
from enroot_py.base.errors import RegistryError, Unreachable, WebPage
from enroot_py.config.settings import Settings
from enroot_py.registry import addresses, site
from enroot_py.registry.addresses import Address
from enroot_py.registry.connections import Connections, is_untrusted, proxy_name, reason

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_MAX_WAIT = 60.0  # seconds that we are willing to wait because a server says so
_MAX_REDIRECTS = 5
_CHUNK = 1 << 18
_READS = 20_000  # after so many, a body of fewer than _PIECE bytes each costs us more than its sender
_PIECE = 100
_AT_ONCE = 1.0  # seconds after which a read returns what has come
_PAGE_TYPES = ("text/html", "application/xhtml+xml")
_PAGE_STARTS = (b"<!doctype html", b"<html")
_SNIFFED_BYTES = 256  # of a body, to know a web page by
_REST = 1 << 16  # bytes: to read more that nobody wants costs more than a new connection
_NO_CONNECTION = (exceptions.SSLError, exceptions.NewConnectionError, exceptions.ConnectTimeoutError)


class Transient(Exception):
    """One try failed; another may not. ``wait`` seconds first, if the server said so."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Patience:
    """How often a failing request is tried again, and after what time."""

    def __init__(self, settings: Settings) -> None:
        self._tries = settings.transfer_retries
        self._failures = 0

    def renew(self) -> None:
        self._failures = 0

    def outlast(self, what: str, act: Callable[[], _T]) -> _T:
        """What ``act`` returns, after as many tries as it takes. Raises Unreachable when there are no more."""
        while True:
            try:
                return act()
            except Transient as e:
                self.wait(e, what)

    def wait(self, error: Transient, what: str) -> None:
        """Sleep before the next try. Raises Unreachable when there is none."""
        self._failures += 1
        wait = error.wait if error.wait is not None else min(0.25 * 2**self._failures, 15.0) * random.uniform(0.5, 1.0)
        if self._failures > self._tries or wait > _MAX_WAIT:
            asked = f", and asks to wait for {error.wait:.0f} s" if error.wait else ""
            raise Unreachable(
                f"{what}: {error}{asked}, after {self._failures} {'try' if self._failures == 1 else 'tries'}",
                hint="try again later; ENROOT_TRANSFER_RETRIES and ENROOT_STALL_TIMEOUT are the limits",
            ) from error
        log.info(f"{what}: {error}; trying again in {wait:.1f} s")
        time.sleep(wait)


class Response:
    """An answer, whose body is read as it comes. Use it in a ``with``. Methods raise Transient."""

    def __init__(self, response: urllib3.response.BaseHTTPResponse, address: Address) -> None:
        """``address`` is where the answer came from, after redirects."""
        self.status = response.status
        self.server = address
        self.address = str(address).partition("?")[0][:_SNIFFED_BYTES]  # for messages: a query may have secrets
        self._ahead = b""
        self._response = response
        self._failure: Transient | None = None
        self._reads = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, unless all of the answer was read: then it can serve again."""
        self._response.close()

    def header(self, name: str) -> str:
        return str(self._response.headers.get(name, ""))

    def read(self, size: int, *, decode: bool = False) -> bytes:
        """Up to ``size`` bytes: what comes within a second, or first after that; none at the end."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data
        if self._failure:
            raise self._failure
        parts: list[bytes] = []
        until = time.monotonic() + _AT_ONCE
        try:
            while size > 0 and (data := self._response.read1(size, decode_content=decode)):
                parts.append(data)
                size -= len(data)
                self._bytes += len(data)
                self._reads += 1
                if self._reads > _READS and self._bytes < _PIECE * self._reads:
                    self._failure = Transient(f"{self._reads} pieces for {self._bytes} bytes")
                    break
                if time.monotonic() > until:
                    break
        except (exceptions.HTTPError, OSError) as e:
            self._failure = Transient(reason(e))
            if not parts:
                raise self._failure from e
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Pass over ``size`` bytes, or what is left."""
        while size and (data := self.read(min(size, _CHUNK))):
            size -= len(data)

    def document(self, limit: int) -> bytes:
        """All of it, or its first ``limit`` bytes."""
        # Some proxies compress documents whatever we accept. A blob is as its digest says: there Content-Encoding lies.
        parts = []
        while limit > 0 and (data := self.read(min(limit, _CHUNK), decode=True)):
            limit -= len(data)
            parts.append(data)
        return b"".join(parts)

    def is_page(self, document: bytes | None = None) -> bool:
        """Return whether the body is a web page: ``document``, or else a blob that nothing was read of yet."""
        is_html = self.header("Content-Type").partition(";")[0].strip().lower() in _PAGE_TYPES
        if document is None and is_html:
            self._ahead = document = self.read(_SNIFFED_BYTES)
            return _begins(document, b"<")
        if document is None:
            return False
        return not _begins(document, b"{") if is_html else _begins(document, *_PAGE_STARTS)

    def refuse_page(self, host: str, document: bytes | None = None) -> None:
        """Raise WebPage if ``host`` has sent a web page instead of a ``document`` or a blob: see is_page."""
        try:
            is_page = self.is_page(document)
        except BaseException:
            self.close()
            raise
        if is_page:
            self.close()
            raise WebPage(
                f"{host} answered with a web page ({self.address})",
                hint=f"check that {host} is a registry, and whether a proxy (https_proxy, no_proxy) or a login portal "
                "of the network answers for it: open the address in a browser",
            )

    def discard(self) -> None:
        """Read what is left of a small answer, so that its connection can serve again; else that ends."""
        with self, contextlib.suppress(Transient):
            self.document(_REST)


def _begins(document: bytes, *starts: bytes) -> bool:
    return document[:_SNIFFED_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(starts)


class HttpClient:
    """Requests to one server, and to wherever it redirects them.

    ``host`` is HOST or HOST:PORT. ``heard`` is called with False for each answer. Methods raise
    RegistryError, as Unreachable where there is no server, and Transient.
    """

    def __init__(self, host: str, settings: Settings, heard: Callable[[bool], None]) -> None:
        self.host = host
        self.base = ""  # https://HOST or http://HOST, once it has answered
        self._settings = settings
        self._heard = heard
        self._connections = Connections(host, settings)

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """One request to the server, over TLS or, where that is allowed and needed, without."""
        if self.base:
            return self.follow(method, addresses.read(self.base + path), headers)
        try:
            return self._first("https", method, path, headers)
        except _NO_CONNECTION as e:
            failure = e
        if not is_untrusted(failure) and self._may_be_plain:
            try:
                return self._first("http", method, path, headers)
            except _NO_CONNECTION as e:
                failure = e
        raise self._unreachable(failure) from failure

    def _first(self, scheme: str, method: str, path: str, headers: Mapping[str, str]) -> Response:
        address = addresses.read(f"{scheme}://{self.host}{path}")
        response = self.follow(method, address, headers)
        self.base = address.origin
        return response

    def follow(self, method: str, address: Address, headers: Mapping[str, str]) -> Response:
        """A request and its redirects. Authorization stays with the origin that it is for."""
        first = address
        for _ in range(_MAX_REDIRECTS + 1):
            response = self.once(method, address, headers)
            if response.status == 401 and address.origin != first.origin:
                response.discard()  # another host gets no secret of ours, whatever its challenge
                raise RegistryError(f"{first.netloc} redirects to {address.netloc}, which wants a login of its own")
            if response.status not in (301, 302, 303, 307, 308):
                return response
            response.discard()
            location = response.header("Location")
            try:
                address = addresses.read(location, address)
            except ValueError as e:
                where = addresses.shown(location)
                raise RegistryError(f"{first.netloc} redirects to the bad address {where}: {e}") from e
            if (first.scheme, address.scheme) == ("https", "http"):
                raise RegistryError(f"{first.netloc} redirects to {address.origin}, which is not secure")
            if address.origin != first.origin:
                headers = {key: value for key, value in headers.items() if key != "Authorization"}
        raise RegistryError(f"{first.netloc} redirects more than {_MAX_REDIRECTS} times")

    def once(self, method: str, address: Address, headers: Mapping[str, str], body: bytes | None = None) -> Response:
        """A request whose redirects are not followed."""
        settings = self._settings
        try:
            response = self._connections.pool(address).request(
                method,
                str(address),
                body=body,
                headers={"User-Agent": f"penroot/{__version__}", "Accept-Encoding": "identity", **headers},
                timeout=urllib3.Timeout(connect=settings.connect_timeout or None, read=settings.stall_timeout or None),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except _NO_CONNECTION as e:
            if self.base or not self.is_own(address):  # it has answered before: this may pass
                raise self._passing(address, e) from e
            raise
        except exceptions.ProxyError as e:
            proxy = proxy_name(self._connections.proxy(address))
            raise Unreachable(
                f"cannot reach {address.netloc} through the proxy {proxy}: {reason(e)}",
                hint="see http_proxy, https_proxy and no_proxy",
            ) from e
        except exceptions.LocationValueError as e:
            raise RegistryError(f"bad address {addresses.shown(str(address))}: {e}") from e
        except exceptions.HTTPError as e:  # a timeout, a connection that ended, an answer that is no HTTP
            raise self._passing(address, e) from e
        self._heard(False)
        return Response(response, address)

    def is_own(self, address: Address) -> bool:
        """Whether an address is on the server's own host."""
        return self._connections.is_own(address)

    def _passing(self, address: Address, error: Exception) -> Transient:
        host = address.netloc  # perhaps another one, which hands out tokens or has the blobs
        return Transient(reason(error) if host == self.host else f"{host}: {reason(error)}")

    @property
    def _may_be_plain(self) -> bool:
        return site.may_be_plain(self.host, self._settings)

    def _unreachable(self, error: Exception) -> Unreachable:
        if is_untrusted(error):
            why = reason(error)
            hint = "add its authority to the system's, or name it in registries.conf or SSL_CERT_FILE"
            if "expired" in why or "not yet valid" in why:
                hint = "who runs the registry has to renew it, if the clock here is right: see date(1)"
            elif "mismatch" in why:
                hint = "call the registry by a name that its certificate has"
            return Unreachable(f"the certificate of {self.host} is not trusted: {why}", hint=hint)
        hint = "check the name, the network and http_proxy/https_proxy"
        if not self._may_be_plain:
            hint += "; a registry without TLS needs ENROOT_ALLOW_HTTP=yes, or a line in registries.conf"
        return Unreachable(f"cannot reach the registry {self.host}: {reason(error)}", hint=hint)


def retry_after(value: str) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date: RFC 9110, 10.2.3."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
