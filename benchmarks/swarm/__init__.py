"""Benchmarks of the swarm, docs/explanation/swarm.md: on slow links in the lab, in virtual time, its tracker alone."""
