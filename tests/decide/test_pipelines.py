"""Jobs of a pipeline get the profiles that meet its deadline at the lowest price, chosen again as jobs end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from slurm_migbatch.decide.dispatch.pipelines import (
    LATE,
    MOST_JOBS,
    MOST_SPLIT,
    START_S,
    KnownPipeline,
    PipelineKey,
    Plan,
    pipeline_of,
    plan_pipelines,
    why_pipeline,
)
from slurm_migbatch.decide.dispatch.retype import MOST, Pending, RetypeHistory, ServiceGuarantee, promise_of
from slurm_migbatch.decide.snapshot import WeighedProfile
from slurm_migbatch.mig.grant import Grant, parse_comment
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.cli import checked_job
from slurm_migbatch.slurm.client import JobRow
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


def promises(pending: Pending) -> ServiceGuarantee | None:
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

    def look(self, seconds: float = 1.0, apply: bool = True) -> Plan:
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
        for number, one in self.rows.items():
            grant = parse_comment(one.comment)
            assert grant is not None and one.gres == "gres/" + grant.gres
            found[number] = grant.parts[0][0].name
        return found


def site(*rows: JobRow) -> Site:
    return Site(rows={one.job_id: one for one in rows})


def chain(deadline_s: float, **changes: Any) -> Site:
    """A job that scales, followed by one that hardly does."""
    hints = f"pipeline=p deadline={deadline_s:.0f}s"
    return site(row(1, "steep", hints=hints, **changes), row(2, "flat", 1, hints=hints, **changes))


def test_jobs_keep_their_granted_profile_while_the_deadline_leaves_time() -> None:
    here = chain(2 * WHOLE_S + START_S + 100)
    assert not here.look().changes
    assert here.known[1001, "p"].seconds == 2 * WHOLE_S + START_S


def test_job_that_gains_most_by_a_larger_slice_gets_it() -> None:
    here = chain(WHOLE_S + 220 + START_S)
    changes = here.look().changes
    assert here.profiles == {1: "3g.40gb", 2: "1g.10gb"}
    assert "this job's share is 215 s" in changes[0].why and "meets deadline=" in changes[0].why
    assert not here.look().changes, "nothing else has happened"


def test_remaining_jobs_are_split_again_after_the_actual_duration_of_a_job() -> None:
    here = chain(WHOLE_S + 220 + START_S)
    here.look()
    here.start(1)
    here.look(400)  # twice as long as predicted
    here.end(1)
    here.look()
    assert here.profiles == {2: "3g.40gb"}
    here = chain(WHOLE_S + 120 + START_S)
    here.look()
    assert here.profiles == {1: "7g.80gb", 2: "1g.10gb"}
    here = chain(700)
    here.look()
    assert here.profiles == {1: "7g.80gb", 2: "2g.20gb"}
    here.start(1)
    here.look(10)
    here.end(1)  # much sooner than predicted
    here.look()
    assert here.profiles == {2: "1g.10gb"}


def test_time_until_the_first_job_may_begin_is_not_available_to_the_split() -> None:
    here = chain(2 * WHOLE_S + START_S + 30)
    here.rows[1] = replace(here.rows[1], reason="BeginTime", eligible=NOW + 20)
    assert not here.look().changes and here.known[1001, "p"].seconds == 2 * WHOLE_S + START_S + 19
    here.rows[1] = replace(here.rows[1], eligible=NOW + 40)
    here.look()
    assert here.profiles == {1: "2g.20gb", 2: "1g.10gb"}


def test_overrunning_job_gives_its_successors_faster_slices_before_it_ends() -> None:
    here = chain(WHOLE_S + 220 + START_S)
    here.look()
    here.start(1)
    assert not here.look(150).changes and not here.look(40).changes
    (change,) = here.look(80).changes  # 55 s late, and assumed to be late by as much again
    assert change.pending.row.job_id == 2 and here.profiles[2] == "2g.20gb"


def test_pipeline_that_cannot_meet_its_deadline_gets_fast_slices_and_says_so() -> None:
    here = chain(200)
    here.look()
    assert here.profiles == {1: "7g.80gb", 2: "7g.80gb"}
    assert "cannot be met on any slices" in why_pipeline(here.rows[2], here.known)
    assert not here.look().changes
    here.look(1000)
    assert why_pipeline(here.rows[2], here.known).startswith("the deadline of pipeline p has passed by 0:13:22")


def test_why_reports_the_predicted_and_the_remaining_time() -> None:
    here = chain(2000)
    here.look()
    reason = why_pipeline(here.rows[2], here.known)
    assert reason == (
        "pipeline p: 2 unfinished jobs are predicted to take 0:20:10 at most, with 0:33:19 left until its deadline"
    )
    assert why_pipeline(replace(here.rows[2], uid=7), here.known) == ""
    assert why_pipeline(replace(here.rows[2], comment="mine"), here.known) == ""


def test_pipeline_is_identified_by_user_and_name_alone() -> None:
    other = row(3, "flat", hints="pipeline=p deadline=10s", uid=1002)
    here = chain(2 * WHOLE_S + START_S + 100)
    here.rows[3] = other
    assert {change.pending.row.job_id for change in here.look().changes} == {3}
    assert set(here.known) == {(1001, "p"), (1002, "p")}
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
    here = site(first, row(2, "flat", 1, hints="pipeline=p"), row(3, "flat", 2, hints="pipeline=p deadline=1h"))
    here.look()
    assert (here.known[1001, "p"].begin, here.known[1001, "p"].deadline_s) == (NOW - 100, 3600)
    here.end(1)
    here.rows[3] = replace(here.rows[3], submit=NOW + 50)
    here.look()
    assert (here.known[1001, "p"].begin, here.known[1001, "p"].deadline_s) == (NOW - 100, 3600)
    here.rows.clear()
    here.look()
    assert not here.known, "a later pipeline may have its name"


def test_pipeline_without_a_deadline_is_not_changed() -> None:
    here = site(row(1, "steep", hints="pipeline=p"), row(2, "flat", 1, hints="pipeline=p"))
    plan = here.look()
    assert not plan.changes and not plan.limits
    assert "none of its jobs has a deadline" in why_pipeline(here.rows[1], here.known)


def test_job_of_unknown_duration_counts_with_its_time_limit() -> None:
    unknown = row(1, "nobody", hints="pipeline=p", gres="", time_limit_s=300)
    here = site(unknown, row(2, "steep", 1, hints="pipeline=p deadline=700s"))
    here.look()
    del here.rows[1]
    assert here.profiles == {2: "2g.20gb"}
    here = site(replace(unknown, time_limit_s=None), row(2, "steep", 1, hints="pipeline=p deadline=700s"))
    plan = here.look()
    assert not plan.changes
    assert "the duration of job 1 is unknown: add items= or --time" in why_pipeline(here.rows[2], here.known)


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
    here = site(row(1, "steep", hints=hints), row(2, "flat", 1, hints=hints, **changes))
    assert {change.pending.row.job_id for change in here.look(apply=False).changes} == {1}
    assert here.known[1001, "p"].seconds == 215 + WHOLE_S + START_S


def test_profile_on_which_a_job_would_exceed_its_time_limit_is_not_chosen() -> None:
    here = chain(3 * WHOLE_S, profile="7g.80gb", time_limit_s=310)
    here.look()
    assert here.profiles == {1: "2g.20gb", 2: "7g.80gb"}


def test_parallel_jobs_count_with_the_longest_path_through_them() -> None:
    hints = "pipeline=p deadline=1300s"
    ways = [row(n, "flat", 1, hints=hints) for n in (2, 3)]
    here = site(row(1, "steep", hints=hints), *ways, row(4, "steep", 2, 3, hints=hints))
    here.look()
    assert here.profiles == {1: "2g.20gb", 2: "1g.10gb", 3: "1g.10gb", 4: "2g.20gb"}


def test_duration_of_an_array_in_a_pipeline_follows_from_its_throttle() -> None:
    hints = "pipeline=p deadline=1500s"
    array = row(2, "steep", 1, hints=hints, array_job=2, array_task="0-7%4", tasks=8, throttle=4)
    here = site(row(1, "flat", hints=hints, state="RUNNING", start=NOW), array)
    (change,) = here.look(apply=False).changes
    assert change.targets == ("2_[0-7]",) and change.after == P("2g.20gb")


def test_array_whose_tasks_no_command_can_name_is_not_retyped() -> None:
    """Slurm shows every second task of ten thousand in short form, but accepts them only one by one."""
    hints = "pipeline=p deadline=1000s"
    long = {"array_job": 2, "array_task": "0-9998:2%5000", "tasks": 5000, "throttle": 5000}
    here = site(row(1, "flat", hints=hints, state="RUNNING", start=NOW), row(2, "steep", 1, hints=hints, **long))
    names = [name for change in here.look(apply=False).changes for name in change.targets]
    assert [checked_job(name) for name in names] == []


def test_cyclic_dependencies_and_those_on_missing_jobs_are_tolerated() -> None:
    hints = "pipeline=p deadline=2h"
    here = site(row(1, "steep", 2, hints=hints), row(2, "flat", 1, 2, 77, hints=hints), row(3, "flat", 2, hints=hints))
    here.look()
    assert set(here.known[1001, "p"].jobs) == {1, 2, 3}


def test_pipeline_with_more_jobs_than_allowed_is_skipped() -> None:
    hints = "pipeline=p deadline=1s"
    here = site(*(row(n, "flat", *([n - 1] if n > 1 else []), hints=hints) for n in range(1, 10_001)))
    here.rows[20_000] = row(20_000, "flat", hints="pipeline=q deadline=10s")
    plan = here.look()
    assert [change.pending.row.job_id for change in plan.changes] == [20_000]
    assert f"at most {MOST_JOBS}" in why_pipeline(here.rows[1], here.known)


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
    here = many(100, 3000)
    rounds = [len(here.look().changes) for _ in range(10)]
    assert max(rounds) <= MOST_SPLIT * 8 and rounds[0] and not rounds[-1]
    assert all(known.jobs and known.seconds <= known.left_s for known in here.known.values())


def test_changes_per_round_are_limited_when_no_deadline_can_be_met() -> None:
    here = many(100, 1)
    rounds = [len(here.look().changes) for _ in range(6)]
    assert max(rounds) < MOST + 8 and sum(rounds) == 800
    assert set(here.profiles.values()) == {"7g.80gb"}


def test_refused_profile_is_not_retried_and_the_hold_time_is_respected() -> None:
    here = chain(WHOLE_S + 220 + START_S)
    (change,) = here.look(apply=False).changes
    here.turns.bar(change)
    here.look()
    assert here.profiles == {1: "7g.80gb", 2: "1g.10gb"}
    held = chain(WHOLE_S + 220 + START_S)
    held.turns = RetypeHistory(60.0)
    held.look()
    held.rows[3] = row(3, "steep", 2, hints="pipeline=p")
    changed = {change.pending.row.job_id for change in held.look().changes}
    assert 1 not in changed


def test_job_retyped_for_lack_of_room_is_not_retyped_back() -> None:
    here = chain(2 * WHOLE_S + START_S + 100)
    here.turns = RetypeHistory(30.0)
    here.look()
    moved = row(1, "steep", hints="pipeline=p deadline=1310s", profile="3g.40gb")
    here.rows[1] = moved
    here.turns.last["1"] = (here.now, P("1g.10gb"))
    assert not here.look(5).changes
    assert not here.look(60).changes, "nothing has happened but that it may be moved again"


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
    here = chain(WHOLE_S + 215 + START_S + 51)
    plan = here.look()
    assert plan.limits[1] == pytest.approx(265) and plan.limits[2] == pytest.approx(WHOLE_S + 50)
    lost = chain(100).look()
    assert lost.limits[1] == pytest.approx(LATE * 110)
