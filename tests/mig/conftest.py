"""Geometries of every simulated GPU, read once per session through NVML as everywhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_migbatch.mig.driver import Gpu
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.testbed import simdriver

GPU_TYPES = ("a30", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "rtx-pro-6000")


@pytest.fixture(scope="session")
def all_types(tmp_path_factory: pytest.TempPathFactory) -> simdriver.Machine:
    """One machine with one GPU of every type, in the order of GPU_TYPES."""
    return simdriver.Machine.create(tmp_path_factory.mktemp("sim") / "all", gpus=list(GPU_TYPES))


@pytest.fixture(scope="session")
def geometries(all_types: simdriver.Machine) -> dict[str, Geometry]:
    """The geometry of every type, with MIG on."""
    with NvmlDriver(str(all_types.library)) as driver:
        found = {}
        for kind, gpu in zip(GPU_TYPES, driver.gpus(), strict=True):
            gpu.set_mig_mode(True)
            found[kind] = gpu.geometry()
        return found


@pytest.fixture(scope="session", params=GPU_TYPES)
def geometry(request: pytest.FixtureRequest, geometries: dict[str, Geometry]) -> Geometry:
    """The geometry of each type in turn."""
    return geometries[request.param]


@pytest.fixture
def machine(tmp_path: pytest.TempPathFactory) -> simdriver.Machine:
    """A fresh machine with an H100 and an A30."""
    return simdriver.Machine.create(tmp_path / "sim", gpus=["h100-80gb", "a30"])


@pytest.fixture
def driver(machine: simdriver.Machine) -> Iterator[NvmlDriver]:
    """The fresh machine through NVML."""
    with NvmlDriver(str(machine.library)) as opened:
        yield opened


@pytest.fixture
def h100(driver: NvmlDriver) -> Gpu:
    """The fresh machine's H100 with MIG on."""
    gpu = driver.gpus()[0]
    gpu.set_mig_mode(True)
    return gpu
