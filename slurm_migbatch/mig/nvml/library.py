"""Choose the library file that pynvml loads, and keep it open while it is used."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import TypeVar

import pynvml

from slurm_migbatch.mig import driver
from slurm_migbatch.mig.driver import DriverMissing
from slurm_migbatch.mig.nvml.errors import translated

_U = TypeVar("_U", bound="LibraryUser")


class OpenLibrary:
    """The one library that a process can use at a time, and the number of drivers that use it."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.users = 0

    def open(self, path: str | None) -> None:
        """Load `path` (None: the system's) and start NVML; raises DriverMissing."""
        if self.users and path != self.path:
            wanted, open_now = path or "the system's library", self.path or "the system's library"
            raise DriverMissing(0, f"{wanted} cannot be opened: this process still uses {open_now}")
        if not self.users:
            self._load(path)
        if driver.calling is not None:
            driver.calling("starting NVML")
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise translated(error, "NVML cannot be started") from None
        self.path = path
        self.users += 1

    def close(self) -> None:
        """Undo one `open`; the last one closes the library."""
        self.users -= 1
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            raise translated(error, "NVML cannot be closed") from None

    def _load(self, path: str | None) -> None:
        if path == self.path and pynvml.nvmlLib is not None:
            return
        # pynvml loads "libnvidia-ml.so.1" by name, which hooks with an empty environment cannot redirect, and keeps the
        # first library and its functions forever. Both are set here for the requested file.
        library = None
        if path is not None:
            try:
                library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise DriverMissing(0, f"{path} cannot be loaded as the NVIDIA library: {error}") from None
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()


LIBRARY = OpenLibrary()


class LibraryUser:
    """Base of classes that use the library until they are closed."""

    def __init__(self, library: str | None) -> None:
        LIBRARY.open(library or None)
        self._open = True

    def close(self) -> None:
        """Close the library; further calls do nothing."""
        if self._open:
            self._open = False
            LIBRARY.close()

    def __enter__(self: _U) -> _U:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
