"""No file of a user is lost if penroot leaves out files, if a tool fails or only warns, or after a kill."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import random
import shlex
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator

import pytest

from tests.images import Image, Layer, directory, entry, tar, write_layout
from tests.kernel.conftest import PREFIX, User, require
from tests.waiting import until


def listed(user: User, image: pathlib.Path) -> dict[str, str]:
    """Return name -> mode, as ls(1) shows it, of every file in a squashfs image."""
    out = subprocess.run(["unsquashfs", "-ll", str(image)], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 5) for line in out.splitlines() if "squashfs-root/" in line]
    return {words[5].removeprefix("squashfs-root/"): words[0] for words in lines}


def layout(user: User, *entries: tuple[object, bytes]) -> str:
    """Return the URI of an image with one layer."""
    return laid_out(user, Image([Layer(tar(entries))]))  # type: ignore[arg-type]


def laid_out(user: User, image: Image) -> str:
    index = b'{"schemaVersion":2,"manifests":[{"mediaType":"%s","digest":"%s","size":%d}]}' % (
        image.kinds["manifest"].encode(),
        image.digest().encode(),
        len(image.manifest()),
    )
    directory = user.home / "layout"
    write_layout(directory, [image.manifest(), image.config(), *(layer.blob for layer in image.layers)], index)
    (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    user.own(directory)
    return f"oci:{directory}"


@pytest.mark.security("L1")
def test_a_closed_directory_that_holds_something_is_exported(user: User, rootfs: pathlib.Path) -> None:
    """An export leaves out mount points (empty, mode 0000), but no full directory to which a user gave that mode."""
    for name in ("closed/deep", "odd [x]*name"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "closed/deep/file").write_text("precious")
    (rootfs / "odd x-name").write_text("of another name, which that one matches as a pattern")
    (rootfs / "bare").mkdir()
    user.own(rootfs)
    for name in ("closed/deep", "closed", "odd [x]*name", "bare"):
        (rootfs / name).chmod(0)
    user.penroot("export", "box")
    found = listed(user, user.home / "box.sqsh")
    assert found["closed"] == "d---------"
    assert "closed/deep/file" in found
    assert "odd x-name" in found
    assert not {"bare", "odd [x]*name"} & set(found)  # empty, so they look like mount points
    user.penroot("create", "-n", "again", "box.sqsh")
    assert user.start("--root", "again", "cat", "/closed/deep/file") == "precious"


@pytest.mark.security("L1")
def test_unreadable_files_over_an_image_are_exported(user: User, rootfs: pathlib.Path) -> None:
    """/below has mode 0000 in the upper directory only. /shut, /bare and /nothing have it in the layer."""
    files = [directory("bin"), entry("bin/busybox", (rootfs / "bin/busybox").read_bytes(), mode=0o755)]
    files += [directory("below"), entry("below/file", b"precious"), directory("shut", 0), entry("shut/file", b"1")]
    files += [directory("bare", 0), entry("nothing", mode=0)]
    uri = layout(user, *files)
    user.penroot("load", "-n", "over", uri)
    user.start("--root", "--rw", "-m", "/usr/share:/mnt/point", "over", "/bin/busybox", "chmod", "0", "/below")
    user.penroot("export", "over")
    found = listed(user, user.home / "over.sqsh")
    assert found["below"] == "d---------"
    assert {"below/file", "shut/file", "bare", "nothing"} <= set(found)
    assert "mnt/point" not in found


@pytest.mark.security("L1")
def test_an_import_leaves_nothing_out(user: User) -> None:
    """No start has created a mount point in the image, so an empty directory of mode 0000 is the image's."""
    uri = layout(
        user, directory("bare", 0), entry("nothing", mode=0), directory("s", 0), entry("s/f", b"1"), entry(".lock")
    )
    user.penroot("import", "-o", "x.sqsh", uri)
    found = listed(user, user.home / "x.sqsh")
    assert {"bare", "nothing", "s/f", ".lock"} <= set(found)
    assert found["bare"] == "d---------"


@pytest.mark.security("L1")
def test_a_lock_of_the_users_own_is_exported(user: User, rootfs: pathlib.Path) -> None:
    """enroot leaves an empty /.lock; a /.lock with content is the user's."""
    (rootfs / ".lock").write_text("precious")
    user.own(rootfs)
    user.penroot("export", "box")
    assert ".lock" in listed(user, user.home / "box.sqsh")


@pytest.mark.security("L1")
@pytest.mark.parametrize("verb", ["create", "export", "import", "bundle"])
def test_ignored_sigchld_hides_no_failure(user: User, rootfs: pathlib.Path, image: pathlib.Path, verb: str) -> None:
    """With SIGCHLD ignored, Python reads a lost exit status as 0: a full disk would count as success."""
    small = user.home / "small"
    small.mkdir()
    words = {
        "create": f"create -n x {image}",
        "export": f"export -o {small}/x.sqsh box",
        "import": f"import -o {small}/x.sqsh {layout(user, directory('d'), entry('d/f', os.urandom(4 << 20)))}",
        "bundle": f"bundle -o {small}/x.run {image}",
    }[verb]
    data = small if verb == "create" else user.data
    script = (
        f"mount -t tmpfs -o size=600k,mode=700,uid={user.uid} tmpfs {small} && trap '' CHLD && "
        f"{shlex.join(user.command())} env --ignore-signal=CHLD {PREFIX}/bin/penroot {words}; "
        f"echo status $?; ls -A {small}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={**user.environ, "ENROOT_DATA_PATH": str(data)},
        cwd=user.home,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "status 1\n", done.stdout + done.stderr
    assert "full" in done.stderr
    assert "Traceback" not in done.stderr


# -- leftovers of a kill


@contextlib.contextmanager
def at_work(user: User, *words: str, there: tuple[pathlib.Path, str]) -> Iterator[int]:
    """Run penroot. Yield its pid once the directory ``there[0]`` has a file that matches the pattern ``there[1]``.

    Wait for the end of penroot after the block. strace delays the work on each file by a millisecond, so that even a
    busy machine catches the moment.
    """
    require(shutil.which("strace"), "strace is not installed")
    calls = "mkdir,mkdirat,utimensat,unlinkat"
    slowed = ["strace", "-f", "-qqq", "-o", "/dev/null", f"--trace={calls}", f"--inject={calls}:delay_enter=1000"]
    with subprocess.Popen([*slowed, *user.command("penroot", *words)], env=user.environ, cwd=user.home) as tracer:
        until(lambda: glob.glob("{}/{}".format(*there), include_hidden=True), f"{there[1]} is there")
        (pid,) = pathlib.Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children").read_text().split()
        yield int(pid)


def killed(user: User, *words: str, there: tuple[pathlib.Path, str]) -> None:
    """Run penroot, and kill it as soon as a directory has a file that matches a pattern; ``there`` as for `at_work`."""
    with at_work(user, *words, there=there) as pid:
        os.kill(pid, signal.SIGKILL)


def hidden(directory: pathlib.Path) -> list[str]:
    """Return the unfinished files of a directory: all hidden ones except ``.records``, which every data path has."""
    return [name for name in os.listdir(directory) if name.startswith(".") and name != ".records"]


@pytest.fixture
def large(user: User, rootfs: pathlib.Path) -> pathlib.Path:
    """Return an image that takes a moment to unpack."""
    for number in range(40):
        (rootfs / f"opt/{number}").mkdir()
        for file in range(40):
            (rootfs / f"opt/{number}/{file}").write_bytes(os.urandom(2000))
    path = user.home / "large.sqsh"
    subprocess.run(["mksquashfs", str(rootfs), str(path), "-quiet", "-no-progress", "-comp", "lz4"], check=True)
    user.own(path)
    user.own(user.data)
    return path


@pytest.mark.security("L2")
def test_next_command_removes_leftovers_of_a_killed_create(user: User, large: pathlib.Path) -> None:
    """Before the fix, the unfinished directory had the PID in its name, and stayed forever."""
    killed(user, "create", "-n", "half", str(large), there=(user.data, ".half*/opt/1*"))
    assert hidden(user.data)
    user.penroot("remove", "-f", "box")
    assert hidden(user.data) == []
    assert user.penroot("list").stdout == ""


@pytest.mark.security("L2")
def test_next_command_removes_leftovers_of_a_killed_remove(user: User, large: pathlib.Path) -> None:
    """Before the fix, .trash.* stayed forever."""
    user.penroot("create", "-n", "full", str(large))
    killed(user, "remove", "-f", "full", there=(user.data, ".*trash*"))
    assert hidden(user.data)
    user.penroot("create", "-n", "next", str(large))
    assert sorted(os.listdir(user.data)) == ["box", "next"]


@pytest.mark.security("L2")
def test_files_of_a_living_process_are_not_swept(user: User, large: pathlib.Path) -> None:
    """Files of a living process stay, however old they look."""
    with at_work(user, "create", "-n", "slow", str(large), there=(user.data, ".slow*/opt/1*")) as pid:
        os.kill(pid, signal.SIGSTOP)
        try:
            user.penroot("create", "-n", "quick", str(large))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert user.penroot("list").stdout == "box\nquick\nslow\n"


@pytest.mark.security("L2")
def test_next_bundle_removes_leftovers_of_a_killed_one(user: User, large: pathlib.Path) -> None:
    """The leftovers are half a bundle, and the temporary copy of an image that is being converted for the bundle."""
    tmp = user.home / "tmp"
    tmp.mkdir()
    user.own(tmp)
    user.environ["TMPDIR"] = str(tmp)
    odd = user.home / "lzo.sqsh"
    subprocess.run(
        ["mksquashfs", str(user.data / "box"), str(odd), "-quiet", "-no-progress", "-comp", "lzo"], check=True
    )
    user.own(odd)
    killed(user, "bundle", "-o", "x.run", str(odd), there=(tmp, "*penroot-bundle*/rootfs/opt/1*"))
    assert os.listdir(tmp)
    user.penroot("bundle", "-o", "y.run", str(odd))
    assert os.listdir(tmp) == []
    assert [name for name in hidden(user.home) if ".run" in name] == []


@pytest.mark.security("L1")
def test_force_deletes_the_old_one_when_the_new_one_has_its_name(user: User, large: pathlib.Path) -> None:
    """The command is killed while it deletes the old container. The name already belongs to the new container."""
    user.penroot("create", "-n", "same", str(large))
    (user.data / "same/old").write_text("")
    killed(user, "create", "-f", "-n", "same", str(large), there=(user.data, ".*trash*"))
    assert (user.data / "same").is_dir()
    assert not (user.data / "same/old").exists()


@pytest.mark.security("L2")
@pytest.mark.parametrize("call", ["renameat2", "rename"])
def test_the_name_of_what_is_replaced_is_somebodys_at_any_moment(user: User, large: pathlib.Path, call: str) -> None:
    """The command is killed before the containers exchange names, or before it renames the old container to trash."""
    require(shutil.which("strace"), "strace is not installed")
    user.penroot("create", "-n", "same", str(large))
    (user.data / "same/old").write_text("")
    strace = ["strace", "-f", "-qqq", "-o", "/dev/null", f"--inject={call}:signal=KILL"]
    words = user.command("penroot", "create", "-f", "-n", "same", str(large))
    killed = subprocess.run([*strace, *words], env=user.environ, cwd=user.home, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (user.data / "same/opt").is_dir()
    assert (user.data / "same/old").exists() == (call == "renameat2")
    user.penroot("create", "-n", "next", str(large))
    assert hidden(user.data) == []


@pytest.mark.security("L2")
@pytest.mark.soak
def test_kill_at_any_moment_leaves_the_previous_state(
    user: User, large: pathlib.Path, rng: random.Random, soak: bool
) -> None:
    """After a kill of any verb, the next verb finds the user's containers whole and unlocked."""
    uri = layout(user, directory("d"), *(entry(f"d/{n}", os.urandom(20_000)) for n in range(200)))
    kept = user.data / "kept"
    user.penroot("create", "-n", "kept", str(large))
    user.penroot("export", "-o", "kept.sqsh", "kept")
    names, size = sorted(p.name for p in (kept / "opt").iterdir()), (user.home / "kept.sqsh").stat().st_size
    verbs = (
        ("create", "-f", "-n", "a", str(large)),
        ("load", "-f", "-n", "b", uri),
        ("remove", "-f", "a"),
        ("import", "-f", "-o", "kept.sqsh", uri),
        ("export", "-f", "-o", "kept.sqsh", "kept"),
        ("bundle", "-f", "-o", "a.run", str(large)),
        ("cache", "prune"),
    )
    for _ in range(500 if soak else 4):
        words = rng.choice(verbs)
        command = user.command("penroot", *words)
        run = subprocess.Popen(command, env=user.environ, cwd=user.home, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.02, 0.6))
        run.kill()
        run.wait()
        assert sorted(p.name for p in (kept / "opt").iterdir()) == names
        subprocess.run(["unsquashfs", "-s", str(user.home / "kept.sqsh")], check=True, capture_output=True)
    assert size
    user.penroot("create", "-f", "-n", "a", str(large))
    user.penroot("load", "-f", "-n", "b", uri)
    user.penroot("export", "-f", "-o", "kept.sqsh", "kept")
    user.penroot("bundle", "-f", "-o", "a.run", str(large))
    assert hidden(user.data) == []
    assert [name for name in hidden(user.home) if name.endswith(("making", "trash"))] == []
    assert os.listdir(user.home / "cache/tmp") == []
    assert user.penroot("cache", "verify").returncode == 0


# -- damaged records, and the endless map of a sparse file


@pytest.mark.security("I4")
def test_an_old_sparse_map_without_an_end_is_refused(user: User) -> None:
    """A sparse tar member (typeflag S) has endless extension blocks. Each block adds 21 segments to a map in memory."""
    info, _ = entry("sparse")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:482] = (b"%011o\0" % 0 + b"%011o\0" % 0) * 4
    header[482], header[483:495] = 1, b"%011o\0" % 0
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    block = (b"%011o\0" % 0 + b"%011o\0" % 0) * 21 + b"\1" + b"\0" * 7
    image = Image([Layer(bytes(header) + block * 100_000)])
    done = user.penroot("import", "-o", "x.sqsh", laid_out(user, image), status=1)
    assert "/sparse: the sparse map has" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.security("L4")
@pytest.mark.parametrize("garbage", [b"\0" * 400, bytes(range(128, 256)) * 3 + b"\n\n1 2 3\n"], ids=["nul", "garbage"])
@pytest.mark.parametrize("record", ["refs/*", "images/*/stack", "images/*/config", "images/*/manifest"])
def test_damaged_record_is_reported_and_repaired(user: User, rootfs: pathlib.Path, record: str, garbage: bytes) -> None:
    """A record may contain NULs after a crash. Errors have no traceback; `cache verify --repair` repairs the record."""
    uri = layout(user, directory("bin"), entry("bin/sh", (rootfs / "bin/busybox").read_bytes(), mode=0o755))
    user.penroot("load", "-n", "over", uri)
    user.start("--rw", "over", "/bin/sh", "-c", "echo mine > /mine")
    (path,) = (user.home / "cache").glob(record)
    path.write_bytes(garbage)
    for words in ("cache list", "cache verify", "inspect over", "start over /bin/sh -c :"):
        output = user.run("sh", "-c", f"penroot {words} 2>&1 || :").stdout
        assert "Traceback" not in output
        assert "PENROOT_DEBUG" not in output
    user.penroot("cache", "verify", "--repair")
    assert user.start(uri, "/bin/sh", "-c", "echo whole") == "whole\n"
    assert user.start("over", "/bin/sh", "-c", "read line < /mine; echo $line") == "mine\n"
