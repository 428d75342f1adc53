"""NVIDIA GPUs: select a container's GPUs (selection), and add the driver's files (driver).

GPUs and files are found through /proc/driver/nvidia and the loader cache, without running a program. NVML is loaded
only for the UUIDs of MIG devices and of unused GPUs. Sources: "Using the /proc File System Interface" of the driver's
README; the MIG User Guide, "Device Nodes and Capabilities"; the environment variables of the NVIDIA Container Toolkit.
"""
