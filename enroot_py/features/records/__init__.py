"""Event records, and metrics of them: docs/reference/events.md."""
