"""What the contract with real Slurm does not cover: preemption, former GRES types, time limits, node states."""

from __future__ import annotations

import pytest

from slurm_migbatch.lab.slurm.client import SimulatedSlurm
from slurm_migbatch.lab.slurm.clock import VirtualClock
from slurm_migbatch.lab.slurm.records import SimulatedPartition, SlurmSettings
from slurm_migbatch.slurm.client import SlurmError, SlurmRefused

TIERS = (SimulatedPartition("gpu", 10), SimulatedPartition("train", 1, preempted=True))


def slurm(nodes: int = 1, *, counts: dict[str, int] | None = None, **settings: object) -> SimulatedSlurm:
    fields = {"exempt_s": 0.0, **settings}
    made = SimulatedSlurm(VirtualClock(), SlurmSettings(**fields), TIERS, auto=True)  # type: ignore[arg-type]
    for number in range(1, nodes + 1):
        made.add_node(f"n{number}", counts or {"1g.10gb": 7, "loan": 1}, partitions=("gpu", "train"))
    listed = dict.fromkeys(("1g.10gb", "2g.20gb", "3g.40gb", "loan"), 7)
    made.add_node("migcatalog1", listed, partitions=("gpu", "train"), states=("DOWN",))
    return made


def test_higher_tier_preempts_only_as_many_jobs_of_the_same_type_as_needed() -> None:
    s = slurm()
    training = [s.submit("mig:1g.10gb:1", partition="train", priority=9 - number) for number in range(7)]
    s.clock.sleep(2)
    inference = s.submit("mig:1g.10gb:2")
    s.clock.sleep(6)
    assert s.queue[inference].state == "RUNNING"
    back = [job for job in training if s.queue[job].state == "PENDING"]
    assert len(back) == 2
    assert [(s.queue[job].restarts, s.queue[job].reason) for job in back] == [(1, "BeginTime")] * 2
    other = s.submit("mig:2g.20gb:1")
    s.clock.sleep(10)
    assert s.queue[other].reason == "ReqNodeNotAvail", "other types are not freed for it"
    assert sum(s.queue[job].state == "RUNNING" for job in training) == 5


def test_job_is_preempted_only_after_the_exempt_time() -> None:
    s = slurm(exempt_s=100.0)
    training = s.submit("mig:1g.10gb:7", partition="train")
    s.clock.sleep(2)
    began = s.queue[training].start
    inference = s.submit("mig:1g.10gb:1")
    s.clock.sleep(90)
    assert s.queue[inference].reason == "Resources" and not s.queue[training].restarts
    s.clock.sleep(20)
    assert s.queue[inference].state == "RUNNING" and began is not None
    assert s.queue[inference].start >= began + 100.0


@pytest.mark.parametrize("last", [False, True])
def test_requeued_job_goes_to_the_end_only_with_requeued_last_set(last: bool) -> None:
    s = slurm(counts={"1g.10gb": 1}, requeued_last=last, requeue_delay_s=0.0, kill_s=0.0)
    jobs = [s.submit("mig:1g.10gb:1", limit=60) for _ in range(3)]
    s.clock.sleep(5)
    assert s.queue[jobs[0]].state == "RUNNING"
    s.set_gres({"n1": "mig:none:1"})
    s.requeue_all([jobs[0]])
    s.clock.sleep(5)
    assert [row.job_id for row in s.jobs()] == (jobs[1:] + jobs[:1] if last else jobs)
    s.set_gres({"n1": "mig:1g.10gb:1"})
    s.clock.sleep(5)
    assert s.queue[jobs[1 if last else 0]].state == "RUNNING"


def test_pending_job_also_needs_its_former_type_up_to_slurm_23_02() -> None:
    s = slurm(release=(22, 5), counts={"1g.10gb": 3, "2g.20gb": 1})
    job = s.submit("mig:3g.40gb:1")
    s.update_jobs({str(job): {"Gres": "mig:2g.20gb:1"}})
    s.clock.sleep(5)
    assert (s.queue[job].gres, s.queue[job].state) == ("gres:mig:2g.20gb:1", "PENDING")
    newer = slurm(counts={"1g.10gb": 3, "2g.20gb": 1})
    job = newer.submit("mig:3g.40gb:1")
    newer.update_jobs({str(job): {"Gres": "mig:2g.20gb:1"}})
    newer.clock.sleep(5)
    assert (newer.queue[job].gres, newer.queue[job].state) == ("gres/mig:2g.20gb:1", "RUNNING")


def test_emptied_request_needs_one_free_gres_of_its_former_type_but_uses_none() -> None:
    s = slurm(release=(22, 5), counts={"2g.20gb": 1, "loan": 1})
    job = s.submit("mig:loan:2")
    s.update_jobs({str(job): {"TresPerNode": "", "TresPerJob": "gres:mig:loan:2", "NumNodes": "1-1"}})
    s.clock.sleep(5)
    assert s.queue[job].state == "PENDING"
    s.update_jobs({str(job): {"TresPerJob": "", "Gres": "mig:2g.20gb:1"}})
    s.clock.sleep(5)
    assert s.queue[job].state == "RUNNING"
    assert {kind: n for kind, n in s.machines["n1"].used.items() if n} == {"2g.20gb": 1}


def test_job_ends_at_its_time_limit() -> None:
    s = slurm()
    job = s.submit("mig:1g.10gb:1", limit=600)
    s.clock.sleep(700)
    ended = s.ended_jobs[job]
    assert ended.start is not None
    assert (ended.state, round(ended.end - ended.start)) == ("TIMEOUT", 600)


def test_completing_node_gets_no_job_although_its_gres_are_free() -> None:
    s = slurm()
    job = s.submit("mig:1g.10gb:7")
    s.clock.sleep(2)
    s.completed(job)
    assert s.machines["n1"].free("1g.10gb") == 7
    following = s.submit("mig:1g.10gb:1")
    s.clock.sleep(5)
    assert s.queue[following].state == "PENDING"
    s.released(job)
    s.clock.sleep(2)
    assert s.queue[following].state == "RUNNING"


def test_job_that_restarts_in_the_second_of_its_kill_fails() -> None:
    s = slurm(kill_s=0.0, requeue_delay_s=0.0, cycle_s=0.1)
    job = s.submit("mig:1g.10gb:1")
    s.clock.sleep(0.2)
    s.requeue_all([job])
    s.clock.sleep(5)
    assert s.ended_jobs[job].state == "FAILED"


def test_gres_sum_unlike_slurm_conf_invalidates_the_node_at_registration() -> None:
    s = slurm()
    s.set_gres({"n1": "mig:1g.10gb:5"})
    s.register()
    (row,) = [row for row in s.nodes() if row.name == "n1"]
    assert row.invalid and not row.open


def test_job_waits_for_its_begin_time() -> None:
    s = slurm()
    job = s.submit("mig:1g.10gb:1", begin=s.clock.now + 50)
    s.clock.sleep(49)
    assert s.queue[job].reason == "BeginTime"
    s.clock.sleep(3)
    assert s.queue[job].state == "RUNNING"


def test_features_and_requested_nodes_restrict_placement_and_submission() -> None:
    s = slurm(2)
    s.set_node("n2", features=frozenset({"big"}))
    with_feature, named = s.submit("mig:1g.10gb:1", features="big"), s.submit("mig:1g.10gb:1", requested_nodes="n2")
    s.clock.sleep(3)
    assert {s.queue[job].nodes for job in (with_feature, named)} == {("n2",)}
    with pytest.raises(SlurmError, match="Requested node configuration is not available"):
        s.submit("mig:3g.40gb:1", requested_nodes="n2")


def test_pending_job_blocks_its_partition_until_the_next_backfill_cycle() -> None:
    s = slurm(backfill_s=60.0, counts={"1g.10gb": 2, "2g.20gb": 1})
    first = s.submit("mig:1g.10gb:2", limit=3600)
    s.clock.sleep(2)
    waiting, short = s.submit("mig:1g.10gb:1", limit=60), s.submit("mig:2g.20gb:1", limit=60)
    s.clock.sleep(20)
    assert [s.queue[job].state for job in (first, waiting, short)] == ["RUNNING", "PENDING", "PENDING"]
    s.clock.sleep(60)
    assert short in s.ended_jobs or s.queue[short].state == "RUNNING"


def test_jobs_start_during_the_time_that_a_call_takes() -> None:
    s = slurm(update_s=2.0)
    job, other = s.submit("mig:1g.10gb:1"), s.submit("mig:1g.10gb:1", held=True)
    before = s.clock.now
    s.update_jobs({str(other): {"Comment": "x"}})
    assert s.clock.now == before + 2
    assert s.queue[job].state == "RUNNING"


def test_update_of_an_unknown_field_is_refused() -> None:
    s = slurm()
    job = s.submit("mig:1g.10gb:1", held=True)
    with pytest.raises(SlurmRefused, match="not supported"):
        s.update_jobs({str(job): {"Nonsense": "1"}})


def test_job_starts_after_its_dependencies_have_completed() -> None:
    s = slurm()
    first, array = s.submit("mig:1g.10gb:1"), s.submit("mig:1g.10gb:1", array="0-1")
    last = s.submit("mig:1g.10gb:1", after=(first, array))
    s.clock.sleep(3)
    assert (s.queue[last].reason, s.queue[last].after, s.queue[last].eligible) == ("Dependency", (first, array), None)
    s.finish(first)
    assert s.queue[last].after == (array,)
    for task in [row.job_id for row in s.queue.values() if row.array_job == array]:
        assert s.queue[last].state == "PENDING"
        s.finish(task)
    assert s.queue[last].after == () and s.queue[last].eligible == s.clock.time()
    s.clock.sleep(3)
    assert s.queue[last].state == "RUNNING"
    late = s.submit("mig:1g.10gb:1", after=(first,))
    assert s.queue[late].reason == "None", "a completed job is no dependency"


def test_failed_dependency_is_never_satisfied_and_an_unknown_one_is_refused() -> None:
    s = slurm()
    first = s.submit("mig:1g.10gb:1")
    waiting = s.submit("mig:1g.10gb:1", after=(first,))
    s.clock.sleep(3)
    s.finish(first, "FAILED")
    s.clock.sleep(3)
    assert (s.queue[waiting].state, s.queue[waiting].reason) == ("PENDING", "DependencyNeverSatisfied")
    with pytest.raises(SlurmError, match="dependency"):
        s.submit("mig:1g.10gb:1", after=(99,))


def test_dependency_on_a_cancelled_pending_array_is_never_satisfied() -> None:
    s = slurm()
    array = s.submit("mig:1g.10gb:1", array="0-3", held=True)
    waiting = s.submit("mig:1g.10gb:1", after=(array,))
    s.cancel(f"{array}_1")
    assert s.queue[array].tasks == 3, "only that task is cancelled"
    s.cancel(array)
    assert array not in s.queue
    assert (s.queue[waiting].state, s.queue[waiting].reason) == ("PENDING", "DependencyNeverSatisfied")
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        s.update_jobs({f"{array}_0": {"Comment": "x"}})
