"""What a tag means now, asked in the cheapest way that there is.

The start path of an image that is stored, and srun: one request without a body, which
answers no more than a header. To import http.client alone takes longer than the
interpreter's own start, and registry.py four times as long again.
"""

import os

from enroot_py import __version__, log, registries
from enroot_py.reference import DOCKER_HUB, MANIFEST_TYPES, is_local
from enroot_py.store import is_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

    from enroot_py.reference import Reference
    from enroot_py.settings import Settings

_MOST = 1 << 16  # bytes of an answer without a body
_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def at_once(reference: "Reference", base: str, settings: "Settings") -> str:
    """The digest of a tag from a registry at ``base`` (SCHEME://HOST) that wants no login and no proxy; else "".

    Whatever else comes is for the real client to see, and to report.
    """
    if any(os.environ.get(name) or settings.passed_on.get(name) for name in _PROXIES):
        return ""
    scheme, _, host = base.partition("://")
    if scheme == "http" and not registries.may_be_plain(host, settings) or scheme not in ("http", "https"):
        return ""

    path = f"/v2/{reference.repository}/manifests/{reference.tag}"
    try:
        status, headers = _head(host, path, scheme == "https", settings.connect_timeout or None)
    except (OSError, ValueError) as e:
        log.debug(f"{host}: {e}; asking again")
        return ""
    digest = headers.get("docker-content-digest", "") if status == 200 else ""
    return digest if is_digest(digest) else ""


def _head(host: str, path: str, tls: bool, timeout: "float | None") -> "tuple[int, dict[str, str]]":
    """Status and headers, by small names, of a HEAD request (RFC 9110). Raises OSError, ValueError."""
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


def _connect(host: str, port: int, tls: bool, timeout: "float | None") -> "socket":
    """A connection to HOST[:PORT], or [IPV6]:PORT. Raises OSError, ValueError."""
    import _socket

    name, colon, given = host.rpartition(":")
    if colon and not host.endswith("]"):
        port = int(given)
    else:
        name = host
    name = name.strip("[]")
    if tls:
        import socket

        return registries.tls().wrap_socket(socket.create_connection((name, port), timeout), server_hostname=name)
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


def resolve(reference: "Reference", settings: "Settings") -> str:
    """The digest of a tag, or "" where its registry does not tell. Raises PenrootError."""
    host = reference.registry
    if host != DOCKER_HUB and not registries.site(host, settings).mirrors:  # Docker's wants a token
        # Nothing secret is sent, and what speaks TLS says so: then the real client asks.
        plain = is_local(host) or ":" in host and registries.may_be_plain(host, settings)
        digest = at_once(reference, f"{'http' if plain else 'https'}://{host}", settings)
        if digest:
            return digest
    from enroot_py.sources import open_source

    return open_source(reference, settings).digest()
