"""What the tests of container steps have in common."""

from __future__ import annotations

from collections.abc import Sequence

from tests.slurm.lab import Lab

MINIMAL = "registry:5000#minimal:1"
IMAGE = f"--container-image={MINIMAL}"
ON_N1 = ("-w", "n1", "--overlap")


def srun(lab: Lab, *arguments: str, env: dict[str, str] | None = None) -> str:
    """The stdout of srun, which must succeed."""
    return lab.run(["srun", *ON_N1, *arguments], env=env).stdout


def refused(lab: Lab, *arguments: str) -> str:
    """The stderr of srun, which must fail, and in words for people."""
    done = lab.run(["srun", *ON_N1, *arguments], check=False)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def sh(script: str) -> Sequence[str]:
    return ("sh", "-c", script)


def clear(lab: Lab, more: str = "true") -> None:
    """Remove the named containers on n1, and what the command ``more`` removes: nothing else may be left there."""
    lab.run(f"{more}; penroot list | xargs -r penroot remove -f", node="n1")
    left = lab.residue("n1")
    assert not left, "\n".join(left)
