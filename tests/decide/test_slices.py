"""The values that policies share, against exhaustive search and the simulated driver."""

from collections import Counter

import pytest

from slurm_migbatch.decide.capacity.speeds import Setting, Speeds, best_settings, bundles, holds, plain
from slurm_migbatch.lab.sim.gpus import UnknownGpu, geometry, models
from slurm_migbatch.mig.layout import layouts
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.testbed.simdriver import SimulatedMachine


def test_geometries_are_those_of_the_simulated_driver(tmp_path):
    machine = SimulatedMachine.create(tmp_path / "sim", gpus=models())
    with NvmlDriver(str(machine.library)) as driver:
        for name, gpu in zip(models(), driver.gpus(), strict=True):
            assert geometry(name) == gpu.geometry()


def test_an_unknown_gpu_is_told_with_the_known_ones():
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


def test_bundles_beside_a_used_slot_hold_what_is_left():
    gpu = geometry("a100-40gb")
    profiles = tuple(Profile.parse(p) for p in ("3g.20gb", "1g.5gb"))
    used = next(layout for layout in layouts(gpu) if str(layout) == "3g.20gb@0:4")
    assert set(bundles(gpu, profiles, used)) == {(1, 0), (0, 3)}
    assert holds(gpu, (profiles[0],), used)
    assert not holds(gpu, (profiles[0],) * 2, used)


def test_the_best_setting_of_a_slice_is_the_fastest_that_keeps_the_limit():
    small, large = Profile.parse("1g.5gb"), Profile.parse("7g.40gb")
    speeds = Speeds(
        {(small, 1, 1): 0.01, (small, 8, 1): 0.04, (small, 8, 2): 0.08, (large, 8, 1): 0.02, (large, 9, 1): 0}
    )
    assert speeds(small, 8, 2) == 0.08
    assert speeds(large, 9) is None
    assert best_settings(speeds.settings) == {
        small: Setting(small, 8, 1, 0.04),  # two processes are no faster, so one
        large: Setting(large, 8, 1, 0.02),
    }
    assert best_settings(speeds.settings, 0.015) == {small: Setting(small, 1, 1, 0.01)}
    assert Counter(round(setting.rate) for setting in speeds.settings) == Counter({100: 1, 200: 2, 400: 1})
