"""Values written to /etc/rc and /etc/environment are read back unchanged."""

from __future__ import annotations

import random
import subprocess

import pytest

from enroot_py.runtime import etc
from enroot_py.runtime.etc import Exec

NASTY = ["", "plain", "two\nlines", "a\\nb", "a\\\\nb\\", '"quoted"', "'single'", "${HOME}", " spaces ", "\ttab",
         "a=b=c", "# no comment", "ünï", "$(touch /x)", "`x`", "\r", "x\\", "\n",
         "\n\n# penroot-exact: A=1"]  # fmt: skip
ENROOT = """\
# enroot-provenance: docker://registry-1.docker.io#library/x:1
# maintainer somebody

mkdir -p "/work dir" 2> /dev/null
cd "/work dir" && unset OLDPWD || exit 1

if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

if [ $# -gt 0 ]; then
    exec 'tini' '--' "$@"
else
    exec 'tini' '--' 'sh' '-c' 'echo it'\\''s'
fi
"""


@pytest.mark.parity("values of variables may have newlines", "/etc/environment: has the image's variables, unchanged")
def test_environment_reads_back_exactly() -> None:
    variables = {f"V{i}": value for i, value in enumerate(NASTY)}
    assert etc.read_environment(etc.write_environment(variables)) == variables


def test_environment_reads_back_exactly_at_random() -> None:
    seed = random.randrange(1 << 32)
    source = random.Random(seed)
    for _ in range(2000):
        value = "".join(source.choice("ab \n\\n\"'${}=#") for _ in range(source.randrange(12)))
        variables = {"A": value, "B": "x"}
        assert etc.read_environment(etc.write_environment(variables)) == variables, f"seed {seed}"


def test_edited_line_of_environment_applies() -> None:
    text = etc.write_environment({"A": "one\ntwo"}).replace("A=one two", "A=three")
    assert etc.read_environment(text) == {"A": "three"}


@pytest.mark.parity("/etc/environment: has the image's variables, unchanged")
def test_plain_environment_is_what_enroot_reads() -> None:
    assert etc.write_environment({"PATH": "/bin", "EMPTY": ""}) == "PATH=/bin\nEMPTY=\n"
    assert etc.read_environment("# c\n\n  A=1\nnothing\n=x\nB=${HOME}\n") == {"A": "1", "B": "${HOME}"}


@pytest.mark.parametrize("word", [w for w in NASTY if w])
def test_quoted_word_is_one_word_for_a_shell(word: str) -> None:
    done = subprocess.run(["sh", "-c", f"printf %s {etc.quote(word)}"], capture_output=True, check=True)
    assert done.stdout.decode() == word


@pytest.mark.parity("labels may have newlines", "/etc/rc: comments name the image's source and labels")
def test_rc_runs_the_command_of_the_config(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = Exec(str(tmp_path / "new dir"), ("printf", "%s|"), ("it's", "$HOME", "a\nb"))
    script = etc.write_rc("docker://r#i:1", {"a\nreboot": "x\n$(touch /x)", "k": "v"}, run)
    assert script.startswith("# enroot-provenance: docker://r#i:1\n# a reboot x $(touch /x)\n# k v\n")
    out = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode()
    assert out == "it's|$HOME|a\nb|"
    out = subprocess.run(["sh", "-c", script, "rc", "own", "words"], capture_output=True, check=True).stdout.decode()
    assert out == "own|words|"


WORDS = ["", "it's", "a b", "$(id)", "`id`", "new\nline", "\\", '"', "a'\\''b", "*", "ünï"]


@pytest.mark.parametrize("entrypoint", [(), ("/init", "-v"), ("it's", "a\nb", "")])
@pytest.mark.parametrize("command", [(), ("/bin/sh",), ("-c", "x 'y' \"z\"\n$HOME"), *((word, "x") for word in WORDS)])
def test_rc_is_understood_without_a_shell(entrypoint: tuple[str, ...], command: tuple[str, ...]) -> None:
    entrypoint += command[:1]
    script = etc.write_rc("docker://r#i:1", {"label": "multi\nline"}, Exec("/a b", entrypoint, command))
    run = etc.read_rc(script, etc.RC_LOCAL)
    assert run is not None
    assert (run.workdir, run.entrypoint, run.command) == ("/a b", entrypoint, command)


@pytest.mark.parity("/etc/rc: penroot reads the /etc/rc of enroot")
def test_reads_what_enroot_writes() -> None:
    run = etc.read_rc(ENROOT, "# a comment\n")
    assert run is not None
    assert run.workdir == "/work dir"
    assert run.argv(()) == ("tini", "--", "sh", "-c", "echo it's")
    assert run.argv(("true",)) == ("tini", "--", "true")


@pytest.mark.parity("/etc/rc.local: its commands are run by a shell of the image")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fi\n\nif", "fi\necho hello\nif"),
        ("fi\n\nif", "fi; echo hello\n\nif"),
        ("exec 'tini' '--' \"$@\"", 'exec $(which tini) "$@"'),
        ('cd "/work dir"', 'cd "$HOME"'),
        ("'sh' '-c'", "$'sh' '-c'"),
        ("else", "elif true; then"),
    ],
)
def test_another_script_needs_a_shell(before: str, after: str) -> None:
    assert before in ENROOT
    assert etc.read_rc(ENROOT.replace(before, after), "") is None
    assert etc.read_rc(ENROOT, 'exec "$@"\n') is None and etc.read_rc("", "") is None


def test_digest_is_that_of_the_last_whole_line() -> None:
    old, new = ("sha256:" + digit * 64 for digit in "12")
    lines = etc.write_digest(old) + etc.write_digest(new) + "echo " + etc.write_digest(old)
    assert etc.image_digest(lines) == new
    assert etc.image_digest("echo " + etc.write_digest(old)) == ""
