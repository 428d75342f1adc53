"""Images pinned for a job: all its steps and requeues use the digest that the tag had at submit. Also lock files."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import images
from tests.fakeregistry import Fault, Faulty, Login
from tests.kernel.registry import Server
from tests.slurm.lab import Lab
from tests.slurm.steps import assert_nothing_left, end, expect, plugin_argument, srun
from tests.slurm.steps import refused as run_refused
from tests.slurm.test_pull import after_request, delete, front, numbered
from tests.waiting import until

SHOW = "cat /number"
DOCS = (Path(__file__).parents[2] / "docs/howto/pins.md").read_text()


@pytest.fixture
def shown(lab: Lab, registry: Server) -> Iterator[Faulty]:
    """Serve the registry to the nodes."""
    with front(lab, registry) as seen:
        yield seen


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    lab.run("rm -f out job.sh *.lock")
    assert_nothing_left(lab)


class Tag:
    """A tag that moves; ``image`` is its name for --container-image."""

    def __init__(self, registry: Server, shown: Faulty, repository: str) -> None:
        self._registry, self.repository = registry, f"pins/{repository}"
        self.image = f"{shown.host}#{self.repository}:a"
        self.shown = shown
        self.number = 0
        self.move()

    def move(self) -> None:
        """Point the tag to a new image, whose file /number counts up."""
        self.number += 1
        made = numbered(self.number)
        self.digest = made.digest()
        self._registry.pusher.image(self.repository, "a", made)

    @property
    def asked(self) -> list[str]:
        """Return the methods of all requests for the tag."""
        return [each.method for each in self.shown.seen if each.path.endswith(f"{self.repository}/manifests/a")]


@pytest.fixture
def tag(registry: Server, shown: Faulty, request: pytest.FixtureRequest) -> Tag:
    return Tag(registry, shown, request.node.originalname.removeprefix("test_").replace("_", "-"))


def submit(lab: Lab, *words: str, script: str = SHOW, **where: Any) -> str:
    """Submit a batch job on n1 with its output in the file out, and return its id."""
    lab.run("cat > job.sh", input=f"#!/bin/sh\n{script}\n")
    return lab.run(["sbatch", "--parsable", "-w", "n1", "-o", "out", *words, "job.sh"], **where).stdout.strip()


def show(lab: Lab, job: str) -> str:
    """Return the job's lines without the trailing space that Slurm printed before 26.05."""
    return lab.run(["scontrol", "show", "job", job]).stdout.replace(" \n", "\n")


def slurm_mounts(lab: Lab) -> list[str]:
    """Return the mounts that srun needs in a container."""
    with open(f"{lab.root}/etc/slurm/plugstack.conf.d/pyxis.conf") as file:
        plugin = file.read().split()[1]
    kind = sysconfig.get_config_var("MULTIARCH")
    return ["/usr/bin/srun", plugin, f"/usr/lib/{kind}", f"/usr/lib/{kind}:/lib/{kind}", "/lib64", "/etc", "/run/munge"]


def output(lab: Lab, job: str) -> str:
    """Wait for the end of a job, and return its output."""
    until(lambda: "COMPLETED" in show(lab, job), f"job {job} ends")
    return lab.run("cat out").stdout


@pytest.mark.parity("sbatch --container-image=…:TAG")
@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_a_batch_job_has_what_the_tag_was_at_submit(lab: Lab, tag: Tag, export: str) -> None:
    job = submit(lab, "--hold", f"--export={export}", f"--container-image={tag.image}")
    assert tag.asked == ["HEAD"]
    tag.move()
    lab.run(["scontrol", "release", job])
    assert output(lab, job).endswith("1\n")
    assert tag.asked == ["HEAD"]


@pytest.mark.parity("a requeue after the tag has moved")
def test_requeued_job_keeps_its_pin(lab: Lab, tag: Tag) -> None:
    script = f'echo restart ${{SLURM_RESTART_COUNT:-0}} $({SHOW}); test -n "$SLURM_RESTART_COUNT" || sleep 300'
    job = submit(lab, "--requeue", "--open-mode=append", f"--container-image={tag.image}", script=script)
    until(lambda: "restart 0 1\n" in lab.run("cat out || true").stdout, "the job runs")
    tag.move()
    lab.run(["scontrol", "requeue", job], user="root")
    until(lambda: "PENDING" in show(lab, job), "the job is queued again")
    lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], user="root")  # instead of two minutes later
    until(lambda: "restart 1 1\n" in lab.run("cat out").stdout, "the job runs again", 250)
    assert output(lab, job) and tag.asked == ["HEAD"]


@pytest.mark.parity("steps of the script with the same image")
def test_steps_of_a_script_keep_its_pin(lab: Lab, tag: Tag) -> None:
    """srun within the script's container uses the pinned digest for the same image."""
    step = f"/usr/bin/srun --overlap -n1 --container-image={tag.image} {SHOW}"
    mounts = f"--container-mounts={','.join(slurm_mounts(lab))}"
    job = submit(lab, "--hold", f"--container-image={tag.image}", mounts, script=f"echo $({SHOW}) $({step})")
    tag.move()
    lab.run(["scontrol", "release", job])
    assert output(lab, job).endswith("1 1\n")


@pytest.mark.parity("sbatch --container-pin=IMAGE", "PYXIS_CONTAINER_PIN")
@pytest.mark.parametrize("way", ["--container-pin", "PYXIS_CONTAINER_PIN"])
def test_steps_of_a_host_script_have_pinned_images(lab: Lab, tag: Tag, way: str) -> None:
    words = (f"--container-pin={tag.image}",) if way == "--container-pin" else ()
    env = {} if words else {way: tag.image}
    script = f"test -e /number || echo host; srun --container-image={tag.image} {SHOW}"
    job = submit(lab, "--hold", *words, script=script, env=env)
    tag.move()
    lab.run(["scontrol", "release", job])
    out = output(lab, job).splitlines()
    assert (out[0], out[-1]) == ("host", "1")


@contextlib.contextmanager
def allocation(
    lab: Lab, script: str, *words: str, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a shell in an allocation, and wait until it has reached ``read line``."""
    command = lab.popen(["salloc", "-Q", "-N2", *words, "sh", "-c", f"echo up; read line; {script}"], env=env)
    expect(command, "up")
    yield command
    if command.poll() is None:
        end(command)


@pytest.mark.parity("salloc: the pin applies to its steps")
def test_steps_of_an_allocation_keep_its_pin(lab: Lab, tag: Tag) -> None:
    step = f"srun --export=NONE --container-image={tag.image} {SHOW}"
    script = f"srun {SHOW}; {step}; srun --container-pin=no {SHOW}"
    with allocation(lab, script, f"--container-image={tag.image}") as shell:
        tag.move()
        assert end(shell)[0].split() == ["1", "1", "1", "1", "2", "2"]
    assert tag.asked == ["HEAD"] * 2


@pytest.mark.parity("steps with another tag resolve it")
def test_another_tag_is_resolved_by_its_step_once(lab: Lab, tag: Tag, registry: Server, shown: Faulty) -> None:
    other = Tag(registry, shown, "other")
    env = {"PYXIS_CONTAINER_IMAGE": tag.image}
    with allocation(lab, f"srun --container-image={other.image} {SHOW}", env=env) as shell:
        other.move()
        assert end(shell)[0].split() == ["2", "2"]
    assert other.asked == ["HEAD"]


@pytest.mark.parity("heterogeneous jobs have one digest")
def test_a_job_in_a_job_has_its_own(lab: Lab, tag: Tag) -> None:
    """The inner job resolves the tag again, although it inherits the pin of the outer job in PYXIS_PINNED."""
    inner = f"salloc -Q -n1 --container-image={tag.image} srun {SHOW}"
    outer = f'env -i HOME=$HOME PATH=$PATH PYXIS_PINNED="$PYXIS_PINNED" {inner}'
    with allocation(lab, outer, f"--container-image={tag.image}") as shell:
        tag.move()
        assert end(shell)[0].split() == ["2"]


@pytest.mark.parity("--container-pin=no")
@pytest.mark.parametrize("words", [("--container-pin=no",), ()])
def test_jobs_whose_steps_resolve_their_own_tags(lab: Lab, tag: Tag, words: tuple[str, ...]) -> None:
    """An option or an argument of the plugin switches pins off."""
    site = contextlib.nullcontext() if words else plugin_argument(lab, "pin_tags=no")
    with site:
        job = submit(lab, "--hold", f"--container-image={tag.image}", *words)
        assert tag.asked == []
        tag.move()
        lab.run(["scontrol", "release", job])
        assert output(lab, job).endswith("2\n")


@pytest.mark.parity(":latest is implied")
def test_latest_is_implied_and_docker_is_the_same(lab: Lab, registry: Server, shown: Faulty) -> None:
    """A pin for a name without a tag also applies to the name with docker:// and :latest."""
    registry.pusher.image("pins/latest", "latest", numbered(1))
    image = f"{shown.host}#pins/latest"
    step = f"srun --container-image=docker://{shown.host}/pins/latest:latest {SHOW}"
    with allocation(lab, step, env={"PYXIS_CONTAINER_IMAGE": image}) as shell:
        registry.pusher.image("pins/latest", "latest", numbered(2))
        assert end(shell)[0].split() == ["1", "1"]


@pytest.mark.parity("digests, squashfs files")
def test_without_a_tag_submit_needs_no_registry(lab: Lab, tag: Tag) -> None:
    """An image by digest, a file, and a job without an image cause no request to the registry."""
    by_digest = f"{tag.image.removesuffix(':a')}@{tag.digest}"
    srun(lab, f"--container-image={tag.image}", "--container-save=./a.sqsh", "true")
    before = len(tag.shown.seen)
    jobs = [
        submit(lab, "--hold", *words)
        for words in ((f"--container-image={by_digest}",), ("--container-image=./a.sqsh",), ())
    ]
    try:
        assert len(tag.shown.seen) == before
        for job in jobs[:2]:
            lab.run(["scontrol", "release", job])
            assert output(lab, job).endswith("1\n")
    finally:
        lab.run(["scancel", *jobs])
        lab.run("rm a.sqsh")


@pytest.mark.parity("an index is pinned for all architectures")
def test_an_index_is_pinned_for_all_architectures(lab: Lab, registry: Server, shown: Faulty) -> None:
    mine, other = numbered(1), numbered(2)
    other.architecture = "riscv64"
    for image in (mine, other):
        registry.pusher.image("pins/multi", "", image)
    both = images.index([(image, {"os": "linux", "architecture": image.architecture}) for image in (mine, other)])
    digest = registry.pusher.manifest("pins/multi", "a", both)
    name = f"{shown.host}#pins/multi:a"
    out = output(lab, submit(lab, f"--container-image={name}", script=f"{SHOW}; echo $PYXIS_PINNED")).splitlines()
    assert out[-2:] == ["1", f"tag {shown.host}/pins/multi:a {digest}"]


@pytest.mark.parity("a registry that only nodes reach costs a warning")
def test_a_registry_that_only_nodes_reach(lab: Lab, tag: Tag) -> None:
    """The submission does not fail, unless it requests a pin."""
    words = (f"--container-image={tag.image}",)
    with lab.unreachable("ctl", "registry"):
        lab.run("cat > job.sh", input=f"#!/bin/sh\n{SHOW}\n")
        done = lab.run(["sbatch", "--parsable", "-w", "n1", "-o", "out", *words, "job.sh"])
        warning = f"--container-image={tag.image} cannot be looked up now: "
        assert done.stderr.count(warning) == 1, done.stderr
        assert output(lab, done.stdout.strip()).endswith("1\n")
        refused = lab.run(["sbatch", *words, "--container-pin=yes", "job.sh"], check=False)
        assert refused.returncode != 0 and "cannot be pinned: " in refused.stderr
        assert not lab.run(["squeue", "-h"]).stdout
        stderr = run_refused(lab, *words, "--container-pin=yes", "true")
        assert "--container-pin: neither sbatch nor srun has resolved" in stderr
        assert "use --container-pin=no to let each node" in stderr


@pytest.mark.parity("a registry that does not answer delays the submission by seconds only")
def test_a_registry_that_says_nothing_is_not_waited_for(lab: Lab, tag: Tag) -> None:
    over = threading.Event()

    def wait(body: bytes) -> bytes:
        over.wait(120)
        return body

    tag.shown.faults.append(Fault("/manifests/", times=1, change=wait))
    try:
        with plugin_argument(lab, "resolve_timeout=1"):
            lab.run("cat > job.sh", input="#!/bin/sh\n")
            words = ["sbatch", "--parsable", "--hold", "-o", "out", f"--container-image={tag.image}", "job.sh"]
            done = lab.run(words)
    finally:
        over.set()
    assert "cannot be looked up now" in done.stderr and "does not answer within" in done.stderr, done.stderr
    lab.run(["scancel", done.stdout.strip()])


@pytest.mark.parity("logins at submission")
def test_a_login_is_used_at_submit(lab: Lab, tag: Tag) -> None:
    tag.shown.login = Login({"alice": "secret"})
    lab.run("mkdir -p .config/enroot; cat > .config/enroot/.credentials; chmod 600 .config/enroot/.credentials",
            input=f"machine {tag.shown.host.partition(':')[0]} login alice password secret\n")  # fmt: skip
    try:
        job = submit(lab, "--hold", f"--container-image={tag.image}")
        tag.move()
        lab.run(["scontrol", "release", job])
        assert output(lab, job).endswith("1\n")
        lab.run("rm .config/enroot/.credentials")
        done = lab.run(["sbatch", "--parsable", "--hold", f"--container-image={tag.image}", "job.sh"])
        assert "cannot be looked up now" in done.stderr
        lab.run(["scancel", done.stdout.strip()])
        refused = lab.run(["sbatch", f"--container-image={tag.image}", "--container-pin=yes", "job.sh"], check=False)
        assert refused.returncode != 0 and "cannot be pinned" in refused.stderr
    finally:
        lab.run("rm -rf .config/enroot")


@pytest.mark.parity("if the registry no longer has a digest")
def test_missing_digest_is_reported_with_the_job_that_pinned_it(lab: Lab, tag: Tag, registry: Server) -> None:
    old = tag.digest
    job = submit(lab, "--hold", f"--container-image={tag.image}")
    tag.move()
    delete(registry, tag.repository, old)
    lab.run(["scontrol", "release", job])
    until(lambda: "FAILED" in show(lab, job), "the job fails")
    out = lab.run("cat out").stdout
    assert f"but the job has pinned it to {old}" in out and "submit the job again" in out, out


@pytest.mark.parity("heterogeneous jobs have one digest")
def test_a_heterogeneous_job_has_one_digest(lab: Lab, tag: Tag) -> None:
    """salloc and sbatch call the plugin for each component."""
    moved = after_request("a")(tag.move)
    tag.shown.faults.append(moved)
    words = ["salloc", "-Q", "-w", "n1", f"--container-image={tag.image}", ":", "-w", "n2"]
    step = f"srun --het-group=0,1 --container-image={tag.image} {SHOW}"
    assert lab.run([*words, "sh", "-c", step]).stdout.split() == ["1", "1"]
    assert tag.asked == ["HEAD"]


@pytest.mark.security("H6")
@pytest.mark.parametrize("text", ["tag x", "image 1", "lock\npath /etc/shadow\nimage 1 a b", "path /\n\n", "\ttag a b"])
def test_forged_pin_runs_nothing_on_the_host(lab: Lab, tag: Tag, text: str) -> None:
    inside = "test -e /number && echo container || echo host"
    for variable in ("PYXIS_PINNED", "SLURM_PYXIS_PINNED"):
        words = ("--container-lock=./x",) if "lock" in text else ()
        done = lab.run(["srun", "-w", "n1", f"--container-image={tag.image}", *words, "sh", "-c", inside],
                       env={variable: text}, check=False)  # fmt: skip
        assert "host" not in done.stdout.split() and "Traceback" not in done.stderr
        assert "root:" not in done.stderr


LOCK = "/tmp/team.lock"  # each node has its own /tmp: only the submit host has this file


@pytest.fixture
def lock(lab: Lab, tag: Tag) -> Iterator[str]:
    """Write a lock file with the tag's current digest; then move the tag."""
    lab.run(["penroot", "lock", LOCK, tag.image])
    tag.move()
    tag.shown.seen.clear()
    yield f"--container-lock={LOCK}"
    lab.run(["rm", "-f", LOCK])


@pytest.mark.parity("ENROOT_LOCK", "srun --container-lock", "PYXIS_CONTAINER_LOCK")
@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_a_step_has_the_digest_of_the_lock_file(lab: Lab, tag: Tag, lock: str, export: str) -> None:
    words = ["srun", "-N2", f"--export={export}", f"--container-image={tag.image}"]
    assert lab.run([*words, lock, *SHOW.split()]).stdout == "1\n1\n"
    assert lab.run([*words, *SHOW.split()], env={"PYXIS_CONTAINER_LOCK": LOCK}).stdout == "1\n1\n"
    assert lab.run([*words, *SHOW.split()], env={"ENROOT_LOCK": LOCK}).stdout == "1\n1\n"
    assert tag.asked == []
    assert lab.run([*words, *SHOW.split()]).stdout == "2\n2\n"


@pytest.mark.parity("PYXIS_CONTAINER_LOCK", "sbatch --container-lock")
@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_batch_job_has_the_lock_file_as_it_was(lab: Lab, tag: Tag, lock: str, way: str) -> None:
    """The script runs on the host. Its steps, on any node, use the lock file as it was at submission."""
    words = (lock,) if way == "option" else ()
    env = {} if words else {"PYXIS_CONTAINER_LOCK": LOCK}
    script = f"cd /tmp; srun --container-image={tag.image} {SHOW}; srun --container-image={tag.image}x true; echo $?"
    job = submit(lab, "--hold", *words, script=script, env=env)
    lab.run(["rm", LOCK])
    lab.run(["scontrol", "release", job])
    out = output(lab, job)
    assert "\n1\n" in out and out.endswith("\n1\n") and f"{LOCK}: " in out and "is not in this lock file" in out
    assert tag.asked == []


@pytest.mark.parity("sbatch --container-lock")
@pytest.mark.parametrize("way", ["option", "setting"])
def test_script_in_a_container_uses_the_lock_file(lab: Lab, tag: Tag, lock: str, way: str) -> None:
    words, env = ([lock], {}) if way == "option" else ([], {"ENROOT_LOCK": LOCK})
    job = submit(lab, "--hold", *words, f"--container-image={tag.image}", env=env)
    lab.run(["rm", LOCK])
    lab.run(["scontrol", "release", job])
    assert output(lab, job).endswith("1\n")
    assert tag.asked == []


@pytest.mark.parity("typos in a lock file")
@pytest.mark.parametrize("command", ["srun", "sbatch", "salloc"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version 1\n", "is not in this lock file"),
        ("version 7\n", f"{LOCK}:1: unknown 'version 7'"),
        ("version 1\nubuntu sha256:1\n", f"{LOCK}:2: sha256:1 is no digest"),
        ("", f"there is no lock file {LOCK}"),
    ],
)
def test_error_is_reported_before_anything_is_queued(lab: Lab, command: str, text: str, says: str) -> None:
    lab.run(f"cat > {LOCK}" if text else f"rm -f {LOCK}", input=text)
    lab.run("cat > job.sh; chmod 755 job.sh", input="#!/bin/sh\n")
    try:
        words = [command, f"--container-lock={LOCK}", "--container-image=registry:5000#minimal:1", "./job.sh"]
        done = lab.run(words, check=False)
        assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
        if "not in" in says:
            assert f"add it: penroot lock {LOCK} registry:5000#minimal:1" in done.stderr
        assert not lab.run(["squeue", "-h"]).stdout
    finally:
        lab.run(["rm", "-f", LOCK])


def test_options_that_contradict_a_lock(lab: Lab, tag: Tag, lock: str) -> None:
    stderr = run_refused(lab, lock, "--container-pin=no", f"--container-image={tag.image}", "true")
    assert "--container-pin and --container-lock contradict each other" in stderr


def test_image_without_tag_needs_no_lock(lab: Lab, tag: Tag, lock: str) -> None:
    by_digest = f"{tag.image.removesuffix(':a')}@{tag.digest}"
    assert srun(lab, lock, f"--container-image={by_digest}", *SHOW.split()) == "2\n"
    srun(lab, f"--container-image={by_digest}", "--container-save=./b.sqsh", "true")
    try:
        assert srun(lab, lock, "--container-image=./b.sqsh", *SHOW.split()) == "2\n"
    finally:
        lab.run("rm b.sqsh")


@pytest.mark.parity("a lock file of a job that was submitted without penroot")
def test_node_reads_a_lock_file_that_nobody_has_read(lab: Lab, tag: Tag, lock: str) -> None:
    """As in a job from slurmrestd, only the environment requests the lock file."""
    lab.run(f"cp {LOCK} team.lock")
    variables = f"--export=HOME,PYXIS_CONTAINER_IMAGE={tag.image},PYXIS_CONTAINER_LOCK"
    assert srun(lab, f"{variables}=team.lock", *SHOW.split()) == "1\n"
    stderr = run_refused(lab, f"{variables}=none.lock", "true")
    assert "there is no lock file /home/alice/none.lock" in stderr


@pytest.mark.parity("an image that is missing in the lock file")
def test_a_locked_digest_that_is_gone(lab: Lab, tag: Tag, lock: str, registry: Server) -> None:
    old = lab.run(["cat", LOCK]).stdout.split()[-1]
    delete(registry, "pins/a-locked-digest-that-is-gone", old)
    stderr = run_refused(lab, lock, f"--container-image={tag.image}", "true")
    assert f"{LOCK} locks it to {old}" in stderr and f"penroot lock {LOCK}" in stderr


@pytest.mark.parity("a lock file of a job that was submitted without penroot")
def test_importer_gets_the_digest(lab: Lab, tag: Tag, lock: str) -> None:
    """An importer, the site's program that provides images, gets the digest of a lock file instead of the tag."""
    digest = lab.run(["cat", LOCK]).stdout.split()[-1]
    srun(lab, f"--container-image={tag.image}", "--container-save=given.sqsh", "true")
    lab.run(
        "cat > importer; chmod 755 importer",
        input="#!/bin/sh\n[ $1 = release ] || { echo $2 >> /home/alice/log; echo /home/alice/given.sqsh; }\n",
    )
    try:
        with plugin_argument(lab, "importer=/home/alice/importer"):
            srun(lab, lock, f"--container-image={tag.image}", "true")
            srun(lab, f"--container-image={tag.image}", "true")
        host, _, name = tag.image.removesuffix(":a").partition("#")
        assert lab.run("cat log").stdout == f"docker://{host}#{name}@{digest}\ndocker://{tag.image}\n"
    finally:
        lab.run("rm -f importer log given.sqsh")


@pytest.mark.parity("show_image=yes")
def test_comment_of_the_job_names_the_image(lab: Lab, tag: Tag) -> None:
    with plugin_argument(lab, "show_image=yes"):
        pinned = f"image={tag.image.replace('#', '/')}@{tag.digest}"
        job = submit(lab, "--requeue", "--comment=mine; a=b", f"--container-image={tag.image}", script="sleep 300")
        until(lambda: f"Comment=mine; a=b; {pinned}\n" in show(lab, job), "the comment")
        lab.run(["scontrol", "requeue", job], user="root")
        until(lambda: "PENDING" in show(lab, job), "the job is queued again")
        lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], user="root")
        until(lambda: "RUNNING" in show(lab, job) and "Restarts=1" in show(lab, job), "the job runs again", 250)
        assert show(lab, job).count(pinned) == 1
        lab.run(["scancel", job])


def test_the_comment_of_each_job_of_an_array(lab: Lab, tag: Tag) -> None:
    """The id of the array is also the id of one of its jobs."""
    pinned = f"image={tag.image.replace('#', '/')}@{tag.digest}"
    with plugin_argument(lab, "show_image=yes"):
        words = ("--comment=mine", f"--container-image={tag.image}")
        array = submit(lab, "--array=1-2", *words, script="sleep 300")
        until(lambda: show(lab, array).count(pinned) >= 2, "the comments of the array")
        assert show(lab, array).count(f"Comment=mine; {pinned}\n") == show(lab, array).count(pinned) == 2
        lab.run(["scancel", array])


@pytest.mark.parity("the examples of docs/howto/pins.md")
def test_the_examples_of_the_documentation(lab: Lab, tag: Tag) -> None:
    """Run the examples with an image of the lab, and a program of that image."""
    block = re.search(r"```console\n(.*?)```", DOCS, re.S)
    assert block
    commands = [line.removeprefix("$ ").partition("  #")[0].strip() for line in block[1].splitlines()]
    commands = [
        re.sub("python .*", SHOW, each.replace("nvcr.io#nvidia/pytorch:24.05-py3", tag.image)) for each in commands
    ]
    lab.run("cat > train.sh", input=f"#!/bin/sh\n{SHOW}\n")
    lab.run("cat > steps.sh", input=f"#!/bin/sh\nsrun --container-image={tag.image} {SHOW}\n")
    try:
        for command in commands[:2]:
            job = lab.run(command.replace("sbatch", "sbatch --parsable --hold -w n1 -o out")).stdout.strip()
            first = tag.number
            tag.move()
            lab.run(["scontrol", "release", job])
            assert output(lab, job).endswith(f"{first}\n")
        lab.run(commands[2])
        first = tag.number
        tag.move()
        assert lab.run(commands[3].replace("srun", "srun -w n1")).stdout == f"{first}\n"
        assert lab.run(commands[4], node="n1").stdout == f"{first}\n"
        checked = lab.run(commands[5], check=False)
        assert checked.returncode == 1 and f"{tag.image} is {tag.digest}" in checked.stdout
        text = re.search(r"```\n(# images\.lock.*?)```", DOCS, re.S)
        assert text
        lab.run("cat > images.lock", input=text[1])
        refused = lab.run(commands[3], check=False)
        assert "is not in this lock file" in refused.stderr
        assert "ubuntu:24.04 has no digest yet" in run_refused(
            lab, "--container-lock=images.lock", "--container-image=ubuntu:24.04", "true"
        )
    finally:
        lab.run("rm -f train.sh steps.sh images.lock")
