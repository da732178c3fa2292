"""Jobs of a pipeline get the profiles that meet its deadline at the lowest price, chosen again as jobs end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from slurm_migbatch.decide.dispatch.pending import Pending
from slurm_migbatch.decide.dispatch.pipelines import (
    LATE,
    MOST_JOBS,
    MOST_SPLIT,
    START_S,
    KnownPipeline,
    PipelineKey,
    PipelinePlan,
    pipeline_of,
    plan_pipelines,
    why_pipeline,
)
from slurm_migbatch.decide.dispatch.promises import Promise, promise_of
from slurm_migbatch.decide.dispatch.retype import MOST, RetypeHistory
from slurm_migbatch.decide.snapshot import WeighedProfile
from slurm_migbatch.mig.grant import Grant, parse_comment
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import OTHERS, JobRow
from slurm_migbatch.slurm.commands import checked_job
from slurm_migbatch.workload.hints import Hints
from tests.support.dispatch_site import NOW, P

ITEMS = 600
#: seconds of a job on each profile: of a model that scales, and of one that hardly does
STEEP = {"1g.10gb": 600, "2g.20gb": 310, "3g.40gb": 215, "7g.80gb": 110}
FLAT = {"1g.10gb": 600, "2g.20gb": 480, "3g.40gb": 400, "7g.80gb": 300}
RATES = {
    model: {name: ITEMS / seconds for name, seconds in lasts.items()}
    for model, lasts in (("steep", STEEP), ("flat", FLAT))
}
WHOLE_S = float(ITEMS)
"""What a job takes on the smallest slice."""


def row(number: int, model: str, *after: int, hints: str = "pipeline=p deadline=1h", **changes: Any) -> JobRow:
    """A job of a pipeline as the filter granted it: the smallest slice."""
    profile = changes.pop("profile", "1g.10gb")
    grant = Grant([(P(profile), 1)], "auto")
    fields: dict[str, Any] = {
        "job_id": number,
        "uid": 1001,
        "partition": "mig",
        "submit": NOW,
        "gres": "gres/" + grant.gres,
        "comment": grant.attach(f"migbatch: model={model} items={ITEMS} {hints}".strip()),
        "reason": "Dependency" if after else "Priority",
        "after": after,
    }
    return JobRow(**{**fields, **changes})


def weighed(model: str) -> list[WeighedProfile]:
    return [WeighedProfile(P(name), 1000 * P(name).memory_gb, rate, True) for name, rate in RATES[model].items()]


def hints_in(comment: str) -> Mapping[str, str]:
    return dict(pair.split("=") for pair in comment.split(" [")[0].removeprefix("migbatch: ").split())


def promises(pending: Pending) -> Promise | None:
    model = hints_in(pending.row.comment).get("model", "")
    return promise_of(P("1g.10gb"), weighed(model), ITEMS, 3600) if model in RATES else None


def rates(hints: Hints, _partition: str) -> Mapping[Profile, float]:
    return {P(name): rate for name, rate in RATES.get(hints.model or "", {}).items()}


def equivalent(profile: Profile) -> float:
    return profile.compute / 7


@dataclass
class Site:
    """A queue, and what is remembered about it."""

    now: float = NOW
    rows: dict[int, JobRow] = field(default_factory=dict)
    turns: RetypeHistory = field(default_factory=lambda: RetypeHistory(0.0))
    known: dict[PipelineKey, KnownPipeline] = field(default_factory=dict)

    def plan_round(self, seconds: float = 1.0, apply: bool = True) -> PipelinePlan:
        self.now += seconds
        found = plan_pipelines(self.now, self.rows.values(), promises, rates, self.turns, self.known, equivalent)
        for change in found.changes if apply else ():
            self.turns.note(change, self.now)
            fields = change.fields()
            assert fields is not None
            changed = replace(change.pending.row, gres="gres/" + fields["Gres"], comment=fields["Comment"])
            self.rows[changed.job_id] = changed
        return found

    def start(self, number: int) -> None:
        self.rows[number] = replace(self.rows[number], state="RUNNING", reason="None", start=self.now)

    def end(self, number: int) -> None:
        del self.rows[number]
        for job, waiting in self.rows.items():
            if number in waiting.after:
                left = tuple(other for other in waiting.after if other != number)
                self.rows[job] = replace(waiting, after=left, reason="Dependency" if left else "Priority")

    @property
    def profiles(self) -> dict[int, str]:
        found = {}
        for number, row in self.rows.items():
            grant = parse_comment(row.comment)
            assert grant is not None and row.gres == "gres/" + grant.gres
            found[number] = grant.parts[0][0].name
        return found


def site(*rows: JobRow) -> Site:
    return Site(rows={row.job_id: row for row in rows})


def chain(deadline_s: float, **changes: Any) -> Site:
    """A job that scales, followed by one that hardly does."""
    hints = f"pipeline=p deadline={deadline_s:.0f}s"
    return site(row(1, "steep", hints=hints, **changes), row(2, "flat", 1, hints=hints, **changes))


def test_jobs_keep_their_granted_profile_while_the_deadline_leaves_time() -> None:
    cluster = chain(2 * WHOLE_S + START_S + 100)
    assert not cluster.plan_round().changes
    assert cluster.known[1001, "p"].seconds == 2 * WHOLE_S + START_S


def test_job_that_gains_most_by_a_larger_slice_gets_it() -> None:
    cluster = chain(WHOLE_S + 220 + START_S)
    changes = cluster.plan_round().changes
    assert cluster.profiles == {1: "3g.40gb", 2: "1g.10gb"}
    assert "this job's share is 215 s" in changes[0].why and "meets deadline=" in changes[0].why
    assert not cluster.plan_round().changes, "nothing else has changed"


def test_remaining_jobs_are_split_again_after_the_actual_duration_of_a_job() -> None:
    cluster = chain(WHOLE_S + 220 + START_S)
    cluster.plan_round()
    cluster.start(1)
    cluster.plan_round(400)  # twice as long as predicted
    cluster.end(1)
    cluster.plan_round()
    assert cluster.profiles == {2: "3g.40gb"}
    cluster = chain(WHOLE_S + 120 + START_S)
    cluster.plan_round()
    assert cluster.profiles == {1: "7g.80gb", 2: "1g.10gb"}
    cluster = chain(700)
    cluster.plan_round()
    assert cluster.profiles == {1: "7g.80gb", 2: "2g.20gb"}
    cluster.start(1)
    cluster.plan_round(10)
    cluster.end(1)  # much sooner than predicted
    cluster.plan_round()
    assert cluster.profiles == {2: "1g.10gb"}


def test_time_until_the_first_job_may_begin_is_not_available_to_the_split() -> None:
    cluster = chain(2 * WHOLE_S + START_S + 30)
    cluster.rows[1] = replace(cluster.rows[1], reason="BeginTime", eligible=NOW + 20)
    assert not cluster.plan_round().changes and cluster.known[1001, "p"].seconds == 2 * WHOLE_S + START_S + 19
    cluster.rows[1] = replace(cluster.rows[1], eligible=NOW + 40)
    cluster.plan_round()
    assert cluster.profiles == {1: "2g.20gb", 2: "1g.10gb"}


def test_overrunning_job_gives_its_successors_faster_slices_before_it_ends() -> None:
    cluster = chain(WHOLE_S + 220 + START_S)
    cluster.plan_round()
    cluster.start(1)
    assert not cluster.plan_round(150).changes and not cluster.plan_round(40).changes
    (change,) = cluster.plan_round(80).changes  # 55 s late, and assumed to be late by as much again
    assert change.pending.row.job_id == 2 and cluster.profiles[2] == "2g.20gb"


def test_pipeline_that_cannot_meet_its_deadline_gets_fast_slices_and_says_so() -> None:
    cluster = chain(200)
    cluster.plan_round()
    assert cluster.profiles == {1: "7g.80gb", 2: "7g.80gb"}
    assert "cannot be met on any slices" in why_pipeline(cluster.rows[2], cluster.known)
    assert not cluster.plan_round().changes
    cluster.plan_round(1000)
    assert why_pipeline(cluster.rows[2], cluster.known).startswith("the deadline of pipeline p has passed by 0:13:22")


def test_why_reports_the_predicted_and_the_remaining_time() -> None:
    cluster = chain(2000)
    cluster.plan_round()
    reason = why_pipeline(cluster.rows[2], cluster.known)
    assert reason == (
        "pipeline p: 2 unfinished jobs are predicted to take 0:20:10 at most, with 0:33:19 left until its deadline"
    )
    assert why_pipeline(replace(cluster.rows[2], uid=7), cluster.known) == ""
    assert why_pipeline(replace(cluster.rows[2], comment="mine"), cluster.known) == ""


def test_pipeline_is_identified_by_user_and_name_alone() -> None:
    other = row(3, "flat", hints="pipeline=p deadline=10s", uid=1002)
    cluster = chain(2 * WHOLE_S + START_S + 100)
    cluster.rows[3] = other
    assert {change.pending.row.job_id for change in cluster.plan_round().changes} == {3}
    assert set(cluster.known) == {(1001, "p"), (1002, "p")}
    assert pipeline_of(row(4, "flat", hints="pipeline=P")) == (1001, "p")
    assert pipeline_of(row(4, "flat", hints="")) is None
    assert pipeline_of(row(4, "flat", state="COMPLETED")) is None


@pytest.mark.parametrize(
    "comment",
    ["pipeline=p deadline=1s", "migbatch: pipeline=a/b", "migbatch: pipeline=p pipeline=p", "x\udcffpipeline=p"],
)
def test_comment_that_is_not_read_for_hints_names_no_pipeline(comment: str) -> None:
    assert pipeline_of(row(1, "flat", comment=comment)) is None


def test_shortest_deadline_of_any_job_counts_from_the_first_submission() -> None:
    first = row(1, "steep", hints="pipeline=p deadline=2h", submit=NOW - 100, state="RUNNING", start=NOW - 50)
    cluster = site(first, row(2, "flat", 1, hints="pipeline=p"), row(3, "flat", 2, hints="pipeline=p deadline=1h"))
    cluster.plan_round()
    assert (cluster.known[1001, "p"].begin, cluster.known[1001, "p"].deadline_s) == (NOW - 100, 3600)
    cluster.end(1)
    cluster.rows[3] = replace(cluster.rows[3], submit=NOW + 50)
    cluster.plan_round()
    assert (cluster.known[1001, "p"].begin, cluster.known[1001, "p"].deadline_s) == (NOW - 100, 3600)
    cluster.rows.clear()
    cluster.plan_round()
    assert not cluster.known, "a later pipeline may have its name"


def test_pipeline_without_a_deadline_is_not_changed() -> None:
    cluster = site(row(1, "steep", hints="pipeline=p"), row(2, "flat", 1, hints="pipeline=p"))
    plan = cluster.plan_round()
    assert not plan.changes and not plan.limits
    assert "none of its jobs has a deadline" in why_pipeline(cluster.rows[1], cluster.known)


def test_job_of_unknown_duration_counts_with_its_time_limit() -> None:
    unknown = row(1, "nobody", hints="pipeline=p", gres="", time_limit_s=300)
    cluster = site(unknown, row(2, "steep", 1, hints="pipeline=p deadline=700s"))
    cluster.plan_round()
    del cluster.rows[1]
    assert cluster.profiles == {2: "2g.20gb"}
    cluster = site(replace(unknown, time_limit_s=None), row(2, "steep", 1, hints="pipeline=p deadline=700s"))
    plan = cluster.plan_round()
    assert not plan.changes
    assert "the duration of job 1 is unknown: add items= or --time" in why_pipeline(cluster.rows[2], cluster.known)


@pytest.mark.parametrize(
    "changes",
    [
        {"gres": "gres:mig:1g.10gb:1"},  # a Slurm that keeps a pending job's old GRES type on a change
        {"num_nodes": 2},
        {"het_job": 1},
        {"requested_nodes": "h1"},
        {"features": "a30"},
        {"reservation": "maintenance"},
        {"comment": f"migbatch: model=flat items={ITEMS} pipeline=p deadline=900s"},  # not granted by the filter
    ],
)
def test_job_that_cannot_be_retyped_counts_with_its_current_profile(changes: dict[str, Any]) -> None:
    hints = "pipeline=p deadline=900s"
    cluster = site(row(1, "steep", hints=hints), row(2, "flat", 1, hints=hints, **changes))
    assert {change.pending.row.job_id for change in cluster.plan_round(apply=False).changes} == {1}
    assert cluster.known[1001, "p"].seconds == 215 + WHOLE_S + START_S


def test_profile_on_which_a_job_would_exceed_its_time_limit_is_not_chosen() -> None:
    cluster = chain(3 * WHOLE_S, profile="7g.80gb", time_limit_s=310)
    cluster.plan_round()
    assert cluster.profiles == {1: "2g.20gb", 2: "7g.80gb"}


def test_parallel_jobs_count_with_the_longest_path_through_them() -> None:
    hints = "pipeline=p deadline=1300s"
    ways = [row(n, "flat", 1, hints=hints) for n in (2, 3)]
    cluster = site(row(1, "steep", hints=hints), *ways, row(4, "steep", 2, 3, hints=hints))
    cluster.plan_round()
    assert cluster.profiles == {1: "2g.20gb", 2: "1g.10gb", 3: "1g.10gb", 4: "2g.20gb"}


def test_duration_of_an_array_in_a_pipeline_follows_from_its_throttle() -> None:
    hints = "pipeline=p deadline=1500s"
    array = row(2, "steep", 1, hints=hints, array_job=2, array_task="0-7%4", tasks=8, throttle=4)
    cluster = site(row(1, "flat", hints=hints, state="RUNNING", start=NOW), array)
    (change,) = cluster.plan_round(apply=False).changes
    assert change.targets == ("2_[0-7]",) and change.after == P("2g.20gb")


def test_array_whose_tasks_no_command_can_name_is_not_retyped() -> None:
    """Slurm shows every second task of ten thousand in short form, but accepts them only one by one."""
    hints = "pipeline=p deadline=1000s"
    long = {"array_job": 2, "array_task": "0-9998:2%5000", "tasks": 5000, "throttle": 5000}
    cluster = site(row(1, "flat", hints=hints, state="RUNNING", start=NOW), row(2, "steep", 1, hints=hints, **long))
    names = [name for change in cluster.plan_round(apply=False).changes for name in change.targets]
    assert [checked_job(name) for name in names] == []


def test_cyclic_dependencies_and_those_on_missing_jobs_are_tolerated() -> None:
    hints = "pipeline=p deadline=2h"
    cluster = site(
        row(1, "steep", 2, hints=hints), row(2, "flat", 1, 2, 77, hints=hints), row(3, "flat", 2, hints=hints)
    )
    cluster.plan_round()
    assert set(cluster.known[1001, "p"].jobs) == {1, 2, 3}


def test_job_with_more_dependencies_than_are_read_waits_for_all_earlier_jobs_of_its_pipeline() -> None:
    hints = "pipeline=p deadline=1h"
    cluster = site(
        row(1, "steep", hints=hints),
        row(2, "flat", OTHERS, 71, 72, hints=hints),
        row(3, "flat", hints=hints),
        row(4, "flat", 77, hints=hints),
    )
    cluster.plan_round()
    known = cluster.known[1001, "p"]
    assert known.jobs.index(2) > known.jobs.index(1)
    assert known.seconds == 2 * WHOLE_S + START_S, "after job 1, but not after 3, which was submitted later"
    cluster.start(2)
    cluster.plan_round()
    assert cluster.known[1001, "p"].seconds < 2 * WHOLE_S


def test_pipeline_with_more_jobs_than_allowed_is_skipped() -> None:
    hints = "pipeline=p deadline=1s"
    cluster = site(*(row(n, "flat", *([n - 1] if n > 1 else []), hints=hints) for n in range(1, 10_001)))
    cluster.rows[20_000] = row(20_000, "flat", hints="pipeline=q deadline=10s")
    plan = cluster.plan_round()
    assert [change.pending.row.job_id for change in plan.changes] == [20_000]
    assert f"at most {MOST_JOBS}" in why_pipeline(cluster.rows[1], cluster.known)


def many(pipelines: int, deadline_s: int) -> Site:
    """Pipelines of eight jobs each."""
    return site(
        *(
            row(
                10 * n + stage,
                "flat",
                *([10 * n + stage - 1] if stage > 1 else []),
                hints=f"pipeline=p{n} deadline={deadline_s}s",
            )
            for n in range(1, pipelines + 1)
            for stage in range(1, 9)
        )
    )


def test_many_pipelines_are_split_in_turn_over_several_rounds() -> None:
    cluster = many(100, 3000)
    rounds = [len(cluster.plan_round().changes) for _ in range(10)]
    assert max(rounds) <= MOST_SPLIT * 8 and rounds[0] and not rounds[-1]
    assert all(known.jobs and known.seconds <= known.left_s for known in cluster.known.values())


@pytest.mark.parametrize(("pipelines", "deadline_s"), [(100, 3000), (200, 10_000)])
def test_job_has_a_limit_also_while_its_pipeline_is_put_off(pipelines: int, deadline_s: int) -> None:
    """Else it could be re-typed for lack of room to any profile, as slow as it may be."""
    cluster = many(pipelines, deadline_s)
    plan = cluster.plan_round()
    put_off = {job for job, limit_s in plan.limits.items() if not limit_s}
    assert put_off and put_off.isdisjoint(change.pending.row.job_id for change in plan.changes)
    assert plan.limits.keys() == cluster.rows.keys()
    for job in put_off:
        row = cluster.rows[job]
        grant = parse_comment(row.comment)
        assert grant is not None
        promise = promises(Pending(row, grant, frozenset(), 1))
        assert promise is not None and not promise.within(plan.limits[job]).options
    for _ in range(10):
        plan = cluster.plan_round()
    assert any(plan.limits[job] for job in put_off)


def test_changes_per_round_are_limited_when_no_deadline_can_be_met() -> None:
    cluster = many(100, 1)
    rounds = [len(cluster.plan_round().changes) for _ in range(6)]
    assert max(rounds) < MOST + 8 and sum(rounds) == 800
    assert set(cluster.profiles.values()) == {"7g.80gb"}


def test_refused_profile_is_not_retried_and_the_hold_time_is_respected() -> None:
    cluster = chain(WHOLE_S + 220 + START_S)
    (change,) = cluster.plan_round(apply=False).changes
    cluster.turns.bar(change)
    cluster.plan_round()
    assert cluster.profiles == {1: "7g.80gb", 2: "1g.10gb"}
    held = chain(WHOLE_S + 220 + START_S)
    held.turns = RetypeHistory(60.0)
    held.plan_round()
    held.rows[3] = row(3, "steep", 2, hints="pipeline=p")
    changed = {change.pending.row.job_id for change in held.plan_round().changes}
    assert 1 not in changed


def test_job_retyped_for_lack_of_room_is_not_retyped_back() -> None:
    cluster = chain(2 * WHOLE_S + START_S + 100)
    cluster.turns = RetypeHistory(30.0)
    cluster.plan_round()
    moved = row(1, "steep", hints="pipeline=p deadline=1310s", profile="3g.40gb")
    cluster.rows[1] = moved
    cluster.turns.last["1"] = (cluster.now, P("1g.10gb"))
    assert not cluster.plan_round(5).changes
    assert not cluster.plan_round(60).changes, "nothing has changed, except that it may be re-typed again"


def test_price_of_a_slice_is_its_gpu_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    """1g.20gb has as much compute as 1g.10gb, and twice the memory."""
    monkeypatch.setitem(RATES, "wide", {"1g.10gb": 1.0, "1g.20gb": 1.2, "2g.20gb": 1.4})
    weights = {"1g.10gb": 1 / 7, "1g.20gb": 2 / 8, "2g.20gb": 2 / 7}
    known: dict[PipelineKey, KnownPipeline] = {}
    rows = [row(1, "wide", hints="pipeline=p deadline=450s")]
    plan = plan_pipelines(NOW, rows, promises, rates, RetypeHistory(), known, lambda p: weights[p.name])
    assert [change.after for change in plan.changes] == [P("2g.20gb")]
    rows = [row(1, "wide", hints="pipeline=p deadline=600s", profile="1g.20gb")]
    plan = plan_pipelines(NOW, rows, promises, rates, RetypeHistory(), {}, lambda p: weights[p.name])
    assert [change.after for change in plan.changes] == [P("1g.10gb")]


def test_limits_for_jobs_that_wait_for_room_keep_the_deadline() -> None:
    cluster = chain(WHOLE_S + 215 + START_S + 51)
    plan = cluster.plan_round()
    assert plan.limits[1] == pytest.approx(265) and plan.limits[2] == pytest.approx(WHOLE_S + 50)
    lost = chain(100).plan_round()
    assert lost.limits[1] == pytest.approx(LATE * 110)
