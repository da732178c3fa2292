"""Translate NVML's return codes to typed errors."""

from __future__ import annotations

import pynvml

from slurm_migbatch.mig.driver import (
    Busy,
    DriverError,
    DriverMissing,
    GpuLost,
    InsufficientResources,
    InvalidRequest,
    NoPermission,
    NotFound,
    NotMig,
)

_ERRORS: dict[int, tuple[type[DriverError], str]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: (DriverMissing, "the NVIDIA library is not open"),
    pynvml.NVML_ERROR_INVALID_ARGUMENT: (InvalidRequest, "the driver does not know this object"),
    pynvml.NVML_ERROR_NOT_SUPPORTED: (NotMig, "not supported: MIG is off or not available on this GPU"),
    pynvml.NVML_ERROR_NO_PERMISSION: (NoPermission, "permission denied: this needs root"),
    pynvml.NVML_ERROR_NOT_FOUND: (NotFound, "it does not exist (or no longer exists)"),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (DriverMissing, "the NVIDIA kernel module is not loaded"),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (DriverMissing, "libnvidia-ml.so.1 was not found: install the NVIDIA driver"),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (DriverMissing, "the NVIDIA driver is too old for this"),
    pynvml.NVML_ERROR_GPU_IS_LOST: (GpuLost, "the GPU fell off the bus; it needs a reset or a reboot"),
    pynvml.NVML_ERROR_RESET_REQUIRED: (GpuLost, "the GPU needs a reset (nvidia-smi --gpu-reset)"),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        DriverMissing,
        "the NVIDIA library and kernel module are of different versions: reload the module or reboot",
    ),
    pynvml.NVML_ERROR_IN_USE: (Busy, "still in use"),
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (InsufficientResources, "insufficient resources"),
    pynvml.NVML_ERROR_NOT_READY: (Busy, "the driver is not ready yet"),
}


def translated(error: pynvml.NVMLError, operation: str) -> DriverError:
    """Translate a failure of NVML while doing `operation` into the error to raise."""
    code = int(error.value)
    error_class, explanation = _ERRORS.get(code, (DriverError, f"the driver failed with {error}"))
    return error_class(code, f"{operation}: {explanation} (NVML code {code})")
