"""Parse the HTTP addresses that registries send, with the parser of urllib3, because urllib3 connects to them.

If two parsers differed on a backslash or a control character, penroot would check one host and connect to another.
Sources: RFC 3986; RFC 9110, 4.2; curl(1), NO_PROXY.
"""

from __future__ import annotations

import contextlib
import ipaddress
from typing import NamedTuple
from urllib.parse import urljoin

from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

_PORTS = {"http": 80, "https": 443}
_MAX_SHOWN_CHARS = 100
_HOST_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_")


class Address(NamedTuple):
    """An absolute address without its fragment. ``path`` includes the query."""

    scheme: str
    host: str  # lower case; an IPv6 address in brackets
    port: int
    path: str

    @property
    def netloc(self) -> str:
        """Return HOST, or HOST:PORT if the port is not the scheme's default."""
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.netloc}"

    def __str__(self) -> str:
        return self.origin + self.path


def read(text: str, base: Address | None = None) -> Address:
    """Parse an untrusted http or https address, relative to ``base``. Raises ValueError."""
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise ValueError("the address has invalid characters")
    try:
        url = parse_url(urljoin(str(base), text) if base else text)
    except LocationParseError:  # do not show its message: it quotes the whole address, perhaps with a password
        raise ValueError("invalid address") from None
    if url.scheme not in _PORTS:
        raise ValueError("the scheme is neither http nor https")
    if url.auth is not None:
        raise ValueError("the address has a user or password")
    host = url.host or ""
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or "%" in host or not bracketed and not _HOST_CHARS.issuperset(host):
        raise ValueError("invalid host")
    return Address(url.scheme, host, _PORTS[url.scheme] if url.port is None else url.port, url.request_uri)


def shown(text: str) -> str:
    """Quote an address for a message, without login and query, which may be secrets."""
    text = text.partition("?")[0]
    user, at, rest = text.rpartition("@")
    return repr((f"{user.partition('://')[0]}://…@{rest}" if at else text)[:_MAX_SHOWN_CHARS])


def is_of_this_machine(address: str) -> bool:
    """Return whether an IP address is a loopback, unspecified or link-local address.

    Link-local addresses count because clouds serve the metadata of a machine there.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified


def bypasses(netloc: str, no_proxy: str) -> bool:
    """Return whether no_proxy lists a host as ``*``, HOST, HOST:PORT, DOMAIN, ``.DOMAIN``, ADDRESS or ADDRESS/BITS.

    As in curl(1), no name is resolved. So ADDRESS/BITS matches only a host that is written as an IP address.
    """
    host, _, port = netloc.rpartition(":") if netloc.rpartition(":")[2].isdecimal() else (netloc, "", "")
    host = host.strip("[]").rstrip(".").lower()
    ip = None
    with contextlib.suppress(ValueError):
        ip = ipaddress.ip_address(host)
    return any(_matches(word, host, port, ip) for word in no_proxy.replace(",", " ").lower().split())


def _matches(word: str, host: str, port: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    if word == "*":
        return True
    with contextlib.suppress(ValueError):
        if ip is not None and ip in ipaddress.ip_network(word.strip("[]"), strict=False):
            return True
    name, colon, wanted_port = word.rpartition(":")
    if not (colon and wanted_port.isdecimal()):
        name, wanted_port = word, ""
    name = name.strip("[]").removeprefix("*").strip(".")
    return bool(name) and wanted_port in ("", port) and (host == name or ip is None and host.endswith("." + name))
