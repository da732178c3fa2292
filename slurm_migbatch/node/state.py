"""Report all that a node holds in one event, for a controller whose database lacks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_migbatch.node.journal_rows import OCCUPYING, JournalRun, JournalSlice


def state(
    gpus: Sequence[Mapping[str, object]], rows: Sequence[JournalSlice], runs: Mapping[tuple[int, int], JournalRun]
) -> dict[str, object]:
    """Return the fields of a `state` event: inventory, runs with their slices, slices out of use, idle slices.

    In-flight changes are left out: their own events follow.
    """
    return {
        "gpus": list(gpus),
        "runs": _runs(rows, runs),
        "zombies": [{**row.place, "reason": row.reason} for row in rows if row.state in ("zombie", "foreign")],
        "idle": [row.place for row in rows if row.state == "idle"],
    }


def _runs(rows: Sequence[JournalSlice], runs: Mapping[tuple[int, int], JournalRun]) -> list[dict[str, object]]:
    by_id = {row.id: row for row in rows}
    held: dict[tuple[int, int], list[JournalSlice]] = {}
    for row in rows:
        if row.job is not None and (row.state == "held" or (row.state == "lost" and not _taken(row, rows))):
            held.setdefault((row.job, row.restart or 0), []).append(row)
    return [_run(key, slices, runs.get(key), by_id) for key, slices in sorted(held.items())]


def _taken(lost: JournalSlice, rows: Sequence[JournalSlice]) -> bool:
    """Return whether the placement of a lost slice has another use now."""
    place = lost.slot.placement
    return any(r.gpu == lost.gpu and r.state in OCCUPYING and r.slot.placement.overlaps(place) for r in rows)


def _run(
    key: tuple[int, int],
    slices: Sequence[JournalSlice],
    run: JournalRun | None,
    by_id: Mapping[int | None, JournalSlice],
) -> dict[str, object]:
    fields: dict[str, object] = {
        "job": key[0],
        "restart": key[1],
        "uid": slices[0].uid,
        "since": round(min(row.since for row in slices), 3),
        "slices": [row.event_fields for row in sorted(slices, key=lambda row: row.ordinal or 0)],
    }
    if run is not None:
        fields |= {"user": run.user, "account": run.account, "partition": run.partition, "decision": run.decision}
    hosts = [by_id[row.beside] for row in slices if row.beside in by_id and row.beside is not None]
    if hosts:
        fields["beside"] = [hosts[0].job or 0, hosts[0].restart or 0]
    return fields
