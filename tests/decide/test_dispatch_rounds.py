"""Dispatch inside migbatchd: the changes sent to Slurm, the actions recorded, and what is kept over a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_migbatch.config import DispatchConfig
from slurm_migbatch.daemon.controller import Controller
from slurm_migbatch.daemon.flightrecorder import FlightRecorder, read_entries, segments
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.record import WriterRecord
from slurm_migbatch.daemon.settings import dispatch_settings
from slurm_migbatch.daemon.writer import StoreWriter
from slurm_migbatch.decide.capacity.model import Demand, Gpu, Lease, Node
from slurm_migbatch.decide.core import Decision, DecisionMemory, Settings
from slurm_migbatch.decide.dispatch.instances import HOLD_S
from slurm_migbatch.decide.dispatch.shares import LATER
from slurm_migbatch.decide.dispatch.stage import plan_dispatch
from slurm_migbatch.decide.recording.pseudonyms import CollectedNames, Pseudonyms, without_names
from slurm_migbatch.decide.recording.replay import replay
from slurm_migbatch.decide.snapshot import ClusterSnapshot, Questions
from slurm_migbatch.decide.supply.planner import Planner
from slurm_migbatch.decide.supply.stage import SupplyDecision
from slurm_migbatch.mig.grant import parse_comment
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow, SlurmError, SlurmRefused
from slurm_migbatch.slurm.taskexpr import expand_tasks
from slurm_migbatch.store.db import open_store
from tests.support.dispatch_site import EVERYWHERE, GPUS, NOW, P, candidates, job


class Queue:
    """A fake Slurm: its pending jobs accept the updates that real Slurm accepts, in one process or not at all."""

    def __init__(self, *rows: JobRow) -> None:
        self.rows = {row.job_id: row for row in rows}
        self.calls: list[dict[str, dict[str, str]]] = []
        self.stubborn: set[str] = set()
        #: an array's tasks have ended
        self.ended = False
        #: all or some changes are made, but the call does not report which
        self.broken = False

    def update_jobs(self, updates: Mapping[str, Mapping[str, str]]) -> None:
        self.calls.append({name: dict(fields) for name, fields in updates.items()})
        refused = []
        for name, fields in updates.items():
            if name in self.stubborn:
                refused.append(name)
            elif set(fields) == {"ArrayTaskThrottle"}:
                rows = [row for row in self.rows.values() if row.array_job == int(name)]
                (row,) = [row for row in rows if row.pending]
                self.rows[row.job_id] = replace(row, throttle=int(fields["ArrayTaskThrottle"]) or None)
                if self.ended:  # real Slurm makes the change and still reports an error
                    refused.append(name)
            else:
                assert set(fields) == {"Gres", "Comment"}
                self._retype(name, fields)
        if self.broken:
            raise SlurmError("Socket timed out")
        if refused:
            raise SlurmRefused(dict.fromkeys(refused, "no longer pending"), len(updates))

    def _retype(self, name: str, fields: Mapping[str, str]) -> None:
        head, _, tasks = name.partition("_")
        row = self.rows[int(head)]
        assert row.pending
        grant = parse_comment(fields["Comment"])
        assert grant is not None and grant.gres == fields["Gres"]
        changed = replace(row, gres="gres/" + fields["Gres"], comment=fields["Comment"])
        if not tasks:
            self.rows[row.job_id] = changed
            return
        assert row.array_task is not None
        retyped, pending = set(expand_tasks(tasks)), set(expand_tasks(row.array_task))
        assert retyped <= pending
        if retyped == pending:
            self.rows[row.job_id] = changed
            return
        assert "[" not in tasks, "Slurm gives the new GRES to the first of these alone"
        kept = ",".join(map(str, sorted(pending - retyped)))
        self.rows[row.job_id] = replace(row, array_task=kept, tasks=len(pending - retyped))
        for task in retyped:
            self.rows[1000 + task] = replace(changed, job_id=1000 + task, array_task=str(task), tasks=1)


class Site:
    """Dispatch with a real record, a fake queue, and either a real plan or the counts of nodes."""

    def __init__(self, url: str, queue: Queue, **config: Any) -> None:
        self.url, self.queue, self.now = url, queue, NOW
        self.config = DispatchConfig(**{"every_s": 0.1, "hold_s": 30.0, **config})
        self.used: dict[str, list[str]] = {"a1": ["1g.6gb"] * 4}
        self.nodes: tuple[NodeRow, ...] = tuple(
            NodeRow(name, frozenset({"IDLE"}), gres={"none": 16}, partitions=("mig",)) for name in GPUS
        )
        self.rates = {P("1g.10gb"): 600 / 18.0}
        self.choice: Callable[..., Any] = lambda hints, partition: None
        self.managed = True
        self.control = self._open()

    def _open(self) -> Controller:
        self.writer = StoreWriter(lambda: open_store(self.url), 1000)
        self.writer.start()
        view = SimpleNamespace(facts=dict)
        observer = Observer(view, SimpleNamespace(), lambda row: 0, predictions=self._predictions())  # type: ignore[arg-type]
        settings = Settings(None, dispatch_settings(self.config) if self.config.enabled else None)
        clock: Any = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now)
        advertiser, record = SimpleNamespace(), WriterRecord(self.writer)
        return Controller(settings, self.queue, observer, advertiser, record, clock, self._decided)  # type: ignore[arg-type]

    def _predictions(self) -> Any:
        return SimpleNamespace(
            version="1",
            training_speeds=lambda hints, partition: {},
            rates=lambda hints, partition: self.rates,
            candidates=lambda hints, partition: self.choice(hints, partition),  # noqa: PLW0108 - tests set another
        )

    def restart(self) -> None:
        self.writer.stop(30)
        self.control = self._open()

    def close(self) -> None:
        self.writer.stop(30)

    def plan(self) -> SupplyDecision:
        nodes = {}
        for name, gpu in GPUS.items():
            slots = plan_free(gpu, EMPTY, [P(text) for text in self.used.get(name, ())]).slots
            nodes[name] = Node(
                name, (Gpu(f"GPU-{name}", gpu, tuple(Lease(slot, 900 + i) for i, slot in enumerate(slots))),)
            )
        wanted = []
        for row in self.queue.rows.values():
            if row.pending and row.reason == "Resources":
                ((kind, count),) = gres.counts(row.gres, "mig").items()
                copies = row.tasks if row.throttle is None else min(row.tasks, row.throttle)
                wanted.append(Demand(row.job_id, ((P(kind), count),), EVERYWHERE, copies=copies))
        return SupplyDecision(Planner().plan(list(nodes.values()), wanted, self.now), wanted, nodes)

    def _decided(self, snapshot: ClusterSnapshot, memory: DecisionMemory, settings: Settings, clock: Any) -> Decision:
        """Dispatch alone, on a plan made by this site."""
        if settings.dispatch is None:
            return Decision(memory)
        supply = self.plan() if self.managed else None
        dispatch = plan_dispatch(snapshot, memory.supply.queue, supply, memory.dispatch, settings.dispatch)
        return Decision(memory, None, dispatch, None, Questions(decisions=dispatch.unknown))

    def run_round(self, seconds: float = 1.0) -> bool:
        """Run a round, and a second one at once if the record must be queried; return whether jobs changed."""
        self.now += seconds
        before = len(self.queue.calls)
        for _ in range(2):
            self.control.round(tuple(self.queue.rows.values()), self.nodes)
            if self.control.decision is None or not self.control.decision.questions:
                break
        return len(self.queue.calls) > before

    def decide(self, id: str, reason: str = "fits", granted: str = "mig:1g.6gb:1", bad: tuple[str, ...] = ()) -> None:
        rows = [
            {
                "profile": c.profile.name,
                "capacity_mib": c.memory_mib,
                "ok": c.ok,
                "throughput_per_s_range": [c.rate, 9e9],
            }
            for c in candidates(bad)
        ]
        hints = {"items": 600, "deadline_s": 120}
        self._do(
            lambda store: store.record_decisions(
                [{"id": id, "ts": NOW, "chosen": granted, "candidates": rows, "hints": hints, "reason": reason}]
            )
        )

    def actions(self) -> list[tuple[Any, ...]]:
        found = self._do(lambda store: store.actions())
        return [(a["job_id"], a["kind"], a["before"], a["after"], a["dry_run"], a["outcome"]) for a in found]

    def _do(self, work: Callable[[Any], Any]) -> Any:
        return self.writer.call(work, "test").result(60)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    monkeypatch.setattr(
        "slurm_migbatch.daemon.record._ANSWER_S", 60.0
    )  # the tests must not depend on how long the record takes on a busy machine
    made: list[Site] = []

    def make(*rows: JobRow, **config: Any) -> Site:
        made.append(Site(f"sqlite:///{tmp_path}/db", Queue(*rows), **config))
        return made[-1]

    yield make
    for controller in made:
        controller.close()


def kinds(queue: Queue) -> dict[int, str]:
    return {job: next(iter(gres.counts(row.gres, "mig"))) for job, row in sorted(queue.rows.items())}


def array(number: int = 9, tasks: int = 12, profile: str = "1g.10gb", **changes: object) -> JobRow:
    text = f"1-{tasks}" + (f"%{changes['throttle']}" if changes.get("throttle") else "")
    return job(number, profile, array_job=number, array_task=text, tasks=tasks, **changes)


def test_jobs_without_room_are_retyped_to_profiles_of_idle_slices(site: Callable[..., Site]) -> None:
    cluster = site(*(job(n) for n in (1, 2, 3)))
    cluster.decide("abc12345")
    assert cluster.run_round()
    assert kinds(cluster.queue) == {1: "1g.10gb", 2: "1g.10gb", 3: "1g.10gb"}
    assert len(cluster.queue.calls) == 1
    assert cluster.actions() == [(n, "retype", "1g.6gb", "1g.10gb", False, None) for n in (1, 2, 3)]
    assert not cluster.run_round() and len(cluster.queue.calls) == 1


def test_no_retype_of_an_explicit_profile_or_to_one_that_misses_the_request(site: Callable[..., Site]) -> None:
    other = job(2, comment="migbatch: model=resnet-50 items=600 deadline=2m [mig:1g.6gb:1#def12345]")
    cluster = site(job(1), other)
    cluster.decide("abc12345", reason="explicit")
    cluster.decide("def12345", bad=("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb"))
    assert not cluster.run_round() and cluster.queue.calls == []


def test_decision_that_is_not_in_the_record_yet_is_queried_again(site: Callable[..., Site]) -> None:
    cluster = site(job(1))
    assert not cluster.run_round()
    cluster.decide("abc12345")
    assert cluster.run_round(2.0) and kinds(cluster.queue) == {1: "1g.10gb"}


def test_late_answer_of_the_record_is_used_in_the_next_round(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = site(job(1), array())
    cluster.decide("abc12345")
    monkeypatch.setattr("slurm_migbatch.daemon.record._ANSWER_S", 0.0)
    gate = threading.Event()
    cluster.writer.post(lambda store: gate.wait(60), "something slow")
    assert not cluster.run_round()
    gate.set()
    cluster.actions()  # by now every query has been answered
    monkeypatch.setattr("slurm_migbatch.daemon.record._ANSWER_S", 60.0)
    assert cluster.run_round() and kinds(cluster.queue)[1] == "1g.10gb" and cluster.queue.rows[9].throttle == 3


def test_auto_granted_job_is_retyped_to_a_candidate_of_the_compiled_table(site: Callable[..., Site]) -> None:
    cluster = site(job(1, comment="migbatch: model=resnet-50 items=600 deadline=2m [mig:1g.6gb:1#auto]"))
    cluster.choice = lambda hints, partition: (P("1g.6gb"), candidates() if hints.items == 600 else ())
    assert cluster.run_round() and kinds(cluster.queue) == {1: "1g.10gb"}


def tied(number: int, *after: int, name: str = "abc12345") -> JobRow:
    """A job of a pipeline with a deadline of 90 s; on its granted slice each job takes 60 s."""
    grant = f"[mig:1g.6gb:1#{name}]"
    comment = f"migbatch: model=resnet-50 items=600 pipeline=night deadline=90s {grant}"
    return job(number, comment=comment, after=after, reason="Dependency" if after else "Priority", submit=NOW)


def test_pipeline_is_split_once_the_record_has_returned_its_candidates(site: Callable[..., Site]) -> None:
    cluster = site(tied(1), tied(2, 1))
    cluster.used = {"a1": [], "h1": [], "h2": []}
    assert not cluster.run_round()
    cluster.decide("abc12345")
    assert cluster.run_round(2.0)
    changed = kinds(cluster.queue)
    assert changed != {1: "1g.6gb", 2: "1g.6gb"}
    assert [(action[0], action[1]) for action in cluster.actions()] == [
        (number, "retype") for number, profile in changed.items() if profile != "1g.6gb"
    ]
    assert "pipeline night: 2 unfinished jobs" in cluster.control.why(2)
    assert cluster.control.why(2, in_full=False) == cluster.control.why(77), "nothing of the pipeline"
    assert cluster.control.why(77) == "supply is disabled ([supply] enabled = false)"
    assert not cluster.run_round(2.0), "the split is not changed"


def test_no_job_of_a_pipeline_is_changed_twice_in_a_round(site: Callable[..., Site]) -> None:
    """One of them has no room on the profile that the split chooses, while other slices are idle."""
    cluster = site(
        replace(tied(1), reason="Resources"), replace(tied(2), reason="Resources"), tied(3, 1, 2), hold_s=1.0
    )
    cluster.decide("abc12345")
    for _ in range(6):
        cluster.run_round(2.0)
        named = [name for call in cluster.queue.calls for name in call]
        cluster.queue.calls.clear()
        assert len(named) == len(set(named))
        decided = cluster.control.decision.dispatch if cluster.control.decision else None
        assert decided is not None
        rows = [change.pending.row.job_id for change in decided.retypes]
        assert len(rows) == len(set(rows))


def test_disabled_dispatch_changes_and_records_nothing(site: Callable[..., Site]) -> None:
    cluster = site(job(1), array(), enabled=False)
    cluster.decide("abc12345")
    assert not cluster.run_round() and cluster.queue.calls == [] and cluster.actions() == []


def test_dry_run_records_its_actions_once_and_changes_no_job(site: Callable[..., Site]) -> None:
    cluster = site(job(1), array(), dry_run=True)
    cluster.decide("abc12345")
    assert not cluster.run_round()
    before = cluster.actions()
    assert not cluster.run_round() and cluster.queue.calls == []
    assert cluster.actions() == before
    assert sorted(before) == [
        (1, "retype", "1g.6gb", "1g.10gb", True, None), (9, "throttle", "none", "3", True, None)
    ]  # fmt: skip


@pytest.mark.parametrize("broken", [False, True])
def test_change_that_slurm_refuses_is_recorded_and_not_retried(site: Callable[..., Site], broken: bool) -> None:
    cluster = site(job(1), job(2), array(), hold_s=0.0)
    cluster.decide("abc12345")
    cluster.queue.stubborn, cluster.queue.broken = {"1", "9"}, broken
    assert cluster.run_round()
    cluster.queue.broken = False
    cluster.run_round()
    assert kinds(cluster.queue)[1] == "1g.6gb" and kinds(cluster.queue)[2] == "1g.10gb"
    words = "Socket timed out" if broken else "no longer pending"
    assert (1, "retype", "1g.6gb", "1g.10gb", False, words) in cluster.actions()
    assert (2, "retype", "1g.6gb", "1g.10gb", False, None) in cluster.actions()
    assert (9, "throttle", "none", "3", False, words) in cluster.actions()
    cluster.run_round(60)
    cluster.run_round(60)
    tried = [call["1"]["Gres"] for call in cluster.queue.calls if "1" in call]
    assert tried and len(tried) == len(set(tried))


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_throttle_of_migbatchd_is_not_the_users_after_a_failed_update(
    site: Callable[..., Site], broken: bool, restarted: bool
) -> None:
    cluster = site(array(), hold_s=0.0)
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 3
    cluster.rates[P("1g.10gb")] /= 2  # the tasks turn out to be slower: more are needed
    cluster.queue.stubborn, cluster.queue.broken = {"9"}, broken
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 3
    cluster.queue.stubborn, cluster.queue.broken = set(), False
    if restarted:
        cluster.restart()
    cluster.run_round()
    cluster.run_round()
    assert cluster.queue.rows[9].throttle == 6


def test_only_part_of_an_array_is_retyped_when_few_slices_are_idle(site: Callable[..., Site]) -> None:
    cluster = site(array(9, 6, "1g.6gb"), arrays=False)
    cluster.used = {"a1": ["1g.6gb"] * 3, "h1": ["7g.80gb"], "h2": ["1g.10gb"] * 5}
    cluster.decide("abc12345")
    assert cluster.run_round()
    assert kinds(cluster.queue) == {9: "1g.6gb", 1005: "1g.10gb", 1006: "1g.10gb"}
    assert cluster.queue.rows[9].tasks == 4
    assert cluster.actions() == [(9, "retype", "1g.6gb", "1g.10gb", False, None)]


def test_array_throttle_is_set_to_what_the_deadline_needs(site: Callable[..., Site]) -> None:
    cluster = site(array())
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 3
    assert cluster.actions() == [(9, "throttle", "none", "3", False, None)]
    assert not cluster.run_round()


SERVICE = "migbatch: model=resnet-50 role=serve rate=90 slo=50ms [mig:1g.10gb:1#abc12345]"


def served(cluster: Site, items: float, after_s: float, latency_ms: float = 20.0) -> None:
    """Two instances of service array 9 have run for `after_s`, and each reports that it has done so many items."""
    for number in (21, 22):
        began = cluster.now - after_s
        fields: dict[str, Any] = {"array_task": str(number), "tasks": 1, "throttle": None, "start": began}
        fields["nodes"] = ("h1",)
        cluster.queue.rows[number] = replace(cluster.queue.rows[9], job_id=number, state="RUNNING", **fields)
        event = {"kind": "progress", "job": number, "restart": 0, "items": items, "latency_ms": latency_ms}
        cluster.control.observer.ingested("h1", [{**event, "ts": cluster.now}], cluster.now)


def test_service_array_runs_as_many_instances_as_its_load_needs(site: Callable[..., Site]) -> None:
    cluster = site(array(tasks=20, comment=SERVICE))
    cluster.rates[P("1g.10gb")] = 20.0
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 5
    served(cluster, 3000.0, 100.0)  # 60 per second and a quarter more; one instance was measured at 30 per second
    assert not cluster.run_round(), "fewer count when no more were needed for a while"
    assert cluster.run_round(HOLD_S) and cluster.queue.rows[9].throttle == 3
    cluster.queue.rows[9] = replace(cluster.queue.rows[9], throttle=2)  # its user has changed the throttle
    assert not cluster.run_round(HOLD_S + 1)
    assert [row[2:4] for row in cluster.actions()] == [("none", "5"), ("5", "3")]


def test_service_array_with_high_latency_gets_more_instances(site: Callable[..., Site]) -> None:
    cluster = site(array(tasks=20, comment=SERVICE.replace("rate=90", "rate=20")))
    cluster.rates[P("1g.10gb")] = 20.0
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 1
    served(cluster, 1500.0, 100.0, latency_ms=90.0)
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 3


def test_arrays_of_two_users_share_scarce_supply_from_the_first_round_on(site: Callable[..., Site]) -> None:
    """Slices that are planned for their own tasks count as theirs too."""
    hints = "migbatch: model=resnet-50 items=600 deadline={} [mig:1g.10gb:1#abc12345]"
    urgent = array(9, 25, comment=hints.format("2m"))
    later = array(40, 60, user="bob", comment=hints.format("5m"))
    cluster = site(urgent, later)
    cluster.used["h2"] = ["7g.80gb"]
    assert cluster.run_round()
    assert (cluster.queue.rows[9].throttle, cluster.queue.rows[40].throttle) == (5, 2)
    found = {row["job_id"]: row["why"] for row in cluster._do(lambda store: store.actions())}
    assert found[9].endswith("5 at once")
    assert found[40].endswith(f"2 is the share of bob, as users need more than there is: {LATER}")
    assert not cluster.run_round(), "the same in the next round"
    cluster.used["h2"] = []
    assert cluster.run_round() and cluster.queue.rows[40].throttle == 5


def test_error_about_ended_array_tasks_is_not_a_refusal(site: Callable[..., Site]) -> None:
    cluster = site(array())
    cluster.queue.ended = True
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 3
    assert not cluster.run_round() and len(cluster.queue.calls) == 1
    assert cluster.actions() == [(9, "throttle", "none", "3", False, None)]


def test_array_tasks_beyond_the_throttle_are_not_retyped(site: Callable[..., Site]) -> None:
    cluster = site(array(9, 6, "1g.6gb"))
    cluster.used = {"a1": ["1g.6gb"] * 3, "h1": ["7g.80gb"], "h2": ["1g.10gb"] * 5}
    cluster.rates[P("1g.6gb")] = 600 / 18.0
    cluster.decide("abc12345")
    assert cluster.run_round() and cluster.queue.calls == [{"9": {"ArrayTaskThrottle": "2"}}]


def test_user_throttle_still_applies_when_squeue_does_not_show_it(site: Callable[..., Site]) -> None:
    """squeue prints no %n when only one task is left to start."""
    cluster = site(array(throttle=1))
    cluster.run_round()
    started = replace(
        cluster.queue.rows[9], job_id=20, array_task="11", tasks=1, throttle=None, state="RUNNING", start=cluster.now
    )
    cluster.queue.rows[20] = started
    cluster.queue.rows[9] = replace(cluster.queue.rows[9], array_task="12", tasks=1, throttle=None)
    cluster.rates[P("1g.10gb")] /= 10  # two at once would be needed, but the user allows one
    assert not cluster.run_round() and cluster.queue.calls == []


def test_user_throttle_is_still_the_bound_after_a_restart(site: Callable[..., Site]) -> None:
    cluster = site(array(throttle=4))
    cluster.used["h1"] = cluster.used["h2"] = ["7g.80gb"]  # other jobs wait too: the array gets no more than it needs
    cluster.queue.rows[5] = job(5, "3g.40gb", comment="")
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 3
    cluster.restart()
    cluster.rates[P("1g.10gb")] /= 5  # the tasks turn out to be slower: it needs far more
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 4
    assert cluster.actions()[-1] == (9, "throttle", "3", "4", False, None)


def test_user_throttle_is_the_bound_where_an_earlier_array_had_the_number(site: Callable[..., Site]) -> None:
    """Slurm may start again with its job ids; then the record has what was done to an array of the same number."""
    cluster = site(array())
    assert cluster.run_round() and cluster.queue.rows[9].throttle == 3
    cluster.now += 30 * 86400.0
    cluster.queue.rows[9] = array(throttle=3, submit=cluster.now - 1.0)
    cluster.restart()
    cluster.rates[P("1g.10gb")] /= 5  # it needs more
    assert not cluster.run_round() and cluster.queue.rows[9].throttle == 3


def test_no_throttle_is_set_without_the_record(site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = site(array())
    monkeypatch.setattr(type(cluster.writer.fault), "open", property(lambda self: True))
    assert not cluster.run_round() and cluster.queue.calls == []


def test_gres_counts_of_slurm_are_the_capacity_when_supply_is_not_managed(tmp_path: Path) -> None:
    queue = Queue(job(1, "1g.6gb"), job(2, "1g.6gb"))
    cluster = Site(f"sqlite:///{tmp_path}/db", queue)
    try:
        cluster.managed = False
        cluster.nodes = (
            NodeRow("a1", frozenset({"IDLE"}), gres={"1g.6gb": 1}, partitions=("mig",)),
            NodeRow("h1", frozenset({"IDLE"}), gres={"1g.10gb": 1}, partitions=("mig",)),
            NodeRow("cat", frozenset({"DOWN"}), gres={"1g.10gb": 9}, partitions=("mig",)),
        )
        cluster.decide("abc12345")
        assert cluster.run_round() and kinds(queue) == {1: "1g.6gb", 2: "1g.10gb"}
    finally:
        cluster.close()


def test_round_updates_any_number_of_jobs_with_one_process(site: Callable[..., Site]) -> None:
    cluster = site(*(job(n) for n in range(1, 40)), array(100, 4))
    cluster.decide("abc12345")
    assert cluster.run_round()
    assert [set(call) >= {"100"} for call in cluster.queue.calls] == [True, False], (
        "the second call has the jobs whose decisions were queried"
    )
    assert len(cluster.queue.calls[1]) > 10


def test_replay_of_recorded_dispatch_makes_the_same_decisions(site: Callable[..., Site], tmp_path: Path) -> None:
    """Re-types, throttles and changes that Slurm did not confirm, over segments of three rounds; also without names."""
    service = array(9, 20, comment=SERVICE, user="eve")
    one, other = tied(61), tied(62, 61)
    cluster = site(job(1, name="ann's"), job(2), array(40, 12, "1g.10gb"), service, one, other)
    cluster.managed = False
    cluster.nodes = (
        NodeRow("a1", frozenset({"IDLE"}), gres={"1g.6gb": 1}, partitions=("mig",)),
        NodeRow("h1", frozenset({"IDLE"}), gres={"1g.10gb": 5}, partitions=("mig",)),
    )
    recorder = FlightRecorder(tmp_path / "decisions", cluster.control.settings, hours=8 * 3 / 3600, megabytes=1)
    cluster.control.recorder = recorder
    cluster.decide("abc12345")
    for number in range(12):
        cluster.queue.broken = number < 2  # Slurm makes the changes but does not confirm them
        cluster.queue.rows[5] = job(5, "1g.6gb", submit=cluster.now)
        if number == 5:
            served(cluster, 30_000.0, 100.0)
        cluster.run_round()
        recorder.flush()
    recorder.close()
    entries = [entry for path in segments(tmp_path / "decisions") for entry in read_entries(path)]
    kinds = {kind for entry in entries for kind in entry.get("actions", ())}
    assert kinds == {"retypes", "throttles", "unknown"}
    assert any(done.get("unsure") for entry in entries for done in entry.get("outcomes", {}).get("dispatch", ()))
    memories = [entry["memory"]["dispatch"] for entry in entries if entry.get("memory")]
    assert "eve" in memories[-1]["served"]["spent"] and memories[-1]["loads"]["counts"]
    for known in memories:  # a recording from before services, shares and pipelines has none of these
        del known["served"], known["loads"], known["pipelines"]
    assert list(replay(json.loads(json.dumps(entries))))
    entries = [entry for path in segments(tmp_path / "decisions") for entry in read_entries(path)]
    names = CollectedNames()
    assert list(without_names(entries, names))
    assert names.found["pipeline"] == {"night"}
    without = list(without_names(entries, Pseudonyms(names)))
    assert "night" in json.dumps(entries) and "night" not in json.dumps(without)
    for recording in (entries, without):
        rounds = list(replay(json.loads(json.dumps(recording))))
        assert rounds[-1].segment > 2
        assert not any(recorded.differences or recorded.unknown for recorded in rounds)
