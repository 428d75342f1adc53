"""Benchmarks measure commands in the same run, and print the ratios of their times."""
