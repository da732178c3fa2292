"""What supply caches between rounds saves work and changes no decision."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.queue import JobQueue
from slurm_migbatch.decide.recording.memory import REMEMBERED
from slurm_migbatch.decide.supply.stage import SupplyMemory, SupplySettings, plan_supply
from slurm_migbatch.mig.profile import Profile
from tests.support.changing_site import ChangingSite
from tests.support.examples import examples

SETTINGS = SupplySettings(stuck_s=30.0, avoid_s=100.0, lending=frozenset({"train"}))


def _afresh(memory: SupplyMemory) -> SupplyMemory:
    """The same memory without the caches, which only save work."""
    return SupplyMemory(
        memory.reservations,
        dict(memory.standing),
        copy.deepcopy(memory.avoided),
        set(memory.sent_back),
        dict(memory.hurried),
        dict(memory.pairs),
        memory.preference,
        unexplained=memory.unexplained,
        watched=memory.watched,
    )


def _remembered(memory: SupplyMemory) -> dict[str, object]:
    return {name: getattr(memory, name) for name in REMEMBERED[SupplyMemory]}


@settings(max_examples=examples(300), deadline=None)
@given(rng=st.randoms(use_true_random=True), rounds=st.integers(2, 8))
def test_round_with_caches_decides_like_a_round_without(rng: random.Random, rounds: int) -> None:
    site, memory = ChangingSite(rng), SupplyMemory()
    for _ in range(rounds):
        snapshot = site.snapshot()
        if rng.random() < 0.1:
            snapshot = replace(snapshot, preference=(Profile.parse("1g.20gb"),))
        if rng.random() < 0.1:
            memory.pairs = {row.job_id: 101 for row in snapshot.jobs[:1]}
        fresh = _afresh(memory)
        wanted = plan_supply(snapshot, fresh, SETTINGS)
        found = plan_supply(snapshot, memory, SETTINGS)
        assert found == wanted
        assert list(found.plan.nodes) == list(wanted.plan.nodes)
        assert _remembered(memory) == _remembered(fresh)
        site.step(found)


def test_round_after_a_failed_one_misses_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    site, memory = ChangingSite(random.Random(7), jobs=30), SupplyMemory()
    plan_supply(site.snapshot(), memory, SETTINGS)
    for broken in ("_add", "_drop"):
        for _ in range(3):
            site.step(plan_supply(site.snapshot(), memory, SETTINGS))
        site.queue = list({row.job_id: row for row in site.queue}.values())  # of jobs with two rows nothing is kept
        assert any(row.active for row in site.queue)
        plan_supply(site.snapshot(), memory, SETTINGS)
        site.queue = [replace(row, priority=row.priority + 1) for row in site.queue]
        with monkeypatch.context() as context:
            context.setattr(JobQueue, broken, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                plan_supply(site.snapshot(), memory, SETTINGS)
        snapshot = site.snapshot()
        fresh = _afresh(memory)
        assert plan_supply(snapshot, memory, SETTINGS) == plan_supply(snapshot, fresh, SETTINGS)
