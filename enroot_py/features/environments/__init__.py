"""Environment files, which describe the container of a start or a step: docs/environments.md."""
