"""Detection of the device, with the simulated driver in place of the real one."""

import os
import subprocess
import sys
import time

import pynvml
import pytest

from slurm_migbatch.mig.driver import DriverMissing, InvalidRequest, NotFound
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.nvml import NvmlDriver
from slurm_migbatch.mig.nvml.visible import VisibleDevice
from slurm_migbatch.profiling.device import Device, NvmlMeter, find_device
from slurm_migbatch.profiling.measurement import CPU
from slurm_migbatch.testbed.simdriver import GPU_MODELS, SimulatedMachine

FOR_ROOT = {
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlGpuInstanceGetComputeInstances",
}


@pytest.fixture
def machine(tmp_path):
    return SimulatedMachine.create(tmp_path / "sim", gpus=["h100-80gb", "a30"])


def slices(machine, *slots, gpu=0):
    with NvmlDriver(str(machine.library)) as driver:
        return [driver.gpus()[gpu].create(Slot.of(*slot)).mig_uuid for slot in slots]


def find(machine, visible=None, asked=None):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return find_device(asked, environ, str(machine.library))


def test_slice_is_described_without_root_only_calls(machine):
    uuid, _ = slices(machine, ("2g.20gb", 0, 2), ("1g.20gb", 2, 2))
    machine.calls(reset=True)
    device = find(machine, uuid)
    assert (device.gpu, device.profile, device.visible) == ("NVIDIA H100 80GB HBM3", "2g.20gb", uuid)
    assert (device.compute_slices, device.memory_slices, device.sm_count) == (2, 2, 32)
    assert not FOR_ROOT & set(machine.calls())


def test_every_slice_of_every_gpu_is_described_as_its_profile(tmp_path):
    """The slices' shares equal those of the geometry's placements, which unprivileged users may not query."""
    machine = SimulatedMachine.create(tmp_path / "all", gpus=GPU_MODELS)
    for index in range(len(GPU_MODELS)):
        with NvmlDriver(str(machine.library)) as driver:
            gpu = driver.gpus()[index]
            for info in gpu.geometry().profiles:
                instance = gpu.create(info.slots[0])
                device = find(machine, instance.mig_uuid)
                found = (device.gpu, device.profile, device.compute_slices, device.memory_slices, device.sm_count)
                assert found == (
                    gpu.name,
                    info.profile.name,
                    info.compute_slices,
                    info.memory_slices,
                    info.sm_count,
                )
                assert device.memory_mib == info.memory_mib
                gpu.destroy(instance)


def test_a_whole_gpu_has_no_profile(tmp_path):
    machine = SimulatedMachine.create(tmp_path / "off", gpus=["a100-40gb"], mig=False)
    device = find(machine)
    assert (device.gpu, device.profile) == ("NVIDIA A100-SXM4-40GB", "")
    assert (device.compute_slices, device.memory_slices, device.sm_count) == (None, None, 108)
    assert device.visible == find(machine, "0").visible == find(machine, device.visible[:12]).visible


def test_gpu_in_mig_mode_resolves_to_its_first_slice(machine):
    first, second = slices(machine, ("1g.10gb", 0, 1), ("2g.20gb", 2, 2))
    assert find(machine).visible == find(machine, "0").visible
    assert find(machine).visible in (first, second)  # NVML's order is by the instances' ids
    assert find(machine, f"{second},{first}").visible == second
    with pytest.raises(NotFound, match="in MIG mode and has no slice"):
        find(machine, "1")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_no_visible_device_resolves_to_the_cpu(machine, visible):
    assert find(machine, visible) == find(machine, asked="cpu") == Device()
    assert Device().is_cpu and Device().gpu == CPU


@pytest.mark.parametrize("visible", ["7", "GPU-00000000", "MIG-5f1c8a1e-0000-0000-0000-000000000000", "first"])
def test_missing_device_is_an_error(machine, visible):
    with pytest.raises((NotFound, InvalidRequest)):
        find(machine, visible)


def test_missing_driver_is_an_error_only_for_a_named_device(tmp_path):
    missing = str(tmp_path / "libnvidia-ml.so.1")
    assert find_device(None, {}, missing) == Device()
    with pytest.raises(DriverMissing):
        find_device(None, {"CUDA_VISIBLE_DEVICES": "0"}, missing)


def test_environment_exposes_only_the_device():
    environ = Device("GPU", "MIG-1").environment({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2", "HOME": "/"})
    assert environ["CUDA_VISIBLE_DEVICES"] == "MIG-1" and environ["HOME"] == "/"
    assert environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    own = {"CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    assert Device().environment(own)["CUDA_VISIBLE_DEVICES"] == ""
    assert Device().environment(own)["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    """A process in a session of its own, like every measured process."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as process:
        yield process
        process.kill()


def seen(peak, mib):
    for _ in range(1000):
        if peak.mib == mib:
            return True
        time.sleep(0.01)
    return False


def test_memory_peak_is_that_of_the_watched_process(machine, sleeper):
    (uuid,) = slices(machine, ("2g.20gb", 0, 2))
    meter = NvmlMeter(uuid, str(machine.library))
    with meter.watch({sleeper.pid}) as peak:
        assert peak.mib is None
        machine.start_process(uuid, sleeper.pid, memory_mib=1500)
        assert seen(peak, 1500)
        machine.end_process(sleeper.pid)
    assert peak.mib == 1500


def test_memory_of_other_processes_is_not_counted(machine, sleeper):
    (uuid,) = slices(machine, ("2g.20gb", 0, 2))
    machine.start_process(uuid, os.getpid(), memory_mib=700)
    with NvmlMeter(uuid, str(machine.library)).watch({sleeper.pid}) as peak:
        machine.start_process(uuid, sleeper.pid, memory_mib=1500)
        assert seen(peak, 1500)


def test_memory_still_held_from_the_last_point_is_not_subtracted(machine, sleeper):
    (uuid,) = slices(machine, ("2g.20gb", 0, 2))
    meter = NvmlMeter(uuid, str(machine.library))
    with meter.watch({sleeper.pid}):
        pass
    machine.start_process(uuid, sleeper.pid, memory_mib=400)
    with meter.watch({sleeper.pid}) as peak:
        assert seen(peak, 400)


def test_memory_that_the_driver_keeps_for_itself_is_not_in_use(tmp_path):
    """Some 400 to 600 MiB of a whole GPU, which made an idle one look used."""
    machine = SimulatedMachine.create(tmp_path / "whole", gpus=["h100-80gb"], mig=False)
    with VisibleDevice("0", str(machine.library)) as device:
        assert device.usage().used == 0
        machine.start_process(device.seen.uuid, memory_mib=300)
        assert device.usage().used == 300
        machine.fail("nvmlDeviceGetMemoryInfo_v2", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, times=None)
        assert device.usage().used > 300  # drivers before R510 do not tell it apart


def test_closing_the_device_unloads_the_library(machine):
    (uuid,) = slices(machine, ("1g.10gb", 0, 1))
    with VisibleDevice(uuid, str(machine.library)) as device:
        assert device.usage().used == 0 and device.usage().processes == ()
        device.close()
    find(SimulatedMachine.create(machine.directory / "other", gpus=["a30"], mig=False))
