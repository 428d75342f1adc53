"""Run sshd in a container, as users of pyxis often do. PAM looks up the user in the container's shadow file."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

from tests.kernel.conftest import UID, User, require
from tests.kernel.registry import own_address
from tests.waiting import until

PORT = "27022"
PROGRAMS = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")
LINKS = ("lib", "lib64", "sbin")
PAM = "auth required pam_deny.so\naccount required pam_unix.so\nsession optional pam_unix.so\n"


@pytest.mark.parity("10-shadow: adds the caller to shadow and gshadow")
def test_pam_lets_the_user_in(user: User, rootfs: pathlib.Path) -> None:
    require(shutil.which("sshd", path="/usr/sbin"), "openssh-server is not installed")
    for directory in ("etc/pam.d", "etc/ssh", "run/sshd", "var/empty"):
        (rootfs / directory).mkdir(parents=True)
    shutil.rmtree(rootfs / "usr")
    (rootfs / "usr").mkdir()
    for link in LINKS:
        (rootfs / link).symlink_to(f"usr/{link}")
    (rootfs / "etc/pam.d/sshd").write_text(PAM)
    for database, text in {
        "passwd": "root:x:0:0:root:/root:/bin/sh\nsshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n",
        "shadow": "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n",
        "group": "root:x:0:\n",
        "gshadow": "root:*::\n",
    }.items():
        (rootfs / "etc" / database).write_text(text)
        (rootfs / "etc" / database).chmod(0o640 if "shadow" in database else 0o644)
    user.own(rootfs)
    for key in ("host", "own"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(user.home / key)], check=True)
    user.own(user.home / "host")
    options = {
        "ListenAddress": f"{own_address()}:{PORT}",
        "HostKey": "/at/host",
        "AuthorizedKeysFile": "/at/own.pub",
        "UsePAM": "yes",
        "StrictModes": "no",
        "PidFile": "none",
    }
    config = "".join(f"{key} {value}\n" for key, value in options.items())
    (user.home / "sshd_config").write_text(config)
    mounts = [f"--mount={path}:{path}" for path in PROGRAMS if os.path.exists(path)]
    log = user.home / "log"
    with log.open("w") as output:
        mounts += [f"--mount={user.home}:/at", "--mount=tmpfs:/run:tmpfs:mode=755"]
        script = "mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -f /at/sshd_config"
        server = user.begin("penroot", "start", *mounts, "box", "sh", "-c", script, stderr=output)
    try:
        until(lambda: "listening" in log.read_text() or server.poll() is not None, "sshd listens")
        known = ("-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={user.home}/known", "-F", "none")
        command = ("ssh", *known, "-i", str(user.home / "own"), "-p", PORT, f"user{UID}@{own_address()}", "id -un")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
        assert done.stdout == f"user{UID}\n", done.stderr + log.read_text()
    finally:
        server.kill()
        server.wait()
