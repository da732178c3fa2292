"""Answers of a real driver that every driver of the same GPU model is expected to give, with MIG off.

`tests/support/recorded` has one recording per GPU model; tests/driver/test_driver_recorded.py asks the simulated driver
the same. To make another recording, as root on a machine whose first GPU has MIG off:

    python -m tests.support.driver_recording libnvidia-ml.so.1 OUT.json

Only calls that read are made. An answer is what the call gave, or `E` and NVML's return code. What belongs to one
machine or moment (UUID, bus id, counters, temperatures, current clocks) is not recorded.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import pynvml

from tests.support.driver_helpers import ProfileV3

Answer: TypeAlias = "int | str | list[Answer] | dict[str, Answer] | None"

RECORDED = Path(__file__).with_name("recorded")

PROFILE_ENUMS = range(24)
"""NVML_GPU_INSTANCE_PROFILE_*, and some that no release has."""
PROFILE_IDS = (0, 1, 2, 5, 9, 14, 15, 19, 20, 21, 99, 300)
"""Profile ids of these GPUs, one of other GPUs (21), and some that no GPU has."""
CLOCK_TYPES = range(8)
SERVED_CLOCK_TYPES = 4
TEMPERATURE_THRESHOLDS = range(12)
FIELDS = (*range(1, 7), *range(74, 84), 94, 95, *range(142, 146), *range(184, 187), *range(189, 193))
"""ECC, slowdowns, energy, replays, remapped rows, resetless MIG, power; those of NVLink depend on the machine."""
GPM_METRICS = range(1, 13)
GPM_INTERVAL_S = 0.3
MOST_PLACEMENTS = 64

NUMBERS = (
    "nvmlDeviceGetAccountingBufferSize",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetMultiGpuBoard",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetPowerManagementMode",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceIsMigDeviceHandle",
)
"""Functions that give one number."""

PAIRS = (
    "nvmlDeviceGetAutoBoostedClocksEnabled",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetDriverModel_v2",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetGpuOperationMode",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetPowerManagementLimitConstraints",
)
"""Functions that give two numbers."""


class Recording(TypedDict):
    """A driver's release, the GPU's name, and the answer to each question."""

    driver: str
    gpu: str
    answers: dict[str, Answer]


class NotRecordable(Exception):
    """A machine whose answers would not be comparable."""


class Asked:
    """A driver library whose first GPU is asked."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def __enter__(self) -> Asked:
        self._need("nvmlInit_v2")
        self.gpu = ctypes.c_void_p()
        self._need("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.gpu))
        return self

    def __exit__(self, *_: object) -> None:
        self._need("nvmlShutdown")

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function with whole numbers as unsigned; return NVML's return code."""
        function = getattr(self._library, name, None)
        if function is None:
            return int(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return int(function(*(ctypes.c_uint(a) if isinstance(a, int) else a for a in arguments)))

    def filled(self, name: str, *arguments: Any, into: Any, give: Any = None) -> Answer:
        """Call a function of the GPU that writes `into`; return what it wrote, or `give`, or the error."""
        code = self.code(name, self.gpu, *arguments, ctypes.byref(into))
        if code:
            return f"E{code}"
        return plain(into) if give is None else plain(give(into))

    def number(self, name: str, *arguments: Any) -> Answer:
        """Call a function of the GPU that writes one number."""
        return self.filled(name, *arguments, into=ctypes.c_uint())

    def pair(self, name: str) -> Answer:
        """Call a function of the GPU that writes two numbers."""
        first, second = ctypes.c_uint(), ctypes.c_uint()
        code = self.code(name, self.gpu, ctypes.byref(first), ctypes.byref(second))
        return f"E{code}" if code else [first.value, second.value]

    def text(self, name: str, *before: Any) -> str:
        """Call a function that writes text; it must not fail."""
        buffer = ctypes.create_string_buffer(96)
        self._need(name, *before, buffer, len(buffer))
        return buffer.value.decode()

    def _need(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            raise NotRecordable(f"{name}: NVML's return code {code}")


def plain(value: Any) -> Answer:
    """Return what a call wrote as JSON has it."""
    if isinstance(value, ctypes.c_void_p):
        return "handle"
    if isinstance(value, ctypes.Structure):
        return {str(field[0]): plain(getattr(value, field[0])) for field in value._fields_}
    if isinstance(value, ctypes._SimpleCData):
        return plain(value.value)
    if isinstance(value, bytes):
        return value.decode()
    assert value is None or isinstance(value, int | str | list), value
    return value


def versioned(kind: type[Any], version: int) -> Any:
    """Return a struct that says of which version it is, as NVML wants it."""
    struct = kind()
    struct.version = ctypes.sizeof(kind) | version << 24
    return struct


# -- the questions ------------------------------------------------------------------------------------------------


def of_the_model(asked: Asked) -> Iterator[tuple[str, Answer]]:
    """Ask what does not depend on instances."""
    for name in NUMBERS:
        yield name, asked.number(name)
    for name in PAIRS:
        yield name, asked.pair(name)
    memory = asked.filled("nvmlDeviceGetMemoryInfo", into=pynvml.c_nvmlMemory_t(), give=lambda m: int(m.total))
    yield "nvmlDeviceGetMemoryInfo total", memory
    bar1 = asked.filled(
        "nvmlDeviceGetBAR1MemoryInfo", into=pynvml.c_nvmlBAR1Memory_t(), give=lambda m: int(m.bar1Total)
    )
    yield "nvmlDeviceGetBAR1MemoryInfo total", bar1
    for part in ("pciDeviceId", "pciSubSystemId"):
        pci = asked.filled(
            "nvmlDeviceGetPciInfo_v3", into=pynvml.nvmlPciInfo_t(), give=lambda pci, part=part: int(getattr(pci, part))
        )
        yield f"nvmlDeviceGetPciInfo_v3 {part}", pci
    for clock in CLOCK_TYPES:
        yield f"nvmlDeviceGetMaxClockInfo {clock}", asked.number("nvmlDeviceGetMaxClockInfo", clock)
    for clock in CLOCK_TYPES[SERVED_CLOCK_TYPES:]:
        yield f"nvmlDeviceGetClockInfo {clock}", asked.number("nvmlDeviceGetClockInfo", clock)
    for threshold in TEMPERATURE_THRESHOLDS:
        name = "nvmlDeviceGetTemperatureThreshold"
        yield f"{name} {threshold}", asked.number(name, threshold)
    for wanted in FIELDS:
        field = pynvml.c_nvmlFieldValue_t(fieldId=wanted)
        code = asked.code("nvmlDeviceGetFieldValues", asked.gpu, 1, ctypes.byref(field)) or field.nvmlReturn
        yield f"nvmlDeviceGetFieldValues {wanted}", f"E{code}" if code else f"type {field.valueType}"


def of_handles(asked: Asked) -> Iterator[tuple[str, Answer]]:
    """Ask for the GPU under its own and under wrong names, and for what only a MIG device has."""
    own = asked.text("nvmlDeviceGetUUID", asked.gpu)
    names = {
        "its own": own,
        "the beginning of its own": own[:12],
        "MIG- and its own and /1/0": f"MIG-{own}/1/0",
        **{
            unknown: unknown
            for unknown in (
                "GPU-00000000-0000-0000-0000-000000000000",
                "MIG-00000000-0000-5000-8000-000000000000",
                "nonsense",
            )
        },
    }
    found = ctypes.c_void_p()
    for about, name in names.items():
        code = asked.code("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(found))
        yield f"nvmlDeviceGetHandleByUUID {about}", f"E{code}" if code else "handle"
    count = ctypes.c_uint()
    asked.code("nvmlDeviceGetCount_v2", ctypes.byref(count))
    for about, index in (("one too high", count.value), ("99", 99)):
        code = asked.code("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(found))
        yield f"nvmlDeviceGetHandleByIndex_v2 {about}", f"E{code}" if code else "handle"
    parent = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"
    yield parent, asked.filled(parent, into=ctypes.c_void_p())
    attributes = "nvmlDeviceGetAttributes_v2"
    yield attributes, asked.filled(attributes, into=pynvml.c_nvmlDeviceAttributes())
    for number in (0, 1, 7, 50):
        for name in ("nvmlDeviceGetGpuInstanceById", "nvmlDeviceGetMigDeviceHandleByIndex"):
            yield f"{name} {number}", asked.filled(name, number, into=ctypes.c_void_p())


def of_profiles(asked: Asked) -> Iterator[tuple[str, Answer]]:
    """Ask for the description of every profile, and for what there is of each profile id."""
    for enum in PROFILE_ENUMS:
        name = "nvmlDeviceGetGpuInstanceProfileInfo"
        yield f"{name} {enum}", asked.filled(name, enum, into=pynvml.c_nvmlGpuInstanceProfileInfo_t())
        for version, kind in ((2, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t), (3, ProfileV3)):
            yield f"{name}V {enum} v{version}", asked.filled(f"{name}V", enum, into=versioned(kind, version))
    for profile_id in PROFILE_IDS:
        for name in ("nvmlDeviceGetGpuInstancePossiblePlacements", "nvmlDeviceGetGpuInstancePossiblePlacements_v2"):
            yield from _placements(asked, name, profile_id)
        name = "nvmlDeviceGetGpuInstanceRemainingCapacity"
        yield f"{name} {profile_id}", asked.number(name, profile_id)
        name, instances = "nvmlDeviceGetGpuInstances", (ctypes.c_void_p * MOST_PLACEMENTS)()
        yield f"{name} {profile_id}", asked.number(name, profile_id, instances)
        name = "nvmlDeviceGetGpuInstanceProfileInfoByIdV"
        for version, kind in ((2, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t), (3, ProfileV3)):
            code = asked.code(name, asked.gpu, profile_id, ctypes.byref(versioned(kind, version)))
            yield f"{name} {profile_id} v{version}", f"E{code}"


def _placements(asked: Asked, name: str, profile_id: int) -> Iterator[tuple[str, Answer]]:
    """Ask for their number, then for them with the number that came of it, then with room for none."""
    array = (pynvml.c_nvmlGpuInstancePlacement_t * MOST_PLACEMENTS)()
    count = ctypes.c_uint()
    yield f"{name} {profile_id} without array", asked.filled(name, profile_id, None, into=count)
    yield (
        f"{name} {profile_id}",
        asked.filled(
            name,
            profile_id,
            array,
            into=count,
            give=lambda n: [[int(place.start), int(place.size)] for place in array[: n.value]],
        ),
    )
    count = ctypes.c_uint(0)
    code = asked.code(name, asked.gpu, profile_id, array, ctypes.byref(count))
    yield f"{name} {profile_id} with count 0", [code, count.value]


def of_monitoring(asked: Asked) -> Iterator[tuple[str, Answer]]:
    """Ask which GPM metrics there are and how they are called; their values are the moment's."""
    samples = [ctypes.c_void_p(), ctypes.c_void_p()]
    for sample in samples:
        asked.code("nvmlGpmSampleAlloc", ctypes.byref(sample))
    for sample in samples:
        asked.code("nvmlGpmSampleGet", asked.gpu, sample)
        time.sleep(GPM_INTERVAL_S)
    request = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(GPM_METRICS))
    request.sample1, request.sample2 = (ctypes.cast(sample, pynvml.c_nvmlGpmSample_t) for sample in samples)
    for place, metric in enumerate(GPM_METRICS):
        request.metrics[place].metricId = metric
    yield "nvmlGpmMetricsGet", asked.code("nvmlGpmMetricsGet", ctypes.byref(request))
    for place, metric in enumerate(GPM_METRICS):
        got = request.metrics[place]
        info = got.metricInfo
        yield f"nvmlGpmMetricsGet {metric}", [int(got.nvmlReturn), plain(info.shortName), plain(info.unit)]
    yield "nvmlGpmMigSampleGet 0", f"E{asked.code('nvmlGpmMigSampleGet', asked.gpu, 0, samples[0])}"
    for sample in samples:
        asked.code("nvmlGpmSampleFree", sample)


def record(library: str) -> Recording:
    """Ask everything; raises NotRecordable where MIG is on."""
    with Asked(library) as asked:
        if asked.pair("nvmlDeviceGetMigMode") != [0, 0]:
            raise NotRecordable("MIG is on, or will be")
        return Recording(
            driver=asked.text("nvmlSystemGetDriverVersion"),
            gpu=asked.text("nvmlDeviceGetName", asked.gpu),
            answers=dict(
                answer
                for questions in (of_the_model, of_handles, of_profiles, of_monitoring)
                for answer in questions(asked)
            ),
        )


def recorded(model: str) -> Recording:
    """Return the recording of a GPU model by its short name, `h100-80gb`."""
    recording: Recording = json.loads((RECORDED / f"{model}.json").read_text())
    return recording


def written(recording: Recording) -> str:
    """Return a recording as its file has it, one answer a line."""
    lines = [f"    {json.dumps(question)}: {json.dumps(answer)}" for question, answer in recording["answers"].items()]
    head = "".join(f'  "{key}": {json.dumps(recording[key])},\n' for key in ("driver", "gpu"))
    return f'{{\n{head}  "answers": {{\n' + ",\n".join(lines) + "\n  }\n}\n"


def main(arguments: list[str]) -> None:
    """Record the answers of a library in a file."""
    if len(arguments) != 2 or os.geteuid() != 0:
        sys.exit("usage, as root: python -m tests.support.driver_recording LIBRARY OUT.json")
    library, out = arguments
    Path(out).write_text(written(record(library)))


if __name__ == "__main__":
    main(sys.argv[1:])
