"""Create bundles and run them as an ordinary user on minimal hosts."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest

from tests import fakehost
from tests.kernel.conftest import UID, User, ordinary_user, require
from tests.kernel.test_devices import become
from tests.waiting import until

NEEDED = ("sh", "tar", "gzip", "mkdir", "sha256sum")
WITHOUT_FUSE = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /dev/fuse; exec "$@"', "sh")
LARGEST_BYTES = 12 << 20  # maximum size of a bundle without its image


@pytest.fixture(scope="module")
def made(packed: pathlib.Path) -> Iterator[pathlib.Path]:
    """Create a bundle of the busybox image once per module."""
    with ordinary_user(UID) as maker:
        shutil.copy(packed, maker.home)
        maker.penroot("bundle", "--checksum", "--desc", 'It\'s a "test"', "box.sqsh")
        yield maker.home / "box.run"


@pytest.fixture
def bundle(user: User, image: pathlib.Path, made: pathlib.Path) -> pathlib.Path:
    """Copy the bundle to the user's home, and give the user a private temporary directory."""
    (user.home / "tmp").mkdir()
    user.environ["TMPDIR"] = str(user.home / "tmp")
    shutil.copy(made, user.home)
    user.own(user.home)
    return user.home / "box.run"


def few_tools(user: User) -> str:
    """Return a PATH that has only the programs that a bundle with a checksum needs."""
    tools = user.home / "tools"
    tools.mkdir()
    for name in NEEDED:
        program = shutil.which(name, path="/usr/bin:/bin")
        assert program
        (tools / name).symlink_to(program)
    return str(tools)


@pytest.fixture(params=["squashfuse", "extracted"])
def path(request: pytest.FixtureRequest, user: User) -> str:
    """Return the PATH of a full host, or of a host with only the needed programs and without /dev/fuse."""
    return "/usr/bin:/bin" if request.param == "squashfuse" else few_tools(user)


def host(path: str) -> tuple[str, ...]:
    """Return the command prefix that hides /dev/fuse if ``path`` is the PATH of few_tools."""
    if not path.endswith("/tools"):
        return ()
    require(os.geteuid() == 0, "only root can cover /dev/fuse")
    return WITHOUT_FUSE


def run(
    user: User, bundle: pathlib.Path, *arguments: str, path: str = "/usr/bin:/bin", **options: object
) -> subprocess.CompletedProcess[str]:
    """Run a bundle with ``path`` as PATH."""
    options.setdefault("prefix", host(path))
    return user.run("/usr/bin/env", f"PATH={path}", str(bundle), *arguments, **options)  # type: ignore[arg-type]


def leftovers(user: User) -> list[str]:
    """Wait up to 60 s until the bundle's watcher process has emptied the directory. Return the remaining names."""
    end = time.monotonic() + 60
    while (remaining := sorted(os.listdir(user.home / "tmp"))) and time.monotonic() < end:
        time.sleep(0.05)
    return remaining


@pytest.mark.parity("bundle IMAGE", "the unpacked files are removed", "the head of a bundle")
def test_a_bundle_runs_and_leaves_nothing(user: User, bundle: pathlib.Path, path: str) -> None:
    script = 'id -u; pwd; echo "$FROM_IMAGE $TERM $PATH"; grep -c . /proc/self/mountinfo; touch /x 2>&1; exit 7'
    done = run(user, bundle, "sh", "-c", script, path=path, status=7)
    lines = done.stdout.splitlines()
    assert lines[:3] == [str(UID), "/", "yes xterm /opt/bin:/bin:/usr/bin"]
    assert int(lines[3]) > 10
    assert "Read-only" in lines[4]
    assert os.listdir(user.home / "tmp") == []


def test_bundle_has_the_same_user_files_as_start(user: User, bundle: pathlib.Path, path: str) -> None:
    user.penroot("create", str(user.home / "box.sqsh"), "--name", "same")
    script = (
        'cat /etc/passwd /etc/group; env | grep -v "^SHLVL\\|^_="; cat /etc/resolv.conf; ls -d "$HOME" /proc/self/ns'
    )
    in_bundle = run(user, bundle, "sh", "-c", script, path=path).stdout
    assert sorted(in_bundle.splitlines()) == sorted(user.start("same", "sh", "-c", script).splitlines())


@pytest.mark.parity("NAME.run --env", "NAME.run --pid")
def test_options(user: User, bundle: pathlib.Path, path: str) -> None:
    user.write("data/f", "mounted\n")
    script = 'id -u; echo "$A|$HOST"; cat /mnt/f; echo $$; touch /here; ls -l /sys/class/net | wc -l'
    options = ("-r", "--rw", "--env", "A=b\n'c'  d", "--env=HOST", f"--mount={user.home}/data:/mnt", "--pid", "--net")
    done = run(user, bundle, *options, "sh", "-c", script, path=path, env={"HOST": "yes"})
    assert done.stdout == "0\nb\n'c'  d|yes\nmounted\n1\n2\n"
    done = run(user, bundle, "-rw", *options, "true")
    assert "unknown option: -rw" in done.stderr
    assert done.stdout.startswith("Usage: ")
    assert os.listdir(user.home / "tmp") == []


def test_arguments_behind_the_command_are_its_own(user: User, bundle: pathlib.Path) -> None:
    assert run(user, bundle, "--", "sh", "-c", 'echo "$@"', "x", "--info", "--").stdout == "--info --\n"


@pytest.mark.parity(
    "bundle --checksum",
    "bundle --desc",
    "NAME.run --info",
    "NAME.run --verify",
    "the bundle keeps the image's compression",
)
def test_info_and_verify(user: User, bundle: pathlib.Path) -> None:
    info = dict(line.split(": ", 1) for line in run(user, bundle, "--info").stdout.splitlines())
    assert len(info["Checksum"]) == 64
    expected = {"Description": 'It\'s a "test"', "Compression": "gzip", "Target directory": "box"}
    assert {key: info[key] for key in expected} == expected
    assert "Checksum" in run(user, bundle, "--verify").stdout
    data = bytearray(bundle.read_bytes())
    data[-5000] ^= 1
    bundle.write_bytes(data)
    for word in ("--verify", "true"):
        assert "Checksum validation failed" in run(user, bundle, word, status=1).stderr
    assert os.listdir(user.home / "tmp") == []


@pytest.mark.parity("NAME.run --verify")
def test_truncated_bundle_without_a_checksum_is_detected(user: User, image: pathlib.Path) -> None:
    user.penroot("bundle", "-o", "plain.run", str(image))
    plain = user.home / "plain.run"
    assert "Image tables" in user.run(str(plain), "--verify").stdout
    os.truncate(plain, plain.stat().st_size - 100_000)
    assert "is damaged, copy it again" in user.run(str(plain), "--verify", status=1).stderr


def test_long_values_and_many_of_them(user: User, bundle: pathlib.Path) -> None:
    long = "'x'" + "x" * 100_000 + "'"
    many = [word for n in range(300) for word in ("--env", f"N{n}={n}")]
    script = 'echo "${#LONG} $N0 $N299 $QUOTES"'
    out = user.run(str(bundle), "--env", f"LONG={long}", *many, "--env", "QUOTES='a''b*", "sh", "-c", script).stdout
    assert out == f"{len(long)} 0 299 'a''b*\n"


def test_error_has_a_hint_if_the_directory_is_read_only(user: User, bundle: pathlib.Path) -> None:
    directory = user.home / "closed"
    directory.mkdir(0o555)
    user.own(directory)
    err = user.run(str(bundle), "--extract", cwd=directory, status=1).stderr
    assert "[HINT] change to a directory that you can write to" in err


def test_bundle_mounts_no_squashfs_files(user: User, bundle: pathlib.Path) -> None:
    stderr = user.run(str(bundle), "--mount", "data.sqsh:/data:sqsh", "true", status=1).stderr
    assert "cannot mount data.sqsh: only penroot start and srun mount squashfs files" in stderr


def test_early_interrupt_leaves_nothing(user: User, bundle: pathlib.Path) -> None:
    tools = pathlib.Path(few_tools(user))
    (tools / "rm").symlink_to("/bin/rm")
    (tools / "gzip").unlink()
    (tools / "gzip").write_text("#!/bin/sh\nkill -INT $PPID\n")
    (tools / "gzip").chmod(0o755)
    user.run("/usr/bin/env", f"PATH={tools}", str(bundle), "true", status=130)
    assert os.listdir(user.home / "tmp") == []


@pytest.mark.parity("NAME.run --keep", "NAME.run --extract")
def test_keep_and_extract(user: User, bundle: pathlib.Path, path: str) -> None:
    run(user, bundle, "--keep", "--rw", "sh", "-c", "echo hello >/message", path=path)
    assert (user.home / "box/message").read_text() == "hello\n"
    stderr = run(user, bundle, "--keep", "true", status=1).stderr
    assert "File already exists" in stderr and "[HINT] remove it" in stderr
    shutil.move(user.home / "box", user.data / "kept")
    assert user.start("kept", "cat", "/message") == "hello\n"
    run(user, bundle, "-x", path=path)
    assert (user.home / "box/bin/busybox").exists()
    assert not (user.home / "box/message").exists()
    assert os.listdir(user.home / "tmp") == []


@pytest.mark.parity("bundle --target")
def test_target_is_substituted_at_run_time(user: User, bundle: pathlib.Path) -> None:
    user.penroot("bundle", "-t", "${HOME}/deep/er", "-o", "t.run", "box.sqsh")
    user.run("./t.run", "--extract")
    assert (user.home / "deep/er/bin/sh").exists()


@pytest.mark.parity("the unpacked files are removed")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed_bundle_leaves_nothing(user: User, bundle: pathlib.Path, path: str, number: int) -> None:
    with running(user, bundle, path) as process:
        assert bool(os.listdir(user.home / "tmp")) == path.endswith("/tools")
        inside = children(process.pid)
        process.send_signal(number)
        assert process.wait(timeout=300) == -number
    assert leftovers(user) == []
    until(lambda: not [pid for pid in inside if alive(pid)], "all have ended")


@pytest.mark.parity("the unpacked files are removed")
def test_next_run_removes_files_of_a_killed_watcher(user: User, bundle: pathlib.Path) -> None:
    path = few_tools(user)
    with running(user, bundle, path) as process:
        (work,) = os.listdir(user.home / "tmp")
        # Also kill the process that deletes the bundle's files, as the end of a job's cgroup does.
        inside = (process.pid, *children(process.pid))
        everyone = [pid for pid in every_pid() if work in cmdline(pid) or pid in inside]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=300)
        # The processes hold the lock of the directory until they have ended.
        until(lambda: not [pid for pid in everyone if alive(pid)], "all have ended")
    assert os.listdir(user.home / "tmp") == [work]
    with running(user, bundle, path):
        assert work not in os.listdir(user.home / "tmp")
        run(user, bundle, "true", path=path)  # this run does not remove the directory of the running bundle
        assert len(os.listdir(user.home / "tmp")) == 1
    assert leftovers(user) == []


@contextlib.contextmanager
def running(user: User, bundle: pathlib.Path, path: str) -> Iterator[subprocess.Popen[str]]:
    """Start a bundle whose command runs until it is killed."""
    command = ("/usr/bin/env", f"PATH={path}", str(bundle), "sh", "-c", "echo up; sleep 600")
    with user.running(*command, prefix=host(path), stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        yield process


def every_pid() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def cmdline(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    """Return all descendants of a process."""
    descendants = []
    with contextlib.suppress(OSError):
        for child in map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            descendants += [child, *children(child)]
    return descendants


@pytest.mark.parity("SOURCE_DATE_EPOCH: bundling the same image again writes the same bytes", "SOURCE_DATE_EPOCH")
def test_same_image_and_epoch_give_the_same_bytes(user: User, bundle: pathlib.Path) -> None:
    first = bundle.read_bytes()
    user.penroot("bundle", "-f", "-c", "-d", 'It\'s a "test"', "box.sqsh", env={"SOURCE_DATE_EPOCH": "0"})
    assert bundle.read_bytes() == first
    assert "file already exists" in user.penroot("bundle", "box.sqsh", status=1).stderr
    assert [p.name for p in user.home.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parity("bundle --all", "the bundle contains the configuration")
def test_configuration_is_part_of_the_bundle(user: User, image: pathlib.Path) -> None:
    for directory, word in (("etc", "SYSTEM"), ("config", "USER")):
        for kind, name, text in (
            ("environ.d", "50.env", f'{word}="${{HOME}}/x"\n'),
            ("mounts.d", "50.fstab", f"tmpfs /{word} tmpfs x-create=dir\n"),
            ("hooks.d", "50.sh", f'#!/bin/sh\necho "{word}_HOOK=$ENROOT_PID" >>"$ENROOT_ENVIRON"\n'
             f'echo "tmpfs /{word}_hook tmpfs x-create=dir" >>"$ENROOT_MOUNTS"\n'),
        ):  # fmt: skip
            user.write(f"{directory}/{kind}/{name}", text, 0o755)
    user.environ["ENROOT_CONFIG_PATH"] = str(user.home / "config")
    user.penroot("bundle", "-o", "system.run", str(image))
    user.penroot("bundle", "-a", "-o", "all.run", str(image), env={"ENROOT_REMAP_ROOT": "y"})
    # The host that runs the bundles has no configuration.
    user.environ = {k: v for k, v in user.environ.items() if not k.startswith("ENROOT_")}
    script = "id -u; env; ls /"
    system = user.run("./system.run", "sh", "-c", script).stdout.splitlines()
    assert f"SYSTEM={user.home}/x" in system
    assert {"SYSTEM", "SYSTEM_hook", str(UID)} <= set(system)
    assert not [line for line in system if "USER_" in line or line.startswith(("USER=/", "USER_"))]
    everything = user.run("./all.run", "sh", "-c", script).stdout.splitlines()
    assert {"SYSTEM", "SYSTEM_hook", "USER", "USER_hook", "0", f"USER={user.home}/x"} <= set(everything)
    assert user.run("./all.run", "id", "-u", env={"ENROOT_REMAP_ROOT": "no"}).stdout == f"{UID}\n"


def test_bundle_contains_settings_of_features(user: User, bundle: pathlib.Path) -> None:
    events = user.home / "events"
    user.run(str(bundle), "true", env={"ENROOT_EVENTS": str(events)})
    user.penroot("bundle", "--all", "--output", "all.run", "box.sqsh", env={"ENROOT_EVENTS": str(events)})
    user.run("./all.run", "true")
    assert [json.loads(line)["event"] for line in events.read_text().splitlines()] == ["start", "start"]


@pytest.mark.parity("the bundle keeps the image's compression")
def test_unknown_compressions_are_converted(user: User, rootfs: pathlib.Path) -> None:
    image = user.home / "box.sqsh"
    subprocess.run(["mksquashfs", rootfs, image, "-all-root", "-quiet", "-no-progress", "-comp", "lzo"], check=True)
    user.own(user.home)
    user.penroot("bundle", "box.sqsh")
    assert "Compression: zstd" in user.run("./box.run", "--info").stdout
    assert user.run("./box.run", "id", "-u").stdout == f"{UID}\n"


@pytest.mark.parity("the free space is checked before the bundle unpacks")
def test_too_little_space_is_reported(user: User, bundle: pathlib.Path) -> None:
    mount = f"mount -t tmpfs -o size=1m,mode=1777 tmpfs {user.home}/tmp"
    command = ["env", f"PATH={few_tools(user)}", f"TMPDIR={user.home}/tmp", str(bundle), "true"]
    done = in_own_mounts(user, mount, command)
    assert done.returncode == 1
    assert "does not have enough space" in done.stderr and "ENROOT_TEMP_PATH" in done.stderr


def in_own_mounts(user: User, mounts: str, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run the shell commands ``mounts`` as root in a new mount namespace, then ``command`` there as the user."""
    require(os.geteuid() == 0, "mounting file systems needs root")
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        user.environ.pop(name, None)
    prefix = ("unshare", "--mount", "sh", "-ec", f'{mounts}\nexec "$@"', "sh")
    return user.run(*command, env=env, cwd=pathlib.Path("/"), prefix=prefix, status=None)


@pytest.mark.parity("the free space is checked before the bundle unpacks")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("noexec,mode=1777", "is mounted noexec"),
        ("ro,mode=1777", "cannot be written"),
        ("size=1m,mode=1777", "does not have enough space"),
        ("mode=777", "can be written by others, and is not sticky"),
    ],
)
def test_bundle_passes_over_an_unusable_tmp(user: User, bundle: pathlib.Path, options: str, why: str) -> None:
    mounts = f"mount -t tmpfs -o {options} tmpfs /tmp"
    done = in_own_mounts(user, mounts, [str(bundle), "sh", "-c", "echo fine"])
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr
    assert f"[WARN] using /var/tmp: /tmp {why}\n" in done.stderr


def test_bundle_names_all_directories_it_tried(user: User, bundle: pathlib.Path) -> None:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="penroot-test-", dir="/run"))
    directory.chmod(0o755)
    shutil.copy(bundle, directory / "box.run")
    mounts = "for d in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o noexec,mode=1777 tmpfs $d; done"
    try:
        done = in_own_mounts(user, mounts, [str(directory / "box.run"), "true"], HOME="/")
    finally:
        shutil.rmtree(directory)
    assert done.returncode == 1
    for path in ("/tmp", "/var/tmp", "/dev/shm"):
        assert f"{path} is mounted noexec" in done.stderr
    assert "[HINT] set ENROOT_TEMP_PATH to a directory that you own" in done.stderr


def test_bundle_of_another_architecture_says_so(user: User, bundle: pathlib.Path) -> None:
    other = user.home / "other.run"
    machine = os.uname().machine
    other.write_bytes(bundle.read_bytes().replace(f"machine={machine}".encode(), b"machine=s390x", 1))
    other.chmod(0o755)
    for path in ("/usr/bin:/bin", few_tools(user)):  # with and without uname(1)
        stderr = user.run("env", f"PATH={path}", str(other), "true", status=1).stderr
        assert stderr.startswith(f"[ERROR] this bundle is for s390x, but this host is {machine}\n")


def test_bundle_is_little_larger_than_its_image(bundle: pathlib.Path, image: pathlib.Path) -> None:
    assert bundle.stat().st_size - image.stat().st_size < LARGEST_BYTES


def test_bundle_ignores_libraries_of_the_host(user: User, bundle: pathlib.Path) -> None:
    """The bundle's Python has its own loader and ignores these variables. The container still gets them."""
    variables = {"LD_PRELOAD": "/nowhere/lib.so", "LD_LIBRARY_PATH": "/nowhere", "PYTHONHOME": "/nowhere"}
    script = 'echo "$LD_PRELOAD $PYTHONHOME"'
    done = user.run(str(bundle), "-e", "LD_PRELOAD", "-e", "PYTHONHOME", "sh", "-c", script, env=variables)
    assert done.stdout == "/nowhere/lib.so /nowhere\n"


def test_bundle_keeps_descriptors_of_the_caller(user: User, bundle: pathlib.Path) -> None:
    script = f"exec {bundle} sh -c 'cat <&9; ls /proc/self/fd | wc -l' 9<<X\nkept\nX\n"
    kept, count = user.run("sh", "-c", script).stdout.split()
    assert (kept, int(count)) == ("kept", 5)  # stdio, descriptor 9, and the directory that ls lists


def test_next_run_cleans_up_after_a_kill_at_any_moment(user: User, bundle: pathlib.Path, rng: random.Random) -> None:
    tmp = user.home / "tmp"
    for _ in range(8):
        process = user.begin(str(bundle), "true", start_new_session=True)
        time.sleep(rng.uniform(0, 0.4))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(0.2)  # tar may run a little longer
    run(user, bundle, "true")
    assert [name for name in os.listdir(tmp) if os.listdir(tmp / name)] == []


def test_failed_start_leaves_nothing(user: User, bundle: pathlib.Path) -> None:
    """Some of these starts fail before penroot mounts the container, and others afterwards."""
    options = (("--mount", "/nowhere:/mnt"), ("--conf", "/nowhere"), ("--rc", "/nowhere"))
    for words, status in (*(((*each, "true"), 1) for each in options), (("/nowhere",), 127)):
        run(user, bundle, *words, status=status)
        assert os.listdir(user.home / "tmp") == []


def test_bundle_contains_python_hooks_of_the_site(user: User, image: pathlib.Path) -> None:
    hook = "import colorsys\n\ndef run(context):\n    context.environ['SITE'] = str(colorsys.rgb_to_hsv(0, 0, 1)[2])\n"
    user.write("etc/hooks.d/50-site.py", hook)
    user.penroot("bundle", str(image))
    assert user.run("./box.run", "sh", "-c", "echo $SITE").stdout == "1\n"


@pytest.mark.parity("the host needs no Python, squashfs tools or C library")
def test_missing_programs_are_named(user: User, bundle: pathlib.Path) -> None:
    tools = pathlib.Path(few_tools(user))
    for name in NEEDED[1:]:
        (tools / name).rename(user.home / "away")
        done = run(user, bundle, "true", path=str(tools), status=1)
        why = f"{name} is not installed: this bundle needs /bin/sh, tar, gzip, mkdir and sha256sum"
        assert done.stderr == f"[ERROR] {why}\n"
        (user.home / "away").rename(tools / name)
    user.penroot("bundle", "-o", "plain.run", "box.sqsh")
    (tools / "sha256sum").unlink()
    run(user, user.home / "plain.run", "true", path=str(tools))
    done = run(user, bundle, "true", env={"ENROOT_TEMP_PATH": "/nowhere"}, status=1)
    assert "set ENROOT_TEMP_PATH" in done.stderr


@pytest.mark.parity("NAME.run --verify", "the host needs no Python, squashfs tools or C library")
def test_on_a_host_that_is_only_busybox(user: User, bundle: pathlib.Path) -> None:
    """The host has only busybox, without a C library, Python or squashfuse. A bundle runs there."""
    require(os.geteuid() == 0, "making such a host needs root")
    host = user.home / "host"
    for directory in ("bin", "proc", "dev", "sys", "tmp", "etc", "run", "home"):
        (host / directory).mkdir(parents=True)
    shutil.copy("/bin/busybox", host / "bin/busybox")
    for name in NEEDED:
        (host / "bin" / name).symlink_to("busybox")
    shutil.copy(bundle, host / "home/box.run")
    (host / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (host / "etc/passwd").write_text(f"root:x:0:0::/:/bin/sh\ntester:x:{UID}:{UID}::/home:/bin/sh\n")
    (host / "etc/group").write_text(f"root:x:0:\ntester:x:{UID}:\n")
    (host / "tmp").chmod(0o1777)

    def within(script: str) -> str:
        setup = f"mount --bind {host} {host}; for d in proc dev sys; do mount --rbind /$d {host}/$d; done; {script}"
        command, path = ["unshare", "--mount", "sh", "-ec", setup], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        done = subprocess.run(command, env=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    chrooted = f"""
        exec chroot --userspec={UID}:{UID} --groups= {host} /bin/sh -c \\
            '/home/box.run --verify; /home/box.run sh -c "id -u; ls /; exit 5"; echo $?; ls /tmp'
    """
    assert "squashfuse" in within(chrooted)
    # In a chroot, the kernel refuses user namespaces: user_namespaces(7). Below, pivot_root makes the host a real root.
    real = f"""
        mkdir -p {host}/old; cd {host}; pivot_root . old
        exec /bin/busybox su tester -c '/home/box.run sh -c "id -u; cat /etc/hosts; exit 5"; echo $?; busybox ls /tmp'
    """
    assert within(real) == f"{UID}\n127.0.0.1 localhost\n5\n"


@pytest.mark.parity("NAME.run --quiet")
def test_progress_and_quiet(user: User, bundle: pathlib.Path) -> None:
    """A slow extraction shows its progress on a terminal, except with --quiet."""
    with (user.data / "box/big").open("wb") as f:
        f.truncate(100 << 20)
    user.penroot("export", "-f", "-o", "big.sqsh", "box", env={"ENROOT_SQUASH_OPTIONS": "-comp gzip"})
    user.penroot("bundle", "big.sqsh")
    tools = few_tools(user)

    def on_terminal(options: str) -> str:
        command = f"env PATH={tools} ./big.run {options} echo done"
        return user.run("script", "-qec", command, "/dev/null", prefix=host(tools)).stdout

    assert "Extracting 100%" in on_terminal("")
    for option in ("-q", "--quiet"):
        shown = on_terminal(option)
        assert "Extracting" not in shown
        assert "done" in shown


@pytest.mark.parity("the bundle contains the configuration")
def test_bundle_hooks_find_the_functions_of_enroot(user: User, image: pathlib.Path) -> None:
    hook = (
        '#!/bin/bash\nset -eu\nsource "${ENROOT_LIBRARY_PATH}/common.sh"\ncommon::checkcmd cat enroot-mount\n'
        'common::log INFO "from the hook"\nIFS=: read -r name _ < <(common::getpwent)\n'
        'echo "NAME=${name}" >> "${ENROOT_ENVIRON}"\n'
    )
    user.write("etc/hooks.d/50-site.sh", hook, 0o755)
    user.penroot("bundle", str(image))
    done = user.run("./box.run", "sh", "-c", "echo $NAME")
    assert done.stdout == f"user{UID}\n"
    assert "[INFO] from the hook" in done.stderr


@pytest.mark.parity("the bundle keeps extended attributes user.*")
def test_extended_attributes_are_extracted(user: User, rootfs: pathlib.Path) -> None:
    os.setxattr(rootfs / "bin/busybox", "user.note", b"kept")
    user.penroot("export", "box", env={"ENROOT_SQUASH_OPTIONS": "-comp zstd"})
    user.penroot("bundle", "box.sqsh")
    run(user, user.home / "box.run", "--extract", path=few_tools(user))
    assert os.getxattr(user.home / "box/bin/busybox", "user.note") == b"kept"


@pytest.mark.parity("the container sees its cgroup, and gets GPUs and HCAs")
def test_own_cgroup_is_shown(user: User, bundle: pathlib.Path) -> None:
    """A bundle shows the container its cgroup, as penroot start does."""
    user.penroot("create", "-n", "same", str(user.home / "box.sqsh"))
    require(os.geteuid() == 0, "making a control group needs root")
    lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    hierarchy = next((line.split()[4] for line in lines if " - cgroup2 " in line), None)
    hierarchy = hierarchy or next((line.split()[4] for line in lines if " - cgroup " in line and "pids" in line), None)
    require(hierarchy, "no control groups are mounted")
    group = pathlib.Path(tempfile.mkdtemp(prefix="penroot-test-", dir=hierarchy))
    group.chmod(0o755)
    (group / "marker").mkdir()
    script = f"ls -d {hierarchy}/marker && ! mkdir {hierarchy}/mine"
    try:
        prefix = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        assert user.start("same", "sh", "-c", script, prefix=prefix) == f"{hierarchy}/marker\n"
        assert run(user, bundle, "sh", "-c", script, prefix=prefix).stdout == f"{hierarchy}/marker\n"
    finally:
        (group / "marker").rmdir()
        for _ in range(600):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@pytest.mark.parity("the container sees its cgroup, and gets GPUs and HCAs")
def test_devices_of_the_host(user: User, image: pathlib.Path) -> None:
    """A bundle runs the hooks for GPUs and HCAs, and includes the site's mounts.d."""
    host = become(user, fakehost.dgx_a100(user.home / "dgx"))
    user.own(user.home)
    user.penroot("bundle", str(image))
    bundle = user.home / "box.run"
    # Other tests change the content of /dev/shm and /dev/pts.
    script = 'find /dev /sys/class/infiniband -path "/dev/[sp]*/*" -prune -o -print | sort; ls -l /usr/bin/nvidia-smi; '
    script += 'echo "$NVIDIA_VISIBLE_DEVICES"'
    environ = {"NVIDIA_VISIBLE_DEVICES": "0,3", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility", "HOME": str(user.home)}
    environ |= {"MELLANOX_VISIBLE_DEVICES": "all", "ENROOT_RESTRICT_DEV": "y"}
    in_bundle = run(user, bundle, "sh", "-c", script, env=environ).stdout
    assert "nvidia1\n" in in_bundle and "uverbs0\n" in in_bundle and "nvidia0\n" not in in_bundle
    assert in_bundle == user.start(str(image), "sh", "-c", script, env=environ)
    tool = user.write("bin/nvidia-container-cli", '#!/bin/sh\necho "$*" > "$(eval echo \\$$#)/gpus"\n', 0o755)
    by_tool = {**environ, "PENROOT_NVIDIA_MODE": "nvidia-container-cli"}
    arguments = run(user, bundle, "cat", "/gpus", path=f"{tool.parent}:/usr/bin:/bin", env=by_tool).stdout.split()
    assert arguments[:3] == ["--user", f"--root={host.root}", "configure"]
    assert "nvidia-container-cli is not installed" in run(user, bundle, "true", env=by_tool, status=1).stderr
    run(user, bundle, "ls", "/dev/infiniband", env={**environ, "MELLANOX_VISIBLE_DEVICES": "void"}, status=1)


@pytest.mark.security("C7")
def test_stdin_that_is_a_directory_does_not_reach_the_image(user: User, bundle: pathlib.Path) -> None:
    out = user.run("sh", "-c", f"exec {bundle} sh -c 'readlink /proc/self/fd/0' < /usr").stdout
    assert out.endswith("/null\n")


def test_user_has_the_host_dev_with_auto(user: User, bundle: pathlib.Path) -> None:
    devices = run(user, bundle, "ls", "/dev", env={"ENROOT_RESTRICT_DEV": "auto"}).stdout.split()
    assert set(os.listdir("/dev")) <= set(devices)
