"""Measure the agent's sampling of running jobs: memory and activity of each slice of a GPU, on the simulated driver.

Only migbatch's cost and the library call are measured; a real driver adds its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar, times_of
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.mig.nvml.gpm import LEAST_S
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.watch import PAUSE_FACTOR
from slurm_migbatch.testbed.simdriver import SimulatedMachine

SHARE_TARGET: Final = 0.001
"""Share of one core that a full node of eight GPUs may take."""
_GPUS: Final = 8
_FIRST_PID: Final = 2**22 + 1000
"""Above any pid: the simulated driver keeps such a process until it is ended."""


def measure(rounds: int = 50, progress: Progress = silent) -> dict[str, Any]:
    """Sample the seven slices of one H100 `rounds` times.

    Returns:
        Times of one slice, and the share of a core that eight full GPUs take at the default SampleEvery.
    """
    with tempfile.TemporaryDirectory(prefix="migbatch-bench-") as home:
        machine = SimulatedMachine.create(Path(home) / "driver", ["h100-80gb"], mig=True)
        driver = NvmlDriver(str(machine.library))
        try:
            (gpu,) = driver.gpus()
            info = next(info for info in gpu.geometry().profiles if info.profile.name == "1g.10gb")
            instances = [gpu.create(slot) for slot in info.slots]
            for number, instance in enumerate(instances):
                machine.start_process(str(instance.mig_uuid), _FIRST_PID + number, memory_mib=1000)
                machine.set_load(str(instance.mig_uuid), sm=50, dram=20)
            progress(f"{rounds} samples of {len(instances)} slices", 0)
            memory: list[float] = []
            activity: list[float] = []
            for _ in range(rounds):
                time.sleep(LEAST_S * 1.1)
                for instance in instances:
                    memory.append(_seconds(lambda i=instance: gpu.processes(i) and gpu.memory_used(i)))  # type: ignore[misc]
                    activity.append(_seconds(lambda i=instance: gpu.activity(i, (1, 0))))  # type: ignore[misc]
        finally:
            driver.close()
    sample_every_s: float = NodeConfig._field_defaults["sample_every"]
    slice_s = (sum(memory) + sum(activity)) / len(memory)
    share = slice_s * len(instances) * _GPUS / sample_every_s
    return {
        "bench": "sampling",
        "slices": len(instances),
        "memory": times_of(memory),
        "activity": times_of(activity),
        "sample_every_s": sample_every_s,
        "core_share": share,
        "most_core_share": 1 / PAUSE_FACTOR,
        "bars": [Bar(f"share of a core, {_GPUS} full GPUs", share, SHARE_TARGET).to_dict()],
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
