"""Prepare a node before slurmd starts: enable MIG mode, repair leftovers, report slices that cannot be isolated.

Hopper and later switch MIG at once and lose it with the driver, so it is enabled at every boot. Ampere keeps it
but needs a reset of the GPU to change it, which would kill processes on the GPU: that is left to the administrator
unless requested.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, NamedTuple

from slurm_migbatch.mig.driver import Activation, DriverError, NotMig
from slurm_migbatch.node import caps, gpu_faults, tmpfs
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline, TooLate
from slurm_migbatch.node.executor import Executor

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu

NVIDIA_SMI = "/usr/bin/nvidia-smi"
RESET_TIMEOUT_S = 120.0
REPAIR_TIME_S = 120.0


class BootStep(NamedTuple):
    """One result of the preparation.

    `ok` is False if a GPU, or the node, cannot be used before an administrator has acted.
    """

    text: str
    ok: bool = True


def prepare(
    config: NodeConfig, executor: Executor, *, reset: bool = False, nvidia_smi: str = NVIDIA_SMI
) -> list[BootStep]:
    """Prepare the node and return the results. Raises DriverError if the GPUs cannot be listed.

    With `reset`, GPUs without processes are reset if the mode requires it.
    """
    gpu_faults.clear_all(executor.paths)  # GPUs that were withdrawn are used again
    steps = [_mode(config, gpu, reset, nvidia_smi) for gpu in executor.gpus.listed()]
    steps += [BootStep(error, False) for error in executor.gpus.unidentified().values()]
    if not steps:
        steps.append(BootStep("no managed GPU on this node: check the driver and Gpus= in node.conf", False))
    executor.gpus.reset()  # minors and handles may change with the mode
    try:
        steps += [BootStep(line) for line in executor.repairer.repair_all(Deadline(REPAIR_TIME_S))]
        with executor.journal.write():
            executor.journal.set_meta("reconciled", executor.journal.meta("boot_id"))
    except (DriverError, TooLate) as error:  # the other GPUs are repaired
        steps.append(BootStep(f"not repaired: {error}", False))
    if not tmpfs.is_mounted(executor.paths.progress):
        steps.append(
            BootStep(
                f"cannot mount a tmpfs on {config.progress_path}, so jobs have no MIGBATCH_PROGRESS, and steps "
                "of a job that run at once may get the same slices: run this as root, in the mount namespace of slurmd"
            )
        )
    helper = caps.helper_is_setuid()
    if helper:
        steps.append(
            BootStep(
                f"{helper} is setuid: a user can make it open devices of other users' slices; CUDA does not need it "
                f"once this command has run and nvidia-persistenced is up, so run: chmod u-s {helper}"
            )
        )
    return steps


def _mode(config: NodeConfig, gpu: NvmlGpu, reset: bool, nvidia_smi: str) -> BootStep:
    try:
        current, pending = gpu.mig_mode()
        if current and pending:
            return BootStep(f"{gpu.uuid} ({gpu.name}): MIG is on")
        activation = gpu.set_mig_mode(True)
        if activation is Activation.RESET_REQUIRED and reset:
            problem = _reset(gpu, nvidia_smi)
            if problem:
                return BootStep(f"{gpu.uuid} ({gpu.name}): {problem}", False)
            return BootStep(f"{gpu.uuid} ({gpu.name}): MIG switched on, GPU reset")
    except NotMig as error:
        return BootStep(f"{gpu.uuid} ({gpu.name}): not for MIG: {error}", not config.gpus)
    except DriverError as error:
        return BootStep(f"{gpu.uuid} ({gpu.name}): {error}", False)
    if activation is Activation.DONE:
        return BootStep(f"{gpu.uuid} ({gpu.name}): MIG switched on")
    advice = {
        Activation.RESET_REQUIRED: "MIG will be on after a GPU reset: stop its processes, then run "
        f"nvidia-smi --gpu-reset -i {gpu.uuid}, or migbatch node init --reset, or reboot",
        Activation.IN_USE: "MIG mode cannot be changed while the GPU is in use (persistence daemon, DCGM, a display)",
    }
    return BootStep(f"{gpu.uuid} ({gpu.name}): {advice.get(activation, 'the driver refused to switch MIG on')}", False)


def _reset(gpu: NvmlGpu, nvidia_smi: str) -> str:
    """Reset the GPU; return an error message, or an empty string. nvidia-smi itself refuses while processes use it."""
    try:
        result = subprocess.run(
            [nvidia_smi, "--gpu-reset", "-i", gpu.uuid],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=RESET_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{nvidia_smi} --gpu-reset: {error}"
    output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()[-300:]
    return f"{nvidia_smi} --gpu-reset failed: {output}" if result.returncode else ""
