"""Held slices, summed on each kind of database."""

from __future__ import annotations

import pytest

from slurm_migbatch.store import capacity
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.queries import RunFilter
from slurm_migbatch.store.usage import HeldSlices, held_slices
from tests.support.store_events import Node, slice_entry
from tests.support.usage_record import run


def test_held_time_is_summed_and_clipped_to_the_window(database: str) -> None:
    with open_store(database) as store:
        node = Node(store)
        half = {"seconds": 9.0, "sm": 0.5, "tensor": 0.0, "dram": 0.0}
        run(store, node, 1, 1000, 1100, activity=half)
        run(store, node, 2, 1200, 1250)
        run(store, node, 3, 1300, 1400, shared=True, activity=half)
        run(store, node, 4, 900, 1010, activity=half)
        run(store, node, 5, 1900, 2100)
        run(store, node, 6, 1500, 1600, slice_entry(0, 1), slice_entry(1, 1))
        run(store, node, 7, 1700, None, slice_entry(0, 2, "2g.20gb"), user="")
        run(store, node, 8, 2000, 2500)
        run(store, node, 9, 500, 1000)
        with store.reading() as connection:
            everyone = list(held_slices(connection, RunFilter(), ("user", "node"), 1000, 2000, 1800))
            here = list(held_slices(connection, RunFilter(nodes=("n1",)), ("user", "node"), 1000, 2000, 1800))
            of_account = RunFilter(accounts=("chemistry",), nodes=("n1",))
            both = list(held_slices(connection, of_account, ("user", "node"), 1000, 2000, 1800))
            other = list(held_slices(connection, RunFilter(nodes=("n2",)), (), 1000, 2000, 1800))
            nobody = list(held_slices(connection, RunFilter(accounts=("ml",)), ("partition",), 1000, 2000, 1800))
    alice = ("alice", "n1")
    assert sorted(everyone) == [
        HeldSlices(("1001", "n1"), "2g.20gb", 2, 7, 1, 100.0, 0.0, 0.0),
        HeldSlices(alice, "1g.10gb", 1, 0, 3, 250.0, 100.0, 50.0),
        HeldSlices(alice, "1g.10gb", 1, 4, 1, 10.0, 10.0, 5.0),
        HeldSlices(alice, "1g.10gb", 1, 6, 1, 200.0, 0.0, 0.0),
    ]
    assert sorted(here) == sorted(both) == sorted(everyone)
    assert other == nobody == []


@pytest.mark.parametrize("group", ["user", "account", "partition", "node"])
def test_held_time_can_be_grouped_by_each_field(database: str, group: str) -> None:
    with open_store(database) as store:
        node = Node(store)
        run(store, node, 1, 1000, 1100)
        with store.reading() as connection:
            (found,) = held_slices(connection, RunFilter(), (group,), 0, 2000, 2000)
    assert found.groups == ({"user": "alice", "account": "chemistry", "partition": "gpu", "node": "n1"}[group],)


def test_only_the_last_description_of_gpus_before_the_window_is_read(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node describes its GPUs at each boot and each start of its agent: that is long, and stays for a year."""
    read: list[object] = []
    monkeypatch.setattr(capacity, "_mig_gpus", lambda payload: read.append(payload) or len(payload["gpus"]))
    with open_store(database) as store:
        for name in ("n1", "n2"):
            node = Node(store, name)
            for number in range(20):
                gpus = [{"uuid": f"GPU-{name}-{n}", "mig": True, "geometry": {}} for n in range(1 + number % 4)]
                node.send(node.event("inventory", 100.0 * (number + 1), gpus=gpus))
        seconds = store.read(capacity.gpu_seconds, 1050.0, 1250.0)
        assert seconds == dict.fromkeys(("n1", "n2"), 50 * 2 + 100 * 3 + 50 * 4)
        assert len(read) == 2 * 3
        assert store.read(capacity.gpu_seconds, 1050.0, 1250.0, ("n2",)) == {"n2": 600.0}
