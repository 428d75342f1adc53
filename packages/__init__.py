"""penroot as packages: README.md beside this shows how they are made and of what."""

from __future__ import annotations
