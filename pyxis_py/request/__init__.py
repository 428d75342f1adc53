"""The request of a step, and the messages between plugin and helper."""
