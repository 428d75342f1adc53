"""Files and directories of the NVIDIA driver: tables that grow with its versions."""

from __future__ import annotations

CAPABILITIES = ("compute", "compat32", "display", "graphics", "ngx", "utility", "video")

# The driver's libraries by capability. Names end before ".so".
LIBRARIES = {
    "utility": "libnvidia-ml libnvidia-cfg libnvidia-nscq libnvidia-sandboxutils",
    "compute": "libcuda libcudadebugger libnvidia-opencl libnvidia-gpucomp libnvidia-ptxjitcompiler "
    "libnvidia-fatbinaryloader libnvidia-allocator libnvidia-compiler libnvidia-pkcs11 libnvidia-pkcs11-openssl3 "
    "libnvidia-nvvm libnvidia-nvvm70 libnvidia-tileiras",
    "video": "libvdpau_nvidia libnvidia-encode libnvidia-opticalflow libnvcuvid libcuda",
    "graphics": "libnvidia-eglcore libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-fbc libnvidia-ifr "
    "libnvidia-rtcore libnvoptix libGLX_nvidia libEGL_nvidia libGLESv2_nvidia libGLESv1_CM_nvidia "
    "libnvidia-glvkspirv libnvidia-cbl libnvidia-gpucomp libnvidia-allocator libnvidia-egl-gbm "
    "libnvidia-egl-wayland libnvidia-egl-wayland2 libnvidia-egl-xcb libnvidia-egl-xlib libnvidia-vulkan-producer "
    "libnvidia-present libnvidia-vksc-core libnvidia-api",
    "ngx": "libnvidia-ngx",
}
LIBRARIES["display"] = LIBRARIES["graphics"]
# Libraries whose version differs from the driver's.
OWN_VERSION = ("libnvidia-egl-", "libnvidia-api", "libnvidia-nvvm70")
PREFIXES = (b"libcuda", b"libnvidia-", b"libnvcuvid", b"libnvoptix", b"libvdpau_nvidia", b"libGL", b"libEGL_nvidia")
MAIN_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
# Programs load these names too, but only development packages contain the links.
LINKS = {
    "libcuda.so": "libcuda.so.1",
    "libnvidia-opticalflow.so": "libnvidia-opticalflow.so.1",
    "libGLX_indirect.so.0": "libGLX_nvidia.so.0",
}
GBM = "gbm/nvidia-drm_gbm.so"  # the name under which Mesa loads libnvidia-allocator
PROGRAMS = {
    "utility": (
        "nvidia-smi",
        "nvidia-debugdump",
        "nvidia-persistenced",
        "nv-fabricmanager",
        "nvidia-imex-ctl",
    ),
    "compute": ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
}
PROGRAM_DIRECTORIES = ("/usr/bin", "/usr/sbin", "/usr/local/nvidia/bin", "/usr/local/bin", "/opt/bin")
# Directories of drivers that are not in the loader cache: driver containers, Kubernetes hosts.
LIBRARY_DIRECTORIES = (
    "/usr/lib/{machine}-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/lib64",
    "/opt/nvidia/lib64",
)
# Files for graphics loaders: in one of SHARE_DIRECTORIES on a host, bound into /usr/share in a container.
GRAPHICS_FILES = (
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_icd.{machine}.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "nvidia/nvoptix.bin",
)
SHARE_DIRECTORIES = ("/etc", "/usr/share", "/usr/local/share", "/usr/local/nvidia/share", "/usr/local/nvidia")

CONSUMER = {"geforce", "titan"}  # no forward compatibility: CUDA fails to start with a newer libcuda

# The newest CUDA version that a driver branch supports: CUDA Toolkit Release Notes, driver table.
CUDA_OF_DRIVER = (
    (615, 13.4), (610, 13.3), (595, 13.2), (590, 13.1), (580, 13.0), (575, 12.9), (570, 12.8), (565, 12.7),
    (560, 12.6), (555, 12.5), (550, 12.4), (545, 12.3), (535, 12.2), (530, 12.1), (525, 12.0), (520, 11.8),
    (515, 11.7), (510, 11.6), (495, 11.5), (470, 11.4), (465, 11.3), (460, 11.2), (455, 11.1), (450, 11.0),
    (440, 10.2), (418, 10.1), (410, 10.0), (396, 9.2), (390, 9.1), (384, 9.0), (375, 8.0),
)  # fmt: skip
