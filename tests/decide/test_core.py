"""One decision: its stages run in order, and a failing stage does not stop the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.core import DecisionMemory, Outcomes, Settings, decide, needed, settle
from slurm_migbatch.decide.dispatch.stage import DispatchSettings
from slurm_migbatch.decide.lending.stage import LendingSettings
from slurm_migbatch.decide.snapshot import Answers, ClusterSnapshot, LendingPast, Report
from slurm_migbatch.decide.supply.stage import SupplySettings
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.dispatch_site import H100, P, candidates, job

NOW = 1_000_000.0
SETTINGS = Settings(
    SupplySettings(lending=frozenset({"train"})), DispatchSettings(), LendingSettings(partitions=("train",))
)
TRAINING = JobRow(
    70, partition="train", gres="gres/mig:loan:1", comment="migbatch: role=train [mig:loan:1#loan0001]",
    reason="ReqNodeNotAvail", user="alice", uid=1001,
)  # fmt: skip


def cluster(*jobs: JobRow, **fields: object) -> ClusterSnapshot:
    """Two H100s without runs, and a record that has been loaded."""
    gpus = NodeFacts((GpuFacts("GPU-1", H100), GpuFacts("GPU-2", H100)))
    row = NodeRow("h1", frozenset({"IDLE"}), gres={"none": 28}, partitions=("mig", "train"), cpus=64)
    found = ClusterSnapshot(NOW, jobs, (row,), {"h1": gpus}, past=LendingPast())
    return replace(found, **fields)  # type: ignore[arg-type]


def inference(number: int, profile: str) -> JobRow:
    return JobRow(number, partition="mig", gres=f"gres/mig:{profile}:1", reason="Resources", user="bob", uid=1002)


def test_the_same_snapshot_and_memory_give_the_same_decision() -> None:
    first, second = (
        decide(cluster(inference(1, "3g.40gb"), TRAINING), DecisionMemory(SETTINGS), SETTINGS) for _ in range(2)
    )
    assert first.supply is not None and second.supply is not None
    assert first.supply.offers == second.supply.offers and first.dispatch == second.dispatch
    assert first.lending == second.lending and not first.failed


def test_exception_in_one_stage_does_not_stop_the_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of lending")

    monkeypatch.setattr("slurm_migbatch.decide.core.plan_lending", broken)
    found = decide(cluster(inference(1, "7g.80gb")), DecisionMemory(SETTINGS), SETTINGS)
    assert found.supply is not None and found.supply.plan.offers()[P("7g.80gb")] == 1
    assert found.dispatch is not None and found.lending is None
    assert [str(error) for error in found.failed.values()] == ["a fault of lending"]


def test_nothing_is_lent_before_the_record_has_been_loaded() -> None:
    memory = DecisionMemory(SETTINGS)
    found = decide(cluster(TRAINING, past=None), memory, SETTINGS)
    assert found.lending is not None and not found.lending.orders and not memory.lending.loaded
    found = decide(cluster(TRAINING), memory, SETTINGS)
    assert memory.lending.loaded and found.lending is not None


def test_lending_skips_a_round_with_retypes_but_keeps_checkpoint_reports() -> None:
    memory = DecisionMemory(SETTINGS)
    waiting = job(1, "1g.6gb")  # which no H100 has
    listed = [
        {"profile": c.profile.name, "capacity_mib": c.memory_mib, "ok": c.ok, "throughput_per_s_range": [c.rate, 9e9]}
        for c in candidates()
    ]
    hints = {"items": 600, "deadline_s": 120}
    answer = {"chosen": "mig:1g.6gb:1", "facts": {"reason": "fits"}, "hints": hints, "candidates": listed}
    busy = cluster(waiting, TRAINING)
    first = decide(busy, memory, SETTINGS)
    assert first.questions.decisions == ("abc12345",) and first.lending is not None
    reports = (((70, 0), Report(checkpoint=NOW)),)
    again = replace(busy, now=NOW + 1, answers=Answers(decisions={"abc12345": answer}), reports=reports, past=None)
    second = decide(again, memory, SETTINGS)
    assert second.dispatch is not None and [change.after for change in second.dispatch.retypes] == [P("1g.10gb")]
    assert second.lending is None and memory.lending.elastic_jobs.reports == {(70, 0): Report(checkpoint=NOW)}


def test_offer_for_empty_gpus_follows_the_preference_of_the_snapshot() -> None:
    memory = DecisionMemory(SETTINGS)
    first = decide(cluster(preference=(P("7g.80gb"),)), memory, SETTINGS)
    assert first.supply is not None and first.supply.plan.offers() == {P("7g.80gb"): 2}
    second = decide(cluster(preference=(P("1g.10gb"),), past=None), memory, SETTINGS)
    assert second.supply is not None and second.supply.plan.offers() == {P("1g.10gb"): 14}


def test_job_requeued_by_a_node_is_started_once_slurm_shows_it_pending() -> None:
    memory, late = DecisionMemory(SETTINGS), inference(5, "1g.10gb")
    for state, expected in (("RUNNING", []), ("PENDING", [5]), ("PENDING", [])):
        row = replace(late, state=state, reason="BeginTime", nodes=("h1",) if state == "RUNNING" else ())
        found = decide(cluster(row, sent_back=((5, 0),) if state == "RUNNING" else ()), memory, SETTINGS)
        assert found.supply is not None and list(found.supply.start_now) == expected


@pytest.mark.parametrize(
    ("gres", "nodes", "het_job", "hurried"),
    [
        ("gres:", 1, None, [5]),
        ("gres:", 2, None, []),
        ("gres:", 1, 5, []),
        ("gres/", 2, None, [5]),
        ("gres/", 1, 5, [5]),
    ],
)
def test_job_of_several_nodes_waits_where_a_node_may_skip_its_prolog(
    gres: str, nodes: int, het_job: int | None, hurried: list[int]
) -> None:
    memory = DecisionMemory(SETTINGS)
    row = replace(inference(5, "1g.10gb"), gres=f"{gres}mig:1g.10gb:1", num_nodes=nodes, het_job=het_job)
    decide(cluster(replace(row, state="RUNNING", nodes=("h1",)), sent_back=((5, 0),)), memory, SETTINGS)
    found = decide(cluster(replace(row, reason="BeginTime")), memory, SETTINGS)
    assert found.supply is not None and list(found.supply.start_now) == hurried


def test_repeatedly_requeued_job_waits_for_the_delay() -> None:
    memory, late = DecisionMemory(SETTINGS), inference(5, "1g.10gb")
    hurried = []
    for seconds in (0, 10, 20, 30, 40, 605, 611):
        now = NOW + seconds
        for state in ("RUNNING", "PENDING"):
            row = replace(late, state=state, reason="BeginTime", nodes=("h1",) if state == "RUNNING" else ())
            seen = replace(cluster(row, sent_back=((5, 0),) if state == "RUNNING" else ()), now=now)
            found = decide(seen, memory, SETTINGS)
            assert found.supply is not None
            hurried += [seconds for _ in found.supply.start_now]
    assert hurried == [0, 10, 20, 605, 611]
    decide(replace(cluster(), now=NOW + 2000), memory, SETTINGS)
    assert not memory.supply.hurried


def test_job_that_returns_before_it_is_seen_pending_waits_for_the_delay_of_a_later_requeue() -> None:
    """Its user may requeue the later run, with a delay of their own."""
    memory, late = DecisionMemory(SETTINGS), inference(5, "1g.10gb")
    decide(cluster(replace(late, state="RUNNING", nodes=("h1",)), sent_back=((5, 0),)), memory, SETTINGS)
    decide(cluster(replace(late, state="RUNNING", nodes=("h1",), restarts=1)), memory, SETTINGS)
    found = decide(cluster(replace(late, reason="BeginTime", restarts=2)), memory, SETTINGS)
    assert found.supply is not None and not found.supply.start_now and not memory.supply.sent_back


def test_progress_of_a_requeued_training_job_is_queried_once() -> None:
    memory = DecisionMemory(SETTINGS)
    back = replace(TRAINING, restarts=1)
    decide(cluster(back), memory, SETTINGS)
    asked = needed(cluster(back, past=None), memory, SETTINGS)
    assert asked.progress == {70}
    decide(cluster(back, past=None, answers=Answers(asked, progress=())), memory, SETTINGS)
    assert not needed(cluster(back, past=None), memory, SETTINGS)
    assert settle(Outcomes(), memory).loans == ()
