"""What needs a GPU: skipped on a machine without one."""
