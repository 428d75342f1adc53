"""Read policy.json: the rules for admitting images.

Source of the format: containers-policy.json(5); podman and skopeo read the same file. The transport ``squashfs`` is our
extension; its scopes are paths of squashfs files. The transport ``dir`` stands for containers that are plain
directories. Rules that require GPG signatures or certificates of a PKI reject every image: penroot can check neither.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from enroot_py import LIBRARY
from enroot_py.base import trusted
from enroot_py.base.errors import ConfigError, PolicyError
from enroot_py.config import files
from enroot_py.config.document import Node, parse
from enroot_py.config.words import nearest
from enroot_py.features.trust import identities
from enroot_py.features.trust.identities import Identity
from enroot_py.registry.reference import LocalImage, Reference

_MAXSYMLINKS = 40  # path_resolution(7)
_MAX_FILE_BYTES = 1 << 20  # of a policy or key
DOCKER, SQUASHFS, DIRECTORY = "docker", "squashfs", "dir"
# Scheme of a reference -> transport in a policy. A policy can also name transports that only other programs support.
_LOCAL = {
    "oci:": "oci",
    "oci-archive:": "oci-archive",
    "docker-archive:": "docker-archive",
    "dockerd://": "docker-daemon",
    "podman://": "containers-storage",
}
_TRANSPORTS = (DOCKER, SQUASHFS, DIRECTORY, *_LOCAL.values(), "atomic", "ostree", "openshift", "sif", "tarball")
_ACCEPT, _REJECT, _GPG, SIGNED = "insecureAcceptAnything", "reject", "signedBy", "sigstoreSigned"
_TYPES = (_ACCEPT, _REJECT, _GPG, SIGNED)
_KEYS = ("keyPath", "keyPaths", "keyData", "keyDatas")
_REKOR = ("rekorPublicKeyPath", "rekorPublicKeyPaths", "rekorPublicKeyData", "rekorPublicKeyDatas")
_CA = ("caPath", "caData")
_PKI = "pki"  # not supported


@dataclass(frozen=True, slots=True)
class KeySource:
    """A public key or certificates, in a file at ``path`` or as ``data`` in the policy."""

    where: str
    path: str = ""
    data: bytes = b""
    owner: int = 0  # of the policy file

    def __str__(self) -> str:
        return self.path or f"the key in {self.where}"

    def content(self) -> bytes:
        """Return the PEM text. Raises ConfigError if another user could have written the file."""
        if not self.path:
            return self.data
        read = _content(self.path, self.where, self.owner)
        if read is None:
            hint = "" if self.where.endswith("caPath") else "create one: cosign generate-key-pair"
            raise ConfigError(f"{self.where}: there is no file {self.path}", hint=hint)
        return read[0]


@dataclass(frozen=True, slots=True)
class Fulcio:
    """The signer's identity that Fulcio must have certified. ``ca`` has the certificates of Fulcio's authorities."""

    ca: KeySource
    oidc_issuer: str
    subject_email: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement of a rule. One of the keys, or the identity of ``fulcio``, must have signed the image."""

    kind: str
    where: str
    keys: tuple[KeySource, ...] = ()
    identity: Identity = field(default_factory=Identity)
    unsupported: str = ""  # evidence that the requirement needs, but penroot cannot check
    fulcio: Fulcio | None = None
    rekor: tuple[KeySource, ...] = ()  # keys of the transparency log that must contain the signature


@dataclass(frozen=True, slots=True)
class Rule:
    """The requirements for the images in one scope."""

    scope: str  # for messages
    requirements: tuple[Requirement, ...]

    def refusal(self, image: object) -> PolicyError | None:
        """Return an error if the rule rejects every image in its scope, signed or not; otherwise None."""
        for requirement in self.requirements:
            if requirement.kind == _REJECT:
                return refused(image, self, requirement, "is rejected", "use an image that the policy admits")
            if requirement.unsupported:
                evidence = requirement.unsupported
                hint = f"penroot cannot check {evidence}: sign with a key, cosign sign --key, and use keyPath"
                return refused(image, self, requirement, f"must have {evidence}, as required", hint)
        return None

    @property
    def signed(self) -> tuple[Requirement, ...]:
        """The requirements for a signature."""
        return tuple(requirement for requirement in self.requirements if requirement.kind == SIGNED)


def refused(image: object, rule: Rule, requirement: Requirement, why: str, hint: str) -> PolicyError:
    return PolicyError(f"{image} {why} by {requirement.where} ({rule.scope})", hint=hint)


class Policy:
    """One policy file. Raises ConfigError, which names the file and the place of the wrong value in it."""

    def __init__(self, path: str, data: bytes, owner: int = 0) -> None:
        """Keys must belong to root or to ``owner``, the owner of the policy file."""
        self._owner = owner
        root = parse(path, data)
        members = root.members("a policy")
        for key, node in members.items():
            if key not in ("default", "transports"):
                raise _unknown(node, key, ("default", "transports"))
        if "default" not in members:
            raise ConfigError(f"{root.where}: the policy has no default", hint='write "default": [{"type": "reject"}]')
        self._default = Rule("default", tuple(self._requirements(members["default"])))
        self._rules: dict[tuple[str, str], Rule] = {}
        transports = members.get("transports")
        for name, transport in transports.members("transports").items() if transports else ():
            if name not in _TRANSPORTS:
                raise _unknown(transport, name, _TRANSPORTS)
            for scope, node in transport.members(f"the transport {name}").items():
                scope = _checked_scope(name, scope, node.where)
                if (name, scope) in self._rules:
                    raise ConfigError(f"{node.where}: duplicate scope {scope} of {name}", hint="merge the two rules")
                words = f"{name}: {scope}" if scope else f"{name}: all"
                self._rules[name, scope] = Rule(words, tuple(self._requirements(node)))

    def rule(self, transport: str, scopes: Iterable[str]) -> Rule:
        """Return the rule for an image. ``scopes`` are the scopes of the image, the narrowest first."""
        for scope in (*scopes, ""):
            if rule := self._rules.get((transport, scope)):
                return rule
        return self._default

    @property
    def signed(self) -> list[Requirement]:
        """The requirements for a signature in all rules."""
        return [requirement for rule in (self._default, *self._rules.values()) for requirement in rule.signed]

    def _requirements(self, node: Node) -> Iterator[Requirement]:
        for item in node.items("the list of requirements"):
            members = dict(item.members("a requirement"))
            kind = members.pop("type", Node("", item.where)).text("the type of a requirement")
            if kind not in _TYPES:
                raise _unknown(item, kind, _TYPES, "type")
            if kind == _GPG:
                yield Requirement(kind, item.where, unsupported="GPG signatures")
            elif kind == SIGNED:
                yield self._signed(item, members)
            elif members:
                key, member = next(iter(members.items()))
                raise ConfigError(
                    f"{member.where}: unknown key {key!r} of {kind}", hint=f'{kind} has no other key than "type"'
                )
            else:
                yield Requirement(kind, item.where)

    def _signed(self, item: Node, members: dict[str, Node]) -> Requirement:
        for key, member in members.items():
            if key not in (*_KEYS, *_REKOR, "fulcio", _PKI, "signedIdentity"):
                raise _unknown(member, key, (*_KEYS, "fulcio", *_REKOR, "signedIdentity"))
        identity = identities.identity(members.get("signedIdentity"))
        if _PKI in members:
            return Requirement(SIGNED, item.where, identity=identity, unsupported="certificates")
        names = [key for key in (*_KEYS, "fulcio") if key in members]
        if len(names) != 1:
            hint = f"write one of {', '.join(_KEYS)}, fulcio"
            raise ConfigError(f"{item.where}: {SIGNED} has {' and '.join(names) or 'no key'}", hint=hint)
        rekor = self._one_of(_REKOR, members, item.where)
        if names == ["fulcio"]:
            if not rekor:
                message = (
                    f"{item.where}: fulcio needs the key of a transparency log: its own certificates expire in minutes"
                )
                raise ConfigError(message, hint='write "rekorPublicKeyPath": "/etc/…/rekor.pub"')
            fulcio = self._fulcio(members["fulcio"])
            return Requirement(SIGNED, item.where, identity=identity, fulcio=fulcio, rekor=rekor)
        keys = self._one_of(_KEYS, members, item.where)
        return Requirement(SIGNED, item.where, keys, identity, rekor=rekor)

    def _fulcio(self, node: Node) -> Fulcio:
        members = node.members("fulcio")
        for key, member in members.items():
            if key not in (*_CA, "oidcIssuer", "subjectEmail"):
                raise _unknown(member, key, (*_CA, "oidcIssuer", "subjectEmail"))
        ca = self._one_of(_CA, members, node.where)
        missing = [key for key in ("oidcIssuer", "subjectEmail") if key not in members] + ([] if ca else ["caPath"])
        if missing:
            raise ConfigError(f"{node.where}: fulcio needs {missing[0]}", hint=f'write "{missing[0]}": "…"')
        return Fulcio(ca[0], members["oidcIssuer"].text("oidcIssuer"), members["subjectEmail"].text("subjectEmail"))

    def _one_of(self, names: Iterable[str], members: Mapping[str, Node], where: str) -> tuple[KeySource, ...]:
        """Return the keys in the member whose name is in ``names``, or (). Raises ConfigError for several members."""
        present = [name for name in names if name in members]
        if len(present) > 1:
            raise ConfigError(f"{where}: {' and '.join(present)} exclude each other", hint="write only one of them")
        if not present:
            return ()
        (name,) = present
        nodes = members[name].items(name) if name.endswith("s") else [members[name]]
        return tuple(self._key(name, node) for node in nodes)

    def _key(self, name: str, node: Node) -> KeySource:
        text = node.text(name)
        if "Data" in name:
            try:
                return KeySource(node.where, data=base64.b64decode(text, validate=True))
            except ValueError:
                raise ConfigError(
                    f"{node.where}: {name} is not base64", hint="encode it: base64 -w0 cosign.pub"
                ) from None
        if not text.startswith("/"):
            raise ConfigError(f"{node.where}: {name}={text!r} must be an absolute path", hint="write /etc/…/cosign.pub")
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{node.where}: {name}={text!r} is not a valid path", hint="write /etc/…/cosign.pub")
        return KeySource(node.where, os.path.normpath(text), owner=self._owner)


def load(path: str) -> Policy | None:
    """Read a policy file, or return None if it was just removed. Raises ConfigError."""
    read = _content(path, path, os.geteuid())
    return Policy(path, *read) if read else None


def scopes_of(reference: Reference | LocalImage) -> tuple[str, list[str]]:
    """Return the transport of a reference and its scopes, the narrowest first."""
    if isinstance(reference, Reference):
        return DOCKER, identities.scopes(identities.of(reference))
    transport = _LOCAL[reference.scheme]
    if not reference.place.startswith("/"):
        return transport, []
    path = os.path.realpath(reference.place)
    return transport, ([f"{path}:{reference.name}"] if reference.name else []) + scopes_of_path(path)


def scopes_of_path(path: str) -> list[str]:
    """Return a path and the directories above it."""
    scopes = []
    while path not in ("", "/"):
        scopes.append(path)
        path = os.path.dirname(path)
    return scopes


def _content(path: str, origin: str, owner: int) -> tuple[bytes, int] | None:
    """Return content and owner of a file that only root or ``owner`` can write; None if the file does not exist.

    Raises ConfigError.
    """
    for directory in _directories_on_path(path):
        files.check(directory)
    # In a user namespace, root's files have another user ID, as penroot's installed files have.
    owners = {0, owner, os.stat(LIBRARY).st_uid}
    try:
        fd = trusted.regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), path)
        with open(fd, "rb") as f:
            state = os.fstat(fd)
            if state.st_uid not in owners:
                raise _not_trusted(path, origin, f"belongs to uid {state.st_uid}, not to root", f"chown root {path}")
            if state.st_mode & 0o022:
                why = f"can be written by others (mode {state.st_mode & 0o7777:o})"
                raise _not_trusted(path, origin, why, f"chmod 644 {path}")
            data = f.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as e:
        if not os.path.islink(path):
            return None
        raise _not_trusted(path, origin, "is a dangling link") from e
    except OSError as e:
        why = trusted.IRREGULAR if e.strerror == trusted.IRREGULAR else f"cannot be read: {e.strerror}"
        raise _not_trusted(path, origin, why) from e
    if len(data) > _MAX_FILE_BYTES:
        raise _not_trusted(path, origin, f"is larger than {_MAX_FILE_BYTES >> 20} MiB")
    return data, state.st_uid


def _directories_on_path(path: str) -> Iterator[str]:
    """Yield the directories of a file and of each link to it. A user who can write there can replace the file."""
    for _ in range(_MAXSYMLINKS):
        yield os.path.dirname(path)
        if not os.path.islink(path):
            return
        path = os.path.join(os.path.dirname(path), os.readlink(path))


def _not_trusted(path: str, origin: str, why: str, command: str = "") -> ConfigError:
    """Return an error. Pass ``command`` for the hint only if it cannot damage a system file named by mistake."""
    before = "" if origin == path else f"{origin}: "
    hint = "use a file of root that every user can read"
    return ConfigError(f"{before}{path} {why}, but it decides which images are admitted", hint=command or hint)


def _checked_scope(transport: str, scope: str, where: str) -> str:
    """Return a scope in canonical form. Raises ConfigError if no image can be in it."""
    if scope and transport == DOCKER:
        return identities.canonical_scope(scope, where)
    if (
        scope
        and transport in (SQUASHFS, DIRECTORY, "oci", "oci-archive")
        and (not scope.startswith("/") or scope != os.path.normpath(scope) or scope == "/")
    ):
        hint = 'write an absolute path without links, or "" for all'
        raise ConfigError(f"{where}: no image is in the scope {scope!r} of {transport}", hint=hint)
    return scope


def _unknown(node: Node, word: str, known: Iterable[str], what: str = "key") -> ConfigError:
    known = tuple(known)
    meant = nearest(word, known)
    hint = f"did you mean {meant}?" if meant else f"use one of {', '.join(known)}"
    return ConfigError(f"{node.where}: unknown {what} {word!r}", hint=hint)
