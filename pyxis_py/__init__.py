"""The Slurm side of penroot: what a step asks for, and which container it gets."""

from enroot_py.base.pack import MODULES

__path__.append(f"{MODULES}/pyxis_py")  # for an installation that has not compiled its modules
