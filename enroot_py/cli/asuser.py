"""Run ``penroot doctor`` as another user, for root.

The checks run in a child process that becomes the user. Root opens no path that the user controls, neither
configuration nor directories. The user can stop or replace the child, and can make it print anything. Therefore root
checks the child's output, and limits its size and time.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from enroot_py.base import linux, log
from enroot_py.base.errors import UsageError
from enroot_py.cli.findings import Finding

_DEADLINE_S = 60.0
_END_TIMEOUT_S, _TICK_S = 1.0, 0.01
_MAX_BYTES = 1 << 20
_MAX_TEXT_CHARS = 2000
_MAX_FD = 0xFFFFFFFF


def findings(name: str, deadline_s: float = _DEADLINE_S) -> Iterator[Finding]:
    """Run the checks as the user ``name``, and yield their findings. Raises UsageError."""
    if os.geteuid() != 0:
        raise UsageError(f"--user {name}: only root can check another user", hint="sudo penroot doctor --user NAME")
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(f"--user {name}: there is no such user", hint=f"getent passwd {name}") from None
    program = os.path.realpath(sys.argv[0])
    output, written = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _run(program, account, written)
    os.close(written)
    is_bad = False
    try:
        for finding in _read(output, name, deadline_s):
            is_bad = is_bad or finding.verdict == "bad"
            yield finding
        if not is_bad and not _has_succeeded(pid):
            yield Finding("bad", f"the checks as {name} ended early", f"runuser -u {name} -- penroot doctor")
    finally:
        os.close(output)
        _end(pid)


def _run(program: str, account: pwd.struct_passwd, output: int) -> NoReturn:
    """In the child: become the user, as a login does, and execute penroot."""
    try:
        os.setsid()  # the user's processes must not reach root's terminal
        null = os.open(os.devnull, os.O_RDWR)
        for number, descriptor in enumerate((null, output, null)):
            os.dup2(descriptor, number)
        linux.close_range(3, _MAX_FD, linux.CLOSE_RANGE_CLOEXEC)
        os.chdir("/")
        os.umask(0o022)
        os.initgroups(account.pw_name, account.pw_gid)
        os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
        os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
        os.execve(program, [program, "doctor", "--json"], _environ(account))
    except OSError as e:
        print(json.dumps({"verdict": "bad", "what": f"cannot run penroot as {account.pw_name}: {e}", "fix": ""}))
        sys.stdout.flush()
    finally:
        os._exit(1)


def _environ(account: pwd.struct_passwd) -> dict[str, str]:
    """Return the variables that login(1) and pam_systemd(8) set for a login, and none of root's variables."""
    environ = {
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
    }
    runtime = f"/run/user/{account.pw_uid}"
    return {**environ, "XDG_RUNTIME_DIR": runtime} if os.path.isdir(runtime) else environ


def _read(output: int, name: str, deadline_s: float) -> Iterator[Finding]:
    """Yield the child's findings until the child ends, or until the deadline."""
    end, size, rest = time.monotonic() + deadline_s, 0, b""
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while True:
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            what = f"the checks as {name} have not ended within {deadline_s:.0f} s: the next check hangs"
            yield Finding("bad", what, "check the mounts of the user's directories: a file server may not answer")
            return
        data = os.read(output, 1 << 16)
        size += len(data)
        *lines, rest = (rest + data).split(b"\n")
        yield from map(_parsed, lines)
        if not size:
            yield Finding("bad", f"penroot does not run as {name}", f"runuser -u {name} -- penroot doctor")
        if not data or size > _MAX_BYTES:
            return


def _parsed(line: bytes) -> Finding:
    """Return a finding of the child. Accepts only known verdicts, and escapes control characters in the texts."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        document = json.loads(line)
        verdict, what, fix = (document.get(key) for key in ("verdict", "what", "fix"))
        if verdict in ("ok", "warn", "bad") and isinstance(what, str) and isinstance(fix, str):
            return Finding(verdict, *(log.printable(text[:_MAX_TEXT_CHARS]).replace("\n", " ") for text in (what, fix)))
    return Finding("bad", f"the checks printed an invalid line: {log.printable(line[:100].decode(errors='replace'))}")


def _has_succeeded(pid: int) -> bool:
    """Return whether the child ends successfully within a second. Do not reap it, so that its PID is not reused."""
    end = time.monotonic() + _END_TIMEOUT_S
    while (state := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > end:
            return False
        time.sleep(_TICK_S)
    return state.si_code == os.CLD_EXITED and state.si_status == 0


def _end(pid: int) -> None:
    """Kill the child and its process group. Wait at most a second, because a dead file server can block their end."""
    for kill in (os.killpg, os.kill):  # the child may not have created its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    end = time.monotonic() + _END_TIMEOUT_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < end:
        time.sleep(_TICK_S)
