"""What migbatchd does with ended runs of recurring jobs: what the filter receives, and which jobs are retried."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import pytest

from slurm_migbatch.daemon.ended import HistoryClient, StillHeld
from slurm_migbatch.daemon.recurring import RecurringJobs, RecurringWatch
from slurm_migbatch.daemon.retrying import HOLD, OomRetries, changes
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.recurring import DONE, FAILED, OUT_OF_MEMORY, WINDOW, PastRun, RunsPolicy
from slurm_migbatch.slurm.client import JobRow, SlurmError, SlurmTimeout
from slurm_migbatch.store.recurring import RecurringRun, newest_lesson
from tests.support.daemon_running import Running
from tests.support.gpu_kinds import SITE
from tests.support.waiting import PATIENCE_S, eventually


def row(run: int, ended: str = DONE, key: str = "k", profile: str | None = "1g.10gb", **more) -> RecurringRun:
    facts = {"peak_mib": 9700.0, "sm": None, "dram": None, "engine": "", "retry": True, "partition": "gpu", **more}
    facts = {"restart": 0, "het": False, **facts}
    return RecurringRun(number=run, run=run, job=100 + run, recurring=key, profile=profile, ended=ended, **facts)


def test_the_newest_runs_of_the_newest_jobs_are_kept() -> None:
    jobs = RecurringJobs(most=2)
    changed = jobs.take([row(number) for number in range(WINDOW + 5)])
    assert [run[0] for run in changed["k"]] == list(range(5, WINDOW + 5))
    assert PastRun(*jobs.take([row(99, key="k", work="resnet50/infer/b8/224px")])["k"][-1]).work.startswith("resnet50")
    jobs.take([row(100, key="b"), row(101, key="k"), row(102, key="c")])
    assert set(jobs.listed()) == {"k", "c"}


def test_many_jobs_of_one_user_push_out_no_job_of_another() -> None:
    jobs = RecurringJobs(most=3)
    jobs.take([row(1, key="bob's", user="bob")])
    changed = jobs.take([row(number, key=f"ann's {number}", user="ann") for number in range(2, 7)])
    assert list(jobs.listed()) == ["bob's", "ann's 5", "ann's 6"]
    assert {key: [run[0] for run in runs] for key, runs in changed.items()} == {
        "ann's 2": [],
        "ann's 3": [],
        "ann's 4": [],
        "ann's 5": [5],
        "ann's 6": [6],
    }
    jobs.take([row(7, key="eve's", user="eve")])
    assert set(jobs.listed()) == {"bob's", "ann's 6", "eve's"}


def test_job_whose_user_is_known_later_is_dropped_once() -> None:
    jobs = RecurringJobs(most=1)
    jobs.take([row(1, key="a", user=""), row(1, key="a", user="ann")])
    jobs.take([row(2, key="b", user="bob")])
    jobs.take([row(3, key="c", user="eve")])
    assert list(jobs.listed()) == ["c"]


def test_updated_run_replaces_its_earlier_entry() -> None:
    jobs = RecurringJobs()
    jobs.take([row(1, FAILED), row(2), row(3)])
    jobs.take([row(1, OUT_OF_MEMORY)])
    assert [(run.run, run.ended) for run in jobs.past("k")] == [(1, OUT_OF_MEMORY), (2, DONE), (3, DONE)]


def test_runs_without_outcome_key_or_profile_are_left_out() -> None:
    assert RecurringJobs().take([row(1, ""), row(2, key=""), row(3, profile=None)]) == {}


def test_profiles_are_named_as_gres_types() -> None:
    jobs = RecurringJobs()
    jobs.take([row(1, profile="1g.10gb+me")])
    assert jobs.past("k")[0].profile == "1g.10gb.me"


class Client:
    """A Slurm that carries out requests, or refuses them."""

    def __init__(self, version=(24, 11), error: str = "") -> None:
        self._version, self._error = version, error
        self.asked: list = []

    def version(self):
        return self._version

    def requeue_ended(self, job_id, *, update):
        if self._error:
            raise SlurmError(self._error)
        comment = "migbatch: retry=oom [mig:1g.10gb:1#abc]"
        self.asked.append((job_id, update(JobRow(job_id, gres="gres/mig:1g.10gb:1,gres/nic:1", comment=comment))))


def retries(client=None):
    return OomRetries(client or Client(), lambda: SITE, RunsPolicy(3))


def due(*rows, past=()):
    return [offer.profile.name for _, offer in retries().due(rows, lambda key: past)]


def test_run_that_ran_out_of_memory_is_retried_once() -> None:
    done = [PastRun(-number, "1g.10gb", DONE, 7000.0) for number in (3, 2, 1)]
    again = retries()
    assert [offer.profile.name for _, offer in again.due([row(1, FAILED)], lambda key: done)] == ["1g.20gb"]
    assert again.due([row(1, FAILED)], lambda key: done) == []
    assert due(row(1, OUT_OF_MEMORY, peak_mib=100.0), past=done) == ["1g.20gb"]
    assert due(row(1, FAILED, key="")) == ["7g.80gb"]  # nothing else is known of the job


@pytest.mark.parametrize(
    "more",
    [
        {"retry": False},
        {"restart": 1},
        {"het": True},
        {"slices": 2},
        {"peak_mib": 3000.0},
        {"peak_mib": None},
        {"ended": DONE},
        {"profile": None},
        {"partition": "other"},
        {"high": "1g.10gb"},
        {"profile": "7g.80gb", "peak_mib": 80_000.0},
        {"engine": "vllm"},
    ],
)
def test_other_runs_are_not_retried(more) -> None:
    assert due(row(1, **{"ended": FAILED, **more})) == []


def test_retry_stays_within_the_largest_allowed_profile() -> None:
    assert due(row(1, FAILED, key="", high="3g.40gb")) == ["3g.40gb"]


def test_retried_job_gets_another_slice_and_keeps_its_other_gres() -> None:
    client = Client()
    ((found, offer),) = retries(client).due([row(1, FAILED)], lambda key: ())
    assert retries(client).send(found, offer) == ""
    update = {"Gres": "nic:1,mig:7g.80gb:1", "Comment": "migbatch: retry=oom [mig:7g.80gb:1#abc]"}
    assert client.asked == [(101, update)]


class Commands(HistoryClient):
    """The client of Slurm's commands, which records what it would run; with `task`, the job is an array task."""

    def __init__(
        self, job: int = 7, array: int = 7, task: str = "N/A", state: str = "FAILED", restarts: int = 0
    ) -> None:
        super().__init__()
        self.job, self.array, self.task, self.state, self.restarts = job, array, task, state, restarts
        self.run: list[tuple[str, ...]] = []

    def jobs(self):
        waits = any("requeuehold" in words for words in self.run)
        if self.task == "N/A":
            return [JobRow(self.job)] if waits else []
        others = [JobRow(99, self.array, "2", state="RUNNING")]
        others += [JobRow(self.array, self.array, "6-9")] if self.job != self.array else []
        return [*others, *([JobRow(self.job, self.array, self.task)] if waits else [])]

    def update_jobs(self, updates):
        self.before_change()
        self.run.append(("update", *updates))

    def _run(self, program, *arguments):
        if program != "squeue":
            self.run.append((program, *arguments))
            return ""
        others = "" if self.task == "N/A" else f"99|{self.array}|2|RUNNING|0|\n"
        return f"{others}{self.job}|{self.array}|{self.task}|{self.state}|{self.restarts}|\n"


HELD, RELEASE = ("scontrol", "requeuehold", "7"), ("scontrol", "release", "7")


def test_migbatchd_that_is_not_active_requeues_no_job() -> None:
    client = Commands()
    client.requeue_ended(7, update=lambda row: {"Gres": "mig:2g.20gb:1"})
    assert client.run == [HELD, ("update", "7"), ("update", "7"), RELEASE]
    allowed = 0

    def standing_by():
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            raise SlurmError("another migbatchd is active")

    client.before_change = standing_by
    for allowed, expected in ((0, []), (1, [HELD, RELEASE])):  # noqa: B007 - `standing_by` counts it
        client.run.clear()
        with pytest.raises(SlurmError, match="another"):
            client.requeue_ended(7, update=lambda row: {"Gres": "mig:2g.20gb:1"})
        assert client.run == expected, "the held job is released"


@pytest.mark.parametrize("job", [12, 10])  # the last task that starts has the id of its array
def test_array_task_is_requeued_by_its_own_task_id(job: int) -> None:
    client, seen = Commands(job, 10, "3"), []
    client.requeue_ended(job, update=lambda row: seen.append(row.array_task) or {"Gres": "mig:2g.20gb:1"})
    assert seen == ["3"]
    assert {words[-1] for words in client.run} == {"10_3"}
    assert [words[1] for words in client.run if words[0] == "scontrol"] == ["requeuehold", "release"]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "REQUEUE_HOLD"])
def test_job_that_slurm_has_already_requeued_is_not_changed(state: str) -> None:
    client = Commands(state=state)
    with pytest.raises(SlurmError, match="pending or running again"):
        client.requeue_ended(7, update=lambda row: {})
    with pytest.raises(SlurmError, match="no longer known"):
        client.requeue_ended(8, update=lambda row: {})
    assert client.run == []


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "COMPLETING"])
def test_job_that_ran_again_before_its_node_reported_the_first_end_is_not_requeued(state: str) -> None:
    """Its user requeued it while the node's agent was down; it would run a third time."""
    client = Commands(state=state, restarts=1)
    with pytest.raises(SlurmError, match="already run again"):
        client.requeue_ended(7, update=lambda row: {})
    assert client.run == []


def test_job_that_could_not_be_released_is_released_after_the_next_query() -> None:
    class Overloaded(Commands):
        busy = True

        def version(self):
            return (24, 11)

        def _run(self, program, *arguments):
            if arguments[0] == "release" and self.busy:
                raise SlurmError("scontrol did not answer within 20 s")
            return super()._run(program, *arguments)

    client = Overloaded()
    again = retries(client)
    ((found, offer),) = again.due([dataclasses.replace(row(1, FAILED, key=""), job=7)], lambda key: ())
    with pytest.raises(StillHeld, match="still held"):
        again.send(found, offer)
    client.busy = False
    ending = JobRow(7, state="COMPLETING", restarts=1)
    assert again.left_held([JobRow(8), ending]) == []
    held = JobRow(7, restarts=1, gres="gres/mig:1g.10gb:1", comment="[mig:1g.10gb:1#abc]")
    assert again.left_held([held]) == [(held, offer.profile)]
    client.jobs = lambda: [held]
    assert again.release(held, offer.profile) == ""
    assert client.run[-3:] == [("update", "7"), ("update", "7"), RELEASE]
    assert again.left_held([held]) == []
    client.busy = True
    with pytest.raises(StillHeld, match="still held"):
        again.release(held, offer.profile)
    assert again.left_held([held]) == [(held, offer.profile)]


def test_job_that_slurm_requeues_after_migbatchd_gave_up_waiting_is_released() -> None:
    """`scontrol requeuehold` that did not answer may be carried out later: the job would stay held."""

    class Overloaded(Commands):
        def version(self):
            return (24, 11)

        def _run(self, program, *arguments):
            if arguments[0] == "requeuehold":
                raise SlurmTimeout("scontrol did not answer within 20 s")
            return super()._run(program, *arguments)

    again = retries(Overloaded())
    ((found, offer),) = again.due([dataclasses.replace(row(1, FAILED, key=""), job=7)], lambda key: ())
    with pytest.raises(StillHeld, match="may be requeued and held"):
        again.send(found, offer)
    assert again.left_held([JobRow(8)]) == [], "not requeued yet"
    held = JobRow(7, restarts=1, gres="gres/mig:1g.10gb:1", comment="[mig:1g.10gb:1#abc]")
    assert again.left_held([held]) == [(held, offer.profile)]


def hold(job: int, restart: int = 1, kind: str = HOLD) -> dict:
    return {"job_id": job, "restart": restart, "kind": kind, "after": "2g.20gb"}


def test_only_jobs_that_are_still_held_are_released_after_a_restart() -> None:
    again = retries()
    again.recall([hold(7), hold(7, kind="retype"), hold(8), hold(9), hold(10), hold(8, restart=0, kind="retype")])
    queue = [JobRow(7, restarts=1), JobRow(8, restarts=1), JobRow(9, restarts=1, priority=5), JobRow(10, restarts=2)]
    assert again.left_held(queue) == [(JobRow(8, restarts=1), Profile.parse("2g.20gb"))]


def test_job_that_a_killed_migbatchd_left_held_gets_its_slice_and_is_released(config, slurm, store, signer) -> None:
    job = JobRow(7, gres="gres/mig:1g.10gb:1", comment="migbatch: retry=oom [mig:1g.10gb:1#abc]", restarts=1)
    slurm.queue[7] = job
    store.done = [hold(7)]
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)):
        eventually(lambda: len(store.done) == 2)
    assert slurm.queue[7].priority
    assert slurm.updates == [("7", changes(job, Profile.parse("2g.20gb")))]
    assert [store.done[1][key] for key in ("kind", "restart", "before", "after", "outcome")] == [
        *("retype", 1, "1g.10gb", "2g.20gb", None)
    ]


def test_retry_is_recorded_before_the_job_is_held(config, slurm, store, signer) -> None:
    slurm.ends[101], recorded = {}, []
    requeue = slurm.requeue_ended

    def watched(job_id, *, update):
        recorded.extend(store.done)
        requeue(job_id, update=update)

    slurm.requeue_ended = watched
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        running.service.submit.facts.catalog = SITE
        running._loop.call_soon_threadsafe(running.service._retry_failed_runs, [row(1, FAILED, key="")])
        eventually(lambda: len(store.done) == 2)
    assert [(action["kind"], action["job_id"], action["restart"]) for action in recorded] == [(HOLD, 101, 1)]
    again = retries()
    again.recall(recorded)
    assert again.held
    again.recall(store.done[1:])
    assert not again.held


def test_retry_in_progress_is_recorded_when_migbatchd_is_stopped_or_reloaded(config, slurm, store, signer) -> None:
    slurm.ends[101], begun = {}, threading.Event()
    requeue = slurm.requeue_ended

    def slow(job_id, *, update):
        begun.set()
        time.sleep(1.0)
        requeue(job_id, update=update)

    slurm.requeue_ended = slow
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        running.service.submit.facts.catalog = SITE
        running._loop.call_soon_threadsafe(running.service._retry_failed_runs, [row(1, FAILED, key="")])
        begun.wait(PATIENCE_S)
    assert slurm.queue[101].priority
    assert [action["kind"] for action in store.done] == [HOLD, "retype"]


def test_supply_does_not_wait_for_the_retries_of_many_jobs(config, slurm, store, signer) -> None:
    """All tasks of a user's array may run out of memory at the same time."""
    begun, answered = [], threading.Event()

    def slow(job_id, *, update):
        begun.append(job_id)
        answered.wait(PATIENCE_S)

    slurm.requeue_ended = slow
    rows = [row(number, FAILED, key="") for number in range(1, 101)]
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        running.service.submit.facts.catalog = SITE
        running._loop.call_soon_threadsafe(running.service._retry_failed_runs, rows)
        try:
            eventually(lambda: len(begun) >= 4)
            before = running.service.poller.latest
            running._loop.call_soon_threadsafe(running.service.poller.nudge)
            eventually(lambda: running.service.poller.latest is not before)
            last = running.service.poller.latest
            running._loop.call_soon_threadsafe(running.service.poller.nudge)
            eventually(lambda: running.service.poller.latest is not last)
        finally:
            answered.set()
        eventually(lambda: len(begun) > 4)


class Writer:
    """A writer that runs at once the work that it is given."""

    def __init__(self, store) -> None:
        self.store = store

    async def answer(self, work, label):
        return work(self.store)


def test_runs_that_ended_just_before_the_start_are_retried_with_all_that_is_known_of_their_jobs() -> None:
    """migbatchd was restarted or reloaded in the second in which the node reported the end."""
    now = time.time()
    past = [dataclasses.replace(row(number), until=now - 90_000.0) for number in range(1, 8)]
    ran_out = dataclasses.replace(row(8, OUT_OF_MEMORY), until=now - 2.0)

    class Record:
        rows = [*past, ran_out]

        def read(self, query, *arguments):
            if query is newest_lesson:
                return self.rows[-1].number
            since, limit = arguments
            return [run for run in self.rows if run.number > since][:limit]

    ended, record = [], Record()
    watch = RecurringWatch(
        Writer(record), lambda changed: None, lambda rows: ended.append((rows, watch.jobs.past("k")))
    )
    asyncio.run(watch._update())
    ((rows, known),) = ended
    assert rows == [ran_out] and len(known) == 8
    record.rows = [*record.rows, dataclasses.replace(row(9), until=0.0)]
    asyncio.run(watch._update())
    assert [run.number for run in ended[1][0]] == [9]


def test_run_that_an_earlier_service_has_retried_is_not_retried_again(config, slurm, store, signer) -> None:
    slurm.ends |= {101: {}, 102: {}, 103: {}}
    now = time.time()
    store.done = [{**hold(101), "ts": now}, {**hold(102), "ts": now - 9000.0}]  # that of another job with this id
    rows = [dataclasses.replace(row(number, FAILED, key=""), until=now - 2.0) for number in (1, 2, 3)]
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        running.service.submit.facts.catalog = SITE
        running._loop.call_soon_threadsafe(running.service._retry_failed_runs, rows)
        eventually(lambda: len(store.done) == 6)
    assert set(slurm.queue) == {102, 103}


def test_refusal_by_slurm_is_reported() -> None:
    (offer,) = [offer for offer in SITE.view(("gpu",)).plain if offer.profile.name == "7g.80gb"]
    assert retries(Client(error="Invalid job id")).send(row(1), offer) == "Invalid job id"
    old = Client(version=(22, 5))
    assert "cannot give a job another slice" in retries(old).send(row(1), offer)
    assert old.asked == []


@pytest.mark.parametrize("comment", ["", "mine", "[mig:1g.10gb:2#abc]", "[mig:1g.10gb:1,2g.20gb:1#abc]"])
def test_job_without_a_grant_of_one_slice_is_not_changed(comment: str) -> None:
    with pytest.raises(ValueError, match="one slice"):
        changes(JobRow(1, gres="gres/mig:1g.10gb:1", comment=comment), Profile.parse("2g.20gb"))
