"""The Slurm side of penroot: what a step asks for, and which container it gets."""
