"""Each documented failure of start, exec and bundles prints one error line and, in most cases, a hint.

tests/slurm/test_failures_of_steps.py does the same for srun.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import PREFIX, UID, User, box, ordinary_user, require, small_filesystem, squashed

HOOK = "hook"
# Kind -> name -> (a shell script in which $P is penroot, a part of the expected message). The script runs in the user's
# home. There are the container box, the image box.sqsh and the files that PREPARED creates.
FAILURES: dict[str, dict[str, tuple[str, str]]] = {
    "usage": {
        "no target": ("$P start", "start needs"),
        "unknown option": ("$P start --nothing box", "unknown option"),
        "option without value": ("$P start box -m; $P start --mount", "needs a value"),
        "rc is missing": ("$P start --rc none box true", "--rc none"),
        "unknown verb": ("$P strat box", "strat"),
        "exec without command": ("$P exec", "PID"),
    },
    "config": {
        "conf is missing": ("$P start --conf none box true", "cannot read"),
        "conf sets a wrong value": ("$P start --conf bad.conf box true", "ENROOT_ROOTFS_WRITABLE"),
        "unknown key": ("ENROOT_CONFIG_PATH=$PWD/badconf $P start box true", ""),
        "setting is wrong": ("ENROOT_UNPACK=perhaps $P start box true", "ENROOT_UNPACK"),
        "environment file is missing": ("$P start --environment ./none.toml box true", "there is no file"),
        "environment file does not parse": ("$P start --environment ./bad.toml true", "bad.toml"),
        "environment file is its own base": ("$P start --environment ./circle.toml true", "is its own base"),
        "too many bases": ("$P start --environment ./deep0.toml true", "more than 10 levels"),
        "base links to itself": ("$P start --environment ./linked.toml true", "is its own base"),
    },
    "value": {
        "device": ("$P start --device nothing=1 box true", "nothing"),
        "variable": ("$P start --env '=x' box true", ""),
    },
    "reference": {
        "scheme": ("$P start nothing://x true", ""),
        "bad reference": ("$P start 'docker://UPPER CASE' true", ""),
        "empty": ("$P start docker:// true", ""),
    },
    "registry": {
        "not reached": ("ENROOT_TRANSFER_RETRIES=0 $P start docker://127.0.0.1:1#x true", "127.0.0.1:1"),
        "layout is missing": ("$P start oci:none true", "none"),
    },
    "container": {
        "no container": ("$P start nothing true", "no such container"),
        "no image file": ("$P start ./nothing.sqsh true", "no such image: ./nothing.sqsh"),
        "name exists": ("$P create -n box box.sqsh", "already exists"),
        "record is damaged": ("$P start broken true", "was not made with it"),
        "image is gone": ("$P start gone true", "gone"),
        "remove": ("$P remove -f nothing", "no such container"),
        "runtime path is a file": ("ENROOT_RUNTIME_PATH=$PWD/file/x $P start box true", "cannot create"),
        "data path is a file": ("ENROOT_DATA_PATH=$PWD/file/x $P create -n x box.sqsh", ""),
        "exec without process": ("$P exec 999999999 true", ""),
        "exec by name": ("$P exec nothing true", ""),
    },
    "image": {
        "no squashfs": ("$P start ./file true", "/file"),
        "truncated": ("$P start ./short.sqsh true", "truncated"),
        "superblock is garbage": ("$P start ./garbage.sqsh true", ""),
        "inodes are garbage": ("$P start ./hollow.sqsh true", "hollow.sqsh"),
        "unreadable": ("$P start ./closed.sqsh true", "Permission denied"),
        "FIFO": ("$P start ./fifo true", ""),
        "bundle of no image": ("$P bundle file", ""),
        "export onto a directory": ("$P export -f -o . box", ""),
        "import of a file": ("$P import -o x.sqsh ./file", ""),
        "other architecture": ("$P start oci:layout true", ""),
    },
    "mount": {
        "no source": ("$P start -m /nothing:/mnt box true", "cannot mount /nothing on /mnt: No such file"),
        "no target": ("$P start -m ./file:/no/such:none:bind box true", ""),
        "directory on file": ("$P start -m /usr:/bin/sh box true", "/bin/sh"),
        "unknown type": ("$P start -m none:/mnt:nothing box true", "nothing"),
        "unknown option": ("$P start -m /usr:/mnt:bind,nothing box true", "nothing"),
        "data is missing": ("$P start -m none.sqsh:/mnt:sqsh box true", "none.sqsh"),
        "data is a directory": ("$P start -m home:/mnt:sqsh box true", ""),
        "data is damaged": ("$P start -m hollow.sqsh:/mnt:sqsh box true", "hollow.sqsh"),
        "fstab": ("ENROOT_CONFIG_PATH=$PWD/badfstab $P start box true", "bad.fstab:1"),
    },
    "namespace": {"fuse is missing": ("NO_FUSE", "/dev/fuse")},
    HOOK: {
        "Python hook raises": ("ENROOT_CONFIG_PATH=$PWD/raises $P start box true", "hook"),
        "Python hook opens nothing": ("ENROOT_CONFIG_PATH=$PWD/opens $P start box true", "/nothing: No such file"),
        "Python hook without run": ("ENROOT_CONFIG_PATH=$PWD/norun $P start box true", "defines no function run"),
        "Python hook exits": ("ENROOT_CONFIG_PATH=$PWD/exits $P start box true", "os._exit()"),
        "Python hook executes": ("ENROOT_CONFIG_PATH=$PWD/execs $P start box true", "os.exec"),
        "bash hook fails": ("ENROOT_CONFIG_PATH=$PWD/fails $P start box true", "failed with status 3"),
        "bash hook is killed": ("ENROOT_CONFIG_PATH=$PWD/dies $P start box true", "failed with status -9"),
        "bash hook has no interpreter": ("ENROOT_CONFIG_PATH=$PWD/nointerp $P start box true", "cannot run"),
        "bash hook is no program": ("ENROOT_CONFIG_PATH=$PWD/binary $P start box true", "failed with status"),
        "conf fails": ("$P start --conf fail.conf box true", "failed with status 4"),
    },
    "command": {
        "no command": ("$P start box nothing", "cannot run nothing"),
        "not executable": ("$P start box /etc/environment", "cannot run /etc/environment"),
        "directory": ("$P start box /etc", "cannot run /etc"),
        "no interpreter": ("$P start box /bin/script", "cannot run /bin/script"),
        "bundle without command": ("$P bundle -f -o b.run box.sqsh && ./b.run nothing", "nothing"),
        "bundle is truncated": (
            "$P bundle -f -o b.run box.sqsh && head -c 20000 b.run > c.run && chmod 755 c.run && ./c.run true",
            "",
        ),
        "bundle with a wrong mount": ("$P bundle -f -o b.run box.sqsh && ./b.run -m /nothing:/mnt true", "/nothing"),
    },
    "other": {
        "files": ("ulimit -n 5; exec $P start box true", "ulimit -n"),
        "few files and an image": ("ulimit -n 6; exec $P start box.sqsh true", "ulimit -n"),
        "working directory is gone": ("mkdir d; cd d; rmdir ../d; $P start -m ./x:/mnt box true", ""),
        "output is closed": ("$P list >&-; $P list > /dev/full", "cannot write the output"),
    },
}
# These cases print more than one error line: they run two commands, or bash or the bundle prints its own errors.
SAYS_MORE = ("bash hook has no interpreter", "bash hook is no program", "output is closed", "remove")
SAYS_MORE += tuple(name for name in FAILURES["command"] if name.startswith("bundle"))
CASES = [(kind, name) for kind, cases in FAILURES.items() for name in cases]

PREPARED = """
echo text > file; mkdir home badfstab badconf; mkfifo fifo
head -c 5000 box.sqsh > short.sqsh
(head -c 20 box.sqsh; head -c 100000 /dev/urandom) > garbage.sqsh
python3 - <<'END'
data = bytearray(open("box.sqsh", "rb").read())
start = int.from_bytes(data[64:72], "little")  # the inode table
data[start + 2 : start + 200] = bytes(198)
open("hollow.sqsh", "wb").write(data)
END
cp box.sqsh closed.sqsh; chmod 0 closed.sqsh
echo '#ENROOT_ROOTFS_WRITABLE=perhaps' > bad.conf; echo 'exit 4' > fail.conf
echo 'this is no TOML' > bad.toml; echo 'base_environment = "./circle.toml"' > circle.toml
echo 'base_environment = "./link.toml"' > linked.toml; ln -s linked.toml link.toml
for n in 0 1 2 3 4 5 6 7 8 9 10 11 12; do echo "base_environment = './deep$((n + 1)).toml'" > deep$n.toml; done
mkdir badfstab/mounts.d; echo 'one two' > badfstab/mounts.d/bad.fstab
echo 'nothing: [' > badconf/penroot.yaml
mkdir data/broken data/gone; printf '\\0\\1\\2' > data/broken/.penroot
printf 'squashfs %s/none.sqsh\\n' "$PWD" > data/gone/.penroot; mkdir data/gone/upper data/gone/work
"""
PYTHON_HOOKS = {
    "raises": "def run(context):\n    raise ValueError('broken')\n",
    "opens": "def run(context):\n    open('/nothing')\n",
    "norun": "x = 1\n",
    "exits": "import os\ndef run(context):\n    os._exit(0)\n",
    "execs": "import os\ndef run(context):\n    os.execvp('true', ['true'])\n",
}
BASH_HOOKS = {
    "fails": "#!/bin/bash\nexit 3\n",
    "dies": "#!/bin/bash\nkill -9 $$\n",
    "nointerp": "#!/no/such/interpreter\n",
    "binary": "\x7fELF nothing\n",
}


@pytest.fixture(scope="module")
def prepared() -> Iterator[User]:
    """Yield one user for all cases, because a failure changes nothing."""
    with ordinary_user(UID) as user:
        rootfs = box(user)
        squashed(user, rootfs)
        script = rootfs / "bin/script"
        script.write_text("#!/no/such/interpreter\n")
        script.chmod(0o755)
        user.own(rootfs)
        user.run("sh", "-ec", PREPARED)
        for hooks, suffix in ((PYTHON_HOOKS, "py"), (BASH_HOOKS, "sh")):
            for name, text in hooks.items():
                user.write(f"{name}/hooks.d/50-{name}.{suffix}", text, 0o755)
        yield user


def assert_in_words(err: str, *, kind: str = "") -> None:
    """Check that the output has no trace of Python: no traceback, file name or exception name."""
    lines = [line for line in err.splitlines() if line and not line.startswith("[INFO]")]
    assert lines, "there is no message"
    assert not re.search(r"Traceback|  File \"|a bug in|\[Errno|<class|object at 0x", err), err
    # An error in a site's Python hook may name the file and the exception, because they help the hook's author.
    message = re.sub(r"/\S*/hooks\.d/\S*\.py(:\d+ failed: \w+:)?", "", err) if kind == HOOK else err
    assert not re.search(r"\.py\b|\b[A-Z]\w*(Error|Exception|Exit)\b", message), err


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}: {name}" for kind, name in CASES])
def test_failure_is_one_clear_line(prepared: User, kind: str, name: str) -> None:
    script, part = FAILURES[kind][name]
    prefix: tuple[str, ...] = ()
    if script == "NO_FUSE":
        require(os.geteuid() == 0, "only root can cover /dev/fuse")
        (prepared.home / "fuse").touch(mode=0)
        prefix = ("unshare", "-m", "sh", "-c", 'mount --bind fuse /dev/fuse; exec "$@"', "sh")
        script = "penroot start box.sqsh true"
    done = prepared.run("sh", "-c", script, env={"P": f"{PREFIX}/bin/penroot"}, prefix=prefix, status=None)
    assert done.returncode > 0, done
    assert part in done.stderr, done.stderr
    assert_in_words(done.stderr, kind=kind)
    if name not in SAYS_MORE and kind != "usage":
        kinds = [line[:6] for line in done.stderr.splitlines() if not line.startswith(("[INFO]", "[WARN]"))]
        assert kinds in (["[ERROR"], ["[ERROR", "[HINT]"]), done.stderr


def test_full_disk_is_named(user: User, rootfs: pathlib.Path, image: pathlib.Path) -> None:
    with small_filesystem(user.home / "small", f"size=64k,mode=700,uid={user.uid}"):
        for setting, words in (
            ("ENROOT_DATA_PATH", ("create", "-n", "x", str(image))),
            ("ENROOT_CACHE_PATH", ("start", str(image), "true")),
        ):
            env = {setting: str(user.home / "small/d"), "ENROOT_UNPACK": "yes"}
            done = user.penroot(*words, env=env, status=1)
            assert_in_words(done.stderr)
            assert "full" in done.stderr or "No space" in done.stderr


def test_missing_programs_are_named(user: User, rootfs: pathlib.Path, image: pathlib.Path) -> None:
    require(os.geteuid() == 0, "only root can hide programs")
    require(shutil.which("squashfuse"), "squashfuse is not installed")
    for program, words in (
        ("squashfuse", ("start", str(image), "true")),
        ("unsquashfs", ("create", "-n", "x", str(image))),
        ("mksquashfs", ("export", "-o", "x.sqsh", "box")),
        ("fuse-overlayfs", ("start", "box", "true")),
    ):
        hide = f'for each in /usr/bin/{program}*; do mount --bind /dev/null $each; done; exec "$@"'
        env = {"ENROOT_NATIVE_OVERLAYFS": "no"} if program == "fuse-overlayfs" else {}
        done = user.run("penroot", *words, env=env, prefix=("unshare", "-m", "sh", "-c", hide, "sh"), status=1)
        assert program in done.stderr
        assert_in_words(done.stderr)
