"""Slurm's client programs of the node in containers: docs/slurm-inside.md."""
