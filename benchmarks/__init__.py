"""Benchmarks: ratios between commands that are measured in the same run."""
