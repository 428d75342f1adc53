"""Digests of tags for all steps of a job, and lock files of a team: docs/howto/pins.md."""
