"""Files on disk: layers and images by digest, squashfs files, containers.

Its modules import base, config, registry and runtime.
"""
