"""The request of a step, and the messages that carry it."""
