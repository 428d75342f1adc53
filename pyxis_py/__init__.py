"""The Slurm side of penroot: requests of steps, and their containers."""

from enroot_py.base.pack import MODULES

__path__.append(f"{MODULES}/pyxis_py")  # for an installation without compiled modules
