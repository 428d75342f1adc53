"""Benchmarks of the swarm: on shaped links in the lab, and in virtual time."""
