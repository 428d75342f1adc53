"""``penroot start --slurm``."""

from __future__ import annotations

from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings


def _bring(settings: Settings, value: str) -> Settings:
    return settings.replace("command line", slurm=True)


FLAGS = (FeatureFlag("--slurm", "", "bring srun, sbatch, squeue and their like from this node", _bring),)
