"""The Python side: building the driver and controlling machines."""

import os
import re
import shutil
import subprocess

import pynvml
import pytest

from slurm_migbatch.testbed import simdriver
from slurm_migbatch.testbed.simdriver import GPU_MODELS, SimDriverError, SimulatedMachine, _free_major, build
from tests.support.driver_helpers import code, create, gpu, nvml, slice_of


@pytest.mark.slow
def test_library_is_rebuilt_only_when_sources_are_newer(tmp_path, monkeypatch):
    sources = tmp_path / "driver"
    shutil.copytree(simdriver.SOURCES, sources)
    monkeypatch.setattr(simdriver, "SOURCES", sources)
    library = build(tmp_path / "out")
    first = library.stat().st_mtime_ns
    assert build(tmp_path / "out").stat().st_mtime_ns == first
    os.utime(sources / "tables.c", ns=(first + 10**9, first + 10**9))
    assert build(tmp_path / "out").stat().st_mtime_ns > first
    assert b"libnvidia-ml.so.1" in subprocess.check_output(["readelf", "-d", library])


@pytest.mark.slow
def test_failed_build_reports_the_compiler_message(tmp_path, monkeypatch):
    sources = tmp_path / "driver"
    shutil.copytree(simdriver.SOURCES, sources)
    (sources / "gi.c").write_text("this is no C\n")
    monkeypatch.setattr(simdriver, "SOURCES", sources)
    with pytest.raises(SimDriverError, match=r"gi\.c"):
        build(tmp_path / "out")


def test_device_major_is_one_that_the_host_does_not_serve():
    """Hosts with many drivers serve all of 234 to 254."""
    head = "Character devices:\n  1 mem\n  4 /dev/vc/0\n"
    assert _free_major(f"{head}254 ndctl\n\nBlock devices:\n  7 loop\n253 device-mapper\n") == 252
    busy = head + "".join(f"{major} nvidia-{major}\n" for major in range(234, 255))
    assert _free_major(busy) == 127
    busy += "".join(f"{major:3} other\n" for major in (*range(60, 64), *range(120, 128)))
    assert _free_major(busy) == 511
    busy += "".join(f"{major} other\n" for major in range(384, 512))
    with pytest.raises(SimDriverError, match="no free character device major"):
        _free_major(busy)


def test_sources_compile_without_any_warning(tmp_path):
    """-Wall and -Wextra come from the Makefile, -Werror from `make lint`; this adds what both leave out."""
    extra = ["-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Wpointer-arith", "-Wcast-qual", "-Werror"]
    for source in sorted(simdriver.SOURCES.glob("*.c")):
        subprocess.run(["cc", "-std=gnu11", "-fsyntax-only", *extra, str(source)], check=True)


def test_library_exports_only_nvml_symbols(library):
    out = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    names = {line.split()[-1] for line in out.splitlines()}
    assert {name for name in names if not name.startswith("nvml")} == set()


def test_machine_is_created_with_the_requested_gpus(make):
    minors = list(reversed(range(len(GPU_MODELS))))
    machine = make(list(GPU_MODELS), minors=minors, mig=False)
    gpus = machine.dump()["gpus"]
    assert [g["model"] for g in gpus] == list(GPU_MODELS)
    assert [g["minor"] for g in gpus] == minors
    assert not any(g["mig"] for g in gpus)
    assert len({g["uuid"] for g in gpus}) == len(gpus)
    assert re.fullmatch(r"[0-9a-f-]{36}\n", machine.boot_id_file.read_text())


def test_second_machine_object_sees_the_same_state(machine):
    slice_of(gpu(), 9, 0, 4)
    assert SimulatedMachine(machine.directory).dump() == machine.dump()


def test_calls_are_counted_by_function(machine):
    machine.calls(reset=True)
    for start in range(3):
        create(gpu(), 19, start, 1)
    calls = machine.calls()
    assert calls["nvmlDeviceCreateGpuInstanceWithPlacement"] == 3
    assert calls["nvmlGpuInstanceDestroy"] == 0
    assert set(calls) == {"nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlDeviceGetHandleByIndex_v2"}
    machine.calls(reset=True)
    assert not machine.calls()


def test_several_faults_on_one_function_are_independent(machine):
    machine.fail("nvmlDeviceGetName", 15, nth=2)
    machine.fail("nvmlDeviceGetName", 9, nth=3)
    assert [code(pynvml.nvmlDeviceGetName, gpu()) for _ in range(4)] == [0, 15, 9, 0]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda m: m.fail("nvmlNoSuchThing"), "does not serve 'nvmlNoSuchThing'"),
        (lambda m: m.fail("nvmlDeviceGetName", nth=0), "not valid"),
        (lambda m: m.reset_gpu(7), "no such device"),
        (lambda m: m.set_lost(7), "no such device"),
        (lambda m: m.set_latency({"gi_creation": 1.0}), "unknown operation 'gi_creation'"),
        (lambda m: SimulatedMachine.create(m.directory, ["a30"]), "a machine already exists"),
        (lambda m: SimulatedMachine.create(m.directory / "x", ["v100"]), "unknown GPU model 'v100'"),
        (lambda m: SimulatedMachine.create(m.directory / "x", ["a30"], minors=[1, 2]), "one number per GPU"),
        (lambda m: SimulatedMachine.create(m.directory / "x", ["a30"], minors=[99]), "not valid"),
        (lambda m: SimulatedMachine(m.directory / "nowhere"), "no simulated machine there"),
    ],
)
def test_invalid_machine_operations_are_reported(machine, action, message):
    with pytest.raises(SimDriverError, match=message):
        action(machine)


def test_full_fault_table_is_reported(machine):
    with pytest.raises(SimDriverError, match="table is full"):
        for _ in range(100):
            machine.fail("nvmlDeviceGetName")
    machine.reset_faults()
    machine.fail("nvmlDeviceGetName")


def test_machine_files_are_readable_by_all_under_any_umask(make):
    before = os.umask(0o077)
    try:
        machine = make(["a30"])
        with nvml(machine):
            slice_of(gpu(), 0, 0, 4)
    finally:
        os.umask(before)
    for path in machine.directory.rglob("*"):
        mode = path.stat().st_mode
        assert mode & 0o004, path
        assert not path.is_dir() or mode & 0o001, path


def test_a_dump_of_a_full_machine_fits(make):
    machine = make(["h100-80gb"] * 32)
    with nvml(machine):
        for index in range(32):
            for start in range(7):
                slice_of(gpu(index), 19, start, 1)
        assert sum(len(g["instances"]) for g in machine.dump()["gpus"]) == 224
