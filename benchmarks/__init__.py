"""Benchmarks measure commands in the same run, and print the ratios of their times.

Many benchmarks use a lab, a Slurm cluster in namespaces of this machine (tests/slurm/lab).
"""
