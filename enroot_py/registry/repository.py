"""A client of one repository in a registry.

Sources: OCI distribution specification, "Pull"; Docker's "Token Authentication
Specification"; RFC 9110 for Range, Retry-After and challenges.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import IncompleteRead
from urllib.parse import unquote, urlencode

import urllib3
from urllib3 import exceptions

from enroot_py import __version__
from enroot_py.base import digests, log
from enroot_py.base.errors import ConfigError, ImageError, RefusedError, RegistryError, Unreachable
from enroot_py.config.settings import Settings
from enroot_py.registry import addresses, connections, credentials, manifests, site
from enroot_py.registry.addresses import Address
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.reference import DOCKER_HUB, MANIFEST_TYPES, Reference

_ACCEPT = ", ".join(MANIFEST_TYPES)
_MAX_MANIFEST = 4 << 20  # bytes: OCI distribution specification, "Pushing Manifests"
_MAX_CONFIG = 8 << 20
_MAX_TOKEN = 1 << 16  # bytes of the answer that has it; no server takes a header of that size
_MAX_TAG = 128
_SHOWN = 200  # characters of what a server says
_MAX_URLS = 4
_MAX_WAIT = 60.0  # seconds that we are willing to wait because a registry says so
_MAX_REDIRECTS = 5
_PROGRESS = 1 << 20  # bytes after which a resumed transfer has all its tries again
_CHUNK = 1 << 18
_READS = 20_000  # with fewer than _PIECE bytes each, a body costs us more than its sender
_PIECE = 100
_AT_ONCE = 1.0  # seconds that a read takes at most once something has come


class _Transient(Exception):
    """One try failed; another may not. ``wait`` seconds first, if the registry said so."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Registry:
    """The repository of ``reference``. Nothing is asked before the first method is called.

    ``heard`` is called with each answer, and with True before a program is asked for a login. Methods
    raise RegistryError, as Unreachable where the registry gives no answer, and ImageError for an
    answer that is not what its digest promised.
    """

    def __init__(
        self, reference: Reference, settings: Settings, heard: Callable[[bool], None] = lambda asks: None
    ) -> None:
        self._reference = reference
        self._heard = heard
        self._settings = settings
        self._site = site.site(reference.registry, settings)
        self._environ = {**settings.passed_on, **os.environ}
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._context: ssl.SSLContext | None = None  # made once: reading the authorities takes 30 ms
        self._pid = os.getpid()
        self.base = ""  # https://HOST or http://HOST, once it has answered
        self._authorization = ""
        self._credential: credentials.Credential | None = None
        self._stranger = ""  # who hands out tokens and is not known to: it got no login

    # -- what a registry has

    def digest(self) -> str:
        """The digest that the reference has now; one HEAD request. Empty if the registry does not tell."""
        try:
            response = self._get(self._manifest_path(), {"Accept": _ACCEPT}, method="HEAD")
        except Unreachable:
            raise
        except RegistryError as e:
            log.debug(f"{e}; asking with GET, for some refuse HEAD alone")
            data = self._small(self._manifest_path(), _MAX_MANIFEST, {"Accept": _ACCEPT}, "a manifest")
            return digests.of(data)
        _discard(response)
        said = str(response.headers.get("Docker-Content-Digest") or "")
        return said if digests.is_digest(said) else ""

    def manifest(self, arch: str | None = None) -> Manifest:
        """The image manifest for an architecture (default: this machine's), its digests checked."""
        path = self._manifest_path()
        data = self._small(path, _MAX_MANIFEST, {"Accept": _ACCEPT}, "a manifest")
        digest = digests.of(data)
        if self._reference.digest and digest != self._reference.digest:
            raise ImageError(
                f"{self._reference}: the registry sent a manifest with the digest {digest}",
                hint="the registry or a proxy before it is broken, or lies: the image was not used",
            )
        return manifests.Search(self, self._reference, arch).image_of(data)

    def named(self, digest: str) -> bytes:
        """A manifest or index by its digest, which is checked."""
        data = self._small(self._manifest_path(digest), _MAX_MANIFEST, {"Accept": _ACCEPT}, "a manifest")
        if digests.of(data) != digest:
            raise ImageError(f"{self._reference}: the manifest {digest} has the digest {digests.of(data)}")
        return data

    def config(self, manifest: Manifest) -> bytes:
        """The image's config, its digest checked."""
        descriptor = manifest.config
        if descriptor.size > _MAX_CONFIG:
            raise ImageError(f"{self._reference}: a config of {descriptor.size} bytes")
        data = self._small(self._blob_path(descriptor), descriptor.size, {}, f"the config {descriptor.digest}")
        if digests.of(data) != descriptor.digest:
            raise ImageError(f"{self._reference}: the config {descriptor.digest} has the digest {digests.of(data)}")
        return data

    def blob(self, descriptor: Descriptor) -> Blob:
        """A blob as a stream, which resumes where a connection broke. The caller checks its digest."""
        return Blob(self, self._blob_path(descriptor), descriptor, self._settings)

    def elsewhere(self, descriptor: Descriptor, headers: Mapping[str, str]) -> urllib3.response.BaseHTTPResponse:
        """A blob from where its manifest says that it is kept; by TLS only, and without a login."""
        failures = []
        passing: _Transient | None = None
        for url in descriptor.urls[:_MAX_URLS]:
            try:
                address = addresses.read(url)
                if address.scheme != "https":
                    raise ValueError("it is not one of https")
                response = self._follow("GET", address, headers)
                if response.status in (200, 206, 416):
                    return response
                self._refuse(response, address.origin)
            except _Transient as e:
                passing = e
            except (ValueError, RegistryError) as e:
                failures.append(f"{addresses.shown(url)}: {e}")
        if passing is not None:
            raise passing
        raise RegistryError(
            f"the blob {descriptor.digest} is not in the registry, but elsewhere: {'; '.join(failures)}"
        )

    # -- requests

    def _manifest_path(self, digest: str = "") -> str:
        name = digest or self._reference.digest or self._reference.tag
        return f"/v2/{self._reference.repository}/manifests/{name}"

    def _blob_path(self, descriptor: Descriptor) -> str:
        return f"/v2/{self._reference.repository}/blobs/{descriptor.digest}"

    def _small(self, path: str, limit: int, headers: Mapping[str, str], what: str) -> bytes:
        patience = Patience(self._settings)
        while True:
            response = self._get(path, headers, patience=patience)
            try:
                data = _Body(response).document(limit + 1)
            except _Transient as e:
                patience.lost(e, f"{what} from {self._reference.registry}")
                continue
            finally:
                response.close()
            if len(data) > limit:
                raise ImageError(f"{self._reference}: {what} is larger than {limit} bytes")
            return data

    def _get(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        patience: Patience | None = None,
    ) -> urllib3.response.BaseHTTPResponse:
        """A response of status 200 or 206, or 416 to a Range; errors raised, passing ones outwaited."""
        patience = patience or Patience(self._settings)
        while True:
            try:
                response = self._authorized(method, path, headers)
                if response.status in (200, 206, 416):
                    return response
                self._refuse(response, path)
            except _Transient as e:
                patience.lost(e, self._reference.registry)

    def _authorized(self, method: str, path: str, headers: Mapping[str, str]) -> urllib3.response.BaseHTTPResponse:
        response = self._send(method, path, headers)
        if response.status != 401:
            return response
        challenge = response.headers.get("WWW-Authenticate", "")
        _discard(response)
        self._authenticate(challenge)  # also when a token has expired in the middle of a pull
        response = self._send(method, path, headers)
        if response.status == 401:
            _discard(response)
            raise self._unauthorized()
        return response

    def _send(self, method: str, path: str, headers: Mapping[str, str]) -> urllib3.response.BaseHTTPResponse:
        """One request to the registry, over TLS or, where that is allowed and needed, without."""
        own = {"Authorization": self._authorization} if self._authorization else {}
        if self.base:
            return self._follow(method, addresses.read(self.base + path), {**headers, **own})
        secure = addresses.read(f"https://{self._reference.registry}{path}")
        try:
            response = self._follow(method, secure, {**headers, **own})
            self.base = secure.origin
            return response
        except (exceptions.SSLError, exceptions.NewConnectionError, exceptions.ConnectTimeoutError) as e:
            failure = e
        if not _is_untrusted(failure) and self._allows_http:
            plain = addresses.read(f"http://{self._reference.registry}{path}")
            try:
                response = self._follow(method, plain, {**headers, **own})
                self.base = plain.origin
                return response
            except (exceptions.NewConnectionError, exceptions.ConnectTimeoutError) as e:
                raise self._unreachable(e) from e
        raise self._unreachable(failure) from failure

    @property
    def _allows_http(self) -> bool:
        return site.may_be_plain(self._reference.registry, self._settings)

    def _is_own(self, address: Address) -> bool:
        """Whether an address is on the registry's own host."""
        return address.host == addresses.read(f"https://{self._reference.registry}/").host

    def _follow(self, method: str, address: Address, headers: Mapping[str, str]) -> urllib3.response.BaseHTTPResponse:
        """A request and its redirects. Authorization stays with the origin that it is for."""
        first = address
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._raw(method, address, headers)
            if response.status == 401 and address.origin != first.origin:
                _discard(response)  # the challenge is not the registry's: no secret of ours is for that host
                raise RegistryError(f"{first.netloc} redirects to {address.netloc}, which wants a login of its own")
            if response.status not in (301, 302, 303, 307, 308):
                return response
            location = response.headers.get("Location", "")
            _discard(response)
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

    def _raw(
        self, method: str, address: Address, headers: Mapping[str, str], body: bytes | None = None
    ) -> urllib3.response.BaseHTTPResponse:
        settings = self._settings
        timeout = urllib3.Timeout(connect=settings.connect_timeout or None, read=settings.stall_timeout or None)
        headers = {"User-Agent": f"penroot/{__version__}", "Accept-Encoding": "identity", **headers}
        proxy = self._proxy(address)
        try:
            response = self._pool(address, proxy).request(
                method,
                str(address),
                body=body,
                headers=headers,
                timeout=timeout,
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            self._heard(False)
            return response
        except (exceptions.SSLError, exceptions.NewConnectionError, exceptions.ConnectTimeoutError) as e:
            if self.base or not self._is_own(address):  # it has answered before: this may pass
                raise self._passing(address, e) from e
            raise
        except exceptions.ProxyError as e:
            raise Unreachable(
                f"cannot reach {address.netloc} through the proxy {_proxy_name(proxy)}: {_reason(e)}",
                hint="see http_proxy, https_proxy and no_proxy",
            ) from e
        except exceptions.LocationValueError as e:
            raise RegistryError(f"bad address {addresses.shown(str(address))}: {e}") from e
        except exceptions.HTTPError as e:  # a timeout, a connection that ended, an answer that is no HTTP
            raise self._passing(address, e) from e

    def _passing(self, address: Address, error: Exception) -> _Transient:
        host = address.netloc  # of who hands out tokens, or has the blobs, perhaps
        return _Transient(_reason(error) if host == self._reference.registry else f"{host}: {_reason(error)}")

    def _proxy(self, address: Address) -> str:
        """The proxy for an address, or ""."""
        proxies = _proxies(self._environ)
        proxy = proxies.get(address.scheme) or proxies.get("all") or ""
        return "" if addresses.bypasses(address.netloc, proxies.get("no", "")) else proxy

    def _pool(self, address: Address, proxy: str) -> urllib3.PoolManager:
        if self._pid != os.getpid():  # a forked worker must not share its parent's connections
            self._pools, self._pid = {}, os.getpid()
        kind = proxy if proxy or self._is_own(address) else "others"
        if kind not in self._pools:
            context = self._context = self._context or self._trust()
            pools = _proxy_manager(proxy, context) if proxy else urllib3.PoolManager(ssl_context=context)
            check = self._check_other if kind == "others" else None
            pools.pool_classes_by_scheme = connections.classes(self._settings.stall_timeout, check)
            self._pools[kind] = pools
        return self._pools[kind]

    def _check_other(self, connection: urllib3.connection.HTTPConnection, peer: str) -> None:
        """Whether a registry may send us there: not to this machine, if it is not here itself.

        What listens here, or at a link-local address, may trust whoever comes from here.
        """
        if addresses.is_of_this_machine(peer) and not self._is_here():
            raise RegistryError(
                f"{self._reference.registry} sends us to {connection.host}, which is {peer}: "
                "an address of this machine or of its link"
            )

    def _is_here(self) -> bool:
        """Whether the registry itself is on this machine or its link."""
        own = addresses.read(f"https://{self._reference.registry}/")
        try:
            found = socket.getaddrinfo(own.host.strip("[]"), own.port, type=socket.SOCK_STREAM)
        except OSError:  # it is behind a proxy
            return False
        return any(addresses.is_of_this_machine(str(where[0])) for *_, where in found)

    def _trust(self) -> ssl.SSLContext:
        """The system's authorities, and those that are named. OpenSSL reads SSL_CERT_* of the environment itself."""
        context = site.tls()
        said = self._settings.passed_on
        for cafile, capath in (
            (said.get("SSL_CERT_FILE"), None), (None, said.get("SSL_CERT_DIR")), (self._site.ca or None, None)
        ):  # fmt: skip
            if cafile or capath:
                try:
                    context.load_verify_locations(cafile, capath)
                except (OSError, ssl.SSLError) as e:
                    raise ConfigError(f"cannot read the authorities in {cafile or capath}: {_reason(e)}") from e
        return context

    # -- authorization

    def _authenticate(self, header: str) -> None:
        """Answer a challenge: get a token for this repository, or use Basic."""
        known = dict(challenges(header))
        registry = self._reference.registry
        if "bearer" in known and known["bearer"].get("realm"):
            self._authorization = "Bearer " + self._token(known["bearer"])
            return
        if "basic" not in known:
            raise RegistryError(f"{registry} asks for an authorization that is not known here: {header[:80]!r}")
        self._credential = self._login()
        if self._credential is None:
            raise self._unauthorized()
        self._authorization = self._credential.basic()

    def _login(self, realm: str = "") -> credentials.Credential | None:
        self._heard(True)  # a program that knows it, and may ask its user, is not the registry's silence
        found = credentials.find(self._reference, self._settings, realm=realm)
        self._heard(False)
        return found

    def _token(self, challenge: Mapping[str, str]) -> str:
        registry, repository = self._reference.registry, self._reference.repository
        try:
            realm = addresses.read(challenge["realm"])
        except ValueError as e:
            where = addresses.shown(challenge["realm"])
            raise RegistryError(f"{registry} wants its tokens to be fetched from {where}: {e}") from e
        if realm.scheme == "http" and not (self.base.startswith("http:") and self._may_be_plain(realm)):
            raise RegistryError(f"{registry} wants its tokens to be fetched from {realm.origin}, which is not secure")
        # A registry names whom it likes. Another one's login, or a token for it, is not for this one.
        known = site.is_token_server(registry, realm.netloc, self._settings)
        found = None
        if known or self._is_own(realm):
            found = self._login(realm.netloc if known else "")
        else:
            self._stranger = realm.netloc
        self._credential = found
        # Nor is what the challenge says about the scope: a token is for the repository that was asked for.
        query = {"service": challenge.get("service", ""), "scope": f"repository:{repository}:pull"}
        log.debug(f"token for {query['scope']} from {realm.netloc} as {found.user if found else 'anonymous'}")
        if found and found.identity_token:
            form = {**query, "grant_type": "refresh_token", "client_id": "penroot", "refresh_token": found.secret}
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            response = self._raw("POST", realm, kind, urlencode(form).encode())
        else:
            login = {"Authorization": found.basic()} if found else {}
            asked = realm._replace(path=realm.path + ("&" if "?" in realm.path else "?") + urlencode(query))
            response = self._follow("GET", asked, login)
        if response.status in (401, 403):
            _discard(response)
            raise self._unauthorized()
        if response.status != 200:
            self._refuse(response, realm.origin)
        try:
            answer = json.loads(_Body(response).document(_MAX_TOKEN))
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        finally:
            response.close()
        # It becomes part of a header: RFC 6750, 2.1.
        if not isinstance(token, str) or not token or not (token.isascii() and token.isprintable()) or " " in token:
            raise RegistryError(f"{realm.netloc} sent no token for {registry}, or none that can be one")
        return token

    def _may_be_plain(self, realm: Address) -> bool:
        return self._is_own(realm) or site.may_be_plain(realm.netloc, self._settings)

    def _unauthorized(self) -> RefusedError:
        reference = self._reference
        registry, repository = reference.registry, reference.repository
        used = self._credential
        if used is not None:
            return RefusedError(
                f"401 from {registry}: the login of {used.user!r} from {used.source} is refused for {repository}",
                hint="check user, password and the rights in that repository",
            )
        if self._stranger:
            return RefusedError(
                f"401 from {registry}: {repository} does not exist or needs a login, and {self._stranger}, "
                f"which hands out the tokens, gets no login for {registry}",
                hint=self._introduction(),
            )
        who = f"no password of {reference.user!r}" if reference.user else "no login"
        return RefusedError(
            f"401 from {registry}: {repository} does not exist or needs a login, and there is {who} for {registry}",
            hint=_meant(reference) or f"looked in: {credentials.places(self._settings)}",
        )

    def _introduction(self) -> str:
        """How a token server on another host gets to be known."""
        where = f"{self._settings.config_path}/registries.conf"
        return f"if both are of one house, say so in {where}: {self._reference.registry} token={self._stranger}"

    # -- failures

    def _refuse(self, response: urllib3.response.BaseHTTPResponse, path: str) -> None:
        """Raise what a status means."""
        registry, repository = self._reference.registry, self._reference.repository
        text = _Body(response).document(1 << 16)
        response.close()
        status, said = response.status, _said(text)
        if status in (408, 425, 429) or status >= 500:
            raise _Transient(f"{status} {said}".strip(), _retry_after(response.headers.get("Retry-After", "")))
        if status == 404 and "/manifests/" in path:
            raise self._no_manifest()
        if status == 403:
            by = (
                f"{self._credential.user!r} from {self._credential.source}"
                if self._credential
                else "nobody in particular"
            )
            raise RefusedError(
                f"403 from {registry}: {repository} is denied to {by} {said}".rstrip(),
                hint=self._introduction() if self._stranger else "",
            )
        raise RegistryError(f"{status} from {registry} for {path}: {said or 'no reason given'}")

    def _no_manifest(self) -> RefusedError:
        """Which of the two is missing, the repository or the tag, and what tags there are."""
        reference = self._reference
        try:
            response = self._authorized("GET", f"/v2/{reference.repository}/tags/list", {})
            data = _Body(response).document(1 << 20)
            response.close()
            tags = json.loads(data).get("tags") if response.status == 200 else None
            shown = [str(tag)[:_MAX_TAG] for tag in tags or ()][:12]
        except (RegistryError, _Transient, ValueError, TypeError, AttributeError, RecursionError):
            return RefusedError(
                f"{reference.registry} has no {reference.repository}:{reference.tag or reference.digest}"
            )
        if not tags:
            return RefusedError(
                f"{reference.registry} has no repository {reference.repository}",
                hint=_meant(reference) or "check the name; an image of another registry is REGISTRY#IMAGE",
            )
        if reference.digest:
            return RefusedError(f"{reference.registry}/{reference.repository} has no image {reference.digest}")
        return RefusedError(
            f"{reference.registry}/{reference.repository} has no tag {reference.tag}",
            hint=_meant(reference) or f"there is: {', '.join(shown)}{', …' if len(tags) > len(shown) else ''}",
        )

    def _unreachable(self, error: Exception) -> Unreachable:
        registry = self._reference.registry
        if _is_untrusted(error):
            reason = _reason(error)
            hint = "add its authority to the system's, or name it in registries.conf or SSL_CERT_FILE"
            if "expired" in reason or "not yet valid" in reason:
                hint = "who runs the registry has to renew it, if the clock here is right: see date(1)"
            elif "mismatch" in reason:
                hint = "call the registry by a name that its certificate has"
            return Unreachable(f"the certificate of {registry} is not trusted: {reason}", hint=hint)
        hint = "check the name, the network and http_proxy/https_proxy"
        if not self._allows_http:
            hint += "; a registry without TLS needs ENROOT_ALLOW_HTTP=yes, or a line in registries.conf"
        return Unreachable(f"cannot reach the registry {registry}: {_reason(error)}", hint=hint)


def _meant(reference: Reference) -> str:
    """The way out for a name that looks like a registry's, as #SBATCH lines leave of REGISTRY#IMAGE; else ""."""
    name = reference.repository.removeprefix("library/")
    port = reference.tag if reference.tag.isdecimal() and len(reference.tag) > 3 else ""
    if reference.registry != DOCKER_HUB or "/" in name or name.endswith(".sqsh") or not ("." in name or port):
        return ""
    host = f"{name}:{port}" if port else name
    return f"if {host} is a registry: {host}/IMAGE, as # begins a comment in a batch script"


class Blob:
    """A blob as a stream of exactly its declared size, over as many connections as it takes."""

    def __init__(self, registry: Registry, path: str, descriptor: Descriptor, settings: Settings) -> None:
        self._registry = registry
        self._path = path
        self._descriptor = descriptor
        self._at = 0
        self._held = 0  # where patience began anew
        self._patience = Patience(settings)
        self._deadline = time.monotonic() + settings.transfer_timeout if settings.transfer_timeout else None
        self._body: _Body | None = None
        self._ranges = True

    def __enter__(self) -> Blob:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._body is not None:
            self._body.response.close()
            self._body = None

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes, none at the end. Raises RegistryError, ImageError."""
        while self._at < self._descriptor.size or self._body is not None:
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise Unreachable(f"the blob {self._descriptor.digest} took longer than ENROOT_TRANSFER_TIMEOUT")
            try:
                if self._body is None:
                    self._body = self._open()
                data = self._body.read(size)
                if data:
                    break
                if self._at < self._descriptor.size:
                    raise _Transient(f"the connection ended after {self._at} of {self._descriptor.size} bytes")
                self._body.response.close()
                self._body = None
                return b""
            except _Transient as e:
                self._close()
                if self._at == self._descriptor.size:
                    return b""
                self._patience.lost(e, f"the blob {self._descriptor.digest} at byte {self._at}")
        else:
            return b""
        self._at += len(data)
        if self._at > self._descriptor.size:
            raise ImageError(f"the blob {self._descriptor.digest} is larger than its {self._descriptor.size} bytes")
        if self._at - self._held >= _PROGRESS:
            self._held = self._at
            self._patience.renew()
        return data

    def _open(self) -> _Body:
        headers = {"Range": f"bytes={self._at}-"} if self._at and self._ranges else {}
        try:
            response = self._registry._get(self._path, headers, patience=self._patience)
        except Unreachable:
            raise
        except RegistryError as e:
            if not self._descriptor.urls:
                raise
            log.debug(f"{e}; asking where else its manifest says it is")
            response = self._registry.elsewhere(self._descriptor, headers)
        body = _Body(response)
        if self._at and response.status == 206:
            start = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
            if start != str(self._at):
                response.close()
                self._ranges = False  # from here on all of it, as from who does not know them
                raise _Transient(f"the registry resumed at byte {start or '?'} instead of {self._at}")
        elif response.status == 416:
            _discard(response)
            raise ImageError(f"the blob {self._descriptor.digest} is shorter than its {self._descriptor.size} bytes")
        elif self._at:  # no ranges here: pass over what we have
            left = self._at
            while left and (data := body.read(min(left, _CHUNK))):
                left -= len(data)
        return body


class Patience:
    """How often a failing transfer is tried again, and how long to wait before."""

    def __init__(self, settings: Settings) -> None:
        self._tries = settings.transfer_retries
        self._lost = 0

    def renew(self) -> None:
        self._lost = 0

    def lost(self, error: _Transient, what: str) -> None:
        """Sleep before the next try. Raises Unreachable when there is none."""
        self._lost += 1
        wait = error.wait if error.wait is not None else min(0.25 * 2**self._lost, 15.0) * random.uniform(0.5, 1.0)
        if self._lost > self._tries or wait > _MAX_WAIT:
            asked = f", and asks to wait for {error.wait:.0f} s" if error.wait else ""
            raise Unreachable(
                f"{what}: {error}{asked}, after {self._lost} {'try' if self._lost == 1 else 'tries'}",
                hint="try again later; ENROOT_TRANSFER_RETRIES and ENROOT_STALL_TIMEOUT are the limits",
            ) from error
        log.info(f"{what}: {error}; trying again in {wait:.1f} s")
        time.sleep(wait)


def challenges(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(scheme in lower case, parameters) of each challenge in WWW-Authenticate: RFC 9110, 11.6.1."""
    scheme, parameters = "", dict[str, str]()
    rest = header.strip()
    while rest:
        cut = next((at for at, c in enumerate(rest) if c in " ,="), len(rest))
        word, rest = rest[:cut], rest[cut:].lstrip(" ")
        if word and rest[:1] == "=":
            value, rest = _value(rest[1:].lstrip(" "))
            parameters[word.lower()] = value
        elif word:
            if scheme:
                yield scheme, parameters
            scheme, parameters = word.lower(), {}
        rest = rest.lstrip(" ,")
        if not word and rest[:1] == "=":
            rest = rest[1:]
    if scheme:
        yield scheme, parameters


def _value(text: str) -> tuple[str, str]:
    """A token or quoted string, and what follows it."""
    if not text.startswith('"'):
        cut = next((at for at, c in enumerate(text) if c in " ,"), len(text))
        return text[:cut], text[cut:]
    out, at = "", 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 1
        out += text[at : at + 1]
        at += 1
    return out, text[at + 1 :]


def _is_untrusted(error: BaseException | None) -> bool:
    """Whether TLS was spoken, but with somebody whose certificate is no good."""
    text = str(error)
    return isinstance(error, exceptions.SSLError) and ("CERTIFICATE" in text.upper() or "hostname" in text)


def _reason(error: BaseException) -> str:
    """The words of an exception of urllib3 without its names of Python objects."""
    inner = error.args[-1] if error.args else error
    if isinstance(inner, BaseException):
        return _reason(inner) if inner is not error else type(error).__name__
    if isinstance(error, ssl.SSLError):
        return getattr(error, "verify_message", "") or error.reason or str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, exceptions.ReadTimeoutError):
        return "no data within ENROOT_STALL_TIMEOUT"
    if isinstance(error, IncompleteRead):
        return "the connection ended early"
    if type(error) is exceptions.ConnectTimeoutError:  # NewConnectionError is one too
        return "no connection within ENROOT_CONNECT_TIMEOUT"
    if isinstance(error.__cause__, OSError):
        return _reason(error.__cause__)
    text = " ".join(str(inner).split())
    return (text.partition(">: ")[2] or text.partition("): ")[2] or text)[:_SHOWN]


def _said(body: bytes) -> str:
    """The registry's own words: OCI distribution specification, "Error Codes"."""
    try:
        errors = json.loads(body)["errors"]
        text = "; ".join(str(error.get("message") or error.get("code") or "") for error in errors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = body[:_SHOWN].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else " " for c in text[:_SHOWN]).strip()


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


def _proxy_name(proxy: str) -> str:
    """A proxy for messages, without a password."""
    return proxy.rpartition("://")[2].rpartition("@")[2].partition("/")[0]


def _proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Scheme -> proxy, and ``no``, from http_proxy and its like; lower case wins, as in curl(1)."""
    names = sorted((name for name in environ if name.lower().endswith("_proxy")), key=str.islower)
    return {name.lower().removesuffix("_proxy"): environ[name] for name in names if environ[name]}


def _retry_after(value: str) -> float | None:
    """Seconds of a Retry-After header, which is a number or a date: RFC 9110, 10.2.3."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


class _Body:
    """The body of an answer, read as it comes; failures are _Transient."""

    def __init__(self, response: urllib3.response.BaseHTTPResponse) -> None:
        self.response = response
        self._failure: _Transient | None = None
        self._reads = 0
        self._bytes = 0

    def read(self, size: int, *, decode: bool = False) -> bytes:
        """Up to ``size`` bytes: what comes within a second, or first after that; none at the end."""
        if self._failure:
            raise self._failure
        parts: list[bytes] = []
        until = time.monotonic() + _AT_ONCE
        try:
            while size > 0 and (data := self.response.read1(size, decode_content=decode)):
                parts.append(data)
                size -= len(data)
                self._bytes += len(data)
                self._reads += 1
                if self._reads > _READS and self._bytes < _PIECE * self._reads:
                    self._failure = _Transient(f"{self._reads} pieces for {self._bytes} bytes")
                    break
                if time.monotonic() > until:
                    break
        except (exceptions.HTTPError, OSError) as e:
            self._failure = _Transient(_reason(e))
            if not parts:
                raise self._failure from e
        return b"".join(parts)

    def document(self, limit: int) -> bytes:
        """All of it, or its first ``limit`` bytes."""
        # Some proxies compress documents whatever we accept. A blob is as its digest says: there Content-Encoding lies.
        parts = []
        while limit > 0 and (data := self.read(min(limit, _CHUNK), decode=True)):
            limit -= len(data)
            parts.append(data)
        return b"".join(parts)


def _discard(response: urllib3.response.BaseHTTPResponse) -> None:
    """Read what is left of a small answer, so that its connection can serve again; else that ends."""
    with contextlib.suppress(_Transient):
        _Body(response).document(1 << 16)
    response.close()  # of what was read to its end, the connection is no longer part
