"""Values of every type used in decisions are unchanged by a round trip through JSON."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.decide.capacity.facts import GpuFacts, NodeFacts
from slurm_migbatch.decide.capacity.model import Mode
from slurm_migbatch.decide.core import Decision, DecisionMemory, Outcomes, Settings
from slurm_migbatch.decide.dispatch.arrays import ElasticArray, Throttle
from slurm_migbatch.decide.dispatch.pending import Pending
from slurm_migbatch.decide.dispatch.retype import Retype
from slurm_migbatch.decide.dispatch.stage import DispatchSettings
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.model import LendingRules
from slurm_migbatch.decide.lending.stage import LendingSettings
from slurm_migbatch.decide.lending.training_speed import SpeedReport
from slurm_migbatch.decide.recording.codec import Codec, CodecError
from slurm_migbatch.decide.recording.deltas import Delta, RowDelta
from slurm_migbatch.decide.recording.segments import AskedPredictions, SegmentReader, SegmentWriter
from slurm_migbatch.decide.snapshot import (
    Answers,
    ClusterSnapshot,
    LendingPast,
    NoPredictions,
    PlanStatus,
    PublishedPlan,
    Questions,
    Report,
    RunProgress,
    TaskRun,
    WeighedProfile,
)
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.grant import Grant
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.loans import LoanHints
from tests.support.supply_gpus import H100

PROFILES = [info.profile for info in H100.profiles]
SLOTS = [slot for info in H100.profiles for slot in info.slots]

texts = st.text(max_size=6)
ids = st.integers(0, 30)
times = st.floats(0, 2e9)
runs = st.tuples(ids, st.integers(0, 3))
hosts = st.sampled_from(["n1", "n2", "n3", "n4", "ü"])
reports = st.builds(Report, *[st.none() | times] * 4)
facts = st.builds(
    GpuFacts,
    uuid=texts,
    geometry=st.just(H100),
    leases=st.lists(st.tuples(st.sampled_from(SLOTS), runs), max_size=3).map(tuple),
    zombies=st.lists(st.sampled_from(SLOTS), max_size=2).map(tuple),
    warm=st.sampled_from([EMPTY, *(Layout([slot]) for slot in SLOTS)]),
)
plans = st.builds(
    PublishedPlan,
    version=ids,
    gpus=st.dictionaries(texts, st.lists(st.tuples(texts, ids, ids), max_size=3).map(tuple), max_size=2),
    guests=st.dictionaries(ids, st.tuples(texts, texts, ids, ids, ids, ids), max_size=2),
)
progress = st.lists(st.builds(RunProgress, ids, ids, st.none() | texts, st.none() | times), max_size=2).map(tuple)
answers = st.builds(
    Answers,
    asked=st.builds(
        Questions, st.frozensets(ids, max_size=2), st.frozensets(ids, max_size=2), decisions=st.tuples(texts)
    ),
    progress=st.none() | progress,
    arrays=st.none()
    | st.dictionaries(ids, st.lists(st.builds(TaskRun, times, st.none() | times, texts)).map(tuple), max_size=2),
    decisions=st.dictionaries(texts, st.none() | st.fixed_dictionaries({"chosen": texts, "n": ids}), max_size=2),
)
snapshots = st.builds(
    ClusterSnapshot,
    now=times,
    jobs=st.lists(
        st.builds(
            JobRow,
            job_id=ids,
            state=st.sampled_from(["PENDING", "RUNNING"]),
            start=st.none() | times,
            nodes=st.lists(hosts, max_size=2).map(tuple),
            comment=texts,
            time_limit_s=st.none() | ids,
            throttle=st.none() | ids,
        ),
        max_size=12,
        unique_by=lambda row: row.job_id,
    ).map(tuple),
    nodes=st.lists(
        st.builds(
            NodeRow,
            hosts,
            st.frozensets(texts, max_size=3),
            gres=st.dictionaries(texts, ids, max_size=2),
            features=st.frozensets(texts, max_size=2),
        ),
        max_size=4,
        unique_by=lambda row: row.name,
    ).map(tuple),
    inventory=st.dictionaries(
        hosts, st.builds(NodeFacts, st.lists(facts, max_size=2).map(tuple), st.booleans()), max_size=4
    ),
    plans=st.dictionaries(hosts, st.builds(PlanStatus, st.none() | plans, st.booleans(), st.booleans()), max_size=4),
    sent_back=st.lists(runs, max_size=2).map(tuple),
    preference=st.lists(st.sampled_from(PROFILES), max_size=3).map(tuple),
    reports=st.lists(st.tuples(runs, reports), max_size=2).map(tuple),
    past=st.none()
    | st.builds(
        LendingPast,
        loans=st.just(({"job_id": 1, "ended": None},)),
        uses=st.lists(st.tuples(texts, times, st.none() | times), max_size=2).map(tuple),
        freed=st.dictionaries(texts, times, max_size=2),
        runs=progress,
    ),
    answers=answers,
    recording=st.booleans(),
    blackout=st.booleans(),
    predictions=st.just(NoPredictions()),
)


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


def parts(snapshot: ClusterSnapshot) -> list[Any]:
    """All fields except the predictor; mappings as lists, so that their order counts."""
    values = {name: value for name, value in vars(snapshot).items() if name != "predictions"}
    return [list(value.items()) if name in ("inventory", "plans") else value for name, value in values.items()]


@pytest.mark.slow
@given(st.lists(snapshots, min_size=1, max_size=4))
def test_snapshots_are_read_back_unchanged_and_in_order(seen: list[ClusterSnapshot]) -> None:
    settings, writer = Settings(), SegmentWriter()
    reader = SegmentReader(through_json(writer.begin(settings, None)))
    assert reader.segment.settings == settings
    for snapshot in seen:
        entry = through_json(writer.round(snapshot, Decision(DecisionMemory(settings)), Outcomes(), ()))
        assert parts(reader.round(entry).snapshot) == parts(snapshot)


@given(st.lists(st.lists(st.integers(0, 9), unique=True, max_size=10), max_size=5))
def test_delta_restores_the_order_of_the_keys(orders: list[list[int]]) -> None:
    codec = Codec()
    writer: Delta[int] = Delta(codec, int)
    reader: Delta[int] = Delta(codec, int)
    for order in orders:
        delta = through_json(writer.write({key: key for key in order}))
        assert list(reader.read(delta)) == order


def test_delta_for_one_moved_key_has_one_entry() -> None:
    writer: Delta[int] = Delta(Codec(), int)
    writer.write({key: key for key in range(1000)})
    assert writer.write({key: key for key in (*range(1, 1000), 0)}) == {"at": [[999, 0]]}


queues = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), unique_by=itemgetter(0), max_size=10), max_size=5
)


@given(queues, st.randoms(use_true_random=False))
def test_row_delta_restores_rows_whether_equal_or_identical_objects(seen: list, rng: random.Random) -> None:
    codec, known = Codec(), {}
    writer, reader = (RowDelta(codec, JobRow, attrgetter("job_id")) for _ in range(2))
    for queue in seen:
        rows = tuple(
            JobRow(job, priority=priority)
            if rng.random() < 0.2
            else known.setdefault((job, priority), JobRow(job, priority=priority))
            for job, priority in queue
        )
        delta = through_json(writer.write_rows(rows))
        assert tuple(reader.read(delta).values()) == rows
        assert {job for job, _ in delta.get("new", ())}.isdisjoint(job for job, _ in delta.get("changed", ()))


def test_row_delta_of_a_long_queue_contains_only_the_changes() -> None:
    writer: RowDelta[int] = RowDelta(Codec(), JobRow, attrgetter("job_id"))
    rows = [JobRow(job) for job in range(1000)]
    writer.write_rows(tuple(rows))
    rows[500] = replace(rows[500], priority=7)
    rows[600] = replace(rows[600])
    rows.append(rows.pop(0))
    del rows[300]
    delta = writer.write_rows(tuple(rows))
    assert delta == {"gone": [301], "changed": [[500, {"priority": 7}]], "at": [[998, 0]]}


def test_rows_with_a_duplicate_id_cannot_be_written() -> None:
    row = JobRow(1)
    for twice in ((row, JobRow(2), row), (row, JobRow(1)), (JobRow(3), JobRow(3))):
        writer: RowDelta[int] = RowDelta(Codec(), JobRow, attrgetter("job_id"))
        writer.write_rows((row, JobRow(2)))
        with pytest.raises(CodecError):
            writer.write_rows(twice)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (math.inf, float),
        (-math.inf, float | None),
        (Mode.FROZEN, Mode),
        (Profile(1, 10, "+me"), Profile),
        (SLOTS[0], Slot),
        (Layout([SLOTS[0]]), Layout),
        (H100, Geometry),
        (Grant([(Profile(1, 10), 2)], "auto"), Grant),
        ({Profile(1, 10): 2}, dict[Profile, int]),
        ({("a", "b"): 1.5}, dict[tuple[str, str], float]),
        (frozenset({Profile(2, 20), Profile(1, 10)}), frozenset[Profile]),
        (Settings(None, DispatchSettings(), LendingSettings(pair_slowdowns={("a", "b", "1g.10gb"): 1.2})), Settings),
        (LoanHints(slice=Profile(1, 10), model="m"), LoanHints),
        (
            [
                (Throttle(ElasticArray(1, "u", "c", Profile(1, 10), 1, 3, (1.0,), None, 60, 5), 2, "why"), "timeout"),
                (
                    Retype(
                        Pending(JobRow(1), Grant([(Profile(1, 10), 1)], "d"), frozenset({"n1"}), 1),
                        (),
                        Profile(2, 20),
                        "w",
                    ),
                    "",
                ),
            ],
            list[tuple[Retype | Throttle, str]],
        ),
    ],
)
def test_decoded_value_equals_the_encoded_value(value: Any, hint: Any) -> None:
    codec = Codec()
    assert codec.decode(through_json(codec.encode(value, hint)), hint) == value


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ("x", int),
        (True, int),
        (1, str),
        ("1e400", float),
        ("0g.10gb", Profile),
        ({}, JobRow),
        ([], JobRow),
        ([["1g.10gb", [0, 1]], ["2g.20gb", [0, 2]]], Layout),
        ({"version": 1}, Geometry),
        ("odd", Mode),
        ([1, 2, 3], tuple[int, int]),
        ({"is": "JobRow"}, Retype | Throttle),
    ],
)
def test_data_that_does_not_match_its_type_hint_is_refused(data: Any, hint: Any) -> None:
    with pytest.raises(CodecError):
        Codec().decode(data, hint)


def test_recorded_predictions_are_replayed_and_others_count_as_unknown() -> None:
    class Some(NoPredictions):
        version = "v1"

        def rates(self, _hints: Hints, _partition: str, /) -> dict[Profile, float]:
            return {Profile(1, 10): 3.5}

        def candidates(self, _hints: Hints, _partition: str, /) -> tuple[Profile, list[WeighedProfile]]:
            return Profile(1, 10), [WeighedProfile(Profile(1, 10), 9728, None, True)]

    asked = AskedPredictions(Some())
    hints = Hints(model="m")
    asked.rates(hints, "gpu")
    asked.candidates(hints, "gpu")
    settings, writer = Settings(), SegmentWriter()
    reader = SegmentReader(through_json(writer.begin(settings, None)))
    snapshot = ClusterSnapshot(1.0, predictions=asked)
    entry = through_json(writer.round(snapshot, Decision(DecisionMemory(settings)), Outcomes(), asked.asked))
    found = reader.round(entry).snapshot.predictions
    assert found.version == "v1"
    assert found.rates(hints, "gpu") == {Profile(1, 10): 3.5}
    assert found.candidates(hints, "gpu") == (Profile(1, 10), (WeighedProfile(Profile(1, 10), 9728, None, True),))
    assert found.unknown == 0  # type: ignore[attr-defined]
    assert found.rates(hints, "other") == {}
    assert found.training_speeds(LoanHints(), "gpu") == {}
    assert found.unknown == 2  # type: ignore[attr-defined]
    again = writer.round(snapshot, Decision(DecisionMemory(settings)), Outcomes(), asked.asked)
    assert "asked" not in again


def test_unknown_fields_of_a_dataclass_are_skipped_and_named_tuples_must_be_complete() -> None:
    rules = LendingRules(hysteresis=Hysteresis(first_s=150.0))
    assert Codec().decode({"unknown": 1, **Codec().encode(rules, LendingRules)}, LendingRules) == rules
    assert Codec().decode(["1g.10gb", 100.0, 10.0], SpeedReport) == SpeedReport("1g.10gb", 100.0, 10.0)
    for fields in (["1g.10gb", 100.0], ["1g.10gb", 100.0, 10.0, 8.0]):
        with pytest.raises(CodecError):
            Codec().decode(fields, SpeedReport)
