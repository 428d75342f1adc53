"""``penroot start --slurm``."""

from __future__ import annotations

from enroot_py.cli.start import FeatureFlag
from enroot_py.config.settings import Settings


def _bring(settings: Settings, value: str) -> Settings:
    return settings.replace("command line", slurm=True)


FLAGS = (FeatureFlag("--slurm", "", "make srun, sbatch, squeue and so on of this node available", _bring),)
