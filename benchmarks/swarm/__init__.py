"""Benchmarks of the swarm: on slow links in the lab, in virtual time, and of the tracker alone."""
