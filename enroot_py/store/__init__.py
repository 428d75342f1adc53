"""Files on disk: layers and images by digest, squashfs files, containers.

Imports base, config, registry and runtime.
"""
