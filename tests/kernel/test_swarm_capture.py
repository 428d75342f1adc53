"""Capture all packets of a swarm (nodes that send an image to each other), and check that they reveal no secret."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from enroot_py.features.swarm.messages import Documents
from tests.kernel.test_swarm_sockets import Host, Lab, alone, blobs

SIZES = (700_000, 300_001)
TOKEN = '{"registry.example": "Bearer ' + random.Random(1).randbytes(300).hex() + '"}'
MANIFEST, CONFIG = (random.Random(seed).randbytes(2000).hex().encode() for seed in (2, 3))
_PIECE = 12  # bytes: a packet does not contain 12 consecutive bytes of a secret by chance
_ALL = 3  # ETH_P_ALL, if_ether.h
_ATTEMPTS = 20


class Private(Host):
    def documents(self) -> tuple[Documents, Sequence[int]]:
        sizes = [len(blob) for blob in self.layers]
        return Documents("sha256:" + "0" * 64, "amd64", MANIFEST, CONFIG, b"", TOKEN), sizes


class Capture:
    """Capture all packets on the interface lo in a thread."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        self._sock.bind(("lo", 0))
        self._sock.settimeout(1)
        self._ended = threading.Event()
        self._seen: list[bytes] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                self._seen.append(self._sock.recv(1 << 17))
            except TimeoutError:
                if self._ended.is_set():
                    return

    def end(self) -> list[bytes]:
        """Stop, and return the packets."""
        self._ended.set()
        self._thread.join()
        self._sock.close()
        return self._seen


@contextlib.contextmanager
def captured() -> Iterator[list[bytes]]:
    packets: list[bytes] = []
    capture = Capture()
    try:
        yield packets
    finally:
        packets += capture.end()


def reveals(packets: Sequence[bytes], secrets: Sequence[bytes]) -> bool:
    """Check whether a packet contains a part of a secret."""
    known = {secret[at : at + _PIECE] for secret in secrets for at in range(0, len(secret) - _PIECE, _PIECE)}
    return any(packet[at : at + _PIECE] in known for packet in packets for at in range(len(packet)))


@pytest.mark.security("N1")
def test_captured_packets_reveal_nothing(tmp_path: Path) -> None:
    layers = blobs(SIZES)
    secrets = [*layers, MANIFEST, CONFIG, TOKEN.encode()]

    def pull(address: str) -> bool:
        for attempt in range(_ATTEMPTS):
            directory = tmp_path / str(attempt)
            directory.mkdir()
            with captured() as packets, contextlib.closing(Lab(directory, layers, 2, has=Private)) as lab:
                for node in range(2):
                    lab.start(node)
                for node in range(2):
                    assert lab.result(node) == [hashlib.sha256(layer).hexdigest() for layer in layers]
            assert lab.requests == [0, 1], (
                "each node should download one blob from the registry and the other from its peer"
            )
            if sum(map(len, packets)) > SIZES[1]:  # if the machine is busy, the kernel captures fewer packets
                return not reveals(packets, secrets)
        raise AssertionError("each capture lost too many packets")

    def clear(address: str) -> bool:
        """Send a part of a secret in plain text, and return whether the capture contains that part."""
        with (
            captured() as packets,
            socket.create_server((address, 0)) as server,
            socket.create_connection(server.getsockname()) as client,
        ):
            client.sendall(TOKEN.encode()[5:60])
            server.accept()[0].close()
        return reveals(packets, secrets)

    assert alone(clear)
    assert alone(pull)
