"""A step on one node: its container, and the process that holds it."""
