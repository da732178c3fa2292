"""List all GPUs of this machine through NVML."""

from __future__ import annotations

import pynvml

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.mig.nvml.errors import translated
from slurm_migbatch.mig.nvml.gpu import NvmlGpu
from slurm_migbatch.mig.nvml.library import LibraryUser


class NvmlDriver(LibraryUser):
    """All GPUs of this machine through NVML.

    `library` is a file to load as the NVML library instead of the system's; root's hooks have no environment to set it
    in. A process can use one library at a time. Raises DriverMissing if there is no driver.
    """

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library)
        try:
            count = pynvml.nvmlDeviceGetCount()
            self._gpus = tuple(NvmlGpu(index) for index in range(count))
        except pynvml.NVMLError as error:
            self.close()
            raise translated(error, "the GPUs cannot be listed") from None
        except DriverError:
            self.close()
            raise

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """Return all physical GPUs in NVML's order."""
        return self._gpus
