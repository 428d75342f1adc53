"""What a tag means now, asked in the cheapest way that there is.

The start path of an image that is stored, and srun: http.client is imported in a quarter of
the time that registry.py takes.
"""

import os

from enroot_py import __version__, log
from enroot_py.reference import DOCKER_HUB, MANIFEST_TYPES, is_local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from enroot_py.reference import Reference
    from enroot_py.settings import Settings

_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def at_once(reference: "Reference", base: str, settings: "Settings") -> str:
    """The digest of a tag from a registry at ``base`` (SCHEME://HOST) that wants no login and no proxy; else "".

    Whatever else comes is for the real client to see, and to report.
    """
    if any(os.environ.get(name) or settings.passed_on.get(name) for name in _PROXIES):
        return ""
    scheme, _, host = base.partition("://")
    if scheme == "http" and not settings.allow_http and not is_local(host) or scheme not in ("http", "https"):
        return ""

    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    timeout = settings.connect_timeout or None
    kind = HTTPConnection if scheme == "http" else HTTPSConnection
    try:
        connection = kind(host, timeout=timeout)
        try:
            path = f"/v2/{reference.repository}/manifests/{reference.tag}"
            connection.request(
                "HEAD", path, headers={"Accept": ", ".join(MANIFEST_TYPES), "User-Agent": f"penroot/{__version__}"}
            )
            response = connection.getresponse()
            return response.headers.get("Docker-Content-Digest") or "" if response.status == 200 else ""
        finally:
            connection.close()
    except (OSError, HTTPException) as e:
        log.debug(f"{host}: {e}; asking again")
        return ""


def resolve(reference: "Reference", settings: "Settings") -> str:
    """The digest of a tag, or "" where its registry does not tell. Raises PenrootError."""
    from enroot_py import registries
    from enroot_py.sources import open_source

    host = reference.registry
    if host != DOCKER_HUB and not registries.site(host, settings).mirrors:  # Docker's wants a token
        scheme = "https"
        if is_local(host) or settings.allow_http and not _speaks_tls(host, settings):
            scheme = "http"
        digest = at_once(reference, f"{scheme}://{host}", settings)
        if digest:
            return digest
    return open_source(reference, settings).digest()


def _speaks_tls(host: str, settings: "Settings") -> bool:
    """Nothing is sent, so nobody's certificate is looked at: reading the authorities takes longer than this."""
    import socket
    import ssl

    name, colon, port = host.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = (name if colon else host, int(port) if colon else 443)
    try:
        with (
            socket.create_connection(address, settings.connect_timeout or None) as plain,
            context.wrap_socket(plain, server_hostname=address[0]),
        ):
            return True
    except (OSError, ValueError):
        return False
