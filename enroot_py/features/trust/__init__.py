"""Which images are let in, and whose signatures they need: docs/signed.md."""
