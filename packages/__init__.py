"""Build penroot's packages: see README.md in this directory."""

from __future__ import annotations
