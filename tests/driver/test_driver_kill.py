"""SIGKILL at any call, and changes that are still in progress."""

import shutil
import signal
import time

import pynvml
import pytest

from slurm_migbatch.testbed.simdriver import REAL_LATENCY
from tests.support.driver_helpers import check_tree, child, code, create, gpu, nvml, run, slice_of

INSUFFICIENT = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES

LIFE = """
pynvml.nvmlInit()
device = gpu()
print("start", flush=True)
instance = create(device, 9, 4, 4)
print("gi", flush=True)
compute = pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)
print("ci", flush=True)
pynvml.nvmlComputeInstanceDestroy(compute)
print("-ci", flush=True)
pynvml.nvmlGpuInstanceDestroy(instance)
print("-gi", flush=True)
"""

STEPS = [
    ("nvmlDeviceCreateGpuInstanceWithPlacement", (0, 0), (1, 0)),
    ("nvmlGpuInstanceCreateComputeInstance", (1, 0), (1, 1)),
    ("nvmlComputeInstanceDestroy", (1, 1), (1, 0)),
    ("nvmlGpuInstanceDestroy", (1, 0), (0, 0)),
]


def counts(machine):
    instances = machine.dump()["gpus"][0]["instances"]
    return len(instances), sum(len(i["compute_instances"]) for i in instances)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "before", "after"), STEPS)
@pytest.mark.parametrize("moment", ["before", "writing", "during", "after"])
def test_killed_call_takes_effect_completely_or_not_at_all(machine, call, before, after, moment):
    machine.fail(call, kill=True, moment=moment)
    run(machine, LIFE, expect=-signal.SIGKILL)
    assert counts(machine) == (before if moment in ("before", "writing") else after)
    pynvml.nvmlDeviceGetCount()  # the next caller finds no lock and repairs the files
    check_tree(machine)
    machine.reset_faults()
    machine.reset_gpu(0)
    run(machine, LIFE)
    assert counts(machine) == (0, 0)
    check_tree(machine)


def test_kills_at_random_times_leave_a_consistent_state(machine):
    """Whatever a process was doing when it was killed, other processes continue."""
    script = """
pynvml.nvmlInit()
rng = random.Random(int(sys.argv[1]))
print("ready", flush=True)
while True:
    start = rng.randrange(7)
    try:
        create(gpu(), 19, start, 1)
        full_ci(pynvml.nvmlDeviceGetGpuInstanceById(gpu(), 7 + start))
    except pynvml.NVMLError:
        try:
            instance = pynvml.nvmlDeviceGetGpuInstanceById(gpu(), 7 + start)
            for compute in computes(instance, 0):
                pynvml.nvmlComputeInstanceDestroy(compute)
            pynvml.nvmlGpuInstanceDestroy(instance)
        except pynvml.NVMLError:
            pass
"""
    for seed in range(6):
        pair = [child(machine, script, str(2 * seed + i)) for i in range(2)]
        for process in pair:
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.02 + 0.013 * seed)
        for process in pair:
            process.kill()
            process.communicate()
        pynvml.nvmlDeviceGetCount()
        check_tree(machine)
        places = [i["start"] for i in machine.dump()["gpus"][0]["instances"]]
        assert len(places) == len(set(places))


def test_creation_continues_after_its_caller_is_killed(make):
    """As in the kernel. Meanwhile the placement is occupied and the instance is not visible."""
    machine = make(["h100-80gb"], latency={"gi_create": 3600})
    with nvml(machine):
        process = child(machine, "pynvml.nvmlInit()\ncreate(gpu(), 9, 4, 4)")
        while not counts(machine)[0]:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        (instance,) = machine.dump()["gpus"][0]["instances"]
        assert instance["state"] == "creating"
        assert code(pynvml.nvmlDeviceGetGpuInstanceById, gpu(), 2) == pynvml.NVML_ERROR_NOT_FOUND
        machine.set_latency(0.0)
        assert code(create, gpu(), 14, 4, 2) == INSUFFICIENT
        assert code(create, gpu(), 0, 0, 8) == INSUFFICIENT
        machine.reset_gpu(0)
        assert code(create, gpu(), 14, 4, 2) == 0


def test_creation_finishes_after_its_caller_is_killed(make):
    machine = make(["h100-80gb"], latency={"gi_create": 0.4})
    with nvml(machine):
        machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", kill=True, moment="after")
        run(machine, "pynvml.nvmlInit()\ncreate(gpu(), 9, 4, 4)", expect=-signal.SIGKILL)
        while code(pynvml.nvmlDeviceGetGpuInstanceById, gpu(), 2):
            time.sleep(0.01)
        assert machine.dump()["gpus"][0]["instances"][0]["state"] == "live"


def test_placement_stays_occupied_until_the_destruction_ends(make):
    machine = make(["h100-80gb"], latency={"gi_destroy": 3600})
    with nvml(machine):
        instance, compute, _ = slice_of(gpu(), 9, 4, 4)
        pynvml.nvmlComputeInstanceDestroy(compute)
        machine.fail("nvmlGpuInstanceDestroy", 0, moment="after")  # returns at once; the destruction goes on
        machine.set_latency({"gi_destroy": 3600})
        process = child(
            machine, "pynvml.nvmlInit()\npynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(gpu(), 2))"
        )
        while code(pynvml.nvmlGpuInstanceGetInfo, instance) == 0:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert machine.dump()["gpus"][0]["instances"][0]["state"] == "destroying"
        machine.set_latency(0.0)
        assert code(create, gpu(), 9, 4, 4) == INSUFFICIENT
        assert not list(machine.proc_root.rglob("gi2"))


def test_real_latency_equals_the_hardware_measurements():
    """Creating a slice takes 0.16-0.24 s, destroying it 0.20-0.22 s, depending on its size."""
    for verb, smallest, largest in (("create", 0.16, 0.24), ("destroy", 0.20, 0.22)):
        base = sum(REAL_LATENCY[f"{part}_{verb}"][0] for part in ("gi", "ci"))
        span = sum(REAL_LATENCY[f"{part}_{verb}"][1] for part in ("gi", "ci"))
        assert (base, base + span) == (pytest.approx(smallest), pytest.approx(largest))


def test_creation_latency_grows_with_the_instance_size(make):
    """The base latency is zero here, so the smallest instance is created at once, the larger one not in the test."""
    machine = make(["h100-80gb"], latency={"gi_create": (0.0, 3600)})
    with nvml(machine):
        create(gpu(), 19, 6, 1)
        process = child(machine, "pynvml.nvmlInit()\ncreate(gpu(), 9, 0, 4)")
        while counts(machine)[0] < 2:
            time.sleep(0.01)
        assert [i["state"] for i in machine.dump()["gpus"][0]["instances"]] == ["creating", "live"]
        assert process.poll() is None
        process.kill()
        process.communicate()


def test_changes_run_in_parallel_across_gpus_and_one_at_a_time_per_gpu(make):
    machine = make(["h100-80gb", "h100-80gb"], latency={"gi_create": 3600})
    with nvml(machine):
        machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", kill=True, moment="after", times=2)
        run(machine, "pynvml.nvmlInit()\ncreate(gpu(0), 9, 0, 4)", expect=-signal.SIGKILL)
        machine.set_latency(0.0)
        run(machine, "pynvml.nvmlInit()\ncreate(gpu(0), 9, 4, 4)", expect=-signal.SIGKILL)
        assert code(create, gpu(1), 9, 0, 4) == 0
        assert [i["state"] for i in machine.dump()["gpus"][0]["instances"]] == ["creating", "creating"]
        assert [i["state"] for i in machine.dump()["gpus"][1]["instances"]] == ["live"]


def test_replaced_machine_state_requires_a_new_init(make, machine):
    (machine.directory / "state").rename(machine.directory / "away")
    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    shutil.copy(make(["a30"]).directory / "state", machine.directory / "state")
    assert code(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetName(gpu()) == "NVIDIA A30"
    pynvml.nvmlShutdown()
