"""Host devices in containers, with the driver's libraries: docs/reference/devices.md."""
