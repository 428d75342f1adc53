"""Records of what is done, for machines, and metrics that count them: docs/events.md."""
