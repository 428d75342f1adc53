"""An agent's sandbox: run each line of stdin as a command in a container, and print its status and output as JSON.

python3 agent.py docker://python:3.12-slim < commands
At the end, the program copies the files in /work of the container to ./work.
"""

from __future__ import annotations

import json
import subprocess
import sys

import enroot_py

TIMEOUT_S = 60
MAX_OUTPUT_BYTES = 10_000


def observe(box: enroot_py.Container, command: str) -> dict[str, object]:
    """Run a command, and return its exit status and the end of its output."""
    words = ["sh", "-c", command]
    try:
        done = box.run(words, cwd="/work", timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return {"status": 124, "output": f"killed after {TIMEOUT_S} s"}
    return {"status": done.returncode, "output": done.stdout[-MAX_OUTPUT_BYTES:].decode(errors="replace")}


def main(name: str) -> None:
    image = enroot_py.pull(name) if "://" in name else name
    with enroot_py.Container(image, writable=True, net="none") as box:
        box.run(["mkdir", "/work"], check=True)
        for command in sys.stdin:
            print(json.dumps(observe(box, command)), flush=True)
        box.copy_from("/work", ".")


main(sys.argv[1])
