"""The Python side of the SPANK plugin's protocol as its README has it, with none of ours: it does as it is told.

The image is what to do: ok, error, step-error, crash, silent, garbage, huge,
log, later-resolved, later-unknown, later-silent. Everything that it is sent goes to the file that JOURNAL, or at submit
PYXIS_JOURNAL, of the environment names.
"""

import ctypes
import os
import socket
import struct
import sys
import threading
import time

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUSER = 0x20000, 0x2000000, 0x10000000
NAMES = ("user", "cgroup", "mnt")


def receive(connection):
    header = b""
    while len(header) < 4:
        header += connection.recv(4 - len(header)) or sys.exit(3)
    (length,) = struct.unpack("<I", header)
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data)) or sys.exit(3)
    fields = data.decode("utf-8", "surrogateescape").split("\0")
    assert fields.pop() == "" and len(fields) % 2 == 0
    return list(zip(fields[::2], fields[1::2], strict=True))


def send(connection, pairs, fds=()):
    payload = "".join(f"{key}\0{value}\0" for key, value in pairs).encode("utf-8", "surrogateescape")
    message = struct.pack("<I", len(payload)) + payload
    sent = socket.send_fds(connection, [message], fds) if fds else connection.send(message)
    if sent < len(message):  # an empty send fails too when the task is gone
        connection.sendall(message[sent:])


def journal(pairs):
    path = next(
        (v.partition("=")[2] for k, v in pairs if k == "environ" and v.startswith(("JOURNAL=", "PYXIS_JOURNAL="))), None
    )
    if path:
        with open("/proc/self/status") as f:
            state = f.read()
        ours = [
            line
            for line in state.splitlines()
            if line.startswith(("Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt"))
        ]
        facts = [
            *(f"{k} {v}" for k, v in pairs),
            *ours,
            f"ppid {os.getppid()} sid {os.getsid(0) == os.getpid()} umask {os.umask(0o22):o} cwd {os.getcwd()}",
            "environment " + " ".join(sorted(os.environ)),
            "fds " + " ".join(f for f in sorted(os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{f}")),
            "stdio " + " ".join(os.readlink(f"/proc/self/fd/{i}") for i in range(3)),
        ]
        with open(path, "a") as f:
            f.write("\n".join(facts) + "\n--\n")


def enter_namespaces():
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWCGROUP) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)


def ok(fds, pairs):
    yield "ok", ""
    for name in NAMES:
        yield "ns", name
    yield "set", "FROM_IMAGE=two words"
    yield "set", "EMPTY="
    yield "unset", "LANG"
    yield "workdir", next((v.partition("=")[2] for k, v in pairs if v.startswith("container-workdir=")), "/usr")


def main():
    verb = sys.argv[1]
    connection = socket.socket(fileno=3)
    pairs = receive(connection)
    journal(pairs)
    asked = dict(pairs)
    assert asked["verb"] == verb
    image = next((v.partition("=")[2] for k, v in pairs if v.startswith("container-image=")), "ok")
    if image == "crash":
        raise RuntimeError("the sky fell")
    if image == "silent":
        sys.exit(0)
    if image == "garbage":
        connection.sendall(struct.pack("<I", 5) + b"a\0b\0c")
        return
    if image == "huge":
        connection.sendall(struct.pack("<I", 0xFFFFFFFF))
        return
    if (image, verb) in (("error", "check"), ("error", "step"), ("step-error", "step")):
        send(connection, [("error", "no such thing"), ("hint", "try another thing")])
        return
    if image == "log":
        for level in ("info", "warn", "error"):
            send(connection, [("log", f"a line of {level}"), ("level", level)])
    if image.startswith("later") and verb == "check":
        send(connection, [("ok", ""), ("later", "")])
        if image == "later-resolved":
            time.sleep(0.1)
            send(connection, [("ok", ""), ("resolved", f"{image} sha256:d")])
        elif image == "later-unknown":
            send(connection, [("ok", "")])
        return
    if verb != "step":
        send(connection, [("ok", ""), ("pid", "0")])
        return
    serve(connection, pairs)


def serve(connection, pairs):
    gate = next((v.partition("=")[2] for _, v in pairs if v.startswith("GATE=")), "/")
    while not os.path.exists(gate):
        time.sleep(0.02)
    enter_namespaces()
    fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMES]
    address = f"penroot-test-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)
    listener.listen(64)
    # Until slurmstepd is gone, or finish would have told a real one.
    threading.Thread(target=lambda: (os.read(4, 1), os._exit(0)), daemon=True).start()
    vanish = any(v == "VANISH=1" for _, v in pairs)
    if vanish:  # before the answer, so that no other task can be in the queue
        listener.close()
    send(connection, [*ok(fds, pairs), ("helper", address), ("pid", str(os.getpid()))], fds)
    while not vanish:
        task, _ = listener.accept()
        asked = receive(task)
        journal(asked)
        if dict(asked)["verb"] == "finish":
            send(task, [("ok", "")])
            os._exit(0)
        send(task, ok(fds, asked), fds)
        task.close()
