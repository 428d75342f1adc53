"""Where bytes of images come from: references, registries and their credentials, archives, engines.

Imports base and config.
"""
