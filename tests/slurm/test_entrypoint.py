"""--container-entrypoint: the entrypoint runs once, in the container, and tasks get its environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, plugin_argument, refused, sh, srun
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")

RUN = "--container-entrypoint"
ENTRY = r"""
cat > /entry.sh <<'END'
#!/bin/sh
echo "entry for $*"
echo once >> /tmp/runs
export MADE="made $GIVEN"
export IMAGE_NAME=changed
cd /usr
exec "$@"
END
chmod 755 /entry.sh
sed -i 's|exec |exec /entry.sh |' /etc/rc
"""


@pytest.fixture(scope="module")
def entry(lab: Lab) -> Iterator[str]:
    """Yield srun's option for an image whose entrypoint sets variables, changes the directory, and counts its runs."""
    srun(lab, IMAGE, "--container-save=entry.sqsh", "--container-writable", *sh(ENTRY))
    yield "--container-image=./entry.sqsh"
    lab.run(["rm", "entry.sqsh"])


SHOW = sh("echo $MADE,$IMAGE_NAME,$(pwd); cat /tmp/runs 2>/dev/null; true")


@pytest.mark.parity("an entrypoint that is not requested does not run", "--container-entrypoint")
def test_the_entrypoint_is_left_out_by_default(lab: Lab, entry: str) -> None:
    assert srun(lab, entry, *SHOW) == ",minimal,/srv/work\n"


@pytest.mark.parity("--container-entrypoint")
def test_tasks_get_its_environment_and_directory(lab: Lab, entry: str) -> None:
    assert srun(lab, entry, RUN, *SHOW) == "made ,changed,/usr\nonce\n"
    assert srun(lab, entry, RUN, "--container-workdir=/etc", *SHOW) == "made ,changed,/etc\nonce\n"


def test_entrypoint_runs_once_for_all_tasks(lab: Lab, entry: str) -> None:
    assert srun(lab, entry, RUN, "-n3", "cat", "/tmp/runs") == "once\n" * 3


@pytest.mark.parity("--container-env")
def test_entrypoint_sees_the_variables_of_container_env(lab: Lab, entry: str) -> None:
    env = {"GIVEN": "by the job"}
    assert "made ," in srun(lab, entry, RUN, *SHOW, env=env)
    assert "made by the job," in srun(lab, entry, RUN, "--container-env=GIVEN", *SHOW, env=env)


@pytest.mark.parity("--container-entrypoint-log")
def test_its_output_is_shown_when_asked_for(lab: Lab, entry: str) -> None:
    quiet = lab.run(["srun", "-w", "n1", entry, RUN, "true"])
    assert "entry for" not in quiet.stdout + quiet.stderr
    assert "entry for" in lab.run(["srun", "-w", "n1", entry, RUN, "--container-entrypoint-log", "true"]).stderr


def test_entrypoint_is_confined_like_a_task(lab: Lab, entry: str) -> None:
    assert "made" in srun(lab, entry, RUN, "--container-remap-root", *SHOW)
    assert "made" in srun(lab, entry, RUN, "--no-container-remap-root", *SHOW)


def test_entrypoint_must_run_its_command(lab: Lab) -> None:
    broken = "printf '#!/bin/sh\\necho refused; exit 3\\n' > /etc/rc; rm -f /etc/rc.local"
    srun(lab, IMAGE, "--container-save=broken.sqsh", "--container-writable", *sh(broken))
    try:
        stderr = refused(lab, "--container-image=./broken.sqsh", RUN, "true")
        assert "status 3" in stderr
        assert "refused" in stderr
        assert srun(lab, "--container-image=./broken.sqsh", "echo", "without") == "without\n"
    finally:
        lab.run(["rm", "broken.sqsh"])


@pytest.mark.parity("execute_entrypoint")
def test_site_can_turn_entrypoints_on(lab: Lab, entry: str) -> None:
    with plugin_argument(lab, "execute_entrypoint=1"):
        assert "made" in srun(lab, entry, *SHOW)
        assert "minimal" in srun(lab, entry, "--no-container-entrypoint", *SHOW)


USES = {
    "writes": ('{ echo 12; echo "penroot 34"; echo a line; } >&8; exec "$@"', "ran\n"),
    "writes the arguments": ('echo "$*" >&8; exec "$@"', "ran\n"),
    "writes no line": ('printf junk >&8; exec "$@"', "ran\n"),
    "joins the arguments": ('exec bash -lc "$*"', "ran\n"),
    "closes": ('exec "$@" 7<&- 8>&- 9<&-', "did not run the given command"),
    "redirects": ('exec 8> /tmp/log; exec "$@"', "the entrypoint of the image closed descriptor 8"),
    "locks by 9": (
        'exec 9> /tmp/lock; exec "$@"',
        "the command of the image's entrypoint did not wait for descriptor 9",
    ),
}


@pytest.mark.parametrize("use", USES)
def test_entrypoint_that_uses_descriptor_8_or_9(lab: Lab, use: str) -> None:
    """An entrypoint may write to descriptor 8. If it closes or redirects penroot's descriptors, the error says so."""
    script, answer = USES[use]
    made = f"printf '%s\\n' '#!/bin/sh' '{script}' > /etc/rc; chmod 755 /etc/rc; rm -f /etc/rc.local"
    srun(lab, IMAGE, "--container-save=uses.sqsh", "--container-writable", *sh(made))
    try:
        if answer == "ran\n":
            assert srun(lab, "--container-image=./uses.sqsh", RUN, "echo", "ran") == answer
        else:
            stderr = refused(lab, "--container-image=./uses.sqsh", RUN, "true")
            assert answer in stderr and "leave descriptors 7 to 9 alone" in stderr
    finally:
        lab.run(["rm", "uses.sqsh"])


def test_silent_entrypoint_is_named(lab: Lab) -> None:
    """The step waits for the entrypoint without a limit, and reports what it is waiting for."""
    lab.run("echo 'while sleep 1; do :; done' > stuck.rc")
    step = lab.popen(["srun", *ON_N1, IMAGE, RUN, "--container-mounts=/home/alice/stuck.rc:/etc/rc", "true"])
    try:
        assert step.stderr
        until(lambda: "waiting for the image's entrypoint" in step.stderr.readline(), "the step's message")
    finally:
        lab.run(["scancel", "--user=alice"])
        step.communicate(timeout=60)
        lab.run("rm stuck.rc")


LOUD = """
cat > /entry.sh <<'END'
#!/bin/sh
(while :; do echo spam; sleep 0.01; done) &
echo first words
yes spam | head -c 200000000
echo last words
exec "$@"
END
chmod 755 /entry.sh
sed -i 's|exec |exec /entry.sh |' /etc/rc
"""


@pytest.mark.security("C9")
def test_output_of_entrypoint_is_bounded(lab: Lab) -> None:
    """A process that the entrypoint has started keeps writing: it must neither block nor be killed."""
    srun(lab, IMAGE, "--container-save=loud.sqsh", "--container-writable", *sh(LOUD))
    try:
        script = "sleep 1; ps -o args | grep -c '[s]leep 0.01' || :"
        words = ("-w", "n1", "--mem=100", "--container-image=./loud.sqsh", RUN, "--container-entrypoint-log")
        done = lab.run(["srun", *words, *sh(script)])
        assert "first words" in done.stderr and "last words" in done.stderr
        assert "bytes of output are omitted here" in done.stderr and len(done.stderr) < 20_000_000
    finally:
        lab.run(["rm", "loud.sqsh"])
