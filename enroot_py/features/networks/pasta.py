"""Connect the private network of a container with the host's network, by pasta(1) of the package passt.

pasta runs as the user, in the container's PID namespace, so it ends with the container. pasta is forked in the host's
network namespace, so it opens its sockets there. pasta itself drops its access to the host's file systems.
"""

from __future__ import annotations

import os
import select
import socket

from enroot_py.base import carried, linux, log, paths, signals
from enroot_py.base.errors import ContainerError, UsageError
from enroot_py.base.fds import Fd
from enroot_py.features.networks.settings import NetworkSettings, pasta_option
from enroot_py.runtime import mounting, namespaces, supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from enroot_py.config.settings import Settings
    from enroot_py.runtime.hooks import Context

_DEVICE = "/dev/net/tun"
_START_TIMEOUT_S = 20
_RESOLVER = "169.254.1.1"  # a link-local address, at which pasta receives DNS queries for the host's resolver
_RESOLV_CONF = "/etc/resolv.conf"
_ENVIRON = {"PATH": "/usr/bin:/bin"}
# Keep the container away from the host's loopback: no TCP or UDP port is forwarded to it, and no address leads to it.
_CLOSED = ("-T", "none", "-U", "none", "--no-map-gw")


class _Starting:
    """A forked process that becomes pasta.

    The process receives the container's network namespace through the socket ``space``. When pasta has started, it
    writes a line to the pipe ``ready``. It writes its messages to the file ``errors``.
    """

    def __init__(self, space: socket.socket, ready: int, errors: int) -> None:
        self.space, self.ready, self.errors = space, Fd(ready), Fd(errors)


_starting: _Starting | None = None


def begin(settings: Settings) -> None:
    """Fork the process that becomes pasta. Raises ContainerError, UsageError."""
    global _starting
    program = carried.installed("pasta")
    node = os.uname().nodename
    if namespaces.privileged(settings):
        raise UsageError(
            "--net=pasta needs a user namespace", hint="start as another user, or set ENROOT_ALLOW_SUPERUSER=no"
        )
    if not program:
        raise ContainerError(f"--net=pasta: pasta is not installed on {node}", hint="install the package passt")
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        hint = f"as root: modprobe tun; chmod 666 {_DEVICE}"
        raise ContainerError(f"--net=pasta: cannot open {_DEVICE} on {node}: {e.strerror}", hint=hint) from e
    options = [word for port in NetworkSettings(settings).net_publish.split(",") if port for word in pasta_option(port)]
    for option in ("-t", "-u"):
        options += [] if option in options else [option, "none"]
    command = [program, "--foreground", "--quiet", "--config-net", *_CLOSED, "--dns-forward", _RESOLVER, *options]
    # pasta closes all descriptors but stdin, stdout and stderr, so it gets the namespace as stdin. When it has started,
    # it writes its PID to stdout.
    command += ["--pid", "/proc/self/fd/1", "--netns-only", "--no-netns-quit", "--netns", "/proc/self/fd/0"]
    (child_end, parent_end), (ready, done) = socket.socketpair(), os.pipe2(os.O_CLOEXEC)
    errors = os.memfd_create("pasta", os.MFD_CLOEXEC)
    with child_end, Fd(done):
        if os.fork() == 0:
            _run(command, child_end, done, errors)
    _starting = _Starting(parent_end, ready, errors)


def _run(command: list[str], receiver: socket.socket, done: int, errors: int) -> NoReturn:
    """In the child: wait for the network namespace of the container, and execute pasta."""
    try:
        os.setsid()  # Ctrl-C must reach only the container's program
        os.dup2(done, 1)
        os.dup2(errors, 2)
        linux.close_others((1, 2, receiver.fileno()))
        _, spaces, _, _ = socket.recv_fds(receiver, 1, 1)
        for space in spaces:
            os.dup2(space, 0)
            signals.restore()
            supervise.keep_capabilities()  # to enter the namespace
            os.execve(command[0], command, _ENVIRON)
    except OSError as e:
        os.write(2, f"{command[0]}: {e.strerror}\n".encode())
    finally:
        os._exit(1)


def connect(context: Context) -> None:
    """Send this process's network namespace to pasta, and wait until pasta has connected it. Raises ContainerError."""
    assert _starting
    with _starting.space, _starting.ready, _starting.errors:
        with Fd(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)) as space:
            socket.send_fds(_starting.space, [b"1"], [space])
        poll = select.poll()
        poll.register(_starting.ready, select.POLLIN)
        if not poll.poll(1000 * _START_TIMEOUT_S):
            raise ContainerError(f"pasta has not started within {_START_TIMEOUT_S} s", hint="check the node's load")
        if not os.read(_starting.ready, 64):
            os.lseek(_starting.errors, 0, os.SEEK_SET)
            lines = os.fsdecode(_starting.errors.content(1 << 16)).strip().splitlines() or ["no reason given"]
            hint = "use free ports, none below net.ipv4.ip_unprivileged_port_start, and check the default route"
            raise ContainerError(f"pasta cannot connect the container: {lines[-1]}", hint=hint)
    _open_low_ports()
    _replace_resolver(context)


def _open_low_ports() -> None:
    """Let programs listen on ports below 1024 in the container."""
    try:
        with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w") as file:
            file.write("0")
    except OSError as e:
        log.debug(f"programs cannot listen on ports below 1024: {e}")


def _replace_resolver(context: Context) -> None:
    """If /etc/resolv.conf names a resolver on the host's loopback, replace all its resolvers by pasta's."""
    try:
        lines = paths.text(context.root, _RESOLV_CONF).splitlines()
    except OSError:
        return
    servers = [line for line in lines if line.startswith("nameserver")]
    local = [line for line in servers if line.split()[1:2] and line.split()[1].startswith(("127.", "::1"))]
    if not local:
        return
    lines = [line for line in lines if line not in servers]
    text = "\n".join([f"nameserver {_RESOLVER}", *lines, ""])
    directory = f"{context.mount_point}.network"  # not the scratch directory, which rootfs.hide() has made unbindable
    os.mkdir(directory, 0o700)
    attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV | linux.MOUNT_ATTR_NOEXEC
    mounting.attach_at(mounting.mount_filesystem("tmpfs", "network", ["mode=755", "size=64k"], attributes), directory)
    with open(f"{directory}/resolv.conf", "w") as file:
        file.write(text)
    options = ("bind", "ro", "nosuid", "nodev", "noexec", "private")
    mounting.Mount(file.name, _RESOLV_CONF, "none", options, -1, "--net=pasta").execute(context.root)
    linux.umount2(directory, linux.MNT_DETACH)
