"""What lies on the disk: layers and images by digest, squashfs files, containers.

Imports base, config, registry, runtime and swarm.
"""
