"""Only what pyproject.toml cannot say: the cffi module."""

from setuptools import setup

setup(cffi_modules=["c_shims/linux_build.py:ffibuilder"])
