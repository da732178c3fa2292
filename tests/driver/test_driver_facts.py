"""The simulated GPUs compared with published facts (gpu_facts.py), with a source for each row."""

from __future__ import annotations

import dataclasses

import pynvml
import pytest

from slurm_migbatch.testbed.simdriver import GPU_MODELS
from tests.support.driver_helpers import gpu, nvml, placements
from tests.support.gpu_facts import FACTS, Facts, Row

ROWS = [pytest.param(model, row, id=f"{model} {row.name}") for model, facts in FACTS.items() for row in facts.rows]


@pytest.fixture(scope="module")
def opened(tmp_path_factory, library):
    """Every model, MIG on."""
    from slurm_migbatch.testbed.simdriver import SimulatedMachine

    machine = SimulatedMachine.create(tmp_path_factory.mktemp("facts") / "m", list(FACTS), library=library)
    with nvml(machine):
        yield {model: gpu(index) for index, model in enumerate(FACTS)}


def test_every_simulated_model_has_facts():
    assert tuple(FACTS) == GPU_MODELS


def test_every_fact_has_a_source_or_states_that_it_has_none():
    every: list[Facts | Row] = [*FACTS.values(), *(row for facts in FACTS.values() for row in facts.rows)]
    for about in every:
        assert about.sources and all(source.strip() for source in about.sources), about.name
        figures = {field.name for field in dataclasses.fields(about)} - {"sources", "unknown", "differs", "rows"}
        assert set(about.unknown) <= figures, about.name


@pytest.mark.parametrize(("model", "row"), ROWS)
def test_profile_matches_the_published_facts(opened, model: str, row: Row):
    info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(opened[model], row.enum)
    assert info.name == f"MIG {row.name}"
    assert f"{info.memorySizeMB / 1024:.2f}" == f"{row.gib:.2f}"
    assert (info.id, info.sliceCount, info.multiprocessorCount) == (row.id, row.slices, row.sms)
    engines = (info.copyEngineCount, info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount)
    assert engines == (row.copy, row.decoders, row.encoders, row.jpegs, row.ofas)
    assert info.instanceCount == row.most
    assert placements(opened[model], row.id) == [(start, row.size) for start in row.starts]


@pytest.mark.parametrize("model", FACTS)
def test_model_has_exactly_the_published_profiles(opened, model):
    found = set()
    for enum in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            found.add(pynvml.nvmlDeviceGetGpuInstanceProfileInfo(opened[model], enum).name.removeprefix("MIG "))
        except pynvml.NVMLError_NotSupported:
            continue
        except pynvml.NVMLError_InvalidArgument:  # nvidia-ml-py may know profiles of newer drivers
            break
    assert found == {row.name for row in FACTS[model].rows}


@pytest.mark.parametrize("model", FACTS)
def test_model_matches_the_published_facts(opened, model):
    facts: Facts = FACTS[model]
    handle = opened[model]
    cores_per_sm = 64 if model in ("a30", "a100-40gb", "a100-80gb") else 128
    assert pynvml.nvmlDeviceGetName(handle) == facts.name
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).total == facts.memory_mib << 20
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == facts.compute_capability
    assert pynvml.nvmlDeviceGetPciInfo(handle).pciDeviceId == facts.pci_device_id << 16 | 0x10DE
    assert pynvml.nvmlDeviceGetNumGpuCores(handle) == facts.sms * cores_per_sm
    assert max(row.sms for row in facts.rows) == facts.mig_sms
