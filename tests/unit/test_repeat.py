from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_flaky_test_is_named_with_its_failure(tmp_path: Path) -> None:
    script = "import pathlib\ndef test_steady(): pass\ndef test_lucky():\n    pathlib.Path(__file__ + '.was').mkdir()\n"
    (tmp_path / "test_made.py").write_text(script)  # test_lucky fails the second time, because the directory exists
    command = [sys.executable, "-m", "tests.repeat", "--times", "2", str(tmp_path)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # the program writes its outputs there
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    assert "| 1 | as they are | 2 | 0 | 0 | 0 |" in done.stdout
    assert "| 2 | on one processor | 1 | 1 | 0 | 1 |" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 of 2: ")
    assert done.stdout.endswith("test_made.py::test_lucky, on one processor\n")
