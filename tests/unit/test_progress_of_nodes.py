"""srun shows the progress of a step's nodes."""

from __future__ import annotations

import contextlib
import os
import pty

import pytest

from enroot_py.base.progress import bar
from enroot_py.features.swarm import progress as module
from enroot_py.features.swarm.messages import Progress
from enroot_py.features.swarm.progress import Display

HALF = Progress(joined=3, ready=1, slowest="n7", fraction=0.43, fetched=812_000_000)
ALL = Progress(joined=4, ready=4, slowest="", fraction=1.0, fetched=1_200_000_000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TERM", "xterm")
    return now


def test_pipe_gets_an_occasional_line(clock: list[float]) -> None:
    read, write = os.pipe()
    display = Display(write, "ubuntu:24.04", 1_200_000_000, 4)
    for clock[0] in (100.0, 105.0, 110.0, 111.0):
        display.show(lambda: HALF, ended=False)
    clock[0] = 112.34
    for _ in range(2):
        display.show(lambda: ALL, ended=True)
    display.end()
    os.close(write)
    with open(read) as shown:
        assert shown.read().splitlines() == [
            "pyxis: ubuntu:24.04: 1 of 4 nodes have it, 1 node not begun, n7 has 43% of 1.20 GB, 812.0 MB from the"
            " registry",
            "pyxis: ubuntu:24.04: 1.20 GB on 4 nodes in 12.3 s, 1.20 GB from the registry",
        ]


def test_terminal_gets_one_rewritten_line(clock: list[float]) -> None:
    primary, terminal = pty.openpty()
    display = Display(terminal, "ubuntu\x1b[31m", 1_200_000_000, 4)
    for clock[0] in (100.1, 101.5, 101.6, 101.8):
        display.show(lambda: HALF, ended=False)
    display.end()
    os.close(terminal)
    shown = ""
    with contextlib.suppress(OSError):  # EIO: the other end is closed, and everything has been read
        while True:
            shown += os.read(primary, 65536).decode()
    assert shown.count("\r\x1b[K") == 3
    assert shown.count("ubuntu\\x1b[31m  516/1200 MB  ") == 2, shown
    assert shown.count("1/4 nodes  n7") == 2
    assert "\n" not in shown
    assert max(len(line) for line in shown.split("\r\x1b[K")) < 80
    os.close(primary)


def test_dumb_terminal_gets_no_control_sequences(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    primary, terminal = pty.openpty()
    display = Display(terminal, "ubuntu", 1_200_000_000, 4)
    for clock[0] in (100.0, 105.0, 110.0):
        display.show(lambda: HALF, ended=False)
    os.close(terminal)
    shown = os.read(primary, 65536).decode()
    assert "\x1b" not in shown
    assert shown.count("pyxis: ubuntu: ") == 1
    os.close(primary)


@pytest.mark.parametrize("width", [10, 40, 60, 80, 200])
@pytest.mark.parametrize("done", [0, 1, 600_000_000, 1_300_000_000])
def test_bar_fits_the_width_with_facts_first(width: int, done: int) -> None:
    line = bar("registry.example/team/pytorch:24.05-py3", done, 1_200_000_000, 10.0, width, "1/4 nodes")
    facts = f"pytorch:24.05-py3  {done / 1e6:.0f}/1200 MB  {done / 1e7:.0f} MB/s"
    assert len(line) < width
    assert line.startswith(facts[: width - 1])
    assert "[" in line or width < 80


def test_small_image_gets_only_the_last_line(clock: list[float]) -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    display = Display(write, "ubuntu", 4_000_000, 4)
    display.show(lambda: HALF, ended=False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    os.close(read)
    display.show(lambda: ALL, ended=True)  # the pipe has no reader any more
    os.close(write)
