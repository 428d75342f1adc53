"""The node's Slurm commands in containers: docs/howto/slurm-inside.md."""
