"""Slurm's own NVML plugin reads the simulated driver as it would read hardware."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.autodetect import slurmd_sees

# In a process of its own, because a loaded driver library stays loaded.
MAKE = """
import sys
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.mig.planning import choose
from slurm_migbatch.mig.profile import Profile
driver = NvmlDriver(sys.argv[1])
for gpu, names in zip(driver.gpus(), (["3g.40gb", "1g.10gb", "1g.10gb+me"], ["2g.20gb"])):
    used = Layout(())
    for name in names:
        slot = choose(gpu.geometry(), used, Profile.parse(name))
        used = used.add(gpu.create(slot).slot)
driver.close()
"""


@pytest.mark.nvml_plugin
def test_slurmd_lists_the_instances_that_the_driver_holds(cluster: Cluster) -> None:
    machine = cluster.machine("n2")
    subprocess.run([sys.executable, "-c", MAKE, str(machine.library)], check=True)
    held = {
        compute["uuid"]: (instance["profile"], instance["gi_id"], compute["ci_id"])
        for gpu in machine.dump()["gpus"]
        for instance in gpu["instances"]
        for compute in instance["compute_instances"]
    }
    seen = slurmd_sees(cluster, "n2")
    assert len(seen) == len(held) == 4
    for device in seen:
        profile, gi_id, ci_id = held[device.uuid]
        assert device.type.endswith(f"_{profile}")
        assert (device.gi_id, device.ci_id) == (gi_id, ci_id)
        assert len(device.files) == 3
    machine.reboot()
