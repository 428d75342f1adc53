"""Check an image against the policies of the site and the user, before it is unpacked and at each use.

Beside an image, the store keeps the signatures by which the image was admitted. Each use of the image verifies these
signatures again with the current rules and keys, so forged signatures in the store are harmless. If the stored
signatures are insufficient, penroot asks the registry again.
"""

from __future__ import annotations

import os

from enroot_py.base import log, making
from enroot_py.base.errors import ImageError, PolicyError, RegistryError
from enroot_py.config.settings import Settings
from enroot_py.features.trust import attachments, identities, policy, signatures, verify
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

_SENT = "bcast:"  # prefix of the path of a squashfs file that srun sends to the nodes
_MAX_RECORD_BYTES = 16 << 20


class Admission:
    """The rules for the image of a reference. Raises ConfigError, and PolicyError if a rule rejects every image."""

    def __init__(self, name: Reference | LocalImage, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self.rules = rules_for(name, settings)
        self._evidence = Evidence()  # the evidence that has satisfied the rules
        if isinstance(name, LocalImage):
            _check_unsigned(name, self.rules)
        for rule in self.rules:
            if error := rule.refusal(name):
                raise error

    @property
    def wants_signatures(self) -> bool:
        return any(rule.signed for rule in self.rules)

    # -- a downloaded image

    def check(self, manifest: Manifest, source: ImageSource) -> None:
        """Check an image before it is unpacked. Raises PolicyError, ConfigError, RegistryError, ImageError."""
        if not self.wants_signatures:
            return
        from_tracker = getattr(source, "evidence", b"")  # signatures that srun fetched for all nodes (features/swarm)
        if from_tracker and self._satisfied(_loads(from_tracker), manifest.digest):
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
        except OSError as e:  # a read-only or just pruned store: the next start asks the registry again
            log.debug(f"{path}: {e.strerror}")

    # -- a stored image

    def check_stored(self, image: Image, named: str = "") -> None:
        """Check a stored image. ``named`` is the digest that the registry has for the image's name: see Manifest.

        Raises PolicyError, ConfigError.
        Raises RegistryError if the stored signatures are insufficient and the registry does not answer.
        """
        if not self.wants_signatures:
            return
        evidence = self._stored(image)
        if evidence is not None and self._satisfied(evidence, image.digest):
            return
        self.ask(image.digest, named or image.digest)
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
        """Raise PolicyError if the evidence does not satisfy a rule, and ConfigError for a malformed key."""
        assert isinstance(self._name, Reference)
        covered = evidence.covers(digest)
        for rule in self.rules:
            for requirement in rule.signed:
                why = verify.refusal(requirement, identities.of(self._name), covered, evidence.signatures)
                if why:
                    message = (
                        f"{self._name} ({digest[:19]}…) is not signed as {requirement.where} ({rule.scope}) requires"
                    )
                    hint = "use a signed image; penroot inspect --signatures shows the signatures"
                    raise PolicyError(f"{message}: {why}", hint=hint)

    def ask(self, digest: str, named: str) -> Evidence:
        """Verify an image by signatures from mirrors or the registry. Raises PolicyError, RegistryError, ImageError."""
        assert isinstance(self._name, Reference)
        for evidence in gather(self._name, self._settings, digest, named):
            try:
                self.verify(evidence, digest)
            except PolicyError as e:
                error = e
            else:
                # Drop signatures by other keys: anyone can make such signatures, and could fill the store.
                signers = [signer for rule in self.rules for each in rule.signed for signer in verify.signers_of(each)]
                self._evidence = Evidence(verify.by_signers(evidence.signatures, signers), evidence.index)
                return self._evidence
        raise error


def gather(name: Reference, settings: Settings, digest: str, named: str) -> Iterator[Evidence]:
    """Yield the evidence for an image from each mirror, then from the registry. ``named``: see Manifest.

    Raises RegistryError and ImageError if the registry fails. Failures of mirrors are only logged.
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
        raise type(e)(f"cannot fetch the signatures that {name} must have: {e}", hint=e.hint) from e


def evidence(name: Reference, digest: str, named: str, settings: Settings) -> bytes:
    """Return the evidence that nodes need for an image, or b"" if no rule needs a signature or the check fails.

    Raises ConfigError, PolicyError.
    """
    admission = Admission(name, settings)
    if not admission.wants_signatures:
        return b""
    try:
        return admission.ask(digest, named).dumps()
    except (PolicyError, RegistryError, ImageError) as e:  # the nodes ask the registry again and report the error
        log.debug(str(e))
        return b""


def _evidence(repository: Repository, digest: str, named: str) -> Iterator[Evidence]:
    """Yield growing evidence: first an image's signatures in a repository, then also the signatures of its index."""
    if path := attachments.disabled_by(repository.reference):
        log.info(f"{path}: use-sigstore-attachments is false: not looking for signatures of {repository.reference}")
        yield Evidence()
        return
    signed_so_far: list[Signature] = []
    for signed in dict.fromkeys((digest, named)):
        index = repository.named(named) if signed != digest else b""
        for more in signatures.of(repository, signed):
            signed_so_far += more
            yield Evidence(tuple(signed_so_far), index)


def _loads(data: bytes) -> Evidence:
    """Parse a record of evidence. Return empty evidence for a damaged record."""
    try:
        return signatures.loads(data)
    except ValueError as e:
        log.debug(f"ignoring damaged signatures: {e}")
        return Evidence()


def check_name(name: Reference | LocalImage, settings: Settings, pin: Pin | None, *, by_importer: bool) -> None:
    """Check an image at submission, or before the site's importer fetches it. Raises PolicyError, ConfigError.

    The nodes check an image again after submission. ``pin`` has the digest that the tag had at the job's submission.
    With ``by_importer``, check only for rules that reject every image: the importer itself verifies signatures.
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
# Files and directories, for which no signatures exist


def check_file(path: str, settings: Settings) -> None:
    """Check a squashfs file at a real path, or one that srun sends (bcast:). Raises PolicyError, ConfigError."""
    scopes = [] if path.startswith(_SENT) else policy.scopes_of_path(path)
    _check_unsigned(path, _rules(settings, policy.SQUASHFS, scopes))


def check_directory(path: str, settings: Settings) -> None:
    """Check a container that is a plain directory. Raises PolicyError, ConfigError."""
    _check_unsigned(path, _rules(settings, policy.DIRECTORY, policy.scopes_of_path(os.path.realpath(path))))


def admitted(record: Mapping[str, str], settings: Settings) -> Mapping[str, str]:
    """Check the image that a container's ``record`` names. Return the record, with the real path of a squashfs file.

    Raises PenrootError.
    """
    if "squashfs" in record:
        path = os.path.realpath(record["squashfs"])
        check_file(path, settings)
        return {**record, "squashfs": path}
    directory, uri = record.get("image", ""), record.get("uri", "")
    if not os.path.isdir(directory):
        return record  # the caller reports the missing directory
    if file := _file_of(directory):
        check_file(file if file.startswith(_SENT) else os.path.realpath(file), settings)
        return record
    if uri.startswith(("/", _SENT)):
        message = f"the container's record names {uri}, but {directory} was not made from it"
        raise PolicyError(message, hint="create the container again")
    registry, _, rest = uri.partition("/")
    is_local = uri.partition(":")[2].startswith("/")  # SCHEME:/PATH or ENGINE://NAME, not REGISTRY/REPOSITORY
    name = reference.parse(uri if is_local else f"{reference.DOCKER}{registry}#{rest}")
    digest = layout.digest_of(directory)
    stored = Store(layout.root_of(directory)).known(name)
    named = stored.resolved_digest if stored is not None and stored.digest == digest else ""
    Admission(name, settings).check_stored(Image(digest, directory, ()), named)
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
    hint = f"start a signed registry image, docker://…; or ask the site to accept {transport} in policy.json"
    return policy.refused(name, rule, requirement, "lacks the signature that is required", hint)


def rules_for(name: Reference | LocalImage, settings: Settings) -> tuple[Rule, ...]:
    """Return the rule of each policy for the image of a reference. Raises ConfigError."""
    return _rules(settings, *policy.scopes_of(name))


def _rules(settings: Settings, transport: str, scopes: list[str]) -> tuple[Rule, ...]:
    """Return the rule of each policy for an image in these scopes. Raises ConfigError."""
    policies = (policy.load(path) for path in settings.policies)
    return tuple(loaded.rule(transport, scopes) for loaded in policies if loaded is not None)
