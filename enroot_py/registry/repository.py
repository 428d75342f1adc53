"""A client of one repository in a registry.

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
from enroot_py.registry.http import HttpClient, Patience, Response, Transient
from enroot_py.registry.manifests import Descriptor, Manifest
from enroot_py.registry.reference import MANIFEST_TYPES, Reference

if TYPE_CHECKING:
    from typing_extensions import Self

_MANIFEST_HEADERS = {"Accept": ", ".join(MANIFEST_TYPES)}
_MAX_MANIFEST = 4 << 20  # bytes: OCI distribution specification, "Pushing Manifests"
_MAX_TAGS = 1 << 20
_MAX_URLS = 4
_PROGRESS = 1 << 20  # bytes after which a resumed transfer has all its tries again
_ABSENT = (400, 404, 405)  # of what a registry has not, or does not know at all
_GOOD = (200, 206, 416)  # 416 answers a Range that begins at the end of a blob


class Repository:
    """The repository of ``reference``. Nothing is asked before the first method is called.

    ``heard`` is called with each answer, and with True before a program is asked for a login. Methods
    raise RegistryError, as Unreachable where the registry gives no answer, and ImageError for an
    answer that is not what its digest promised.
    """

    def __init__(
        self, reference: Reference, settings: Settings, heard: Callable[[bool], None] = lambda asks: None
    ) -> None:
        self._reference = reference
        self._settings = settings
        self._client = HttpClient(reference.registry, settings, heard)
        self._authorization = Authorization(reference, settings, self._client, heard)

    @property
    def base(self) -> str:
        """https://HOST or http://HOST, once it has answered."""
        return self._client.base

    # -- what a repository has

    def digest(self) -> str:
        """The digest that the reference has now; one HEAD request. Empty if the registry does not tell."""
        try:
            response = self._get(self._reference.manifest_path(), _MANIFEST_HEADERS, method="HEAD")
        except Unreachable:
            raise
        except RegistryError as e:
            log.debug(f"{e}; asking with GET, for some refuse HEAD alone")
            return digests.of(self._manifest())
        response.discard()
        digest = response.header("Docker-Content-Digest")
        if not digest and response.header("Content-Type").startswith("text/html"):
            return digests.of(self._manifest())  # which is a web page, perhaps
        return digest if digests.is_digest(digest) else ""

    def manifest(self, arch: str | None = None) -> Manifest:
        """The image manifest for an architecture (default: this machine's), its digests checked."""
        data = self._manifest()
        digest = digests.of(data)
        if self._reference.digest and digest != self._reference.digest:
            raise ImageError(
                f"{self._reference}: the registry sent a manifest with the digest {digest}",
                hint="the registry or a proxy before it is broken, or lies: the image was not used",
            )
        return manifests.Search(self, self._reference, arch).image_of(data)

    def named(self, digest: str) -> bytes:
        """A manifest or index by its digest, which is checked."""
        digests.encoded(digest)  # it becomes part of a path
        return self._checked(self._manifest(digest), digest, "manifest")

    def tagged(self, tag: str) -> bytes | None:
        """The manifest or index that a tag of this repository has; None where there is no such tag."""
        return self._if_there(self._reference.manifest_path(tag))

    def referrers(self, digest: str) -> bytes | None:
        """The index of what refers to a manifest; None of a registry that does not keep one."""
        return self._if_there(f"/v2/{self._reference.repository}/referrers/{digest}")

    def config(self, manifest: Manifest) -> bytes:
        """The image's config, its digest checked."""
        digest, size = manifest.config.digest, manifest.config.size
        if size > manifests.MAX_CONFIG:
            raise ImageError(f"{self._reference}: a config of {size} bytes")
        data = self._document(self._blob_path(manifest.config), size, f"the config {digest}")
        return self._checked(data, digest, "config")

    def blob(self, descriptor: Descriptor, start: int = 0) -> Download:
        """A blob from a byte on, as a stream, which resumes where a connection broke. The caller checks its digest."""
        return Download(self, descriptor, self._settings, start)

    def part(self, descriptor: Descriptor, start: int, patience: Patience) -> Response:
        """An answer with a blob from a byte on, if the registry knows ranges; else with all of it."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            response = self._get(self._blob_path(descriptor), headers, patience=patience)
            response.refuse_page(self._reference.registry)
            return response
        except Unreachable:
            raise
        except RegistryError as e:
            if not descriptor.urls:
                raise
            log.debug(f"{e}; asking where else its manifest says it is")
            return self._elsewhere(descriptor, headers)

    # -- requests

    def _blob_path(self, descriptor: Descriptor) -> str:
        return f"/v2/{self._reference.repository}/blobs/{descriptor.digest}"

    def _manifest(self, digest: str = "") -> bytes:
        path = self._reference.manifest_path(digest)
        return self._document(path, _MAX_MANIFEST, "a manifest", _MANIFEST_HEADERS)

    def _if_there(self, path: str) -> bytes | None:
        """A manifest or index, or None where the registry has none."""
        patience = Patience(self._settings)

        def read() -> bytes | None:
            with self._authorized("GET", path, _MANIFEST_HEADERS) as response:
                if response.status not in (*_ABSENT, *_GOOD):
                    self._refuse(response, path)
                if response.status not in _GOOD:
                    return None
                return self._read(response, _MAX_MANIFEST)

        data = patience.outlast(self._reference.registry, read)
        if data is not None and len(data) > _MAX_MANIFEST:
            raise ImageError(f"{self._reference}: what is at {path} is larger than {_MAX_MANIFEST} bytes")
        return data

    def _checked(self, data: bytes, digest: str, what: str) -> bytes:
        if digests.of(data) != digest:
            raise ImageError(f"{self._reference}: the {what} {digest} has the digest {digests.of(data)}")
        return data

    def _document(self, path: str, limit: int, what: str, headers: Mapping[str, str] | None = None) -> bytes:
        patience = Patience(self._settings)

        def read() -> bytes:
            with self._get(path, headers or {}, patience=patience) as response:
                return self._read(response, limit)

        data = patience.outlast(f"{what} from {self._reference.registry}", read)
        if len(data) > limit:
            raise ImageError(f"{self._reference}: {what} is larger than {limit} bytes")
        return data

    def _read(self, response: Response, limit: int) -> bytes:
        """All of a document, or one byte more than ``limit``. Raises WebPage."""
        data = response.document(limit + 1)
        response.refuse_page(self._reference.registry, data)
        return data

    def _get(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", patience: Patience | None = None
    ) -> Response:
        """A good answer; errors raised, passing ones outwaited."""

        def get() -> Response:
            response = self._authorized(method, path, headers)
            if response.status not in _GOOD:
                self._refuse(response, path)
            return response

        return (patience or Patience(self._settings)).outlast(self._reference.registry, get)

    def _authorized(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """An answer to a request with what the registry wants of us: a token may expire in the middle of a pull."""
        authorization = self._authorization

        def ask() -> Response:
            return self._client.request(method, path, {**headers, **authorization.headers})

        response = ask()
        has_ended = authorization.heed(response.status)
        challenge = response.header("WWW-Authenticate") if response.status == 401 else ""
        if challenge or response.status == 401 and not has_ended:
            response.discard()
            authorization.answer(challenge)
            response = ask()
        elif has_ended:  # some registries answer 400, 401 or 403 without a challenge
            response.discard()
            response = authorization.renew(ask)
        if response.status == 401:
            response.discard()
            raise authorization.unauthorized()
        if response.status < 400 or response.status == 404:
            authorization.heed(response.status)
        return response

    def _elsewhere(self, descriptor: Descriptor, headers: Mapping[str, str]) -> Response:
        """A blob from where its manifest says that it is kept; by TLS only, and without a login."""
        failures = []
        passing: Transient | None = None
        for url in descriptor.urls[:_MAX_URLS]:
            try:
                address = addresses.read(url)
                if address.scheme != "https":
                    raise ValueError("it is not one of https")
                response = self._client.follow("GET", address, headers)
                if response.status in _GOOD:
                    response.refuse_page(address.netloc)
                    return response
                self._refuse(response, address.origin)
            except Transient as e:
                passing = e
            except (ValueError, RegistryError) as e:
                failures.append(f"{addresses.shown(url)}: {e}")
        if passing is not None:
            raise passing
        raise RegistryError(
            f"the blob {descriptor.digest} is not in the registry, but elsewhere: {'; '.join(failures)}"
        )

    def _refuse(self, response: Response, path: str) -> NoReturn:
        """Raise what a status means."""
        if response.status == 404 and "/manifests/" in path:
            response.discard()
            raise refusals.absent(self._reference, self._tags())
        if not self._client.is_own(response.server):
            raise refusals.elsewhere(response, self._reference.registry)
        if response.status == 403 or response.status == 400 and self._authorization.has_ended:
            raise self._authorization.denied(response.status, refusals.words(response))
        raise refusals.failure(response, self._reference.registry, path)

    def _tags(self) -> list[str] | None:
        """The tags that there are, or None where the registry does not tell."""
        try:
            with self._authorized("GET", f"/v2/{self._reference.repository}/tags/list", {}) as response:
                if response.status != 200:
                    return []
                tags = json.loads(self._read(response, _MAX_TAGS)).get("tags")
            return [str(tag) for tag in tags or ()]
        except WebPage:
            raise
        except RefusedError:
            if self._authorization.has_ended:
                raise
            return None
        except (RegistryError, Transient, ValueError, TypeError, AttributeError, RecursionError):
            return None


class Download:
    """A blob as a stream of exactly its declared size, over as many connections as it takes. Use it in a ``with``.

    ``start`` bytes of it are there already.
    """

    def __init__(self, repository: Repository, descriptor: Descriptor, settings: Settings, start: int) -> None:
        self._repository = repository
        self._descriptor = descriptor
        self._name = f"the blob {descriptor.digest}"
        self._at = start
        self._renewed = start  # the byte at which patience was
        self._patience = Patience(settings)
        self._deadline = time.monotonic() + settings.transfer_timeout if settings.transfer_timeout else None
        self._response: Response | None = None
        self._ranges = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes, none at the end. Raises RegistryError, ImageError."""
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
                    self._patience.wait(e, f"{self._name} at byte {self._at}")
        return b""

    def _count(self, data: bytes) -> bytes:
        self._at += len(data)
        if self._at > self._descriptor.size:
            raise ImageError(f"{self._name} is larger than its {self._descriptor.size} bytes")
        if self._at - self._renewed >= _PROGRESS:
            self._renewed = self._at
            self._patience.renew()
        return data

    def _open(self) -> Response:
        """An answer that is read up to where we are."""
        start = self._at if self._ranges else 0
        response = self._response = self._repository.part(self._descriptor, start, self._patience)
        if response.status == 416:
            raise ImageError(f"{self._name} is shorter than its {self._descriptor.size} bytes")
        if self._at and response.status == 206:
            first = response.header("Content-Range").removeprefix("bytes ").partition("-")[0]
            if first != str(self._at):
                self._ranges = False  # from now on we ask for all of it
                raise Transient(f"the registry resumed at byte {first or '?'} instead of {self._at}")
        else:
            response.skip(self._at)  # no ranges here
        return response
