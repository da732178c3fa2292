"""Dispatch on a real Slurm: pending jobs are re-typed to idle slices, arrays run as many tasks as their deadline needs.

Slices are fixed here ([supply] enabled = false): what is scarce stays so, and what is idle cannot be divided anew.
Jobs take as long as the prediction that dispatch uses says for the slice that they got. Slurm up to 23.02 lets no
pending job change its type; there jobs stay as they are.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.decide.dispatch.shares import LATER
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.store.db import open_store
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.buckets import preferred
from slurm_migbatch.workload.loans import drops_old_gres_type
from tests.support.end_to_end import PATIENCE_S, account, accounts, gate, sbatch, until

HINTS = "migbatch: model=mobilenet-v2 batch=1"
DISPATCH = {"every_s": 0.5, "hold_s": 5.0}
#: the small ones fit on one GPU, so that no order of starts leaves no room for the large ones
COUNTS = {"3g.40gb": 2, "2g.20gb": 2, "1g.10gb": 2}


class Site:
    """A cluster with fixed slices, and jobs that take as long as was predicted."""

    def __init__(self, bed: Cluster, hints: str) -> None:
        self.bed, self.hints = bed, hints
        self.drops_old_type = True  # whether this Slurm lets a pending job change its type
        self.rates = self._rates()
        self.table = bed.home("mbalice") / "rates"
        self.table.write_text("".join(f"{name} {rate}\n" for name, rate in self.rates.items()))

    def _rates(self) -> dict[str, float]:
        """Items a second that decisions count on, by profile."""
        job, message = sbatch(self.bed, "--gres=mig:auto", "--hold", f"--comment={self.hints} items=1", wrap="true")
        assert job, message
        gres, comment = self.bed.run(["squeue", "-h", "-j", str(job), "-o", "%b %k"]).stdout.strip().split(" ", 1)
        self.drops_old_type = drops_old_gres_type(gres)
        name = comment.rpartition("#")[2].removesuffix("]")
        found: dict[str, Any] = {}

        def decision_recorded() -> bool:
            nonlocal found
            with open_store(self.bed.product.record, readonly=True) as store:
                found = store.decision(name) or {}
            return bool(found)

        until("the decision in the record", decision_recorded)
        self.bed.run(["scancel", str(job)])
        lows = {c["profile"]: c["throughput_per_s_range"][0] for c in found["candidates"] if c["ok"]}
        return {profile: preferred(int(low * 1000), ceiling=False) / 1000 for profile, low in lows.items()}

    def items(self, seconds: float, profile: str = "1g.10gb") -> int:
        """How many items take that long on a profile."""
        return int(self.rates[profile] * seconds)

    def submit(self, items: int, *options: str, hints: str = "", gres: str = "mig:auto", user: str = "mbalice") -> int:
        """A job that works through its items at the speed of its slice."""
        read = f"awk -v p=$MIGBATCH_PROFILE '$1 == p {{ print {items} / $2 }}' {shlex.quote(str(self.table))}"
        comment = f"--comment={self.hints} items={items} {hints}"
        job, message = sbatch(self.bed, f"--gres={gres}", comment, *options, wrap=f"sleep $({read})", user=user)
        assert job, message
        return job

    def tasks(self, array: int, count: int) -> list[dict[str, Any]]:
        """The records of an array's tasks, once all have ended."""
        found: list[dict[str, Any]] = []

        def over() -> bool:
            nonlocal found
            found = [row for name, row in accounts(self.bed).items() if name.startswith(f"{array}_") and row["slices"]]
            ends = [slice_row["until_unix_s"] for row in found for slice_row in row["slices"]]
            return len(found) == count and None not in ends and {row["state"] for row in found} == {"COMPLETED"}

        until(f"all tasks of {array}", over)
        return found


def took(rows: list[dict[str, Any]]) -> float:
    """Seconds from the first start to the last end."""
    return max(row["ended_unix_s"] for row in rows) - min(row["started_unix_s"] for row in rows)


def slice_seconds(rows: list[dict[str, Any]]) -> float:
    """Compute slices times seconds that they were held."""
    return sum(
        Profile.parse(slice_row["profile"]).compute * (slice_row["until_unix_s"] - slice_row["since_unix_s"])
        for row in rows
        for slice_row in row["slices"]
    )


@pytest.fixture
def site(new_cluster: Callable[..., Cluster]) -> Iterator[Callable[..., Site]]:
    def make(**changes: Any) -> Site:
        hints = changes.pop("hints", HINTS)
        config = {"supply": {"enabled": False}, "dispatch": {**DISPATCH, **changes.pop("dispatch", {})}}
        return Site(new_cluster(nodes=1, gpus=2, migbatch="all", config=config, **{"counts": COUNTS, **changes}), hints)

    yield make


def scarce(bed: Cluster, wait: str) -> None:
    """Keep all small slices in use until `wait` is over."""
    kinds = ("1g.10gb", "1g.10gb", "2g.20gb", "2g.20gb")
    busy = [sbatch(bed, f"--gres=mig:{profile}:1", wrap=wait, user="mbbob")[0] for profile in kinds]
    until("the scarce slices in use", lambda: {bed.job_state(job) for job in busy} == {"RUNNING"})


def test_auto_jobs_are_retyped_to_an_idle_profile_when_theirs_are_scarce(site: Callable[..., Site]) -> None:
    cluster = site()
    bed = cluster.bed
    path, wait = gate(bed)
    scarce(bed, wait)
    small = cluster.submit(cluster.items(20), hints="deadline=30s")
    middle = cluster.submit(cluster.items(20), hints="deadline=30s min=2g.20gb")
    bound = cluster.submit(cluster.items(20), hints="deadline=30s max=2g.20gb")
    named = cluster.submit(cluster.items(20), hints="deadline=30s", gres="mig:1g.10gb")
    if cluster.drops_old_type:
        for job, before in ((small, "1g.10gb"), (middle, "2g.20gb")):
            assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
            row = account(bed, job, decided=True)
            assert row["profile"] == row["retyped"]["to"] == "3g.40gb" and row["retyped"]["from"] == before
            assert f"no room for {before}, and 3g.40gb is idle on n1" in row["retyped"]["why"]
            assert row["elapsed_s"] <= 30
    # a job that may have no other profile, and one whose user named a profile, wait
    waiting = [bound, named] if cluster.drops_old_type else [small, middle, bound, named]
    assert {bed.job_state(job) for job in waiting} == {"PENDING"}
    path.touch()
    for job in waiting:
        assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
        row = account(bed, job)
        assert row["retyped"] is None and row["profile"] in ("1g.10gb", "2g.20gb") and row["elapsed_s"] <= 30


def test_pipeline_gets_larger_slices_if_its_deadline_needs_them(site: Callable[..., Site]) -> None:
    """Two jobs of twenty seconds on the slices granted, one after the other from the fifteenth second on, due in 60."""
    cluster = site(hints="migbatch: model=densenet121 batch=32")  # which is faster on larger slices
    bed = cluster.bed
    first = cluster.submit(cluster.items(20), "--begin=now+15", hints="pipeline=night deadline=60s")
    second = cluster.submit(cluster.items(20), f"--dependency=afterok:{first}", hints="pipeline=night")
    for job in (first, second):
        assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
    with open_store(bed.product.record, readonly=True) as store:
        split = [action for action in store.actions([first, second]) if "left to its pipeline" in action["why"]]
    assert bool(split) == cluster.drops_old_type
    assert [action for action in split if action["kind"] != "retype" or action["outcome"] is not None] == []
    if not split:
        assert {account(bed, job)["profile"] for job in (first, second)} == {"1g.10gb"}


def test_an_elastic_array_meets_its_deadline_with_the_cheapest_slices(site: Callable[..., Site]) -> None:
    """Twelve tasks of eight seconds, due in 60: one at a time is too slow, all at once also use expensive slices."""
    cluster = site(counts={"3g.40gb": 2, "1g.10gb": 6})
    bed, items, tasks = cluster.bed, cluster.items(8), 12
    elastic = cluster.submit(items, f"--array=1-{tasks}", hints="deadline=60s")
    narrow = cluster.tasks(elastic, tasks)
    assert took(narrow) <= 60
    assert {row["profile"] for row in narrow} == {"1g.10gb"}

    wide = cluster.submit(items, f"--array=1-{tasks}")  # no deadline, no limit
    spread = cluster.tasks(wide, tasks)
    if cluster.drops_old_type:
        dear = [row for row in spread if row["profile"] == "3g.40gb"]
        assert dear and all(row["retyped"]["to"] == "3g.40gb" for row in dear)
        assert slice_seconds(narrow) < slice_seconds(spread)

    fixed = cluster.submit(
        items, f"--array=1-{tasks}%1", hints="deadline=60s"
    )  # a user's own throttle is never exceeded

    def late() -> bool:
        rows = [row for name, row in accounts(bed).items() if name.startswith(f"{fixed}_") and row["started_unix_s"]]
        return (
            bool(rows)
            and max(row["elapsed_s"] + row["started_unix_s"] for row in rows)
            - min(row["started_unix_s"] for row in rows)
            > 60
        )

    until("the deadline of the array with a fixed throttle", late)
    assert bed.job_state(fixed) in ("PENDING", "RUNNING")
    list_running = ["squeue", "-h", "-j", str(fixed), "-t", "RUNNING", "-o", "%i"]
    until("the task that runs, or the next", lambda: len(bed.run(list_running).stdout.split()) == 1)
    with open_store(bed.product.record, readonly=True) as store:
        throttled = [(row["job_id"], row["before"]) for row in store.actions() if row["kind"] == "throttle"]
    assert (elastic, "none") in throttled and fixed not in {job for job, _ in throttled}
    bed.run(["scancel", str(fixed)])


def test_service_array_runs_as_many_instances_as_its_load_needs(site: Callable[..., Site]) -> None:
    """Three can handle the rate of its hints; once all of them do as much as they can, more run."""
    cluster = site(counts={"3g.40gb": 2, "1g.10gb": 6}, node_conf={"SampleEvery": "0.5", "ProgressEvery": "1"})
    bed, rate = cluster.bed, cluster.rates["1g.10gb"]
    speed, stop = bed.home("mbalice") / "speed", bed.home("mbalice") / "stop"
    speed.write_text(f"{int(rate / 2)}\n")
    work = f"n=$((n + $(cat {speed}))); echo items=$n >> $MIGBATCH_PROGRESS; sleep 1"
    hints = f"--comment={HINTS} role=serve rate={2.5 * rate:.3f}"
    options = ("--gres=mig:1g.10gb", "--array=1-30", "--hold", hints)
    array, message = sbatch(bed, *options, wrap=f"n=0; until test -e {stop}; do {work}; done")
    assert array, message

    def throttles() -> list[int]:
        with open_store(bed.product.record, readonly=True) as store:
            return [int(row["after"]) for row in store.actions([array]) if row["kind"] == "throttle"]

    def running() -> int:
        return len(bed.run(["squeue", "-h", "-r", "-j", str(array), "-t", "RUNNING", "-o", "%i"]).stdout.split())

    until("the number of instances for the rate", lambda: throttles() == [3])
    bed.run(["scontrol", "release", str(array)])
    until("three instances", lambda: running() == 3)
    message = bed.run_here([str(Path(sys.executable).with_name("migbatch")), "why", str(array)])
    assert "At once" in message and f"{rate:.3g} items/s of each instance: 3 at once" in message
    speed.write_text(f"{int(3 * rate)}\n")
    until("more instances", lambda: running() > 3)
    assert throttles()[1] > 3
    stop.touch()
    bed.run(["scancel", str(array)])


def test_scarce_slices_go_to_the_earlier_deadline_and_the_later_one_is_met(
    site: Callable[..., Site],
) -> None:
    """Six slices; within 60 s Alice needs four at once, and Bob, who has 200 s, would take three from now on."""
    cluster = site(counts={"3g.40gb": 2, "1g.10gb": 6})
    bed, items = cluster.bed, cluster.items(8)
    bob = cluster.submit(items, "--array=1-40", "--hold", hints="deadline=200s", user="mbbob")
    alice = cluster.submit(items, "--array=1-20", "--hold", hints="deadline=60s")

    def throttles() -> dict[int, tuple[str, str]]:
        with open_store(bed.product.record, readonly=True) as store:
            return {row["job_id"]: (row["after"], row["why"]) for row in store.actions([alice, bob])}

    until("both know their numbers", lambda: {throttles().get(n, "")[0:1] for n in (alice, bob)} == {("4",), ("2",)})
    assert LATER in throttles()[bob][1] and "share" not in throttles()[alice][1]
    bed.run(["scancel", str(alice), str(bob)])


def test_job_blocked_by_a_user_limit_gets_its_own_profile_back(site: Callable[..., Site]) -> None:
    """Slurm accepts the update, then does not start the job for its limit: it gets its own profile back for good."""
    cluster = site(dbd=True, options={"AccountingStorageEnforce": "limits,qos"})
    bed = cluster.bed
    bed.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxTRESPerUser=gres/mig:3g.40gb=0"])
    path, wait = gate(bed)
    scarce(bed, wait)
    job = cluster.submit(cluster.items(3), hints="deadline=30s")

    def moves() -> list[tuple[str, str]]:
        with open_store(bed.product.record, readonly=True) as store:
            return [(row["before"], row["after"]) for row in store.actions([job]) if row["kind"] == "retype"]

    if cluster.drops_old_type:
        until("the limit found out", lambda: moves() == [("1g.10gb", "3g.40gb"), ("3g.40gb", "1g.10gb")])
    path.touch()
    assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
    assert account(bed, job)["profile"] == "1g.10gb"
    assert len(moves()) == (2 if cluster.drops_old_type else 0)
