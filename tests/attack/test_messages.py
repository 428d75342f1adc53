"""Broken, closed or hostile input ends in one line with a hint: no traceback, no hang, no wrong hint."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from tests.installation import IS_INSTALLED, LIBRARY
from tests.kernel.conftest import PREFIX, User, require
from tests.slurm.lab import Lab
from tests.slurm.steps import ON_N1, sh

FILES = (
    "enroot.conf",
    "penroot.yaml",
    "enroot.conf.d/x.conf",
    "environ.d/x.env",
    "mounts.d/x.fstab",
    "hooks.d/x.sh",
    "hooks.d/x.py",
)


def make(kind: str, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with open(path, "wb") as f:
            f.truncate(5 << 30)
    path.chmod(0o755)


def failure(user: User, *words: str) -> str:
    """Run a command that must fail at once and within 1 GB, and return its error message."""
    limits = ("prlimit", f"--as={1 << 30}", "timeout", "100")
    done = user.penroot(*words, status=1, prefix=limits)
    assert "Traceback" not in done.stderr
    assert "[ERROR]" in done.stderr
    return done.stderr


@pytest.mark.parametrize("kind", ["fifo", "directory", "huge"])
@pytest.mark.parametrize("name", FILES)
def test_special_file_in_place_of_settings_is_reported(user: User, rootfs: pathlib.Path, name: str, kind: str) -> None:
    """Before the fix, a start hung if, for example, enroot.conf was a FIFO."""
    if name == "hooks.d/x.sh" and kind != "huge":
        pytest.skip("only what can be executed is a hook")
    make(kind, user.home / "etc" / name)
    user.own(user.home / "etc")
    assert os.path.basename(name) in failure(user, "start", "box", "true")


@pytest.mark.parametrize("kind", ["fifo", "directory", "huge"])
@pytest.mark.parametrize("words", ["start --conf x box true", "start --rc x box", "batch x"])
def test_special_file_in_place_of_a_script_is_reported(user: User, rootfs: pathlib.Path, words: str, kind: str) -> None:
    """The script is given on the command line."""
    make(kind, user.home / "x")
    user.own(user.home / "x")
    assert "x" in failure(user, *words.split())


def test_a_script_may_come_of_a_pipe(user: User, rootfs: pathlib.Path) -> None:
    """Not an attack: --rc <(command) must work."""
    assert user.run("bash", "-c", "penroot start --rc <(echo echo piped) box").stdout == "piped\n"


@pytest.mark.security("I4")
def test_files_of_a_container_are_not_followed_nor_waited_for(user: User, rootfs: pathlib.Path) -> None:
    """inspect reads the container's /etc/rc, which a program in the container may have replaced."""
    make("fifo", rootfs / "etc/rc")
    assert "/etc/rc" in failure(user, "inspect", "box")
    (rootfs / "etc/rc").unlink()
    secret = user.home / "secret"
    secret.write_text("# enroot-provenance: secret\n")
    (rootfs / "etc/rc").symlink_to(secret)
    assert "secret" not in user.penroot("inspect", "box").stdout


DAMAGE = {"inodes": (64, 0, 200), "names": (72, 0, 200), "fragments": (80, -8, 16), "ids": (48, -4, 8)}


@pytest.mark.parametrize("where", [*DAMAGE, "root", "data"])
def test_a_damaged_image_says_that_it_is_damaged(user: User, image: pathlib.Path, where: str) -> None:
    """The error is not "cannot run sh: No such file or directory", and not an error of unsquashfs."""
    data = bytearray(image.read_bytes())
    if where == "root":  # overwrite the position of the root directory's inode
        data[64:72] = b"\xff" * 8
    elif where == "data":
        data[2000:5000] = b"\xff" * 3000
    else:
        pointer, offset, size = DAMAGE[where]
        at = int.from_bytes(data[pointer : pointer + 8], "little") + offset
        data[at : at + size] = b"\xff" * size
    image.write_bytes(data)
    for words in (("create", "-n", "x"), ("start",), ("bundle",), ("inspect",)):
        if where == "data" and words[0] in ("bundle", "inspect"):
            continue  # these commands do not read the damaged bytes
        assert f"{image.name} is damaged" in failure(user, *words, str(image), *(["sh"] if words[0] == "start" else []))
    assert sorted(os.listdir(user.data)) == ["box"]


KILL = """
import os, signal

def run(context):
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if f.read().startswith(b"/usr/bin/squashfuse") and os.stat(f"/proc/{pid}").st_uid == os.getuid():
                    os.kill(int(pid), signal.SIGKILL)
        except OSError:
            continue
    os.listdir(f"/proc/self/fd/{context.root}/opt")
"""


def test_error_names_a_killed_squashfuse(user: User, image: pathlib.Path) -> None:
    """The error is not "Transport endpoint is not connected"."""
    hook = user.home / "etc/hooks.d/11-kill.py"
    hook.parent.mkdir(parents=True)
    hook.write_text(KILL)
    user.own(user.home / "etc")
    stderr = failure(user, "start", str(image), "true")
    assert "its squashfuse was killed" in stderr
    assert "--mem" in stderr


def test_a_killed_squashfuse_of_a_step_is_no_bug(lab: Lab) -> None:
    """The error is not "the container could not be built: OSError(107, ...), a bug in penroot"."""
    hooks = "/home/alice/.config/enroot/hooks.d"
    try:
        lab.run(["srun", *ON_N1, "--container-image=registry:5000#minimal:1", "--container-save=k.sqsh", "true"])
        lab.run(f"mkdir -p {hooks}; cat > {hooks}/11-kill.py", input=KILL)
        done = lab.run(["srun", *ON_N1, "--container-image=./k.sqsh", *sh("echo ran")], check=False)
    finally:
        lab.run(f"rm -rf {hooks} k.sqsh")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "its squashfuse was killed" in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize("broken", ["prefix", "package"])
def test_an_installation_that_cannot_be_read_says_so(user: User, tmp_path: pathlib.Path, broken: str) -> None:
    """Before the fix, an installation that users cannot read, or that lacks a library, caused a traceback."""
    require(IS_INSTALLED, "needs an installation in $PENROOT_PREFIX")
    prefix = user.home / "opt"
    shutil.copytree(LIBRARY, prefix / "lib/penroot")
    text = pathlib.Path(PREFIX, "bin/penroot").read_text()
    (prefix / "bin").mkdir()
    (prefix / "bin/penroot").write_text(text.replace(LIBRARY, f"{prefix}/lib/penroot"))
    (prefix / "bin/penroot").chmod(0o755)
    if broken == "prefix":
        (prefix / "lib").chmod(0o700)  # only root, the owner, can enter the directory
    else:
        shutil.rmtree(prefix / "lib/penroot/click")
    done = user.run(f"{prefix}/bin/penroot", "info", status=1)
    assert "Traceback" not in done.stderr
    assert f"{prefix}/lib/penroot" in done.stderr
    assert "install penroot" in done.stderr


@pytest.mark.parametrize("words", ["version", "list", "inspect box", "start --help", "help", "info", "export -o - box"])
def test_closed_stdout_is_reported(user: User, rootfs: pathlib.Path, words: str) -> None:
    """A command that cannot print its output fails, and prints no traceback."""
    done = user.run("sh", "-c", f"exec penroot {words} >&-", status=1)
    assert "Traceback" not in done.stderr
    assert "cannot write the output" in done.stderr


def test_reused_descriptor_number_is_not_written_to(user: User, image: pathlib.Path) -> None:
    """With stdout closed, the next opened file gets descriptor 1. The program's output must not go to that file."""
    for words in ("export -o x.sqsh box", f"bundle -o x.run {image}", f"create -n x {image}", "start box true"):
        user.run("sh", "-c", f"exec penroot {words} <&- >&- 2>&-")
    assert user.start("x.sqsh", "echo", "whole") == "whole\n"
    assert user.start("x", "echo", "whole") == "whole\n"


@pytest.mark.parametrize("words", ["create -n x {image}", "export -o y.sqsh box", "bundle -o y.run {image}", "info"])
def test_a_umask_that_takes_all_from_the_owner(user: User, image: pathlib.Path, words: str) -> None:
    """Before the fix, "Permission denied" came with a hint to contact the directory's owner, who is the caller."""
    user.run("sh", "-c", f"umask 777; penroot {words.format(image=image)}")
    user.run("sh", "-c", f"umask 777; penroot start {image} sh -c 'test $(umask) = 0777'")


@pytest.mark.parametrize(
    "words", ["create -n x {image}", "export -o x.sqsh box", "bundle {image}", "start {image} true"]
)
def test_process_limit_is_reported(user: User, image: pathlib.Path, words: str) -> None:
    """At RLIMIT_NPROC, the error is not "must be a directory of your own", and it has a hint."""
    done = user.run("bash", "-c", f"ulimit -u 0; exec penroot {words.format(image=image)}", status=1)
    assert "Traceback" not in done.stderr
    assert "ulimit -u" in done.stderr
    assert "directory of your own" not in done.stderr
