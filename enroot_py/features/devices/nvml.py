"""The few questions that only NVML answers: which MIG device has which UUID, number and instances.

Loaded with ctypes and only when a MIG device is named, or a UUID that the driver does not tell. Source: NVML API
Reference, "Multi Instance GPU Management".
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from enroot_py.base.errors import HookError

_UUID_SIZE = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_NOT_FOUND = 6  # NVML_ERROR_NOT_FOUND


def mig_enabled(library: str, bus: str) -> bool:
    """Whether the GPU at a PCI address is in MIG mode. Raises HookError where NVML does not answer."""
    with _started(library) as nvml:
        gpu, current, pending = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(gpu)):
            return False
        code = nvml.nvmlDeviceGetMigMode(gpu, ctypes.byref(current), ctypes.byref(pending))
        return code == 0 and current.value == 1


def uuids(library: str) -> dict[int, str]:
    """The UUIDs of GPUs by the numbers of their nodes. Raises HookError where NVML does not answer."""
    count, by_minor = ctypes.c_uint(), {}
    with _started(library) as nvml:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        for index in range(count.value):
            gpu, minor, uuid = ctypes.c_void_p(), ctypes.c_uint(), ctypes.create_string_buffer(_UUID_SIZE)
            code = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
            code = code or nvml.nvmlDeviceGetMinorNumber(gpu, ctypes.byref(minor))
            if not (code or nvml.nvmlDeviceGetUUID(gpu, uuid, _UUID_SIZE)):
                by_minor[minor.value] = uuid.value.decode("ascii", "replace")
    return by_minor


def mig_devices(library: str, bus: str) -> dict[int, tuple[str, int, int]]:
    """MIG devices of the GPU at a PCI address: number -> (UUID, GPU instance, compute instance).

    Empty where the GPU has no MIG mode. Raises HookError where NVML does not answer.
    """
    with _started(library) as nvml:
        return _read(nvml, bus)


@contextlib.contextmanager
def _started(library: str) -> Iterator[ctypes.CDLL]:
    try:
        nvml = ctypes.CDLL(library)
        if code := nvml.nvmlInit_v2():
            raise HookError(f"NVML does not start: error {code}", hint="does nvidia-smi run on this node?")
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except OSError as e:
        raise HookError(f"cannot ask {library} about GPUs: {e}") from e
    except AttributeError as e:
        raise HookError(f"this driver is too old to be asked for MIG devices or UUIDs: {e}") from e


def _read(nvml: ctypes.CDLL, bus: str) -> dict[int, tuple[str, int, int]]:
    gpu, most = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(gpu)):
        return {}
    if nvml.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(most)):
        return {}
    devices = {}
    for number in range(most.value):
        mig, gi, ci = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        uuid = ctypes.create_string_buffer(_UUID_SIZE)
        code = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number, ctypes.byref(mig))
        if code == _NOT_FOUND:
            continue
        code = (
            code
            or nvml.nvmlDeviceGetUUID(mig, uuid, _UUID_SIZE)
            or nvml.nvmlDeviceGetGpuInstanceId(mig, ctypes.byref(gi))
            or nvml.nvmlDeviceGetComputeInstanceId(mig, ctypes.byref(ci))
        )
        if not code:
            devices[number] = (uuid.value.decode("ascii", "replace"), gi.value, ci.value)
    return devices
