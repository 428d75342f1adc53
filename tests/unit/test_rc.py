from __future__ import annotations

import pytest

from enroot_py.runtime import imagefiles, rc

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


def test_reads_what_enroot_writes() -> None:
    run = rc.parse(ENROOT, "# a comment\n")
    assert run is not None
    assert run.workdir == "/work dir"
    assert run.argv(()) == ("tini", "--", "sh", "-c", "echo it's")
    assert run.argv(("true",)) == ("tini", "--", "true")


@pytest.mark.parametrize("word", ["", "it's", "a b", "$(id)", "`id`", "new\nline", "\\", '"', "a'\\''b", "*", "ünï"])
def test_reads_what_we_write(word: str) -> None:
    run = rc.Exec("/a b", ("entry", word), (word, "x"))
    again = rc.parse(imagefiles.rc("docker://x", {"label": "multi\nline"}, run), imagefiles.RC_LOCAL)
    assert again is not None
    assert (again.workdir, again.entrypoint, again.command) == (run.workdir, run.entrypoint, run.command)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fi\n\nif", "fi\necho hello\nif"),
        ("exec 'tini' '--' \"$@\"", 'exec $(which tini) "$@"'),
        ('cd "/work dir"', 'cd "$HOME"'),
        ("'sh' '-c'", "$'sh' '-c'"),
        ("else", "elif true; then"),
    ],
)
def test_another_script_needs_a_shell(before: str, after: str) -> None:
    assert before in ENROOT
    assert rc.parse(ENROOT.replace(before, after), "") is None


def test_commands_in_rc_local_need_a_shell() -> None:
    assert rc.parse(ENROOT, 'exec "$@"\n') is None


def test_nothing_is_no_script() -> None:
    assert rc.parse("", "") is None
