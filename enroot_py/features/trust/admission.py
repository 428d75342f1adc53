"""Check an image against the policies of the site and the user, before it is unpacked and at each use.

What an image was verified by stays beside it in the store, and is verified again at each use, without a network, by the
rules and keys of that moment. So a record in the store is worth what the signatures in it are, whoever has written it.
"""

from __future__ import annotations

import os

from enroot_py.base import log, making
from enroot_py.base.errors import ImageError, PolicyError, RegistryError
from enroot_py.config.settings import Settings
from enroot_py.features.trust import identities, policy, signatures
from enroot_py.features.trust.policy import Requirement, Rule
from enroot_py.features.trust.signatures import Evidence, Signature
from enroot_py.registry import reference
from enroot_py.registry.manifests import Manifest
from enroot_py.registry.reference import LocalImage, Reference
from enroot_py.store import layout
from enroot_py.store.store import Image, Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from enroot_py.base.digests import Pin
    from enroot_py.registry.repository import Repository
    from enroot_py.registry.sources import ImageSource

_SENT = "bcast:"
_MAX_RECORD_BYTES = 16 << 20


class Admission:
    """The rules for the image of a reference. Raises ConfigError, and PolicyError if no image is admitted."""

    def __init__(self, name: Reference | LocalImage, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self.rules = rules_for(name, settings)
        self._evidence = Evidence()  # of the last verification
        if isinstance(name, LocalImage):
            _check_unsigned(name, self.rules)
        for rule in self.rules:
            if error := rule.refusal(name):
                raise error

    @property
    def wants_signatures(self) -> bool:
        return any(rule.signed for rule in self.rules)

    # -- an image that is downloaded

    def check(self, manifest: Manifest, source: ImageSource) -> None:
        """Check whether an image may be unpacked. Raises PolicyError, ConfigError, RegistryError, ImageError."""
        if not self.wants_signatures:
            return
        came = getattr(source, "evidence", b"")  # from srun's tracker, for all nodes
        if came and self._satisfied(_loads(came), manifest.digest):
            return
        self.ask(manifest.digest, manifest.named)

    def keep(self, image: Image) -> None:
        """Store the signatures of an image beside it, if the store is writable."""
        if not self._evidence.signatures:
            return
        path = self._path(image)
        try:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            making.write(path, self._evidence.dumps(), 0o600)
        except OSError as e:  # not our store, or just pruned: the registry is asked again next time
            log.debug(f"{path}: {e.strerror}")

    # -- a stored image

    def check_stored(self, image: Image, given: str = "") -> None:
        """Check whether a stored image may be used; ``given`` is the digest to which its name resolved.

        Raises PolicyError, ConfigError, and RegistryError where what is beside it does not do and nobody can be asked.
        """
        if not self.wants_signatures:
            return
        evidence = self._stored(image)
        if evidence is not None and self._satisfied(evidence, image.digest):
            return
        self.ask(image.digest, given or image.digest)
        self.keep(image)

    def _stored(self, image: Image) -> Evidence | None:
        try:
            with open(
                os.open(self._path(image), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
            ) as f:
                return _loads(f.read(_MAX_RECORD_BYTES))
        except OSError:
            return None

    def _path(self, image: Image) -> str:
        assert isinstance(self._name, Reference)
        return layout.signatures(image.path, identities.of(self._name).repository)

    # -- signatures

    def _satisfied(self, evidence: Evidence, digest: str) -> bool:
        try:
            self.verify(evidence, digest)
        except PolicyError as e:
            log.debug(str(e))
            return False
        self._evidence = evidence
        return True

    def verify(self, evidence: Evidence, digest: str) -> None:
        """Raise PolicyError if a rule is not satisfied, ConfigError for a malformed key."""
        assert isinstance(self._name, Reference)
        covered = evidence.covers(digest)
        for rule in self.rules:
            for requirement in rule.signed:
                why = signatures.met(requirement, identities.of(self._name), covered, evidence.signatures)
                if why:
                    message = f"{self._name} ({digest[:19]}…) is not signed as {requirement.where} ({rule.scope}) wants"
                    hint = "use a signed image; penroot inspect --signatures shows the signatures"
                    raise PolicyError(f"{message}: {why}", hint=hint)

    def ask(self, digest: str, named: str) -> Evidence:
        """Verify an image by signatures of its registry or a mirror. Raises PolicyError, RegistryError, ImageError."""
        assert isinstance(self._name, Reference)
        for evidence in gather(self._name, self._settings, digest, named):
            try:
                self.verify(evidence, digest)
            except PolicyError as e:
                error = e
            else:
                # So other signers cannot make a record long.
                sources = [source for rule in self.rules for one in rule.signed for source in one.keys]
                self._evidence = Evidence(signatures.by_keys(evidence.signatures, sources), evidence.index)
                return self._evidence
        raise error


def gather(name: Reference, settings: Settings, digest: str, named: str) -> Iterator[Evidence]:
    """Yield the evidence for an image, from one place after the other; ``named``: see Manifest.

    Raises RegistryError and ImageError where the registry itself, which comes after its mirrors, does not answer.
    """
    from enroot_py.registry.sources import places

    *mirrors, registry = places(name, settings)
    for mirror in mirrors:
        try:
            yield from _evidence(mirror, digest, named)
        except (RegistryError, ImageError) as e:
            log.debug(f"signatures of a mirror: {e}")
    try:
        yield from _evidence(registry, digest, named)
    except (RegistryError, ImageError) as e:
        raise type(e)(f"{name} must be signed, and its signatures cannot be fetched: {e}", hint=e.hint) from e


def evidence(name: Reference, digest: str, named: str, settings: Settings) -> bytes:
    """Return the evidence that a node needs for an image, or nothing if no rule needs a signature or none exists.

    Raises ConfigError, PolicyError.
    """
    admission = Admission(name, settings)
    if not admission.wants_signatures:
        return b""
    try:
        return admission.ask(digest, named).dumps()
    except (PolicyError, RegistryError, ImageError) as e:  # the nodes ask and report the error
        log.debug(str(e))
        return b""


def _evidence(place: Repository, digest: str, named: str) -> Iterator[Evidence]:
    """Yield the evidence in a repository: signatures of the image, then those of its index."""
    found: list[Signature] = []
    for signed in dict.fromkeys((digest, named)):
        index = place.named(named) if signed != digest else b""
        for more in signatures.of(place, signed):
            found += more
            yield Evidence(tuple(found), index)


def _loads(data: bytes) -> Evidence:
    """Return the evidence in a record, or nothing if the record is damaged."""
    try:
        return signatures.loads(data)
    except ValueError as e:
        log.debug(f"a record of signatures: {e}")
        return Evidence()


def check_name(name: Reference | LocalImage, settings: Settings, pin: Pin | None, *, by_importer: bool) -> None:
    """Check an image at submission; the nodes check it again in any case.

    ``pin`` is the digest that its tag has for the job. What the site's own importer brings is for that to verify.
    Raises PolicyError, ConfigError.
    """
    if by_importer:
        for rule in rules_for(name, settings):
            if error := rule.refusal(name):
                raise error
        return
    admission = Admission(name, settings)
    if not admission.wants_signatures:
        return
    from enroot_py.registry.sources import open_source

    hurried = settings.replace("srun", connect_timeout=2, stall_timeout=5, transfer_retries=0)
    try:
        pinned = name.at(pin.digest) if pin and isinstance(name, Reference) else name
        manifest = open_source(pinned, hurried).manifest()
        admission.ask(manifest.digest, manifest.named)
    except (RegistryError, ImageError) as e:
        log.debug(str(e))


# ---------------------------------------------------------------------------
# Files and directories, which have no signatures


def check_file(path: str, settings: Settings) -> None:
    """Check whether the squashfs file at a real path, or one that srun sends, may be used.

    Raises PolicyError, ConfigError.
    """
    scopes = [] if path.startswith(_SENT) else policy.scopes_of_path(path)
    _check_unsigned(path, _rules(settings, policy.SQUASHFS, scopes))


def check_directory(path: str, settings: Settings) -> None:
    """Check whether a container that is a plain directory may be used. Raises PolicyError, ConfigError."""
    _check_unsigned(path, _rules(settings, policy.DIRECTORY, policy.scopes_of_path(os.path.realpath(path))))


def admitted(record: Mapping[str, str], settings: Settings) -> Mapping[str, str]:
    """Check the image of a container, and return its record with the squashfs file's real path.

    The checked file or image is the one that the returned record names first. Raises PenrootError.
    """
    if "squashfs" in record:
        path = os.path.realpath(record["squashfs"])
        check_file(path, settings)
        return {**record, "squashfs": path}
    directory, uri = record.get("image", ""), record.get("uri", "")
    if not os.path.isdir(directory):
        return record  # the caller reports it
    if file := _file_of(directory):
        check_file(file if file.startswith(_SENT) else os.path.realpath(file), settings)
        return record
    if uri.startswith(("/", _SENT)):
        message = f"the container's record says that it is made of {uri}, but {directory} is not"
        raise PolicyError(message, hint="create the container again")
    registry, _, rest = uri.partition("/")
    is_local = uri.partition(":")[2].startswith("/")  # SCHEME:/PATH or ENGINE://NAME, else REGISTRY/REPOSITORY
    name = reference.parse(uri if is_local else f"{reference.DOCKER}{registry}#{rest}")
    digest = layout.digest_of(directory)
    known = Store(layout.root_of(directory)).known(name)
    given = known.given if known is not None and known.digest == digest else ""
    Admission(name, settings).check_stored(Image(digest, directory, ()), given)
    return record


def _file_of(directory: str) -> str:
    """Return the name of the squashfs file from which a stored image was made, or ""."""
    try:
        with open(f"{directory}/{layout.FILE}", "rb") as f:
            return os.fsdecode(f.read(_MAX_RECORD_BYTES).removesuffix(b"\n"))
    except FileNotFoundError:
        return ""


def _check_unsigned(path: object, rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        if error := rule.refusal(path):
            raise error
        for requirement in rule.signed:
            raise _unsigned(path, rule, requirement)


def _unsigned(name: object, rule: Rule, requirement: Requirement) -> PolicyError:
    transport = "its transport" if isinstance(name, LocalImage) else "squashfs or dir"
    hint = f"start the image of the registry, docker://…; or let the site accept this place: {transport} in policy.json"
    return policy.refused(name, rule, requirement, "lacks the required signature", hint)


def rules_for(name: Reference | LocalImage, settings: Settings) -> tuple[Rule, ...]:
    """Return the rule of each policy for the image of a reference. Raises ConfigError."""
    return _rules(settings, *policy.scopes_of(name))


def _rules(settings: Settings, transport: str, scopes: list[str]) -> tuple[Rule, ...]:
    """Return the rule of each policy for an image in these scopes. Raises ConfigError."""
    there = (policy.load(path) for path in settings.policies)
    return tuple(one.rule(transport, scopes) for one in there if one is not None)
