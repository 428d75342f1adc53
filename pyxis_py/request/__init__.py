"""The request of a step, and its messages."""
