"""migbatchd's database is lost, set back or replaced under running jobs: the nodes report again what it must know."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.watch import HandoffWatch
from tests.support.end_to_end import account, gate, held, on_offer, planned, sbatch, settled, shown, status, until
from tests.support.servers import postgresql

NewCluster = Callable[..., Cluster]


@contextmanager
def record(bed: Cluster) -> Iterator[Store]:
    """migbatchd's database as it is configured now."""
    with open_store(bed.product.record, readonly=True) as store:
        yield store


def plans(bed: Cluster) -> dict[str, dict[str, Any]]:
    """The plan on each node's disk."""
    found = {}
    for node in bed.spec.node_names:
        path = bed.node_directory(node) / "state/plan.json"
        found[node] = json.loads(path.read_text()) if path.exists() else {"version": 0, "gpus": {}}
    return found


def places(bed: Cluster) -> set[tuple[str, int, str, int, int]]:
    """Node, job and place of every slice that a node's journal says is held."""
    return {
        (node, slice_row["job"], gpu["uuid"], slice_row["start"], slice_row["size"])
        for node in bed.spec.node_names
        for gpu in status(bed, node)["gpus"]
        for slice_row in gpu["slices"]
        if slice_row["state"] == "held"
    }


def supply_is_right(bed: Cluster, before: dict[str, dict[str, Any]]) -> None:
    """Wait until migbatchd has made new plans, knows every held slice, and offers what its plans have: no held place.

    `before` has the plans of the previous migbatchd.
    """
    wrong: list[object] = []

    def right() -> bool:
        wrong.clear()
        journal, plan = places(bed), plans(bed)
        with record(bed) as store:
            known = {(row.node, row.job, row.gpu, row.start, row.size) for row in store.leases()}
        if known != journal:
            wrong.append(f"the record holds {known}, the nodes {journal}")
        for node in bed.spec.node_names:
            if plan[node]["version"] <= before[node]["version"]:
                wrong.append(f"{node} has the plan of before")
            if on_offer(bed, node) != planned(bed, node):
                wrong.append(f"{node} offers {on_offer(bed, node)}, its plan has {planned(bed, node)}")
        for node, job, gpu, start, size in journal:
            slots = plan[node]["gpus"].get(gpu, [])
            across = [(at, n) for _, at, n in slots if at < start + size and start < at + n]
            if across != [(start, size)]:
                wrong.append(f"the place {start}:{size} of job {job} on {node} is planned as {across}")
        return not wrong

    began = time.monotonic()
    try:
        until("right supply", right)
    except TestbedError as error:
        pytest.fail(f"{error}: {wrong}")
    print(f"supply right {time.monotonic() - began:.1f} s after migbatchd answered")


def copy_of(bed: Cluster) -> Path:
    """A backup of the database as it is now."""
    copy = bed.directory / "copy.db"
    with (
        closing(sqlite3.connect(bed.product.state / "migbatch.db")) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    return copy


def removed(bed: Cluster, copy: Path) -> None:
    for file in bed.product.state.glob("migbatch.db*"):
        file.unlink()
    bed.product.reconfigure()


def set_back(bed: Cluster, copy: Path) -> None:
    for file in bed.product.state.glob("migbatch.db*"):
        file.unlink()
    restored = bed.product.state / "migbatch.db"
    shutil.copyfile(copy, restored)
    shutil.chown(restored, bed.spec.daemon_user)
    bed.product.reconfigure()


@pytest.fixture(params=["removed", "set back", "empty PostgreSQL"])
def replace(request: pytest.FixtureRequest) -> Iterator[Callable[[Cluster, Path], None]]:
    """What happens to the database while migbatchd is dead; afterwards migbatchd serves again."""
    if request.param != "empty PostgreSQL":
        yield {"removed": removed, "set back": set_back}[request.param]
        return
    with tempfile.TemporaryDirectory(prefix="migbatch-db-") as directory, postgresql(Path(directory)) as url:
        yield lambda bed, copy: bed.product.reconfigure(store={"url": url})


@pytest.mark.sqlite
def test_jobs_and_supply_survive_the_loss_of_the_database(
    new_cluster: NewCluster, replace: Callable[[Cluster, Path], None]
) -> None:
    bed = new_cluster(migbatch="all", nodes=2, gpus=1)
    opened, waiting = gate(bed)
    ended, until_ended = gate(bed)
    first, _ = sbatch(bed, "--gres=mig:3g.40gb:1", wrap=waiting)
    between, _ = sbatch(bed, "--gres=mig:2g.20gb:1", wrap=until_ended)
    for job in (first, between):
        bed.wait_job(job, "RUNNING")
        account(bed, job, "RUNNING")
    copy = copy_of(bed)
    second, _ = sbatch(bed, "-N2", "--gres=mig:1g.10gb:1", wrap=waiting)
    bed.wait_job(second, "RUNNING")
    account(bed, second, "RUNNING")
    ended.touch()
    bed.wait_job(between)
    until("its end in the journals", lambda: all(job != between for _, job, _ in held(bed)))
    until("empty spools", lambda: all(status(bed, node)["spool"] == 0 for node in bed.spec.node_names))
    before = plans(bed)
    bed.kill("migbatchd")
    with HandoffWatch(bed) as watch:
        replace(bed, copy)
        supply_is_right(bed, before)
        later = [sbatch(bed, "-N1", "--gres=mig:1g.10gb:1", wrap="sleep 1")[0] for _ in range(10)]
        later += [sbatch(bed, "-N1", "--gres=mig:3g.40gb:1", wrap="true")[0] for _ in range(2)]
        later += [sbatch(bed, "-N1", "--gres=mig:7g.80gb:1", wrap="true")[0]]
        for job in later[:12]:
            assert bed.wait_job(job) == "COMPLETED"
        supply_is_right(bed, before)
        opened.touch()
        for job in (first, second, later[12]):
            assert bed.wait_job(job) == "COMPLETED"
    assert watch.problems == []
    assert all("Restarts=0" in shown(bed, job) for job in (first, second, *later))
    until("the ends in the record", lambda: not leases_of(bed))
    with record(bed) as store, store.reading() as connection:
        misfits = connection.execute(text("select count(*) from node_events where kind='misfit'")).scalar()
    assert misfits == 0
    settled(bed)


def leases_of(bed: Cluster) -> list[int]:
    """Jobs that hold a slice according to the record."""
    with record(bed) as store:
        return [row.job for row in store.leases()]
