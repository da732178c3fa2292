"""Many processes, threads and forks on one machine."""

import ctypes
import json
import os
import threading
from pathlib import Path

import pynvml

from tests.support.driver_helpers import check_tree, child, code, create, gpu, nvml, run, slice_of

WORKER = """
pynvml.nvmlInit()
rng = random.Random(int(sys.argv[1]))
rows = list(GPUS["h100-80gb"].values())
mine, log = [], []
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    device = gpu(rng.randrange(2))
    if mine and rng.random() < 0.45:
        instance, compute, entry = mine.pop(rng.randrange(len(mine)))
        log.append(["-", *entry, time.clock_gettime_ns(time.CLOCK_MONOTONIC)])
        pynvml.nvmlComputeInstanceDestroy(compute)
        pynvml.nvmlGpuInstanceDestroy(instance)
        continue
    row = rng.choice(rows)
    try:
        instance = create(device, row[0], rng.choice(row[6]), row[7])
    except pynvml.NVMLError_InsufficientResources:
        continue
    compute = full_ci(instance)
    info = pynvml.nvmlGpuInstanceGetInfo(instance)
    entry = [pynvml.nvmlDeviceGetIndex(info.device), info.placement.start, info.placement.size]
    log.append(["+", *entry, time.clock_gettime_ns(time.CLOCK_MONOTONIC)])
    mine.append((instance, compute, entry))
print(__import__("json").dumps(log))
"""


def begin(workers):
    """Start workers that wait for a line: all at the same time, however long each took to start up."""
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()


def test_concurrently_created_instances_never_overlap(make):
    """From when a creator has its instance until it starts to destroy it, no other holds any of its placement."""
    machine = make(["h100-80gb", "h100-80gb"], latency={"gi_create": 0.002, "gi_destroy": 0.001})
    workers = [child(machine, WORKER, str(seed), "80", stdin=-1) for seed in range(8)]
    begin(workers)
    events = []
    for number, worker in enumerate(workers):
        out, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err
        events += [(at, sign, number, index, start, size) for sign, index, start, size, at in json.loads(out)]
    held = {}
    for _, sign, number, index, start, size in sorted(events):
        for unit in range(start, start + size):
            if sign == "+":
                assert (index, unit) not in held
                held[index, unit] = number
            else:
                assert held.pop((index, unit)) == number
    assert sum(event[1] == "+" for event in events) > 50
    taken = {
        (index, unit)
        for index, gpu in enumerate(machine.dump()["gpus"])
        for i in gpu["instances"]
        for unit in range(i["start"], i["start"] + i["size"])
    }
    assert taken == set(held)
    check_tree(machine)


def test_concurrent_changes_of_several_processes_are_all_kept(machine):
    """No latency and little other work, so writers collide in the driver: each finds the state that it left."""
    script = """
pynvml.nvmlInit()
device, start = gpu(), int(sys.argv[1])
sys.stdin.readline()
for _ in range(500):
    instance = create(device, 19, start, 1)
    assert pynvml.nvmlGpuInstanceGetInfo(instance).placement.start == start
    pynvml.nvmlGpuInstanceDestroy(instance)
"""
    workers = [child(machine, script, str(start), stdin=-1) for start in range(4)]
    begin(workers)
    for worker in workers:
        _, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err
    assert machine.dump()["gpus"][0]["instances"] == []
    check_tree(machine)


def test_one_of_several_concurrent_creators_gets_the_placement(make):
    machine = make(["h100-80gb"], latency={"gi_create": 0.05})
    script = """
pynvml.nvmlInit()
sys.stdin.readline()
print(code(create, gpu(), 0, 0, 8))
"""
    racers = [child(machine, script, stdin=-1) for _ in range(6)]
    results = sorted(int(racer.communicate("go\n", timeout=300)[0]) for racer in racers)
    assert results == [0, *[pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES] * 5]


def test_threads_share_a_session(machine):
    results = []

    def work(start):
        for _ in range(30):
            results.append(code(create, gpu(), 19, start, 1))
            pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(gpu(), 7 + start))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0] * 120
    assert machine.dump()["gpus"][0]["instances"] == []


def test_forked_child_is_a_separate_client(machine):
    out = run(
        machine,
        """
import threading
pynvml.nvmlInit()
stop = threading.Event()
def busy():
    while not stop.is_set():
        pynvml.nvmlDeviceGetMigMode(gpu())
        code(create, gpu(), 19, 6, 1)
        code(lambda: pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(gpu(), 13)))
threads = [threading.Thread(target=busy) for _ in range(3)]
[t.start() for t in threads]
good = 0
for round in range(25):
    pid = os.fork()
    if not pid:
        mine = create(gpu(), 14, 0, 2)   # would hang or overlap if the parent's lock had come along
        pynvml.nvmlGpuInstanceDestroy(mine)
        os._exit(0)
    good += os.waitpid(pid, 0)[1] == 0
stop.set()
[t.join() for t in threads]
print(good)
""",
    )
    assert out.split() == ["25"]


def test_lock_of_a_killed_parent_is_not_kept_by_its_forked_child(machine):
    """A surviving child must not keep the lock of a parent that was killed inside a call."""
    machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", kill=True, moment="during")
    out = run(
        machine,
        """
pynvml.nvmlInit()
pynvml.nvmlDeviceGetCount()
pid = os.fork()
if not pid:
    sys.stdin.read(1)   # stays as long as the test wants
    os._exit(0)
print(pid, flush=True)
create(gpu(), 14, 0, 2)
""",
        expect=-9,
    )
    assert code(create, gpu(), 14, 2, 2) == 0
    os.kill(int(out), 9)


def test_two_machines_in_one_process_are_independent(make):
    first, second = make(["a30"]), make(["h200"])
    with nvml(first):
        pynvml.nvmlDeviceCreateGpuInstance(gpu(), 0)
        with nvml(second):
            assert pynvml.nvmlDeviceGetName(gpu()) == "NVIDIA H200"
    assert [len(m.dump()["gpus"][0]["instances"]) for m in (first, second)] == [1, 0]


def test_environment_variable_selects_the_machine(make, monkeypatch):
    first, second = make(["a30"]), make(["h200"])
    monkeypatch.setenv("MIGBATCH_SIM_DIR", str(second.directory))
    with nvml(first):
        assert pynvml.nvmlDeviceGetName(gpu()) == "NVIDIA H200"
    monkeypatch.delenv("MIGBATCH_SIM_DIR")
    with nvml(first):
        assert pynvml.nvmlDeviceGetName(gpu()) == "NVIDIA A30"


def test_library_loaded_through_a_symbolic_link_uses_the_same_machine(machine, tmp_path):
    link = tmp_path / "lib" / "libnvidia-ml.so.1"
    link.parent.mkdir()
    link.symlink_to(machine.library)
    library = ctypes.CDLL(str(link))
    count = ctypes.c_uint()
    assert (library.nvmlInit_v2(), library.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value) == (0, 0, 2)
    library.nvmlShutdown()


def test_library_works_in_a_chroot_with_a_bind_mount(machine, tmp_path):
    root = tmp_path / "root"
    (root / "sim").mkdir(parents=True)
    out = run(
        machine,
        """
libc = ctypes.CDLL(None, use_errno=True)
def must(result):
    assert result == 0, os.strerror(ctypes.get_errno())
source, root = sys.argv[1:]
must(libc.unshare(0x20000))                                          # CLONE_NEWNS
must(libc.mount(b"none", b"/", None, 0x44000, None))                 # MS_REC | MS_PRIVATE
must(libc.mount(source.encode(), f"{root}/sim".encode(), None, 0x1000, None))   # MS_BIND
os.chroot(root)
os.chdir("/")
pynvml.nvmlLib = ctypes.CDLL("/sim/libnvidia-ml.so.1")
pynvml.nvmlInit()
print(slice_of(gpu(), 9, 4, 4)[2])
""",
        str(machine.directory),
        str(root),
    )
    assert pynvml.nvmlDeviceGetGpuInstanceId(pynvml.nvmlDeviceGetHandleByUUID(out.strip())) == 2
    check_tree(machine)


def test_proc_files_of_instances_are_created_and_removed(machine):
    _, compute, _ = slice_of(gpu(0), 9, 4, 4)
    check_tree(machine)
    path = machine.proc_root / "driver/nvidia/capabilities/gpu2/mig/gi2/access"
    assert path.read_text() == "DeviceFileMinor: 291\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    assert oct(path.stat().st_mode & 0o777) == "0o644"
    pynvml.nvmlComputeInstanceDestroy(compute)
    check_tree(machine)


def test_proc_and_dev_files_of_the_machine_are_present(machine):
    lines = (machine.proc_root / "driver/nvidia-caps/mig-minors").read_text().splitlines()
    assert lines[:3] == ["config 1", "monitor 2", "gpu0/gi0/access 3"]
    assert lines[-1] == "gpu31/gi14/ci7/access 4322"
    assert len(lines) == 2 + 32 * 15 * 9
    minors = dict(line.split() for line in lines)
    assert minors["gpu1/gi0/access"] == "138"
    assert minors["gpu2/gi13/ci3/access"] == str(3 + 270 + 117 + 4)
    config = (machine.proc_root / "driver/nvidia/capabilities/mig/config").read_text()
    assert config.split() == ["DeviceFileMinor:", "1", "DeviceFileMode:", "256", "DeviceFileModify:", "1"]
    assert {p.name for p in machine.dev_root.iterdir()} == {"nvidia0", "nvidia2", "nvidiactl"}
    major = machine.dump()["caps_major"]
    assert f"{major} nvidia-caps" in (machine.proc_root / "devices").read_text()
    assert str(major) not in Path("/proc/devices").read_text().split()


def test_proc_files_keep_the_content_written_by_root(machine):
    """DeviceFileModify: 0 stays while the instance lives, and a new instance starts from 1."""
    instance, compute, _ = slice_of(gpu(0), 9, 4, 4)
    path = machine.proc_root / "driver/nvidia/capabilities/gpu2/mig/gi2/access"
    path.write_text("DeviceFileModify: 0\nDeviceFileMinor: 291\nDeviceFileMode: 292\n")
    create(gpu(0), 19, 0, 1)
    assert "DeviceFileModify: 0" in path.read_text()
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    create(gpu(0), 9, 4, 4)
    assert "DeviceFileModify: 1" in path.read_text()
