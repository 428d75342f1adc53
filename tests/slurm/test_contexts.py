"""Container steps within Slurm: limits, cgroups, prologs, allocations, images of an engine, a reboot, a requeue."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import (
    HELPER,
    IMAGE,
    MINIMAL,
    ON_N1,
    assert_nothing_left,
    end,
    expect,
    next_line,
    refused,
    sh,
    srun,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parity("tasks have the rlimits of the step")
def test_limits_are_those_of_the_step(lab: Lab) -> None:
    script = "ulimit -s 4096; ulimit -l 48; ulimit -n 512"
    show = "sh -c 'ulimit -s; ulimit -l; ulimit -n'"
    outside = lab.run(f"{script}; srun -w n1 bash -c 'ulimit -s; ulimit -l; ulimit -n'").stdout
    assert outside.split() == ["4096", "48", "512"]
    assert lab.run(f"{script}; srun -w n1 {IMAGE} {show}").stdout == outside


@pytest.mark.parity("tasks are in the cgroups of the step")
def test_a_task_is_in_the_cgroups_of_its_step(lab: Lab) -> None:
    show = "echo $SLURM_JOB_ID $$; read line"
    found = []
    for options in ((), (IMAGE,)):
        step = lab.popen(["srun", *ON_N1, *options, *sh(show)])
        job, pid = next_line(step).split()
        seen = lab.run(["cat", f"/proc/{pid}/cgroup"], node="n1", user="root").stdout
        found.append(seen.replace(f"job_{job}/", "job/"))
        end(step)
    assert found[0] == found[1]
    assert "/job/step_0" in found[0]


PROLOG = "#!/bin/sh\necho export FROM_PROLOG=yes\necho print of $IMAGE_NAME\ntest -d /srv/work && echo print inside\n"


@pytest.mark.security("R4")
def test_the_helper_is_in_the_cgroups_of_the_first_task(lab: Lab) -> None:
    """slurmstepd has started this helper before the tasks ("ahead"), so no task starts another helper."""
    step = lab.popen(["srun", *ON_N1, IMAGE, *sh("echo ready; read line")])
    assert next_line(step) == "ready\n"
    task = lab.run(["pgrep", "-u", "alice", "-x", "sh"], node="n1", user="root").stdout.split()[0]
    helper = lab.run(["pgrep", "-u", "alice", "-f", HELPER], node="n1", user="root").stdout.split()
    assert len(helper) == 1
    groups = [lab.run(["cat", f"/proc/{pid}/cgroup"], node="n1", user="root").stdout for pid in (task, *helper)]
    assert groups[0] == groups[1]
    words = lab.run(["cat", f"/proc/{helper[0]}/cmdline"], node="n1", user="root").stdout.split("\0")
    assert "ahead" in words
    end(step)


@pytest.mark.parity("penroot-launch", "--task-prolog runs in the container")
def test_a_task_prolog_runs_inside(lab: Lab) -> None:
    lab.run("cat > prolog; chmod 755 prolog", input=PROLOG)
    try:
        options = ["--task-prolog=/home/alice/prolog", "--container-mount-home"]
        out = srun(lab, *options, IMAGE, *sh("echo $FROM_PROLOG"))
        assert out.splitlines() == ["of minimal", "inside", "yes"]
    finally:
        lab.run(["rm", "prolog"])


@pytest.mark.parity("--task-prolog runs in the container")
def test_a_task_prolog_that_is_not_in_the_container_is_refused(lab: Lab) -> None:
    lab.run("cat > prolog; chmod 755 prolog", input=PROLOG)
    try:
        stderr = refused(lab, "--task-prolog=/home/alice/prolog", IMAGE, "true")
        assert "task_prolog can not be executed (/home/alice/prolog) No such file or directory" in stderr
    finally:
        lab.run(["rm", "prolog"])


@pytest.mark.parity("salloc: its steps run in containers")
def test_steps_of_salloc(lab: Lab) -> None:
    script = f"srun {IMAGE} --container-name=alloc true; srun --container-name=alloc sh -c 'echo $IMAGE_NAME'"
    try:
        assert lab.run(["salloc", "-Q", "-w", "n1", "sh", "-c", script]).stdout == "minimal\n"
    finally:
        lab.run(["penroot", "remove", "-f", "pyxis_alloc"], node="n1")


@pytest.mark.security("H24")
def test_srun_in_a_container_that_has_slurm_and_the_plugin(lab: Lab) -> None:
    """The step that this srun starts has its own container."""
    with open(f"{lab.root}/etc/slurm/plugstack.conf.d/pyxis.conf") as file:
        plugin = file.read().split()[1]
    libraries = "/usr/lib/" + sysconfig.get_config_var("MULTIARCH")
    files = ["/usr/bin/srun", plugin, libraries, "/etc", "/run/munge"]
    nested = f"srun --overlap -n1 {IMAGE} sh -c 'echo nested in $IMAGE_NAME'"
    assert srun(lab, IMAGE, f"--container-mounts={','.join(files)}", *sh(nested)) == "nested in minimal\n"


@pytest.mark.parity("heterogeneous jobs: each component may have a container, also with --het-group")
def test_components_of_a_heterogeneous_job(lab: Lab) -> None:
    show = "sh -c 'echo $IMAGE_NAME'"
    script = f"srun --het-group=1 {IMAGE} {show}; srun --het-group=0 hostname; srun --het-group=0,1 {IMAGE} {show}"
    out = lab.run(["salloc", "-Q", "-w", "n1", ":", "-w", "n2", "sh", "-c", script]).stdout
    assert out == "minimal\nn1\nminimal\nminimal\n"


# As in docker, the id of an image is the digest of its configuration.
ENGINE = """#!/bin/sh
case $1 in
image) echo sha256:$(grep -oE '[0-9a-f]{64}[.]json' /home/alice/engine.json | cut -c-64) ;;
pull) exit 1 ;;
save) cat /home/alice/engine.tar ;;
esac
"""


@pytest.fixture
def engines(lab: Lab) -> Iterator[None]:
    """Install a fake docker and podman on n1: one image, and the verbs that an import uses: inspect, pull and save."""
    name = MINIMAL.partition("#")[2].partition(":")[0]
    copy = f"skopeo copy -q docker://registry.lab/{name}:docker docker-archive:engine.tar:minimal:1"
    lab.run(f"{copy} && tar -xOf engine.tar manifest.json > engine.json", node="n1")
    lab.run("mkdir /tmp/engine; cat > /tmp/engine/docker", node="n1", user="root", input=ENGINE)
    over = "mount -t overlay -o lowerdir=/tmp/engine:/usr/local/bin engines /usr/local/bin"
    lab.run(f"cd /tmp/engine && chmod 755 docker && cp docker podman && {over}", node="n1", user="root")
    yield
    lab.run("umount -l /usr/local/bin; rm -r /tmp/engine", node="n1", user="root")
    lab.run("rm engine.tar engine.json")


@pytest.mark.parity("--container-image: dockerd://")
@pytest.mark.parametrize("scheme", ["dockerd", "podman"])
def test_an_image_of_the_nodes_engine(lab: Lab, engines: None, scheme: str) -> None:
    assert srun(lab, f"--container-image={scheme}://minimal:1", *sh("echo $IMAGE_NAME")) == "minimal\n"


@pytest.mark.parity("a rebooted node runs the next step, which removes leftovers")
def test_a_node_that_is_booted_runs_the_next_step(lab: Lab) -> None:
    step = lab.popen(["srun", *ON_N1, IMAGE, "--container-writable", *sh("echo up; sleep 600")])
    expect(step, "up")
    crash = "pkill -KILL slurmd; pkill -KILL slurmstepd; pkill -KILL -u alice; rm -rf /run/pyxis /run/slurmd.pid"
    lab.run(crash, node="n1", user="root", check=False)
    lab.run(["scancel", "--user=alice"])
    lab.restart_daemon("n1", "slurmd")
    step.communicate(timeout=300)
    # A real boot also removes cgroups, and its new boot ID marks files on disk as old. Remove cgroups and files here.
    lab.run("find /sys/fs/cgroup -depth -type d -path '*job_*' -exec rmdir {} +", node="n1", user="root", check=False)
    assert srun(lab, IMAGE, "--container-writable", "pwd") == "/srv/work\n"
    lab.run("penroot list | xargs -r penroot remove -f", node="n1")


REQUEUED = f"""\
#!/bin/sh
srun {IMAGE} --container-writable sh -c 'echo up $SLURM_RESTART_COUNT; test -n "$SLURM_RESTART_COUNT" || sleep 600'
"""


@pytest.mark.parity("a requeued job leaves nothing on the node, and then runs in a container again")
def test_a_job_that_is_requeued(lab: Lab) -> None:
    """The first run leaves nothing on the node, and the second run gets a container again."""

    def written(line: str) -> bool:
        return line in lab.run("cat requeued.out", check=False).stdout.splitlines()

    def waits() -> bool:
        return lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout == "PENDING\n"

    options = ["--requeue", "--open-mode=append", "-w", "n1", "-o", "requeued.out"]
    job = lab.run(["sbatch", "--parsable", *options], input=REQUEUED).stdout.strip()
    try:
        until(lambda: written("up"), "the job has started")
        lab.run(["scontrol", "requeue", job])
        until(waits, "the job is queued again")
        assert_nothing_left(lab)
        # Slurm would wait two minutes, until the credentials of the first run have expired.
        lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
        until(lambda: written("up 1"), "the job has started again")
        until(lambda: not lab.run(["squeue", "-h"]).stdout, "the job has ended")
    finally:
        lab.run(["scancel", job], check=False)
        lab.run(["rm", "-f", "requeued.out"])
