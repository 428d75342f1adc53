"""Bundles: an image and all that it takes to run it, in one executable file: docs/images.md."""
