"""An ordinary user runs create, list, remove and export. Also: exit statuses, completion and messages of all verbs."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess

import pytest

from enroot_py.registry.platforms import architecture
from tests import images
from tests.kernel.conftest import PREFIX, UID, User, mounts_under, require, small_filesystem


def names(user: User) -> list[str]:
    return user.penroot("list").stdout.split()


VERBS = "batch bundle create digest exec export help import info list load remove start version".split()
MISTAKES = "nonsense|list -x|create|create /no/such.sqsh|remove|batch|cache|cache prune --older -1|completion|"
MISTAKES += "exec --root box true|help nonsense|rm box"


@pytest.mark.parity(
    "--output x and --output=x mean the same", "long options: --x VALUE and --x=VALUE are the same", "create --name"
)
@pytest.mark.parametrize("option", [("--name", "two"), ("--name=two",), ("-n", "two"), ("-ntwo",)])
def test_name_option_in_every_form(user: User, image: pathlib.Path, option: tuple[str, ...]) -> None:
    user.penroot("create", *option, str(image))
    assert names(user) == ["box", "two"]


@pytest.mark.parity("create: a name may not contain '/' or begin with '.'")
@pytest.mark.parametrize("name", ["a/b", "..", ".", ".hidden", "x" * 256])
def test_names_are_file_names(user: User, image: pathlib.Path, name: str) -> None:
    assert "not a container name" in user.penroot("create", "-n", name, str(image), status=1).stderr


@pytest.mark.parity(
    "directories without access or write permission can be unpacked",
    "create: keeps extended attributes user.*",
    "remove: directories without permissions",
    "read-only and closed directories",
)
def test_read_only_directories_come_and_go(user: User, rootfs: pathlib.Path) -> None:
    """Directories without write or read permission are exported, unpacked and removed."""
    closed = rootfs / "opt/closed"
    (closed / "sub").mkdir(parents=True)
    (closed / "sub/file").write_text("x")
    for path, mode in ((closed / "sub", 0o111), (closed, 0o555)):
        path.chmod(mode)
    user.own(rootfs)
    for path, mode in ((closed / "sub", 0o111), (closed, 0o555)):
        path.chmod(mode)
    user.start("box", "true")
    user.penroot("export", "-o", "closed.sqsh", "box")
    user.penroot("create", "-n", "again", "closed.sqsh")
    assert user.start("again", "cat", "/opt/closed/sub/file") == "x"
    user.penroot("remove", "-f", "again", "box")
    assert names(user) == []
    assert [p.name for p in user.data.iterdir()] == []


def test_unreadable_root_is_locked_while_it_is_deleted(user: User, rootfs: pathlib.Path) -> None:
    """Without the lock, another process would take the directory for a leftover, and delete it at the same time."""
    require(shutil.which("strace"), "strace is not installed")
    rootfs.chmod(0o311)
    trace = user.home / "trace"
    prefix = ("strace", "-f", "-qq", "-y", "-o", str(trace), "-e", "trace=flock")
    user.penroot("remove", "-f", "box", prefix=prefix)
    assert re.search(rf"flock\(\d+<{rootfs}>, LOCK_EX\|LOCK_NB\) += 0", trace.read_text())
    assert names(user) == []


@pytest.mark.parity("remove NAME...")
def test_remove_asks(user: User, rootfs: pathlib.Path) -> None:
    user.penroot("remove", "box", stdin="n\n")
    assert names(user) == ["box"]
    done = user.penroot("remove", "box", status=1)
    assert done.stderr.splitlines()[-2:] == [
        "[ERROR] cannot prompt: stdin is not a terminal",
        "[HINT] use --force to skip the prompt",
    ]
    assert names(user) == ["box"]
    user.penroot("remove", "box", stdin="y\n")
    assert names(user) == []


@pytest.mark.parity("remove: a running container is refused")
def test_running_container_is_not_removed_or_replaced(user: User, rootfs: pathlib.Path, image: pathlib.Path) -> None:
    user.penroot("create", "-n", "idle", str(image))
    words = ("penroot", "start", "--rw", "box", "sh", "-c", "echo up; read line; cat /etc/environment")
    with user.running(*words, **dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)) as running:
        assert running.stdout is not None and running.stdout.readline() == "up\n"
        refused = f"process {running.pid} (sh) runs in the container box"
        stderr = user.penroot("remove", "-f", "box", "idle", status=1).stderr
        assert refused in stderr and f"kill {running.pid}" in stderr
        for verb, image_name in (
            ("create", str(image)),
            *((verb, "docker://127.0.0.1:1/x") for verb in ("create", "load")),  # refused before the pull
        ):
            assert refused in user.penroot(verb, "-f", "-n", "box", image_name, status=1).stderr
        out, _ = running.communicate("\n", timeout=60)
        assert "FROM_IMAGE=yes" in out
    assert user.penroot("list").stdout == "box\n"
    user.penroot("remove", "-f", "box")


def test_import_looks_at_its_directory_before_it_fetches(user: User) -> None:
    done = user.penroot("import", "-o", "/proc/x.sqsh", "oci:/no/such/layout", status=1)
    assert "cannot write /proc/x.sqsh" in done.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [("-comp nope", "unknown compression nope"), ("-comp gzpi", "use one of lz4, zstd, gzip"), ("-b", "-b needs")],
)
def test_squash_options_are_checked_before_the_work(user: User, rootfs: pathlib.Path, options: str, error: str) -> None:
    """Values that only mksquashfs can check are reported with its own message."""
    done = user.penroot("import", "docker://127.0.0.1:1/x", env={"ENROOT_SQUASH_OPTIONS": options}, status=1)
    assert "ENROOT_SQUASH_OPTIONS" in done.stderr and error in done.stderr
    done = user.penroot("export", "box", env={"ENROOT_SQUASH_OPTIONS": "-b nope"}, status=1)
    assert "mksquashfs failed: -b invalid block size" in done.stderr


def test_unknown_compression_of_an_image_is_named(user: User, image: pathlib.Path) -> None:
    data = bytearray(image.read_bytes())
    data[20:22] = (99).to_bytes(2, "little")
    image.write_bytes(data)
    for words in (("create", "-n", "new"), ("start",), ("inspect",)):
        done = user.penroot(*words, str(image), status=1)
        assert f"[ERROR] the image {image} has the unknown compression 99\n" in done.stderr, words
    assert "new" not in user.penroot("list").stdout


@pytest.mark.parity("a container can be exported", "export NAME")
def test_export_holds_the_changes_and_no_mount_points(user: User, rootfs: pathlib.Path) -> None:
    user.start("--rw", "box", "sh", "-c", "echo changed > /opt/file")
    user.penroot("export", "box")
    user.penroot("create", "-n", "again", "box.sqsh")
    assert (user.data / "again/opt/file").read_text() == "changed\n"
    assert sorted(os.listdir(user.data / "again/dev")) == []


@pytest.mark.parity("--output x and --output=x mean the same", "export --output", "export --force")
def test_export_does_not_overwrite(user: User, rootfs: pathlib.Path) -> None:
    path = user.write("mine.sqsh", "mine")
    user.penroot("export", "-o", str(path), "box", status=1)
    assert path.read_text() == "mine"
    user.penroot("export", "--force", f"--output={path}", "box")
    assert path.stat().st_size > 4096


def test_an_image_goes_to_stdout_but_to_no_terminal(user: User, rootfs: pathlib.Path) -> None:
    user.run("sh", "-c", "penroot export -o - box | cat > piped.sqsh")
    assert user.start("./piped.sqsh", "echo", "piped") == "piped\n"
    shown = user.run("script", "-qec", "penroot export -o - box", "/dev/null", status=1).stdout
    assert "redirect stdout, or name the file: --output FILE" in shown
    assert "hsqs" not in shown
    assert "use --output FILE" in user.penroot("bundle", "-o", "-", "piped.sqsh", status=1).stderr
    assert not (user.home / "-").exists()


@pytest.mark.parity("export or save to a directory deletes nothing", "export -o DIRECTORY deletes nothing")
@pytest.mark.parametrize("output", ["./", "/", ".", "no/such/dir/x.sqsh", 256 * "x"])
def test_export_to_a_directory_deletes_nothing(user: User, rootfs: pathlib.Path, output: str) -> None:
    before = sorted(os.listdir(user.home))
    done = user.penroot("export", "-f", "-o", output, "box", status=1)
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(user.home)) == before


@pytest.mark.parametrize("verb", ["import", "export"])
def test_save_onto_a_link_writes_its_target(user: User, rootfs: pathlib.Path, image: pathlib.Path, verb: str) -> None:
    """The link stays, whether its target exists or not, as with the redirection of a shell."""
    link, real = user.home / "latest.sqsh", user.home / "v1.sqsh"
    link.symlink_to("v1.sqsh")
    source = "box" if verb == "export" else f"oci:{oci_layout(user)}"
    user.penroot(verb, "-o", str(link), source)
    assert link.is_symlink() and not real.is_symlink()
    assert user.start(str(link), "echo", "well") == "well\n"
    real.write_text("old")
    user.own(real)
    user.penroot(verb, "-o", str(link), source, status=1)
    user.penroot(verb, "-f", "-o", str(link), source)
    assert link.is_symlink() and user.start(str(real), "echo", "well") == "well\n"


def oci_layout(user: User) -> pathlib.Path:
    directory = user.home / "layout"
    image = images.busybox()
    blobs = [image.manifest(), image.config(), *(layer.blob for layer in image.layers)]
    images.write_layout(directory, blobs, images.index([(image, {"os": "linux", "architecture": architecture()})]))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    user.own(directory)
    return directory


@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a socket", "a link to a FIFO"])
def test_save_onto_a_special_file_is_refused(user: User, rootfs: pathlib.Path, kind: str) -> None:
    target = user.home / "target"
    if kind == "a device":
        require(os.geteuid() == 0, "only root can make a device node")
        os.mknod(target, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(target))
    else:
        os.mkfifo(target)
    user.own(target)
    name = target
    if kind.startswith("a link"):
        name = user.home / "link"
        name.symlink_to(target)
    before = target.lstat()
    for verb, source in (("export", "box"), ("import", "docker://127.0.0.1:1/x")):
        for options in ((), ("-f",)):
            done = user.penroot(verb, *options, "-o", str(name), source, status=1)
            assert f"{target} is {kind.rpartition('to ')[2]}" in done.stderr
    assert (target.lstat().st_ino, target.lstat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.security("U11")
def test_save_does_not_follow_the_link_of_another_user(user: User, rootfs: pathlib.Path) -> None:
    """The link is in a world-writable directory such as /tmp."""
    require(os.geteuid() == 0, "only root can give a link away")
    directory = user.home / "open"
    directory.mkdir()
    directory.chmod(0o1777)
    (directory / "x.sqsh").symlink_to(user.home / "victim")
    os.chown(directory / "x.sqsh", 4242, 4242, follow_symlinks=False)
    done = user.penroot("export", "-f", "-o", str(directory / "x.sqsh"), "box", status=1)
    assert "is a link of uid 4242" in done.stderr
    assert not (user.home / "victim").exists()


def test_create_on_a_full_disk_leaves_nothing(user: User, image: pathlib.Path) -> None:
    with small_filesystem(user.home / "small", f"size=1m,mode=700,uid={UID}") as small:
        done = user.penroot("create", str(image), env={"ENROOT_DATA_PATH": str(small)}, status=1)
        assert list(small.iterdir()) == []
        assert f"cannot create {small}/box: No space left on device" in done.stderr
        assert "set ENROOT_DATA_PATH" in done.stderr
    assert mounts_under(user.home) == []


def test_a_truncated_image_makes_no_container(user: User, image: pathlib.Path) -> None:
    os.truncate(image, image.stat().st_size // 2)
    assert "truncated" in user.penroot("create", "-n", "new", str(image), status=1).stderr
    assert names(user) == ["box"]


@pytest.mark.parity(
    "without arguments, penroot prints the usage and exits with 1",
    "help",
    "an unknown verb: penroot exits with 1",
    "--help",
    "an unknown option",
    "version",
)
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        *(((), 1), (("import", "-o", "", "docker://x"), 1)),
        *((tuple(line.split()), 1) for line in MISTAKES.split("|")),
        *(((word,), 0) for word in ("help", "--help", "version", "--version", "info")),
        *((("help", verb), 0) for verb in ("create", "start")),
        *(((verb, "-h"), 0) for verb in VERBS if verb not in ("digest", "help", "load")),
        *(((verb, "--help"), 0) for verb in ("start", "create", "import")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_exit_statuses(user: User, arguments: tuple[str, ...], status: int) -> None:
    done = user.penroot(*arguments, status=status)
    assert "Traceback" not in done.stderr
    if status:
        assert done.stdout == ""
        assert done.stderr
        assert not arguments or [line[:7] for line in done.stderr.splitlines()] in (["[ERROR]"], ["[ERROR]", "[HINT] "])
    else:
        assert done.stdout


@pytest.mark.parity("info: shows the version")
def test_info_says_where_each_value_comes_from(user: User) -> None:
    conf = user.write("etc/enroot.conf", "ENROOT_MAX_CONNECTIONS 7\nENROOT_SITE_THING $(id -u)\n")
    yaml = user.write("etc/penroot.yaml", "# the clean form\nconnect_timeout: 8\n")
    lines = user.penroot("info", env={"ENROOT_REMAP_ROOT": "yes"}).stdout.splitlines()
    assert lines[0].startswith("penroot version: ")
    assert lines[1] == f"Config files: {conf} {yaml}"
    for variable, origin in (
        ("MAX_CONNECTIONS=7", f"{conf}:1"),
        (f"SITE_THING={UID}", f"{conf}:2"),
        ("CONNECT_TIMEOUT=8", f"{yaml}:2"),
        ("REMAP_ROOT=yes", "environment"),
        ("MOUNT_HOME=no", "default"),
    ):
        assert f"  ENROOT_{variable}  ({origin})" in lines


@pytest.mark.parametrize("source", ["cwd", "pythonpath"])
def test_python_files_of_the_user_are_not_run(user: User, rootfs: pathlib.Path, source: str) -> None:
    """penroot runs Python with -IS, so Python searches neither the working directory nor PYTHONPATH."""
    (user.home / "os.py").write_text("raise SystemExit('poisoned')\n")
    env = {"PYTHONPATH": str(user.home), "PYTHONSTARTUP": str(user.home / "os.py")} if source == "pythonpath" else {}
    assert user.start("box", "echo", "x", env=env, cwd=user.home) == "x\n"
    assert user.penroot("list", env=env, cwd=user.home).stdout == "box\n"


@pytest.mark.parity("completion covers every verb and option, and the names of containers and images")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("penroot sta", {"start"}),
        ("penroot exec --t", {"--timeout", "--tty"}),
        ("penroot stop b", {"box"}),
        ("penroot start b", {"box", "box.sqsh"}),
        ("penroot start --r", {"--root", "--rw", "--rc"}),
        ("penroot start --en", {"--env", "--environment"}),
        ("penroot rm b", {"batch", "bundle"}),  # for an unknown verb, suggest existing verbs
        ("penroot remove ", {"box"}),
        ("penroot export --o", {"--output"}),
        ("penroot cache p", {"prune"}),
    ],
)
def test_completion(user: User, image: pathlib.Path, words: str, expected: set[str]) -> None:
    script = user.penroot("completion", "bash").stdout
    assert "complete -o nosort -F" in script
    env = {"_PENROOT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    out = user.penroot(env=env).stdout
    assert {line.partition(",")[2] for line in out.splitlines()} == expected


@pytest.mark.parity("completion covers every verb and option, and the names of containers and images")
def test_every_verb_completes(user: User) -> None:
    env = {"_PENROOT_COMPLETE": "bash_complete", "COMP_WORDS": "penroot ", "COMP_CWORD": "1"}
    out = user.penroot(env=env).stdout
    assert {line.partition(",")[2] for line in out.splitlines()} >= set(VERBS)


@pytest.mark.parity("an empty value is an error")
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("mkdir gone && cd gone && rmdir ../gone && penroot create x.sqsh", "no such image: x.sqsh"),
        ("mkdir gone && cd gone && rmdir ../gone && penroot import oci:layout", "the working directory is gone"),
        ("penroot info > /dev/full", "cannot write the output: No space left on device"),
        ("penroot version > /dev/full", "cannot write the output: No space left on device"),
        ("penroot start --help > /dev/full", "cannot write the output: No space left on device"),
        ("penroot doctor > /dev/full", "cannot write the output: No space left on device"),
        ("penroot create --name= x.sqsh", "Invalid value for '-n' / '--name': the value is empty"),
        ('penroot import -o "" docker://x', "Invalid value for '-o' / '--output': the value is empty"),
        ("penroot cache prune --older x", "'x' is not a valid number of days"),
        ("mkdir there; penroot start ./there", "not an image file: ./there"),
        ("mkdir there; penroot create there", "not an image file: there"),
        ("HOME=here; unset ENROOT_CACHE_PATH; penroot list", "ENROOT_CONFIG_PATH='here/.config/enroot' must be"),
        ("penroot start reg.test:5000/team/app", "no such image: reg.test:5000/team/app"),
        ("penroot remove box <&-", "cannot prompt: stdin is closed"),
        ("chmod 0 data; penroot list; said=$?; chmod 755 data; exit $said", "/data: Permission denied"),
        ("touch data/file; penroot start file true", "no such container: file"),
        ("mkdir -p etc/penroot.yaml; penroot list", "/etc/penroot.yaml: Is a directory"),
    ],
)
def test_error_and_hint_are_one_line_each(user: User, rootfs: pathlib.Path, script: str, error: str) -> None:
    lines = user.run("sh", "-c", script, status=1).stderr.splitlines()
    assert [line[:7] for line in lines] == ["[ERROR]", "[HINT] "]
    assert error in lines[0]


def test_force_keeps_the_old_container_until_there_is_a_new_one(user: User, image: pathlib.Path) -> None:
    work = user.data / "box/work"
    work.mkdir()
    user.own(user.data)
    bad = user.home / "bad/box.sqsh"
    bad.parent.mkdir()
    data = bytearray(image.read_bytes())
    data[1000:200_000] = bytes(199_000)  # unsquashfs finds this damage after it has begun to unpack
    bad.write_bytes(data)
    user.penroot("create", "--force", str(bad), status=1)
    user.penroot("create", "--force", "--name", "box", "docker://127.0.0.1:1/x", status=1)
    assert work.is_dir()
    assert os.listdir(user.data) == ["box"]
    user.penroot("create", "--force", str(image))
    assert os.listdir(user.data) == ["box"]
    assert not work.exists()


def test_explain_of_an_image_file_ends(user: User, image: pathlib.Path) -> None:
    # At its end, the command has to wait for a child process that still runs.
    done = user.run("timeout", "20", f"{PREFIX}/bin/penroot", "start", "--explain", str(image), "true")
    assert "run      true" in done.stdout


def test_a_reader_of_explain_may_leave(user: User, rootfs: pathlib.Path) -> None:
    script = "mkfifo pipe; : < pipe & exec 3> pipe; wait; exec penroot start --explain box >&3"
    assert user.run("bash", "-c", script, status=141).stderr == ""


def test_a_job_may_bring_the_tmpdir_of_another_machine(user: User, rootfs: pathlib.Path) -> None:
    """A TMPDIR that does not exist on this node does not prevent a start."""
    del user.environ["ENROOT_RUNTIME_PATH"]
    assert user.start("box", "echo", "started", env={"TMPDIR": "/nowhere"}) == "started\n"


def test_misspelt_variable_is_reported(user: User, rootfs: pathlib.Path) -> None:
    env = {"ENROOT_MOUNT_HOM": "yes", "ENROOT_OF_THE_SITE": "1"}
    for words in (("start", "box", "true"), ("list",)):
        stderr = user.penroot(*words, env=env).stderr
        assert stderr == "[WARN] ignoring ENROOT_MOUNT_HOM: did you mean ENROOT_MOUNT_HOME?\n"


def test_record_that_a_crash_emptied_is_reported(user: User) -> None:
    (user.data / "cut/upper").mkdir(parents=True)
    (user.data / "cut/.penroot").touch()
    user.own(user.data)
    stderr = user.penroot("start", "cut", "true", status=1).stderr
    assert f"the record of the container cut is damaged: {user.data}/cut/.penroot" in stderr
    assert f"the container's changes are in {user.data}/cut/upper" in stderr
    user.penroot("remove", "--force", "cut")


@pytest.mark.parametrize("verb", ["start", "create", "inspect", "import", "load", "digest", "lock", "remove"])
@pytest.mark.parametrize(
    "form", ["docker:/me:{}@reg#app", "docker:me:{}@reg#a@x", "dockr://me:{}@reg/app", "me:{}@reg"]
)
def test_mistyped_reference_shows_no_password(user: User, rootfs: pathlib.Path, verb: str, form: str) -> None:
    reference = form.format("hunter2")
    stdout = user.run("sh", "-c", f'{PREFIX}/bin/penroot {verb} "{reference}" true 2>&1; [ $? != 0 ]').stdout
    assert "[ERROR]" in stdout and "hunter2" not in stdout


def test_scheme_with_one_slash_is_named(user: User, rootfs: pathlib.Path) -> None:
    for reference in ("docker:/me:hunter2@reg#app", "docker:/debian:12"):
        stderr = user.penroot("import", reference, status=1).stderr
        assert "the scheme is docker://, with two slashes" in stderr
        assert "docker://IMAGE" in user.penroot("start", reference, status=1).stderr
