"""Recognise secrets among the caller's variables. Imported only if an image asks for ``${VAR}``."""

from __future__ import annotations

from _collections_abc import Mapping

from enroot_py.base import log

# The names of secrets. A name consists of words separated by "_".
SECRET_WORDS = frozenset(  # a whole word of a name
    "AUTH BEARER CRED CREDS DSN KEY KEYS OTP PASS PASSKEY PAT PSK PW PWD SAS SIG SIGNATURE".split()
)
SECRET_ENDS = ("PASS", "PW", "PWD")  # the end of a longer word
HARMLESS_WORDS = frozenset("BYPASS COMPASS OLDPWD".split())  # words with such an end that name no secret
SECRET_PARTS = (  # anywhere in a name
    *("TOKEN", "SECRET", "PASSW", "PASSPHRASE", "PASSCODE", "CREDENTIAL", "WEBHOOK"),
    *("JWT", "COOKIE", "AUTHORIZATION"),
    *("APIKEY", "ACCESSKEY", "ACCOUNTKEY", "PRIVATEKEY", "SSHKEY"),
    *("CONNECTION_STRING", "CONNECTIONSTRING", "CONN_STR", "CONNSTR"),
)
_DIGESTS = ("sha256:", "sha512:")  # after the "@" of an image reference


def left_out(text: str, host: Mapping[str, str]) -> dict[str, str]:
    """Return ``host`` without the secrets that ``text``, an image's /etc/environment, uses. Warn about each secret."""
    kept = dict(host)
    for name in [name for name in host if "${" + name + "}" in text and is_secret(name, host[name])]:
        del kept[name]
        log.warn(f"/etc/environment of the image asks for {name}, which looks like a secret: pass it with --env {name}")
    return kept


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable has a secret's name, or a value that holds a secret."""
    inner = [_last_name(text) for text in value.split("=")[:-1]]  # "Server=db;Password=…"
    return (
        _names_secret(name, "_" in name)
        or any(_names_secret(each, True) for each in inner)
        or "PRIVATE KEY-----" in value
        or any(map(_has_login, (value, *value.replace(",", " ").replace(";", " ").split())))
    )


def _names_secret(name: str, has_words: bool) -> bool:
    upper = name.upper()
    return any(part in upper for part in SECRET_PARTS) or any(
        has_words and word in SECRET_WORDS
        or word.endswith(SECRET_ENDS) and word not in SECRET_ENDS and word not in HARMLESS_WORDS
        for word in upper.split("_")
    )  # fmt: skip


def _last_name(text: str) -> str:
    """Return the letters, digits and "_" at the end of a text."""
    start = len(text)
    while start and text[start - 1].isascii() and (text[start - 1].isalnum() or text[start - 1] == "_"):
        start -= 1
    return text[start:]


def _has_login(text: str) -> bool:
    """Return whether a text holds USER:PASSWORD@, SCHEME://:PASSWORD@ or http[s]://TOKEN@."""
    scheme = ""
    for piece in text.split("://"):
        login, at, rest = piece.partition("@")
        user, colon, password = login.partition(":")
        before, path, _ = password.replace("?", "/").replace("#", "/").partition("/")
        is_port = bool(path) and (not before or before.isascii() and before.isdecimal())
        if at and (user or scheme and colon) and not any(c in "/?#" or c.isspace() for c in user):
            if not colon and scheme.endswith(("http", "https")):
                return True
            if password and not password[0].isspace() and not is_port and not rest.startswith(_DIGESTS):
                return True
        scheme = piece
    return False
