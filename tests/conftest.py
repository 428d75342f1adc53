"""Options and fixtures of all tiers: small samples by default, long loops with --soak, one seed for all randomness."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="let tests marked soak run long")
    parser.addoption("--seed", type=int, help="repeat a run that printed this seed")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: loops and fuzzing; short by default, long with --soak")
    config.addinivalue_line("markers", "gpu: needs a GPU")
    for kind, what in (("parity", "first words of lines"), ("security", "keys"), ("clusters", "headings")):
        text = f"{kind}(*texts): the test proves these statements of docs/, named by {what}: see tests/docs/proofs.py"
        config.addinivalue_line("markers", text)
    # A shell's background jobs ignore some signals, and nohup ignores SIGHUP. Programs that tests start and end by
    # signals would inherit the ignored signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)  # other users need the files that tests create
    if config.option.seed is None:  # repeat known results by default; --soak looks for new failures
        config.option.seed = time.time_ns() % 1_000_000 if config.option.soak else 1


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed)"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Return a generator of random numbers for this test. --seed repeats the numbers."""
    return random.Random(f"{request.config.option.seed} {request.node.nodeid}")


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """Return whether loops may take minutes."""
    return bool(request.config.option.soak)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """If a test that uses the lab fails, show the last log lines of its daemons."""
    report = yield
    lab = getattr(item, "funcargs", {}).get("lab")
    if report.failed and lab is not None and lab.is_up():
        report.sections.append(("logs of the lab", lab.logs(lines=40)))
    return report
