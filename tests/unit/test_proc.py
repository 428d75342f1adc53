"""Parse /proc/PID/stat: proc_pid_stat(5)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from enroot_py.base import proc


def test_name_with_parentheses_and_spaces(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        try:
            while (stat := proc.Stat(process.pid)).comm != "a) R (b":
                time.sleep(0.01)  # wait until the child has executed the program
            assert stat.parent == os.getpid() and process.pid in proc.children(os.getpid())
            assert proc.Stat(os.getpid()).started <= stat.started
            os.kill(process.pid, signal.SIGSTOP)
            while not proc.Stat(process.pid).is_stopped:
                time.sleep(0.01)
        finally:
            process.kill()
    assert proc.look(process.pid) is None and proc.children(process.pid) == []


def test_processor_time_of_ended_children() -> None:
    before = proc.Stat(os.getpid())
    subprocess.run(["/bin/sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"], check=True)
    after = proc.Stat(os.getpid())
    mine = after.processor_s() - before.processor_s()
    assert after.processor_s(with_children=True) - before.processor_s(with_children=True) > mine
