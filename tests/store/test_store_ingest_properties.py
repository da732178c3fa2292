"""Whatever happens to batches in transit, the same events leave the same record."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.store.db import Store, open_store
from tests.support.store_events import slice_entry
from tests.support.stores import prepared

SIZES = {1: "1g.10gb", 2: "2g.20gb", 4: "3g.40gb"}


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Events of one node with a valid history: allocated slots were free, released slots were allocated."""
    events: list[dict[str, Any]] = []
    held: dict[tuple[int, int], list[tuple[int, int]]] = {}
    restarts: dict[int, int] = {}
    boots = 0

    def add(kind: str, **fields: Any) -> None:
        events.append({"seq": len(events) + 1, "ts": 1000.0 + 10 * len(events), "kind": kind, **fields})

    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["start", "start", "stop", "boot", "misfit", "zombie", "again"]))
        if kind == "start":
            job = draw(st.integers(1, 4))
            if any(run[0] == job for run in held):
                continue
            restart = restarts[job] = restarts.get(job, -1) + 1
            taken = {cell for slots in held.values() for start, size in slots for cell in range(start, start + size)}
            slots = []
            for _ in range(draw(st.integers(1, 2))):
                size = draw(st.sampled_from(sorted(SIZES)))
                free = [s for s in range(0, 9 - size, size) if not taken & set(range(s, s + size))]
                if free:
                    slots.append((draw(st.sampled_from(free)), size))
                    taken |= set(range(slots[-1][0], slots[-1][0] + size))
            held[job, restart] = slots
            add("start", job=job, restart=restart, slices=_slices(slots), user=f"u{job}", elapsed_ms=1.0, warm=False)
        elif kind == "stop" and held:
            run = draw(st.sampled_from(sorted(held)))
            code = draw(st.sampled_from([0, 1, 143, None]))
            add("stop", job=run[0], restart=run[1], slices=_slices(held.pop(run)), exit_code=code)
        elif kind == "again" and held:
            run = draw(st.sampled_from(sorted(held)))
            add("start", job=run[0], restart=run[1], slices=_slices(held[run]), user=f"u{run[0]}")
        elif kind == "boot":
            boots += 1
            held.clear()
            add("boot", boot_id=f"b{boots}")
        elif kind in ("misfit", "zombie"):
            add(kind, job=99, restart=0, reason="?")
    return events


def _slices(slots: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    return [slice_entry(start, size, SIZES[size]) for start, size in slots]


def record(store: Store) -> list[Any]:
    """All that the store shows, without row numbers."""
    found = []
    for row in store.runs():
        run = {name: value for name, value in row.run.items() if name not in ("id", "lesson")}
        slice_rows = [{name: value for name, value in p.items() if name not in ("id", "run_id")} for p in row.slices]
        found.append((run, slice_rows))
    return found


def ship(batches: Sequence[Sequence[dict[str, Any]]]) -> tuple[list[Any], list[int]]:
    with tempfile.TemporaryDirectory() as directory, open_store(prepared(f"sqlite:///{directory}/s.db")) as store:
        acks = [store.ingest("n1", "aa", "b", batch).acked for batch in batches]
        for lease, after in pairwise(store.leases()):
            assert lease.gpu != after.gpu or lease.start + lease.size <= after.start, "a slot is held twice"
        return record(store), acks


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_lost_repeated_and_reordered_batches_change_nothing(events: list[dict[str, Any]], chance: Any) -> None:
    straight, (acked,) = ship([events])
    assert acked == len(events)
    shuffled = [[event] for event in events]
    chance.shuffle(shuffled)
    # as a node does: whatever was not acknowledged is sent again, from the first missing event on
    found, acks = ship([*shuffled, events])
    assert (found, acks[-1]) == (straight, len(events))
    cut = chance.randint(0, len(events))
    found, acks = ship([events[:cut], events[max(0, cut - 2) :], events[:cut], events])
    assert (found, acks[-1]) == (straight, len(events))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(
                ["seq", "ts", "kind", "job", "restart", "slices", "gpus", "boot_id", "exit_code", "user", "runs"]
            ),
            st.one_of(
                st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
                st.sampled_from(["start", "stop", "boot", "inventory", "misfit", "state"]),
                st.integers(1, 5),
                st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), max_size=2),
            ),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_no_event_breaks_the_store(events: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as directory, open_store(prepared(f"sqlite:///{directory}/s.db")) as store:
        store.ingest("n1", "aa", "b", events)
        start = {"seq": 1, "ts": 5.0, "kind": "start", "job": 77, "slices": [slice_entry()]}
        assert store.ingest("n1", "bb", "b", [start]).acked == 1
        assert [lease.job for lease in store.leases()] == [77]
