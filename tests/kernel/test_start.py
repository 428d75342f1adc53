"""An ordinary user runs ``penroot start`` on the real kernel."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess

import pytest

from enroot_py.runtime import etc
from tests.kernel.conftest import PREFIX, UID, User, mounts_under, require, servers
from tests.waiting import until


def snapshot(path: pathlib.Path) -> list[tuple[str, int, int, int]]:
    """Return path, mode, size and mtime of each entry of a tree. A write to the tree changes this list."""
    entries = []
    for entry in sorted(path.rglob("*")):
        info = entry.lstat()
        entries.append((str(entry), info.st_mode, info.st_size, info.st_mtime_ns))
    return entries


@pytest.mark.parity("ENROOT_SET_USER_XATTRS")
def test_start_calls_execve_twice(user: User, rootfs: pathlib.Path) -> None:
    require(shutil.which("strace"), "strace is not installed")
    strace = ("strace", "-f", "-qq", "-e", "trace=execve", "-e", "signal=none")
    done = user.run(*strace, f"{PREFIX}/bin/penroot", "start", "box", "true")
    assert len(re.findall(r"execve\(.* = 0$", done.stderr, re.M)) == 2, done.stderr


@pytest.mark.parity("the root filesystem is read-only by default", "start --rw, -w")
@pytest.mark.parity("nothing is written into a shared root filesystem")
def test_nothing_is_written_to_the_rootfs_without_rw(user: User, rootfs: pathlib.Path) -> None:
    before = snapshot(rootfs)
    assert "Read-only file system" in user.penroot("start", "box", "touch", "/new", status=1).stderr
    script = "echo x > /tmp/x; ls /made/for/this /etc/hosts"
    user.start("--mount", "/usr/share:/made/for/this", "box", "sh", "-c", script)
    assert snapshot(rootfs) == before
    user.start("--rw", "box", "sh", "-c", "echo kept > /opt/file")
    assert user.start("box", "cat", "/opt/file") == "kept\n"


@pytest.mark.parity("two starts of a container at the same moment both work", "two starts at once")
def test_two_starts_at_once(user: User, rootfs: pathlib.Path) -> None:
    script = "for i in 1 2 3 4 5 6; do penroot start box sh -c 'sleep 0.2; echo ok' & done; wait"
    assert user.run("sh", "-c", script).stdout.split() == ["ok"] * 6


@pytest.mark.parity("10-terminal")
def test_environment_is_the_images(user: User, rootfs: pathlib.Path) -> None:
    out = user.start("box", "env", env={"LEAK": "1", "LANG": "de_DE.UTF-8"})
    variables = dict(line.split("=", 1) for line in out.splitlines())
    assert (variables["FROM_IMAGE"], variables["TERM"]) == ("yes", "xterm")
    assert variables["PATH"] == "/opt/bin:/bin:/usr/bin"
    assert not variables.keys() & {"LEAK", "LANG"}


def test_without_a_script_of_the_image(user: User, rootfs: pathlib.Path) -> None:
    """An image without /etc/rc: the command runs in HOME. A command with blanks is a script for sh."""
    assert user.start("box", "--", "echo", "x") == "x\n"
    assert user.start("box", 'echo "$1 $0"', "x") == "x sh\n"
    (rootfs / "opt/mine").mkdir()
    (rootfs / "etc/environment").write_text("PATH=/bin\nHOME=/opt/mine\n")
    assert user.start("box", "sh", "-c", "pwd; echo $PWD") == "/opt/mine\n/opt/mine\n"
    assert "SHLVL=0\n" in user.start("box", "env")


@pytest.mark.parity("start --env")
def test_env_accepts_any_name_that_execve_accepts(user: User, rootfs: pathlib.Path) -> None:
    names = ("discovery.type", "1", "a-b", "a b", "BASH_FUNC_x%%")
    options = ("-e", "A=1 2", "--env=B", "--env", "UNSET", *(f"--env={name}=one" for name in names))
    value = "a'b\"c $(id) `x`; \\ ünï=*"
    out = user.start(*options, "box", "env", env={"B": value})
    assert {"A=1 2", f"B={value}", "UNSET=", *(f"{name}=one" for name in names)} <= set(out.splitlines())
    assert "has no name" in user.penroot("start", "--env==x", "box", "true", status=1).stderr


def test_image_lines_without_variable_are_named(user: User, rootfs: pathlib.Path) -> None:
    lines = "A=1\nNOEQUALS\n=noname\n# a comment\n\n" + "x" * 1000
    (rootfs / "etc/environment").write_text(lines + "\n")
    done = user.penroot("start", "box", "env")
    assert "A=1\n" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("[WARN]") and "'NOEQUALS', '=noname', 'xxx" in line
    assert len(line) < 200


@pytest.mark.parametrize("shell", ["sh", "/bin/sh"])
def test_image_variable_too_long_is_named(user: User, rootfs: pathlib.Path, shell: str) -> None:
    (rootfs / "etc/environment").write_text(f"PATH=/bin\nBIG={'v' * 135_000}\nA=1\nHUGE={'v' * 140_000}\n")
    done = user.penroot("start", "box", shell, "-c", "echo ${BIG-none}$A")
    assert done.stdout == "none1\n"
    assert done.stderr == "[WARN] variables above the kernel's limit of 128 KiB are not set: BIG, HUGE\n"
    (rootfs / "etc/environment").write_text(
        f"PATH=/bin\nBIG={'v' * (131_071 - 4)}\n"
    )  # 128 KiB with "BIG=" and the final NUL
    done = user.penroot("start", "box", shell, "-c", "echo ${#BIG}")
    assert (done.stdout, done.stderr) == ("131067\n", "")


def test_paths_missing_inside_are_named_once(user: User, rootfs: pathlib.Path) -> None:
    (rootfs / "etc/environment").write_text("PATH=/bin\nSSL_CERT_FILE=/no/cert.pem\nSSL_CERT_DIR=/no:/etc\nTMP=/tmp\n")
    done = user.penroot("start", "-e", "NCCL_TOPO_FILE=/usr/share/doc", "-e", "TMPDIR=relative", "box", "true")
    assert done.stderr == (
        "[WARN] no such file or directory in the container: NCCL_TOPO_FILE=/usr/share/doc, "
        "SSL_CERT_FILE=/no/cert.pem; mount it, or unset the variable\n"
    )
    topology = ("-e", "NCCL_TOPO_FILE=/usr/share/doc", "-m", "/usr/share/doc", "-e", "SSL_CERT_FILE=/dev/null")
    assert user.penroot("start", *topology, "box", "true").stderr == ""


@pytest.mark.parity("start --mount")
@pytest.mark.security("O5")
def test_mounts(user: User, rootfs: pathlib.Path) -> None:
    shared = user.write("shared/file", "hello\n").parent
    assert user.start("-m", f"{shared}:/mnt/x", "box", "cat", "/mnt/x/file") == "hello\n"
    as_file = f"{shared}/file:/tmp/host:none:x-create=file,bind,ro"
    assert user.start("-m", as_file, "box", "cat", "/tmp/host") == "hello\n"
    closed = f"{shared}:/mnt/x:none:x-create=dir,rbind,ro"
    assert "Read-only" in user.penroot("start", "-m", closed, "box", "touch", "/mnt/x/new", status=1).stderr


def test_access_times_and_a_tmpfs(user: User, rootfs: pathlib.Path) -> None:
    options = ("-m", f"{user.home}:/mnt/x:none:x-create=dir,rbind,noatime", "-m", "tmpfs:/scratch")
    out = user.start(*options, "box", "grep", "-E", "/mnt/x|/scratch", "/proc/self/mounts")
    # penroot's own mounts do not appear below /mnt/x, although penroot makes them below the home directory.
    assert [line.split()[1] for line in out.splitlines()] == ["/mnt/x", "/scratch"]


@pytest.mark.parity("default mounts: /proc rw")
def test_a_recursive_readonly_mount_covers_submounts(user: User, rootfs: pathlib.Path) -> None:
    out = user.start("box", "grep", " /sys", "/proc/self/mounts")
    assert out
    assert all(line.split()[3].startswith("ro,") for line in out.splitlines()), out


@pytest.mark.parity("targets of mounts may be relative", "targets are resolved beneath the root")
@pytest.mark.parametrize("link", ["/", "../../../../../..", "/tmp/../../.."])
def test_mount_targets_stay_inside(user: User, rootfs: pathlib.Path, link: str) -> None:
    (rootfs / "escape").symlink_to(link)
    target = user.home / "victim"
    target.mkdir()
    user.own(user.home)
    user.start("-m", f"/usr/share:/escape{target}", "box", "ls", f"{target}")
    assert list(target.iterdir()) == []


@pytest.mark.parity("targets are resolved beneath the root", "default mounts: hosts, hostname")
def test_dangling_link_as_target(user: User, rootfs: pathlib.Path) -> None:
    (rootfs / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    out = user.start("box", "sh", "-c", "cat /etc/resolv.conf; ls -d /run/systemd || true")
    assert out == pathlib.Path("/etc/resolv.conf").read_text()


@pytest.mark.parity("/etc/rc: starts the entrypoint and command in the working directory")
def test_workdir_entrypoint_and_command_of_the_image(user: User, rootfs: pathlib.Path) -> None:
    run = etc.Exec("/opt/not yet there", ("sh", "-c", 'pwd; echo "$@"', "entry"), ("default",))
    (rootfs / "etc/rc").write_text(etc.write_rc("docker://x", {}, run))
    (rootfs / "etc/rc.local").write_text(etc.RC_LOCAL)
    assert user.start("box") == "/opt/not yet there\ndefault\n"
    assert user.start("box", "given", "two") == "/opt/not yet there\ngiven two\n"


@pytest.mark.parity("an image may have no command", "images without a shell work")
def test_static_program_without_shell(user: User) -> None:
    script = user.write("data/scratch/script", "echo hi\n", 0o755)
    shutil.copy(shutil.which("busybox") or "", script.with_name("busybox"))
    user.own(user.data)
    assert user.start("scratch", "/busybox", "echo", "hi") == "hi\n"
    stderr = user.penroot("start", "scratch", "/script", status=126).stderr
    assert "cannot run /script: Exec format error" in stderr and "Traceback" not in stderr


def test_command_is_searched_as_by_execvp(user: User, rootfs: pathlib.Path) -> None:
    """The search skips files that cannot be executed, and does not include the working directory."""
    path = ("--env", "PATH=/nowhere:/etc/environment:/first:/second")
    for name, mode in (("first/tool", 0o644), ("second/tool", 0o755), ("first/shut", 0o644), ("here", 0o755)):
        (rootfs / name).parent.mkdir(exist_ok=True)
        (rootfs / name).write_text("#!/bin/sh\necho $0\n")
        (rootfs / name).chmod(mode)
    (rootfs / "first/where").mkdir()
    assert user.start(*path, "box", "tool") == "/second/tool\n"
    stderr = user.penroot("start", *path, "box", "shut", status=126).stderr
    assert "cannot run /first/shut: Permission denied: it is not executable" in stderr
    for command in ("here", "where"):
        stderr = user.penroot("start", *path, "--env", "HOME=/", "box", command, status=127).stderr
        assert f"cannot run {command}: No such file" in stderr


COVERED = "leads to /srv/py/python, which does not exist in the container; /srv"
# Case -> (first line of the script, exit status, part of the error). {p} is the directory that contains the script.
INTERPRETERS = {
    "absent": ("#!/opt/none/sh2", 127, "cannot run {p}/tool: its interpreter /opt/none/sh2 does not exist in"),
    "absent argument": ("#! /opt/none/sh2 -e", 127, "its interpreter /opt/none/sh2 does not exist in the container"),
    "crlf": ("#!/bin/sh\r", 127, r"its interpreter is '/bin/sh\r': convert it: sed -i 's/\r$//' {p}/tool"),
    "not executable": ("#!{p}/data", 126, "its interpreter {p}/data is not executable"),
    "directory": ("#!/etc", 126, "its interpreter /etc is not a regular file"),
    "nested": ("#!{p}/script", 127, "cannot run {p}/tool: its interpreter /opt/none/sh3 does not exist"),
    "dangling link": ("#!{p}/link", 127, "{p}/link leads to /opt/py/bin/python, which does not exist in"),
    "covered": ("#!{p}/covered", 127, f"its interpreter {{p}}/covered {COVERED} is mounted from tmpfs[/]"),
    "mounted over": ("#!/srv/py/python", 127, "/srv/py/python does not exist in the container; /srv is mounted from"),
    "loop": ("#!{p}/loop", 126, "its interpreter {p}/loop is a link to itself"),
}


def write_tool(directory: pathlib.Path, inside: str, first_line: str) -> None:
    """Write a script that a container sees as ``inside``/tool, and the interpreters that its first line may name."""
    directory.mkdir()
    for name, text in (("tool", first_line.format(p=inside)), ("script", "#!/opt/none/sh3"), ("data", "x")):
        (directory / name).write_bytes(f"{text}\necho ran\n".encode())
        (directory / name).chmod(0o644 if name == "data" else 0o755)
    (directory / "link").symlink_to("/opt/py/bin/python")
    (directory / "covered").symlink_to("/./etc/../srv/py/python")
    (directory / "loop").symlink_to("loop")


@pytest.mark.parametrize("case", INTERPRETERS)
@pytest.mark.parametrize("command", ["/p/tool", "tool"])
def test_interpreter_that_cannot_run_is_named(user: User, rootfs: pathlib.Path, case: str, command: str) -> None:
    first_line, status, error = INTERPRETERS[case]
    write_tool(user.home / "p", "/p", first_line)
    (rootfs / "srv/py").mkdir(parents=True)
    shutil.copy(rootfs / "bin/busybox", rootfs / "srv/py/python")
    user.own(user.home)
    mounts = ("-m", f"{user.home}/p:/p", "-m", "tmpfs:/srv", "-e", "PATH=/bin:/p")
    done = user.penroot("start", *mounts, "box", command, status=status)
    assert error.format(p="/p") in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


# File in the directory of write_tool() -> (exit status, the kernel's error and penroot's explanation)
PROGRAMS = {
    "covered": (127, f"No such file or directory: it {COVERED}"),
    "link": (127, "No such file or directory: it leads to /opt/py/bin/python, which does not exist in the container"),
    "loop": (126, "Too many levels of symbolic links: it is a link to itself"),
    "data": (126, "Permission denied: it is not executable"),
    "pipe": (126, "Permission denied: it is not a regular file"),
    "foreign": (126, "Exec format error"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("directory", ["/p/", ""])
def test_program_that_cannot_run_is_explained(user: User, rootfs: pathlib.Path, name: str, directory: str) -> None:
    status, error = PROGRAMS[name]
    write_tool(user.home / "p", "/p", "#!/bin/sh")
    os.mkfifo(user.home / "p/pipe", 0o755)
    # No kernel knows this machine type: e_machine in elf(5).
    program = bytearray(pathlib.Path("/bin/true").read_bytes())
    program[18:20] = b"\xff\xff"
    (user.home / "p/foreign").write_bytes(program)
    (user.home / "p/foreign").chmod(0o755)
    (rootfs / "srv/py").mkdir(parents=True)
    user.own(user.home)
    mounts = ("-m", f"{user.home}/p:/p", "-m", "tmpfs:/srv", "-e", "PATH=/bin:/p")
    done = user.penroot("start", *mounts, "box", directory + name, status=status)
    path = name if name == "foreign" and not directory else f"/p/{name}"
    assert f"cannot run {path}: {error}" in done.stderr
    assert "syntax error" not in done.stderr  # no shell has run the program


def test_path_that_does_not_exist_is_not_explained(user: User, rootfs: pathlib.Path) -> None:
    (rootfs / "link").symlink_to("bin")
    for path in ("/bin/none", "/link/none", "/none/none"):
        stderr = user.penroot("start", "box", path, status=127).stderr
        assert f"cannot run {path}: No such file or directory\n[HINT] the command is looked up inside" in stderr


def test_program_on_a_noexec_mount_is_explained(user: User, rootfs: pathlib.Path) -> None:
    write_tool(user.home / "p", "/p", "#!/bin/sh")
    user.own(user.home)
    stderr = user.penroot("start", "-m", f"{user.home}/p:/p:noexec", "box", "/p/tool", status=126).stderr
    assert (
        "cannot run /p/tool: Permission denied: it is on a file system that is mounted noexec; /p is mounted" in stderr
    )


@pytest.mark.parametrize("directory", ["with blank", "it's", "$(id)"])
def test_hint_for_line_ends_can_be_followed(user: User, rootfs: pathlib.Path, directory: str) -> None:
    tools = rootfs / "opt" / directory
    write_tool(tools, "", "#!/bin/sh\r")
    user.own(user.home)
    stderr = user.penroot("start", "box", f"/opt/{directory}/tool", status=127).stderr
    hint = stderr.rstrip("\n").split("convert it: ")[1].replace("/opt/", f"{rootfs}/opt/")
    user.run("sh", "-c", hint)
    assert user.start("box", f"/opt/{directory}/tool") == "ran\n"


def test_name_of_a_loader_cannot_forge_an_error_line(user: User, rootfs: pathlib.Path) -> None:
    program = pathlib.Path("/bin/ls").read_bytes()
    loader = re.search(rb"/lib[^\0]*/ld-[^\0]*", program)
    assert loader is not None
    forged = b"/\n[ERROR] ".ljust(len(loader[0]), b"x")
    (rootfs / "bin/dynamic").write_bytes(program.replace(loader[0], forged))
    (rootfs / "bin/dynamic").chmod(0o755)
    user.own(rootfs)
    stderr = user.penroot("start", "box", "dynamic", status=127).stderr
    assert len(stderr.splitlines()) == 1, stderr


def test_missing_loader_of_a_program_is_named(user: User, rootfs: pathlib.Path) -> None:
    shutil.copy("/bin/ls", rootfs / "bin/dynamic")
    user.own(rootfs)
    done = user.penroot("start", "box", "dynamic", status=127)
    assert re.search(r"cannot run /bin/dynamic: its interpreter /lib\S* does not exist in the container$", done.stderr)


def test_unknown_container_is_an_error(user: User) -> None:
    done = user.penroot("start", "nope", "true", status=1)
    assert "[ERROR] no such container: nope" in done.stderr and "docker://nope" in done.stderr


@pytest.mark.parity("start IMAGE [COMMAND]", "start IMAGE: mounts squashfuse and an overlay")
def test_squashfs_image(user: User, image: pathlib.Path) -> None:
    assert user.start(str(image), "sh", "-c", "echo $FROM_IMAGE; id -u").split() == ["yes", str(UID)]
    user.penroot("start", str(image), "touch", "/new", status=1)
    assert user.start("--rw", str(image), "sh", "-c", "touch /new && ls /new") == "/new\n"
    assert user.start("--root", str(image), "stat", "-c", "%u", "/bin/busybox") == "0\n"


@pytest.mark.parity("start IMAGE: mounts squashfuse and an overlay")
@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGTERM])
def test_squashfs_server_ends_with_the_container(user: User, image: pathlib.Path, number: int | None) -> None:
    process = user.begin("penroot", "start", str(image), "cat", stdin=subprocess.PIPE)
    until(lambda: servers(image), "the image is served")
    if number is not None:
        process.send_signal(number)
    process.communicate()
    until(lambda: not servers(image), "the server ends")
    assert mounts_under(user.home) == []


def test_an_image_that_cannot_be_served(user: User, image: pathlib.Path) -> None:
    with image.open("r+b") as f:
        f.seek(20)
        f.write((2).to_bytes(2, "little"))  # the compression LZMA, which squashfuse does not support
    done = user.penroot("start", str(image), "true", status=1)
    assert str(image) in done.stderr
    assert "Traceback" not in done.stderr
    assert mounts_under(user.home) == []


def test_mount_of_the_scratch_parent_leaves_scratch_out(user: User, image: pathlib.Path) -> None:
    out = user.start("-m", f"{user.home}:/mnt:none:x-create=dir,rbind", str(image), "ls", "-A", "/mnt/run")
    assert out == "servers\n"  # the directory on the disk: penroot's own mounts on it are not visible


def test_path_entries_that_are_no_programs_are_skipped(user: User, rootfs: pathlib.Path) -> None:
    (rootfs / "opt/bin/true").mkdir(parents=True)  # PATH of the image is /opt/bin:/bin:/usr/bin
    os.mkfifo(rootfs / "opt/bin/echo")
    user.own(rootfs)
    user.penroot("export", "-o", "odd.sqsh", "box")
    user.start("./odd.sqsh", "true")
    assert user.start("./odd.sqsh", "echo", "hi") == "hi\n"


@pytest.mark.parity("after a start, nothing is left mounted")
def test_nothing_is_left_behind(user: User, rootfs: pathlib.Path, image: pathlib.Path) -> None:
    user.start("box", "true")
    user.start(str(image), "true")
    assert mounts_under(user.home) == []
    hints = ["named-box", "servers"]  # later starts use these files again
    assert sorted(path.name for path in (user.home / "run").iterdir()) == hints
