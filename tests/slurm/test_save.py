"""--container-save: after srun has returned, the file is complete or absent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, clear, end, expect, kill_helper, refused, sh, srun

SAVE = "--container-save=saved.sqsh"
WRITABLE = "--container-writable"


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    clear(lab, "rm -f *.sqsh")


@pytest.mark.parity("srun returns after the save", "--container-save: the file is complete when srun returns")
def test_srun_returns_after_the_file_is_written(lab: Lab) -> None:
    srun(lab, IMAGE, SAVE, WRITABLE, *sh("echo 1 > /one; rm /usr/bin/sleep"))
    assert (
        srun(lab, "--container-image=./saved.sqsh", *sh("cat /one; ls /usr/bin/sleep 2>/dev/null; pwd"))
        == "1\n/srv/work\n"
    )


@pytest.mark.parity("--container-save: may overwrite the squashfs file that the container was started from")
def test_an_image_file_is_saved_over_itself(lab: Lab) -> None:
    srun(lab, IMAGE, SAVE, WRITABLE, *sh("echo 1 > /one"))
    srun(lab, "--container-image=./saved.sqsh", SAVE, WRITABLE, *sh("echo 2 > /two"))
    assert srun(lab, "--container-image=./saved.sqsh", "cat", "/one", "/two") == "1\n2\n"


def test_a_readonly_container_is_saved_as_its_image(lab: Lab) -> None:
    srun(lab, IMAGE, SAVE, "--container-readonly", "true")
    assert srun(lab, "--container-image=./saved.sqsh", *sh("echo $IMAGE_NAME")) == "minimal\n"


def test_a_named_container_stays_beside_its_file(lab: Lab) -> None:
    srun(lab, IMAGE, SAVE, WRITABLE, "--container-name=kept", *sh("echo 1 > /one"))
    assert srun(lab, "--container-name=kept", "cat", "/one") == "1\n"
    assert srun(lab, "--container-image=./saved.sqsh", "cat", "/one") == "1\n"


def test_saved_path_is_named_if_the_step_ran_elsewhere(lab: Lab) -> None:
    done = lab.run(f"cd; srun -w n1 {IMAGE} {SAVE} true; srun -w n1 --chdir=/var/tmp {IMAGE} {SAVE} true")
    lab.run(["rm", "/var/tmp/saved.sqsh"], node="n1")
    assert done.stderr.count("pyxis: n1: --container-save=saved.sqsh: the file is /var/tmp/saved.sqsh") == 1
    assert done.stderr.count(" is /") == 1


@pytest.mark.parity("export or save to a directory deletes nothing", "--container-save: a directory is refused")
def test_a_directory_is_refused_at_submit(lab: Lab) -> None:
    assert "is a directory" in refused(lab, IMAGE, "--container-save=./", "true")


@pytest.mark.parity("--container-save: a file that cannot be written")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/no/such/dir/x.sqsh", "no such directory: /no/such/dir"),
        ("/usr/x.sqsh", "the directory is not writable for you: /usr"),
        ("./" + 256 * "x", "the name has more than 255 bytes"),
        ("/usr", "/usr is a directory"),
    ],
)
def test_a_save_that_cannot_be_is_refused_before_the_tasks(lab: Lab, path: str, why: str) -> None:
    done = lab.run(["srun", "-w", "n1", IMAGE, f"--container-save={path}", *sh("echo ran")], check=False)
    assert done.returncode != 0
    assert why in done.stderr
    assert done.stdout == ""


def test_a_full_disk_is_said_before_the_tasks(lab: Lab) -> None:
    lab.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "tmpfs", "/mnt"], node="n1", user="root")
    try:
        done = lab.run(["srun", "-w", "n1", IMAGE, "--container-save=/mnt/x.sqsh", *sh("echo ran")], check=False)
    finally:
        lab.run(["umount", "/mnt"], node="n1", user="root")
    assert done.returncode != 0
    assert "--container-save=/mnt/x.sqsh: /mnt: No space left on device" in done.stderr
    assert done.stdout == ""


@pytest.mark.parity("--container-save: a save that fails at the end is reported")
def test_a_save_that_fails_at_the_end_is_said(lab: Lab) -> None:
    lab.run("mkdir late")
    try:
        save = ["--container-save=late/x.sqsh", "--container-mounts=./:/mnt"]
        done = lab.run(["srun", "-w", "n1", IMAGE, *save, "rmdir", "/mnt/late"], check=False)
        assert (
            "--container-save=late/x.sqsh: the container is not saved: no such directory: /home/alice/late"
            in done.stderr
        )
        assert "spank" not in done.stderr  # no line of Slurm's own
        assert done.returncode == 1  # from the last task, which has tried to save
    finally:
        lab.run("rm -rf late")


@pytest.mark.parity("--container-save: a save that fails at the end is reported")
def test_save_on_a_disk_that_fills_up_keeps_the_old_file(lab: Lab) -> None:
    lab.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=1777", "tmpfs", "/mnt"], node="n1", user="root")
    try:
        lab.run("echo old > /mnt/x.sqsh", node="n1")
        fill = sh("head -c 8000000 /dev/urandom > /big; echo ran")
        done = lab.run(["srun", "-w", "n1", IMAGE, WRITABLE, "--container-save=/mnt/x.sqsh", *fill], check=False)
        left = lab.run("ls -A /mnt; cat /mnt/x.sqsh", node="n1").stdout
    finally:
        lab.run(["umount", "/mnt"], node="n1", user="root")
    assert (done.returncode, done.stdout) == (1, "ran\n"), done.stderr
    assert "the container is not saved: cannot write /mnt/x.sqsh: No space left on device" in done.stderr
    assert done.stderr.count("is not saved") == 1
    assert left == "x.sqsh\nold\n"
    assert lab.run("penroot list", node="n1").stdout == ""


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("kill -SEGV $$", 139)])
def test_save_leaves_a_task_its_own_status(lab: Lab, script: str, status: int) -> None:
    done = lab.run(["srun", "-w", "n1", IMAGE, WRITABLE, SAVE, *sh(f"echo 1 > /one; {script}")], check=False)
    assert done.returncode == status, done.stderr
    assert srun(lab, "--container-image=./saved.sqsh", "cat", "/one") == "1\n"


def test_save_waits_for_the_last_of_several_tasks(lab: Lab) -> None:
    tasks = sh("sleep 0.$((3 - SLURM_PROCID)); echo $SLURM_PROCID > /of-$SLURM_PROCID")
    srun(lab, "-n3", IMAGE, WRITABLE, SAVE, *tasks)
    assert srun(lab, "--container-image=./saved.sqsh", *sh("cat /of-*")) == "0\n1\n2\n"


def test_save_leaves_a_task_its_stdin_and_signals(lab: Lab) -> None:
    assert lab.run(f"echo hello | srun -w n1 {IMAGE} {SAVE} cat").stdout == "hello\n"
    trap = sh("trap 'echo caught; exit 5' USR1; echo up; while :; do sleep 0.1; done")
    step = lab.popen(["srun", "-w", "n1", IMAGE, SAVE, *trap])
    expect(step, "up")
    lab.run("scancel --me --signal=USR1")
    out, errors = step.communicate(timeout=60)
    assert (step.returncode, out) == (5, "caught\n"), errors


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_save_onto_what_is_no_file_is_refused_before_the_tasks(lab: Lab, kind: str) -> None:
    target = "/dev/null" if kind == "a device" else "/var/tmp/fifo"
    lab.run("rm -f /var/tmp/fifo; mkfifo /var/tmp/fifo", node="n1")
    done = lab.run(["srun", "-w", "n1", IMAGE, f"--container-save={target}", *sh("echo ran")], check=False)
    lab.run("rm /var/tmp/fifo", node="n1")
    assert done.returncode != 0 and done.stdout == ""
    assert f"--container-save={target}: {target} is {kind}" in done.stderr


def test_save_onto_a_link_writes_its_target(lab: Lab) -> None:
    lab.run("ln -s v1.sqsh latest.sqsh")
    srun(lab, IMAGE, "--container-save=latest.sqsh", WRITABLE, *sh("echo 1 > /one"))
    assert lab.run("readlink latest.sqsh; stat -c %F v1.sqsh").stdout == "v1.sqsh\nregular file\n"
    assert srun(lab, "--container-image=./latest.sqsh", "cat", "/one") == "1\n"


@pytest.mark.parity("--container-save: nothing is saved if a task did not start")
def test_nothing_is_saved_where_a_task_did_not_start(lab: Lab) -> None:
    refused(lab, IMAGE, SAVE, "--container-workdir=/no/such", "true")
    assert lab.run(["ls", "saved.sqsh"], check=False).returncode != 0


@pytest.mark.parity("the process that removes a step's container is not killed with the step")
def test_the_save_survives_the_death_of_the_helper(lab: Lab) -> None:
    step = lab.popen(["srun", "-w", "n1", IMAGE, SAVE, WRITABLE, *sh("echo 1 > /one; echo up; read line")])
    expect(step, "up")
    kill_helper(lab)
    end(step)
    assert srun(lab, "--container-image=./saved.sqsh", "cat", "/one") == "1\n"
