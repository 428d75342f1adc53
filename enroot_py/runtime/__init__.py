"""The engine: namespaces, root file systems, mounts, environment and hooks of a container.

Imports base and config; no store, so that a rootfs is all that it needs.
"""
