"""NVIDIA GPUs: select a container's GPUs (selection.py), and add the driver's files (driver.py).

plan.py uses these two modules, a CDI specification, or nvidia-container-cli. Only nvidia-container-cli is an external
program. driver.py finds files through the loader cache or in the usual directories, and selection.py finds GPUs in
/proc/driver/nvidia or /dev. NVML is loaded only for MIG devices and for the UUIDs of unused GPUs.

Sources: "Using the /proc File System Interface" of the driver's README; the MIG User Guide, "Device Nodes and
Capabilities"; the environment variables of the NVIDIA Container Toolkit.
"""
