"""Re-typing: which pending jobs are given another profile, and which are left alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.decide.capacity.free import FreeCapacity, NodeCapacity, of_counts, of_plan
from slurm_migbatch.decide.capacity.model import Demand, Gpu, Lease, Mode, Node
from slurm_migbatch.decide.dispatch.pending import marked, name_of, without_place
from slurm_migbatch.decide.dispatch.promises import Promise, promise_from_record, promise_of
from slurm_migbatch.decide.dispatch.retype import Retype, RetypeHistory, marker_corrections, retypes, undone
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.mig.grant import Grant, parse_comment
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.taskexpr import expand_tasks, fold_tasks
from tests.support.dispatch_site import (
    A30,
    EVERYWHERE,
    GPUS,
    H100,
    NOW,
    P,
    candidates,
    free_capacity,
    job,
    pending,
    promise,
)

FULL = {"h1": None, "h2": None, "a1": None}
A30_FULL = {"a1": None}


def only_retype(found: list[Retype]) -> Retype:
    assert len(found) == 1, found
    return found[0]


def profiles(made: Promise) -> set[str]:
    return {option.profile.name for option in made.options}


# -- the guarantee -----------------------------------------------------------------------------------------------------


def test_guarantee_allows_profiles_that_keep_memory_limit_and_rate() -> None:
    assert profiles(promise("1g.10gb", bad=("2g.12gb",))) == {"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb"}


def test_slower_profile_is_allowed_only_under_a_deadline_it_meets() -> None:
    slow = {"1g.6gb": 10.0, "1g.10gb": 9.0, "2g.20gb": 22.0}
    free = promise_of(P("1g.6gb"), candidates(rates=slow), 600, None)
    bound = promise_of(P("1g.6gb"), candidates(rates=slow), 600, 120)
    assert free is not None and profiles(free) == {"1g.6gb", "2g.20gb"}
    assert bound is not None and profiles(bound) == {"1g.6gb", "1g.10gb", "2g.20gb"}


def test_unknown_speed_allows_only_profiles_with_at_least_equal_resources() -> None:
    made = promise_of(P("1g.10gb"), candidates(rates={}), None, None)
    assert made is not None and profiles(made) == {"1g.10gb", "1g.20gb", "2g.12gb", "2g.20gb", "3g.40gb"}


def test_grant_that_cannot_meet_its_own_request_has_no_guarantee() -> None:
    assert promise_of(P("1g.6gb"), candidates(bad=("1g.6gb",)), 600, 120) is None


def record(**changes: object) -> dict[str, object]:
    listed = [
        {"profile": c.profile.name, "capacity_mib": c.memory_mib, "ok": c.ok, "throughput_per_s_range": [c.rate, 99.0]}
        for c in candidates()
    ]
    hints = {"model": "resnet-50", "items": 600, "deadline_s": 120, "slo_us": 200000}
    row = {"chosen": "mig:1g.6gb:2", "facts": {"reason": "fits"}, "hints": hints, "candidates": listed}
    return {**row, **changes}


def test_guarantee_is_read_from_the_recorded_decision() -> None:
    made = promise_from_record(record())
    assert made is not None and made.granted == P("1g.6gb") and profiles(made) == {c.profile.name for c in candidates()}
    assert made.seconds(P("1g.10gb")) == 50.0 and made.seconds(P("1g.10gb"), 2) == 25.0
    assert made.terms == "slo=200ms deadline=120s"


@pytest.mark.parametrize("reason", ["explicit", "whole_gpu", "memory_short", "time_short", "", None, 7])
def test_record_of_an_explicit_or_unmet_request_gives_no_guarantee(reason: object) -> None:
    assert promise_from_record(record(facts={"reason": reason})) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"candidates": None},
        {"candidates": [{}]},
        {"candidates": [{"profile": "no", "capacity_mib": 1, "ok": True}]},
        {"candidates": ["x"]},
        {"chosen": None},
        {"chosen": "mig:1g.6gb:1,mig:2g.12gb:1"},
        {"chosen": "mig:9g.9gb:1"},
        {"facts": None},
        {"hints": "x", "facts": []},
    ],
)
def test_incomplete_or_malformed_record_gives_no_guarantee(changes: dict[str, object]) -> None:
    assert promise_from_record(record(**changes)) is None


# -- the new profile ---------------------------------------------------------------------------------------------------


def test_job_is_retyped_to_the_cheapest_idle_profile() -> None:
    found = only_retype(
        retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), RetypeHistory())
    )
    assert found.after == P("1g.10gb") and found.targets == ("1",) and found.names == ("1",)
    assert found.why == "no room for 1g.6gb, and 1g.10gb is idle on h1; 50 s at most of deadline=120s"


def test_job_whose_own_profile_has_room_is_not_retyped() -> None:
    assert retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(), RetypeHistory()) == []


def test_job_is_not_retyped_without_idle_capacity_or_a_guarantee() -> None:
    assert retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**FULL), RetypeHistory()) == []
    assert retypes(NOW, [pending(job(1))], lambda p: None, free_capacity(**A30_FULL), RetypeHistory()) == []


def test_job_is_retyped_only_for_nodes_on_which_it_may_run() -> None:
    only = frozenset({"a1", "h2"})
    found = only_retype(
        retypes(NOW, [pending(job(1), pool=only)], lambda p: promise(), free_capacity(**A30_FULL), RetypeHistory())
    )
    assert "idle on h2" in found.why
    assert (
        retypes(
            NOW,
            [pending(job(1), pool=frozenset({"a1"}))],
            lambda p: promise(),
            free_capacity(**A30_FULL),
            RetypeHistory(),
        )
        == []
    )


def test_retry_after_out_of_memory_is_not_retyped_to_less_memory() -> None:
    made = promise_from_record(record(hints={"retry": "oom"}, chosen="mig:1g.10gb:1"))
    assert made is not None
    used = [P("1g.20gb"), *[P("1g.10gb")] * 5]
    free = free_capacity(a1=None, h2=None, h1=plan_free(H100, EMPTY, used))  # one 1g.10gb is idle
    again = pending(job(1, "2g.20gb", restarts=1))
    assert retypes(NOW, [again], lambda p: made, free, RetypeHistory()) == []
    first = pending(job(1, "2g.20gb"))
    assert only_retype(retypes(NOW, [first], lambda p: made, free, RetypeHistory())).after == P("1g.10gb")
    assert only_retype(retypes(NOW, [again], lambda p: made, free_capacity(**A30_FULL), RetypeHistory())).after == P(
        "1g.20gb"
    )


def test_job_with_the_least_deadline_slack_is_retyped_first() -> None:
    late = job(1, submit=NOW - 65.0)  # takes 60 s of its 120 s on its own profile: too late now
    early = job(2, submit=NOW - 5.0)
    free = free_capacity(a1=None, h2=None, h1=plan_free(H100, EMPTY, [P("1g.10gb")] * 6))
    found = only_retype(retypes(NOW, [pending(early), pending(late)], lambda p: promise(), free, RetypeHistory()))
    assert found.targets == ("1",)


def test_job_whose_best_profile_is_idle_precedes_one_that_may_only_use_it() -> None:
    stranger, own = job(1, submit=NOW - 20), job(2, "2g.12gb")
    made = {1: promise(bad=("1g.10gb", "1g.20gb")), 2: promise("2g.12gb", bad=("1g.6gb", "1g.10gb", "1g.20gb"))}
    full = Layout([Slot.of("4g.40gb", 0, 4), Slot.of("1g.10gb", 6, 1)])
    free = free_capacity(a1=None, h2=None, h1=full)
    found = only_retype(
        retypes(NOW, [pending(stranger), pending(own)], lambda p: made[p.row.job_id], free, RetypeHistory())
    )
    assert (found.targets, found.after) == (("2",), P("2g.20gb"))


def test_job_with_several_slices_is_retyped_only_if_all_of_them_fit() -> None:
    free = free_capacity(a1=None, h2=None, h1=plan_free(H100, EMPTY, [P("1g.10gb")] * 6))
    assert retypes(NOW, [pending(job(1, each=2))], lambda p: promise(), free, RetypeHistory()) == []
    found = only_retype(
        retypes(NOW, [pending(job(1, each=2))], lambda p: promise(), free_capacity(**A30_FULL), RetypeHistory())
    )
    assert found.fields() is not None and found.profile_text(found.after) == "1g.10gb:2"
    assert found.fields()["Gres"] == "mig:1g.10gb:2"


@given(
    jobs=st.lists(
        st.tuples(st.sampled_from(["1g.6gb", "1g.10gb", "2g.20gb"]), st.floats(0, 500), st.integers(1, 3)),
        max_size=25,
    ),
    used=st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 4)),
)
def test_retyped_jobs_have_room_and_keep_their_guarantee(
    jobs: list[tuple[str, float, int]], used: tuple[int, int, int]
) -> None:
    layouts = {
        "h1": plan_free(H100, EMPTY, [P("1g.10gb")] * used[0]),
        "h2": plan_free(H100, EMPTY, [P("2g.20gb")] * used[1]),
        "a1": plan_free(A30, EMPTY, [P("1g.6gb")] * used[2]),
    }
    waiting = [
        pending(job(n, name, slice_count, submit=NOW - waited))
        for n, (name, waited, slice_count) in enumerate(jobs, start=1)
    ]
    found = retypes(NOW, waiting, lambda p: promise(p.profile.name), free_capacity(**layouts), RetypeHistory())
    assert len({retype.targets for retype in found}) == len(found)
    for retype in found:
        assert retype.after in {option.profile for option in promise(retype.pending.profile.name).options}
        assert retype.after != retype.pending.profile
    wanted = Counter({(retype.after): 0 for retype in found})
    for retype in found:
        wanted[retype.after] += retype.pending.slice_count
    for profile, count in wanted.items():  # room for each profile alone: at least this much
        fitting = sum(
            len(plan_free(GPUS[name], layout, [profile] * 8))
            for name, layout in layouts.items()
            if profile in GPUS[name]
        )
        assert count <= fitting


# -- limits of re-typing -----------------------------------------------------------------------------------------------


def test_job_is_not_retyped_again_before_the_hold_time_is_over() -> None:
    history = RetypeHistory(hold_s=30.0)
    found = only_retype(retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history))
    history.note(found, NOW)
    retyped = pending(job(1, "1g.10gb"))
    free = free_capacity(h1=None, h2=None)
    assert retypes(NOW + 29, [retyped], lambda p: promise(), free, history) == []
    back = only_retype(retypes(NOW + 30, [retyped], lambda p: promise(), free, history))
    assert back.after == P("1g.6gb")


def test_hold_time_is_over_if_the_clock_is_set_back() -> None:
    history = RetypeHistory(hold_s=30.0)
    found = only_retype(retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history))
    history.note(found, NOW)
    retyped = pending(job(1, "1g.10gb"))
    assert retypes(NOW - 3600, [retyped], lambda p: promise(), free_capacity(h1=None, h2=None), history)


def test_refused_retype_is_not_tried_again() -> None:
    history = RetypeHistory(hold_s=0.0)
    found = only_retype(retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history))
    history.bar(found)
    other = only_retype(retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history))
    assert other.after == P("1g.20gb")
    history.forget_but([])
    assert only_retype(
        retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history)
    ).after == P("1g.10gb")


def test_retype_is_undone_if_a_qos_limit_then_holds_the_job() -> None:
    history = RetypeHistory()
    found = only_retype(retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history))
    history.note(found, NOW)
    waits = job(1, "1g.10gb")
    assert undone([waits], history) == []
    back = only_retype(undone([replace(waits, reason="QOSMaxGRESPerUser")], history))
    assert back.after == P("1g.6gb") and "QOSMaxGRESPerUser" in back.why
    later = only_retype(
        retypes(NOW + 99, [pending(job(1, submit=NOW + 98))], lambda p: promise(), free_capacity(**A30_FULL), history)
    )
    assert later.after == P("1g.20gb")
    split = replace(waits, array_job=1, array_task="0-9998:2", tasks=5000, reason="QOSMaxGRESPerUser")
    assert undone([split], history) == []  # no command can name the remaining tasks
    assert undone([replace(job(1), reason="QOSMaxGRESPerUser")], history) == []  # it has its original profile
    assert undone([replace(job(2), reason="QOSMaxGRESPerUser")], history) == []  # it was never re-typed


def test_retype_is_undone_once_although_the_limit_remains() -> None:
    history = RetypeHistory()
    found = only_retype(retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history))
    history.note(found, NOW)
    back = only_retype(undone([job(1, "1g.10gb", reason="AssocGrpGRES")], history))
    history.note(back, NOW)
    assert undone([job(1, reason="AssocGrpGRES")], history) == []


def test_profile_that_the_user_requested_since_a_retype_is_kept() -> None:
    history = RetypeHistory()
    history.note(
        only_retype(retypes(NOW, [pending(job(1))], lambda p: promise(), free_capacity(**A30_FULL), history)), NOW
    )
    assert undone([job(1, "3g.40gb", reason="QOSMaxGRESPerUser")], history) == []


@pytest.mark.parametrize(
    "row",
    [
        job(1, comment=""),
        job(1, comment="migbatch: model=x"),
        job(1, comment="my own\nwords [mig:1g.6gb:1#abc12345]"),
        job(1, comment='"; scontrol shutdown; " [mig:1g.6gb:1#abc12345]'),
        job(1, comment="[mig:1g.6gb:1]"),
        job(1, comment="[mig:1g.6gb:1#loanabc1]"),
        job(1, comment="[mig:1g.6gb:1,2g.12gb:1#abc12345]", gres="gres/mig:1g.6gb:1,gres/mig:2g.12gb:1"),
        job(1, comment="[mig:1g.6gb:1#abc12345] [mig:1g.6gb:1#abc12345]"),
        job(1, gres="gres/mig:2g.12gb:1"),  # set by an administrator
        job(1, gres="gres/mig:loan:1"),
        job(1, gres="gres:mig:1g.6gb:1"),  # from a Slurm that would add the new type to the old one
        job(1, num_nodes=2),
        job(1, het_job=1),
        job(1, reason="JobHeldUser"),
        job(1, reason="QOSMaxGRESPerUser"),
        job(1, reason="Dependency"),
        job(1, state="RUNNING"),
    ],
)
def test_jobs_that_are_never_retyped(row: JobRow) -> None:
    rows = [NodeRow("a1", frozenset({"IDLE"}), partitions=("mig",))]
    wanted = demands([row], rows, {"a1"}, NOW)
    assert list(without_place(wanted, {row.job_id: row}, {}, free_capacity())) == []


def test_job_placed_by_supply_is_not_retyped() -> None:
    rows = [NodeRow("a1", frozenset({"IDLE"}), partitions=("mig",))]
    row, array = job(1), job(2, array_job=2, array_task="1-5", tasks=5)
    wanted = demands([row, array], rows, {"a1"}, NOW)
    jobs, free = {1: row, 2: array}, free_capacity()
    assert [(p.row.job_id, p.copies) for p in without_place(wanted, jobs, {1: 1, 2: 3}, free)] == [(2, 2)]
    assert [(p.row.job_id, p.copies) for p in without_place(wanted, jobs, {}, free)] == [(1, 1), (2, 5)]


def test_jobs_where_nothing_is_free_for_their_slices_are_not_considered() -> None:
    pools = {1: EVERYWHERE, 2: frozenset({"a1"}), 3: frozenset({"a1"})}
    counts = {1: 1, 2: 1, 3: 2}
    rows = {n: job(n, comment=f"[mig:1g.6gb:{count}#abc12345]") for n, count in counts.items()}
    wanted = [Demand(n, ((P("1g.6gb"), count),), pools[n]) for n, count in counts.items()]
    room_for_one = free_capacity(h1=None, h2=None, a1=plan_free(A30, EMPTY, [P("1g.6gb")] * 3))
    for free, expected in ((free_capacity(a1=None), [1]), (room_for_one, [1, 2])):
        assert [p.row.job_id for p in without_place(wanted, rows, {}, free)] == expected


def test_retype_to_a_slower_slice_keeps_the_time_limit() -> None:
    slow = promise_of(P("1g.6gb"), candidates(rates={"1g.6gb": 10.0, "1g.10gb": 6.0}), 600, 120)

    def chosen(limit_s: int | None) -> list[Retype]:
        return retypes(
            NOW, [pending(job(1, time_limit_s=limit_s))], lambda p: slow, free_capacity(**A30_FULL), RetypeHistory()
        )

    assert only_retype(chosen(None)).after == only_retype(chosen(100)).after == P("1g.10gb")
    assert chosen(90) == []


# -- the update sent to Slurm ------------------------------------------------------------------------------------------


def test_retype_changes_gres_and_marker_and_nothing_else() -> None:
    row = job(1, gres="gres/other:2,gres/mig:1g.6gb:1,gres/gpu:h100:1")
    change = Retype(pending(row), (), P("1g.10gb"), "")
    fields = change.fields()
    assert fields is not None and fields["Gres"] == "other:2,gpu:h100:1,mig:1g.10gb:1"
    assert fields["Comment"] == "migbatch: model=resnet-50 items=600 deadline=2m [mig:1g.10gb:1#abc12345]"
    assert parse_comment(fields["Comment"]) == Grant([(P("1g.10gb"), 1)], "abc12345")


def test_job_is_not_retyped_if_its_comment_has_no_room_for_the_marker() -> None:
    mark = "[mig:1g.6gb:1#abc12345]"
    row = job(1, comment="x" * (1024 - len(mark) - 1) + " " + mark)
    assert Retype(pending(row), (), P("1g.10gb"), "").fields() is None
    assert Retype(pending(row), (), P("2g.6gb"), "").fields() is not None


def test_unplaced_tasks_of_an_array_are_retyped_starting_with_the_last() -> None:
    row = job(9, array_job=9, array_task="2-8:2,11%3", tasks=5)
    free = free_capacity(a1=None, h2=None, h1=plan_free(H100, EMPTY, [P("1g.10gb")] * 5))
    found = only_retype(retypes(NOW, [pending(row, copies=4)], lambda p: promise(), free, RetypeHistory()))
    assert found.tasks == (8, 11) and found.targets == ("9_8", "9_11") and found.names == ("9_8", "9_11")


def test_whole_array_is_addressed_by_its_pending_tasks() -> None:
    row = job(9, array_job=9, array_task="4-7", tasks=4)
    found = only_retype(
        retypes(NOW, [pending(row, copies=4)], lambda p: promise(), free_capacity(**A30_FULL), RetypeHistory())
    )
    assert found.targets == ("9_[4-7]",) and found.names == ("9",)
    single = replace(row, job_id=12, array_task="7", tasks=1)
    assert Retype(pending(single), (), P("1g.10gb"), "").targets == ("9_7",) and name_of(single) == "9_7"


def test_capacity_of_a_node_is_computed_once_and_only_when_it_is_needed() -> None:
    computed: list[str] = []

    def capacity_of(name: str) -> NodeCapacity:
        computed.append(name)
        return NodeCapacity([] if name == "h0" else [(H100, EMPTY)])

    nodes = [f"h{n}" for n in range(4)]
    capacity = FreeCapacity(dict.fromkeys(nodes, frozenset({P("7g.80gb")})), capacity_of)
    assert not computed
    assert capacity.count(frozenset(nodes), P("7g.80gb"), enough=1) == 1
    assert computed == ["h0", "h1"]
    taken = [capacity.take(frozenset(nodes), P("7g.80gb")) for _ in nodes]
    assert taken == ["h1", "h2", "h3", None]
    assert computed == nodes


def test_tasks_that_do_not_fit_one_list_are_addressed_one_by_one() -> None:
    row = job(9, array_job=9, array_task="1-4000:2", tasks=2000)
    nodes = {f"h{n}": H100 for n in range(400)}
    pool = frozenset(nodes)
    wide = FreeCapacity(
        {name: frozenset(info.profile for info in gpu.profiles) for name, gpu in nodes.items()},
        {name: NodeCapacity([(gpu, EMPTY)]) for name, gpu in nodes.items()}.__getitem__,
    )
    found = only_retype(
        retypes(NOW, [pending(row, copies=2000, pool=pool)], lambda p: promise(), wide, RetypeHistory())
    )
    assert found.tasks and found.targets == tuple(f"9_{task}" for task in found.tasks)


def test_task_started_during_a_retype_of_its_array_gets_its_marker_back() -> None:
    good = job(9, "1g.10gb", array_job=9, array_task="4-6", tasks=3)
    odd = replace(good, job_id=12, array_task="3", tasks=1, state="RUNNING", gres="gres/mig:1g.6gb:1")
    # `chg`: its user may change the GRES before Slurm gets this
    right = "migbatch: model=resnet-50 items=600 deadline=2m [mig:1g.6gb:1#chgabc12345]"
    assert marker_corrections([good, odd, job(7)], {9}) == {"9_3": {"Comment": right}}
    assert marker_corrections([good, odd], set()) == {}
    assert marker_corrections([replace(good, gres="gres/mig:1g.6gb:1")], {9}) == {"9_[4-6]": {"Comment": right}}
    assert marker_corrections([replace(good, gres="gres/mig:1g.6gb:1", array_task="4-9998:2", tasks=4998)], {9}) == {}


def test_tasks_of_one_array_may_be_retyped_to_different_profiles() -> None:
    row = job(9, array_job=9, array_task="1-6", tasks=6)
    free = free_capacity(a1=None, h2=None, h1=Layout([Slot.of("3g.40gb", 0, 4), Slot.of("1g.20gb", 4, 2)]))
    found = retypes(NOW, [pending(row, copies=6)], lambda p: promise(), free, RetypeHistory())
    tasks = [task for retype in found for task in retype.tasks]
    assert len(tasks) == len(set(tasks)) and set(tasks) <= set(range(1, 7)) and tasks


@given(st.sets(st.integers(0, 60), min_size=1))
def test_task_ranges_round_trip(numbers: set[int]) -> None:
    ordered = tuple(sorted(numbers))
    assert expand_tasks(fold_tasks(ordered)) == ordered
    assert expand_tasks(f"[{fold_tasks(ordered)}%4]") == ordered


def test_grant_is_parsed_from_the_marker() -> None:
    assert marked("[mig:1g.6gb:1#abc12345]") == Grant([(P("1g.6gb"), 1)], "abc12345")


# -- capacity that supply leaves ---------------------------------------------------------------------------------------


def node(name: str, *leases: Lease, offered: Layout = EMPTY, mode: Mode = Mode.OPEN) -> Node:
    return Node(name, (Gpu(f"GPU-{name}", GPUS[name], leases, offered),), mode=mode)


def busy(name: str, profile: str, count: int, until: float | None = NOW + 60) -> list[Lease]:
    return [
        Lease(slot, 100 + i, until) for i, slot in enumerate(plan_free(GPUS[name], EMPTY, [P(profile)] * count).slots)
    ]


def left(nodes: list[Node], wanted: list[Demand]):  # type: ignore[no-untyped-def]
    plan = Planner().plan(nodes, wanted, NOW)
    return plan, of_plan({n.name: n for n in nodes}, plan)


def test_capacity_planned_for_other_jobs_is_not_free() -> None:
    nodes = [node("h1"), node("a1", *busy("a1", "1g.6gb", 4))]
    _, free = left(nodes, [Demand(1, ((P("7g.80gb"), 1),), EVERYWHERE)])
    assert free.count(EVERYWHERE, P("1g.10gb")) == 0
    _, free = left(nodes, [])
    assert free.count(EVERYWHERE, P("1g.10gb")) == 7 and free.count(EVERYWHERE, P("1g.6gb")) == 0
    assert free.count(EVERYWHERE, P("1g.10gb"), 2) == 3 and free.count(EVERYWHERE, P("1g.10gb"), 1, 2) == 2
    assert P("1g.6gb") in free.kinds(EVERYWHERE) and P("1g.6gb") not in free.kinds(frozenset({"h1"}))


def test_gpu_with_a_reservation_has_no_free_capacity() -> None:
    nodes = [node("h1", *busy("h1", "1g.10gb", 2)), node("a1")]
    plan, free = left(nodes, [Demand(1, ((P("7g.80gb"), 1),), EVERYWHERE, limit_s=60)])
    assert plan.reservations and free.count(EVERYWHERE, P("1g.10gb")) == 0 and free.count(EVERYWHERE, P("1g.6gb")) == 4


def test_frozen_node_offers_only_its_existing_slots_and_closed_node_none() -> None:
    offered = Layout([Slot.of("3g.40gb", 0, 4), Slot.of("1g.10gb", 4, 1)])
    _, free = left([node("h1", offered=offered, mode=Mode.FROZEN)], [])
    assert free.count(EVERYWHERE, P("3g.40gb")) == 1 and free.count(EVERYWHERE, P("2g.20gb")) == 0
    _, free = left([node("h1", offered=offered, mode=Mode.CLOSED)], [])
    assert free.count(EVERYWHERE, P("3g.40gb")) == 0 and free.kinds(EVERYWHERE) == frozenset()


def test_jobs_of_a_full_gpu_model_are_retyped_for_an_idle_model() -> None:
    """One GPU model is full and another idle: jobs that the planner places are left alone, the others are re-typed."""
    nodes = [node("a1", *busy("a1", "1g.6gb", 3)), node("h1")]
    rows = [job(n) for n in range(1, 6)]
    wanted = [Demand(row.job_id, ((P("1g.6gb"), 1),), EVERYWHERE) for row in rows]
    plan, free = left(nodes, wanted)
    placed = {name: p.copies for name, p in plan.placed.items()}
    assert placed == {1: 1}
    waiting = without_place(wanted, {row.job_id: row for row in rows}, placed, free)
    found = retypes(NOW, waiting, lambda p: promise(), free, RetypeHistory())
    assert [(retype.targets, retype.after.name) for retype in found] == [((str(n),), "1g.10gb") for n in (2, 3, 4, 5)]
    again = [Demand(n, ((P("1g.10gb" if n > 1 else "1g.6gb"), 1),), EVERYWHERE) for n in range(1, 6)]
    assert set(Planner().plan(nodes, again, NOW).placed) == {1, 2, 3, 4, 5}


def test_without_managed_supply_capacity_comes_from_node_counts() -> None:
    def row(name: str, gres: dict[str, int], used: dict[str, int], **changes: object) -> NodeRow:
        return NodeRow(name, frozenset({"IDLE"}), gres=gres, used=used, partitions=("mig",), **changes)  # type: ignore[arg-type]

    rows = [row("n1", {"1g.10gb": 2, "3g.40gb": 1, "none": 3}, {"1g.10gb": 1}), row("n2", {"1g.10gb": 1}, {})]
    rows.append(NodeRow("n3", frozenset({"IDLE", "DRAIN"}), gres={"3g.40gb": 5}, partitions=("mig",)))
    pool = frozenset({"n1", "n2", "n3"})
    wanted = [Demand(n, ((P("1g.10gb"), 1),), pool) for n in (1, 2, 3, 4)]
    free, placed = of_counts(rows, wanted)
    assert placed == {1: 1, 2: 1}
    assert free.count(pool, P("1g.10gb")) == 0 and free.count(pool, P("3g.40gb")) == 1
    assert free.take(pool, P("3g.40gb")) == "n1" and free.take(pool, P("3g.40gb")) is None


def test_without_managed_supply_a_job_on_several_nodes_is_placed_on_all_or_not_at_all() -> None:
    counts = {"n1": 3, "n2": 1, "n3": 1}
    rows = [NodeRow(name, frozenset({"IDLE"}), gres={"1g.10gb": count}) for name, count in counts.items()]
    two_nodes = [Demand(n, ((P("1g.10gb"), 1),), frozenset(counts), nodes=2) for n in (1, 2, 3)]
    assert of_counts(rows, two_nodes)[1] == {1: 1, 2: 1}
    assert of_counts(rows, [Demand(1, ((P("1g.10gb"), 1),), frozenset(counts), nodes=4)])[1] == {}
