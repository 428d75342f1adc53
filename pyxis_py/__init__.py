"""The Slurm side of penroot: what a step asks for, and which container it gets."""

import enroot_py  # noqa: F401 which lets an installation import these modules from one file
