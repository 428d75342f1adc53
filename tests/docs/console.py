"""Examples of a page: ``console`` blocks with the typed text behind a prompt, and the output below it.

The prompt is ``$`` for a user and ``#`` for root; ``>`` continues a command. In output, … matches anything within a
line, and a line that is only … matches any number of lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.slurm.lab import Lab

# A job may have to wait for the node of the previous job.
_WAITS = re.compile("^srun: job .* (queued and waiting for|has been allocated) resources\n", re.M)


class Example:
    """A command with its prompt, and the output that the page shows below the command."""

    def __init__(self, prompt: str, command: str) -> None:
        self.prompt = prompt
        self.command = command
        self.shown: list[str] = []

    def fits(self, printed: str) -> bool:
        parts = ["(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + "\n" for line in self.shown]
        return re.fullmatch("".join(parts), printed) is not None


def examples(page: Path) -> Iterator[Example]:
    """Return the examples of a page, in order."""
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.M | re.S):
        example = None
        for line in block.splitlines():
            if line[:2] in ("$ ", "# "):
                if example:
                    yield example
                example = Example(line[0], line[2:])
            elif example and line[:2] == "> " and not example.shown:
                example.command += "\n" + line[2:]
            elif example:
                example.shown.append(line)
            else:
                raise ValueError(f"{page.name}: no prompt before {line!r}")
        if example:
            yield example


def run(lab: Lab, command: str, **where: Any) -> str:
    """Run a command as a user types it, and return the terminal's output. ``where``: see Lab.run."""
    printed = lab.run(["bash", "-c", f"exec 2>&1\n{command}"], check=False, **where).stdout
    return _WAITS.sub("", printed)
