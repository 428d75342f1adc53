"""Only what pyproject.toml cannot say: the cffi module."""

from __future__ import annotations

from setuptools import setup

setup(cffi_modules=["c_shims/linux_build.py:ffibuilder"])
