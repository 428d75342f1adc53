"""Run programs: their output is returned, and errors quote their stderr."""

from __future__ import annotations

import os
import pathlib

import pytest

from enroot_py.base import run
from enroot_py.base.errors import ImageError, PenrootError
from enroot_py.base.run import Program


def script(tmp_path: pathlib.Path, text: str) -> str:
    path = tmp_path / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_output_is_returned_or_goes_to_a_descriptor(tmp_path: pathlib.Path) -> None:
    tool = script(tmp_path, 'echo "$WORD"; echo noise >&2')
    assert Program([tool], environ={"WORD": "one"}).run() == "one\n"
    with open(tmp_path / "out", "w+b") as out:
        assert Program([tool], environ={"WORD": "two"}, stdout=out.fileno()).run() == ""
        out.seek(0)
        assert out.read() == b"two\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exit 3", "exit status 3"),
        ("echo one; exit 1", "one"),
        ("echo one >&2; echo two >&2; echo three >&2; exit 1", "two; three"),
        ("echo before >&2; echo tool: wrong word >&2; echo usage: tool >&2; exit 1", "wrong word"),
        ('echo "$0: by its path" >&2; exit 1', "by its path"),
    ],
)
def test_error_quotes_the_program(tmp_path: pathlib.Path, text: str, error: str) -> None:
    tool = script(tmp_path, text)
    with pytest.raises(ImageError) as caught:
        Program([tool, "-x"], error=ImageError).run()
    assert str(caught.value) == f"{tool} failed: {error}"
    assert caught.value.hint == f"command: {tool} -x"


def test_tolerated_failure_is_a_success(tmp_path: pathlib.Path) -> None:
    tool = script(tmp_path, "echo some; echo a device >&2; exit 2")
    assert Program([tool], tolerate=lambda status, lines: (status, lines) == (2, ["a device"])).run() == "some\n"
    with pytest.raises(PenrootError, match="a device"):
        Program([tool], tolerate=lambda status, lines: False).run()


def test_warnings_of_a_success_are_shown(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = script(tmp_path, "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo line $i >&2; done")
    Program([tool]).run()
    assert not capsys.readouterr().err
    Program([tool], warnings=True).run()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[WARN] tool: line 1"
    assert lines[-1] == "[WARN] tool: 2 more lines"
    assert len(lines) == 11


def test_program_is_prepared_and_has_a_deadline(tmp_path: pathlib.Path) -> None:
    assert Program(["/bin/pwd"], before=lambda: os.chdir(tmp_path)).run() == f"{tmp_path}\n"
    with pytest.raises(PenrootError, match="has not ended within 1 s"):
        Program(["/bin/sleep", "600"], timeout=1).run()
    with pytest.raises(PenrootError, match="was killed by SIGKILL") as caught:
        Program([script(tmp_path, "kill -9 $$")]).run()
    assert "memory" in caught.value.hint


def test_missing_program_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PenrootError, match="no-such is not installed") as caught:
        run.find("no-such", package="some")
    assert "package some" in caught.value.hint
    with pytest.raises(PenrootError, match="cannot execute .*/tool: No such file"):
        Program([script(tmp_path, "").replace("tool", "no/tool")]).run()
