"""Unprivileged containers from Docker images: namespaces, overlays, squashfs."""

__version__ = "0.1.0"
