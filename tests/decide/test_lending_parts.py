"""The parts of a lending round: states of a loan, forecast, speeds and costs, slices promised to inference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.demand import demands
from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.model import Gpu, Lease, Node
from slurm_migbatch.decide.lending import elastic_jobs as module
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.elastic_jobs import ElasticJobs, report_of
from slurm_migbatch.decide.lending.forecast import Expectation
from slurm_migbatch.decide.lending.idleness import Idleness
from slurm_migbatch.decide.lending.inputs import LendingInputs, PoolBook, job_views_of
from slurm_migbatch.decide.lending.ledger import Ledger
from slurm_migbatch.decide.lending.loan import Cause, JobView, Loan, LoanHistory, State
from slurm_migbatch.decide.lending.model import LendingRules, LoanOrder, OrderKind
from slurm_migbatch.decide.lending.pools import delayed
from slurm_migbatch.decide.lending.round import decide
from slurm_migbatch.decide.lending.stage import LendingMemory, LendingSettings, Refusals, ends_of
from slurm_migbatch.decide.lending.values import Target
from slurm_migbatch.decide.lending.view import view_of
from slurm_migbatch.decide.recording.codec import Codec
from slurm_migbatch.decide.recording.memory import encode, restore, take
from slurm_migbatch.decide.snapshot import LendingPast, Report, RunProgress
from slurm_migbatch.decide.supply.moves import SOON_S
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.mig.layout import EMPTY, Layout
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.loans import LoanHints
from tests.support.supply_gpus import H100, slot

ONE, TWO, THREE, ALL = (Profile.parse(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"))
NOW = 1_000_000.0


def elastic(job: int, kind: str = "loan", **more: object) -> JobRow:
    values = {"partition": "train", "comment": f"migbatch: role=train signal=usr1 [mig:{kind}:1#loan1]", **more}
    return JobRow(job, gres=f"gres/mig:{kind}:1", **values)  # type: ignore[arg-type]


def job_view(row: JobRow) -> JobView:
    return job_views_of([row], ["train"])[row.job_id]


# -- the record at a start ---------------------------------------------------------------------------------------------


def test_speed_of_a_run_that_has_shared_its_slice_is_not_read_from_the_record_as_of_one_alone() -> None:
    memory = LendingMemory(LendingSettings())
    alone, shared = (RunProgress(job, 0, "7g.80gb", items=100.0, items_per_s=10.0, shared=job == 6) for job in (5, 6))
    memory.load(LendingPast(runs=(alone, shared)), NOW)
    assert memory.elastic_jobs._heard.keys() == {5}
    assert memory.slice_sharing.shared == {(6, 0)}
    rows = [elastic(job, "7g.80gb", state="RUNNING", nodes=("n1",), start=NOW - 60) for job in (5, 6)]
    memory.slice_sharing.update(NOW, {}, {}, job_views_of(rows, ["train"]), {})
    assert memory.slice_sharing.shared == {(6, 0)}, "as long as Slurm lists it"


# -- refused orders ----------------------------------------------------------------------------------------------------


def test_refused_order_is_repeated_if_the_clock_is_set_back() -> None:
    refusals = Refusals()
    refusals.note(LoanOrder(OrderKind.RELEASE, 7, 0, "no reason"), NOW)
    assert refusals.barred(OrderKind.RELEASE, NOW + 1) == {7} and not refusals.barred(OrderKind.RELEASE, NOW + 2)
    assert not refusals.barred(OrderKind.RELEASE, NOW - 3600)


# -- the ledger --------------------------------------------------------------------------------------------------------

STATES = ["loan", "pending", "RUNNING", "COMPLETING", "gone", "requeued"]


@given(st.lists(st.sampled_from([*STATES, "release", "signal", "requeue", "withdraw", "took", "refused"]), max_size=40))
def test_loan_is_recorded_whenever_it_changes_and_ends_once(steps: list[str]) -> None:
    """For any sequence of states and actions, the record equals the ledger and has at most one open loan per job."""
    ledger, restarts, now = Ledger(), 0, NOW
    record: dict[tuple[int, int, float], Loan] = {}
    row = elastic(7)
    for step in steps:
        now += 1.0
        loan = ledger.open.get(7)
        if step in STATES:
            if step == "requeued":
                restarts += 1
            state = {"loan": "PENDING", "pending": "PENDING", "requeued": "PENDING"}.get(step, step)
            kind = "loan" if step == "loan" else "1g.10gb"
            row = elastic(7, kind, state=state, restarts=restarts, start=now if state != "PENDING" else None)
            ledger.follow({} if step == "gone" else {7: job_view(row)}, {}, {}, now)
        elif step == "release" and loan is None and row.pending:
            ledger.release(row, ONE, "idle", now)
        elif step == "signal" and loan is not None and loan.state is State.RUNNING:
            ledger.signal(7, Cause.RECLAIM, "job 9")
        elif step == "requeue" and loan is not None and loan.state in (State.RUNNING, State.SIGNALLED):
            ledger.requeue(7, Cause.RECLAIM, "job 9")
        elif step == "withdraw" and loan is not None and loan.state is State.RELEASED:
            ledger.withdraw(7, Cause.LATE, "late")
        elif step == "took":
            ledger.confirm(7, now)
        elif step == "refused":
            ledger.refused(7, "no", now)
        for changed in ledger.unsaved():
            key = changed.job_id, changed.restart, changed.decided
            assert key not in record or record[key].ended is None, "an ended loan does not change"
            record[key] = changed
        going = {key: entry for key, entry in record.items() if entry.ended is None}
        assert list(going.values()) == list(ledger.open.values())
        assert all(run.state is not State.ENDED for run in going.values())
        fresh = Ledger()
        fresh.load(Loan.from_row(entry.row()) or pytest.fail() for entry in record.values())
        assert (fresh.open, fresh.past) == (ledger.open, ledger.past)


def test_checkpoint_counts_if_it_is_newer_than_the_signal() -> None:
    ledger = Ledger()
    row = elastic(7, "1g.10gb", state="RUNNING", start=NOW)
    ledger.follow({7: job_view(row)}, {}, {(7, 0): Report(NOW + 5)}, NOW + 10)
    ledger.signal(7, Cause.RECLAIM, "job 9")
    ledger.confirm(7, NOW + 10.0)
    ledger.follow({7: job_view(row)}, {}, {(7, 0): Report(NOW + 8.9)}, NOW + 11)
    assert ledger.open[7].checkpoint is None
    ledger.follow({7: job_view(row)}, {}, {(7, 0): Report(NOW + 10)}, NOW + 12)
    assert ledger.open[7].checkpoint == NOW + 10


def test_loan_is_unchanged_while_the_row_of_its_job_cannot_be_read() -> None:
    ledger = Ledger()
    running = elastic(7, "1g.10gb", state="RUNNING", start=NOW)
    ledger.follow({7: job_view(running)}, {}, {}, NOW)
    before = dict(ledger.open)
    assert ledger.follow({}, {}, {}, NOW + 1, unread={7}) == []
    assert ledger.open == before
    (ended,) = ledger.follow({}, {}, {}, NOW + 2)
    assert ended.cause is Cause.LEFT


def test_invalid_row_of_the_record_is_not_read_as_a_loan() -> None:
    good = Loan(7, 0, NOW, "1g.10gb", State.RUNNING).row()
    assert Loan.from_row(good) is not None
    for bad in ({"state": "?"}, {"profile": "huge"}, {"cause": "whim"}):
        assert Loan.from_row({**good, **bad}) is None


# -- the delay after a requeue -----------------------------------------------------------------------------------------


def test_only_slurms_requeue_delay_after_a_loan_counts_as_delay() -> None:
    ledger = Ledger()
    ledger.load([Loan(7, 0, NOW, "1g.10gb", State.ENDED, started=NOW, ended=NOW + 5, cause=Cause.RECLAIM)])
    past = ledger.past[7]
    mine = elastic(7, restarts=1, reason="BeginTime", eligible=NOW + 120)
    assert delayed(mine, past, NOW)
    assert not delayed(replace(mine, eligible=NOW + 3600), past, NOW), "the user's own --begin"
    assert not delayed(replace(mine, restarts=2), past, NOW), "that requeue was not after a loan"
    assert not delayed(mine, None, NOW)
    assert not delayed(replace(mine, reason="JobHeldUser"), past, NOW)
    assert delayed(replace(mine, restarts=2), replace(past, restart=1), NOW)
    assert delayed(replace(mine, reason="None"), past, NOW), "just requeued: Slurm has not given a reason yet"
    assert not delayed(replace(mine, reason="None", eligible=NOW - 1), past, NOW)


def test_slurmd_may_confuse_a_run_with_the_last_until_slurms_delay_is_over() -> None:
    ledger = Ledger()
    ledger.load([Loan(7, 0, NOW - 90, "1g.10gb", State.RUNNING, started=NOW - 60, node="n1")])
    back = elastic(7, restarts=1, reason="BeginTime", eligible=NOW + 31)
    ledger.follow({7: job_view(back)}, {}, {}, NOW)
    assert ledger.taken_for_last(7) == {"n1"} and ledger.past[7].node == "n1"
    hurried = replace(back, eligible=NOW, reason="Priority")
    ledger.follow({7: job_view(hurried)}, {}, {}, NOW + 31)
    assert ledger.taken_for_last(7) == {"n1"}, "slurmd removes credentials at most every two seconds"
    ledger.follow({7: job_view(hurried)}, {}, {}, NOW + 34)
    assert not ledger.taken_for_last(7)
    fresh = Ledger()
    fresh.load([replace(ended) for ended in [Loan(7, 0, NOW, "1g.10gb", State.ENDED, ended=NOW, node="n1")]])
    fresh.follow({7: job_view(hurried)}, {}, {}, NOW + 34)
    assert fresh.taken_for_last(7) == {"n1"}, "the record has no time for it"


# -- the forecast ------------------------------------------------------------------------------------------------------


def test_length_of_a_gap_is_forecast_by_gaps_at_the_same_time_of_day() -> None:
    days, day = 5, 86_400.0
    noon = 20_000 * day + 12 * 3600.0
    # Every day from eleven to one three slices are needed for a minute, every five minutes.
    begins = [noon - 3600.0 - k * day + 300.0 * n for k in range(days, 0, -1) for n in range(24)]
    expected = Expectation()
    expected.learn([("2g.20gb", begin, begin + 60.0) for begin in begins for _ in range(3)], noon)
    use = frozenset({(1, 0), (2, 0), (3, 0)})
    for at, kept in ((noon + 900.0, {TWO: 3}), (noon + 8 * 3600.0, {})):
        expected.update({TWO: use}, {}, at, gpus=4)
        assert expected.reserve(at, 600.0, 0.2) == {}, "the expected demand has arrived"
        expected.update({}, {}, at + 60.0, gpus=4)
        assert expected.reserve(at + 60.0 + 150.0, 600.0, 0.2) == kept


def test_run_that_began_before_migbatchd_is_not_a_new_start() -> None:
    expected = Expectation()
    expected.learn([("1g.10gb", NOW - 100, None)], NOW)
    expected.update({ONE: frozenset({(1, 0)})}, {}, NOW, gpus=4)
    assert expected.reserve(NOW, 600.0, 0.95) == {}


def test_invalid_profiles_in_the_record_are_ignored() -> None:
    expected = Expectation()
    expected.learn([("rubbish", NOW - 100, None)], NOW)
    assert expected.reserve(NOW, 600.0, 0.95) == {}


# -- speeds and costs --------------------------------------------------------------------------------------------------


def elastic_jobs(predicted: dict[Profile, float] | None = None) -> ElasticJobs:
    made = ElasticJobs(restart_s=30.0, checkpoint_s=10.0)
    made.use(SimpleNamespace(version="1", training_speeds=lambda hints, partition: predicted or {}))
    made.gpus([H100])
    return made


def test_speeds_have_only_profiles_within_min_max_and_memory() -> None:
    training = replace(job_view(elastic(7)), hints=LoanHints(min=ONE, max=THREE, mem_mib=15_000))
    found = elastic_jobs().speeds(training)
    assert set(found) == {Profile.parse("1g.20gb"), TWO, THREE}
    assert found[THREE] == pytest.approx(math.sqrt(3 / 7))


def test_predicted_speeds_are_used_for_models_that_the_predictor_knows() -> None:
    known = replace(job_view(elastic(7)), hints=LoanHints(max=THREE, model="bert-large"))
    assert elastic_jobs({ONE: 0.2, THREE: 0.5, ALL: 1.0}).speeds(known) == {ONE: 0.2, THREE: 0.5}
    assert THREE in elastic_jobs({}).speeds(known), "without a prediction the usual speed is expected"


def test_rates_that_a_job_achieved_are_combined_with_expected_speeds() -> None:
    made, training = elastic_jobs(), job_view(elastic(7))
    usual = made.speeds(training)
    made.recall((7, 0), ONE, Report(items=1000.0, rate=100.0))
    assert made.speeds(training) == pytest.approx(usual), "a report on one profile changes nothing"
    made.recall((7, 1), THREE, Report(items=1000.0, rate=100.0))
    found = made.speeds(training)
    assert found[THREE] == pytest.approx(found[ONE]), "it does not gain"
    made.update({}, {})
    assert made.speeds(training) == usual


class Asked:
    """A predictor that knows every model, and the kinds of jobs that it was asked about."""

    version = "1"

    def __init__(self) -> None:
        self.kinds: list[tuple[int | None, str]] = []

    def training_speeds(self, hints: LoanHints, partition: str) -> dict[Profile, float]:
        self.kinds.append((hints.items, partition))
        return {ONE: 0.2, ALL: 1.0}


def different(job: int, items: int | None = None, partition: str = "train", model: str = "bert-large") -> JobView:
    """A job of a kind of its own."""
    hints = LoanHints(model=model, items=job if items is None else items)
    return JobView(replace(elastic(job), partition=partition), hints)


@pytest.mark.parametrize("model", ["bert-large", None], ids=["predicted", "usual"])
def test_estimates_of_listed_jobs_are_kept_however_many_they_are(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(module, "_MOST_KINDS", 10)
    made, asked = elastic_jobs(), Asked()
    made.use(asked)
    queue = {job: different(job, model=model) for job in range(1, 41)}
    seen = []
    for _ in range(3):
        made.update(queue, {})
        seen.append([made.speeds(view) for view in queue.values()])
    assert len(asked.kinds) == (40 if model else 0), "each kind once"
    assert all(a is b for speeds in seen[1:] for a, b in zip(speeds, seen[0], strict=True)), (
        "nothing is estimated again"
    )
    for first in range(41, 1041, 20):
        passing = {job: different(job, model=model) for job in range(first, first + 20)}
        made.update({**queue, **passing}, {})
        assert [made.speeds(view) for view in queue.values()] == seen[0]
        for view in passing.values():
            made.speeds(view)
        assert max(len(made._predicted), len(made._usual)) <= 2 * 60 + 20, "those of jobs that have left are dropped"
    assert len(asked.kinds) == (1040 if model else 0)


@given(
    st.lists(
        st.dictionaries(st.integers(1, 6), st.tuples(st.integers(1, 9), st.sampled_from("ab"), st.booleans())),
        max_size=12,
    ),
    st.integers(0, 12),
)
@example([{n: (n, "a", True) for n in (1, 2, 3)}, {1: (4, "a", False)}, {1: (1, "a", True)}], 1)
def test_predictions_asked_for_depend_only_on_what_recordings_keep(
    rounds: list[dict[int, tuple[int, str, bool]]], restored: int
) -> None:
    """A replay begins with the state in a recording and has only the answers that were needed then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_KINDS", 2)
        views = {
            (job, items, partition): different(job, items, partition)
            for job in range(1, 7)
            for items in range(1, 10)
            for partition in "ab"
        }
        made, asked, again, answers = elastic_jobs(), Asked(), elastic_jobs(), Asked()
        made.use(asked)
        for number, jobs in enumerate(rounds):
            if number == restored:
                restore(encode(take(made), Codec(), ElasticJobs), again, Codec())
                again.use(answers)
                asked.kinds.clear()
            for estimates in (made, again) if number >= restored else (made,):
                estimates.update({job: views[job, items, name] for job, (items, name, _) in jobs.items()}, {})
                for job, (items, name, needed) in jobs.items():
                    if needed:
                        estimates.speeds(views[job, items, name])
            assert number < restored or answers.kinds == asked.kinds


def test_costs_of_stopping_a_job_follow_from_its_run_and_its_reports() -> None:
    made = elastic_jobs()
    training = job_view(elastic(7, "1g.10gb", state="RUNNING", start=NOW - 500))
    assert made.restart_s(training, NOW) == 40.0
    silent = replace(training, hints=replace(training.hints, signal=None))
    assert made.restart_s(silent, NOW) == 30.0 + 500.0, "it loses its work"
    made.report((7, 0), Report(checkpoint=NOW - 20, ckpt_s=3.0))
    assert made.restart_s(training, NOW) == 33.0
    assert made.restart_s(silent, NOW) == 30.0 + 20.0
    assert made.left_s(replace(training, row=replace(training.row, time_limit_s=600)), NOW) == pytest.approx(
        100 / math.sqrt(7)
    )


def test_remaining_time_of_a_job_follows_from_its_items_and_its_reports() -> None:
    made = elastic_jobs({ONE: 0.2, THREE: 0.5, ALL: 1.0})
    training = replace(job_view(elastic(7)), hints=LoanHints(max=THREE, model="bert-large", items=10_000))
    assert made.needs_s(training) is None, "it has reported nothing"
    made.recall((7, 0), THREE, Report(items=1000.0, rate=50.0))
    assert made.needs_s(training) == pytest.approx(9000 / 100), "50 a second at half the speed of the whole GPU"
    assert made.needs_s(replace(training, hints=LoanHints(max=THREE, model="bert-large"))) is None
    assert made.needs_s(replace(training, hints=replace(training.hints, items=1000))) is None, (
        "it has done more items than it stated"
    )
    again = replace(training, row=replace(training.row, restarts=1))
    made.report((7, 1), Report(items=4000.0, rate=5.0))
    made.update({7: again}, {})
    assert made.needs_s(again) == pytest.approx(5000 / 100), "while it shared a slice: items count, but not the rate"


@given(
    st.dictionaries(
        st.sampled_from(["job", "restart", "checkpoint", "ckpt_s", "items", "throughput_per_s"]),
        st.one_of(st.none(), st.booleans(), st.text(max_size=5), st.floats(), st.integers(), st.lists(st.integers())),
    )
)
def test_values_that_a_job_reports_are_finite_numbers_or_none(event: dict[str, object]) -> None:
    report = report_of(event, NOW)
    if report is not None:
        for value in vars(report[1]).values():
            assert value is None or (math.isfinite(value) and value >= 0)
        assert report[1].checkpoint is None or report[1].checkpoint <= NOW + 60


# -- the view ----------------------------------------------------------------------------------------------------------


def lending_inputs(
    rows: list[JobRow],
    *leases: tuple[str, int, tuple[int, int]],
    empty: tuple[str, ...] = (),
    offered: str = "",
    starting: Mapping[Profile, int] = MappingProxyType({}),
) -> LendingInputs:
    """One node, one GPU; leases as profile, start and run. `empty`: more such nodes, without leases.

    `offered`: a slot that the node already offers; `starting`: slices of running jobs that have no lease yet.
    """
    slots = [(slot(f"{name}@{start}"), run) for name, start, run in leases]
    facts = {"n1": NodeFacts((GpuFacts("GPU-0", H100, tuple(sorted(slots))),))}
    facts |= {name: NodeFacts((GpuFacts(f"GPU-{name}", H100),)) for name in empty}
    nodes = [NodeRow(name, frozenset({"IDLE"}), partitions=("gpu", "train")) for name in facts]
    offer = Layout([slot(offered)]) if offered else EMPTY
    gpu = Gpu("GPU-0", H100, tuple(Lease(held, run[0], NOW + 1000) for held, run in slots), offer)
    wanted = demands(rows, nodes, facts, NOW)
    others = [Node(name, (Gpu(f"GPU-{name}", H100),)) for name in empty]
    plan = Planner().plan([Node("n1", (gpu,), unlocated=starting), *others], wanted, NOW)
    return LendingInputs(NOW, rows, nodes, facts, plan, wanted)


def back(job: int, restarts: int = 1, prefix: str = "gres:", **more: object) -> JobRow:
    """A job that was requeued a moment ago."""
    row = elastic(job, restarts=restarts, reason="BeginTime", eligible=NOW + 30, **more)
    return replace(row, gres=f"{prefix}mig:loan:1")


def ran(*jobs: JobRow, node: str = "n1") -> Ledger:
    """The ledger when the last run of each job has just ended on a node."""
    ledger = Ledger()
    loans = [Loan(row.job_id, row.restarts - 1, NOW - 60, "1g.10gb", State.RUNNING, started=NOW - 50) for row in jobs]
    ledger.load(replace(loan, node=node) for loan in loans)
    ledger.follow({row.job_id: job_view(row) for row in jobs}, {}, {}, NOW)
    return ledger


@pytest.mark.parametrize("restarts", [1, 2])
def test_up_to_slurm_2302_a_requeued_job_returns_early_only_on_other_nodes(restarts: int) -> None:
    row = back(1, restarts)
    (order,) = decide(view_of_inputs(lending_inputs([row], empty=("n2",)), ran(row)), LendingRules()).orders
    assert (order.kind, order.job, order.away) == (OrderKind.RELEASE, 1, ("n1",))
    new = back(1, restarts, "gres/")
    (order,) = decide(view_of_inputs(lending_inputs([new], empty=("n2",)), ran(new)), LendingRules()).orders
    assert order.away == (), "later releases start the Prolog of every run"


@pytest.mark.parametrize(("restarts", "node", "comes"), [(1, "n1", True), (2, "n1", False), (2, "", False)])
def test_early_return_without_another_node_is_tried_only_once(restarts: int, node: str, comes: bool) -> None:
    row = back(1, restarts)
    orders = decide(view_of_inputs(lending_inputs([row]), ran(row, node=node)), LendingRules()).orders
    assert [(order.job, order.away) for order in orders] == ([(1, ())] if comes else [])


def test_job_whose_last_node_is_unknown_waits_for_slurms_delay() -> None:
    row = back(1, 2)
    assert not decide(view_of_inputs(lending_inputs([row], empty=("n2",)), ran(row, node="")), LendingRules()).orders
    over = replace(row, eligible=NOW, reason="Priority")
    (order,) = decide(view_of_inputs(lending_inputs([over], empty=("n2",)), ran(row, node="")), LendingRules()).orders
    assert order.away == ()


@pytest.mark.parametrize(("listed", "nodes"), [("n1", [{"n2"}]), ("n9", [{"n1", "n2"}]), ("n[1-2]", [])])
def test_training_job_is_lent_nothing_on_nodes_that_its_user_excludes(listed: str, nodes: list[set[str]]) -> None:
    row = elastic(1, reason="ReqNodeNotAvail")
    text, space, marker = row.comment.rpartition(" ")
    row = replace(row, comment=f"{text}{space}[mig-exclude:{listed}] {marker}")
    found = view_of_inputs(lending_inputs([row], empty=("n2",))).elastic_jobs
    assert [grant.nodes for grant in found] == nodes
    assert job_views_of([row], ["train"])[1].hints == job_views_of([elastic(1)], ["train"])[1].hints


def test_supply_plans_no_slice_of_a_released_job_where_it_must_not_start() -> None:
    row = replace(elastic(1, reason="Resources"), gres="gres:mig:1g.10gb:1,gres:mig:not-n1:0")
    (demand,) = lending_inputs([row], empty=("n2",)).wanted
    assert demand.pool == {"n2"}


def test_idle_times_of_gpus_invented_by_a_node_are_forgotten() -> None:
    idle = Idleness()
    for number in range(5000):
        for taken in (1, 0):
            idle.update("GPU-1" if number == 0 else f"GPU-x{number}", taken, float(number + 10))
        idle.keep({"GPU-1", f"GPU-x{number}"})
    assert len(idle.since) < 1100
    assert idle.since["GPU-1"] == 10.0


def view_of_inputs(inputs: LendingInputs, ledger: Ledger | None = None, idle: Idleness | None = None):  # type: ignore[no-untyped-def]
    job_views = job_views_of(inputs.rows, ["train"])
    return view_of(inputs, job_views, ledger or Ledger(), idle or Idleness(), elastic_jobs(), {})


def test_pending_jobs_that_have_not_changed_are_the_same_objects_in_the_next_round() -> None:
    rows = [elastic(1, reason="Resources"), elastic(2, reason="Resources", cpus=4)]
    known, ledger = elastic_jobs(), Ledger()
    views: dict[int, JobView] = {}
    inputs = lending_inputs(rows)

    def following(rows: list[JobRow], empty: tuple[str, ...] = ()) -> tuple[Any, ...]:
        """View the next snapshot; it is equal to that of a migbatchd that sees it as its first one."""
        nonlocal views
        now = lending_inputs(rows, empty=empty)
        now = replace(now, now=inputs.now + 60, waiting=inputs.waiting, growing=inputs.growing)
        views = job_views_of(rows, ["train"], views)
        first = elastic_jobs()
        first.use(known._predictions)
        for run, report in known.reports.items():
            first.report(run, report)
        alone = replace(now, waiting=PoolBook())
        found = view_of(now, views, ledger, Idleness(), known, {}).elastic_jobs
        assert found == view_of(alone, job_views_of(rows, ["train"]), ledger, Idleness(), first, {}).elastic_jobs
        return found

    before = following(rows)
    found = following(rows)
    assert [job is earlier for job, earlier in zip(found, before, strict=True)] == [True, True]
    rows = [rows[0], elastic(2, reason="Resources", cpus=8)]
    assert following(rows)[0] is found[0] and following(rows)[1].cpus == 8
    assert {job.nodes for job in following(rows, empty=("n2",))} == {frozenset({"n1", "n2"})}
    ledger.past[1] = LoanHistory(hits=2)
    assert [job.hits for job in following(rows)] == [2, 0]
    del ledger.past[1]
    known.report((2, 0), Report(ckpt_s=7.0))
    assert [job.restart_s for job in following(rows)] == [40.0, 37.0]
    known.use(SimpleNamespace(version="2", training_speeds=lambda hints, partition: {ONE: 0.5}))
    model = [replace(row, comment=row.comment.replace("signal", "model=bert-large signal")) for row in rows]
    assert following(model)[0].speeds == {ONE: 0.5}
    known.use(SimpleNamespace(version="3", training_speeds=lambda hints, partition: {ONE: 0.25}))
    assert following(model)[0].speeds == {ONE: 0.25}


def inference(job: int, name: str, **more: object) -> JobRow:
    return JobRow(job, partition="gpu", gres=f"gres/mig:{name}:1", reason="Resources", **more)  # type: ignore[arg-type]


def test_slots_that_supply_plans_for_inference_count_as_taken() -> None:
    (capacity,) = view_of_inputs(
        lending_inputs([inference(1, "3g.40gb"), elastic(2, reason="ReqNodeNotAvail")])
    ).capacities
    assert [held.profile for held in capacity.taken] == [THREE]


def test_slot_of_starting_inference_is_taken_before_its_node_reports_it() -> None:
    starting = JobRow(1, state="RUNNING", partition="gpu", gres="gres/mig:3g.40gb:1", nodes=("n1",))
    (capacity,) = view_of_inputs(lending_inputs([starting], offered="3g.40gb@4", starting={THREE: 1})).capacities
    assert capacity.taken == (slot("3g.40gb@4"),)
    (capacity,) = view_of_inputs(lending_inputs([starting], ("3g.40gb", 4, (1, 0)), offered="3g.40gb@4")).capacities
    assert capacity.taken == (slot("3g.40gb@4"),), "once"


@pytest.mark.parametrize(("partitions", "own"), [(("train",), True), (("gpu", "train"), False), ((), False)])
def test_node_is_trainings_own_if_it_is_only_in_training_partitions(partitions: tuple[str, ...], own: bool) -> None:
    inputs = lending_inputs([elastic(2, reason="ReqNodeNotAvail")])
    nodes = [replace(row, partitions=partitions) for row in inputs.nodes]
    (capacity,) = view_of_inputs(replace(inputs, nodes=nodes, training_only=frozenset({"train", "other"}))).capacities
    assert capacity.own == own


def test_inference_without_room_counts_as_a_start_and_training_does_not() -> None:
    rows = [inference(1, "3g.40gb"), elastic(2, "1g.10gb", reason="Resources"), elastic(3, reason="ReqNodeNotAvail")]
    rows.append(JobRow(9, state="RUNNING", partition="gpu", gres="gres/mig:7g.80gb:1", nodes=("n1",)))
    found = view_of_inputs(lending_inputs(rows, ("7g.80gb", 0, (9, 0))))
    assert [(start.job, start.slices) for start in found.starts] == [(1, (THREE,))]
    assert [elastic_job.job for elastic_job in found.elastic_jobs] == [3]


def test_jobs_that_slurm_would_not_start_are_not_released() -> None:
    rows = [elastic(job, reason=reason) for job, reason in enumerate(("JobHeldUser", "Dependency", "AssocGrpGRES"), 1)]
    assert view_of_inputs(lending_inputs(rows)).elastic_jobs == ()


def test_slots_of_ending_and_of_unlisted_runs_are_passing() -> None:
    rows = [JobRow(9, state="COMPLETING", partition="gpu", gres="gres/mig:3g.40gb:1", nodes=("n1",))]
    found = view_of_inputs(lending_inputs(rows, ("3g.40gb", 0, (9, 0)), ("3g.40gb", 4, (8, 0))))
    assert found.about_to_be_free == {("n1", 0): 0xFF}, "job 8 is in no list any more"


def test_idle_time_of_a_gpu_restarts_when_inference_ends_but_not_a_loan() -> None:
    idle, ledger = Idleness(), Ledger()
    row = elastic(5, "3g.40gb", state="RUNNING", nodes=("n1",), start=NOW - 50)
    ledger.follow({5: job_view(row)}, {}, {}, NOW)
    other = JobRow(9, state="RUNNING", partition="gpu", gres="gres/mig:3g.40gb:1", nodes=("n1",))
    both = lending_inputs([row, other], ("3g.40gb", 0, (9, 0)), ("3g.40gb", 4, (5, 0)))
    (capacity,) = view_of_inputs(both, ledger, idle).capacities
    assert ([loan.job for loan in capacity.lent], len(capacity.taken), capacity.idle_since) == ([5], 1, 0.0)
    (capacity,) = view_of_inputs(lending_inputs([other], ("3g.40gb", 0, (9, 0))), ledger, idle).capacities
    assert capacity.idle_since == 0.0, "a loan ended"
    (capacity,) = view_of_inputs(lending_inputs([]), Ledger(), idle).capacities
    assert capacity.idle_since == NOW


def test_node_that_is_drained_or_reports_overlapping_slots_lends_nothing() -> None:
    inputs = lending_inputs([])
    closed = replace(inputs, nodes=[replace(inputs.nodes[0], states=frozenset({"DRAIN"}))])
    assert view_of_inputs(closed).capacities == ()
    facts = GpuFacts("GPU-0", H100, ((slot("3g.40gb@0"), (1, 0)), (slot("1g.10gb@0"), (2, 0))))
    assert view_of_inputs(replace(inputs, facts={"n1": NodeFacts((facts,))})).capacities == ()


@pytest.mark.parametrize(
    ("restarts", "hits", "ran_s", "grows"),
    [(5, 5, 3599, True), (5, 3, 3599, True), (5, 2, 3599, False), (3, 0, 3599, False), (3, 0, 3600, True)],
)
def test_job_that_was_reclaimed_often_may_still_grow(restarts: int, hits: int, ran_s: float, grows: bool) -> None:
    """max_restarts limits the restarts for a larger slice, not those that inference made necessary.

    A run that has lasted an hour may grow in any case.
    """
    row = elastic(5, "1g.10gb", state="RUNNING", nodes=("n1",), start=NOW - ran_s, restarts=restarts)
    ledger, inputs = Ledger(), lending_inputs([row], ("1g.10gb", 0, (5, restarts)))
    ledger.follow({5: job_view(row)}, {}, {}, NOW)
    ledger.past[5] = LoanHistory(hits)
    orders = decide(
        view_of_inputs(inputs, ledger), LendingRules(hysteresis=Hysteresis(first_s=1, idle_s=0, rest_s=0))
    ).orders
    assert [order.cause for order in orders] == ([Cause.GROW] if grows else [])


@pytest.mark.parametrize("reachable", [True, False])
def test_job_grows_only_on_nodes_of_its_partition(reachable: bool) -> None:
    """Otherwise it would be stopped for a slice that Slurm cannot give it, and again an hour later."""
    row = elastic(5, "1g.10gb", state="RUNNING", nodes=("n1",), start=NOW - 10_000)
    inference_runs = [JobRow(job, partition="gpu", state="RUNNING", nodes=("n1",)) for job in (7, 8, 9)]
    leases = [("1g.10gb", 0, (5, 0)), ("1g.10gb", 1, (7, 0)), ("2g.20gb", 2, (8, 0)), ("3g.40gb", 4, (9, 0))]
    inputs = lending_inputs([row, *inference_runs], *leases, empty=("n2",))
    partitions = ("gpu", "train") if reachable else ("gpu",)
    inputs = replace(inputs, nodes=[inputs.nodes[0], replace(inputs.nodes[1], partitions=partitions)])
    ledger = Ledger()
    ledger.follow({5: job_view(row)}, {}, {}, NOW)
    found = decide(view_of_inputs(inputs, ledger), LendingRules(hysteresis=Hysteresis(idle_s=0, rest_s=0)))
    assert [(order.cause, order.job) for order in found.orders] == [(Cause.GROW, 5)] * reachable
    assert found.targets == ({5: (ALL, "n2", 0)} if reachable else {})


def test_target_slice_of_a_stopped_job_is_kept_until_its_release() -> None:
    row = elastic(5, "1g.10gb", state="RUNNING", nodes=("n1",), start=NOW - 10_000)
    ledger = Ledger()
    ledger.follow({5: job_view(row)}, {}, {}, NOW)
    ledger.requeue(5, Cause.GROW, "larger")
    ledger.targets[5] = Target(ALL, "n2", NOW + 100)
    leaving = lending_inputs([row], ("1g.10gb", 0, (5, 0)), empty=("n2",))
    ledger.follow({5: job_view(row)}, {}, {}, NOW)
    assert [(loan.profile, loan.nodes) for loan in view_of_inputs(leaving, ledger).pending_loans] == [(ALL, {"n2"})]
    waiting = back(5, prefix="gres/")
    ledger.follow({5: job_view(waiting)}, {}, {}, NOW + 1)
    earlier = elastic(4, reason="Resources")
    inputs = lending_inputs([earlier, waiting], empty=("n2",))
    (held,) = [job for job in view_of_inputs(inputs, ledger).elastic_jobs if job.job == 5]
    assert held.target == Target(ALL, "n2", NOW + 100)
    orders = decide(view_of_inputs(inputs, ledger), LendingRules()).orders
    assert next(order.profile for order in orders if order.job == 5) == ALL
    ledger.release(waiting, ALL, "idle", NOW + 2)
    assert not ledger.targets
    ledger.targets[5] = Target(ALL, "n2", NOW + 3)
    ledger.refused(5, "busy", NOW + 2)
    ledger.follow({5: job_view(waiting)}, {}, {}, NOW + 3)
    assert not ledger.targets, "too late"


def test_target_slice_of_a_stopped_job_is_held_while_slurm_refuses_its_release() -> None:
    row, ledger = back(5, prefix="gres/"), Ledger()
    ledger.targets[5] = Target(THREE, "n1", NOW + 100)
    inputs = lending_inputs([row])
    found = view_of(inputs, job_views_of(inputs.rows, ["train"]), ledger, Idleness(), elastic_jobs(), {}, barred={5})
    assert [(loan.job, loan.profile, loan.gpu) for loan in found.pending_loans] == [(5, THREE, 0)]


def test_jobs_grow_together_only_as_far_as_their_quota_allows() -> None:
    """Otherwise the last job to return would have been stopped for a slice that it does not get."""
    rows = [
        elastic(job, "1g.10gb", state="RUNNING", nodes=(f"n{job}",), account="ml", start=NOW - 9000) for job in (1, 2)
    ]
    inputs = lending_inputs(rows, ("1g.10gb", 0, (1, 0)), empty=("n2",))
    facts = GpuFacts("GPU-n2", H100, ((slot("1g.10gb@0"), (2, 0)),))
    inputs = replace(inputs, facts={**inputs.facts, "n2": NodeFacts((facts,))})
    ledger = Ledger()
    ledger.follow({row.job_id: job_view(row) for row in rows}, {}, {}, NOW)
    rules = LendingRules(hysteresis=Hysteresis(idle_s=0, rest_s=0), quota={"ml": 8})
    assert [order.cause for order in decide(view_of_inputs(inputs, ledger), rules).orders] == [Cause.GROW]
    assert len(decide(view_of_inputs(inputs, ledger), replace(rules, quota={"ml": 14})).orders) == 2
    ledger.targets[9] = Target(THREE, "n3", NOW + 100)
    waiting = elastic(9, reason="JobHeldUser", account="ml")
    inputs = replace(inputs, rows=[*rows, waiting])
    assert view_of_inputs(inputs, ledger).lent == {"ml": 5}, "a stopped job's slices count"


@pytest.mark.parametrize("state", ["RUNNING", "STOPPED"])
def test_requeue_without_effect_is_repeated(state: str) -> None:
    """Also if the user has stopped the job, which he can continue himself."""
    row = elastic(1, "1g.10gb", state=state, nodes=("n1",), start=NOW - 100)
    ledger = Ledger()
    loan = Loan(1, 0, NOW - 100, "1g.10gb", State.REQUEUED, started=NOW - 100, requeued=NOW - 15, cause=Cause.RECLAIM)
    ledger.load([loan])
    (order,) = decide(view_of_inputs(lending_inputs([row], ("1g.10gb", 0, (1, 0))), ledger), LendingRules()).orders
    assert (order.kind, order.job) == (OrderKind.REQUEUE, 1)


@pytest.mark.parametrize(("prefix", "at_once"), [("gres:", 1), ("gres/", 3)])
def test_up_to_slurm_2302_jobs_return_one_by_one_to_the_only_node(prefix: str, at_once: int) -> None:
    """Slurm up to 23.02 refuses the Prolog of a second job that starts within two seconds."""
    comment = "migbatch: role=train max=1g.10gb [mig:loan:1#loan1]"
    rows = [back(job, 1, prefix, comment=comment) for job in (1, 2, 3)]
    ledger, inputs = ran(*rows), lending_inputs(rows)
    first = decide(view_of_inputs(inputs, ledger), LendingRules())
    assert len(first.orders) == at_once
    if at_once > 1:
        return
    ledger.release(rows[0], ONE, "idle", NOW)
    ledger.confirm(1, NOW)
    running = replace(
        rows[0], state="RUNNING", gres=f"{prefix}mig:1g.10gb:1", comment=comment.replace("loan:1", "1g.10gb:1")
    )

    def later(seconds: float) -> list[int]:
        now = replace(lending_inputs([running, *rows[1:]], ("1g.10gb", 0, (1, 1))), now=NOW + seconds)
        ledger.follow(job_views_of(now.rows, ["train"]), {}, {}, now.now)
        return [order.job for order in decide(view_of_inputs(now, ledger), LendingRules()).orders]

    running = replace(running, start=NOW + 1)
    assert later(2) == []
    assert later(4) == [2]


def test_slices_of_ending_loans_are_expected_to_be_free_after_the_grace() -> None:
    """By the end of the grace period, or soon if no checkpoint is being written any more."""
    ledger, rules = Ledger(), LendingRules(grace_s=30.0)
    settings = LendingSettings(rules=rules)
    loan = Loan(1, 0, 90.0, "1g.10gb", State.RUNNING)
    signalled = replace(loan, state=State.SIGNALLED, signalled=95.0)
    loans = [loan, signalled, replace(signalled, signalled=None), replace(signalled, signalled=10.0)]
    loans += [replace(signalled, checkpoint=99.0), replace(loan, state=State.REQUEUED)]
    ledger.open = {number: replace(loan, job_id=number) for number, loan in enumerate(loans)}
    soon = 100.0 + SOON_S
    assert ends_of(ledger, settings, 100.0) == {1: 125.0 + SOON_S, 2: 130.0 + SOON_S, 3: soon, 4: soon, 5: soon}
    assert ends_of(Ledger(), None, 100.0) == {}


def test_no_move_waits_for_a_loan_with_a_process_that_cannot_be_killed() -> None:
    """Its job may stay in COMPLETING for days."""
    ledger = Ledger()
    ledger.open[1] = Loan(1, 0, 90.0, "1g.10gb", State.REQUEUED, requeued=100.0)
    assert ends_of(ledger, LendingSettings(), 700.0) == {1: 700.0 + SOON_S}
    assert ends_of(ledger, LendingSettings(), 701.0) == {}
