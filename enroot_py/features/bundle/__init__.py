"""Bundles: an image and everything needed to run it, in one executable file: docs/howto/bundle.md."""
