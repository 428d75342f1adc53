"""The Python side of the SPANK plugin's protocol, written from the protocol's README without penroot's code.

The peer plays the helper, the process that sets up a step's container. The name of the image selects its behaviour: ok,
error, step-error, crash, silent, chatter, garbage, huge, log, later-resolved, later-unknown, later-silent. Variables of
the step change the behaviour too. With NOWHERE=1, the peer sends no namespaces. With HOST=1, it sends the host's mount
namespace. With VANISH=1, it exits after its answer. It appends each request to the file $JOURNAL, or $PYXIS_JOURNAL at
submit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import time

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUSER = 0x20000, 0x2000000, 0x10000000
PR_SET_DUMPABLE = 4
NAMES = ("user", "cgroup", "mnt")


def descriptors():
    """Return the open descriptors, except the one of this listing and those of libffi 3.5, which ctypes loads."""
    links = {f: f"/proc/self/fd/{f}" for f in sorted(os.listdir("/proc/self/fd"))}
    return [f for f, link in links.items() if os.path.exists(link) and "/libffi." not in os.readlink(link)]


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
    if sent < len(message):  # sending nothing would fail if the task is gone
        connection.sendall(message[sent:])


def journal(pairs):
    path = next(
        (v.partition("=")[2] for k, v in pairs if k == "environ" and v.startswith(("JOURNAL=", "PYXIS_JOURNAL="))), None
    )
    if path:
        with open("/proc/self/status") as f:
            state = f.read()
        state_lines = [
            line
            for line in state.splitlines()
            if line.startswith(("Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt"))
        ]
        entries = [
            *(f"{k} {v}" for k, v in pairs),
            *state_lines,
            f"ppid {os.getppid()} sid {os.getsid(0) == os.getpid()} umask {os.umask(0o22):o} cwd {os.getcwd()}",
            f"started as {sys.argv[1]}",
            "environment " + " ".join(sorted(os.environ)),
            "fds " + " ".join(descriptors()),
            "stdio " + " ".join(os.readlink(f"/proc/self/fd/{i}") for i in range(3)),
        ]
        with open(path, "a") as f:
            f.write("\n".join(entries) + "\n--\n")


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
    for name in NAMES[: len(fds)]:
        yield "ns", name
    yield "set", "FROM_IMAGE=two words"
    yield "set", "EMPTY="
    yield "unset", "LANG"
    yield "workdir", next((v.partition("=")[2] for k, v in pairs if v.startswith("container-workdir=")), "/usr")


def await_task():
    """Act as a helper that slurmstepd started before the first task. The file ``ahead`` selects a defect."""
    with contextlib.suppress(FileNotFoundError), open(f"{sys.argv[2]}/ahead") as f:
        defect = f.read()
        if defect == "gone":
            sys.exit(0)
        if defect == "chatter":
            with contextlib.suppress(PermissionError):  # EPERM: the file is full, and sealed against growth
                for _ in range(100):
                    os.write(2, 100_000 * b"x" + b"\n")
        if defect == "unresponsive":
            time.sleep(1000)
    control = socket.socket(fileno=4)
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    control.detach()
    if not descriptors:
        sys.exit(0)
    (request,) = descriptors
    os.dup2(request, 3, inheritable=False)
    os.close(request)
    os.setresgid(os.getegid(), os.getegid(), os.getegid())
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise root owns the files in /proc/self


def main():
    verb = sys.argv[1]
    if verb == "ahead":
        await_task()
        verb = "step"
    connection = socket.socket(fileno=3)
    pairs = receive(connection)
    journal(pairs)
    fields = dict(pairs)
    assert fields["verb"] == verb
    image = next((v.partition("=")[2] for k, v in pairs if v.startswith("container-image=")), "ok")
    if image == "crash":
        raise RuntimeError("the sky fell")
    if image == "silent":
        sys.exit(0)
    if image == "chatter":
        for _ in range(100):
            os.write(2, 100_000 * b"x" + b"\n")
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
        if "FINISH=late" in (v for k, v in pairs if k == "environ"):
            time.sleep(60)
        send(connection, [("ok", ""), ("pid", "0")])
        return
    serve(connection, pairs)


def flood(task):
    while True:
        send(task, [("log", "a\r\x1b[2J\x85\n[2026-01-01T00:00:00] forged " + 3000 * "x"), ("level", "error")])


def trickle(task):
    for byte in 100 * struct.pack("<I", 1000):
        task.sendall(bytes((byte,)))
        time.sleep(0.3)


def sleep(task):
    time.sleep(1000)


def give(task):
    with open("/dev/null") as null:
        for _ in range(20):
            send(task, [("log", "here"), ("level", "info")], [null.fileno()] * 100)


def swell(task):
    task.sendall(struct.pack("<I", 60 << 20))
    while True:
        task.sendall(b"x" * (1 << 20))


def bequeath(task):
    """Exit, and leave the socket to a child process that does not belong to the step."""
    ready, signal_ready = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        message = struct.pack("<I", 16) + b"log\0\0level\0info\0"
        until = time.monotonic() + 60
        for count in range(1 << 30):
            task.sendall(200 * message)  # faster than root reads
            if count == 100:
                os.close(signal_ready)
            if time.monotonic() > until:
                os._exit(0)
    os.close(signal_ready)
    os.read(ready, 1)
    os._exit(0)


def linger(task):
    """Send the task a TCP connection whose close blocks for 60 s, because its data cannot be delivered."""
    server = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        task.close()
        far = server.accept()[0]
        control = socket.socket(fileno=os.dup(4))
        control.settimeout(60)
        control.recv(1)  # until slurmstepd is gone
        far.close()
        os._exit(0)
    near = socket.create_connection(server.getsockname())
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    near.setblocking(False)
    try:
        while True:
            near.send(b"x" * (1 << 20))
    except BlockingIOError:
        pass
    message = struct.pack("<I", 16) + b"log\0\0level\0info\0"
    for _ in range(100):
        task.sendall(200 * message)  # root is still reading this when the process closes its copy of the connection
    try:
        socket.send_fds(task, [message], [near.fileno()])
    except PermissionError:
        os._exit(0)  # the kernel does not let the process pass the connection
    near.close()
    time.sleep(1000)


# Functions of a process with which a user has replaced a step's helper: they run when root asks it to finish the step.
HOSTILE = {function.__name__: function for function in (flood, trickle, sleep, give, swell, bequeath, linger)}


def serve(connection, pairs):
    gate = next((v.partition("=")[2] for _, v in pairs if v.startswith("GATE=")), "/")
    while not os.path.exists(gate):
        time.sleep(0.02)
    host = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    enter_namespaces()
    variables = [v for k, v in pairs if k == "environ"]
    fds = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ([] if "NOWHERE=1" in variables else NAMES)]
    with open("/proc/self/stat") as f:
        started = f.read().rpartition(")")[2].split()[19]
    claimed = next((v.partition("=")[2] for v in variables if v.startswith("CLAIM=")), f"{os.getpid()} {started}")
    answer = [*ok(fds, pairs), ("helper", claimed)]
    if "SAVES=1" in variables:
        answer.append(("saves", ""))
    if "HOST=1" in variables:
        fds[NAMES.index("mnt")] = host
    send(connection, answer, fds)
    if "VANISH=1" in variables:
        os._exit(0)
    control = socket.socket(fileno=4)
    while True:
        byte, received, _, _ = socket.recv_fds(control, 1, 1)
        if not byte:  # slurmstepd is gone
            os._exit(0)
        task = socket.socket(fileno=received[0])
        request = receive(task)
        journal(request)
        if dict(request)["verb"] == "finish":
            behaviour = next((v.partition("=")[2] for v in variables if v.startswith("FINISH=")), "")
            if behaviour in HOSTILE:
                HOSTILE[behaviour](task)
            send(task, [("ok", "")])
            os._exit(0)
        send(task, ok(fds, request), fds)
        task.close()
