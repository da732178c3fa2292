"""Names of GPUs, and the facts found by each name."""

from __future__ import annotations

import pytest

from slurm_migbatch.predict.cells import GpuSpec, shares_of
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.gpufacts import ALIKE, facts_of, memory_gb_of, model_of, short_name

NAMES = {
    "NVIDIA A30": "a30-24gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA A800 80GB PCIe": "a800-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H800": "h800-80gb",
    "NVIDIA H20": "h20-96gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA H200 NVL": "h200-nvl-141gb",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA GH200 144G HBM3e": "gh200-144gb",
    "NVIDIA B200": "b200-180gb",
    "NVIDIA GB200": "gb200-186gb",
    "NVIDIA GB300": "gb300-278gb",
    "NVIDIA H20-3e": "h20-141gb",
    "NVIDIA B300 SXM6 AC": "b300-269gb",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-96gb",
    "NVIDIA RTX PRO 5000 Blackwell": "rtx-pro-5000-48gb",
    "NVIDIA RTX PRO 5000 72GB Blackwell": "rtx-pro-5000-72gb",
    "NVIDIA RTX PRO 4500 Blackwell": "rtx-pro-4500-32gb",
    "NVIDIA RTX PRO 4500 Blackwell Server Edition": "rtx-pro-4500-32gb",
    "Graphics Device": "graphics-device-5gb",
}
"""NVML's names, and the short ones."""


@pytest.mark.parametrize("name", NAMES)
def test_short_gpu_name_has_the_facts_of_the_full_name(name: str) -> None:
    short = short_name(name, int(NAMES[name].rpartition("-")[2][:-2]))
    assert short == NAMES[name]
    for other in (short, short.replace("-", "_"), name.replace(" ", "_")):
        full, found = facts_of(name), facts_of(other)
        assert (full is None) == (found is None), other
        if full is not None and found is not None:
            assert found[2:] == full[2:]
            assert found[:2] == pytest.approx(full[:2], rel=1 - ALIKE), other
    assert model_of(short) == model_of(name) == short.rpartition("-")[0]


@pytest.mark.parametrize("name", NAMES)
def test_whole_gpu_is_the_same_with_and_without_memory_in_its_name(name: str) -> None:
    gpu = GpuSpec.of_rows([Measurement(gpu=name, model="net", latency_s=1.0)])
    facts = facts_of(name)
    if facts is not None and facts.mib:
        assert gpu.name == NAMES[name] == short_name(name, memory_gb_of(name))
    else:
        assert gpu.memory_gb == 0


def test_gpu_memory_is_derived_from_a_slice_profile() -> None:
    for name, profile, short in (
        ("NVIDIA H200", "1g.18gb", "h200-141gb"),
        ("NVIDIA A30", "1g.6gb", "a30-24gb"),
        ("a100", "7g.40gb", "a100-40gb"),
        ("NVIDIA A100-SXM-64GB", "3g.32gb", "a100-64gb"),
        ("h100-nvl-94gb", "1g.12gb", "h100-nvl-94gb"),
    ):
        assert GpuSpec.of_rows([Measurement(gpu=name, model="net", profile=profile, latency_s=1.0)]).name == short


@pytest.mark.parametrize("name", ["NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-96gb"])
def test_server_edition_reads_its_memory_more_slowly_than_the_workstation_s_card(name: str) -> None:
    facts = facts_of(name)
    assert facts is not None and facts[:2] == (480, 1597)


def test_variants_of_a_gpu_with_other_speeds_are_separate_models() -> None:
    assert len({model_of(f"NVIDIA H100 {form}") for form in ("80GB HBM3", "PCIe", "NVL")}) == 3
    assert model_of("NVIDIA H200") != model_of("NVIDIA H200 NVL")


@pytest.mark.parametrize("name", ["RTX 6000 Pro", "rtx6000pro", "RTX PRO6000 96GB", "NVIDIA RTX-6000-Pro Blackwell"])
def test_names_of_an_rtx_pro_in_another_order_are_known(name: str) -> None:
    assert model_of(name) == "rtx-pro-6000" and memory_gb_of(name) == 96


def test_a_variant_with_less_memory_has_less_bandwidth() -> None:
    """Leonardo's A100 with 64 GB reads 1640 GB/s, not the 2039 of the one with 80."""
    whole, less = facts_of("NVIDIA A100-SXM4-80GB"), facts_of("NVIDIA A100-SXM-64GB")
    assert whole is not None and less is not None
    assert less.bandwidth_gbs == pytest.approx(1640, rel=0.01) and less.tflops == whole.tflops
    assert less.mib == 65536 and facts_of("a100-64gb") == less
    for alike in (
        "NVIDIA A100 MIG 1g.10gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H20 96GB",
        "NVIDIA H100 96GB",
    ):
        plain = facts_of(alike.replace(" MIG 1g.10gb", "").replace(" MIG 3g.40gb", "").replace(" 96GB", ""))
        assert facts_of(alike) == plain, alike


def test_gpu_facts_depend_on_variant_and_memory() -> None:
    speeds = {
        "NVIDIA A100-SXM4-40GB": (312, 1555),
        "NVIDIA A100 80GB PCIe": (312, 1935),
        "NVIDIA H100 PCIe": (756, 2039),
        "h100_nvl": (835, 3938),
        "NVIDIA GH200 144G HBM3e": (990, 4900),
        # an eighth of the "AI TOPS" (FP4 with sparsity) of their data sheets
        "NVIDIA RTX PRO 5000 Blackwell": (258, 1344),
        "NVIDIA RTX PRO 5000 72GB Blackwell": (258, 1344),
        "NVIDIA RTX PRO 4500 Blackwell": (211, 800),
    }
    for name, speed in speeds.items():
        found = facts_of(name)
        assert found is not None and found[:2] == speed, name
    assert facts_of("Graphics Device") is None


@pytest.mark.parametrize(
    ("gpu", "half", "whole"),
    [("NVIDIA RTX PRO 5000 Blackwell", "1g.24gb", "2g.48gb"), ("NVIDIA RTX PRO 4500 Blackwell", "1g.16gb", "2g.32gb")],
)
@pytest.mark.parametrize("slices", [None, 2, 6])
def test_slices_of_a_gpu_that_is_only_halved_are_halves(gpu: str, half: str, whole: str, slices: int | None) -> None:
    """MIG user guide, "Supported GPUs": at most two instances. Its placements are not published."""
    parts = {half: 1, whole: 2}
    rows = [
        Measurement(gpu, "net", profile=profile, memory_slices=slices and slices * part // 2, latency_s=1.0)
        for profile, part in parts.items()
    ]
    spec = GpuSpec.of_rows(rows)
    assert spec.memory_gb == int(whole[3:-2])
    assert [shares_of(row, spec) for row in rows] == [(0.5, 0.5), (1.0, 1.0)]


def test_former_name_of_the_h100_nvl_is_read_as_the_h100_nvl() -> None:
    gpu = GpuSpec.of_rows([Measurement(gpu="h100-94gb", model="net", profile="1g.12gb", latency_s=1.0)])
    assert gpu.name == "h100-nvl-94gb"
    assert facts_of("h100-94gb") == facts_of("NVIDIA H100 NVL")


@pytest.mark.parametrize(
    ("written", "usual"),
    [
        ("A100 40 GB", "A100-40GB"),
        ("A100-SXM4-40G", "A100-SXM4-40GB"),
        ("A100-40", "A100-40GB"),
        ("A100 80 G PCIe", "A100 80GB PCIe"),
        ("H100 94 GB", "H100 NVL"),
        ("H20 141 GB", "H20 141GB"),
        ("GH200 144 GB", "GH200 144GB"),
    ],
)
def test_memory_in_a_name_is_read_however_it_is_written(written: str, usual: str) -> None:
    """Points of an A100 40G on the whole GPU counted as those of one with 80 GB, which is faster."""
    one, other = (GpuSpec.of_rows([Measurement(gpu=name, model="net", latency_s=1.0)]) for name in (written, usual))
    assert one == other
