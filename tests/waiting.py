"""Wait for events, on a slow machine too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(happened: Callable[[], T], what: str, seconds: int = 120) -> T:
    """Wait until ``happened`` returns a true value, and return the value. ``what`` describes the event in errors."""
    deadline = time.monotonic() + seconds
    while not (value := happened()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value
