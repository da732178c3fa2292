"""Machines for the tests of the simulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.testbed.simdriver import SimulatedMachine, build
from tests.support.driver_helpers import nvml


@pytest.fixture(scope="session")
def library() -> Path:
    return build()


@pytest.fixture
def make(tmp_path: Path, library: Path) -> Callable[..., SimulatedMachine]:
    """Makes machines: make(["a30"], latency=...)."""
    count = 0

    def machine(gpus: Sequence[str] = ("h100-80gb",), **options: Any) -> SimulatedMachine:
        nonlocal count
        count += 1
        return SimulatedMachine.create(tmp_path / f"m{count}", list(gpus), library=library, **options)

    return machine


@pytest.fixture
def machine(make: Callable[..., SimulatedMachine]) -> Iterator[SimulatedMachine]:
    """One H100 at minor 2 and one A100 at minor 0, open in this process."""
    made = make(["h100-80gb", "a100-40gb"], minors=[2, 0])
    with nvml(made):
        yield made
