"""ssh from a laptop into the container of a running job, with OpenSSH's own client and a login node in between."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.installation import LIBRARY, PREFIX
from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, next_line, on_node, sh
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")

LAPTOP = "registry"  # a machine of the lab outside of the cluster
LAPTOP_USER = "bob"  # on the cluster, the user is alice
PORT = 2222
DOCS = (pathlib.Path(__file__).parents[2] / "docs/howto/ssh.md").read_text()
SSHD = f"""\
Port {PORT}
HostKey /home/alice/login/host
AuthorizedKeysFile /home/alice/login/user.pub
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
"""
LOGIN = f"""\
ControlPath /tmp/%n

Host login
    HostName ctl
    Port {PORT}
    User alice
    IdentityFile ~/.ssh/login
    UserKnownHostsFile ~/.ssh/known_login
    StrictHostKeyChecking yes

"""
SERVER = "[s]sh-server"  # patterns of pgrep(1)
PROXY = "[s]sh-proxy"


@dataclass
class Laptop:
    """The host of the ssh client. It has neither Slurm nor penroot, and does not see the cluster's home."""

    lab: Lab

    def run(self, *command: str, check: bool = True, input: str = "") -> subprocess.CompletedProcess[str]:
        return self.lab.run(command, user=LAPTOP_USER, node=LAPTOP, check=check, input=input)

    def popen(self, *command: str) -> subprocess.Popen[str]:
        return self.lab.popen(command, user=LAPTOP_USER, node=LAPTOP)

    def ssh(self, *arguments: str, **how: Any) -> str:
        return self.run("ssh", *arguments, **how).stdout

    def refused(self, host: str) -> list[str]:
        """Run an ssh that must fail to connect, and return its stderr without the lines of ssh itself."""
        done = self.run("ssh", host, "true", check=False)
        assert done.returncode == 255, done.stdout
        lines = done.stderr.splitlines()
        return [line for line in lines if not re.match("kex_exchange_identification|Connection closed", line)]


@pytest.fixture(scope="module")
def laptop(lab: Lab) -> Iterator[Laptop]:
    """Yield the laptop with a ~/.ssh/config as in the documentation."""
    keygen = "ssh-keygen -q -t ed25519 -N ''"
    made = f"mkdir -m 700 login && {keygen} -f login/host && {keygen} -f login/user && cat > login/sshd_config"
    lab.run(made, input=SSHD)
    server = lab.popen(["/usr/sbin/sshd", "-D", "-e", "-f", "/home/alice/login/sshd_config"])
    try:
        host, user = (lab.run(f"cat login/{name}").stdout for name in ("host.pub", "user"))
        machine = Laptop(lab)
        for name, text in (("login", user), ("known_login", f"[ctl]:{PORT} {host}"), ("config", LOGIN)):
            machine.run("sh", "-c", f"umask 077; mkdir -p ~/.ssh; cat > ~/.ssh/{name}", input=text)
        until(lambda: machine.run("ssh", "login", "true", check=False).returncode == 0, "sshd listens")
        program = PREFIX + "/bin/penroot"
        machine.run("sh", "-c", f"ssh login {program} ssh-config login >> ~/.ssh/config")
        yield machine
        machine.run("rm", "-r", ".ssh")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
        lab.run("rm -r login .config/enroot", check=False)


@contextmanager
def job(
    lab: Lab, *options: str, command: Sequence[str] = sh("echo up $SLURM_JOB_ID; exec sleep 1000"), user: str = "alice"
) -> Iterator[str]:
    """Run a job with one step until the block ends. Yield the job's id."""
    step = lab.popen(["srun", "-w", "n1", "--mem=500", *options, *command], user=user)
    up, _, number = next_line(step).strip().partition(" ")
    assert up == "up", step.communicate()
    try:
        yield number
    finally:
        lab.run(["scancel", number], user=user)
        step.communicate(timeout=60)


@contextmanager
def connected(laptop: Laptop, host: str, *options: str) -> Iterator[None]:
    """Make every ssh to ``host`` share one connection while the block runs."""
    first = laptop.popen("ssh", "-M", *options, host, "echo up; exec cat")
    assert next_line(first) == "up\n", first.communicate()
    try:
        yield
    finally:
        first.communicate(timeout=60)


@pytest.mark.parity("ssh-config --suffix")
def test_a_command_runs_in_the_container(lab: Lab, laptop: Laptop) -> None:
    with job(lab, IMAGE) as number:
        inside = (
            "test -e /etc/lab-release && echo $IMAGE_NAME $SLURM_JOB_ID $(id -un) $SHELL; readlink /proc/self/ns/mnt"
        )
        first, namespace = laptop.ssh(f"{number}.cluster", inside).splitlines()
        assert first == f"minimal {number} alice /bin/bash"
        assert namespace in on_node(lab, "for p in $(pgrep -x sleep); do readlink /proc/$p/ns/mnt; done")


@pytest.mark.parity("shells, commands")
def test_status_signal_input_and_errors(lab: Lab, laptop: Laptop) -> None:
    with job(lab, IMAGE) as number:
        host = f"{number}.cluster"
        text = "word\n" * 1_000_000  # more than a pipe and an ssh channel hold
        done = laptop.run("ssh", host, "sleep 1; cat; echo oops >&2; exit 7", input=text, check=False)
        assert (done.returncode, done.stderr, done.stdout == text) == (7, "oops\n", True)
        assert laptop.run("ssh", host, "kill -TERM $$", check=False).returncode == 255
        assert laptop.run("ssh", host, "no-such-program", check=False).returncode == 127
        assert laptop.ssh("-o", "SetEnv=LC_ALL=C.UTF-8 BAD=1", host, "echo $LC_ALL $BAD") == "C.UTF-8\n"


@pytest.mark.parity("shells, commands")
def test_a_terminal(lab: Lab, laptop: Laptop) -> None:
    """script(1) is the user's terminal; stty changes the window size that ssh sends."""
    with job(lab, IMAGE) as number:
        typed = f"stty rows 33 cols 77; ssh {number}.cluster"
        step = laptop.popen("script", "-qfc", typed, "/dev/null")
        assert step.stdin
        step.stdin.write("stty size; tty; echo $0 $TERM; sleep 1000\n")
        step.stdin.flush()
        shown = ""
        while f"-bash {os.environ.get('TERM', 'dumb')}" not in shown:
            shown += next_line(step)
        assert "33 77" in shown and "/dev/pts/" in shown
        step.stdin.write("\x03")
        step.stdin.write("exit 5\n")
        step.stdin.flush()
        step.communicate(timeout=60)
        until(lambda: not on_node(lab, f"pgrep -f {SERVER}"), "the server ends")


@pytest.mark.parity("sftp, scp")
def test_files(lab: Lab, laptop: Laptop) -> None:
    """sftp(1) and scp(1) use the server's own sftp; rsync(1) starts rsync in the container."""
    laptop.run("sh", "-c", "rm -rf tree && mkdir -p tree/sub && head -c 3000000 /dev/urandom > tree/sub/data")
    with job(lab, IMAGE, "--container-mounts=/usr:/usr") as number, connected(laptop, host := f"{number}.cluster"):
        laptop.run("scp", "-rq", "tree", f"{host}:/tmp/copy")
        asked = "cd /tmp/copy\nrename sub bus\nsymlink bus l2\nls -ln\n"
        listed = laptop.run("sftp", "-b", "-", host, input=asked).stdout
        assert re.search(r"^drwx.* 2001 +2001 .* bus$", listed, re.M) and "l2" in listed, listed
        laptop.run("scp", "-q", f"{host}:/tmp/copy/bus/data", "back")
        laptop.run("cmp", "back", "tree/sub/data")
        assert laptop.ssh(host, "readlink /tmp/copy/l2; test -e /etc/lab-release && ls /tmp") == "bus\ncopy\n"
        assert on_node(lab, "ls -d /tmp/copy") == ""
        laptop.run("ln", "-s", "sub", "tree/link")
        laptop.run("rsync", "-a", "tree/", f"{host}:/tmp/synced/")
        assert laptop.ssh(host, "readlink /tmp/synced/link; wc -c < /tmp/synced/sub/data") == "sub\n3000000\n"
        missing = laptop.run("scp", "-q", f"{host}:/none", ".", check=False)
        assert missing.returncode != 0 and "No such file or directory" in missing.stderr
        laptop.run("rm", "-r", "tree", "back")


HTTPD = "mkdir -p /tmp/www && echo page > /tmp/www/index.html && exec busybox httpd -f -p {} -h /tmp/www"


def reachable(laptop: Laptop, *curl: str) -> bool:
    return laptop.run("curl", "-sf", "--noproxy", "none", *curl, check=False).stdout == "page\n"


@contextmanager
def forwarding(laptop: Laptop, *options: str) -> Iterator[None]:
    process = laptop.popen("ssh", "-o", "ExitOnForwardFailure=yes", *options)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.parity("ssh -L")
@pytest.mark.parametrize("network", ["the node's", "its own"])
def test_local_and_dynamic_ports(lab: Lab, laptop: Laptop, network: str) -> None:
    """ssh -L and ssh -D reach ports in the network of the container."""
    own = network == "its own"
    command = sh("echo up $SLURM_JOB_ID; " + HTTPD.format("127.0.0.1:8888"))
    with job(lab, IMAGE, *["--container-unshare=net", "--container-remap-root"] * own, command=command) as number:
        with forwarding(laptop, "-N", "-L", "8001:localhost:8888", "-D", "8002", f"{number}.cluster"):
            until(lambda: reachable(laptop, "http://localhost:8001/"), "the page comes by -L")
            assert reachable(laptop, "--socks5-hostname", "localhost:8002", "http://localhost:8888/")
        assert (on_node(lab, "curl -sf http://127.0.0.1:8888/") == "") == own


@pytest.mark.parity("ssh -L")
def test_remote_ports_are_of_the_node_alone(lab: Lab, laptop: Laptop) -> None:
    """ssh -R listens only at the loopback addresses of the node."""
    serve = laptop.popen("sh", "-c", HTTPD.format("127.0.0.1:9000"))
    try:
        with job(lab, IMAGE) as number:
            with connected(laptop, f"{number}.cluster", "-R", "9001:localhost:9000"):
                ask = ("ssh", f"{number}.cluster", "wget -qO- http://localhost:9001/")
                until(lambda: laptop.run(*ask, check=False).stdout == "page\n", "the page comes by -R")
                assert ":9001 " not in on_node(lab, "ss -Hltn | grep -v -e 127.0.0.1: -e '\\[::1\\]:'")
            asked = ("-o", "ExitOnForwardFailure=yes", "-R", "*:9001:localhost:9000", f"{number}.cluster", "id")
            done = laptop.run("ssh", *asked, check=False)
            assert done.returncode == 255 and "remote port forwarding failed" in done.stderr
    finally:
        os.killpg(serve.pid, signal.SIGKILL)
        serve.communicate()
        laptop.run("rm", "-rf", "/tmp/www")


@pytest.mark.parity("ssh -L")
def test_a_socket_of_the_container(lab: Lab, laptop: Laptop) -> None:
    """ssh -L reaches a Unix socket in the container."""
    talk = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen(); print('up', flush=True)\n" \
        "while True: c = s.accept()[0]; c.sendall(b'HTTP/1.0 200 OK\\r\\n\\r\\npage\\n'); c.close()"  # fmt: skip
    with job(lab, IMAGE, "--container-mounts=/usr:/usr") as number:
        server = laptop.popen("ssh", f"{number}.cluster", f'exec python3 -c "{talk}"')
        assert next_line(server) == "up\n"
        with forwarding(laptop, "-N", "-L", "8003:/tmp/s", "-L", "8004:/tmp/none", f"{number}.cluster"):
            until(lambda: reachable(laptop, "--http0.9", "http://localhost:8003/"), "the page comes by a socket")
            assert not reachable(laptop, "http://localhost:8004/")
        os.killpg(server.pid, signal.SIGTERM)
        server.communicate(timeout=60)


@pytest.mark.parity("the steps of VS Code's Remote-SSH")
def test_steps_of_an_editor(lab: Lab, laptop: Laptop) -> None:
    """Do as VS Code does: ssh -T runs bash and opens a SOCKS port; bash reads a script that starts a server."""
    script = HTTPD.format("127.0.0.1:8890").replace("exec", "nohup") + " > /tmp/log 2>&1 < /dev/null & echo ready\n"
    with job(lab, IMAGE) as number:
        editor = laptop.popen("ssh", "-T", "-D", "8005", f"{number}.cluster", "bash")
        assert editor.stdin
        editor.stdin.write(script)
        editor.stdin.flush()
        assert next_line(editor) == "ready\n"
        until(
            lambda: reachable(laptop, "--socks5-hostname", "localhost:8005", "http://localhost:8890/"), "the page comes"
        )
        os.killpg(editor.pid, signal.SIGKILL)
        editor.communicate()
        until(lambda: not on_node(lab, f"pgrep -f '{SERVER}|busybox http[d]'"), "all its processes end")


@pytest.mark.parity("the job's limits of memory and CPUs apply")
def test_the_limits_of_the_job_hold(lab: Lab, laptop: Laptop) -> None:
    with job(lab, IMAGE, "-c2") as number:
        groups = laptop.ssh(f"{number}.cluster", "cat /proc/self/cgroup; nproc").splitlines()
        assert groups.pop() == "2"
        hog = "echo $$ > /tmp/hog; x=$(head -c 900000000 /dev/zero | tr '\\0' x); echo survived"
        done = laptop.run("ssh", f"{number}.cluster", hog, check=False)
        assert "survived" not in done.stdout and done.returncode != 0


def test_the_connection_outlives_what_cannot_be_started(lab: Lab, laptop: Laptop) -> None:
    """The user has reached the limit of processes on the node. Earlier sessions continue."""
    with job(lab, IMAGE) as number:
        shared = ("-o", "ControlPath=/tmp/control", f"{number}.cluster")
        first = laptop.popen("ssh", "-M", *shared, "echo here; exec cat")
        assert next_line(first) == "here\n"
        limit = f"for p in $(pgrep -f {SERVER}); do prlimit --pid $p --nproc="
        on_node(lab, f"{limit}1:; done", user="alice")
        done = laptop.run("ssh", *shared, "echo in", check=False)
        assert (done.returncode, done.stdout) == (11, "")
        assert done.stderr == "[ERROR] cannot start a process: Resource temporarily unavailable\n"
        assert laptop.run("sftp", "-b", "-", *shared, input="ls\n", check=False).returncode != 0
        on_node(lab, f"{limit}5000:; done", user="alice")
        assert laptop.ssh(*shared, "echo in") == "in\n"
        assert first.communicate("still\n", timeout=60)[0] == "still\n"


@pytest.mark.parity("ssh-key --suffix", "the job's limits of memory and CPUs apply")
def test_end_of_the_job_closes_ssh_and_removes_keys(lab: Lab, laptop: Laptop) -> None:
    with job(lab, IMAGE) as number:
        step = laptop.popen("ssh", f"{number}.cluster", "trap '' HUP TERM; setsid sleep 999 & echo here; wait")
        assert next_line(step) == "here\n"
        (mode, keys) = lab.run("cd .config/enroot/ssh; stat -c '%a %n' *").stdout.split()
        assert (mode, keys) == ("700", f"lab.{number}")
        lab.run(["scancel", number])
        step.communicate(timeout=120)
        assert step.returncode == 255
        until(lambda: lab.run("ls .config/enroot/ssh").stdout == "", "the keys are gone")
    assert on_node(lab, "pgrep -f 'sleep 99[9]'") == ""


def test_the_end_of_the_job_removes_keys_and_nothing_else(lab: Lab, laptop: Laptop) -> None:
    """A program in a container that sees /run/pyxis points the link to the job's keys at another directory."""
    with job(lab, IMAGE) as number:
        laptop.ssh(f"{number}.cluster", "true")
        # The proxy outlives the client, and removes the keys of ended jobs.
        until(lambda: lab.run(f"pgrep -f '{PROXY}'", check=False).returncode == 1, "the proxy has ended")
        lab.run("mkdir -p papers && touch papers/thesis")
        on_node(lab, f"ln -sfn /home/alice/papers /run/pyxis/2001/pyxis_{number}.ssh")
    until(lambda: not on_node(lab, f"ls -d /run/pyxis/2001/pyxis_{number}.*"), "the job has been tidied up")
    assert lab.run("ls papers; rm -r papers; rm -r .config/enroot/ssh/*").stdout == "thesis\n"


@pytest.mark.parity("ssh-key --suffix")
def test_keys_of_a_job_to_which_nobody_has_come(lab: Lab, laptop: Laptop) -> None:
    """ssh-key makes keys, but no ssh uses them. The next ssh to another job removes them."""
    with job(lab, IMAGE) as number:
        laptop.ssh("login", f"/{PREFIX}/bin/penroot ssh-key {number}")
        assert lab.run("ls .config/enroot/ssh").stdout == f"lab.{number}\n"
    with job(lab, IMAGE) as other:
        assert laptop.ssh(f"{other}.cluster", "echo in") == "in\n"
        assert lab.run("ls .config/enroot/ssh").stdout == f"lab.{other}\n"


@pytest.mark.parity("ssh-key --suffix")
@pytest.mark.security("I11")
def test_only_the_jobs_key_opens_its_server(lab: Lab, laptop: Laptop) -> None:
    """The server accepts only the key of the job, and the client trusts only the server of the job."""
    with job(lab, IMAGE) as number:
        host = f"{number}.cluster"
        laptop.ssh(host, "true")
        proxy = f"ProxyCommand=ssh -T login {PREFIX}/bin/penroot ssh-proxy {host}"
        unknown = ("-F", "none", "-i", "~/.ssh/login", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no")
        refused = laptop.run("ssh", *unknown, "-o", proxy, host, "echo in", check=False)
        assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stderr
        # A server with another key: replace the job's key after the laptop has requested it.
        lab.run(f"cd .config/enroot/ssh/lab.{number}; cp host kept; cp /home/alice/login/host host")
        hidden = ("ssh", "-F", "/tmp/config", host, "echo in")
        laptop.run("sh", "-c", "sed 's/exec \".*\"//' ~/.ssh/config > /tmp/config")
        changed = laptop.run(*hidden, check=False)
        assert changed.returncode == 255 and "Host key verification failed" in changed.stderr
        lab.run(f"cd .config/enroot/ssh/lab.{number}; mv kept host")
        assert laptop.run(*hidden).stdout == "in\n"
        laptop.run("rm", "/tmp/config")


@pytest.mark.parity("ssh-proxy --suffix", "a missing, foreign, pending or ended job")
def test_names(lab: Lab, laptop: Laptop) -> None:
    """A host name selects a container by job ID or job name, step, container name and node."""
    where = "echo $SLURM_JOB_ID $MARK $(hostname)"
    with job(lab, "-N2", "-wn1,n2", "--ntasks-per-node=1", "--job-name=Train.v2", IMAGE, "--container-name=one",
             command=sh("[ $SLURM_PROCID = 1 ] || echo up $SLURM_JOB_ID; exec sleep 1000")) as number:  # fmt: skip
        for host, node in (
            (number, "n1"), (f"{number}.0", "n1"), (f"{number}.one", "n1"), ("Train.v2", "n1"), ("one", "n1"),
            (f"{number}.n2", "n2"), (f"{number}.0.n2", "n2"), ("Train.v2.n2", "n2"), (f"{number}.one.n2", "n2"),
        ):  # fmt: skip
            assert laptop.ssh(f"{host}.cluster", where) == f"{number} {node}\n", host
        more = lab.popen(
            [
                "srun",
                "--overlap",
                f"--jobid={number}",
                "-N1",
                "-wn1",
                "--mem=0",
                IMAGE,
                *sh("echo $SLURM_STEP_ID; sleep 1000"),
            ]
        )
        last = next_line(more).strip()
        assert laptop.refused(f"{number}.cluster") == [
            f"[ERROR] n1: several containers of job {number} run there: {number}.0 (one), {number}.{last}",
            f"[HINT] select one: ssh {number}.0.cluster",
        ]
        assert laptop.ssh(f"{number}.{last}.cluster", where) == f"{number} n1\n"
        assert laptop.ssh(f"{number}.one.cluster", where) == f"{number} n1\n"
        lab.run(["scancel", number])
        more.communicate(timeout=60)
        until(lambda: lab.run("squeue -h").stdout == "", "the job has ended")
        for node in ("n1", "n2"):
            lab.run(["penroot", "remove", "-f", "pyxis_one"], node=node)


@pytest.mark.parity("a missing, foreign, pending or ended job")
def test_missing_container_is_reported_in_one_line(lab: Lab, laptop: Laptop) -> None:
    assert laptop.refused("987654.cluster") == ["[ERROR] there is no job 987654", "[HINT] squeue --me shows yours"]
    assert laptop.refused("nothing.cluster") == [
        "[ERROR] you have no running job with the name nothing", "[HINT] none of your jobs is running: squeue --me"
    ]  # fmt: skip
    with job(lab) as number:
        line, hint = laptop.refused(f"{number}.cluster")
        assert line == f"[ERROR] n1: no container of job {number} runs there"
        assert laptop.refused(f"{number}.n2.cluster")[0] == f"[ERROR] n1: no container n2 of job {number} runs there"
        with job(lab) as other:
            assert laptop.refused("nothing.cluster")[1].startswith("[HINT] if nothing is a container, add the job ID")
            lab.run(["scontrol", "suspend", other], user="root")
            assert laptop.refused(f"{other}.cluster")[0] == f"[ERROR] job {other} is suspended"
            lab.run(["scontrol", "resume", other], user="root")
        assert laptop.refused(f"{other}.cluster")[0].startswith(f"[ERROR] job {other} has ended: C")
    pending = lab.run(["sbatch", "--parsable", "--hold", "--wrap", "true"]).stdout.strip()
    assert laptop.refused(f"{pending}.cluster")[0] == f"[ERROR] job {pending} is not running yet: JobHeldUser"
    lab.run(["scancel", pending])
    theirs = lab.run(["sbatch", "--parsable", "--hold", "--wrap", "true"], user="bob").stdout.strip()
    assert laptop.refused(f"{theirs}.cluster")[0] == f"[ERROR] job {theirs} belongs to another user (uid 2002)"
    lab.run(["scancel", theirs], user="bob")


def test_keys_that_are_damaged_or_cannot_be_kept(lab: Lab, laptop: Laptop) -> None:
    with job(lab, IMAGE) as number:
        laptop.ssh(f"{number}.cluster", "true")
        (keys,) = lab.run("echo ~/.config/enroot/ssh/*").stdout.split()
        lab.run(f"echo damaged > {keys}/host")
        line, hint = laptop.refused(f"{number}.cluster")
        assert line == f"[ERROR] n1 does not have the keys of the job: {keys}: Invalid private key"
        assert hint == f"[HINT] remove them, and ssh creates new ones: rm -r {keys}"
        lab.run(f"rm -r {keys}")
        assert laptop.ssh(f"{number}.cluster", "echo again") == "again\n"
        done = lab.run(["penroot", "ssh-key", number], check=False, env={"ENROOT_CONFIG_PATH": "/proc/none"})
        error, hint = done.stderr.splitlines()
        assert error.startswith("[ERROR] cannot keep keys in /proc/none") and "set ENROOT_CONFIG_PATH" in hint


@pytest.mark.parity("ssh-config --suffix")
def test_bad_words_for_ssh_config(lab: Lab) -> None:
    """Words that could be commands or options of ssh, and bad suffixes, are refused."""
    for words in (["login; id"], ["-oProxyCommand=x"], ["--suffix=a b", "login"], ["--suffix=", "login"]):
        done = lab.run(["penroot", "ssh-config", "--", *words][: 2 + len(words) + 1], check=False)
        assert done.returncode != 0 and done.stdout == "" and "[ERROR]" in done.stderr


@pytest.mark.parity("ssh-config --suffix")
def test_another_suffix(lab: Lab, laptop: Laptop) -> None:
    with job(lab, IMAGE) as number:
        lines = laptop.ssh("login", f"{PREFIX}/bin/penroot ssh-config --suffix=hpc.site login")
        laptop.run("sh", "-c", "umask 077; cat - ~/.ssh/config > /tmp/suffix", input=lines)
        assert laptop.ssh("-F", "/tmp/suffix", f"{number}.hpc.site", "echo in") == "in\n"
        laptop.run("rm", "/tmp/suffix")


@pytest.mark.parity("an image can reach neither the keys nor the server")
@pytest.mark.security("I11")
def test_the_server_is_out_of_reach_for_the_image(lab: Lab, laptop: Laptop) -> None:
    """Root of the container inspects neighbouring processes, and plants modules in Python's import path."""
    evil = "import os; open('/tmp/imported', 'w')"
    directories = f"{LIBRARY} {os.path.dirname(os.__file__)}"
    write = f'for m in pwd grp encodings ssl this; do echo "{evil}" > $d/$m.py; done'
    plant = f"for d in {directories}; do mkdir -p $d; {write}; done"
    with job(lab, IMAGE, "--container-remap-root", "--container-writable") as number:
        host = f"{number}.cluster"
        laptop.ssh(host, plant)
        look = (
            "for p in $(grep -l '[s]sh-server' /proc/*/cmdline); do cd ${p%/*}; cat environ mem; ls fd; echo seen; done"
        )
        with connected(laptop, host):
            done = laptop.run("ssh", host, look, check=False)
            assert done.stdout.replace("seen\n", "") == "" and done.stdout.count("seen") >= 2, done.stdout
            assert done.stderr.count("Permission denied") == 3 * done.stdout.count("seen")
            laptop.run("sftp", "-b", "-", host, input="ls -l /\nput .ssh/config /tmp/c\nstat /tmp\n", check=False)
            assert laptop.ssh(host, "ls /tmp") == "c\n"


@pytest.mark.parity("the examples of docs/howto/ssh.md")
def test_the_examples_of_the_documentation(lab: Lab, laptop: Laptop) -> None:
    """Run each command of the page, with its placeholders replaced. End the commands that keep running."""
    first, *examples = re.findall(r"^\$ (.*?)(?: +#.*)?$", DOCS, re.M)
    assert first == "ssh login /opt/penroot/bin/penroot ssh-config login >> ~/.ssh/config"  # as in the fixture laptop
    command = sh("echo up $SLURM_JOB_ID; " + HTTPD.format("8888"))
    laptop.run("sh", "-c", "mkdir -p code && touch code/train.py results.txt")
    with job(lab, IMAGE, "--container-mounts=/usr:/usr", command=command) as number:
        for example in examples:
            line = example.replace("42.cluster", f"{number}.cluster").replace("nvidia-smi", "echo GPUs")
            if " -N " in line:
                with forwarding(laptop, *line.split()[1:]):
                    if "-L" in line:
                        until(lambda: reachable(laptop, "http://localhost:8888/"), "the notebook")
                    else:
                        until(lambda: ":9000 " in on_node(lab, "ss -Hltn"), "the port")
            else:
                laptop.run("bash", "-c", f"{line} < /dev/null")
        assert {"results.txt", "train.py"} <= set(laptop.ssh(f"{number}.cluster", "ls /tmp; ls /tmp/code").split())
    laptop.run("rm", "-r", "code", "results.txt")
