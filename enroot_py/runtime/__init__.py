"""The engine: namespaces, root file systems, mounts, environment and hooks of a container.

A start needs only a root file system, so the engine imports base and config, but not the store.
"""
