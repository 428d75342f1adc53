"""Checks of srun, sbatch and salloc before a step starts."""
