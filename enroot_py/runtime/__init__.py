"""The engine: namespaces, root file systems, mounts, environment and hooks of a container.

A start needs only a root file system. So the engine imports base and config, but not the store of images and
containers (enroot_py/store).
"""
