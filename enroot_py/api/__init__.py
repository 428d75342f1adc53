"""Containers for programs in Python. The names in enroot_py.__all__ are public and stable; this package is not."""
