"""Provide the node's GPUs to the hooks: opened once, filtered by the configuration, geometry cached."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from slurm_migbatch.mig.driver import DriverError, DriverMissing, NotMig
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.node import gpu_faults
from slurm_migbatch.node.config import NodeConfig

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlDriver, NvmlGpu


class Survey(NamedTuple):
    """GPUs with MIG on, GPUs with MIG off, and the errors of those that do not answer or are withdrawn.

    `failing` has errors by UUID, `unidentified` by index those of GPUs that do not even report their UUID and minor.
    """

    managed: tuple[NvmlGpu, ...]
    off: tuple[NvmlGpu, ...]
    failing: Mapping[str, DriverError]
    unidentified: Mapping[int, str]


class Gpus:
    """The driver, opened on first use and again after `reset`. One per process; threads may share it.

    A `reset` takes effect when no thread is `using` it: the library's objects are void for all threads at once.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._driver: NvmlDriver | None = None
        self._all: tuple[NvmlGpu, ...] = ()
        self._unidentified: Mapping[int, str] = {}
        self._geometry: dict[str, Geometry] = {}
        self._users = 0
        self._stale = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the driver open for the block, whatever other threads do."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            if self._stale:
                self.reset()

    def managed(self) -> tuple[NvmlGpu, ...]:
        """Return the GPUs of the configuration's Gpus= that have MIG on, in index order. Raises DriverError."""
        return self.survey().managed

    def whole(self) -> tuple[int, ...]:
        """Return the minors of all GPUs here that may be without MIG, whatever Gpus= says. Raises DriverError."""
        self.listed()
        return tuple([gpu.minor for gpu in self._all if not _is_cut(gpu)])

    def survey(self) -> Survey:
        """Return the GPUs of the configuration's Gpus= by their usability. Raises DriverError."""
        return self._survey(self.listed(), self._missing())

    def excluded(self, uuids: Collection[str]) -> Survey:
        """Return those of these GPUs that the configuration's Gpus= leaves out. Raises DriverError.

        No other GPU that it leaves out is asked: the calls of one that is broken may hang.
        """
        return self._survey([gpu for gpu in self.all() if gpu.uuid in uuids and not self.manages(gpu)], {})

    def _survey(self, gpus: Iterable[NvmlGpu], unidentified: Mapping[int, str]) -> Survey:
        managed: list[NvmlGpu] = []
        off: list[NvmlGpu] = []
        failing: dict[str, DriverError] = {}
        withdrawn = self.withdrawn()
        for gpu in gpus:
            if gpu.uuid in withdrawn:  # its calls may hang
                failing[gpu.uuid] = withdrawn[gpu.uuid]
                continue
            try:
                (managed if gpu.mig_mode()[0] else off).append(gpu)
            except NotMig:
                off.append(gpu)
            except DriverMissing:  # of all GPUs: the driver was replaced, and has to be opened again
                raise
            except DriverError as error:
                failing[gpu.uuid] = error
        return Survey(tuple(managed), tuple(off), failing, unidentified)

    def listed(self) -> tuple[NvmlGpu, ...]:
        """Return the GPUs of the configuration's Gpus=, MIG on or not, in index order. Raises DriverError."""
        selected = [gpu for gpu in self.all() if self.manages(gpu)]
        return tuple(sorted(selected, key=lambda gpu: gpu.index))

    def manages(self, gpu: NvmlGpu) -> bool:
        """Return whether the configuration's Gpus= has the GPU."""
        return self._config.manages(gpu.uuid, gpu.minor)

    def withdrawn(self) -> Mapping[str, gpu_faults.Withdrawn]:
        """Return the GPUs that are not used for now because of their failures."""
        return gpu_faults.withdrawn(self._config.run_dir)

    def unidentified(self) -> Mapping[int, str]:
        """Return by index the errors of GPUs without UUID or minor, unless Gpus= has other GPUs only.

        Raises DriverError.
        """
        self.all()
        return self._missing()

    def all(self) -> tuple[NvmlGpu, ...]:
        """Return all GPUs of this machine that report UUID and minor, in the driver's order. Raises DriverError."""
        with self._lock:
            if self._driver is None:
                from slurm_migbatch.mig.nvml import NvmlDriver

                driver = NvmlDriver(self._config.nvml_library or None)
                self._driver = driver
            if not self._all or self._unidentified:
                self._all, self._unidentified = _identified(self._driver)
            return self._all

    def _missing(self) -> Mapping[int, str]:
        wanted = self._config.gpus
        if wanted and all(any(name in (gpu.uuid, str(gpu.minor)) for gpu in self._all) for name in wanted):
            return {}
        return self._unidentified

    def geometry(self, gpu: NvmlGpu) -> Geometry:
        """Return the GPU's geometry. Raises DriverError."""
        known = self._geometry.get(gpu.uuid)
        if known is None:
            known = self._geometry[gpu.uuid] = gpu.geometry()
        return known

    def reset(self) -> None:
        """Close the driver, so that the next use opens it again: for errors that a new handle may fix."""
        with self._lock:
            self._stale = self._users > 0
            if self._stale:
                return
            driver, self._driver, self._all, self._unidentified = self._driver, None, (), {}
            self._geometry.clear()
        if driver is not None:
            with suppress(DriverError):
                driver.close()


def _identified(driver: NvmlDriver) -> tuple[tuple[NvmlGpu, ...], Mapping[int, str]]:
    """Return the GPUs that report UUID and minor, and by index the errors of the others. Raises DriverMissing.

    Without a minor nobody can tell whether Gpus= has the GPU, or which devices its slices have.
    """
    found = driver.gpus()
    errors = dict(driver.unidentified())
    for gpu in found:
        try:
            _ = gpu.minor  # kept by the GPU
        except DriverMissing:
            raise
        except DriverError as error:
            errors[gpu.index] = str(error)
    return tuple([gpu for gpu in found if gpu.index not in errors]), errors


def _is_cut(gpu: NvmlGpu) -> bool:
    try:
        return gpu.mig_mode()[0]
    except DriverError:
        return False
