"""An HTTP client for untrusted servers. It retries, limits responses, and sends secrets to one server only.

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
_MAX_RETRY_AFTER_S = 60.0
_MAX_REDIRECTS = 5
_CHUNK_BYTES = 1 << 18
# A server could waste the client's CPU with a body in tiny pieces. After _MAX_SMALL_READS reads, the client refuses a
# body if its reads have fewer than _SMALL_READ_BYTES on average.
_MAX_SMALL_READS = 20_000
_SMALL_READ_BYTES = 100
_READ_S = 1.0  # Response.read() collects data for up to this time
_PAGE_TYPES = ("text/html", "application/xhtml+xml")
_PAGE_STARTS = (b"<!doctype html", b"<html")
_SNIFFED_BYTES = 256  # of a body, to detect a web page
_MAX_SHOWN_CHARS = 256  # of an address
_MAX_DISCARDED_BYTES = 1 << 16  # reading more costs more than a new connection
_NO_CONNECTION = (exceptions.SSLError, exceptions.NewConnectionError, exceptions.ConnectTimeoutError)


class Transient(Exception):
    """A failure that may be temporary. ``retry_after`` is the time in seconds that the server asks for, or None."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Retries:
    """Count the failures of a request, and sleep before each retry."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.transfer_retries
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def run(self, subject: str, act: Callable[[], _T]) -> _T:
        """Call ``act`` until it does not raise Transient. Raises Unreachable after the last retry.

        Messages begin with ``subject``.
        """
        while True:
            try:
                return act()
            except Transient as e:
                self.sleep(e, subject)

    def sleep(self, error: Transient, subject: str) -> None:
        """Sleep before the next retry. Raises Unreachable after the last retry, or for a long Retry-After."""
        self._failures += 1
        requested = error.retry_after
        wait = requested if requested is not None else min(0.25 * 2**self._failures, 15.0) * random.uniform(0.5, 1.0)
        if self._failures > self._limit or wait > _MAX_RETRY_AFTER_S:
            retry_after = f" (Retry-After: {requested:.0f} s)" if requested else ""
            raise Unreachable(
                f"{subject}: {error}{retry_after}, after {self._failures} {'try' if self._failures == 1 else 'tries'}",
                hint="try again later, or raise ENROOT_TRANSFER_RETRIES or ENROOT_STALL_TIMEOUT",
            ) from error
        log.info(f"{subject}: {error}; trying again in {wait:.1f} s")
        time.sleep(wait)


class Response:
    """A response from ``address``, read as it arrives. Use it in a ``with``. Methods raise Transient."""

    def __init__(self, response: urllib3.response.BaseHTTPResponse, address: Address) -> None:
        self.status = response.status
        self.server = address
        self.address = str(address).partition("?")[0][:_MAX_SHOWN_CHARS]  # for messages: a query may have secrets
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
        """Close the connection, or return it to its pool if the whole body was read."""
        self._response.close()

    def header(self, name: str) -> str:
        return str(self._response.headers.get(name, ""))

    def read(self, size: int, *, decode: bool = False) -> bytes:
        """Return the bytes that arrive within a second: at least one, and at most ``size``. Return b"" at the end."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            return data
        if self._failure:
            raise self._failure
        parts: list[bytes] = []
        deadline = time.monotonic() + _READ_S
        try:
            while size > 0 and (data := self._response.read1(size, decode_content=decode)):
                parts.append(data)
                size -= len(data)
                self._bytes += len(data)
                self._reads += 1
                if self._reads > _MAX_SMALL_READS and self._bytes < _SMALL_READ_BYTES * self._reads:
                    self._failure = Transient(f"only {self._bytes} bytes in {self._reads} pieces")
                    break
                if time.monotonic() > deadline:
                    break
        except (exceptions.HTTPError, OSError) as e:
            self._failure = Transient(reason(e))
            if not parts:
                raise self._failure from e
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Discard up to ``size`` bytes of the body."""
        while size and (data := self.read(min(size, _CHUNK_BYTES))):
            size -= len(data)

    def document(self, limit: int) -> bytes:
        """Return the first ``limit`` bytes of the body, or the whole body if it is shorter."""
        # Decompress: some proxies compress documents in spite of Accept-Encoding. Blobs are read without decompression,
        # because their digests cover the compressed bytes.
        parts = []
        while limit > 0 and (data := self.read(min(limit, _CHUNK_BYTES), decode=True)):
            limit -= len(data)
            parts.append(data)
        return b"".join(parts)

    def is_page(self, document: bytes | None = None) -> bool:
        """Return whether the body is a web page. ``document`` is the body, or None for a blob that was not read yet."""
        is_html = self.header("Content-Type").partition(";")[0].strip().lower() in _PAGE_TYPES
        if document is None and is_html:
            self._ahead = document = self.read(_SNIFFED_BYTES)
            return _begins(document, b"<")
        if document is None:
            return False
        return not _begins(document, b"{") if is_html else _begins(document, *_PAGE_STARTS)

    def refuse_page(self, host: str, document: bytes | None = None) -> None:
        """Raise WebPage if ``host`` sent a web page instead of a document or a blob. ``document``: see is_page."""
        try:
            is_page = self.is_page(document)
        except BaseException:
            self.close()
            raise
        if is_page:
            self.close()
            raise WebPage(
                f"{host} answered with a web page ({self.address})",
                hint=f"open the address in a browser: perhaps {host} is not a registry, or a proxy (https_proxy, "
                "no_proxy) or the network's login portal answers in its place",
            )

    def discard(self) -> None:
        """Read the rest of a small body, to reuse the connection."""
        with self, contextlib.suppress(Transient):
            self.document(_MAX_DISCARDED_BYTES)


def _begins(document: bytes, *starts: bytes) -> bool:
    return document[:_SNIFFED_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(starts)


class HttpClient:
    """Send requests to one server and follow its redirects.

    ``host`` is HOST or HOST:PORT. ``on_progress`` is called with False for each response. ``is_insecure`` allows plain
    HTTP, and a certificate that is not trusted. Methods raise Transient, RegistryError, and Unreachable (a
    RegistryError) if no server answers.
    """

    def __init__(
        self, host: str, settings: Settings, on_progress: Callable[[bool], None], *, is_insecure: bool = False
    ) -> None:
        self.host = host
        self.base = ""  # https://HOST or http://HOST, after the first response
        self._settings = settings
        self._on_progress = on_progress
        self._is_insecure = is_insecure
        self._connections = Connections(host, settings, is_insecure=is_insecure)

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """Send a request to the server over TLS. If TLS fails and plain HTTP is allowed, use plain HTTP."""
        if self.base:
            return self.follow(method, addresses.read(self.base + path), headers)
        try:
            return self._first_request("https", method, path, headers)
        except _NO_CONNECTION as e:
            failure = e
        if not is_untrusted(failure) and self._may_be_plain:
            try:
                return self._first_request("http", method, path, headers)
            except _NO_CONNECTION as e:
                failure = e
        raise self._unreachable(failure) from failure

    def _first_request(self, scheme: str, method: str, path: str, headers: Mapping[str, str]) -> Response:
        address = addresses.read(f"{scheme}://{self.host}{path}")
        response = self.follow(method, address, headers)
        self.base = address.origin
        return response

    def follow(self, method: str, address: Address, headers: Mapping[str, str]) -> Response:
        """Send a request and follow redirects. Authorization is only sent to the origin of ``address``."""
        first = address
        for _ in range(_MAX_REDIRECTS + 1):
            response = self.once(method, address, headers)
            if response.status == 401 and address.origin != first.origin:
                response.discard()  # another host gets no secret
                raise RegistryError(f"{first.netloc} redirects to {address.netloc}, which asks for a separate login")
            if response.status not in (301, 302, 303, 307, 308):
                return response
            response.discard()
            location = response.header("Location")
            try:
                address = addresses.read(location, address)
            except ValueError as e:
                target = addresses.shown(location)
                raise RegistryError(f"{first.netloc} redirects to the bad address {target}: {e}") from e
            if (first.scheme, address.scheme) == ("https", "http"):
                raise RegistryError(f"{first.netloc} redirects to {address.origin}, which does not use https")
            if address.origin != first.origin:
                headers = {key: value for key, value in headers.items() if key != "Authorization"}
        raise RegistryError(f"{first.netloc} redirects more than {_MAX_REDIRECTS} times")

    def once(self, method: str, address: Address, headers: Mapping[str, str], body: bytes | None = None) -> Response:
        """Send a request without following redirects."""
        settings = self._settings
        began = time.monotonic()
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
            # The failure may be temporary if the server has answered before. An address on another host comes from such
            # an answer.
            if self.base or not self.is_own(address):
                raise self._transient(address, e) from e
            raise
        except exceptions.ProxyError as e:
            proxy = proxy_name(self._connections.proxy(address))
            raise Unreachable(
                f"cannot reach {address.netloc} through the proxy {proxy}: {reason(e)}",
                hint="check http_proxy, https_proxy and no_proxy",
            ) from e
        except exceptions.LocationValueError as e:
            raise RegistryError(f"bad address {addresses.shown(str(address))}: {e}") from e
        except exceptions.HTTPError as e:  # a timeout, a closed connection, or a response that is not HTTP
            raise self._transient(address, e) from e
        self._on_progress(False)
        answered = Response(response, address)
        log.debug(f"{method} {answered.address}: {answered.status} after {time.monotonic() - began:.3f} s")
        return answered

    def is_own(self, address: Address) -> bool:
        return self._connections.is_own(address)

    def _transient(self, address: Address, error: Exception) -> Transient:
        host = address.netloc  # the registry, a token server, or another server that has the blobs
        return Transient(reason(error) if host == self.host else f"{host}: {reason(error)}")

    @property
    def _may_be_plain(self) -> bool:
        return self._is_insecure or site.may_be_plain(self.host, self._settings)

    def _unreachable(self, error: Exception) -> Unreachable:
        if is_untrusted(error):
            cause = reason(error)
            hint = (
                "add the server's certificate authority to the system, or name the authority's file in registries.conf "
                "or SSL_CERT_FILE"
            )
            if "expired" in cause or "not yet valid" in cause:
                hint = (
                    "check the clock here with date(1); if it is right, ask the registry's admin for a new certificate"
                )
            elif "mismatch" in cause:
                hint = "use a name of the registry that is in its certificate"
            return Unreachable(f"the certificate of {self.host} is not trusted: {cause}", hint=hint)
        hint = "check the name, the network and http_proxy/https_proxy"
        if not self._may_be_plain:
            hint += "; for a registry without TLS, set ENROOT_ALLOW_HTTP=HOST or add a line to registries.conf"
        return Unreachable(f"cannot reach the registry {self.host}: {reason(error)}", hint=hint)


def retry_after(value: str) -> float | None:
    """Return the seconds to wait for the ``value`` of Retry-After, a number or a date: RFC 9110, 10.2.3."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
