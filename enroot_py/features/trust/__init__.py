"""Policies: which images are admitted, and whose signatures they need. See docs/howto/signed.md."""
