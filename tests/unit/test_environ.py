"""Variables of a container: the expansion of ${VAR}, secrets of the caller, and origins."""

from __future__ import annotations

import pytest

from enroot_py.runtime import environ, secrets

HOST = {"HOME": "/home/me", "EMPTY": "", "A_B": "x${HOME}"}


@pytest.mark.parity("/etc/environment: ${VAR} is replaced by the caller's value")
@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("${HOME}/x", "/home/me/x"),
        ("a${UNSET}b${EMPTY}c", "abc"),
        ("${A_B}", "x${HOME}"),  # the value is not expanded again
        ("$HOME $(id -u) `id` $$ $", "$HOME $(id -u) `id` $$ $"),
        ("${HOME", "${HOME"),
        ("${HOME:-x} ${1} ${} ${a b}", "${HOME:-x} ${1} ${} ${a b}"),
        ("${a${HOME}", "${a/home/me"),
    ],
)
def test_names_in_braces_are_replaced_and_nothing_else(text: str, expanded: str) -> None:
    assert environ.substitute(text, HOST) == expanded


def test_defaults_in_files_of_the_site() -> None:
    assert environ.substitute("${HOME:-x}${EMPTY:-y}${UNSET:-z}", HOST, defaults=True) == "/home/meyz"


SECRET_NAMES = (
    "AWS_SECRET_ACCESS_KEY GITHUB_TOKEN HF_TOKEN NGC_API_KEY SLURM_JWT MYSQL_PWD DB_PASS npm_config__authToken "
    "SSH_AUTH_SOCK DOCKER_AUTH_CONFIG WANDB_APIKEY KEYRING_PASSPHRASE GOOGLE_CREDENTIALS SUDO_PASSWD SSHPASS LDAP_PW "
    "DBPASS MYSQLPWD AZURE_STORAGE_CONNECTION_STRING SQLCONNSTR_MAIN SENTRY_DSN WIFI_PSK DUO_OTP SLACK_WEBHOOK_URL "
    "AZURE_SAS AccountKey GIT_SSHKEY JWT COOKIE HTTP_AUTHORIZATION"
).split()


@pytest.mark.parity("/etc/environment: ${VAR} is replaced by the caller's value")
@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert secrets.is_secret(name, "x")


@pytest.mark.parametrize(
    "name", "HOME PWD OLDPWD DISPLAY XAUTHORITY LS_COLORS SLURM_JOB_ID PATH KEY COMPASS_X MONKEY_X".split()
)
def test_names_of_other_variables(name: str) -> None:
    assert not secrets.is_secret(name, "/some/path:http://registry:5000/x")


SECRET_VALUES = [
    "http://me:secret@proxy:3128/",
    "me:hunter2@db.site:5432/x",
    "me:p@ss@db.site",
    "me:12345@db.site",
    "postgres://me:a/b@db.site/x",
    "redis://:hunter2@db.site:6379/0",
    "https://store.site/x?sv=1&sig=abc",
    "https://store.site/x?X-Amz-Signature=abc",
    "http://one.site,http://me:pw@two.site",
    "none.site me:pw@proxy.site",
    "https://ghp_abc@github.site/team/app",
    "git+https://abc@git.site/x",
    "Server=tcp:db.site;User ID=me;Password=hunter2;",
    "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=abc==",
    "host=db user=me password=hunter2",
    "https://store.site/x?sig=1&token=abc",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
]
OTHER_VALUES = [
    "/opt/gcc@12/lib:/opt/x@1/lib",
    "git@github.site:team/app.git",
    "ssh://git@host:22/x@y:z",
    "registry.site:5000/team/app@sha256:0123",
    "team/app:1@sha256:0123",
    "me@site.org",
    "FILE:/tmp/krb5cc_1@SITE.ORG",
    "https://site.org/team/app@v1",
    "https://site.org?mail=me@site.org",
    "unix:path=/run/user/1/bus,guid=1",
    "*.tar=01;31:*.zip=01;31",
    "http://proxy.site:3128",
    ":/opt/gcc@12/lib::@",
    "tcp://:5000/app@v1",
    "pmix-server.1@1.0;tcp4://10.0.0.1:41567",
    "-Xmx1g -Dfile.encoding=UTF-8",
    "",
]


@pytest.mark.parametrize("value", SECRET_VALUES)
def test_secret_in_a_value_is_found(value: str) -> None:
    assert secrets.is_secret("X", value)


@pytest.mark.parametrize("value", OTHER_VALUES)
def test_value_without_a_secret_is_passed_on(value: str) -> None:
    assert not secrets.is_secret("X", value)


def test_each_variable_has_its_last_origin() -> None:
    variables = environ.Variables()
    variables.set({"A": "1", "B": "1", "C": "1"}, "the image")
    variables.values.update(B="2", D="2", C="1")  # as a hook does
    variables.note("hooks")
    assert variables.origins == {"A": "the image", "B": "hooks", "C": "the image", "D": "hooks"}
    variables.note("later")
    assert "later" not in variables.origins.values()


@pytest.mark.parametrize(
    ("before", "covering", "values", "below"),
    [
        ("A", {"A": ("2", "--env"), "B": ("2", "--env")}, {"A": "2", "B": "2"}, {"A": "1"}),
        ("AB", {"A": (None, "a.toml:2"), "C": (None, "a.toml:3")}, {"B": "1"}, {"A": "1"}),
    ],
)
def test_covered_and_unset_values_are_remembered(
    before: str, covering: dict[str, tuple[str | None, str]], values: dict[str, str], below: dict[str, str]
) -> None:
    """``below`` keeps the values that options and files cover or unset."""
    variables = environ.Variables(dict.fromkeys(before, "1"))
    variables.cover(covering)
    assert (variables.values, variables.below) == (values, below)
