"""What srun, sbatch and salloc do before a step starts."""
