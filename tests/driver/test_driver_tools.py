"""Unmodified third-party programs run against the simulated library: they must show what is simulated.

They are development dependencies and run as separate programs, so that what they import and patch (nvitop and gpustat
replace functions of pynvml) does not affect the tests. The loader reports every symbol that one of them looked up and
did not find.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from slurm_migbatch.testbed.simdriver import SimulatedMachine
from tests.support.driver_helpers import gpu, nvml, slice_of

PROGRAMS = Path(sys.executable).parent
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"


@dataclass
class Scene:
    """An H100 and an A100 with a process each; with MIG it is on a slice of half the GPU's memory."""

    machine: SimulatedMachine
    mig: bool
    pids: tuple[int, int]
    uuids: tuple[str, str]  # of the GPUs
    slices: tuple[str, ...]  # UUIDs of the MIG devices

    memory = (3000, 5001)  # MiB

    def run(self, *command: str) -> str:
        """Run a program that finds the simulated library like any other library; return what it printed."""
        for old in self.machine.directory.glob("loader.*"):
            old.unlink()
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "LD_LIBRARY_PATH": str(self.machine.directory),
            "LD_DEBUG": "symbols",
            "LD_DEBUG_OUTPUT": str(self.machine.directory / "loader"),
            "LC_ALL": "C.UTF-8",
            "TERM": "xterm",
            "COLUMNS": "160",
            "LINES": "80",
        }
        program, *arguments = command
        done = subprocess.run(
            [str(PROGRAMS / program), *arguments], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        looked_up = "".join(path.read_text("utf-8", "replace") for path in self.machine.directory.glob("loader.*"))
        assert f"file={self.machine.library}" in looked_up.replace(" ", ""), "it loaded another library"
        assert set(re.findall(r"undefined symbol: (nvml\w+)", looked_up)) == set()
        return done.stdout


@pytest.fixture(params=[True, False], ids=["mig", "whole"])
def scene(request, make) -> Iterator[Scene]:
    mig: bool = request.param
    machine = make(["h100-80gb", "a100-40gb"], mig=mig)
    holders = [subprocess.Popen(["sleep", "3600"]) for _ in range(2)]
    try:
        with nvml(machine):
            uuids = tuple(pynvml.nvmlDeviceGetUUID(gpu(index)) for index in range(2))
            slices = tuple(slice_of(gpu(index), 9, 4, 4)[2] for index in range(2)) if mig else ()
        pids = (holders[0].pid, holders[1].pid)
        for uuid, pid, memory in zip(slices or uuids, pids, Scene.memory, strict=True):
            machine.start_process(uuid, pid, memory_mib=memory)
        machine.set_load((slices or uuids)[0], graphics=77, sm=51, dram=33, pcie_tx=100, nvlink_tx=640)
        yield Scene(machine, mig, pids, (uuids[0], uuids[1]), slices)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def rows(text: str, *words: str) -> list[str]:
    """The lines that contain all the words."""
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_gpustat_json_shows_the_simulated_gpus(scene):
    found = json.loads(scene.run("gpustat", "--json"))
    assert found["driver_version"] == "580.95.05"
    assert [g["name"] for g in found["gpus"]] == [H100, A100]
    assert [g["uuid"] for g in found["gpus"]] == list(scene.uuids)
    assert [g["memory.used"] for g in found["gpus"]] == list(scene.memory)
    assert [g["memory.total"] for g in found["gpus"]] == [81559, 40960]
    # a partitioned GPU reports no utilisation
    assert [g["utilization.gpu"] for g in found["gpus"]] == ([None, None] if scene.mig else [77, 0])
    assert [g["temperature.gpu"] for g in found["gpus"]] == [34, 34]
    processes = [[(p["pid"], p["command"], p["gpu_memory_usage"]) for p in g["processes"]] for g in found["gpus"]]
    assert processes == [[(pid, "sleep", memory)] for pid, memory in zip(scene.pids, scene.memory, strict=True)]


def test_gpustat_text_shows_the_simulated_gpus(scene):
    out = scene.run("gpustat", "--no-color", "-cup")
    for name, pid, memory, total in zip((H100, A100), scene.pids, scene.memory, (81559, 40960), strict=True):
        (row,) = rows(out, name)
        assert re.search(rf"\b{memory} / {total} MB\b", row)
        assert f"sleep/{pid}({memory}M)" in row
    assert ("77 %" in rows(out, H100)[0]) == (not scene.mig)


def test_nvitop_shows_gpus_slices_and_processes(scene):
    out = scene.run("nvitop", "-1")
    assert rows(out, "Driver Version: 580.95.05", "CUDA Driver Version: 13.0")
    for index, (name, bus) in enumerate(
        [("H100 80GB HBM3", "00000000:07:00.0"), ("A100-SXM4-40GB", "00000000:0F:00.0")]
    ):
        (row,) = rows(out, f" {index}  {name}", bus)
        assert ("Enabled" if scene.mig else "Disabled") in row
    assert bool(rows(out, "3000MiB / 79.65GiB", "77%")) == (not scene.mig)
    assert len(rows(out, "3000MiB / 79.65GiB")) == 1
    assert len(rows(out, "5001MiB / 40.00GiB")) == 1
    slices = [rows(out, "0:0", "3g.40gb @ GI/CI: 2/0", "3000MiB / 39.50GiB")]
    slices += [rows(out, "1:0", "3g.20gb @ GI/CI: 2/0", "5001MiB / 19968MiB")]
    assert [len(found) for found in slices] == [scene.mig, scene.mig]
    for index, (pid, memory) in enumerate(zip(scene.pids, scene.memory, strict=True)):
        device = f"{index}:0" if scene.mig else f" {index} "
        (row,) = rows(out, f" {pid} ", f"{memory}MiB", "sleep 3600")
        assert device in row
    if not scene.mig:  # %SM and %GMBW of the process
        assert re.search(r"3000MiB\s+51\s+33\b", rows(out, f" {scene.pids[0]} ")[0])


NVITOP_API = """
import json
from nvitop import Device
found = []
for gpu in Device.all():
    for device in [gpu, *gpu.mig_devices()]:
        found.append({
            "name": device.name(), "uuid": device.uuid(), "mig": device.is_mig_device(),
            "used": device.memory_used() >> 20, "total": device.memory_total() >> 20,
            "bar1": device.bar1_memory_total(), "pids": list(device.processes()),
            "util": str(device.gpu_utilization()), "tx": str(device.pcie_tx_throughput()),
            "links": gpu.nvlink_link_count(), "sent": str(device.nvlink_total_tx_throughput(interval=0.05)),
            "ecc": str(device.total_volatile_uncorrected_ecc_errors()), "model": str(device.current_driver_model()),
        })
print(json.dumps(found))
"""


def test_nvitop_api_returns_gpus_slices_and_processes(scene):
    found = {about["uuid"]: about for about in json.loads(scene.run("python", "-c", NVITOP_API))}
    assert set(found) == {*scene.uuids, *scene.slices}
    h100, a100 = (found[uuid] for uuid in scene.uuids)
    assert (h100["name"], h100["used"], h100["total"], h100["pids"]) == (H100, 3000, 81559, [scene.pids[0]])
    assert (a100["name"], a100["used"], a100["total"], a100["pids"]) == (A100, 5001, 40960, [scene.pids[1]])
    assert {about["model"] for about in found.values()} == {"N/A"}  # there are driver models on Windows only
    assert h100["tx"] == str(100 * 1024)
    if scene.mig:
        assert (h100["util"], h100["links"], h100["ecc"]) == ("N/A", 0, "N/A")
        h100_slice, a100_slice = (found[uuid] for uuid in scene.slices)
        assert h100_slice["name"] == f"{H100} MIG 3g.40gb" and a100_slice["name"] == f"{A100} MIG 3g.20gb"
        assert (h100_slice["used"], h100_slice["total"], h100_slice["pids"]) == (3000, 40448, [scene.pids[0]])
        assert (a100_slice["used"], a100_slice["total"], a100_slice["pids"]) == (5001, 19968, [scene.pids[1]])
        assert (h100_slice["util"], h100_slice["tx"], h100_slice["ecc"]) == ("N/A", "N/A", "0")
        assert h100_slice["bar1"] * 2 == h100["bar1"]
    else:
        assert (h100["util"], h100["links"], h100["ecc"]) == ("77", 18, "0")
        assert (a100["util"], a100["links"]) == ("0", 12)
        assert float(h100["sent"]) > 0 and float(a100["sent"]) == 0


def test_nvisel_selects_devices_with_enough_free_memory(scene):
    out = scene.run("nvisel", "--min-free-memory", "34GiB", "--sep", " ")
    # the A100's slice and, as a process takes 5 GiB, the A100 itself have less
    chosen = out.split()
    assert chosen == ([scene.slices[0]] if scene.mig else ["0", "1"])


@pytest.mark.parametrize("arguments", [[], ["--full"]])
def test_py3smi_shows_gpus_and_processes(scene, arguments):
    out = scene.run("py3smi", *arguments)
    assert rows(out, "Driver Version: 580.95.05")
    # NVML's older figure of memory in use has the reserved part in it, 407 and 768 MiB
    (first,) = rows(out, "3407MiB / 81559MiB")
    (second,) = rows(out, "5769MiB / 40960MiB")
    assert ("77%" in first) == (not scene.mig)
    for row, watt, limit in ((first, 105, 700), (second, 60, 400)):
        assert re.search(rf"{watt}W /\s*{limit}W", row) and "34C" in row
    if arguments:
        (named,) = rows(out, H100, "0000:07:00.0")
        assert ("N/A" in named) == scene.mig  # volatile ECC errors
    for index, (pid, memory) in enumerate(zip(scene.pids, scene.memory, strict=True)):
        (row,) = rows(out, f" {pid} ", "sleep 3600", f"{memory}MiB")
        assert row.split()[1] == str(index)


def test_py3nvml_finds_free_gpus(scene):
    out = scene.run("python", "-c", "import py3nvml; print(py3nvml.get_free_gpus(), py3nvml.get_num_procs())")
    assert out.split("\n")[0] == "[False, False] [1, 1]"
    scene.machine.end_process(scene.pids[1])
    out = scene.run("python", "-c", "import py3nvml; print(py3nvml.get_free_gpus(), py3nvml.get_num_procs())")
    assert out.split("\n")[0] == "[False, True] [1, 0]"


def test_nvidia_ml_py_example_prints_the_simulated_gpus(scene):
    """The example shipped with nvidia-ml-py, a part of `nvidia-smi -q -x`."""
    out = scene.run("python", "-m", "example")
    assert "<driver_version>580.95.05</driver_version>" in out
    assert "<attached_gpus>2</attached_gpus>" in out
    assert re.findall(r'<gpu id="(.*)">', out) == ["00000000:07:00.0", "00000000:0F:00.0"]
    assert re.findall("<product_name>(.*)</product_name>", out) == [H100, A100]
    assert re.findall("<uuid>(.*)</uuid>", out) == list(scene.uuids)
    assert re.findall("<serial>(.*)</serial>", out) == [
        str(serial) for serial in re.findall(r"<serial>(\d{13})</serial>", out)
    ]
    assert re.findall("<virtualization_mode>(.*)</virtualization_mode>", out) == ["None", "None"]


def test_unserved_symbol_is_detected(scene):
    with pytest.raises(AssertionError, match="nvmlDeviceGetNoSuchThing"):
        scene.run(
            "python",
            "-c",
            "import contextlib, pynvml\n"
            "pynvml.nvmlInit()\n"
            "with contextlib.suppress(pynvml.NVMLError):\n"
            "    pynvml._nvmlGetFunctionPointer('nvmlDeviceGetNoSuchThing')",
        )
