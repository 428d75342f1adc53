"""Who we are to one repository: nobody, a login, or a token that its registry sends us for.

Sources: Docker's "Token Authentication Specification"; RFC 6750, RFC 7617; RFC 9110 for challenges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlencode

from enroot_py.base import log
from enroot_py.base.errors import RefusedError, RegistryError
from enroot_py.config.settings import Settings
from enroot_py.registry import addresses, credentials, refusals, site
from enroot_py.registry.addresses import Address
from enroot_py.registry.credentials import Credential
from enroot_py.registry.http import HttpClient, Response
from enroot_py.registry.reference import Reference

_MAX_TOKEN = 1 << 16  # bytes of the answer that has it; no server takes a header of that size


# What one client of this process was given the next one need not ask for: by registry, repository and user.
_TOKENS: dict[tuple[str, str, str | None], str] = {}
_ACCEPTED: set[str] = set()  # Authorization headers that a registry has accepted
_LENT: set[str] = set()  # accepted headers that another process obtained


def tokens() -> str:
    """The tokens that this process was given, for ``know`` of another one: a secret."""
    return json.dumps([[*place, token] for place, token in _TOKENS.items()])


def know(tokens: str) -> None:
    """Use the tokens of another process, each where that did. Raises ValueError."""
    rows = json.loads(tokens)
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise ValueError("no tokens")
    for registry, repository, user, token in rows:
        if not all(isinstance(word, str) for word in (registry, repository, user or "", token)):
            raise ValueError("no token")
        _TOKENS[registry, repository, user] = token
        _ACCEPTED.add(token)
        _LENT.add(token)


class Authorization:
    """The Authorization header of requests to the repository of ``reference``: none before the registry wants one.

    ``heard`` is called with True before a program is asked for a login, and with False after. Methods
    raise RegistryError, and Transient.
    """

    def __init__(
        self, reference: Reference, settings: Settings, client: HttpClient, heard: Callable[[bool], None]
    ) -> None:
        self._place = (reference.registry, reference.repository, reference.user)
        self._basic = ""
        self._reference = reference
        self._settings = settings
        self._client = client
        self._heard = heard
        self._credential: Credential | None = None
        self.given: Credential | None = None  # by who logs in, to no repository in particular
        self.stranger = ""  # a token server that got no login, as it is not known to be the registry's
        self.has_ended = False  # the registry refuses a header that it accepted before
        self._was_lent = False  # another process obtained that header
        self._challenge = ""  # the last WWW-Authenticate header

    def answer(self, challenge: str) -> None:
        """Do what a WWW-Authenticate header asks for: get a token for this repository, or use Basic."""
        self._challenge = challenge
        known = dict(challenges(challenge))
        bearer = known.get("bearer", {})
        if bearer.get("realm"):
            _TOKENS[self._place] = "Bearer " + self._token(bearer)
            return
        if "basic" not in known:
            raise RegistryError(
                f"{self._reference.registry} asks for an authorization that is not known here: {challenge[:80]!r}"
            )
        self._credential = self._login()
        if self._credential is None:
            raise self.unauthorized()
        self._basic = self._credential.basic()

    @property
    def headers(self) -> dict[str, str]:
        """What to send, as far as that is known."""
        header = self._basic or _TOKENS.get(self._place, "")
        return {"Authorization": header} if header else {}

    def heed(self, status: int) -> bool:
        """Take note of a response's status. Return whether it may mean that a token or login has expired."""
        header = self.headers.get("Authorization", "")
        if status < 400 or status == 404:
            self.has_ended = False
            if header:
                _ACCEPTED.add(header)
        elif header in _ACCEPTED and status in (400, 401, 403):
            self.has_ended, self._was_lent = True, header in _LENT
            return True
        return False

    def renew(self, ask: Callable[[], Response]) -> Response:
        """Get a new token, or the login of this moment, and repeat a request by ``ask``."""
        if not self._challenge:  # another process obtained the token
            self._basic = ""
            _TOKENS.pop(self._place, None)
            response = ask()
            if response.status != 401:
                return response
            response.discard()
            self._challenge = response.header("WWW-Authenticate")
        self.answer(self._challenge)
        return ask()

    def unauthorized(self) -> RefusedError:
        """The error of an answer of status 401 to our header."""
        if self._is_expired:
            return self._expired(401, "")
        if self._credential is None and self.stranger:
            return refusals.stranger(self._reference, self.stranger, self._settings)
        return refusals.unauthorized(self._reference, self._credential, self._settings)

    @property
    def _is_expired(self) -> bool:
        """Whether a login or a lent token has expired. An anonymous token does not: a new one costs nothing."""
        return self.has_ended and (self._credential is not None or self._was_lent)

    def _expired(self, status: int, words: str) -> RefusedError:
        registry, repository, login = self._reference.registry, self._reference.repository, self._credential
        if login is None:
            return RefusedError(
                f"{status} from {registry}: srun's token for {repository} has expired, and this node has no login for "
                f"{registry} to renew it: {words}".rstrip(": "),
                hint=f"penroot login {registry}; looked in: {credentials.places(self._settings)}",
            )
        renew = "give the current password" if login.source == "the command line" else "renew the login there"
        return RefusedError(
            f"{status} from {registry}: the login of {login.user!r} from {login.source} has expired, or lost its "
            f"rights: {registry} accepted it before, and refuses it now for {repository}: {words}".rstrip(": "),
            hint=f"{renew}, or: penroot login {registry}",
        )

    def denied(self, status: int, words: str) -> RefusedError:
        """Return the error for the status 403, or 400 after an expired token, with the registry's words."""
        if self._is_expired:
            return self._expired(status, words)
        reference, login = self._reference, self._credential
        who = f"{login.user!r} from {login.source}" if login else "nobody in particular"
        return RefusedError(
            f"{status} from {reference.registry}: {reference.repository} is denied to {who}: {words}".rstrip(": "),
            hint=refusals.introduction(reference, self.stranger, self._settings) if self.stranger else "",
        )

    def _login(self, realm: str = "") -> Credential | None:
        if self.given:
            return self.given
        self._heard(True)  # a program that asks its user for a password is not the registry's silence
        credential = credentials.find(self._reference, self._settings, realm=realm)
        self._heard(False)
        return credential

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = self._realm(challenge["realm"])
        # A registry may name any server. The login, or a token, of another registry is not for this one.
        known = site.is_token_server(self._reference.registry, realm.netloc, self._settings)
        self._credential = None
        if known or self._client.is_own(realm):
            self._credential = self._login(realm.netloc if known else "")
        else:
            self.stranger = realm.netloc
        # Whatever scope the challenge names, the token is for the repository that we ask for.
        scope = {} if self.given else {"scope": f"repository:{self._reference.repository}:pull"}
        query = {"service": challenge.get("service", ""), **scope}
        user = self._credential.user if self._credential else "anonymous"
        log.debug(f"token for {query.get('scope', 'a login')} from {realm.netloc} as {user}")
        response = self._ask(realm, query, self._credential)
        # RFC 6749, 5.2: the answer to an expired identity token has the status 400.
        may_have_ended = self.has_ended or self._credential is not None and self._credential.identity_token
        if response.status in (401, 403) or response.status == 400 and may_have_ended:
            response.discard()
            raise self.unauthorized()
        if response.status != 200:
            raise refusals.failure(response, self._reference.registry, realm.origin)
        return self._read(response, realm)

    def _realm(self, text: str) -> Address:
        """The address that hands out tokens."""
        registry = self._reference.registry
        try:
            realm = addresses.read(text)
        except ValueError as e:
            raise RegistryError(f"{registry} wants its tokens to be fetched from {addresses.shown(text)}: {e}") from e
        may_be_plain = self._client.is_own(realm) or site.may_be_plain(realm.netloc, self._settings)
        if realm.scheme == "http" and not (self._client.base.startswith("http:") and may_be_plain):
            raise RegistryError(f"{registry} wants its tokens to be fetched from {realm.origin}, which is not secure")
        return realm

    def _ask(self, realm: Address, query: Mapping[str, str], credential: Credential | None) -> Response:
        if credential and credential.identity_token:
            form = {**query, "grant_type": "refresh_token", "client_id": "penroot", "refresh_token": credential.secret}
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            return self._client.once("POST", realm, kind, urlencode(form).encode())
        address = realm._replace(path=realm.path + ("&" if "?" in realm.path else "?") + urlencode(query))
        return self._client.follow("GET", address, {"Authorization": credential.basic()} if credential else {})

    def _read(self, response: Response, realm: Address) -> str:
        """The token in an answer."""
        try:
            with response:
                document = response.document(_MAX_TOKEN)
            response.refuse_page(realm.netloc, document)
            answer = json.loads(document)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        # It becomes part of a header: RFC 6750, 2.1.
        if not isinstance(token, str) or not token or not (token.isascii() and token.isprintable()) or " " in token:
            registry = self._reference.registry
            raise RegistryError(f"{realm.netloc} sent no token for {registry}, or none that can be one")
        return token


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
