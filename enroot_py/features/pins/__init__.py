"""Pin tags to digests: for all steps of a job, or for a team in a lock file. See docs/howto/pins.md."""
