"""Devices of the host in containers, with what their programs need of the driver: docs/devices.md."""
