"""The NVML adapter against the simulated driver, through nvidia-ml-py."""

import os
import subprocess
import sys

import pynvml
import pytest

from slurm_migbatch.mig.driver import (
    Activation,
    Busy,
    DriverError,
    DriverMissing,
    GpuLost,
    InstanceExists,
    InsufficientResources,
    InvalidRequest,
    NoPermission,
    NotFound,
    NotMig,
)
from slurm_migbatch.mig.layout import Slot
from slurm_migbatch.mig.nvml import NvmlDriver, NvmlGpu
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.testbed.simdriver import GPU_MODELS, SimulatedMachine

ONE = Slot.of("1g.10gb", 0, 1)
TWO = Slot.of("2g.20gb", 2, 2)


def drivers_view(machine, index=0):
    """The instances of a GPU as the simulated machine has them."""
    return {
        (i["profile"], i["start"], i["size"], len(i["compute_instances"]))
        for i in machine.dump()["gpus"][index]["instances"]
    }


# -- facts of a GPU ------------------------------------------------------------------------------------------------


def test_gpus_are_listed_in_nvml_order(driver):
    gpus = driver.gpus()
    assert [(gpu.index, gpu.minor, gpu.name) for gpu in gpus] == [(0, 3, "NVIDIA H100 80GB HBM3"), (1, 1, "NVIDIA A30")]
    assert all(gpu.uuid.startswith("GPU-") for gpu in gpus)


def test_profiles_have_the_profile_ids_of_the_device_and_not_the_enums(h100, a30):
    ids = {info.profile.name: info.profile_id for info in h100.geometry().profiles}
    assert ids["7g.80gb"] == 0 and ids["1g.10gb"] == 19 and ids["1g.10gb+me"] == 20 and ids["1g.20gb"] == 15
    assert a30.geometry().info(Profile.parse("1g.6gb")).profile_id == 14


@pytest.mark.parametrize("model", GPU_MODELS)
@pytest.mark.parametrize("names", ["reported", "computed"])
def test_geometry_is_the_same_with_mig_off(tmp_path, monkeypatch, geometries, model, names):
    """Drivers differ in whether they name profiles with MIG off; names that they report are not computed."""
    machine = SimulatedMachine.create(tmp_path / "off", gpus=[model], mig=False)
    if names == "computed":
        machine.fail("nvmlDeviceGetGpuInstanceProfileInfoV", pynvml.NVML_ERROR_NOT_SUPPORTED, times=None)
    else:
        monkeypatch.setattr("slurm_migbatch.mig.nvml.describe.computed_profile", None)
    with NvmlDriver(str(machine.library)) as driver:
        (gpu,) = driver.gpus()
        assert gpu.mig_mode() == (False, False)
        assert gpu.geometry() == geometries[model]
        assert gpu.instances() == ()


def test_facts_not_supported_by_the_driver_are_left_out(machine, h100):
    facts = h100.facts()
    assert facts == {
        "name": "NVIDIA H100 80GB HBM3",
        "architecture": "hopper",
        "compute_capability": "9.0",
        "clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "memory_bus_bits": 5120,
        "memory_mib": 81559,
        "sm_count": 132,
        "pci_bus_id": facts["pci_bus_id"],
        "driver_version": facts["driver_version"],
    }
    for call in ("nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetArchitecture"):
        machine.fail(call, pynvml.NVML_ERROR_NOT_SUPPORTED, times=None)
    left = h100.facts()
    assert set(facts) - set(left) == {"architecture", "clock_mhz", "memory_clock_mhz", "memory_bus_bits"}


def test_vgpu_guests_are_listed_but_have_no_geometry(h100, monkeypatch):
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetVirtualizationMode", lambda handle: pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    )
    with pytest.raises(NotMig, match="vGPU guest"):
        h100.geometry()
    assert h100.facts()["virtualization"] == "vgpu"


def test_gpus_without_mig_are_listed_but_have_no_geometry(machine, h100):
    for call in ("nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstanceProfileInfoV"):
        machine.fail(call, pynvml.NVML_ERROR_NOT_SUPPORTED, times=None)
    assert h100.mig_mode() == (False, False)
    assert h100.instances() == ()
    with pytest.raises(NotMig, match="no MIG profiles"):
        h100.geometry()
    assert "sm_count" not in h100.facts()


def test_geometry_is_read_from_older_drivers_without_profile_names(machine, h100, geometries):
    machine.fail("nvmlDeviceGetGpuInstanceProfileInfoV", pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, times=None)
    assert h100.geometry() == geometries["h100-80gb"]


def test_geometry_needs_the_memory_of_the_gpu_only_for_missing_names(machine, h100, geometries):
    """GPUs that share the memory of the host may not report it."""
    machine.fail("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED, times=None)
    assert h100.geometry() == geometries["h100-80gb"]
    assert h100.create(ONE) in h100.instances()


def refusing(monkeypatch, call, refused, code):
    """Make the driver refuse a call for one of its second arguments."""
    answer = getattr(pynvml, call)

    def asked(handle, which, *args, **more):
        if which == refused:
            raise pynvml.NVMLError(code)
        return answer(handle, which, *args, **more)

    monkeypatch.setattr(pynvml, call, asked)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT])
def test_a_profile_that_the_driver_cannot_place_is_left_out(h100, geometries, monkeypatch, code):
    refusing(monkeypatch, "nvmlDeviceGetGpuInstancePossiblePlacements", 20, code)
    refusing(monkeypatch, "nvmlDeviceGetGpuInstances", 20, code)
    left = [info for info in geometries["h100-80gb"].profiles if info.profile.name != "1g.10gb+me"]
    assert list(h100.geometry().profiles) == left
    assert h100.create(ONE) in h100.instances()


def test_values_of_the_enum_that_the_driver_does_not_know_are_skipped(h100, geometries, monkeypatch):
    """NVIDIA's device plugins skip INVALID_ARGUMENT like NOT_SUPPORTED."""
    refusing(monkeypatch, "nvmlDeviceGetGpuInstanceProfileInfo", 5, pynvml.NVML_ERROR_INVALID_ARGUMENT)
    refusing(monkeypatch, "nvmlGpuInstanceGetComputeInstanceProfileInfo", 2, pynvml.NVML_ERROR_INVALID_ARGUMENT)
    assert h100.geometry() == geometries["h100-80gb"]
    assert h100.create(Slot.of("4g.40gb", 0, 4)).mig_uuid is not None


# -- the mode ------------------------------------------------------------------------------------------------------


def test_mig_mode_switches_at_once_on_hopper_and_after_a_reset_on_ampere(machine, h100, a30):
    assert h100.set_mig_mode(False) is Activation.DONE
    assert h100.mig_mode() == (False, False)
    assert h100.set_mig_mode(True) is Activation.DONE
    assert a30.set_mig_mode(False) is Activation.RESET_REQUIRED
    assert a30.mig_mode() == (True, False)
    machine.reset_gpu(1)
    assert a30.mig_mode() == (False, False)


def test_gpu_in_use_keeps_its_mig_mode(h100):
    h100.create(ONE)
    try:
        outcome = h100.set_mig_mode(False)
    except Busy as error:
        assert "switching MIG off" in str(error)
    else:
        assert outcome is Activation.IN_USE
    assert h100.mig_mode()[0]


def test_creating_an_instance_requires_mig_mode(h100):
    h100.set_mig_mode(False)
    with pytest.raises(NotMig, match="MIG is off"):
        h100.create(ONE)


# -- creating and destroying instances -----------------------------------------------------------------------------


def test_created_slice_has_a_full_compute_instance(machine, h100):
    made = h100.create(TWO)
    assert made.slot == TWO and made.ci_id is not None
    device = machine.dump()["gpus"][0]["instances"][0]
    assert made.gi_id == device["gi_id"]
    assert made.mig_uuid == device["compute_instances"][0]["uuid"]
    assert h100.instances() == (made,)
    h100.destroy(made)
    assert drivers_view(machine) == set()


def test_instances_are_listed_by_placement(h100):
    slots = [
        Slot.of("1g.10gb+me", 0, 1),
        Slot.of("1g.10gb", 1, 1),
        Slot.of("1g.20gb", 2, 2),
        Slot.of("3g.40gb", 4, 4),
    ]
    for slot in reversed(slots):
        h100.create(slot)
    assert [instance.slot for instance in h100.instances()] == slots
    assert len({instance.mig_uuid for instance in h100.instances()}) == 4


def test_existing_slot_is_distinguished_from_a_blocked_one(h100):
    made = h100.create(TWO)
    with pytest.raises(InstanceExists) as existing:
        h100.create(TWO)
    assert existing.value.instance == made
    with pytest.raises(InsufficientResources, match=r"overlaps 2g\.20gb@2:2") as blocked:
        h100.create(Slot.of("1g.10gb", 3, 1))
    assert not isinstance(blocked.value, InstanceExists)
    h100.create(Slot.of("1g.10gb+me", 0, 1))
    with pytest.raises(InsufficientResources, match="at most 1 of"):
        h100.create(Slot.of("1g.10gb+me", 1, 1))


def test_impossible_slot_is_refused_without_calling_the_driver(machine, h100):
    machine.calls(reset=True)
    with pytest.raises(InvalidRequest, match=r"the closest is 1g\.10gb"):
        h100.create(Slot.of("1g.5gb", 0, 1))
    with pytest.raises(InvalidRequest, match="only at 0:4, 4:4"):
        h100.create(Slot.of("3g.40gb", 2, 4))
    assert machine.calls()["nvmlDeviceCreateGpuInstanceWithPlacement"] == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [(4, NoPermission), (15, GpuLost), (16, GpuLost), (19, Busy), (27, Busy), (9, DriverMissing), (999, DriverError)],
)
def test_driver_errors_are_mapped_and_name_the_operation(machine, h100, code, kind):
    machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code)
    with pytest.raises(kind) as raised:
        h100.create(ONE)
    assert raised.value.code == code
    assert "creating 1g.10gb@0:1" in str(raised.value) and h100.uuid in str(raised.value)
    assert drivers_view(machine) == set()
    assert h100.create(ONE).slot == ONE


@pytest.mark.parametrize("call", ["nvmlGpuInstanceCreateComputeInstance", "nvmlComputeInstanceGetInfo_v2"])
def test_gpu_instance_is_destroyed_when_its_compute_instance_fails(machine, h100, call):
    machine.fail(call, 999)
    with pytest.raises(DriverError):
        h100.create(ONE)
    assert drivers_view(machine) == set()


def test_incomplete_instance_that_cannot_be_destroyed_can_be_completed(machine, h100):
    machine.fail("nvmlGpuInstanceCreateComputeInstance", 999)
    machine.stick_destroy(None)
    with pytest.raises(DriverError, match="could not be destroyed"):
        h100.create(ONE)
    (half,) = h100.instances()
    assert half.slot == ONE and half.ci_id is None and half.mig_uuid is None
    whole = h100.complete(half)
    assert whole.ci_id is not None and h100.instances() == (whole,)
    assert h100.complete(whole) == whole


def test_destroying_a_missing_instance_succeeds(machine, h100):
    made = h100.create(ONE)
    h100.destroy(made)
    h100.destroy(made)
    with pytest.raises(NotFound):
        h100.complete(made)
    h100.set_mig_mode(False)
    h100.destroy(made)


def test_reused_instance_id_is_not_destroyed(machine, h100):
    made = h100.create(ONE)
    h100.destroy(made)
    other = h100.create(Slot.of("1g.10gb+me", 0, 1))
    assert other.gi_id == made.gi_id
    h100.destroy(made)
    assert h100.instances() == (other,)
    with pytest.raises(NotFound, match="its id is now"):
        h100.complete(made)


def test_failed_destroy_may_leave_the_gpu_instance_without_compute_instance(machine, h100):
    """k8s-dra-driver-gpu and go-nvml/146: the GPU instance stays in use for a while after its last process."""
    made = h100.create(ONE)
    machine.stick_destroy(None)
    with pytest.raises(Busy, match="no process is listed"):
        h100.destroy(made)
    (half,) = h100.instances()
    assert (half.gi_id, half.ci_id) == (made.gi_id, None)
    machine.reset_faults()
    h100.destroy(made)
    assert h100.instances() == ()


def test_busy_error_names_the_processes(machine, h100):
    made, other = h100.create(ONE), h100.create(TWO)
    machine.start_process(made.mig_uuid, os.getpid(), memory_mib=100)
    assert h100.processes(made) == (os.getpid(),)
    assert h100.processes(other) == ()
    (holder,) = h100.holders(made)
    assert holder.pid == os.getpid() and holder.name
    with pytest.raises(Busy, match=f"in use by {os.getpid()} \\(") as raised:
        h100.destroy(made)
    assert raised.value.code == pynvml.NVML_ERROR_IN_USE
    assert h100.instances() == (made, other)
    machine.end_process(os.getpid())
    h100.destroy(made)
    assert h100.processes(made) == ()


def test_control_characters_in_process_names_are_replaced(machine, h100):
    """The owner of a process can set its name."""
    made = h100.create(ONE)
    code = "open('/proc/self/comm', 'w').write('a\\nb'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        machine.start_process(made.mig_uuid, process.pid)
        assert [str(holder) for holder in h100.holders(made)] == [f"{process.pid} (a?b)"]
        process.communicate(b"\n")
    h100.destroy(made)


def test_partial_compute_instance_is_listed_as_incomplete_and_destroyed(machine, h100):
    made = h100.create(Slot.of("3g.40gb", 4, 4))
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    gi = pynvml.nvmlDeviceGetGpuInstanceById(handle, made.gi_id)
    pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(gi, made.ci_id))
    pynvml.nvmlGpuInstanceCreateComputeInstance(gi, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE)
    (partial,) = h100.instances()
    assert partial.ci_id is None
    with pytest.raises(InsufficientResources):
        h100.complete(partial)
    h100.destroy(partial)
    assert drivers_view(machine) == set()


# -- the driver itself ---------------------------------------------------------------------------------------------


def test_lost_gpu_does_not_affect_the_other_gpu(machine, h100, a30):
    machine.set_lost(0)
    with pytest.raises(GpuLost, match="reset"):
        h100.instances()
    assert a30.instances() == ()
    machine.reset_gpu(0)
    assert h100.instances() == ()


def test_reboot_removes_all_instances(machine):
    with NvmlDriver(str(machine.library)) as driver:
        driver.gpus()[0].create(ONE)
        machine.reboot()
        with pytest.raises(DriverMissing):
            driver.gpus()[0].instances()
    with NvmlDriver(str(machine.library)) as driver:
        assert [gpu.instances() for gpu in driver.gpus()] == [(), ()]
        assert [gpu.mig_mode()[0] for gpu in driver.gpus()] == [False, True]  # Hopper forgets the mode


def test_only_one_nvml_library_is_open_per_process(machine, driver, tmp_path):
    other = SimulatedMachine.create(tmp_path / "other", gpus=["h200"])
    with pytest.raises(DriverMissing, match="still uses"):
        NvmlDriver(str(other.library))
    with NvmlDriver(str(machine.library)) as again:
        assert [gpu.uuid for gpu in again.gpus()] == [gpu.uuid for gpu in driver.gpus()]
    assert len(driver.gpus()[0].geometry().profiles) == 7
    driver.close()
    driver.close()
    with NvmlDriver(str(other.library)) as second:
        assert [gpu.name for gpu in second.gpus()] == ["NVIDIA H200"]


def test_missing_library_is_reported(tmp_path):
    with pytest.raises(DriverMissing, match="cannot be loaded"):
        NvmlDriver(str(tmp_path / "libnvidia-ml.so.1"))


def test_failed_driver_initialization_can_be_retried(machine):
    machine.fail("nvmlInitWithFlags", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(DriverMissing, match="kernel module"):
        NvmlDriver(str(machine.library))
    machine.fail("nvmlDeviceGetCount_v2", 999)
    with pytest.raises(DriverError):
        NvmlDriver(str(machine.library))
    with NvmlDriver(str(machine.library)) as driver:
        assert len(driver.gpus()) == 2


def test_gpu_without_a_uuid_does_not_affect_the_others(machine):
    machine.fail("nvmlDeviceGetUUID", 999, times=2)
    with NvmlDriver(str(machine.library)) as driver:
        assert list(driver.unidentified()) == [0, 1]
        assert len(driver.gpus()) == 2, "they are queried again"
        assert driver.unidentified() == {}
        machine.set_lost(1)
        driver.close()
    with NvmlDriver(str(machine.library)) as driver:
        assert [gpu.index for gpu in driver.gpus()] == [0]
        assert "fell off the bus" in driver.unidentified()[1]
        machine.reset_gpu(1)
        assert [gpu.index for gpu in driver.gpus()] == [0, 1]


def test_a_gpu_is_found_again_when_its_index_moves(machine, h100, monkeypatch):
    real = pynvml.nvmlDeviceGetHandleByIndex
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: real(1 - index))
    machine.fail("nvmlDeviceGetMigMode", 999)
    with pytest.raises(DriverError):
        h100.mig_mode()
    assert h100.mig_mode() == (True, True)
    assert h100.index == 1
    assert h100.create(ONE).slot == ONE
    assert drivers_view(machine, 0) == {("1g.10gb", 0, 1, 1)}


def test_the_adapter_works_with_an_empty_environment(machine):
    """As in a root hook: no LD_LIBRARY_PATH, only the path in the configuration."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2].split(':')\n"
        "from slurm_migbatch.mig.nvml import NvmlDriver\n"
        "print(len(NvmlDriver(sys.argv[1]).gpus()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-ISB", "-c", code, str(machine.library), ":".join(p for p in sys.path if p)],
        env={},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip(), done.returncode) == ("2", 0), done.stderr


def test_instance_left_by_a_killed_process_can_be_completed(machine, driver):
    code = (
        "import sys\n"
        "from slurm_migbatch.mig.layout import Slot\n"
        "from slurm_migbatch.mig.nvml import NvmlDriver\n"
        "NvmlDriver(sys.argv[1]).gpus()[0].create(Slot.of('2g.20gb', 2, 2))\n"
    )
    machine.fail("nvmlGpuInstanceCreateComputeInstance", kill=True)
    done = subprocess.run([sys.executable, "-c", code, str(machine.library)], capture_output=True)
    assert done.returncode == -9
    gpu: NvmlGpu = driver.gpus()[0]
    (half,) = gpu.instances()
    assert half.slot == TWO and half.ci_id is None
    assert gpu.complete(half).ci_id is not None
