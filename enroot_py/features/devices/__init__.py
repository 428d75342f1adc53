"""What hooks bring into a container for devices: nodes, libraries, CDI, the driver of NVIDIA.

Imports base, config and runtime.
"""
