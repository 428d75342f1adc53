"""Steps whose program cannot run because the interpreter of its #! line or ELF header is missing: one line names it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab
from tests.slurm.steps import IMAGE, ON_N1, clear, end, expect, refused, sbatch, sh

MOUNT = "--container-mounts=$HOME/interp:/p"


@pytest.fixture(scope="module", autouse=True)
def tools(lab: Lab) -> Iterator[None]:
    lab.run(
        "mkdir -p ~/interp/bin && cd ~/interp && ln -s /root/py/bin/python3 bin/python3 &&"
        " printf '#!/opt/none/sh2\\n' > tool && printf '#!/p/bin/python3\\n' > covered &&"
        " printf '#!/bin/sh\\r\\necho x\\r\\n' > crlf && printf '#!/p/tool\\n' > nested &&"
        " printf '#!/p/data\\n' > closed && touch data && printf '#!/bin/sh\\necho good\\n' > good &&"
        " chmod +x tool covered crlf nested closed good"
    )
    yield
    lab.run("rm -rf ~/interp")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/p/tool", "cannot run /p/tool: its interpreter /opt/none/sh2 does not exist in the container"),
        ("tool", "cannot run /p/tool: its interpreter /opt/none/sh2 does not exist in the container"),
        ("/p/crlf", r"cannot run /p/crlf: the first line ends in CR LF, so its interpreter is '/bin/sh\r'"),
        ("/p/nested", "cannot run /p/nested: its interpreter /opt/none/sh2 does not exist in the container"),
        ("/p/closed", "cannot run /p/closed: its interpreter /p/data is not executable"),
    ],
)
def test_interpreter_that_cannot_run_is_named_once(lab: Lab, command: str, message: str) -> None:
    options = ("-n2", "-N2", IMAGE, MOUNT, "--container-env=PATH=/p:/bin")
    done = lab.run(["srun", *options, command], check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "its interpreter" in line]
    assert lines and all(message in line for line in lines), done.stderr
    assert len(lines) <= 2 * 2  # on each node, a line from slurmstepd and a line on stderr


def test_mount_that_covers_an_interpreter_is_named(lab: Lab) -> None:
    options = (IMAGE, MOUNT, "--container-remap-root", "--container-mount-home")
    done = lab.run(["srun", *options, "/p/covered"], check=False)
    message = "its interpreter /p/bin/python3 leads to /root/py/bin/python3, which does not exist in the container"
    assert f"{message}; /root is mounted from " in done.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/p/bin/python3", "cannot run /p/bin/python3: No such file or directory: it leads to /root/py/bin/python3"),
        ("python3", "cannot run /p/bin/python3: No such file or directory: it leads to /root/py/bin/python3"),
        ("/p/data", "cannot run /p/data: Permission denied: it is not executable"),
    ],
)
def test_program_that_cannot_run_is_explained(lab: Lab, command: str, message: str) -> None:
    options = (IMAGE, MOUNT, "--container-env=PATH=/p/bin:/bin")
    assert message in refused(lab, *options, command)


def test_program_that_does_not_exist_gets_no_line(lab: Lab) -> None:
    assert "pyxis: n1: cannot run" not in refused(lab, IMAGE, "/bin/none")


def test_interpreter_of_a_step_in_a_running_container_is_named(lab: Lab) -> None:
    step = lab.popen(["srun", *ON_N1, IMAGE, MOUNT, "--container-name=interp", *sh("echo up; read line")])
    expect(step, "up")
    stderr = refused(lab, "--container-name=interp:exec", "/p/tool")
    end(step)
    clear(lab)
    assert "cannot run /p/tool: its interpreter /opt/none/sh2 does not exist in the container" in stderr


def test_interpreter_of_a_batch_script_is_named(lab: Lab) -> None:
    script = "#!/opt/none/bash\necho x\n"
    sbatch(lab, "-o", "interp.out", IMAGE, input=script, check=False)
    output = lab.run("cat interp.out; rm interp.out").stdout
    assert "its interpreter /opt/none/bash does not exist in the container" in output


@pytest.mark.parametrize("command", [("good",), ("/p/good",), ("sh", "-c", "echo good"), ("cat", "/p/good")])
def test_program_that_runs_gets_no_line(lab: Lab, command: tuple[str, ...]) -> None:
    done = lab.run(["srun", IMAGE, MOUNT, "--container-env=PATH=/p:/bin", *command])
    assert "good" in done.stdout
    assert "interpreter" not in done.stderr
