"""Geometries of every simulated GPU, read once per session through NVML as everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.nvml import NvmlDriver, NvmlGpu
from slurm_migbatch.testbed.simdriver import GPU_MODELS, SimulatedMachine


@pytest.fixture(scope="session")
def all_models(tmp_path_factory: pytest.TempPathFactory) -> SimulatedMachine:
    """One machine with one GPU of every model, in the order of GPU_MODELS, MIG on."""
    return SimulatedMachine.create(tmp_path_factory.mktemp("sim") / "all", gpus=GPU_MODELS)


@pytest.fixture(scope="session")
def geometries(all_models: SimulatedMachine) -> dict[str, Geometry]:
    """The geometry of every model."""
    with NvmlDriver(str(all_models.library)) as driver:
        return {model: gpu.geometry() for model, gpu in zip(GPU_MODELS, driver.gpus(), strict=True)}


@pytest.fixture(scope="session", params=GPU_MODELS)
def geometry(request: pytest.FixtureRequest, geometries: dict[str, Geometry]) -> Geometry:
    """The geometry of each model in turn."""
    return geometries[request.param]


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedMachine:
    """A fresh machine with an H100 and an A30, MIG on; the device minors are not the indexes."""
    return SimulatedMachine.create(tmp_path / "sim", gpus=["h100-80gb", "a30"], minors=[3, 1])


@pytest.fixture
def driver(machine: SimulatedMachine) -> Iterator[NvmlDriver]:
    """The fresh machine through NVML."""
    with NvmlDriver(str(machine.library)) as opened:
        yield opened


@pytest.fixture
def h100(driver: NvmlDriver) -> NvmlGpu:
    """The fresh machine's H100."""
    return driver.gpus()[0]


@pytest.fixture
def a30(driver: NvmlDriver) -> NvmlGpu:
    """The fresh machine's A30."""
    return driver.gpus()[1]
