"""Parse image names in policies and signatures, and match the name in a signature with an image.

Sources: containers-policy.json(5), signedIdentity; containers-transports(5), Docker references.
"""

from __future__ import annotations

from dataclasses import dataclass

from enroot_py.base.errors import ConfigError
from enroot_py.config.document import Node
from enroot_py.config.words import nearest
from enroot_py.registry.reference import DOCKER_HUB, HUB_NAMES, Reference, canonical_registry, spelling

_HUB = "docker.io"  # the name of Docker Hub in policies and signatures


@dataclass(frozen=True, slots=True)
class DockerName:
    """REGISTRY/REPOSITORY, optionally with a tag or digest."""

    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        end = f":{self.tag}" if self.tag else ""
        return self.repository + end + (f"@{self.digest}" if self.digest else "")


def of(reference: Reference) -> DockerName:
    """Return the name of the requested image."""
    host = _HUB if reference.registry == DOCKER_HUB else reference.registry
    return DockerName(f"{host}/{reference.repository}", reference.tag, reference.digest)


def read(text: str) -> DockerName:
    """Parse a name in a signature or policy. Complete short names: box becomes docker.io/library/box."""
    rest, _, digest = text.partition("@")
    repository, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:  # a port follows the colon
        repository, tag = rest, ""
    host, slashed, path = repository.partition("/")
    if not slashed or not ("." in host or ":" in host or host == "localhost"):
        host, path = _HUB, repository
    host = spelling(host)
    if host in HUB_NAMES:
        host, path = _HUB, path if "/" in path else f"library/{path}"
    return DockerName(f"{host}/{path}", tag, digest)


def scopes(name: DockerName) -> list[str]:
    """Return the policy scopes of an image, the narrowest first: containers-policy.json(5), docker."""
    narrowest_first = []
    repositories = _spellings(name.repository)
    narrowest_first += [str(DockerName(repository, name.tag, name.digest)) for repository in repositories]
    while all(repositories):
        narrowest_first += repositories
        repositories = [repository.rpartition("/")[0] for repository in repositories]
    host = name.repository.partition("/")[0].partition(":")[0]
    while "." in host:
        host = host.partition(".")[2]
        narrowest_first.append("*." + host)
    return narrowest_first


def _spellings(repository: str) -> list[str]:
    """Return the spellings of a repository: over plain HTTP, :80 can be written or omitted."""
    host, slash, path = repository.partition("/")
    if host.endswith(":80"):
        return [repository, host.removesuffix(":80") + slash + path]
    has_port = host.rpartition(":")[2].isdecimal() and not host.endswith("]")
    return [repository] if has_port else [repository, f"{host}:80{slash}{path}"]


def canonical(scope: str) -> str:
    """Return a scope with the canonical spelling of its host."""
    host, slash, path = scope.partition("/")
    host = spelling(host)
    return (_HUB if host in HUB_NAMES else host) + slash + path


def canonical_scope(scope: str, where: str) -> str:
    """Return a valid scope with the canonical spelling of its host.

    Raises ConfigError if no image can be in the scope.
    """
    host, _, rest = scope.partition("/")
    bare = rest.partition("@")[0].partition(":")[0]
    hint = ""
    if host != host.lower() or bare != bare.lower() or "://" in scope or scope.endswith("/"):
        hint = "write HOST[:PORT][/REPOSITORY[:TAG]] in lower case"
    elif "*" in (scope[1:] if scope.startswith("*.") else scope):
        hint = "write *.DOMAIN for all hosts of a domain"
    elif not scope.startswith("*."):
        try:
            name = canonical_registry(host)
            if name in HUB_NAMES and name != _HUB:
                raise ConfigError(
                    f"{where}: no image is in the scope {scope}", hint=f"write {_HUB}{scope[len(host) :]}"
                )
            scope = name + scope[len(host) :]
        except ValueError as e:
            hint = str(e)
    if hint:
        raise ConfigError(f"{where}: no image is in the scope {scope!r}", hint=hint)
    return scope


# The types of signedIdentity, with their additional keys.
_KINDS: dict[str, tuple[str, ...]] = {
    "matchExact": (),
    "matchRepoDigestOrExact": (),
    "matchRepository": (),
    "exactReference": ("dockerReference",),
    "exactRepository": ("dockerRepository",),
    "remapIdentity": ("prefix", "signedPrefix"),
    "digestOnly": (),  # our extension, because a sigstore bundle names no image
}


@dataclass(frozen=True, slots=True)
class Identity:
    """A rule about the name in a signature."""

    kind: str = "matchRepoDigestOrExact"
    words: tuple[str, ...] = ()

    def required_name(self, image: DockerName) -> tuple[DockerName, bool]:
        """Return the name that a signature of ``image`` must have, and whether any tag is accepted."""
        if self.kind == "exactReference":
            return read(self.words[0]), False
        if self.kind == "exactRepository":
            return DockerName(read(self.words[0]).repository), True
        if self.kind == "remapIdentity":
            image = DockerName(self._remapped(image.repository), image.tag, image.digest)
        any_tag = self.kind == "matchRepository" or bool(image.digest) and self.kind != "matchExact"
        return image, any_tag

    def matches(self, image: DockerName, signed: DockerName | None) -> bool:
        """Return whether a signature for the name ``signed`` (None: for no name) is valid for ``image``."""
        if signed is None or self.kind == "digestOnly":
            return self.kind == "digestOnly"
        required_name, any_tag = self.required_name(image)
        if any_tag:
            return signed.repository == required_name.repository
        # cosign signs names without tag and digest. Such a name is not enough if a tag is required.
        return signed == required_name and bool(signed.tag or signed.digest)

    def describe(self, image: DockerName) -> str:
        required_name, any_tag = self.required_name(image)
        return required_name.repository if any_tag else str(required_name)

    def _remapped(self, repository: str) -> str:
        prefix, instead = map(canonical, self.words)
        if repository == prefix or repository.startswith(prefix + "/"):
            return instead + repository[len(prefix) :]
        return repository


def identity(node: Node | None) -> Identity:
    """Parse signedIdentity of a policy. Raises ConfigError."""
    if node is None:
        return Identity()
    members = dict(node.members("signedIdentity"))
    kind = members.pop("type", Node("", node.where)).text("the type of signedIdentity")
    if kind not in _KINDS:
        meant = nearest(kind, _KINDS)
        hint = f"did you mean {meant}?" if meant else f"use one of {', '.join(_KINDS)}"
        raise ConfigError(f"{node.where}: unknown signedIdentity {kind!r}", hint=hint)
    for key, member in members.items():
        if key not in _KINDS[kind]:
            hint = f"the keys of {kind} are {' and '.join(('type', *_KINDS[kind]))}"
            raise ConfigError(f"{member.where}: unknown key {key!r} of {kind}", hint=hint)
    for key in _KINDS[kind]:
        if key not in members:
            raise ConfigError(f"{node.where}: {kind} needs {key}", hint=f'write "{key}": "…"')
    words = tuple(members[key].text(key) for key in _KINDS[kind])
    if kind == "exactReference" and not (read(words[0]).tag or read(words[0]).digest):
        where = members["dockerReference"].where
        raise ConfigError(f"{where}: {words[0]} has neither tag nor digest", hint="add a tag, or use exactRepository")
    for key, word in zip(_KINDS[kind], words, strict=True):
        if key != "dockerReference" and ("@" in word or ":" in word.rpartition("/")[2] and "/" in word):
            raise ConfigError(f"{members[key].where}: {word} has a tag or digest", hint="remove the tag and the digest")
    return Identity(kind, words)
