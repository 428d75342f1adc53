"""Image references: ``docker://[USER[:PASSWORD]@][REGISTRY#|REGISTRY/]IMAGE[:TAG][@DIGEST]``, and local images.

containers-transports(5) defines the local images ``oci:DIR[:TAG]``, ``oci-archive:FILE[:TAG]`` and
``docker-archive:FILE[:NAME]``. enroot-import(1) defines docker://, ``dockerd://IMAGE`` and ``podman://IMAGE``. The OCI
distribution specification, "Pulling manifests", defines valid names.
Container starts import this module, so it must not import re or dataclasses, which are slow to import.
"""

from __future__ import annotations

import os

from enroot_py.base import log
from enroot_py.base.digests import is_digest
from enroot_py.base.errors import ImageReferenceError
from enroot_py.base.frozen import Frozen

DOCKER = "docker://"
ENGINES = {"dockerd://": "docker", "podman://": "podman"}  # scheme to program
FILES = ("oci:", "oci-archive:", "docker-archive:")
SCHEMES = (DOCKER, *ENGINES, *FILES)
DOCKER_HUB = "registry-1.docker.io"
HUB_NAMES = frozenset(("docker.io", "index.docker.io", "registry.hub.docker.com", DOCKER_HUB))
# Accepted types of a manifest: OCI image specification and Docker's "Image Manifest V 2, Schema 2".
MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LOWER = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_HEX = frozenset("0123456789abcdef")
_TAG_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ_.-") | _LOWER
_HOST_CHARS = frozenset(".-_") | _LOWER
_HTTPS_PORT = "443"


class Reference(Frozen):
    """One image in a registry.

    Exactly one of ``tag`` and ``digest`` (``sha256:`` and 64 hex digits) is set. ``secret`` is a password from the
    command line. No message shows it.
    """

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""
    user: str = ""
    secret: str = ""

    def __str__(self) -> str:
        """Return the canonical name, ``REGISTRY/REPOSITORY:TAG`` or ``…@DIGEST``, without the user."""
        return f"{self.registry}/{self.repository}" + (f"@{self.digest}" if self.digest else f":{self.tag}")

    def __repr__(self) -> str:
        return f"Reference({self.uri()!r})"

    def at(self, digest: str) -> Reference:
        """Return a reference to the image ``digest`` in the same repository."""
        return Reference(self.registry, self.repository, digest=digest, user=self.user, secret=self.secret)

    def manifest_path(self, digest: str = "") -> str:
        """Return the URL path of the manifest with this digest or tag (default: of this image).

        Source: OCI distribution specification, "Pulling manifests".
        """
        return f"/v2/{self.repository}/manifests/{digest or self.digest or self.tag}"

    def uri(self) -> str:
        """Return a URI that parse() accepts. As in enroot, the first comment in the image's /etc/rc has the URI."""
        user = f"{self.user}@" if self.user else ""
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{DOCKER}{user}{self.registry}#{self.repository}{end}"

    def filename(self) -> str:
        """Return the default name of the imported file: enroot-import(1)."""
        name = self.repository
        if self.registry == DOCKER_HUB:
            name = name.removeprefix("library/")
        return f"{name.replace('/', '+')}+{self.digest or self.tag}.sqsh"


class LocalImage:
    """An image on this machine: in a file, a directory, or a container engine.

    ``scheme`` is in FILES or ENGINES. ``place`` is an absolute path, or the engine's name of the image. ``name``
    selects an image if the place has several.
    """

    __slots__ = ("scheme", "place", "name")

    digest = ""  # unlike a Reference, a local image has no field for a digest

    def __init__(self, scheme: str, place: str, name: str = "") -> None:
        self.scheme = scheme
        self.place = place
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalImage) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return f"{self.scheme}{self.place}" + (f":{self.name}" if self.name else "")

    __repr__ = __str__

    def uri(self) -> str:
        return str(self)

    def filename(self) -> str:
        """Return the default name of the imported file; enroot-import(1) defines it for an engine's image."""
        if self.scheme in ENGINES:
            return self.place.replace("/", "+").replace(":", "+") + ".sqsh"
        base = os.path.basename(self.place).removesuffix(".tar")
        name = self.name.replace("/", "+").replace(":", "+")
        return (f"{base}+{name}" if name else base) + ".sqsh"


def is_uri(text: str) -> bool:
    """Return whether a text begins with one of SCHEMES."""
    return text.startswith(SCHEMES)


def is_tagged(text: str) -> bool:
    """Return whether a text may be a reference that has a tag or a digest, such as debian:12."""
    if text.startswith(("/", ".", "~")) or ":" not in text.rpartition("/")[2]:
        return False
    try:
        return isinstance(_parse_remote(text), Reference)
    except ImageReferenceError:
        return False


def parse(text: str, cwd: str = "") -> Reference | LocalImage:
    """Parse a reference, with or without ``docker://``; relative paths are beneath ``cwd``.

    A digest takes precedence over a tag. Raises ImageReferenceError, also for a reference with a password, because
    callers store or show references.
    """
    scheme = next((scheme for scheme in SCHEMES if text.startswith(scheme)), "")
    if scheme not in ("", DOCKER):
        return _parse_local(text, scheme, cwd)
    parsed = _parse_remote(text)
    if parsed.secret:
        raise ImageReferenceError(
            f"{without_password(text)}: passwords are not accepted here, because this reference is stored and shown",
            hint=f"remove the password and log in: penroot login --username USER {parsed.registry}; or write the "
            "password to the file .credentials, see enroot-import(1)",
        )
    return parsed


_warned = False


def of_command_line(text: str, cwd: str = "") -> Reference | LocalImage:
    """Parse a reference that may contain a password, as in enroot. Raises ImageReferenceError."""
    global _warned
    if "@" not in text or text.startswith(SCHEMES) and not text.startswith(DOCKER):
        return parse(text, cwd)
    parsed = _parse_remote(text)
    if parsed.secret and not _warned:
        _warned = True
        log.warn(
            "all users of this node can see a password in a reference, and the shell's history keeps it; "
            f"use: penroot login --username USER {parsed.registry}"
        )
    return parsed


def without_password(text: str) -> str:
    """Return a reference with "…" in place of its password, for messages. The reference may be invalid."""
    scheme, separator, rest = text.partition("://")
    if not separator or ":" in scheme:  # "://" is part of the password
        scheme, separator, rest = "", "", text
    before, at, digest = rest.rpartition("@")
    if digest.startswith(("sha256:", "sha512:")):
        rest = before
    else:
        at = digest = ""
    login, sign, image = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{scheme}{separator}{user}{':…' if colon else ''}{sign}{image}{at}{digest}"


def _parse_remote(text: str) -> Reference:
    whole, text = text, without_password(text)
    before, separator, _ = text.partition("://")
    if separator and before + separator != DOCKER:
        raise ImageReferenceError(
            f"{text}: unknown scheme {before}://",
            hint=f"use {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}",
        )
    if whole.startswith("docker:/") and not separator:  # not a login of a user "docker"
        raise ImageReferenceError(f"{text}: the scheme is docker://, with two slashes", hint=_FORM)
    rest, digest = _split_digest(text, whole.removeprefix(DOCKER))
    rest, user, secret = _split_login(text, rest)
    host, image = _split_registry(rest)
    try:
        registry = canonical_registry(host)
        if len(registry) > 255:
            raise ValueError("the name is longer than 255 characters")
    except ValueError as e:
        raise ImageReferenceError(f"{text}: bad registry {host!r}", hint=str(e)) from None
    repository, tag = _split_tag(image)
    if registry in HUB_NAMES:
        registry = DOCKER_HUB
        if repository and "/" not in repository:
            repository = "library/" + repository
    _check_repository(text, repository)
    if tag is not None and (not tag or len(tag) > 128 or tag[0] in ".-" or not _TAG_CHARS.issuperset(tag)):
        raise ImageReferenceError(
            f"{text}: bad tag {tag!r}", hint="use at most 128 characters: letters, digits, '_', '.' and '-'"
        )
    return Reference(registry, repository, "" if digest else tag or "latest", digest, user, secret)


def _parse_local(text: str, scheme: str, cwd: str) -> LocalImage:
    rest = text[len(scheme) :]
    if scheme in ENGINES:
        if not rest or rest[0] in "-./:" or not (_TAG_CHARS | frozenset("/:@")).issuperset(rest):
            raise ImageReferenceError(f"{text}: bad image name {rest!r}", hint=f"write {scheme}IMAGE[:TAG]")
        if without_password(rest) != rest:
            hint = f"log in with the engine: {ENGINES[scheme]} login"
            raise ImageReferenceError(f"{without_password(text)}: an engine's image takes no login", hint=hint)
        return LocalImage(scheme, rest)
    path, _, name = rest.partition(":")
    if not path or "\n" in rest:
        raise ImageReferenceError(f"{text}: no path", hint=f"write {scheme}PATH or {scheme}PATH:NAME")
    return LocalImage(scheme, os.path.abspath(os.path.join(cwd, path)), name)


def is_local(registry: str) -> bool:
    """Return whether HOST or HOST:PORT is a loopback name or address, so that plain HTTP is safe."""
    host = registry.lower().removeprefix("[").partition("]")[0]
    host = host.rpartition(":")[0] if host.count(":") == 1 else host
    return (
        host in ("localhost", "::1")
        or host.endswith(".localhost")
        or host.startswith("127.")
        and host[4:].replace(".", "").isdecimal()
    )


_FORM = "write docker://[USER@][REGISTRY#]IMAGE[:TAG][@sha256:DIGEST]"


def _split_digest(text: str, rest: str) -> tuple[str, str]:
    before, at, digest = rest.rpartition("@")
    if not (at and digest.startswith(("sha256:", "sha512:"))):
        return rest, ""
    if not is_digest(digest):
        raise ImageReferenceError(f"{text}: bad digest {digest!r}", hint="write sha256: and 64 hex digits")
    return before, digest


def _split_login(text: str, rest: str) -> tuple[str, str, str]:
    """Split off USER[:PASSWORD]@. Return the rest, user and password. As in enroot, nothing is percent-decoded."""
    login, at, rest = rest.rpartition("@")
    user, _, password = login.partition(":")
    port, path, _ = password.partition("/")
    if at and not user or any(c in user for c in " /#\t\n") or path and port.isdecimal():
        raise ImageReferenceError(f"{text}: bad user {user!r}", hint=_FORM)
    if "#" in password and "@" in password:  # USER:PASSWORD@REGISTRY#IMAGE@TAG: TAG would be the image
        raise ImageReferenceError("the reference has two '@'", hint=f"write the tag after a colon: {_FORM}")
    if not password.isprintable():
        raise ImageReferenceError(f"{text}: the password has control characters", hint=_FORM)
    return rest, user, password


def _split_registry(rest: str) -> tuple[str, str]:
    registry, separator, image = rest.partition("#")
    if not separator:
        registry, separator, image = rest.partition("/")
        if not separator or not ("." in registry or ":" in registry or registry.lower() == "localhost"):
            return DOCKER_HUB, rest
    return registry, image


def _split_tag(image: str) -> tuple[str, str | None]:
    slash = image.rfind("/")
    colon = image.find(":", slash + 1)
    return (image, None) if colon < 0 else (image[:colon], image[colon + 1 :])


def canonical_registry(text: str) -> str:
    """Return the canonical spelling of HOST or HOST:PORT. Raises ValueError if it is invalid.

    Policies, logins, mirrors and the store use this spelling: lower case, no final dot, no port 443, no leading zeros
    in a port, an IPv4 address as four numbers, an IPv6 address as inet_ntop(3) writes it.
    """
    bracketed, bracket, rest = text.lower().partition("]")
    if bracketed.startswith("["):
        host, port = _canonical_ipv6(bracketed[1:] if bracket else ""), rest
        if port and not port.startswith(":"):
            raise ValueError("write [ADDRESS] or [ADDRESS]:PORT")
    else:
        host, colon, port = bracketed.partition(":")
        host, port = _canonical_host(host), colon + port
    if not port:
        return host
    number = port[1:].lstrip("0")
    if not (number.isascii() and number.isdecimal()) or len(number) > 5 or int(number) > 65535:
        raise ValueError("the port must be a number up to 65535")
    return host if number == _HTTPS_PORT else f"{host}:{number}"


def spelling(text: str) -> str:
    """Return the canonical spelling of a registry. Invalid text is lowercased, and matches no reference."""
    try:
        return canonical_registry(text)
    except ValueError:
        return text.lower()


def _canonical_host(host: str) -> str:
    """Return a host name without a final dot, and an IPv4 address as four numbers.

    The address may have any form that inet_aton(3) accepts, but no leading zeros. Raises ValueError.
    """
    host = host.removesuffix(".")
    labels = host.split(".")
    if not all(labels) or host[:1] == "-" or not _HOST_CHARS.issuperset(host):
        raise ValueError("write HOST or HOST:PORT" + ("" if host.isascii() else ", with the xn-- form of the host"))
    last = labels[-1]
    if not (last.isdecimal() or last.startswith("0x") and _HEX.issuperset(last[2:])):
        return host
    from _socket import inet_aton  # most starts do not need it

    # inet_aton(3) reads 010.0.0.1 as 8.0.0.1; other parsers read 10.0.0.1.
    if any(label[0] == "0" and label.isdecimal() and label != "0" for label in labels):
        raise ValueError("write the address as 10.0.0.1, without leading zeros")
    try:
        return ".".join(map(str, inet_aton(host)))
    except OSError:
        raise ValueError("not an IPv4 address: write it as 10.0.0.1") from None


def _canonical_ipv6(address: str) -> str:
    from _socket import AF_INET6, inet_ntop, inet_pton  # most starts do not need it

    try:
        packed = inet_pton(AF_INET6, address)
    except OSError:
        raise ValueError("not an IPv6 address") from None
    if packed.startswith(bytes(10) + b"\xff\xff"):
        return ".".join(map(str, packed[12:]))
    return f"[{inet_ntop(AF_INET6, packed)}]"


def _check_repository(text: str, repository: str) -> None:
    for component in repository.split("/"):
        good = bool(component) and component[0] in _LOWER and component[-1] in _LOWER
        if not good or not (_LOWER | frozenset("._-")).issuperset(component):
            hint = _FORM
            if repository != repository.lower():
                hint = "write image names in lower case"
            elif text.startswith(("/", "./", "../", "~")) or text.endswith((".sqsh", ".squashfs")):
                hint = "write the path of a file: ./image.sqsh or /path/image.sqsh"
            raise ImageReferenceError(f"{text}: bad image name {repository!r}", hint=hint)
    if len(repository) > 255:
        raise ImageReferenceError(f"{text[:80]}…: the image name is longer than 255 characters")
