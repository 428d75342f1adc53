"""Sources of images: references, registries and their credentials, archives, container engines.

Imports base and config.
"""
