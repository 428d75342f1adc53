"""GPUs of NVIDIA: which of the host's a container gets (selection), and what of their driver comes along (driver).

Found in /proc/driver/nvidia and in the cache of the loader, without a program
and without NVML, except that only NVML knows the UUIDs of MIG devices.
Sources: "Using the /proc File System Interface" of the driver's README; the
MIG User Guide, "Device Nodes and Capabilities"; the environment variables of
the NVIDIA Container Toolkit.
"""
