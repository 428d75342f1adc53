"""A terminal for programs under test: a pseudoterminal that is the controlling terminal of a new session."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any


class Terminal:
    """A command in the foreground of a new terminal. ``shown`` is the terminal's output so far."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> None:
        self.master, slave = os.openpty()
        self.shown = ""
        self.process = subprocess.Popen(  # setsid(1) does not fork here, so this process becomes the command
            ["setsid", "--ctty", "--wait", *command], stdin=slave, stdout=slave, stderr=slave, env=env, **options
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.master)
        # End the whole session: a shell puts each command into its own process group.
        subprocess.run(["pkill", "-KILL", "--session", str(self.process.pid)], check=False)
        self.process.kill()
        self.process.wait()

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, text: str, seconds: int = 60) -> str:
        """Wait until the terminal has shown ``text``; return its output so far."""
        self._read(text, seconds)
        assert text in self.shown, f"not within {seconds} s: {text!r} in {self.shown!r}"
        return self.shown

    def read_all(self, seconds: int = 120) -> str:
        """Wait until no process has the terminal open; return its output so far."""
        self._read(None, seconds)
        return self.shown

    def _read(self, text: str | None, seconds: int) -> None:
        deadline = time.monotonic() + seconds
        while text is None or text not in self.shown:
            if not select.select([self.master], (), (), max(0.0, deadline - time.monotonic()))[0]:
                assert text is not None, f"still open after {seconds} s: {self.shown!r}"
                return
            try:
                read = os.read(self.master, 1 << 16)
            except OSError as e:
                assert e.errno == errno.EIO  # no process has the other end open
                return
            self.shown += read.decode(errors="replace").replace("\r\n", "\n")
