"""Authorize requests to one repository: anonymously, with a login, or with a token from a token server.

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

_MAX_TOKEN_BYTES = 1 << 16  # of a token server's answer; no registry accepts a larger Authorization header


# Authorization headers with tokens, by registry, repository and user. All clients of this process share them.
_TOKENS: dict[tuple[str, str, str | None], str] = {}
_ACCEPTED: set[str] = set()  # Authorization headers that a registry has accepted
_LENT: set[str] = set()  # accepted headers that another process obtained


def tokens() -> str:
    """Serialize the tokens of this process for know() in another process. The text is a secret."""
    return json.dumps([[*key, token] for key, token in _TOKENS.items()])


def know(tokens: str) -> None:
    """Use the tokens of another process, each for the repository it was issued for. Raises ValueError."""
    rows = json.loads(tokens)
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise ValueError("not a list of tokens")
    for registry, repository, user, token in rows:
        if not all(isinstance(field, str) for field in (registry, repository, user or "", token)):
            raise ValueError("not a token")
        _TOKENS[registry, repository, user] = token
        _ACCEPTED.add(token)
        _LENT.add(token)


class Authorization:
    """The Authorization header for the repository of ``reference``.

    The first request has the header only if this process already has a token. Later requests have it if the registry
    asks for authorization.

    ``on_progress(True)`` is called before the search for a login, which may run a program, and ``on_progress(False)``
    after the search. Methods raise RegistryError and Transient.
    """

    def __init__(
        self, reference: Reference, settings: Settings, client: HttpClient, on_progress: Callable[[bool], None]
    ) -> None:
        self._token_key = (reference.registry, reference.repository, reference.user)
        self._basic = ""
        self._reference = reference
        self._settings = settings
        self._client = client
        self._on_progress = on_progress
        self._credential: Credential | None = None
        self.new_login: Credential | None = None  # set by ``penroot login``: try this login, without a repository
        self.unknown_token_server = ""  # a token server that got no login: nothing links the server to the registry
        self.has_expired = False  # the registry refuses a header that it has accepted before
        self._was_lent = False  # another process obtained the refused header
        self._challenge = ""  # the last WWW-Authenticate header

    def answer(self, challenge: str) -> None:
        """Answer a WWW-Authenticate header: get a token for this repository, or use Basic."""
        self._challenge = challenge
        schemes = dict(challenges(challenge))
        bearer = schemes.get("bearer", {})
        if bearer.get("realm"):
            _TOKENS[self._token_key] = "Bearer " + self._token(bearer)
            return
        if "basic" not in schemes:
            registry = self._reference.registry
            raise RegistryError(f"cannot log in to {registry}: unknown authentication scheme: {challenge[:80]!r}")
        self._credential = self._login()
        if self._credential is None:
            raise self.unauthorized()
        self._basic = self._credential.basic()

    @property
    def headers(self) -> dict[str, str]:
        """Return the Authorization header, or {} without a login or token."""
        header = self._basic or _TOKENS.get(self._token_key, "")
        return {"Authorization": header} if header else {}

    def note_status(self, status: int) -> bool:
        """Note the status of a response. Return whether a token or login may have expired."""
        header = self.headers.get("Authorization", "")
        if status < 400 or status == 404:
            self.has_expired = False
            if header:
                _ACCEPTED.add(header)
        elif header in _ACCEPTED and status in (400, 401, 403):
            self.has_expired, self._was_lent = True, header in _LENT
            return True
        return False

    def renew(self, ask: Callable[[], Response]) -> Response:
        """Get a new token or look up the login again, then repeat a request with ``ask``."""
        if not self._challenge:  # another process obtained the token
            self._basic = ""
            _TOKENS.pop(self._token_key, None)
            response = ask()
            if response.status != 401:
                return response
            response.discard()
            self._challenge = response.header("WWW-Authenticate")
        self.answer(self._challenge)
        return ask()

    def unauthorized(self) -> RefusedError:
        """Return the error for the status 401 if this process has no further login or token to try."""
        if self._needs_new_login:
            return self._expired(401, "")
        if self._credential is None and self.unknown_token_server:
            return refusals.unknown_token_server(self._reference, self.unknown_token_server, self._settings)
        return refusals.unauthorized(self._reference, self._credential, self._settings)

    @property
    def _needs_new_login(self) -> bool:
        """Return whether a login, or a token from another process, has expired. Anonymous tokens need no new login."""
        return self.has_expired and (self._credential is not None or self._was_lent)

    def _expired(self, status: int, details: str) -> RefusedError:
        registry, repository, login = self._reference.registry, self._reference.repository, self._credential
        if login is None:
            return RefusedError(
                f"{status} from {registry}: srun's token for {repository} has expired, and this node has no login for "
                f"{registry} to renew it: {details}".rstrip(": "),
                hint=f"log in: penroot login {registry} (looked in: {credentials.searched_files(self._settings)})",
            )
        renew = f"renew the login in {login.source}"
        if login.source == "the command line":
            renew = "give the current password"
        return RefusedError(
            f"{status} from {registry}: the login of {login.user!r} from {login.source} has expired, or lost its "
            f"rights: {registry} accepted it before, and refuses it now for {repository}: {details}".rstrip(": "),
            hint=f"{renew}, or: penroot login {registry}",
        )

    def denied(self, status: int, details: str) -> RefusedError:
        """Return the error for the status 403, or 400 after an expired token. ``details`` come from the registry."""
        if self._needs_new_login:
            return self._expired(status, details)
        reference, login = self._reference, self._credential
        user = f"{login.user!r} (login from {login.source})" if login else "anonymous users"
        server = self.unknown_token_server
        message = f"{status} from {reference.registry}: access to {reference.repository} is denied to {user}"
        return RefusedError(
            f"{message}: {details}" if details else message,
            hint=refusals.how_to_trust(reference, server, self._settings) if server else "",
        )

    def _login(self, realm: str = "") -> Credential | None:
        if self.new_login:
            return self.new_login
        self._on_progress(True)  # a helper may wait for a password: this time does not count as the registry's silence
        credential = credentials.find(self._reference, self._settings, realm=realm)
        self._on_progress(False)
        return credential

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = self._realm(challenge["realm"])
        # A registry may name any server. A server that does not belong to this registry gets no login.
        known = site.is_token_server(self._reference.registry, realm.netloc, self._settings)
        self._credential = None
        if known or self._client.is_own(realm):
            self._credential = self._login(realm.netloc if known else "")
        else:
            self.unknown_token_server = realm.netloc
        # Ignore the scope in the challenge: ask for this repository only.
        scope = {} if self.new_login else {"scope": f"repository:{self._reference.repository}:pull"}
        query = {"service": challenge.get("service", ""), **scope}
        user = self._credential.user if self._credential else "anonymous"
        log.debug(f"token for {query.get('scope', 'a login')} from {realm.netloc} as {user}")
        response = self._ask(realm, query, self._credential)
        # RFC 6749, 5.2: the answer to an expired identity token has the status 400.
        may_have_expired = self.has_expired or self._credential is not None and self._credential.identity_token
        if response.status in (401, 403) or response.status == 400 and may_have_expired:
            response.discard()
            raise self.unauthorized()
        if response.status != 200:
            raise refusals.failure(response, self._reference.registry, realm.origin)
        return self._read_token(response, realm)

    def _realm(self, text: str) -> Address:
        """Check and return the address of the token server that a challenge names."""
        registry = self._reference.registry
        try:
            realm = addresses.read(text)
        except ValueError as e:
            raise RegistryError(f"bad token server {addresses.shown(text)} of {registry}: {e}") from e
        may_be_plain = self._client.is_own(realm) or site.may_be_plain(realm.netloc, self._settings)
        if realm.scheme == "http" and not (self._client.base.startswith("http:") and may_be_plain):
            raise RegistryError(f"bad token server {realm.origin} of {registry}: it does not use https")
        return realm

    def _ask(self, realm: Address, query: Mapping[str, str], credential: Credential | None) -> Response:
        if credential and credential.identity_token:
            form = {**query, "grant_type": "refresh_token", "client_id": "penroot", "refresh_token": credential.secret}
            content_type = {"Content-Type": "application/x-www-form-urlencoded"}
            return self._client.once("POST", realm, content_type, urlencode(form).encode())
        address = realm._replace(path=realm.path + ("&" if "?" in realm.path else "?") + urlencode(query))
        return self._client.follow("GET", address, {"Authorization": credential.basic()} if credential else {})

    def _read_token(self, response: Response, realm: Address) -> str:
        try:
            with response:
                document = response.document(_MAX_TOKEN_BYTES)
            response.refuse_page(realm.netloc, document)
            answer = json.loads(document)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        # The token becomes part of a header: RFC 6750, 2.1.
        if not isinstance(token, str) or not token or not (token.isascii() and token.isprintable()) or " " in token:
            raise RegistryError(f"token server {realm.netloc} sent no valid token for {self._reference.registry}")
        return token


def challenges(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (scheme in lower case, parameters) of each challenge in WWW-Authenticate: RFC 9110, 11.6.1."""
    scheme, parameters = "", dict[str, str]()
    rest = header.strip()
    while rest:
        end = next((at for at, c in enumerate(rest) if c in " ,="), len(rest))
        word, rest = rest[:end], rest[end:].lstrip(" ")
        if word and rest[:1] == "=":
            value, rest = _split_value(rest[1:].lstrip(" "))
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


def _split_value(text: str) -> tuple[str, str]:
    if not text.startswith('"'):
        end = next((at for at, c in enumerate(text) if c in " ,"), len(text))
        return text[:end], text[end:]
    value, at = "", 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 1
        value += text[at : at + 1]
        at += 1
    return value, text[at + 1 :]
