from __future__ import annotations

import random
import subprocess

import pytest

from enroot_py.runtime import imagefiles
from enroot_py.runtime.rc import Exec, parse

NASTY = ["", "plain", "two\nlines", "a\\nb", "a\\\\nb\\", '"quoted"', "'single'", "${HOME}", " spaces ", "\ttab",
         "a=b=c", "# no comment", "ünï", "$(touch /x)", "`x`", "\r", "x\\", "\n",
         "\n\n# penroot-exact: A=1"]  # fmt: skip


def test_environment_reads_back_exactly() -> None:
    variables = {f"V{i}": value for i, value in enumerate(NASTY)}
    assert imagefiles.decode_environment(imagefiles.environment(variables)) == variables


def test_environment_reads_back_exactly_at_random() -> None:
    seed = random.randrange(1 << 32)
    source = random.Random(seed)
    for _ in range(2000):
        value = "".join(source.choice("ab \n\\n\"'${}=#") for _ in range(source.randrange(12)))
        variables = {"A": value, "B": "x"}
        assert imagefiles.decode_environment(imagefiles.environment(variables)) == variables, f"seed {seed}"


def test_edited_line_of_environment_is_believed() -> None:
    text = imagefiles.environment({"A": "one\ntwo"}).replace("A=one two", "A=three")
    assert imagefiles.decode_environment(text) == {"A": "three"}


def test_plain_environment_is_what_enroot_reads() -> None:
    assert imagefiles.environment({"PATH": "/bin", "EMPTY": ""}) == "PATH=/bin\nEMPTY=\n"
    assert imagefiles.decode_environment("# c\n\n  A=1\nnothing\n=x\nB=${HOME}\n") == {"A": "1", "B": "${HOME}"}


@pytest.mark.parametrize("word", [w for w in NASTY if w])
def test_quoted_word_is_one_word_for_a_shell(word: str) -> None:
    done = subprocess.run(["sh", "-c", f"printf %s {imagefiles.quote(word)}"], capture_output=True, check=True)
    assert done.stdout.decode() == word


def test_rc_runs_what_the_config_says(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = Exec(str(tmp_path / "new dir"), ("printf", "%s|"), ("it's", "$HOME", "a\nb"))
    script = imagefiles.rc("docker://r#i:1", {"a\nreboot": "x\n$(touch /x)", "k": "v"}, run)
    assert script.startswith("# enroot-provenance: docker://r#i:1\n# a reboot x $(touch /x)\n# k v\n")
    out = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode()
    assert out == "it's|$HOME|a\nb|"
    out = subprocess.run(["sh", "-c", script, "rc", "own", "words"], capture_output=True, check=True).stdout.decode()
    assert out == "own|words|"


@pytest.mark.parametrize("entrypoint", [(), ("/init", "-v"), ("it's", "a\nb", "")])
@pytest.mark.parametrize("command", [(), ("/bin/sh",), ("-c", "x 'y' \"z\"\n$HOME")])
def test_rc_is_understood_without_a_shell(entrypoint: tuple[str, ...], command: tuple[str, ...]) -> None:
    script = imagefiles.rc("docker://r#i:1", {"k": "v"}, Exec("/a b", entrypoint, command))
    run = parse(script, imagefiles.RC_LOCAL)
    assert run is not None
    assert (run.workdir, run.entrypoint, run.command) == ("/a b", entrypoint, command)


def test_fstab_escapes_what_would_be_read_as_something_else() -> None:
    assert imagefiles.fstab(["/data/"]) == "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev\n"
    assert "/a\\040b\\134\\044{HOME} " in imagefiles.fstab(["/a b\\${HOME}"])
