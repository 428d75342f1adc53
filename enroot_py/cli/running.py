"""Verbs for running containers."""

from __future__ import annotations

from enroot_py.base.errors import UsageError
from enroot_py.config.settings import load

TYPE_CHECKING = False


def seconds(text: str | None, option: str) -> float | None:
    """Parse the value of an option in seconds. Raises UsageError."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1e9:
        raise UsageError(f"{option} {text}: not a number of seconds", hint=f"give seconds, such as {option} 30")
    return value


def execute(
    target: str,
    words: tuple[str, ...],
    env: tuple[str, ...],
    workdir: str | None,
    user: str | None,
    timeout: str | None,
) -> int:
    """Run ``penroot exec``. Raises PenrootError."""
    from enroot_py.runtime import joining

    timeout_s = seconds(timeout, "--timeout")
    return joining.execute_in(
        target, words, env, load(), workdir=workdir or "", user=user or "", timeout_s=timeout_s or None
    )
