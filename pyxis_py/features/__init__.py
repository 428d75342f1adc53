"""One folder for each feature that exists only under Slurm. enroot_py/base/features.py lists them."""
