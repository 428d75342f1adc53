"""What the manual says of Slurm's programs in containers."""

from __future__ import annotations

SECTIONS = (
    (
        "penroot-srun.7",
        "SLURM INSIDE",
        """\
With --container-slurm srun, sbatch, squeue and their like of the node are in the container, in /run/penroot/slurm/bin,
whatever its distribution; a program in it can then do with Slurm what its user can.
""",
        (),
    ),
)
