"""Read from NVML what /proc lacks: the UUIDs, numbers and instances of MIG devices, and UUIDs of unused GPUs.

The library is loaded with ctypes, and only if needed. Source: NVML API Reference, "Multi Instance GPU Management".
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from enroot_py.base.errors import HookError

_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_NOT_FOUND = 6  # NVML_ERROR_NOT_FOUND


def mig_enabled(library: str, bus: str) -> bool:
    """Check whether the GPU at a PCI address is in MIG mode. Raises HookError if NVML does not start or is too old."""
    with _started(library) as nvml:
        gpu, current, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(gpu)):
            return False
        code = nvml.nvmlDeviceGetMigMode(gpu, ctypes.byref(current), ctypes.byref(pending))
        return code == 0 and current.value == 1


def uuids(library: str) -> dict[int, str]:
    """Return the UUIDs of GPUs by minor number. Raises HookError if NVML does not start or is too old."""
    count, by_minor = ctypes.c_uint(), {}
    with _started(library) as nvml:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        for index in range(count.value):
            gpu, minor, uuid = ctypes.c_void_p(), ctypes.c_uint(), ctypes.create_string_buffer(_UUID_BYTES)
            code = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
            code = code or nvml.nvmlDeviceGetMinorNumber(gpu, ctypes.byref(minor))
            if not (code or nvml.nvmlDeviceGetUUID(gpu, uuid, _UUID_BYTES)):
                by_minor[minor.value] = uuid.value.decode("ascii", "replace")
    return by_minor


def mig_devices(library: str, bus: str) -> dict[int, tuple[str, int, int]]:
    """Return the MIG devices of the GPU at a PCI address: number -> (UUID, GPU instance, compute instance).

    Empty if the GPU has no MIG mode. Raises HookError if NVML does not start or is too old.
    """
    with _started(library) as nvml:
        return _read(nvml, bus)


@contextlib.contextmanager
def _started(library: str) -> Iterator[ctypes.CDLL]:
    try:
        nvml = ctypes.CDLL(library)
        if code := nvml.nvmlInit_v2():
            raise HookError(f"cannot initialize NVML: error {code}", hint="check that nvidia-smi works on this node")
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except OSError as e:
        raise HookError(f"cannot load {library}: {e}") from e
    except AttributeError as e:
        raise HookError(f"cannot read MIG devices or UUIDs: the NVIDIA driver is too old: {e}") from e


def _read(nvml: ctypes.CDLL, bus: str) -> dict[int, tuple[str, int, int]]:
    gpu, max_count = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(gpu)):
        return {}
    if nvml.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(max_count)):
        return {}
    devices = {}
    for number in range(max_count.value):
        mig, gi, ci = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        code = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number, ctypes.byref(mig))
        if code == _NOT_FOUND:
            continue
        code = (
            code
            or nvml.nvmlDeviceGetUUID(mig, uuid, _UUID_BYTES)
            or nvml.nvmlDeviceGetGpuInstanceId(mig, ctypes.byref(gi))
            or nvml.nvmlDeviceGetComputeInstanceId(mig, ctypes.byref(ci))
        )
        if not code:
            devices[number] = (uuid.value.decode("ascii", "replace"), gi.value, ci.value)
    return devices
