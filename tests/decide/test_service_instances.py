"""How many instances of a service run at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.free import FreeCapacity, NodeCapacity
from slurm_migbatch.decide.dispatch.arrays import (
    ArrayHistory,
    Bounds,
    ElasticArray,
    elastic_arrays,
    instance_starts,
    known,
    throttles,
)
from slurm_migbatch.decide.dispatch.instances import (
    HOLD_S,
    LOAD_S,
    RESERVE,
    InstanceLoad,
    LoadHistory,
    carried,
    fewest,
    instances,
)
from slurm_migbatch.decide.snapshot import Report
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.slurm.client import JobRow
from tests.support.dispatch_site import H100, NOW, P, job
from tests.support.examples import examples

POOL = frozenset({"h1"})
HINTS = "migbatch: model=resnet-50 role=serve rate=90 slo=50ms"
rates = st.floats(0.001, 1e5)


def service(**changes: object) -> ElasticArray:
    fields: dict[str, object] = {
        "array": 9, "user": "ann", "comment": HINTS, "profile": P("1g.10gb"), "each": 1, "pending": 20, "running": (),
        "throttle": None, "deadline_s": None, "items": None, "pool": POOL, "rate": 90.0, "limit_ms": 50.0,
        "carries": 20.0,
    }  # fmt: skip
    return ElasticArray(**{**fields, **changes})  # type: ignore[arg-type]


def free_capacity(gpus: int = 4) -> FreeCapacity:
    return FreeCapacity({"h1": frozenset({P("1g.10gb")})}, lambda _: NodeCapacity([(H100, EMPTY)] * gpus, Counter()))


def throttled(array: ElasticArray, history: ArrayHistory | None = None, now: float = NOW) -> tuple[int, str]:
    (found,) = throttles(now, [array], history or ArrayHistory(), free_capacity(), lambda _: False)
    return found.after, found.why


# -- which arrays ------------------------------------------------------------------------------------------------------


def rows(comment: str = HINTS) -> list[JobRow]:
    waiting = job(9, array_job=9, array_task="3-20%4", tasks=18, throttle=4, comment=f"{comment} [mig:1g.10gb:1#abc]")
    running = replace(waiting, job_id=11, array_task="2", tasks=1, throttle=None, state="RUNNING", start=NOW - 60)
    return [waiting, running]


def test_service_array_with_a_rate_is_elastic() -> None:
    (found,) = elastic_arrays(rows())
    assert (found.rate, found.limit_ms, found.deadline_s, found.items) == (90.0, 50.0, None, None)
    assert instance_starts(rows()) == {9: {(11, 0): NOW - 60}}
    (free,) = elastic_arrays(rows("migbatch: model=resnet-50 role=serve rate=0.5"))
    assert (free.rate, free.limit_ms) == (0.5, None)


@pytest.mark.parametrize(
    "comment", ["migbatch: role=serve", "migbatch: model=x rate=90", "migbatch: model=x role=infer rate=90", ""]
)
def test_array_without_serve_role_and_rate_is_not_a_service(comment: str) -> None:
    assert elastic_arrays(rows(comment)) == [] and instance_starts(rows(comment)) == {}


# -- what the load needs -----------------------------------------------------------------------------------------------


def test_service_runs_the_fewest_instances_that_sustain_its_rate() -> None:
    after, why = throttled(service())
    assert after == 5 and why == "90 items/s by its hints, 20 items/s of each instance: 5 at once"
    assert known(service(carries=None), (), 12.5, POOL).carries == 12.5
    assert known(service(each=2), (), 12.5, POOL).carries == 25.0


def test_measured_load_counts_with_a_reserve() -> None:
    running = service(running=(NOW - 100,) * 5, throttle=9, load=InstanceLoad(each=8.0, most=24.0))
    after, why = throttled(running)
    assert after == 3  # 40 items/s and a quarter more, at 24 items/s of each instance
    assert why == "40 items/s measured, 24 items/s of each instance: 3 at once"


def test_number_of_instances_grows_when_all_are_saturated() -> None:
    full = InstanceLoad(each=20.0, most=20.0)
    assert instances(1.0, 4, 20.0, full) == 5
    assert instances(1.0, 20, None, full) == 25


def test_instance_over_its_latency_limit_sustains_only_its_current_rate() -> None:
    slow = InstanceLoad(each=12.0, most=30.0, slow=True)
    assert carried(20.0, slow) == 12.0 and instances(1.0, 4, 20.0, slow) == 5


def test_service_whose_rate_per_instance_is_unknown_is_left_alone() -> None:
    assert throttles(NOW, [service(carries=None)], ArrayHistory(), free_capacity(), lambda _: False) == []
    assert carried(None, InstanceLoad(5.0)) is None and instances(9.0, 1, None, None) is None


def test_number_of_instances_grows_at_once_and_shrinks_after_a_hold_time() -> None:
    history = ArrayHistory()
    assert throttled(service(rate=100.0), history)[0] == 5
    history.bounds.set(9, 5)
    quiet = service(rate=30.0, throttle=5)
    assert throttles(NOW + 1, [quiet], history, free_capacity(), lambda _: False) == []
    assert throttled(replace(quiet, rate=140.0), history, NOW + 2)[0] == 7
    history.bounds.set(9, 7)
    quiet = replace(quiet, throttle=7)
    assert throttles(NOW + 1 + HOLD_S, [quiet], history, free_capacity(), lambda _: False) == []
    assert throttled(quiet, history, NOW + 3 + HOLD_S) == (
        2, "30 items/s by its hints, 20 items/s of each instance: 2 at once",
    )  # fmt: skip


def test_throttle_set_before_a_restart_is_held_for_the_hold_time() -> None:
    loads = LoadHistory()
    assert loads.held(9, 2, 6, NOW) == 6
    assert loads.held(9, 2, 6, NOW + HOLD_S - 1) == 6
    assert loads.held(9, 2, 6, NOW + HOLD_S) == 2
    assert LoadHistory().held(9, 2, None, NOW) == 2


@given(st.floats(0.001, 1e5), rates)
def test_fewest_is_the_smallest_number_that_sustains_the_rate(rate: float, each: float) -> None:
    count = fewest(rate, each)
    assert count >= 1 and count * each * (1 + 1e-6) >= rate
    assert count == 1 or (count - 1) * each < rate


@given(rates, rates, st.integers(0, 50), st.none() | rates, rates)
def test_higher_rate_never_needs_fewer_instances(
    one: float, other: float, running: int, predicted: float | None, most: float
):
    low, high = sorted((one, other))
    low_count, high_count = (instances(rate, running, predicted, None) for rate in (low, high))
    assert (low_count is None) == (high_count is None) == (predicted is None)
    assert predicted is None or (low_count or 0) <= (high_count or 0)
    measured = [instances(1.0, running, predicted, InstanceLoad(rate, max(most, high))) for rate in (low, high)]
    assert 1 <= (measured[0] or 0) <= (measured[1] or 0)


@settings(max_examples=examples(200))
@given(
    pending=st.integers(1, 60),
    running=st.integers(0, 30),
    asked=st.none() | st.integers(1, 40),
    rate=rates,
    carries=rates,
    load=st.none() | st.builds(InstanceLoad, rates, rates, st.booleans()),
    before=st.none() | st.integers(1, 40),
)
def test_throttle_is_at_least_one_and_at_most_what_the_user_allows(
    pending: int,
    running: int,
    asked: int | None,
    rate: float,
    carries: float,
    load: InstanceLoad | None,
    before: int | None,
) -> None:
    bounds = Bounds() if before is None else Bounds({9: asked}, {9: before})
    array = service(
        pending=pending,
        running=(NOW - 1,) * running,
        throttle=asked if before is None else before,
        rate=rate,
        carries=carries,
        load=load if running else None,
    )
    for change in throttles(NOW, [array], ArrayHistory(bounds), free_capacity(), lambda _: False):
        assert 1 <= change.after <= min(asked or 1 << 30, pending + running)


# -- what instances report ---------------------------------------------------------------------------------------------


def add_load_reports(
    loads: LoadHistory, job_id: int, *points: tuple[float, float], latency_ms: float | None = None
) -> None:
    for at, items in points:
        loads.add_report((job_id, 0), NOW, Report(items=items, latency_ms=latency_ms, at=at), at + 0.5)


def test_load_is_measured_over_the_last_minutes() -> None:
    loads = LoadHistory()
    add_load_reports(loads, 1, (NOW + 100, 1000), (NOW + 200, 3000))
    add_load_reports(loads, 2, (NOW + 200, 1000))
    assert loads.load(9, [(1, 0), (2, 0), (3, 0)], 50.0, NOW + 200) == InstanceLoad(10.0, 15.0)
    add_load_reports(loads, 1, *((NOW + 200 + 100 * n, 3000 + 500 * n) for n in range(1, 20)))
    found = loads.load(9, [(1, 0)], 50.0, NOW + 2100)
    assert found is not None and found.each == pytest.approx(5.0) and found.most == 15.0
    assert len(loads.counts[1, 0]) <= LOAD_S / 100 + 2


def test_instance_without_recent_reports_does_not_count() -> None:
    loads = LoadHistory()
    add_load_reports(loads, 1, (NOW + 100, 1000))
    assert loads.load(9, [], None, NOW + 100) is None
    assert loads.load(9, [(1, 0)], None, NOW + 100 + LOAD_S) is None
    add_load_reports(loads, 2, (NOW + 1, 1e9))  # too early to measure a rate
    assert loads.load(9, [(2, 0)], None, NOW + 2) is None
    add_load_reports(loads, 1, (NOW + 110, 5))  # its counter has started anew
    assert loads.load(9, [(1, 0)], None, NOW + 111) is None


def test_batches_over_the_latency_limit_do_not_measure_the_maximum_rate() -> None:
    loads = LoadHistory()
    add_load_reports(loads, 1, (NOW + 100, 2000), latency_ms=80.0)
    assert loads.load(9, [(1, 0)], 50.0, NOW + 100) == InstanceLoad(20.0, 0.0, slow=True)
    assert loads.load(9, [(1, 0)], None, NOW + 100) == InstanceLoad(20.0, 20.0)
    loads.forget_but({})
    assert vars(loads) == vars(LoadHistory())


@given(
    st.lists(st.tuples(st.floats(-100, 4000), st.none() | st.floats(0, 1e9), st.none() | st.floats(0, 1e4))),
)
def test_load_is_a_number_whatever_a_job_reports(reports: list[tuple[float, float | None, float | None]]) -> None:
    loads, now = LoadHistory(), NOW
    for after, items, latency in reports:
        now = max(now, NOW + after)
        loads.add_report((1, 0), NOW, Report(items=items, latency_ms=latency, at=NOW + after), now)
    found = loads.load(9, [(1, 0)], 50.0, now)
    assert found is None or (found.each >= 0 and found.most >= 0)
    assert RESERVE > 0
