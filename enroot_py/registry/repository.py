"""Pull from one repository of a registry.

Source: OCI distribution specification, "Pull".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from enroot_py.base import digests, log
from enroot_py.base.errors import ImageError, RefusedError, RegistryError, Unreachable, WebPage
from enroot_py.config.settings import Settings
from enroot_py.registry import addresses, manifests, refusals
from enroot_py.registry.authorization import Authorization
from enroot_py.registry.http import HttpClient, Response, Retries, Transient
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.reference import MANIFEST_TYPES, Reference

if TYPE_CHECKING:
    from typing_extensions import Self

_MANIFEST_HEADERS = {"Accept": ", ".join(MANIFEST_TYPES)}
_MAX_MANIFEST_BYTES = 4 << 20  # OCI distribution specification, "Pushing Manifests"
_MAX_TAGS_BYTES = 1 << 20
_MAX_URLS = 4
_PROGRESS_BYTES = 1 << 20  # after this progress, a transfer may use all its retries again
_ABSENT_STATUSES = (400, 404, 405)  # the registry lacks the object or does not know the path
_OK_STATUSES = (200, 206, 416)  # 416: the Range begins at the end of the blob


class Repository:
    """The repository of ``reference``. The first method call sends the first request.

    ``on_progress`` is called with False after each response, and with True before a program is asked for a login.
    ``is_insecure``: see HttpClient.
    Methods raise RegistryError, Unreachable (a RegistryError) if the registry does not answer, and ImageError for
    content with another digest.
    """

    def __init__(
        self,
        reference: Reference,
        settings: Settings,
        on_progress: Callable[[bool], None] = lambda busy: None,
        *,
        is_insecure: bool = False,
    ) -> None:
        self._reference = reference
        self._settings = settings
        self._client = HttpClient(reference.registry, settings, on_progress, is_insecure=is_insecure)
        self._authorization = Authorization(reference, settings, self._client, on_progress)

    @property
    def base(self) -> str:
        """Return https://HOST or http://HOST, after the first response."""
        return self._client.base

    @property
    def host(self) -> str:
        return self._client.host

    @property
    def reference(self) -> Reference:
        return self._reference

    # -- the contents of a repository

    def digest(self) -> str:
        """Return the current digest of the reference, by a HEAD request, or "" if the registry sends no digest."""
        try:
            response = self._get(self._reference.manifest_path(), _MANIFEST_HEADERS, method="HEAD")
        except Unreachable:
            raise
        except RegistryError as e:
            log.debug(f"{e}; trying GET: some registries refuse only HEAD")
            return digests.of(self._manifest())
        response.discard()
        digest = response.header("Docker-Content-Digest")
        if not digest and response.header("Content-Type").startswith("text/html"):
            return digests.of(self._manifest())  # raises WebPage for a web page
        return digest if digests.is_digest(digest) else ""

    def manifest(self, arch: str | None = None) -> Manifest:
        """Return the image manifest for an architecture (default: this machine's). Checks the digests."""
        data = self._manifest()
        digest = digests.of(data)
        if self._reference.digest and digest != self._reference.digest:
            raise ImageError(
                f"{self._reference}: the registry sent a manifest with the digest {digest}",
                hint="the image was not used; report this error to the admin of the registry or of its proxy",
            )
        return manifests.Search(self, self._reference, arch).image_of(data)

    def named(self, digest: str) -> bytes:
        """Return a manifest or index by its digest. Checks the digest."""
        digests.encoded(digest)  # ``digest`` becomes part of a path: raise ImageError for other text
        return self._checked(self._manifest(digest), digest, "manifest")

    def tagged(self, tag: str) -> bytes | None:
        """Return the manifest or index of a tag, or None if there is no such tag."""
        return self._optional_manifest(self._reference.manifest_path(tag))

    def referrers(self, digest: str) -> bytes | None:
        """Return the index of a manifest's referrers, or None if the registry does not have the referrers API."""
        return self._optional_manifest(f"/v2/{self._reference.repository}/referrers/{digest}")

    def config(self, manifest: Manifest) -> bytes:
        """Return the image's config. Checks its digest."""
        digest, size = manifest.config.digest, manifest.config.size
        if size > manifests.MAX_CONFIG_BYTES:
            raise ImageError(f"{self._reference}: the config is too large: {size} bytes")
        data = self._document(self._blob_path(manifest.config), size, f"the config {digest}")
        return self._checked(data, digest, "config")

    def blob(self, descriptor: Descriptor, start: int = 0) -> Download:
        """Stream a blob from byte ``start`` on, resuming after a broken connection. The caller checks its digest."""
        return Download(self, descriptor, self._settings, start)

    def part(self, descriptor: Descriptor, start: int, retries: Retries) -> Response:
        """Request a blob from byte ``start`` on. A registry without range requests sends the whole blob."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            response = self._get(self._blob_path(descriptor), headers, retries=retries)
            response.refuse_page(self._reference.registry)
            return response
        except Unreachable:
            raise
        except RegistryError as e:
            if not descriptor.urls:
                raise
            log.debug(f"{e}; trying the URLs in the manifest")
            return self._from_urls(descriptor, headers)

    # -- requests

    def _blob_path(self, descriptor: Descriptor) -> str:
        return f"/v2/{self._reference.repository}/blobs/{descriptor.digest}"

    def _manifest(self, digest: str = "") -> bytes:
        path = self._reference.manifest_path(digest)
        return self._document(path, _MAX_MANIFEST_BYTES, "a manifest", _MANIFEST_HEADERS)

    def _optional_manifest(self, path: str) -> bytes | None:
        def read() -> bytes | None:
            with self._authorized("GET", path, _MANIFEST_HEADERS) as response:
                if response.status not in (*_ABSENT_STATUSES, *_OK_STATUSES):
                    self._refuse(response, path)
                if response.status not in _OK_STATUSES:
                    return None
                return self._read(response, _MAX_MANIFEST_BYTES)

        data = Retries(self._settings).run(self._reference.registry, read)
        if data is not None and len(data) > _MAX_MANIFEST_BYTES:
            raise ImageError(f"{self._reference}: {path} is larger than {_MAX_MANIFEST_BYTES >> 20} MiB")
        return data

    def _checked(self, data: bytes, digest: str, kind: str) -> bytes:
        if digests.of(data) != digest:
            raise ImageError(f"{self._reference}: the {kind} {digest} has the digest {digests.of(data)}")
        return data

    def _document(self, path: str, limit: int, subject: str, headers: Mapping[str, str] | None = None) -> bytes:
        retries = Retries(self._settings)

        def read() -> bytes:
            with self._get(path, headers or {}, retries=retries) as response:
                return self._read(response, limit)

        data = retries.run(f"{subject} from {self._reference.registry}", read)
        if len(data) > limit:
            raise ImageError(f"{self._reference}: {subject} is larger than {limit} bytes")
        return data

    def _read(self, response: Response, limit: int) -> bytes:
        """Read at most ``limit`` + 1 bytes of a document. Raises WebPage."""
        data = response.document(limit + 1)
        response.refuse_page(self._reference.registry, data)
        return data

    def _get(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", retries: Retries | None = None
    ) -> Response:
        """Send a request, and retry after temporary errors. Return a response with one of _OK_STATUSES."""

        def get() -> Response:
            response = self._authorized(method, path, headers)
            if response.status not in _OK_STATUSES:
                self._refuse(response, path)
            return response

        return (retries or Retries(self._settings)).run(self._reference.registry, get)

    def _authorized(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """Send a request with the authorization that the registry asks for. Renew a token that has expired."""
        authorization = self._authorization

        def ask() -> Response:
            return self._client.request(method, path, {**headers, **authorization.headers})

        response = ask()
        has_expired = authorization.note_status(response.status)
        challenge = response.header("WWW-Authenticate") if response.status == 401 else ""
        if challenge or response.status == 401 and not has_expired:
            response.discard()
            authorization.answer(challenge)
            response = ask()
        elif has_expired:  # some registries answer 400, 401 or 403 without a challenge
            response.discard()
            response = authorization.renew(ask)
        if response.status == 401:
            response.discard()
            raise authorization.unauthorized()
        if response.status < 400 or response.status == 404:
            authorization.note_status(response.status)
        return response

    def _from_urls(self, descriptor: Descriptor, headers: Mapping[str, str]) -> Response:
        """Request a blob from the URLs in its manifest: over TLS only, and without a login."""
        failures = []
        transient: Transient | None = None
        for url in descriptor.urls[:_MAX_URLS]:
            try:
                address = addresses.read(url)
                if address.scheme != "https":
                    raise ValueError("the scheme is not https")
                response = self._client.follow("GET", address, headers)
                if response.status in _OK_STATUSES:
                    response.refuse_page(address.netloc)
                    return response
                self._refuse(response, address.origin)
            except Transient as e:
                transient = e
            except (ValueError, RegistryError) as e:
                failures.append(f"{addresses.shown(url)}: {e}")
        if transient is not None:
            raise transient
        details = "; ".join(failures)
        raise RegistryError(f"cannot fetch the blob {descriptor.digest} from the URLs in its manifest: {details}")

    def _refuse(self, response: Response, path: str) -> NoReturn:
        if response.status == 404 and "/manifests/" in path:
            response.discard()
            raise refusals.absent(self._reference, self._tags())
        if not self._client.is_own(response.server):
            raise refusals.elsewhere(response, self._reference.registry)
        if response.status == 403 or response.status == 400 and self._authorization.has_expired:
            raise self._authorization.denied(response.status, refusals.details(response))
        raise refusals.failure(response, self._reference.registry, path)

    def _tags(self) -> list[str] | None:
        """Return the tags, [] if the registry has no such repository, or None if the tags are unknown."""
        try:
            with self._authorized("GET", f"/v2/{self._reference.repository}/tags/list", {}) as response:
                if response.status != 200:
                    return [] if response.status == 404 else None
                tags = json.loads(self._read(response, _MAX_TAGS_BYTES)).get("tags")
            return [str(tag) for tag in tags or ()]
        except WebPage:
            raise
        except RefusedError:
            if self._authorization.has_expired:
                raise
            return None
        except (RegistryError, Transient, ValueError, TypeError, AttributeError, RecursionError):
            return None


class Download:
    """A blob from byte ``start`` to its declared size, over several connections if needed. Use it in a ``with``."""

    def __init__(self, repository: Repository, descriptor: Descriptor, settings: Settings, start: int) -> None:
        self._repository = repository
        self._descriptor = descriptor
        self._name = f"the blob {descriptor.digest}"
        self._at = start
        self._reset_at = start  # the byte at which _retries was reset last
        self._retries = Retries(settings)
        self._deadline = time.monotonic() + settings.transfer_timeout if settings.transfer_timeout else None
        self._response: Response | None = None
        self._may_use_ranges = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes, b"" at the end. Raises RegistryError, ImageError."""
        whole = self._descriptor.size
        while self._at < whole or self._response is not None:
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise Unreachable(f"{self._name} took longer than ENROOT_TRANSFER_TIMEOUT")
            try:
                response = self._response or self._open()
                data = response.read(size)
                if data:
                    return self._count(data)
                if self._at < whole:
                    raise Transient(f"the connection ended after {self._at} of {whole} bytes")
                self._close()
            except Transient as e:
                self._close()
                if self._at < whole:
                    self._retries.sleep(e, f"{self._name} at byte {self._at}")
        return b""

    def _count(self, data: bytes) -> bytes:
        self._at += len(data)
        if self._at > self._descriptor.size:
            raise ImageError(f"{self._name} is larger than the manifest states: {self._descriptor.size} bytes")
        if self._at - self._reset_at >= _PROGRESS_BYTES:
            self._reset_at = self._at
            self._retries.reset()
        return data

    def _open(self) -> Response:
        """Request the rest of the blob. If the registry sends the whole blob, skip the beginning."""
        start = self._at if self._may_use_ranges else 0
        response = self._response = self._repository.part(self._descriptor, start, self._retries)
        if response.status == 416:
            raise ImageError(f"{self._name} is shorter than the manifest states: {self._descriptor.size} bytes")
        if self._at and response.status == 206:
            first = response.header("Content-Range").removeprefix("bytes ").partition("-")[0]
            if first != str(self._at):
                self._may_use_ranges = False  # request the whole blob from now on
                raise Transient(f"the registry resumed at byte {first or '?'} instead of {self._at}")
        else:
            response.skip(self._at)  # the response is the whole blob
        return response
