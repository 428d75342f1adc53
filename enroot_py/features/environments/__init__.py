"""Environment files, which describe a container: docs/reference/environments.md."""
