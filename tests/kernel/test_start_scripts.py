"""Configuration scripts, bash hooks, namespaces, --explain, exec and list."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import UID, User, require
from tests.kernel.test_start import snapshot
from tests.waiting import until


@pytest.mark.parity("batch: the line #ENROOT_ROOTFS is required")
def test_batch_without_directive(user: User) -> None:
    path = user.write("x.conf", "mounts() { :; }\n")
    assert "ENROOT_ROOTFS" in user.penroot("batch", str(path), status=1).stderr


@pytest.mark.parity("hooks: a hook that fails ends the start")
def test_output_of_hooks_is_not_the_containers(user: User, rootfs: pathlib.Path) -> None:
    """The output of hooks is not in stdout of a start. If a hook fails, the error has its exit status and stderr."""
    text = "#!/bin/sh\necho noise\necho broken >&2\nexit ${STATUS:-0}\n"
    hook = user.write("etc/hooks.d/50-site.sh", text, 0o755)
    conf = user.write("box.conf", "hooks() { echo noise; }\n")
    assert user.start("-c", str(conf), "box", "echo", "output") == "output\n"
    stderr = user.penroot("start", "box", "true", env={"STATUS": "7"}, status=1).stderr
    assert f"hook {hook} failed with status 7" in stderr and "broken" in stderr


@pytest.mark.parity("environ()")
@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ("exit 7\n", 7, "{} failed with status 7"),
        ("kill -9 $$\n", 137, "{} failed with status -9"),
        ("hooks() { false; }\n", 1, "hooks() of {} failed with status 1"),
        ("hooks() {\n    false\n    echo went on >&2\n}\n", 1, "hooks() of {} failed with status 1"),
        ("environ() { exit 3; }\n", 3, "environ() of {} failed with status 3"),
        ("environ() { return 3; }\n", 3, "environ() of {} failed with status 3"),
        ("mounts() { return 4; }\n", 4, "mounts() of {} failed with status 4"),
        ("hooks() {\n", 1, "{}"),
        ("#ENROOT_DATA_PATH=${NOT_SET}\n", 1, "{}:1: ENROOT_DATA_PATH: the variable NOT_SET is not set"),
    ],
)
def test_exit_status_of_a_configuration_is_the_starts(
    user: User, rootfs: pathlib.Path, script: str, status: int, error: str
) -> None:
    """Nothing but the error is printed. CPython 3.11 once added a SystemError at exit: see gc.freeze() in main.py."""
    conf = user.write("box.conf", script)
    done = user.penroot("start", "-c", str(conf), "box", "echo", "x", status=status)
    assert done.stdout == "" and error.format(conf) in done.stderr
    other_lines = [line for line in done.stderr.splitlines() if not line.startswith(("[ERROR]", "[HINT]"))]
    assert not other_lines or script == "hooks() {\n", other_lines  # bash itself prints more lines for this script


def test_values_of_the_site_are_written_as_for_a_shell(user: User, rootfs: pathlib.Path) -> None:
    user.write("etc/environ.d/50-site.env", 'A="one two"\nB=\'it\'\'s\'\nC="x\nD=""\n')
    (rootfs / "etc/environment").write_text("IMAGE=\"kept\"\n# penroot-exact: QUOTED='as it is'\nQUOTED='as it is'\n")
    conf = user.write("box.conf", "environ() { echo ' E=\"three four\"'; echo 'no name=x'; echo =x; }\n")
    show = ("sh", "-c", 'echo "$A|$B|$C|$D|$E|$QUOTED"')
    assert user.start("-c", str(conf), "box", *show) == "one two|it''s|\"x||three four|'as it is'\n"


@pytest.mark.parity("/etc/environment: ${VAR} is replaced by the caller's value")
@pytest.mark.security("I6")
def test_variables_of_the_caller_in_the_environment_of_an_image(user: User, rootfs: pathlib.Path) -> None:
    (rootfs / "etc/environment").write_text(
        'DISPLAY=${DISPLAY}\nQUOTED="a ${WORD} b"\nBARE=$WORD $(id)\nENROOT_DATA_PATH=/x\n'
        "MINE=[${GITHUB_TOKEN}${PROXY}]\n# penroot-exact: EXACT=${WORD}\nEXACT=${WORD}\nUNSET=[${NOT_SET}]\n"
    )
    environ = {"DISPLAY": ":0", "WORD": "w", "GITHUB_TOKEN": "ghp_x", "PROXY": "http://me:pass@proxy/"}
    done = user.penroot("start", "box", "env", env=environ)
    lines = {*done.stdout.splitlines()}
    assert {"DISPLAY=:0", "QUOTED=a w b", "BARE=$WORD $(id)", "EXACT=${WORD}", "UNSET=[]", "MINE=[]"} <= lines
    assert not [line for line in lines if line.startswith("ENROOT_DATA_PATH")]
    assert "ghp_x" not in done.stdout
    for name in ("GITHUB_TOKEN", "PROXY"):
        assert f"asks for {name}, which looks like a secret: pass it with --env {name}" in done.stderr
    token = user.start("-e", "GITHUB_TOKEN", "box", "sh", "-c", "echo $GITHUB_TOKEN", env=environ)
    assert token == "ghp_x\n"


@pytest.mark.parity("environ.d: $VAR")
def test_commands_in_files_of_the_site_are_words(user: User, rootfs: pathlib.Path) -> None:
    text = "A=$(hostname) `id` $HOME ${HOME\nB=${WORD} ${NONE:-else}\nexport C=1\nENROOT_X=1\n"
    fragment = user.write("etc/environ.d/50-site.env", text)
    done = user.penroot("start", "box", "sh", "-c", 'echo "$A|$B|$C|$ENROOT_X"', env={"WORD": "w"})
    assert done.stdout == "$(hostname) `id` $HOME ${HOME|w else||\n"
    assert f"[WARN] {fragment}:3: 'export C=1' is not KEY=VALUE: ignored" in done.stderr


@pytest.mark.parity("hooks: bash hooks must be executable")
@pytest.mark.parametrize("options", [(), ("--root",)], ids=["self", "root"])
@pytest.mark.parametrize("kind", ["container", "image"])
def test_hooks_know_who_starts(user: User, image: pathlib.Path, kind: str, options: tuple[str, ...]) -> None:
    hook = (
        '#!/bin/bash\nsource "${ENROOT_LIBRARY_PATH}/common.sh"\n'
        'echo "WHO=$(common::getpwent)" >> "${ENROOT_ENVIRON}"\n'
        'echo "GROUP=$(common::getgrent)" >> "${ENROOT_ENVIRON}"\n'
    )
    user.write("etc/hooks.d/50-who.sh", hook, 0o755)
    target = "box" if kind == "container" else str(image)
    out = user.start(*options, target, "sh", "-c", 'echo "$WHO"; echo "$GROUP"')
    assert out == f"user{UID}:x:{UID}:{UID}::/:/bin/sh\ngroup{UID}:x:{UID}:\n"


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("def run(c):\n    c.nothing()\n", ":2 failed: AttributeError: "),
        ("def run(c)\n    pass\n", ":1 failed: SyntaxError: "),
        ("import sys\ndef run(c):\n    sys.exit(0)\n", ":3 failed: SystemExit: 0"),
        ("def run(c):\n    c.environ['A'] = '\\0'\n", "cannot run true: the variable 'A': embedded null byte"),
    ],
)
def test_a_hook_in_python_that_fails_is_one_line(user: User, rootfs: pathlib.Path, hook: str, error: str) -> None:
    user.write("etc/hooks.d/50-bad.py", hook)
    status = 126 if "cannot run" in error else 1
    lines = user.penroot("start", "box", "true", status=status).stderr.splitlines()
    assert error in lines[0]
    assert [line.split()[0] for line in lines] == ["[ERROR]", "[HINT]"]


@pytest.mark.parity("start --pid", "--pid")
@pytest.mark.security("O1")
def test_pid_namespace(user: User, rootfs: pathlib.Path) -> None:
    assert user.start("--pid", "box", "sh", "-c", "echo $$").split()[0] == "1"
    user.penroot("start", "--pid", "box", "sh", "-c", "exit 7", status=7)


@pytest.mark.parity("start --pid", "--pid")
def test_pid_namespace_ends_with_its_parent(user: User, rootfs: pathlib.Path) -> None:
    with user.running("penroot", "start", "--pid", "box", "sleep", "600"):
        inside = wait_for_running(user)["pid"]
    until(lambda: not os.path.exists(f"/proc/{inside}"), "the end of the process")


def test_names_that_are_no_utf8(user: User, rootfs: pathlib.Path) -> None:
    """The names of a container and a program, which penroot reads in mountinfo and /proc/PID/stat, are not UTF-8."""
    odd = os.fsdecode(b"\xff\xfe")
    rootfs.rename(user.data / odd)
    (user.home / "bin").mkdir()
    (user.home / "bin" / odd).symlink_to(shutil.which("sleep") or "/bin/sleep")
    with user.running(str(user.home / "bin" / odd), "600"), user.running("penroot", "start", odd, "sleep", "600"):
        assert wait_for_running(user)
        assert user.start(odd, "echo", "in") == "in\n"
        assert r'"name": "\udcff\udcfe"' in user.penroot("list", "--format", "json").stdout


@pytest.mark.parity("/sys/class/net belongs to the network namespace", "start --net")
@pytest.mark.security("O3")
def test_network_namespace_has_a_loopback_only(user: User, rootfs: pathlib.Path) -> None:
    out = user.start("--net", "box", "sh", "-c", "ls /sys/class/net; cat /sys/class/net/lo/flags")
    names, flags = out.split()
    assert names == "lo"
    assert int(flags, 16) & 1


@pytest.mark.parametrize("options", [(), ("--root",), ("--pid",), ("--rw",)])
@pytest.mark.parametrize("target", ["box", "box.sqsh"])
def test_sys_shows_the_network_that_the_caller_entered(
    user: User, image: pathlib.Path, options: tuple[str, ...], target: str
) -> None:
    start = ("penroot", "start", *options, target, "sh", "-c", "ls /sys/class/net; touch /sys/x 2>&1")
    done = user.run("unshare", "-Urn", "sh", "-c", 'ip link add dummy7 type dummy; exec "$@"', "sh", *start, status=1)
    *devices, refused = done.stdout.splitlines()
    assert "lo" in devices and set(devices) <= {"dummy7", "lo"}, done.stdout
    assert "Read-only" in refused


@pytest.mark.parity("start --ipc", "10-devices: --ipc gives a minimal /dev")
@pytest.mark.security("O2")
def test_ipc_namespace_has_its_own_dev(user: User, rootfs: pathlib.Path) -> None:
    script = "readlink /proc/self/ns/ipc; ls /dev; echo x > /dev/shm/f; echo y > /dev/null"
    ipc, *names = user.start("--ipc", "box", "sh", "-c", script).split()
    assert ipc != os.readlink("/proc/self/ns/ipc")
    assert {"null", "zero", "urandom", "pts", "shm", "stdin"} <= set(names) and "fuse" not in names


@pytest.mark.parity("ENROOT_RESTRICT_DEV", "10-devices: ENROOT_RESTRICT_DEV gives a /dev with only standard devices")
@pytest.mark.security("O4")
def test_restricted_dev_has_only_standard_devices(user: User, rootfs: pathlib.Path) -> None:
    """With ENROOT_RESTRICT_DEV, a container has a /dev with only standard devices, and the host's shared memory."""
    environ = {"ENROOT_RESTRICT_DEV": "y"}
    out = user.start("box", "sh", "-c", "readlink /proc/self/ns/ipc; ls /dev; echo y > /dev/null", env=environ)
    ipc, *names = out.split()
    assert ipc == os.readlink("/proc/self/ns/ipc")
    assert {"null", "zero", "full", "random", "urandom", "tty", "pts", "shm", "fd", "ptmx"} <= set(names)
    assert not {"fuse", "console", "loop-control", "mem"} & set(names)


@pytest.mark.parity("10-devices: --ipc gives a minimal /dev")
def test_terminal_of_a_small_dev_is_its_console(user: User, rootfs: pathlib.Path) -> None:
    script = "penroot start --ipc box sh -c 'ls /dev/console && echo said > /dev/console'"
    out = user.run("script", "-qec", script, "/dev/null").stdout
    assert out.split() == ["/dev/console", "said"]


@pytest.mark.parity("start --explain (new)")
def test_explain_changes_nothing_and_names_sources(user: User, rootfs: pathlib.Path) -> None:
    before = snapshot(rootfs)
    scripts = [user.home / "etc/hooks.d/50-site.sh", user.home / "job.conf"]
    scripts[0].parent.mkdir(parents=True)
    for script in scripts:
        script.write_text("#!/bin/bash\n")
        script.chmod(0o755)
    conf = ("--conf", str(scripts[1]))
    out = user.start("--explain", *conf, "-e", "A=1", "-m", "/usr/share:/made/up", "--rw", "box", "true")
    assert snapshot(rootfs) == before
    lines = out.splitlines()
    assert any(line.startswith("mount    /usr/share /made/up none") and "--mount" in line for line in lines)
    assert "set      A=1  (--env)" in lines
    assert "set      FROM_IMAGE=yes  (/etc/environment of the image)" in lines
    assert any(line.startswith("hook     ") and "10-shadow" in line for line in lines)
    assert {f"hook     {script}" for script in scripts} <= set(lines)
    assert "setting  ENROOT_ROOTFS_WRITABLE=yes  (command line)" in lines
    assert lines[-1] == "run      true"


@pytest.mark.parity("start --explain (new)")
def test_explain_shows_what_would_fail(user: User, rootfs: pathlib.Path) -> None:
    done = user.penroot("start", "--explain", "-m", "/no/such:/x", "box", status=1)
    assert "cannot mount /no/such" in done.stderr
    assert "[HINT] " in done.stderr


RC = 'echo rc >&2\nif [ $# -gt 0 ]; then exec "$@"; fi\nexec echo none\n'


@pytest.mark.parity(
    "the image's PATH stays despite /etc/profile", "ENROOT_LOGIN_SHELL", "a login shell keeps the image's PATH"
)
@pytest.mark.parametrize("rc", [None, RC], ids=["no rc", "rc"])
@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("PATH=/nowhere\n", "/opt/bin:/bin:/usr/bin"),
        ("PATH=$PATH:/opt/more\n", "/opt/bin:/bin:/usr/bin:/opt/more"),
        ("", "/opt/bin:/bin:/usr/bin"),
    ],
    ids=["replaced", "added to", "left alone"],
)
def test_login_shell(user: User, rootfs: pathlib.Path, profile: str, expected: str, rc: str | None) -> None:
    """A login shell reads /etc/profile, but keeps the directories of the image's PATH."""
    (rootfs / "etc/profile").write_text(profile + "export FROM_PROFILE=yes\n")
    if rc:
        (rootfs / "etc/rc").write_text(rc)
    login = {"ENROOT_LOGIN_SHELL": "yes"}
    words = ("sh", "-c", 'echo "$FROM_PROFILE $PATH $1"', "sh", "a  b")
    assert user.start("box", *words, env=login) == f"yes {expected} a  b\n"
    assert user.start("box", "sh", "-c", "echo x$FROM_PROFILE") == "x\n"
    user.penroot("start", "box", "sh", "-c", "exit 7", env=login, status=7)


def test_login_shell_has_the_path_of_the_profile(user: User, rootfs: pathlib.Path) -> None:
    """A login shell has the PATH of /etc/profile if the image's environment sets no PATH."""
    (rootfs / "etc/environment").write_text("A=1\n")
    (rootfs / "etc/profile").write_text("export PATH=/bin:/opt/mine\n")
    assert user.start("box", "sh", "-c", "echo $PATH", env={"ENROOT_LOGIN_SHELL": "yes"}) == "/bin:/opt/mine\n"


LOGIN_DEFS = """\
# comment
ENV_PATH\tPATH=/bin:/opt/defs
ENV_SUPATH\tPATH=/bin:/opt/super
ENV_TZ\tTZ=Europe/Rome
UMASK\t\t027
ULIMIT 2048
MAIL_CHECK_ENAB yes
MAIL_DIR /var/mail
LASTLOG_ENAB yes
MOTD_FILE /etc/motd
"""


@pytest.mark.parity(
    "ENROOT_LOGIN_SHELL",
    "a login shell: respects login.defs",
)
def test_login_shell_respects_login_defs_of_the_image(user: User, rootfs: pathlib.Path) -> None:
    (rootfs / "etc/environment").write_text("LC_TIME=kept\n")
    (rootfs / "etc/login.defs").write_text(LOGIN_DEFS)
    (rootfs / "etc/locale.conf").write_text("LANG=it_IT.UTF-8\nLC_TIME='it_IT'\nOTHER=no\n")
    (rootfs / "etc/motd").write_text("message of the day\n")
    (rootfs / "var/log").mkdir(parents=True)
    (rootfs / "var/log/wtmp").write_text("")
    user.own(rootfs)
    login = {"ENROOT_LOGIN_SHELL": "yes"}
    script = "echo $PATH $TZ $LANG $LC_TIME x$OTHER; umask; ulimit -f; echo ${MAIL##*/}; "
    script += "test $PWD = $HOME && echo home"
    out = user.start("--rw", "box", "sh", "-c", script, env=login)
    assert out.split() == [
        *("/bin:/opt/defs", "Europe/Rome", "it_IT.UTF-8", "kept", "x", "0027", "2048", f"user{UID}", "home")
    ]
    assert (rootfs / "var/log/lastlog").stat().st_size == 292 * (UID + 1)
    assert (rootfs / "var/log/wtmp").stat().st_size == 384
    assert user.start("--root", "box", "sh", "-c", "echo $PATH", env=login) == "/bin:/opt/super\n"
    # Without a login shell, neither TZ nor umask is as in login.defs.
    assert user.start("box", "sh", "-c", "echo x$TZ; umask").split() == ["x", "0022"]
    terminal = "echo 'echo hello; exit' | script -qec 'penroot start box' /dev/null"
    assert "message of the day" in user.run("sh", "-c", terminal, env=login).stdout
    (rootfs / "etc/nologin").write_text("closed until noon\n")
    assert "closed until noon" in user.penroot("start", "box", "true", env=login, status=1).stderr
    user.start("--root", "box", "true", env=login)


def test_directives_are_settings_with_file_and_line(user: User, rootfs: pathlib.Path) -> None:
    text = "# ENROOT_REMAP_ROOT = yes\n#ENROOT_MAX_PROCESSORS $(nproc)\n#ENROOT_ROOTFS ${BOX}\n"
    conf = user.write("box.conf", text)
    environ = {"BOX": "box", "ENROOT_REMAP_ROOT": "no"}
    assert user.penroot("batch", str(conf), "id", "-u", env=environ).stdout == "0\n"
    out = user.penroot("start", "--explain", "-c", str(conf), "box", "true", env=environ).stdout
    assert f"setting  ENROOT_REMAP_ROOT=yes  ({conf}:1)" in out
    conf.write_text("mounts() { :; }\n#ENROOT_REMAP_ROOTS=yes\n")
    assert "box.conf:2: unknown key" in user.penroot("start", "-c", str(conf), "box", status=1).stderr


def running(user: User) -> list[dict[str, object]]:
    containers = json.loads(user.penroot("list", "--format", "json").stdout)
    return [{"name": c["name"], **p} for c in containers for p in c["processes"]]


def wait_for_running(user: User) -> dict[str, object]:
    return until(lambda: [p for p in running(user) if p["comm"] == "sleep"], "a running sleep")[0]


@pytest.fixture(params=[("box",), ("--rw", "box"), ("fuse", "box")], ids=["read-only", "writable", "fuse-overlayfs"])
def sleeping(request: pytest.FixtureRequest, user: User, rootfs: pathlib.Path) -> Iterator[dict[str, object]]:
    """Run a container, and yield the object of its process in ``list --format json``."""
    arguments = request.param
    if arguments[0] == "fuse":
        user.environ["ENROOT_NATIVE_OVERLAYFS"] = "no"
        arguments = arguments[1:]
    with user.running("penroot", "start", "-e", "MINE=1", *arguments, "sleep", "600"):
        yield wait_for_running(user)


@pytest.mark.parity("list --fancy, -f", "list --format json")
def test_list_shows_what_runs(user: User, sleeping: dict[str, object]) -> None:
    assert sleeping["name"] == "box"
    out = user.penroot("list", "-f").stdout.splitlines()
    assert out[0].split() == "NAME PID COMM STATE STARTED TIME MNTNS USERNS COMMAND".split()
    assert out[1].split()[:3] == ["box", str(sleeping["pid"]), "sleep"]
    assert out[1].endswith("sleep 600")


def test_data_path_that_is_a_bind_mount_is_listed(user: User, rootfs: pathlib.Path) -> None:
    """In mountinfo, the root of the mount differs from the data path, as with subvolumes and in nested containers."""
    moved = user.home / "moved"
    user.data.rename(moved)
    user.data.mkdir()
    subprocess.run(["mount", "--bind", str(moved), str(user.data)], check=True)
    try:
        with user.running("penroot", "start", "--rw", "box", "sleep", "600"):
            assert wait_for_running(user)["name"] == "box"
    finally:
        subprocess.run(["umount", "--lazy", str(user.data)], check=True)


@pytest.mark.parity("exec PID COMMAND", "exec: fails if the process does not exist")
def test_exec_by_pid_and_by_name(user: User, sleeping: dict[str, object]) -> None:
    for target in (str(sleeping["pid"]), "box"):
        script = "readlink /proc/self/ns/mnt; echo $MINE$MORE"
        done = user.penroot("exec", "-e", "MORE=2", target, "sh", "-c", script)
        assert done.stdout == f"mnt:[{sleeping['mntns']}]\n12\n"
    user.penroot("exec", "box", "sh", "-c", "exit 5", status=5)
    done = user.penroot("exec", "nope", "true", status=1)
    assert "no running container nope" in done.stderr


def test_exec_names_an_interpreter_that_cannot_run(user: User, sleeping: dict[str, object]) -> None:
    pid = str(sleeping["pid"])
    user.penroot("exec", pid, "sh", "-c", "echo '#!/opt/none/sh2' > /tmp/tool; busybox chmod 755 /tmp/tool")
    done = user.penroot("exec", pid, "/tmp/tool", status=127)
    assert "cannot run /tmp/tool: its interpreter /opt/none/sh2 does not exist in the container" in done.stderr


def test_exec_takes_a_number_for_a_job_before_a_pid(user: User, rootfs: pathlib.Path) -> None:
    """exec 1 enters the container of job 1. Without such a container, 1 is a PID."""
    step = ("-e", "SLURM_JOB_ID=1", "-e", "SLURM_STEP_ID=3")
    with user.running("penroot", "start", *step, "box", "sleep", "600"):
        wait_for_running(user)
        for target in ("1", "1.3"):
            assert user.penroot("exec", target, "echo", "found").stdout == "found\n"
        assert "no running container 1.4" in user.penroot("exec", "1.4", "true", status=1).stderr
    assert "cannot join process 1" in user.penroot("exec", "1", "true", status=1).stderr


def test_exec_of_a_process_outside_containers_is_refused(user: User, rootfs: pathlib.Path) -> None:
    with user.running("sleep", "600") as outside:
        stderr = user.penroot("exec", str(outside.pid), "true", status=1).stderr
        assert f"process {outside.pid} is not in a container" in stderr


def test_exec_by_pid_reads_no_other_container(user: User, rootfs: pathlib.Path) -> None:
    """exec PID opens as many files of /proc with four running containers as with one."""
    require(shutil.which("strace"), "strace is not installed")
    trace, counts, pid = user.home / "trace", [], ""
    started: list[subprocess.Popen[str]] = []

    def all_run() -> bool:
        return user.penroot("list", "-f").stdout.count(" sleep 600") == len(started)

    with contextlib.ExitStack() as stack:
        for more in (1, 3):
            box = (user.running("penroot", "start", "box", "sleep", "600") for _ in range(more))
            started += map(stack.enter_context, box)
            until(all_run, "the start of all containers")
            pid = pid or str(wait_for_running(user)["pid"])
            user.penroot("exec", pid, "true", prefix=("strace", "-f", "-qq", "-o", str(trace)))
            counts.append(trace.read_text().count('"/proc/'))
    assert counts[0] == counts[1]
