"""The engine: namespaces, root file systems, mounts, environment and hooks of a container.

To start a container, the engine needs its root file system, but not the image store. So the engine imports base and
config, but not enroot_py/store.
"""
