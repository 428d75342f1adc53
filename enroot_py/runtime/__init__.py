"""The engine: namespaces, root file systems, mounts, environment and hooks of a container.

It imports base and config, and no store: a rootfs is all that it needs.
"""
