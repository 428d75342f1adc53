"""Build the SPANK plugin, and run its C code between a fake Slurm and a Python process.

spank_driver.c replaces Slurm, and spank_peer.py replaces penroot's Python process. Neither uses the code under test.
The driver is built with sanitizers.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from enroot_py.base.errors import ConfigError, PenrootError
from enroot_py.registry import reference
from pyxis_py.admin import cli, plugstack
from pyxis_py.admin.header import c_header
from pyxis_py.request import options
from tests.waiting import until

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = os.path.realpath(sys.executable)
USER = 2001
PROMPT_S = 30  # root waits for 3 s, but the delays of the peer take a minute
SANITIZED = "-g -O1 -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all".split()
# An option that makes srun start a Python process to check the options
NOT_PLAIN = "container-mount-home="

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd is root")


@dataclass
class Driver:
    """A stand-in for Slurm, in a directory that ordinary users can read."""

    directory: str

    def command(self, context: str, tasks: int, *words: str) -> list[str]:
        runtime = f"arg=runtime_path={self.directory}/run/pyxis"
        return [f"{self.directory}/driver", context, str(tasks), str(USER), runtime, *words]

    def run(self, context: str, tasks: int, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(context, tasks, *words),
            capture_output=True,
            text=True,
            timeout=250,
            cwd=self.directory,
            env={"PATH": "/usr/bin:/bin", "LANG": "C", "HOME": self.directory, **environ},
        )

    def journal(self) -> list[str]:
        """Return one entry for each request to a peer: the request, and the state of the peer's process."""
        with open(f"{self.directory}/journal") as file:
            return file.read().split("--\n")[:-1]


@pytest.fixture(scope="module")
def built() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="penroot-spank-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        os.makedirs(f"{directory}/lib/pyxis_py")
        shutil.copy(f"{HERE}/spank_peer.py", f"{directory}/lib/pyxis_py/helper.py")
        os.makedirs(f"{directory}/lib/enroot_py/base")
        for package in ("pyxis_py", "enroot_py", "enroot_py/base"):
            open(f"{directory}/lib/{package}/__init__.py", "w").close()
        pathlib.Path(f"{directory}/lib/enroot_py/base/pack.py").write_text("def load(verb): pass\n")
        with open(f"{directory}/options.h", "w") as header:
            header.write(c_header())
        compile_driver(directory, f"{directory}/driver", PYTHON, f"{directory}/lib", *SANITIZED)
        yield directory


def compile_driver(directory: str, output: str, python: str, library: str, *flags: str) -> None:
    sources = cli.source_directory()
    subprocess.run(
        [
            *("cc", "-std=gnu11", *flags),
            f'-DPENROOT_PYTHON="{python}"',
            f'-DPENROOT_LIB="{library}"',
            *(f"-I{path}" for path in (directory, sources, os.path.dirname(sources), cli.find_slurm(None))),
            *cli.sources_in(sources),
            *(f"{HERE}/spank_driver.c", "-o", output),
        ],
        check=True,
    )


@pytest.fixture
def driver(built: str) -> Iterator[Driver]:
    with open(f"{built}/journal", "w") as file:
        os.fchmod(file.fileno(), 0o666)
    shutil.rmtree(f"{built}/run", ignore_errors=True)
    yield Driver(built)
    until(lambda: not processes_of(built), "the end of all processes of the step")


def processes_of(directory: str) -> list[int]:
    pids = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if f"{directory}/lib".encode() in file.read().split(b"\0"):
                    pids.append(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids


def verbs(journal: list[str]) -> list[str]:
    return [entry.split("\n", 1)[0] for entry in journal]


# ---- building


def test_plugin_exports_only_symbols_of_slurm(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tempfile.TemporaryDirectory() as directory:
        output = f"{directory}/plugin.so"
        cli.build(output, python="/bin/sh", library="/usr/lib", include=cli.find_slurm(None))
        shown = subprocess.run(["nm", "-D", "--defined-only", output], capture_output=True, text=True, check=True)
        assert os.listdir(directory) == ["plugin.so"]
    names = {line.split()[-1] for line in shown.stdout.splitlines()}
    assert {"plugin_name", "plugin_type", "plugin_version", "slurm_spank_init", "slurm_spank_task_init"} <= names
    assert all(re.fullmatch(r"(spank_)?plugin_\w+|slurm_spank_\w+", name) for name in names)


def test_directory_closed_to_users_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        shutil.copy(PYTHON, f"{directory}/python3")
        with pytest.raises(ConfigError, match="closed to ordinary users"):
            cli.build(f"{directory}/x.so", python=f"{directory}/python3", library="/usr/lib", include="/usr/include")


def test_compiler_error_is_reported_and_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("include")
    (directory / "slurm").mkdir()
    (directory / "slurm/spank.h").write_text("#error not this Slurm\n")
    (directory / "slurm/slurm.h").write_text("")
    output = directory / "out"
    output.mkdir()
    with pytest.raises(PenrootError, match="cc failed"):
        cli.build(f"{output}/x.so", python="/bin/sh", library="/usr/lib", include=str(directory))
    assert os.listdir(output) == []


def test_missing_headers_name_the_package() -> None:
    with pytest.raises(ConfigError) as caught:
        cli.find_slurm("/nonexistent")
    assert "libslurm-dev" in caught.value.hint


def test_configure_keeps_the_file_of_the_site(tmp_path: os.PathLike[str]) -> None:
    directory = f"{tmp_path}/plugstack.conf.d"
    path = plugstack.configure(directory, "/lib/spank_pyxis.so", ["runtime_path=/x"])
    with open(path) as file:
        assert file.read() == "required /lib/spank_pyxis.so runtime_path=/x\n"
    with open(path, "w") as file:
        file.write("# ours\nrequired /lib/spank_pyxis.so container_scope=job\n")
    assert plugstack.configure(directory, "/lib/spank_pyxis.so", ()) == path
    with open(path) as file:
        assert file.read() == "# ours\nrequired /lib/spank_pyxis.so container_scope=job\n"
    with pytest.raises(ConfigError, match="loads another plugin"):
        plugstack.configure(directory, "/other/spank_pyxis.so", ())


# ---- submit


def test_submit_passes_options_to_a_clean_process(driver: Driver) -> None:
    words = ("container-image=ok", "container-mount-home=", "arg=sbatch_support=1")
    journal = {"PYXIS_JOURNAL": f"{driver.directory}/journal", "PYXIS_CONTAINER_WORKDIR": "/w", "SECRET": "x"}
    done = driver.run("srun", 0, *words, **journal)
    assert (done.returncode, done.stderr) == (0, "")
    (entry,) = driver.journal()
    lines = entry.splitlines()
    assert lines[:2] == ["verb check", "context srun"]
    assert "option container-image=ok" in lines and "option container-mount-home=" in lines
    assert "arg sbatch_support=1" in lines
    assert f"cwd {driver.directory}" in lines
    assert "environ PYXIS_CONTAINER_WORKDIR=/w" in lines
    assert not any("SECRET" in line for line in lines)
    assert "environment LC_ALL PATH" in lines
    assert "fds 0 1 2 3 4" in lines
    assert "SigBlk:\t0000000000000000" in lines


@pytest.mark.parametrize(
    ("image", "resolved"),
    [
        ("ok", "nothing"),
        ("later-resolved", "later-resolved sha256:d"),
        ("later-unknown", "nothing"),
        ("later-silent", "nothing"),
    ],
)
def test_srun_sends_resolved_tags_to_its_nodes(driver: Driver, image: str, resolved: str) -> None:
    done = driver.run("srun", 0, f"container-image={image}", SLURM_PYXIS_RESOLVED="of a step around this one")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"resolved {resolved}\nchildren none\n"


@pytest.mark.parametrize("context", ["srun", "sbatch"])
def test_submit_fails_with_the_error_and_the_hint(driver: Driver, context: str) -> None:
    done = driver.run(context, 0, "container-image=error", NOT_PLAIN)
    assert done.returncode == 1
    assert done.stderr == "error: pyxis: no such thing\nerror: pyxis: try another thing\n"


def test_a_variable_alone_is_checked(driver: Driver) -> None:
    done = driver.run("sbatch", 0, PYXIS_CONTAINER_UNSHARE="net", PYXIS_JOURNAL=f"{driver.directory}/journal")
    assert done.returncode == 0
    assert verbs(driver.journal()) == ["verb check"]


@pytest.mark.security("H17")
def test_scrontab_is_refused(driver: Driver) -> None:
    """scrontab accepts plugins' options in #SCRON lines, but ignores them: _entry_to_job() in Slurm's scrontab.c."""
    os.link(f"{driver.directory}/driver", f"{driver.directory}/scrontab")
    try:
        scrontab = [f"{driver.directory}/scrontab", *driver.command("sbatch", 0, "container-mounts=/usr")[1:]]
        done = subprocess.run(scrontab, capture_output=True, text=True, timeout=250, check=False)
    finally:
        os.unlink(f"{driver.directory}/scrontab")
    assert done.returncode == 3  # the option fails, so scrontab reports an error and installs no crontab
    assert (
        "pyxis: --container-mounts: scrontab drops the options of plugins, and the job would run outside" in done.stderr
    )


def test_without_options_no_process_is_started(driver: Driver) -> None:
    journal = {"PYXIS_JOURNAL": f"{driver.directory}/journal", "PYXIS_OTHER": "1"}
    assert driver.run("srun", 0, **journal).returncode == 0
    assert driver.journal() == []


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            "crash",
            "RuntimeError: the sky fell\n"
            "error: pyxis: the helper process of the container ended without an answer: run pyxis-py check",
        ),
        ("silent", "the helper process of the container ended without an answer: killed? see --mem and dmesg"),
        ("garbage", "no answer from the helper process of the container: Bad message"),
        ("huge", "no answer from the helper process of the container: Bad message"),
    ],
)
def test_failing_check_process_is_an_error(driver: Driver, image: str, message: str) -> None:
    done = driver.run("srun", 0, f"container-image={image}", NOT_PLAIN)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("error", "error: pyxis: "),
        ("crash", "RuntimeError: the sky fell"),
        ("garbage", "no answer from the helper process of the container: Bad message"),
    ],
)
def test_failure_of_srun_is_shown_and_left_to_nodes(driver: Driver, image: str, message: str) -> None:
    """srun resolves a tag for the nodes. If this fails, srun shows the error, and the nodes resolve the tag."""
    done = driver.run("srun", 0, f"container-image={image}")
    assert (done.returncode, done.stdout) == (0, "resolved nothing\nchildren none\n")
    assert message in done.stderr


CHECKED, PLAIN, PLAIN_TAG = "0\n", "1\n", "2\n"  # the results of plain.c that the driver prints


@pytest.mark.parametrize(
    "words",
    [
        ("container-name=work",),
        ("container-name=Work_1.2-3",),
        ("container-image=./x.sqsh",),
        ("container-image=/data/a-b/x_1.sqsh", "container-name=work"),
    ],
)
def test_plain_options_need_no_check_by_srun(driver: Driver, words: tuple[str, ...]) -> None:
    done = driver.run("judge", 0, *words)
    request = options.parse([(word.partition("=")[0], word.partition("=")[2]) for word in words], {}, "/")
    assert not options.ignored(request)
    assert not request.is_reference("/") and not request.sent
    assert done.stdout == PLAIN


@pytest.mark.parametrize(
    "image",
    [
        *(
            "ubuntu",
            "ubuntu:24.04",
            "ubuntu:Some_tag.1-x",
            "docker://ubuntu",
            "docker://ubuntu:a",
            "a.b-c_d/e/f:g",
            "a:" + "x" * 126,
        ),
        *(
            "nvcr.io#nvidia/pytorch:24.05-py3",
            "nvcr.io/nvidia/pytorch:24.05-py3",
            "docker://h:5000#a",
            "5000#x",
            "a.sqsh/b",
        ),
    ],
)
def test_plain_tag_needs_no_check_by_srun(driver: Driver, image: str) -> None:
    words = (f"container-image={image}", "container-name=a")
    request = options.parse([(word.partition("=")[0], word.partition("=")[2]) for word in words], {}, "/")
    assert not options.ignored(request)
    assert request.is_reference("/") and not request.sent
    assert isinstance(reference.parse(image), reference.Reference)
    assert driver.run("judge", 0, *words).stdout == PLAIN_TAG
    for word in ("--async", "--het-group=0,1", "--pack-group=1", ":"):
        assert driver.run("judge", 0, *words, word).stdout == CHECKED


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("container-mounts=/usr",),
        ("container-name=a", "container-name=b"),
        ("container-name=a", NOT_PLAIN),
        *(
            (f"container-name={name}",)
            for name in ("", "a:create", "a/b", "a b", "\N{SNOWMAN}", "a\n", "x" * 129, "a,b", "a%")
        ),
        *(
            (f"container-image={image}",)
            for image in (
                *("", ".", "/", "./", "x.sqsh", "a.b/x.sqsh", "~/x.sqsh", "/x y.sqsh", "/tmp/", "/tmp/x", "./..sqsh/"),
                *(
                    "Ubuntu",
                    "ubuntu:",
                    "ubuntu:.x",
                    "ubuntu:a/b",
                    "a//b",
                    "a/",
                    "/a",
                    "a:b:c",
                    "a@sha256:1",
                    "docker://",
                    "docker://docker://a",
                    "a-",
                    "a-/b",
                    "a:",
                ),
                *("#a", ":5#a", "h:#a", "h:99999#a", "-h#a", "H#a", "me@h#a", "h##a", "h#", "bcast:a", "bcast:5000#x"),
                *("h:+1#a", "h:0#a", "h/x.sqsh", "oci:a", "oci-archive:a", "docker-archive:a", "h:5:6#a"),
                *("a:" + "x" * 127, "a\n", "dockerd://a", "a..b", "a$b", "\N{SNOWMAN}"),
            )
        ),
        *(("container-name=a", word) for word in ("-v", "-vv", "--verbose", "--wait-for-children")),
        ("container-name=a", ":"),
    ],
)
def test_srun_checks_other_options(driver: Driver, words: tuple[str, ...]) -> None:
    assert driver.run("judge", 0, *words).stdout == CHECKED


@pytest.mark.parametrize("word", ["container-image=a", "container-image=/x.sqsh"])
def test_policy_of_the_user_needs_a_check(driver: Driver, word: str) -> None:
    directory = os.path.join(driver.directory, ".config/enroot")
    os.makedirs(directory)
    assert driver.run("judge", 0, word).stdout != CHECKED
    os.symlink("nowhere", f"{directory}/policy.json")
    try:
        assert driver.run("judge", 0, word).stdout == CHECKED
        assert driver.run("judge", 0, word, XDG_CONFIG_HOME="/nowhere").stdout != CHECKED
        assert driver.run("judge", 0, word, HOME="/", XDG_CONFIG_HOME=f"{driver.directory}/.config").stdout == CHECKED
        assert driver.run("judge", 0, word, HOME="").stdout == CHECKED
    finally:
        shutil.rmtree(os.path.dirname(directory))


@pytest.mark.parametrize("variable", ["PYXIS_CONTAINER_MOUNTS", "PYXIS_PINNED", "ENROOT_LOCK", "PENROOT_X"])
def test_variable_that_changes_the_image_needs_a_check(driver: Driver, variable: str) -> None:
    assert driver.run("judge", 0, "container-name=a", **{variable: "x"}).stdout == CHECKED
    assert driver.run("judge", 0, "container-name=a", **{f"OTHER_{variable}": "x"}).stdout == PLAIN


def test_log_lines_go_where_their_level_says(driver: Driver) -> None:
    done = driver.run("srun", 0, "container-image=log")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "info: pyxis: a line of info",
        "user: pyxis: a line of warn",
        "error: pyxis: a line of error",
    ]


# ---- a step on a node


@pytest.mark.parity("all tasks of a step on a node share one container")
@as_root
def test_all_tasks_enter_one_container(driver: Driver) -> None:
    words = ("container-image=ok", "env=LANG=C", f"env=JOURNAL={driver.directory}/journal")
    done = driver.run("stepd", 4, *words)
    assert (done.returncode, done.stderr) == (0, "")
    for task in range(4):
        lines = [line[2:] for line in done.stdout.splitlines() if line.startswith(f"{task} ")]
        assert "cwd /usr" in lines
        assert "env FROM_IMAGE=two words" in lines and "env EMPTY=" in lines
        assert not any(line.startswith("env LANG") for line in lines)
        assert "CapEff:\t0000000000000000" in lines
        assert "NoNewPrivs:\t1" in lines and "Seccomp:\t2" in lines
        assert "setuid(0) 0" in lines  # the filter reports success, but the call has no effect
        assert "close-on-exec 1 0" in lines  # 1 for a directory, 0 for a file
    for kind, is_host in {"user": False, "mnt": False, "cgroup": False, "uts": True}.items():
        links = set(re.findall(rf"ns ({kind}:\S+)", done.stdout))
        assert len(links) == 1
        assert (links == {os.readlink(f"/proc/self/ns/{kind}")}) is is_host
    assert sorted(verbs(driver.journal())) == ["verb finish", "verb join", "verb join", "verb join", "verb step"]


@pytest.mark.parity("the process that sets up a container runs as the user")
@as_root
def test_the_helper_is_the_user_and_inherits_nothing(driver: Driver) -> None:
    assert driver.run("stepd", 1, "container-image=ok", f"env=JOURNAL={driver.directory}/journal").returncode == 0
    step, finish = (entry.splitlines() for entry in driver.journal())
    for lines in (step,):
        assert f"Uid:\t{USER}\t{USER}\t{USER}\t{USER}" in lines
        assert f"Gid:\t{USER}\t{USER}\t{USER}\t{USER}" in lines
        assert f"Groups:\t44 {USER} " in lines
        assert "fds 0 1 2 3 4" in lines
        assert "environment LC_ALL PATH" in lines
        assert "stdio /dev/null /dev/null /memfd:penroot-log (deleted)" in lines
        assert {"jobid 7", "stepid 3", f"uid {USER}", f"gid {USER}", "localtasks 1"} <= set(lines)
        assert f"cwd {driver.directory}" in lines  # the job's directory; the process itself is in /
        assert any(line.endswith("umask 22 cwd /") for line in lines)
    assert {"taskid 0", "procid 100"} <= set(step)
    assert "failed 0" in finish


@pytest.mark.parity("directories of a user have mode 0700", "runtime_path")
@as_root
def test_user_gets_a_private_directory(driver: Driver) -> None:
    for _ in range(2):
        assert driver.run("stepd", 1, "container-image=ok").returncode == 0
        info = os.stat(f"{driver.directory}/run/pyxis/{USER}")
        assert (info.st_uid, info.st_mode & 0o7777) == (USER, 0o700)
    assert os.stat(f"{driver.directory}/run/pyxis").st_mode & 0o7777 == 0o755


@pytest.mark.parity("sbatch: the script is mounted read-only at its own path")
@as_root
def test_a_batch_script_is_named(driver: Driver) -> None:
    script = "/var/spool/slurmd/job00007/slurm_script"
    words = ("container-image=ok", f"batch={script}", f"env=JOURNAL={driver.directory}/journal")
    assert driver.run("stepd", 1, *words).returncode == 0
    assert f"command {script}" in driver.journal()[0].splitlines()


@as_root
def test_a_variable_of_the_job_asks_for_a_container(driver: Driver) -> None:
    done = driver.run("stepd", 1, "env=PYXIS_CONTAINER_IMAGE=ok")
    assert "NoNewPrivs:\t1" in done.stdout


@as_root
@pytest.mark.parametrize("words", [(), ("container-mounts=/a",), ("env=PYXIS_CONTAINER_MOUNTS=/a",)])
def test_a_step_without_image_or_name_is_left_alone(driver: Driver, words: tuple[str, ...]) -> None:
    done = driver.run("stepd", 1, *words, f"env=JOURNAL={driver.directory}/journal")
    assert done.returncode == 0
    assert "NoNewPrivs:\t0" in done.stdout
    assert driver.journal() == []
    assert not os.path.exists(f"{driver.directory}/run")


@pytest.mark.parity("if the set-up fails, one task reports the error")
@as_root
def test_one_task_reports_the_error_and_none_runs(driver: Driver) -> None:
    done = driver.run("stepd", 4, "container-image=step-error", f"env=JOURNAL={driver.directory}/journal")
    assert done.returncode == 5
    assert done.stdout == ""
    node = os.uname().nodename.partition(".")[0]
    assert done.stderr == f"error: pyxis: {node}: no such thing\nerror: pyxis: {node}: try another thing\n"
    assert verbs(driver.journal()) == ["verb step", "verb finish"]
    assert "failed 1" in driver.journal()[1]


@as_root
def test_error_of_a_silent_task_is_shown_by_another(driver: Driver) -> None:
    """With srun --pty, stderr is /dev/null for all tasks but one."""
    done = driver.run("stepd", 3, "container-image=step-error", "pty=")
    node = os.uname().nodename.partition(".")[0]
    assert done.stderr == f"error: pyxis: {node}: no such thing\nerror: pyxis: {node}: try another thing\n"


@as_root
def test_a_bad_workdir_is_named(driver: Driver) -> None:
    done = driver.run("stepd", 2, "container-image=ok", "container-workdir=/nonexistent")
    assert done.returncode == 5
    assert "working directory in the container (--container-workdir): /nonexistent: No such file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parity("directories of a user have mode 0700", "a bad runtime_path or a failed clean-up drains no node")
@as_root
def test_impossible_runtime_path_fails_only_the_task(driver: Driver) -> None:
    """The error fails the tasks, and does not drain the node."""
    done = driver.run("stepd", 2, "container-image=ok", "arg=runtime_path=/proc/nope")
    assert done.returncode == 5
    assert "cannot make the directory /proc/nope/2001: No such file or directory" in done.stderr


@pytest.mark.security("U10")
@as_root
@pytest.mark.parametrize("defect", ["of another user", "open", "a link of another user's"])
def test_runtime_path_that_root_does_not_own_is_refused(driver: Driver, defect: str) -> None:
    """The owner of such a path could replace the directory of each user."""
    path = f"{driver.directory}/{defect}".replace(" ", "-")
    if defect.startswith("a link"):
        os.symlink(driver.directory, path)
    else:
        os.mkdir(path)
        os.chmod(path, 0o777 if defect == "open" else 0o755)
    if defect != "open":
        os.chown(path, USER, USER, follow_symlinks=False)
    done = driver.run("stepd", 2, "container-image=ok", f"arg=runtime_path={path}")
    assert done.returncode == 5
    assert f"cannot make the directory {path}/{USER}: Operation not permitted" in done.stderr
    assert not os.path.lexists(f"{path}/{USER}")


@pytest.mark.security("H7")
@as_root
def test_error_of_slurm_fails_the_tasks(driver: Driver) -> None:
    """If Slurm returns an error and plugstack.conf has "optional", the tasks must not run outside a container."""
    done = driver.run("stepd", 2, "container-image=ok", "mute=")
    assert (done.returncode, done.stdout) == (5, "")
    assert "cannot get the job from Slurm: Error" in done.stderr


@as_root
@pytest.mark.parametrize("kind", ["nothing", "a directory", "a pipe", "a link", "no text"])
def test_invalid_script_is_skipped(driver: Driver, kind: str) -> None:
    """The user may replace the script while the task reads it."""
    path = f"{driver.directory}/script"
    {
        "nothing": lambda: None,
        "a directory": lambda: os.mkdir(path),
        "a pipe": lambda: os.mkfifo(path),
        "a link": lambda: os.symlink("/dev/zero", path),
        "no text": lambda: pathlib.Path(path).write_bytes(
            b"#SBATCH --container-image\0x\n#SBATCH\0" + bytes(range(256)) * 999
        ),
    }[kind]()
    try:
        done = driver.run("stepd", 1, f"batch={path}")
    finally:
        subprocess.run(["rm", "-rf", path], check=True)
    assert "Sanitizer" not in done.stderr
    assert done.returncode == (5 if kind == "no text" else 0)


@as_root
def test_tasks_that_need_a_vanished_helper_fail(driver: Driver) -> None:
    done = driver.run("stepd", 3, "container-image=ok", "env=VANISH=1")
    assert done.returncode == 5
    why = "the helper process of the container (is gone: No such process|ended without an answer)"
    assert re.search(why, done.stderr)
    assert done.stdout.count("NoNewPrivs:\t1") == 1


@pytest.mark.security("H1")
@as_root
@pytest.mark.parametrize("variable", ["NOWHERE=1", "HOST=1"])
def test_helper_that_sends_no_container_fails_the_task(driver: Driver, variable: str) -> None:
    done = driver.run("stepd", 2, "container-image=ok", f"env={variable}")
    assert (done.returncode, done.stdout) == (5, "")
    assert "the helper sent no mount namespace of a container" in done.stderr


@as_root
def test_step_that_never_started_is_not_finished(driver: Driver) -> None:
    assert driver.run("stepd", 0, "container-image=ok", f"env=JOURNAL={driver.directory}/journal").returncode == 0
    assert driver.journal() == []


@pytest.mark.security("R8")
@as_root
@pytest.mark.parametrize("behaviour", ["flood", "trickle", "sleep", "give", "swell"])
def test_hostile_helper_delays_root_only_briefly(driver: Driver, behaviour: str) -> None:
    began = time.monotonic()
    done = driver.run("stepd", 1, "container-image=ok", "env=KILLED=1", f"env=FINISH={behaviour}")
    assert time.monotonic() - began < PROMPT_S
    assert "Sanitizer" not in done.stderr, done.stderr
    assert len(done.stderr) < 20_000
    assert all(c.isprintable() or c == "\n" for c in done.stderr)
    assert all(line.startswith(("error: pyxis: ", "info: pyxis: ")) for line in done.stderr.splitlines()), done.stderr


@as_root
def test_leftover_process_of_a_helper_does_not_delay_root(driver: Driver) -> None:
    """A process outside the step's cgroups keeps the helper's socket, and writes for a minute."""
    began = time.monotonic()
    done = driver.run("stepd", 1, "container-image=ok", "env=SAVES=1", "env=FINISH=bequeath")
    assert time.monotonic() - began < PROMPT_S
    assert "did not end in time" not in done.stderr


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


@as_root
@pytest.mark.skipif(kernel() < (6, 16), reason="SO_PASSRIGHTS")
def test_root_does_not_wait_for_a_lingering_socket(driver: Driver) -> None:
    began = time.monotonic()
    driver.run("stepd", 1, "container-image=ok", "env=KILLED=1", "env=FINISH=linger")
    assert time.monotonic() - began < PROMPT_S


@as_root
def test_a_step_that_never_began_is_finished_in_time(driver: Driver) -> None:
    """The step has failed before its tasks began, so Slurm does not end its processes."""
    began = time.monotonic()
    driver.run("stepd", 1, "container-image=step-error", "env=FINISH=late")
    assert time.monotonic() - began < PROMPT_S


@as_root
def test_file_system_mounted_by_the_user_is_not_opened(driver: Driver) -> None:
    directory = f"{driver.directory}/run/pyxis/{USER}"
    os.makedirs(directory)
    os.chown(directory, USER, USER)
    fuse = os.open("/dev/fuse", os.O_RDWR)
    words = f"fd={fuse},rootmode=40000,user_id={USER},group_id={USER},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"silent", directory.encode(), b"fuse", 0, words.encode()) == 0, os.strerror(ctypes.get_errno())
    try:
        done = driver.run("stepd", 1, "container-image=ok")
    finally:
        libc.umount2(directory.encode(), 2)
        os.close(fuse)
    assert done.returncode == 5
    assert f"cannot make the directory {directory}: Invalid cross-device link" in done.stderr


@pytest.mark.security("R8")
@as_root
def test_helper_that_names_another_process_is_refused(driver: Driver) -> None:
    """Root would wait for the named process, or kill it."""
    with subprocess.Popen(["sleep", "1000"]) as other:
        with open(f"/proc/{other.pid}/stat") as stat:
            started = stat.read().rpartition(")")[2].split()[19]
        words = ("env=KILLED=1", f"env=CLAIM={other.pid} {started}", f"env=JOURNAL={driver.directory}/journal")
        driver.run("stepd", 1, "container-image=ok", *words)
        assert other.poll() is None
        other.kill()
    assert verbs(driver.journal()) == ["verb step", "verb finish"]  # a second process got "finish"


@pytest.mark.security("R3")
@as_root
def test_process_started_by_root_is_closed_to_its_user(driver: Driver) -> None:
    words = ("env=VANISH=1", f"env=JOURNAL={driver.directory}/journal")
    assert driver.run("stepd", 1, "container-image=ok", *words).returncode == 0
    finish = driver.journal()[1].splitlines()
    # The real GID differs, so ptrace(2) fails, and the process is not dumpable from its first instruction on.
    assert f"Gid:\t65534\t{USER}\t{USER}\t{USER}" in finish and f"Uid:\t{USER}\t{USER}\t{USER}\t{USER}" in finish


@pytest.mark.security("R8")
def test_stderr_of_a_process_is_bounded(driver: Driver) -> None:
    done = driver.run("srun", 0, "container-image=chatter", NOT_PLAIN)
    assert done.returncode == 1
    assert len(done.stderr) < 10_000


@pytest.mark.parametrize(
    ("python", "library", "error"),
    [
        ("/nonexistent/python3", "lib", "cannot execute /nonexistent/python3: No such file or directory"),
        ("/etc/passwd", "lib", "cannot execute /etc/passwd: Permission denied"),
        (PYTHON, "none", "cannot load penroot from {}/none: No module named 'pyxis_py'"),
    ],
)
@as_root
def test_error_names_why_python_cannot_start(built: str, python: str, library: str, error: str) -> None:
    compile_driver(built, f"{built}/other", python, f"{built}/{library}")
    command = [f"{built}/other", "stepd", "2", str(USER), f"arg=runtime_path={built}/run/pyxis", "container-image=ok"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 5
    assert error.format(built) in done.stderr.splitlines()[0]
    assert "killed" not in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 2, done.stderr


def start_slowly(driver: Driver, tasks: int) -> tuple[subprocess.Popen[str], int]:
    """Start a step whose first task waits for its helper until open_gate(). Return the step and that task's PID."""
    pathlib.Path(f"{driver.directory}/gate").unlink(missing_ok=True)
    words = ("container-image=ok", f"env=GATE={driver.directory}/gate", f"env=JOURNAL={driver.directory}/journal")
    pipe = subprocess.PIPE
    step = subprocess.Popen(driver.command("stepd", tasks, *words), stdout=pipe, stderr=pipe, text=True)
    until(driver.journal, "a request to the helper")
    (task,) = re.findall(r"^taskid (\d+)$", driver.journal()[0], re.MULTILINE)
    helpers = processes_of(driver.directory)
    return step, [pid for pid in children_of(step.pid) if pid not in helpers][int(task)]


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def open_gate(driver: Driver) -> None:
    pathlib.Path(f"{driver.directory}/gate").touch()


@as_root
def test_next_task_takes_over_from_one_killed_in_setup(driver: Driver) -> None:
    step, starter = start_slowly(driver, 3)
    os.kill(starter, signal.SIGKILL)
    until(lambda: len(driver.journal()) == 2, "a request to a second helper")
    open_gate(driver)
    out, err = step.communicate(timeout=250)
    assert step.returncode == 5
    assert err == ""
    assert out.count("NoNewPrivs:\t1") == 2
    assert sorted(verbs(driver.journal())) == ["verb finish", "verb join", "verb step", "verb step"]


@as_root
def test_helper_killed_in_setup_fails_all_with_one_line(driver: Driver) -> None:
    step, _ = start_slowly(driver, 3)
    (helper,) = processes_of(driver.directory)
    os.kill(helper, signal.SIGKILL)
    out, err = step.communicate(timeout=250)
    assert (step.returncode, out) == (5, "")
    assert err.splitlines()[0].endswith(
        "the helper process of the container ended without an answer: killed? see --mem and dmesg"
    )
    assert len(err.splitlines()) == 1


@as_root
def test_helper_ends_when_slurmstepd_is_killed(driver: Driver) -> None:
    step, starter = start_slowly(driver, 1)
    os.kill(step.pid, signal.SIGKILL)
    os.kill(starter, signal.SIGKILL)
    open_gate(driver)
    step.communicate(timeout=250)
    # The fixture waits until no process is left.


# ---- the helper that slurmstepd starts before the first task ("ahead")


@pytest.fixture
def ahead(driver: Driver) -> Iterator[pathlib.Path]:
    """Return the file that selects the behaviour of a peer that was started before the first task."""
    path = pathlib.Path(f"{driver.directory}/lib/ahead")
    yield path
    path.unlink(missing_ok=True)


def started_as(driver: Driver) -> list[str]:
    return re.findall(r"^started as (\w+)$", "".join(driver.journal()), re.MULTILINE)


@contextmanager
def held(driver: Driver, *words: str) -> Iterator[tuple[subprocess.Popen[str], int, pathlib.Path]]:
    """Start a step that starts its tasks when a file exists. Yield the step, the PID of its helper, and the file."""
    hold = pathlib.Path(f"{driver.directory}/hold")
    hold.unlink(missing_ok=True)
    fixed_words = ("container-image=ok", f"hold={hold}", f"env=JOURNAL={driver.directory}/journal")
    pipe = subprocess.PIPE
    step = subprocess.Popen(driver.command("stepd", 2, *fixed_words, *words), stdout=pipe, stderr=pipe, text=True)
    try:
        until(
            lambda: any(belongs_to_user(pid) for pid in processes_of(driver.directory)),
            "the helper runs as the user",
        )
        (helper,) = processes_of(driver.directory)
        yield step, helper, hold
    finally:
        hold.touch()
        step.communicate(timeout=250)


def belongs_to_user(pid: int) -> bool:
    return f"\nUid:\t{USER}\t{USER}\t{USER}\t{USER}\n" in pathlib.Path(f"/proc/{pid}/status").read_text()


def as_user(*command: str) -> int:
    return subprocess.run(command, user=USER, group=USER, extra_groups=[], capture_output=True, check=False).returncode


@as_root
def test_helper_starts_before_the_first_task(driver: Driver) -> None:
    done = driver.run("stepd", 3, "container-image=ok", f"env=JOURNAL={driver.directory}/journal")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(started_as(driver)) == {"ahead"}  # one process gets all requests
    assert sorted(verbs(driver.journal())) == ["verb finish", "verb join", "verb join", "verb step"]


@pytest.mark.security("R4")
@as_root
def test_waiting_helper_is_closed_and_has_no_secret(driver: Driver) -> None:
    with held(driver) as (_, helper, _):
        status = pathlib.Path(f"/proc/{helper}/status").read_text()
        assert f"\nGid:\t65534\t{USER}\t{USER}\t{USER}\n" in status
        for name in ("mem", "environ", "maps", "fd/3", "ns/mnt"):
            assert as_user("head", "-c0", f"/proc/{helper}/{name}") == 1
        opened = {path.name: str(path.readlink()) for path in pathlib.Path(f"/proc/{helper}/fd").iterdir()}
        # libffi 3.5 keeps its own file, which is world-readable, open for its trampolines.
        assert sorted(fd for fd in opened if "/libffi.so." not in opened[fd]) == ["0", "1", "2", "3", "4"], opened
        assert os.getsid(helper) == helper
        assert as_user("kill", "-CONT", str(helper)) == 0  # the user may send signals to the process, and it exists


@pytest.mark.security("R4")
@as_root
@pytest.mark.parametrize("signal_", ["KILL", "TERM"])
def test_helper_killed_before_the_first_task_is_replaced(driver: Driver, signal_: str) -> None:
    with held(driver) as (step, helper, hold):
        assert as_user("kill", f"-{signal_}", str(helper)) == 0
        until(lambda: not processes_of(driver.directory), "the end of the helper")
        hold.touch()
        out, err = step.communicate(timeout=250)
    assert (step.returncode, err) == (0, "")
    assert out.count("NoNewPrivs:\t1") == 2
    assert set(started_as(driver)) == {"step"}


@pytest.mark.security("R4")
@as_root
def test_output_of_a_helper_before_the_first_task_is_bounded(driver: Driver, ahead: pathlib.Path) -> None:
    ahead.write_text("chatter")
    done = driver.run("stepd", 1, "container-image=crash", f"env=JOURNAL={driver.directory}/journal")
    assert done.returncode == 5
    assert len(done.stderr) < 10_000
    assert started_as(driver)[0] == "ahead"


@pytest.mark.security("R4")
@as_root
def test_unresponsive_helper_is_killed_if_no_task_comes(driver: Driver, ahead: pathlib.Path) -> None:
    ahead.write_text("unresponsive")
    assert driver.run("stepd", 0, "container-image=ok").returncode == 0
    # The fixture waits until no process is left.


@pytest.mark.security("R4")
@as_root
def test_unresponsive_helper_is_killed_when_a_task_asks_it(driver: Driver, ahead: pathlib.Path) -> None:
    ahead.write_text("unresponsive")
    with held(driver) as (step, helper, hold):
        os.kill(helper, signal.SIGSTOP)
        hold.touch()
        until(lambda: len(children_of(step.pid)) == 3, "the start of both tasks")
        for task in children_of(step.pid):
            if task != helper:
                os.kill(task, signal.SIGKILL)
        step.communicate(timeout=250)
        assert step.returncode == 5
    # The fixture waits until no process is left.


@pytest.mark.security("R4")
@as_root
def test_helper_of_another_namespace_is_not_used(driver: Driver) -> None:
    done = driver.run("stepd", 2, "container-image=ok", "unshare=", f"env=JOURNAL={driver.directory}/journal")
    assert (done.returncode, done.stderr) == (0, "")
    assert set(started_as(driver)) == {"step"}


@pytest.mark.security("R4")
@as_root
def test_helper_without_a_task_ends_with_slurmstepd(driver: Driver) -> None:
    with held(driver) as (step, _, _):
        os.kill(step.pid, signal.SIGKILL)
        until(lambda: not processes_of(driver.directory), "the end of the helper")


@pytest.mark.parity("uninstall")
def test_uninstall_keeps_files_of_the_site(tmp_path: pathlib.Path) -> None:
    directory = str(tmp_path)
    path = plugstack.configure(directory, "/lib/spank_pyxis.so", ())
    (tmp_path / "other.conf").write_text("optional /x/other.so\n")
    assert plugstack.unconfigure(directory, "/lib/spank_pyxis.so") == [path]
    assert os.listdir(directory) == ["other.conf"]
    (tmp_path / "other.conf").write_text("optional /x/other.so\nrequired /lib/spank_pyxis.so\n")
    with pytest.raises(ConfigError, match="other.conf loads /lib/spank_pyxis.so"):
        plugstack.unconfigure(directory, "/lib/spank_pyxis.so")
    assert plugstack.unconfigure(f"{directory}/none", "/lib/spank_pyxis.so") == []


def test_a_plugin_that_slurm_still_loads_stays(tmp_path: pathlib.Path) -> None:
    """If a required plugin were missing, tasks would fail on all nodes."""
    (tmp_path / "plugstack.conf").write_text("include used.d/*\n")
    for name in ("used.d", "slip.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "used.d/10-site.conf").write_text("required /lib/spank_pyxis.so\n")
    with pytest.raises(ConfigError, match="used.d/10-site.conf:1 loads /lib/spank_pyxis.so") as caught:
        plugstack.check_unused("/lib/spank_pyxis.so", str(tmp_path / "slip.d"))
    assert caught.value.hint == f"first: pyxis-py uninstall --plugstack-dir {tmp_path}/used.d"
    plugstack.check_unused("/lib/spank_pyxis.so", str(tmp_path / "used.d"))
    plugstack.check_unused("/lib/other.so", str(tmp_path / "slip.d"))


def test_install_creates_no_unknown_directory(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="there is no .*/typo, and no slurm.conf beside it"):
        plugstack.check_place(f"{tmp_path}/typo")
    (tmp_path / "slurm.conf").touch()
    plugstack.check_place(f"{tmp_path}/plugstack.conf.d")
    plugstack.check_place(str(tmp_path))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pyxis.conf").symlink_to("nowhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pyxis-py", "uninstall", "--plugstack-dir", str(tmp_path)])
        with pytest.raises(SystemExit, match="1"):
            cli.main()
    assert capsys.readouterr().err == f"[ERROR] cannot write or read {tmp_path}/pyxis.conf: No such file or directory\n"


@pytest.mark.parametrize("output", ["none/x.so", "."])
def test_unwritable_output_is_named(tmp_path: pathlib.Path, output: str) -> None:
    path = f"{tmp_path}/{output}"
    with pytest.raises(ConfigError, match=f"^{path} is not a writable file"):
        cli.build(path, python="/usr/bin/env", library="/usr/lib", include="/usr/include")


@pytest.mark.parametrize("words", [["instal"], ["build"], ["install", "--nope"]])
def test_a_wrong_command_line_is_an_error_and_a_hint(words: list[str]) -> None:
    command = [sys.executable, "-m", "pyxis_py.admin.cli", *words]
    done = subprocess.run(command, cwd=os.path.dirname(os.path.dirname(HERE)), capture_output=True, text=True)
    assert done.returncode == 2
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["[ERROR]", "[HINT]"]
