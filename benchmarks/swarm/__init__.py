"""Benchmarks of the swarm (docs/explanation/swarm.md): on slow links of the lab, simulated, and the tracker alone."""
