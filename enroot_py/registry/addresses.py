"""Addresses of HTTP as registries give them, read by one parser: that of the library which connects to them.

Two parsers that differ on a backslash or a control character would have one host checked and
another one talked to. Sources: RFC 3986; RFC 9110, 4.2; curl(1), NO_PROXY.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from urllib.parse import urljoin

from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

_T = TypeVar("_T")
_PORTS = {"http": 80, "https": 443}
_SHOWN = 100  # characters of an address in a message
_HOST = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_")


class Address(NamedTuple):
    """A whole address without its fragment; ``path`` has the query too."""

    scheme: str
    host: str  # small letters; an IPv6 address in brackets
    port: int
    path: str

    @property
    def netloc(self) -> str:
        """HOST, or HOST:PORT where that is not the usual one."""
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.netloc}"

    def __str__(self) -> str:
        return self.origin + self.path


def read(text: str, base: Address | None = None) -> Address:
    """An address of http or https that somebody else gave, relative to ``base``. Raises ValueError."""
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise ValueError("it has characters that no address has")
    try:
        url = parse_url(urljoin(str(base), text) if base else text)
    except LocationParseError:  # it would quote all of it
        raise ValueError("it does not parse") from None
    if url.scheme not in _PORTS:
        raise ValueError("it is not one of http or https")
    if url.auth is not None:
        raise ValueError("it has a user or password")
    host = url.host or ""
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or "%" in host or not bracketed and not _HOST.issuperset(host):
        raise ValueError("its host is none")
    return Address(url.scheme, host, _PORTS[url.scheme] if url.port is None else url.port, url.request_uri)


def shown(text: str) -> str:
    """An address for a message, without user and query, which may be secrets."""
    text = text.partition("?")[0]
    user, at, rest = text.rpartition("@")
    return repr((f"{user.partition('://')[0]}://…@{rest}" if at else text)[:_SHOWN])


def is_of_this_machine(address: str) -> bool:
    """Whether an IP address reaches this machine itself, or is link-local, as the metadata of clouds are."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified


def bypasses(netloc: str, no_proxy: str) -> bool:
    """Whether no_proxy names a host: a list of ``*``, HOST, HOST:PORT, DOMAIN, ``.DOMAIN``, ADDRESS and ADDRESS/BITS.

    A network is for hosts that are named by their address, as for curl(1): no name is looked up.
    """
    host, _, port = netloc.rpartition(":") if netloc.rpartition(":")[2].isdecimal() else (netloc, "", "")
    host = host.strip("[]").rstrip(".").lower()
    return any(_names(word, host, port) for word in no_proxy.replace(",", " ").lower().split())


def _names(word: str, host: str, port: str) -> bool:
    """Whether one word of no_proxy names a host."""
    if word == "*":
        return True
    number = _or_none(ipaddress.ip_address, host)
    network = _or_none(lambda text: ipaddress.ip_network(text, strict=False), word.strip("[]"))
    if number is not None and network is not None and number in network:
        return True
    name, colon, its_port = word.rpartition(":")
    if not (colon and its_port.isdecimal()):
        name, its_port = word, ""
    name = name.strip("[]").removeprefix("*").strip(".")
    return bool(name) and its_port in ("", port) and (host == name or number is None and host.endswith("." + name))


def _or_none(read: Callable[[str], _T], text: str) -> _T | None:
    try:
        return read(text)
    except ValueError:
        return None
