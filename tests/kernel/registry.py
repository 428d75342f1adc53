"""A real registry for a test, on a loopback address."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.images import Pusher
from tests.installation import require
from tests.waiting import until

PROGRAM = "docker-registry"


def own_address() -> str:
    """Return a loopback address that depends on the PID, so that parallel test processes use different addresses."""
    pid = os.getpid()
    return f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


@dataclass
class Server:
    """A running docker-registry; ``host`` is HOST:PORT."""

    host: str
    log: Path

    @property
    def pusher(self) -> Pusher:
        return Pusher(f"http://{self.host}")


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[Server]:
    """Run docker-registry with its storage in ``directory``."""
    program = shutil.which(PROGRAM)
    require(program, f"{PROGRAM} is not installed: tests/prerequisites")
    assert program is not None
    directory.mkdir(exist_ok=True)
    config = f"""\
version: 0.1
log: {{level: info, accesslog: {{disabled: false}}}}
storage: {{filesystem: {{rootdirectory: {directory}/data}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:0"}}
"""
    (directory / "config.yml").write_text(config)
    log = directory / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([program, "serve", str(directory / "config.yml")], stdout=out, stderr=out)
    try:

        def listening() -> list[str]:
            assert process.poll() is None, f"{PROGRAM} did not start: {log.read_text()}"
            return re.findall(r'msg="listening on (\S+)"', log.read_text())

        yield Server(until(listening, f"{PROGRAM} listens")[0], log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def authority(directory: Path) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate authority, and a TLS context with its certificate for a server at 127.0.0.1."""
    require(shutil.which("openssl"), "openssl is not installed")
    ca, key, cert = directory / "ca.pem", directory / "key.pem", directory / "cert.pem"
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split()
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    use = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]  # Python requires the key usage since 3.13
    for command in (
        [*new, *use, "-keyout", directory / "ca.key", "-out", ca, "-subj", "/CN=Test Authority"],
        [*new, "-keyout", key, "-out", cert, "-subj", "/CN=here", *names, "-CA", ca, "-CAkey", directory / "ca.key"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    ca.chmod(0o644)
    return ca, context
