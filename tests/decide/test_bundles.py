"""What a GPU can hold, against exhaustive search and the simulated driver."""

import pytest

from slurm_migbatch.decide.capacity.bundles import bundles
from slurm_migbatch.lab.papers.settings import plain
from slurm_migbatch.lab.sim.gpus import UnknownGpu, geometry, models
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.testbed.simdriver import SimulatedMachine
from tests.support.layouts import layouts


def test_geometries_are_those_of_the_simulated_driver(tmp_path):
    machine = SimulatedMachine.create(tmp_path / "sim", gpus=models())
    with NvmlDriver(str(machine.library)) as driver:
        for name, gpu in zip(models(), driver.gpus(), strict=True):
            assert geometry(name) == gpu.geometry()


def test_error_for_an_unknown_gpu_lists_the_known_models():
    with pytest.raises(UnknownGpu, match="a30, a100-40gb"):
        geometry("k80")


@pytest.mark.parametrize("name", ["a30", "a100-40gb", "h100-80gb"])
def test_bundles_are_the_maximal_contents_of_all_legal_layouts(name):
    gpu = geometry(name)
    profiles = plain(gpu)
    contents = set()
    for layout in layouts(gpu):
        counts = layout.counts()
        if all(not profile.suffix for profile in counts):
            contents.add(tuple(counts[profile] for profile in profiles))
    maximal = {
        counts
        for counts in contents
        if not any((*counts[:i], counts[i] + 1, *counts[i + 1 :]) in contents for i in range(len(counts)))
    }
    assert set(bundles(gpu, profiles)) == maximal
