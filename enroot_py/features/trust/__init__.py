"""Admit images according to policies, and verify their signatures. See docs/howto/signed.md."""
