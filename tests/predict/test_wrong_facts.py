"""Model facts that are wrong by any factor: within a few jobs, the reports of runs lead to the right slice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slurm_migbatch.predict.facts import BUILT_IN, ModelFacts
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.runs import observations_of, rows_of, select_learnable
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.training import learn
from slurm_migbatch.workload.hints import parse
from tests.support.gpu_kinds import H100, SITE, P

SILENT = {"items_hint": None, "items": None, "throughput_per_s": None, "latency_p99_s": None, "memory_mib": None}


def truth_ms(profile: str, host_ms: float, full_ms: float) -> float:
    """Milliseconds per batch: the host's part plus the device's part, scaled by the profile's share of the SMs."""
    return host_ms + full_ms * 132 / H100.geometry.info(P(profile)).sm_count


def choices(facts: ModelFacts, slo_ms: int, host_ms: float, full_ms: float, jobs: int = 5) -> list[tuple[str, float]]:
    """For successive jobs, each learned from before the next: the chosen profile and measured over predicted time."""
    known = [*BUILT_IN, facts]
    knowledge, partition = ModelKnowledge(known), SITE.partitions["gpu"]
    runs: list[SimpleNamespace] = []
    learned, found = None, []
    for number in range(1, jobs + 1):
        chooser = Chooser(LearnedPredictor(learned, known))
        choice = chooser.choose(parse(f"migbatch: model={facts.name} batch=32 slo={slo_ms}ms"), partition)
        profile = choice.offer.profile.name
        figures = next(c.figures for c in choice.candidates if c.profile.name == profile)
        took = truth_ms(profile, host_ms, full_ms) / 1e3
        found.append((profile, took / figures.latency_s.mid))
        fields = {"model": facts.name, "role": "infer", "batch": 32, "input": None, "unit": "", "profile": profile}
        place = {"gpu": H100.geometry.name, "slices": 1, "elapsed_s": 60.0, "state": "COMPLETED", "user": "ann"}
        runs.append(SimpleNamespace(number=number, run=number, latency_s=took, **fields, **place, **SILENT))
        selected = select_learnable(observations_of(runs, {H100.geometry.name: H100.geometry}, knowledge), knowledge)
        learned = learn(rows_of(selected.used), knowledge)
    return found


def net(gflops: float, kernels: int = 170, activation_mib: float = 40.0) -> ModelFacts:
    return ModelFacts("net", "encoder", 110, gflops, "tok", 128, kernels, activation_mib)


@pytest.mark.parametrize(
    ("facts", "slo_ms", "right"),
    [
        (net(440.0), 80, {"1g.10gb", "1g.20gb", "2g.20gb"}),
        (net(1.1), 40, {"1g.20gb", "2g.20gb"}),
        (net(1.1, activation_mib=2.0), 40, {"1g.20gb", "2g.20gb"}),
        (net(1.1, kernels=9, activation_mib=2.0), 40, {"1g.20gb", "2g.20gb"}),
    ],
    ids=["20 times too much", "too little", "too little of everything on the device", "too little of everything"],
)
def test_wrong_model_facts_are_corrected_by_runs_to_the_right_slice(
    facts: ModelFacts, slo_ms: int, right: set[str]
) -> None:
    found = choices(facts, slo_ms, host_ms=3.0, full_ms=6.0)
    assert found[-1][0] in right, found
    assert 0.8 < found[-1][1] < 1.25, found


@pytest.mark.parametrize("facts", [net(22.0), net(1.1, activation_mib=2.0)])
def test_host_bound_model_returns_to_small_slices(facts: ModelFacts) -> None:
    """Code that takes 60 ms per batch on any slice: a larger slice is tried, then the small ones are chosen again."""
    found = choices(facts, 40, host_ms=60.0, full_ms=1.0)
    assert found[-1][0] in {"1g.10gb", "1g.20gb"}, found
    assert 0.8 < found[-1][1] < 1.25, found
