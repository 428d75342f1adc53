"""The manual's section on Slurm commands in containers."""

from __future__ import annotations

SECTIONS = (
    (
        "penroot-srun.7",
        "SLURM INSIDE",
        """\
With --container-slurm, the node's Slurm commands (srun, sbatch, squeue and others) are available in a container of any
distribution, in /run/penroot/slurm/bin. Programs in the container can use Slurm with all rights of the user.
""",
        (),
    ),
)
