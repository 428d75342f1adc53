"""Lines of the environment of a container: what ${VAR} becomes, and what it does not."""

from __future__ import annotations

import pytest

from enroot_py.runtime import environ

HOST = {"HOME": "/home/me", "EMPTY": "", "A_B": "x${HOME}"}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("${HOME}/x", "/home/me/x"),
        ("a${UNSET}b${EMPTY}c", "abc"),
        ("${A_B}", "x${HOME}"),  # once
        ("$HOME $(id -u) `id` $$ $", "$HOME $(id -u) `id` $$ $"),
        ("${HOME", "${HOME"),
        ("${HOME:-x} ${1} ${} ${a b}", "${HOME:-x} ${1} ${} ${a b}"),
        ("${a${HOME}", "${a/home/me"),
    ],
)
def test_names_in_braces_are_replaced_and_nothing_else(text: str, meant: str) -> None:
    assert environ.substitute(text, HOST) == meant


def test_defaults_in_files_of_the_site() -> None:
    assert environ.substitute("${HOME:-x}${EMPTY:-y}${UNSET:-z}", HOST, defaults=True) == "/home/meyz"


@pytest.mark.parametrize(
    "name",
    "AWS_SECRET_ACCESS_KEY GITHUB_TOKEN HF_TOKEN NGC_API_KEY SLURM_JWT MYSQL_PWD DB_PASS npm_config__authToken "
    "SSH_AUTH_SOCK DOCKER_AUTH_CONFIG WANDB_APIKEY KEYRING_PASSPHRASE GOOGLE_CREDENTIALS SUDO_PASSWD".split(),
)
def test_names_of_secrets(name: str) -> None:
    assert environ.is_secret(name, "x")


@pytest.mark.parametrize(
    "name", "HOME PWD OLDPWD DISPLAY XAUTHORITY LS_COLORS SLURM_JOB_ID PATH KEY COMPASS_X MONKEY_X".split()
)
def test_names_of_other_variables(name: str) -> None:
    assert not environ.is_secret(name, "/some/path:http://registry:5000/x")


def test_a_url_with_a_password_is_a_secret() -> None:
    assert environ.is_secret("http_proxy", "http://me:secret@proxy:3128/")
    assert not environ.is_secret("REPOSITORY", "ssh://git@host:22/x@y:z")


def test_each_variable_has_its_last_origin() -> None:
    variables = environ.Variables()
    variables.set({"A": "1", "B": "1", "C": "1"}, "the image")
    variables.values.update(B="2", D="2", C="1")  # as a hook does
    variables.note("hooks")
    assert variables.origins == {"A": "the image", "B": "hooks", "C": "the image", "D": "hooks"}
    variables.note("later")
    assert "later" not in variables.origins.values()


def test_what_is_covered_is_remembered() -> None:
    variables = environ.Variables({"A": "1"})
    variables.cover({"A": ("2", "--env"), "B": ("2", "--env")})
    assert (variables.values, variables.below) == ({"A": "2", "B": "2"}, {"A": "1"})


def test_what_a_file_unsets_is_gone_and_remembered() -> None:
    variables = environ.Variables({"A": "1", "B": "1"})
    variables.cover({"A": (None, "a.toml:2"), "C": (None, "a.toml:3")})
    assert (variables.values, variables.below) == ({"B": "1"}, {"A": "1"})
