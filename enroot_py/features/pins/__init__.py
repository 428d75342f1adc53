"""Digests of tags for all steps of a job, and lock files that a team shares: docs/pins.md."""
