"""--container-slurm: the node's srun, sbatch, squeue and similar, in images without them."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from enroot_py.features.slurm_inside.slurmnode import PROGRAMS
from tests import otherimages
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, MINIMAL, ON_N1, clear, end, expect, refused, sh, srun

pytestmark = pytest.mark.usefixtures("nothing_left")

HERE = "/run/penroot/slurm"
STEP = "srun --overlap --mem=50 --chdir=/"  # srun would inherit other values from the surrounding step
INSIDE = "test -e /etc/lab-release && echo container || echo host"


@pytest.fixture(scope="module")
def debian() -> str:
    """Return the option for an image of another Debian release."""
    return f"--container-image={otherimages.debian()}"


@pytest.fixture(scope="module")
def shared() -> Iterator[pathlib.Path]:
    """Return a directory that all nodes see and users can read."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="penroot-inside-", dir="/srv"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def musl(shared: pathlib.Path) -> str:
    return f"--container-image={otherimages.musl(shared)}"


def inside(lab: Lab, image: str, script: str, *more: str, **where: object) -> str:
    return srun(lab, image, "--container-slurm", *more, *sh(script), **where)  # type: ignore[arg-type]


@pytest.mark.parity("--container-slurm")
def test_an_image_of_another_release_asks_slurm(lab: Lab, debian: str) -> None:
    script = (
        "grep VERSION_CODENAME /etc/os-release; command -v squeue; squeue -h -j $SLURM_JOB_ID -o %i.%u; "
        "sinfo -h -N -o %N; scontrol show job $SLURM_JOB_ID | grep -o 'UserId=[a-z][a-z(0-9)]*'; scontrol ping; "
        "sacct 2>&1; sbatch --version; sprio -V; echo $SLURM_JOB_ID"
    )
    out = inside(lab, debian, script).splitlines()
    job = out.pop()
    version = lab.run(["srun", "--version"]).stdout.strip()
    assert out == [
        f"VERSION_CODENAME={otherimages.other_release()}",
        f"{HERE}/bin/squeue",
        f"{job}.alice",
        "n1",
        "n2",
        "UserId=alice(2001)",
        "Slurmctld(primary) at ctl is UP",
        "Slurm accounting storage is disabled",
        version,
        version,
    ]


@pytest.mark.parity("srun inside: steps on nodes and in containers")
def test_steps_from_inside_are_on_nodes_and_in_containers(lab: Lab, debian: str) -> None:
    """As from outside, a step without container options runs on the node, and other steps run in containers."""
    both = f"{STEP} -N2 -n2"
    script = (
        f"test $SLURM_PROCID = 0 || exit 0; {both} sh -c 'hostname; {INSIDE}'; "
        f"{both} {IMAGE} sh -c 'hostname; {INSIDE}; echo $IMAGE_NAME'"
    )
    done = lab.run(["srun", "-N2", "-n2", debian, "--container-slurm", *sh(script)])
    assert sorted(done.stdout.split()) == sorted("n1 n2 host host n1 n2 container container minimal minimal".split())
    # srun in the container resolves the tag for both nodes, with the settings of the node.
    assert "could not resolve" not in done.stderr, done.stderr


@pytest.mark.parity("srun inside: steps on nodes and in containers")
def test_container_by_variable_is_made_or_an_error(lab: Lab, debian: str) -> None:
    """PYXIS_CONTAINER_IMAGE, set in the container, gives a step a container, or an error if the image is bad."""
    script = (
        f"{STEP} {sh(INSIDE)[0]} -c '{INSIDE}'; PYXIS_CONTAINER_IMAGE=none:none:none {STEP} sh -c '{INSIDE}'; echo $?"
    )
    env = {"PYXIS_CONTAINER_SLURM": "yes"}
    out = srun(lab, debian, *sh(f"export PYXIS_CONTAINER_IMAGE={MINIMAL}; {script}"), env=env)
    assert out == "container\n1\n"


@pytest.mark.parity("sbatch, salloc")
def test_jobs_from_inside(lab: Lab, debian: str) -> None:
    job = "env -u SLURM_CPU_BIND sbatch -Q --mem=50 -n1 -w n2 --wait -D /tmp -o /tmp/inside.out --wrap"
    script = (
        f"{job} 'srun sh -c \"hostname; {INSIDE}\"'; "
        f"env -u SLURM_CPU_BIND salloc -Q --mem=50 -n1 -w n2 srun -D / --cpu-bind=none {IMAGE} sh -c '{INSIDE}'"
    )
    assert inside(lab, debian, script) == "container\n"
    assert lab.run("cat /tmp/inside.out; rm /tmp/inside.out", node="n2").stdout == "n2\nhost\n"


@pytest.mark.parity("sbatch, salloc")
def test_a_job_is_cancelled_and_files_are_sent_from_inside(lab: Lab, debian: str) -> None:
    script = f"sbcast -f /etc/os-release /tmp/sent && {STEP} sh -c 'cat /tmp/sent; rm /tmp/sent'; "
    cancel = "scancel $SLURM_JOB_ID; sleep 300"
    done = lab.run(["srun", *ON_N1, debian, "--container-slurm", *sh(script + cancel)], check=False)
    assert done.returncode != 0 and otherimages.other_release() in done.stdout


@pytest.mark.parity("in an image with musl and busybox")
def test_musl_and_busybox(lab: Lab, musl: str) -> None:
    """The image has no /etc/passwd, no glibc and no loader of glibc."""
    script = f"hello; squeue -h -j $SLURM_JOB_ID -o %u; {STEP} hostname; {STEP} {IMAGE} sh -c '{INSIDE}'"
    assert inside(lab, musl, script) == "hello of musl\nalice\nn1\ncontainer\n"


@pytest.mark.parity("penroot-slurm")
def test_other_programs_get_no_library_of_slurm(lab: Lab, debian: str) -> None:
    """Slurm's programs, in turn, get no library of the image or of the user. Steps keep the user's LD_ variables."""
    preload = "/usr/lib/x86_64-linux-gnu/libm.so.6"
    script = (
        "ls $LD_LIBRARY_PATH > /dev/null; ldd /bin/ls | grep -c penroot; env | grep -c '^LD_'; "
        f"export LD_PRELOAD={preload} LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu; squeue -h -j $SLURM_JOB_ID -o %u; "
        f"{STEP} sh -c 'env | grep -e ^LD_ -e KEPT -e SACK | sort; grep -c {HERE} /proc/self/maps; echo $SLURM_CONF'"
    )
    lines = inside(lab, debian, script).splitlines()
    assert lines == [
        *("0", "0", "alice"),
        *("LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu", f"LD_PRELOAD={preload}", "0", "/etc/slurm/slurm.conf"),
    ]


@pytest.mark.parity("nothing of an image is replaced")
def test_nothing_of_the_image_is_replaced(lab: Lab, shared: pathlib.Path) -> None:
    """An image with its own Slurm keeps all of its files."""
    where = shared / "own"
    where.mkdir()
    make = (
        "mkdir -p etc/slurm usr/lib/x86_64-linux-gnu/slurm-wlm run/munge; echo own > etc/slurm/slurm.conf; "
        "echo own > usr/lib/x86_64-linux-gnu/slurm-wlm/auth_munge.so; echo own > usr/lib/x86_64-linux-gnu/libc.so.6; "
        "printf '#!/bin/sh\\necho own\\n' > usr/bin/squeue; chmod 755 usr/bin/squeue; echo own > run/munge/file"
    )
    image = f"--container-image={otherimages.musl(where, make)}"
    files = "/etc/slurm/slurm.conf /usr/lib/x86_64-linux-gnu/*/auth_munge.so /usr/lib/x86_64-linux-gnu/libc.so.6"
    out = inside(lab, image, f"cat {files}; /usr/bin/squeue; squeue -h -j $SLURM_JOB_ID -o %u")
    assert out == "own\nown\nown\nown\nalice\n"


@pytest.mark.parity("--container-slurm")
def test_without_the_option_slurm_is_absent(lab: Lab, debian: str) -> None:
    assert srun(lab, debian, *sh(f"ls -d {HERE} /run/penroot 2> /dev/null; command -v squeue; true")) == ""
    assert srun(lab, debian, "--no-container-slurm", *sh("command -v squeue; true")) == ""


@pytest.mark.parity("ENROOT_SLURM")
def test_the_default_of_a_site(lab: Lab, debian: str) -> None:
    path = pathlib.Path(lab.root, "etc/enroot/enroot.conf")
    text = path.read_text()
    path.write_text(f"{text}ENROOT_SLURM yes\n")
    try:
        assert srun(lab, debian, *sh("command -v squeue")) == f"{HERE}/bin/squeue\n"
        assert srun(lab, debian, "--no-container-slurm", *sh("command -v squeue; true")) == ""
    finally:
        path.write_text(text)


@pytest.mark.parity("ENROOT_SLURM")
def test_by_an_environment_file(lab: Lab, debian: str, shared: pathlib.Path) -> None:
    image = debian.partition("=")[2]
    (shared / "it.toml").write_text(f'image = "{image}"\n[annotations]\ncom.pyxis.slurm = "true"\n')
    assert srun(lab, f"--environment={shared}/it.toml", *sh("command -v squeue")) == f"{HERE}/bin/squeue\n"
    started = lab.run(["penroot", "start", "--environment", f"{shared}/it.toml", *sh("squeue -h; command -v squeue")])
    assert started.stdout.endswith(f"{HERE}/bin/squeue\n")


@pytest.mark.parity("running containers, and root in a container")
@pytest.mark.parametrize("writable", ["--container-writable", "--container-readonly"])
def test_step_brings_slurm_into_a_running_container(lab: Lab, debian: str, writable: str) -> None:
    step = lab.popen(["srun", *ON_N1, debian, writable, "--container-name=runs", *sh("echo up; read line; squeue")])
    try:
        expect(step, "up")
        script = "command -v squeue; squeue -h -j $SLURM_JOB_ID -o %u"
        for _ in range(2):
            done = lab.run(["srun", *ON_N1, "--container-name=runs", "--container-slurm", *sh(script)])
            assert done.stdout == f"{HERE}/bin/squeue\nalice\n"
            assert "ignoring" not in done.stderr and "WARN" not in done.stderr
        assert srun(lab, "--container-name=runs", *sh("command -v squeue; true")) == ""
    finally:
        _, err = end(step)
    assert "squeue: not found" in err  # the first step keeps its own PATH
    clear(lab)


@pytest.mark.parity("running containers, and root in a container")
def test_root_learns_that_srun_fails_inside(lab: Lab) -> None:
    done = lab.run(["srun", *ON_N1, IMAGE, "--container-slurm", "--container-remap-root", *sh("squeue -h -o %u")])
    assert done.stdout == "alice\n"
    assert "srun and sbatch do not work for root in the container" in done.stderr


def privately(lab: Lab, change: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on n1 in a mount namespace in which root has made a change. /etc/slurm is a copy there."""
    copy = "mount -t tmpfs none /mnt && cp -a /etc/slurm/. /mnt && mount --bind /mnt /etc/slurm"
    words = ["unshare", "--mount", "bash", "-c", f"{copy} && {change} && {command}"]
    return lab.run(words, node="n1", user="root", check=False, env={"HOME": "/home/alice", "USER": "alice"})


PLUGINS = "/usr/lib/x86_64-linux-gnu/slurm-wlm"
LEFT_SOCKET = (
    "mount -t tmpfs none /run/munge && "
    "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('/run/munge/munge.socket.2')\""
)
BAD = {
    "socket": ("mount -t tmpfs none /run/munge", "n1 has no socket /run/munge/munge.socket.2 for auth/munge"),
    "left socket": (
        f"{LEFT_SOCKET} && chmod 777 /run/munge/munge.socket.2",
        "n1: cannot connect to the socket /run/munge/munge.socket.2 of auth/munge: Connection refused",
    ),
    "closed socket": (
        f"{LEFT_SOCKET} && chmod 700 /run/munge/munge.socket.2",
        "n1: cannot connect to the socket /run/munge/munge.socket.2 of auth/munge: Permission denied",
    ),
    "pipe": (
        "rm /etc/slurm/slurm.conf && mkfifo -m 644 /etc/slurm/slurm.conf",
        "/etc/slurm/slurm.conf is not a regular file",
    ),
    "endless": (
        "echo 'include slurm.conf' >> /etc/slurm/slurm.conf",
        "/etc/slurm/slurm.conf: more than 10 nested includes",
    ),
    "directory of plugins": ("echo PluginDir=/none >> /etc/slurm/slurm.conf", "n1 has no Slurm plugin directory /none"),
    "conf": ("mount -t tmpfs none /etc/slurm", "n1 has no slurm.conf in /etc/slurm, /run/slurm/conf, "),
    "closed": ("chmod 600 /etc/slurm/slurm.conf", "cannot read /etc/slurm/slurm.conf: Permission denied"),
    "included": (
        "echo 'include more.conf' >> /etc/slurm/slurm.conf",
        "cannot read /etc/slurm/more.conf (named in /etc/slurm/slurm.conf): No such file",
    ),
    "plugins": (f"mount -t tmpfs none {PLUGINS}", "n1: no Slurm plugins beneath "),
    "programs": (
        f"for p in {' '.join(PROGRAMS)}; do test ! -e /usr/bin/$p || mount --bind /dev/null /usr/bin/$p; done",
        "n1 has no Slurm commands, such as srun and squeue, in ",
    ),
}


@pytest.mark.parity("no socket, no slurm.conf")
@pytest.mark.parametrize("what", BAD)
def test_missing_program_of_a_node_is_one_line(lab: Lab, debian: str, what: str) -> None:
    change, says = BAD[what]
    start = f"penroot start --slurm {debian.partition('=')[2]} true"
    done = privately(lab, change, f"setpriv --reuid=alice --regid=alice --init-groups {start}")
    assert done.returncode == 1 and done.stdout == "", done.stdout
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"[ERROR] Slurm in the container: {says}"), done.stderr
    assert re.match(r"\[HINT\] .*; to start without it: --no-container-slurm, or ENROOT_SLURM=no$", hint), hint


SACK = """\
import socket, subprocess, sys
with socket.socket(socket.AF_UNIX) as daemon:
    daemon.bind("/run/slurm/sack.socket")
    daemon.listen()
    sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


@pytest.mark.parity("Slurm's own authentication")
def test_the_socket_of_slurms_own_authentication(lab: Lab, debian: str, shared: pathlib.Path) -> None:
    """Programs get the path of sackd's or slurmd's socket. env(1) replaces sdiag: Slurm 22.05 has no auth/slurm."""
    (shared / "sack.py").write_text(SACK)
    change = (
        "sed -i 's/^AuthType=.*/AuthType=auth\\/slurm/' /etc/slurm/slurm.conf && mount -t tmpfs none /run && "
        "mkdir /run/slurm && mount --bind /usr/bin/env /usr/bin/sdiag"
    )
    script = f"sh -c 'sdiag; ls {HERE}/auth; grep ^Auth {HERE}/etc/slurm.conf'"
    start = f"penroot start --slurm {debian.partition('=')[2]} {script}"
    become = "setpriv --reuid=alice --regid=alice --init-groups"
    done = privately(lab, change, f"umask 0; python3 {shared}/sack.py {become} {start}")
    lines = done.stdout.splitlines()
    assert f"SLURM_SACK_SOCKET={HERE}/auth/sack.socket" in lines, done.stderr + done.stdout
    assert lines[-2:] == ["sack.socket", "AuthType=auth/slurm"]


@pytest.mark.parametrize("theirs", ["", "munge:x:77:77::/:/bin/sh"], ids=["none", "another"])
def test_slurms_user_has_his_number_in_any_image(lab: Lab, shared: pathlib.Path, theirs: str) -> None:
    """Slurm's programs fail if /etc/passwd lacks SlurmUser. The image may have another user of that name."""
    where = pathlib.Path(tempfile.mkdtemp(dir=shared))
    where.chmod(0o755)
    image = otherimages.musl(where, f"echo '{theirs}' > etc/passwd")
    number = lab.run(["id", "-u", "munge"]).stdout.strip()
    change = "sed -i 's/^SlurmUser=root/SlurmUser=munge/' /etc/slurm/slurm.conf"
    show = "sh -c 'scontrol show hostnames n[1-2]; scontrol show config | grep -c ^SlurmUser; grep ^munge /etc/passwd'"
    start = f"setpriv --reuid=alice --regid=alice --init-groups penroot start --slurm {image} {show}"
    lines = privately(lab, change, start).stdout.splitlines()
    assert lines[:3] == ["n1", "n2", "1"]
    assert number in [line.split(":")[2] for line in lines[3:]] and (not theirs or theirs in lines)


LINKS = {
    "run is a link": "rmdir run; ln -s etc run",
    "a link to a directory": "ln -s ../etc run/penroot",
    "a link to nothing": "mkdir run/penroot; ln -s /etc/made run/penroot/slurm",
}


@pytest.mark.parity("nothing of an image is replaced")
@pytest.mark.security("I7")
@pytest.mark.parametrize("make", LINKS.values(), ids=LINKS)
def test_links_of_an_image_are_not_followed(lab: Lab, shared: pathlib.Path, make: str) -> None:
    """If the image has a symbolic link in the path of Slurm's files, the step fails before its program runs."""
    where = pathlib.Path(tempfile.mkdtemp(dir=shared))
    where.chmod(0o755)
    stderr = refused(lab, f"--container-image={otherimages.musl(where, make)}", "--container-slurm", *sh("echo ran"))
    assert f"cannot mount {HERE}: the path has a symbolic link in the image" in stderr and "ran" not in stderr


@pytest.mark.parity("slurm.conf keeps its permissions")
@pytest.mark.security("I7")
def test_secrets_of_the_node_stay_there(lab: Lab, debian: str) -> None:
    """The container has only the needed files of /etc/slurm. Users cannot read files that only root can read."""
    etc = pathlib.Path(lab.root, "etc/slurm")
    for name in ("slurmdbd.conf", "jwt_hs256.key", "slurm.key", "private.conf"):
        (etc / name).write_text("secret\n")
        (etc / name).chmod(0o600)
    try:
        files = inside(lab, debian, f"cd {HERE}/etc && find . ! -path './enroot/*'").split()
        assert sorted(files) == [".", "./authorities.pem", "./enroot", "./plugstack.conf", "./slurm.conf"]
        # Root reads every file, but its copy of a private file is closed to other users.
        start = f"penroot start --slurm {debian.partition('=')[2]}"
        show = f"sh -c 'cd {HERE}/etc; stat -c %a slurm.conf; cat slurm.conf; ls'"
        change = (
            "echo 'Include private.conf' >> /etc/slurm/slurm.conf && echo NodeName=hidden > /etc/slurm/private.conf"
        )
        words = privately(lab, change, f"{start} {show}").stdout.split()
        assert words[0] == "400" and "NodeName=hidden" in words
        assert words[-4:] == ["authorities.pem", "enroot", "plugstack.conf", "slurm.conf"]
    finally:
        for name in ("slurmdbd.conf", "jwt_hs256.key", "slurm.key", "private.conf"):
            (etc / name).unlink()


@pytest.mark.parity("start --slurm")
def test_explain_shows_the_files_of_slurm(lab: Lab, debian: str) -> None:
    image = debian.partition("=")[2]
    out = lab.run(["penroot", "start", "--slurm", "--explain", image, "true"]).stdout
    assert "setting  ENROOT_SLURM=yes  (command line)" in out
    assert re.search(
        rf"^mount    /usr/bin/srun {HERE}/node/bin/srun none x-create=auto,bind,ro,.*\(command line\)$", out, re.M
    )
    assert f"file     {HERE}/etc/slurm.conf  (command line)" in out
    assert re.search(rf"^set      PATH={HERE}/bin:.*\(command line\)$", out, re.M)


@pytest.mark.parity("the examples of docs/howto/slurm-inside.md")
def test_the_examples_of_the_documentation(lab: Lab, debian: str) -> None:
    """Run the examples with the image of Debian as a file, in a directory of alice's."""
    page = (pathlib.Path(__file__).parents[2] / "docs/howto/slurm-inside.md").read_text()
    workflow, lines = re.search(r"```sh\n(.*?)```", page, re.S), re.search(r"```console\n(.*?)```", page, re.S)
    assert workflow and lines
    image = debian.partition("=")[2]
    commands = [line.removeprefix("$ ").partition("  #")[0].partition(" # ")[0] for line in lines[1].splitlines()]
    lab.run("cat > workflow", input=workflow[1])
    out = []
    try:
        for command in commands:
            command = command.replace("docker://debian:13", image).replace("debian:13", image)
            command = command.replace("sbatch -N2", "sbatch --wait -o out -N2").replace(
                " -D /tmp", " --wait -D /tmp -o /dev/null"
            )
            out.append(lab.run(command, node="n1").stdout)
        ran = lab.run("cat out").stdout.splitlines()
    finally:
        lab.run("rm -f workflow out")
    assert " alice " in out[0] and "Submitted batch job" in out[1] and "main*" in out[3]
    assert not any("could not resolve" in line for line in ran)
    assert sorted(line for line in ran if not line.startswith("pyxis: ")) == [
        f"VERSION_CODENAME={otherimages.other_release()}",
        "minimal on n1",
        "minimal on n2",
    ]
