"""Signals to ``start --pid`` and to ``exec`` in a PID namespace reach the program, and job control works."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from tests.kernel.conftest import User, busybox_rootfs
from tests.terminal import Terminal
from tests.waiting import until

CATCHER = """\
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	sigset_t all;
	int number;

	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	setlinebuf(stdout);
	puts("ready");
	while (sigwait(&all, &number) == 0)
		printf("got %d\\n", number);
}
"""
CATCHABLE = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
# A shell program that handles SIGINT, and is stopped by SIGTSTP
LOOP = "trap 'echo interrupted; exit 3' INT; echo started; while :; do sleep 0.1; done"


@pytest.fixture
def box(user: User, tmp_path: pathlib.Path) -> User:
    """Return a user with the container ``box``, whose program ``catcher`` prints each signal that it gets."""
    busybox_rootfs(user.data / "box")
    source = tmp_path / "catcher.c"
    source.write_text(CATCHER)
    subprocess.run(["cc", "-static", "-O2", "-o", user.data / "box/bin/catcher", source], check=True)
    user.own(user.data)
    return user


@contextlib.contextmanager
def command(user: User, verb: str, *words: str) -> Iterator[list[str]]:
    """Return the command line that runs ``words`` in a new PID namespace, or with exec in a container's namespace."""
    if verb == "start":
        yield user.command("penroot", "start", "--pid", "box", *words)
        return
    with user.running("penroot", "start", "--pid", "box", "sleep", "600"):
        until(lambda: "sleep" in user.penroot("list", "--fancy").stdout, "the container runs")
        yield user.command("penroot", "exec", "box", *words)


@contextlib.contextmanager
def running(words: list[str], user: User) -> Iterator[subprocess.Popen[str]]:
    """Run a command that starts ``catcher``, and wait for its first line. Kill the command at the end of the block."""
    with subprocess.Popen(words, env=user.environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a program prints."""
    assert process.stdout
    assert select.select([process.stdout], (), (), 20)[0], "no signal within 20 s"
    return os.read(process.stdout.fileno(), 100).decode()


def child(parent: int) -> int:
    """Return the only child of a process besides penroot-follow."""
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (pid,) = (int(pid) for pid in children if pathlib.Path(f"/proc/{pid}/comm").read_text() != "penroot-follow\n")
    return pid


def state(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@pytest.mark.parametrize("verb", ["start", "exec"])
def test_every_signal_reaches_the_program(box: User, verb: str) -> None:
    with command(box, verb, "catcher") as words, running(words, box) as process:
        for number in CATCHABLE:
            process.send_signal(number)
            assert next_line(process) == f"got {int(number)}\n"
        os.kill(child(process.pid), signal.SIGKILL)
        assert process.wait(20) == 128 + signal.SIGKILL


@pytest.mark.parametrize("verb", ["start", "exec"])
def test_stopped_program_stops_its_caller(box: User, verb: str) -> None:
    """If the program is stopped, penroot stops too, so its caller sees a stopped job, as without a PID namespace."""
    with command(box, verb, "catcher") as words, running(words, box) as process:
        program = child(process.pid)
        os.kill(program, signal.SIGSTOP)
        until(lambda: state(process.pid) == "T", "the caller is stopped", 20)
        assert state(program) == "T"
        process.send_signal(signal.SIGCONT)
        assert next_line(process) == f"got {int(signal.SIGCONT)}\n"
        process.send_signal(signal.SIGUSR1)
        assert next_line(process) == f"got {int(signal.SIGUSR1)}\n"


@pytest.mark.parametrize("verb", ["start", "exec"])
def test_program_ends_with_a_killed_caller(box: User, verb: str) -> None:
    with (
        command(box, verb, "catcher") as words,
        running(words, box) as process,
        open(f"/proc/{child(process.pid)}/comm") as program,
    ):
        process.kill()
        until(lambda: is_gone(program), "the program is killed", 20)


def is_gone(process: TextIO) -> bool:
    """Return whether a process has ended. ``process`` is an open file of its /proc directory."""
    try:
        process.seek(0)
        return not process.read()
    except ProcessLookupError:
        return True


@pytest.mark.parametrize("verb", ["start", "exec"])
def test_terminal_stops_continues_and_interrupts(box: User, verb: str) -> None:
    """Ctrl-Z, fg and Ctrl-C work in an interactive shell."""
    with command(box, verb, "sh", "-c", LOOP) as words, Terminal(["sh", "-i"], env=box.environ) as terminal:
        terminal.type(shlex.join(words) + "\n")
        terminal.read_until("started\n")
        terminal.type("\x1a")
        terminal.read_until("Stopped")
        waiting = child(terminal.process.pid)
        until(lambda: state(waiting) == state(child(waiting)) == "T", "the container is stopped")
        terminal.type("fg\n")
        until(lambda: state(waiting) != "T" and state(child(waiting)) != "T", "the container continues")
        terminal.type("\x03")
        terminal.read_until("interrupted\n")
        terminal.type("echo status=$?\n")
        terminal.read_until("status=3\n")
        assert terminal.shown.count("interrupted\n") == 1


@pytest.mark.parametrize("verb", ["start", "exec"])
def test_window_size_reaches_the_program_once(box: User, verb: str) -> None:
    with command(box, verb, "catcher") as words, Terminal(words, env=box.environ) as terminal:
        terminal.read_until("ready\n")
        fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        terminal.read_until(f"got {int(signal.SIGWINCH)}\n")
        terminal.process.send_signal(signal.SIGUSR1)
        terminal.read_until(f"got {int(signal.SIGUSR1)}\n")
        assert terminal.shown.count("got") == 2


def test_signal_of_the_kernel_reaches_the_program(box: User) -> None:
    """The kernel sends SIGIO, SIGALRM and SIGXCPU only to penroot's process, unlike signals of a terminal."""
    with command(box, "start", "catcher") as words, running(words, box) as process:
        read, write = os.pipe()
        fcntl.fcntl(read, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(write, b".")
        assert next_line(process) == f"got {int(signal.SIGIO)}\n"
        os.close(read)
        os.close(write)


# The parent is killed before its child has called prctl(PR_SET_PDEATHSIG), which would kill the child with the parent.
ORPHAN = """
import os, time
from enroot_py.runtime import supervise

def wait_for_the_end():
    while os.getppid() == parent:
        time.sleep(0.01)

parent = os.getpid()
os.register_at_fork(after_in_child=wait_for_the_end, after_in_parent=lambda: os.kill(parent, 9))
supervise.fork()
print("went on", flush=True)
"""


def test_child_of_a_killed_parent_does_not_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")
