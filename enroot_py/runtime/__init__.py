"""The engine: namespaces, root file systems, mounts, environment and hooks of a container.

The engine imports base and config, not the store: it needs only a rootfs.
"""
