"""List all GPUs of this machine through NVML."""

from __future__ import annotations

from collections.abc import Mapping

import pynvml

from slurm_migbatch.mig.driver import DriverError, DriverMissing
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
            self._errors = dict.fromkeys(range(pynvml.nvmlDeviceGetCount()), "")
            self._gpus: dict[int, NvmlGpu] = {}
            self._identify()
        except pynvml.NVMLError as error:
            self.close()
            raise translated(error, "the GPUs cannot be listed") from None
        except DriverError:
            self.close()
            raise

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """Return the physical GPUs in NVML's order. Raises DriverMissing."""
        self._identify()
        return tuple(gpu for _, gpu in sorted(self._gpus.items()))

    def unidentified(self) -> Mapping[int, str]:
        """Return by NVML's index the errors of GPUs that do not even report their UUID; `gpus` queries them again."""
        return dict(self._errors)

    def _identify(self) -> None:
        """Query the GPUs whose UUID is not known yet. One that fell off the bus must not make the others unusable."""
        for index in list(self._errors):
            try:
                self._gpus[index] = NvmlGpu(index)
                del self._errors[index]
            except DriverMissing:
                raise
            except DriverError as error:
                self._errors[index] = str(error)
