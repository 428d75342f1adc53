"""Create the ssh keys of a job in the user's configuration directory, and remove them after the job."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Container

from enroot_py.base import build, trusted
from enroot_py.base.errors import ConfigError
from enroot_py.base.fds import Fd

HOST = "penroot"  # name of the server in known_hosts: HostKeyAlias of ssh_config(5)
_KIND = "ssh-ed25519"
_NAMES = ("host", "user")


class JobKeys:
    """A directory with the private keys ``host`` and ``user``, and their public keys in NAME.pub."""

    def __init__(self, config_path: str, cluster: str, job: str) -> None:
        self.parent = f"{config_path}/ssh"
        self.path = f"{self.parent}/{cluster}.{job}"
        self._cluster = cluster

    def make(self) -> None:
        """Create the keys unless they exist. Raises ConfigError."""
        try:
            trusted.place(self.parent, make=True, closed_to=0o077)
            if not os.path.lexists(self.path):
                self._generate()
            trusted.place(self.path, closed_to=0o077)
        except OSError as e:
            hint = "set ENROOT_CONFIG_PATH to a directory of yours that login nodes and compute nodes share"
            if e.errno == errno.EPERM:  # trusted.py raises it if others can access the directory
                hint = f"make it private: chmod 700 {self.parent}"
            raise ConfigError(f"cannot keep keys in {e.filename or self.path}: {e.strerror}", hint=hint) from e

    def _generate(self) -> None:
        try:
            import asyncssh
        except ModuleNotFoundError as e:
            raise build.missing("ssh", e) from e

        with tempfile.TemporaryDirectory(
            prefix=f".new-{os.path.basename(self.path)}-", dir=self.parent, ignore_cleanup_errors=True
        ) as temporary:
            for name in _NAMES:
                key = asyncssh.generate_private_key(_KIND, comment=f"{name} of {os.path.basename(self.path)}")
                _write(f"{temporary}/{name}", key.export_private_key())
                _write(f"{temporary}/{name}.pub", key.export_public_key())
            try:
                os.rename(temporary, self.path)
            except OSError:
                if not os.path.isdir(self.path):  # else another process has created it
                    raise

    def for_client(self) -> bytes:
        """Return the user's private key followed by the known_hosts line, in one file for ssh. Raises ConfigError."""
        try:
            host = b" ".join(_read(f"{self.path}/host.pub").split()[:2])
            return _read(f"{self.path}/user") + HOST.encode() + b" " + host + b"\n"
        except OSError as e:
            raise ConfigError(
                f"cannot read the keys of the job: {self.path}: {e.strerror}",
                hint=f"remove them, and ssh creates new ones: rm -r {self.path}",
            ) from e

    def forget_all_but(self, jobs: Container[str]) -> None:
        """Remove the keys of all jobs of this cluster except ``jobs``. Remove incomplete keys too."""
        of_cluster = re.compile(rf"(\.new-)?{re.escape(self._cluster)}\.(\d+)(-.*)?")
        for name in os.listdir(self.parent):
            match = of_cluster.fullmatch(name)
            if match and match[2] not in jobs:
                remove(f"{self.parent}/{name}", match[2])


def remove(path: str, job: str) -> None:
    """Remove the keys of a job. Ignore any other ``path``: a program of the user could have forged the job's note."""
    above, _, name = path.rpartition("/")
    if os.path.basename(above) != "ssh" or not re.fullmatch(rf"(\.new-)?[\w-]+\.{job}(-.*)?", name):
        return
    with contextlib.suppress(OSError):  # another node may remove the keys at the same time
        with Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as directory:
            for file in os.listdir(directory):
                if file.removesuffix(".pub") in _NAMES:
                    os.unlink(file, dir_fd=directory)
        os.rmdir(path)


def _write(path: str, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _read(path: str) -> bytes:
    with Fd(trusted.file(path)) as fd:
        return os.read(fd, 1 << 16)
