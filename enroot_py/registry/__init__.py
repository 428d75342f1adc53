"""Sources of images: references, registries and their credentials, archives, container engines.

Its modules import base and config.
"""
