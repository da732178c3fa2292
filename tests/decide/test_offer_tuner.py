"""The profiles that free space is offered as, by the record and the queue, inside migbatchd."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.offer_tuner import HISTORY_S, USUAL_S, OfferTuner, classes_of
from slurm_migbatch.daemon.plans import NodePlans
from slurm_migbatch.daemon.poll import SlurmView
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.paris_elsa.preference import HORIZON_S, Class
from slurm_migbatch.decide.snapshot import ClusterSnapshot
from slurm_migbatch.decide.supply.stage import SupplyMemory, SupplySettings, plan_supply
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.work import PastRuns
from tests.support.dispatch_site import H100, NOW, P, job


def test_classes_scale_history_to_the_horizon_and_count_the_queue_as_it_is() -> None:
    past = [
        PastRuns("b", "1g.10gb", 1, 300, 20.0),
        PastRuns("", "2g.20gb:2", 2, 10, 40.0),
        PastRuns("", "1g.10gb,2g.20gb", 2, 9, 9),
    ]
    rows = [job(1, "1g.10gb", each=2), job(2, "3g.40gb"), job(3, "1g.10gb", reason="Dependency")]
    rows.append(job(4, "1g.10gb", comment="[mig:1g.10gb:1#loan1]"))
    usual = HORIZON_S / HISTORY_S
    assert classes_of(past, rows, NOW) == [
        Class(300 * usual, 20.0, P("1g.10gb")), Class(20 * usual, 40.0, P("2g.20gb")),
        Class(2.0, 20.0, P("1g.10gb")), Class(1.0, USUAL_S, P("3g.40gb")),
    ]  # fmt: skip


def tuner_parts(url: str, *waiting: JobRow) -> tuple[OfferTuner, Observer, StoreWriter]:
    facts = {"h1": NodeFacts((GpuFacts("GPU-1", H100), GpuFacts("GPU-2", H100)))}
    observer = Observer(SimpleNamespace(facts=lambda: facts), NodePlans(), lambda row: 0)
    writer = StoreWriter(lambda: open_store(url), 100)
    writer.start()
    snapshot = SlurmView(0.0, tuple(waiting), ())
    return OfferTuner(observer, writer, lambda: snapshot, clock=lambda: NOW), observer, writer


def test_tuned_preference_is_part_of_the_next_snapshots(tmp_path: Path) -> None:
    tuner, observer, writer = tuner_parts(
        f"sqlite:///{tmp_path}/db", job(1, "3g.40gb", array_job=1, array_task="1-20", tasks=20)
    )
    try:
        assert asyncio.run(tuner.tune()) == (P("3g.40gb"),)
        assert observer.snapshot(NOW, (), (), True).preference == (P("3g.40gb"),)
    finally:
        writer.stop(30)


def test_preference_is_unchanged_when_too_few_jobs_are_known(tmp_path: Path) -> None:
    tuner, observer, writer = tuner_parts(f"sqlite:///{tmp_path}/db", *(job(n, "3g.40gb") for n in range(19)))
    try:
        observer.preference = (P("1g.10gb"),)
        assert asyncio.run(tuner.tune()) == () and observer.preference == (P("1g.10gb"),)
    finally:
        writer.stop(30)


def test_configured_preference_overrides_the_tuned_one() -> None:
    settings = SupplySettings(preference=(P("7g.80gb"),))
    gpus = NodeFacts((GpuFacts("GPU-1", H100),))
    row = NodeRow("h1", frozenset({"IDLE"}), gres={"none": 14}, partitions=("gpu",))
    snapshot = ClusterSnapshot(NOW, (), (row,), {"h1": gpus}, preference=(P("1g.10gb"),))
    decided = plan_supply(snapshot, SupplyMemory(), settings)
    assert decided.plan.offers() == {P("7g.80gb"): 1}
