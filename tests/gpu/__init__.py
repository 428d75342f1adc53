"""Tests that need a GPU: skipped on a machine without one."""
