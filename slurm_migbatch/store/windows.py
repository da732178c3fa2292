"""Data of a time window for charts: slices held, waits, predictions, loans, GPUs.

Each is one statement, restricted by a `RunFilter` with a window. SQL as in `runquery`: without SQLAlchemy a page takes
half the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slurm_migbatch.store.runquery import HELD_UNTIL, ON_ITS_NODES, RunFilter, Values, conditions, in_any_case

if TYPE_CHECKING:
    from slurm_migbatch.store.reader import RunReader

#: predicted and measured figures, as columns of a run: predicted_<name>, measured_<name>; throughput first
PREDICTED = ("throughput_per_s", "latency_ms", "memory_mib")

Rows = Sequence[Sequence[Any]]


def held_slices(record: RunReader, wanted: RunFilter) -> Rows:
    """Return (node, GPU, its index, profile, slot's start, its size, since, until, account, SM activity) of slices that
    runs held in the window; a shared slice appears once for each run.

    Selection, times (unix seconds of the run; `until` is None while it is running) and activity (`usage.SM_ACTIVITY`)
    are as in `migbatch usage`.
    """
    values, facts = Values(), "runs.measured_facts"
    clauses = [
        *conditions(wanted, values),
        "runs.started IS NOT NULL",
        "leases.outcome IS NULL OR leases.outcome <> 'moved'",
        "runs.placed IS NULL OR runs.placed",
        ON_ITS_NODES,
    ]
    if wanted.end is not None:
        clauses.append(f"runs.started < {values.one(wanted.end)}")
    if wanted.start is not None:
        clauses.append(f"{HELD_UNTIL} IS NULL OR {HELD_UNTIL} > {values.one(wanted.start)}")
    if wanted.nodes:
        clauses.append(f"leases.node IN {values.all(wanted.nodes)}")
    columns = (
        "leases.node, leases.gpu, leases.gpu_index, leases.profile, leases.slot_start, leases.slot_size, runs.started, "
        f"{HELD_UNTIL}, runs.account, CASE WHEN {record.text_in(facts, 'shared')} IS NULL "
        f"THEN {record.number_in(facts, 'sm')} END"
    )
    return _select(record, columns, "leases JOIN runs ON leases.run_id = runs.id", clauses, values)


def waits(record: RunReader, wanted: RunFilter, bounds: Sequence[float]) -> list[tuple[str, int, int]]:
    """Count the runs that started in the window by profile and wait since submission.

    Args:
        bounds: ascending seconds; class i has waits below bounds[i], class len(bounds) all others.

    Returns:
        (profile, class, runs).
    """
    values = Values()
    wait = "runs.started - runs.submitted"
    classes = "".join(f" WHEN {wait} < {values.one(bound)} THEN {number}" for number, bound in enumerate(bounds))
    clauses = [*conditions(wanted, values), *_in_window("runs.started", wanted, values)]
    clauses += ["runs.submitted IS NOT NULL", "runs.profile IS NOT NULL"]
    columns = f"runs.profile, CASE{classes} ELSE {len(bounds)} END, count(*)"
    rows = _select(record, columns, "runs", clauses, values, " GROUP BY 1, 2")
    return [(str(profile), int(number), int(count)) for profile, number, count in rows]


def predictions(record: RunReader, wanted: RunFilter) -> Rows:
    """Return predicted and measured figures of runs that ended in the window: two columns for each of PREDICTED.

    Throughput is measured for the whole run and predicted for one slice: the prediction is for all of the run's slices.
    """
    values = Values()
    pairs = [(f"runs.predicted_{name}", f"runs.measured_{name}") for name in PREDICTED]
    pairs[0] = (f"{pairs[0][0]} * runs.slice_count", pairs[0][1])
    either = " OR ".join(f"{predicted} > 0 AND {measured} > 0" for predicted, measured in pairs)
    clauses = [*conditions(wanted, values), *_in_window("runs.ended", wanted, values), either]
    return _select(record, ", ".join(column for pair in pairs for column in pair), "runs", clauses, values)


def loans(record: RunReader, wanted: RunFilter) -> Rows:
    """Return (profile, started, signalled, requeued, ended, cause, gpu, memory slices) of loans active at some time in
    the window. The last is of the run's slice, null if no node has reported it.

    Only the window, users, accounts, partitions, nodes and `only` of the filter are used.
    """
    values = Values()
    clauses = ["loans.started IS NOT NULL"]
    if wanted.end is not None:
        clauses.append(f"loans.started < {values.one(wanted.end)}")
    if wanted.start is not None:
        clauses.append(f"loans.ended IS NULL OR loans.ended >= {values.one(wanted.start)}")
    if wanted.only is not None:
        uid, accounts = wanted.only
        clauses.append(f"loans.uid = {values.one(uid)} OR loans.account IN {values.all(accounts)}")
    if wanted.users or wanted.uids:
        clauses.append(f"loans.user IN {values.all(wanted.users)} OR loans.uid IN {values.all(wanted.uids)}")
    if wanted.accounts:
        clauses.append(in_any_case("loans.account", wanted.accounts, values))
    for column, names in (("partition", wanted.partitions), ("node", wanted.nodes)):
        if names:
            clauses.append(f"loans.{column} IN {values.all(names)}")
    columns = (
        "loans.profile, loans.started, loans.signalled, loans.requeued, loans.ended, loans.cause, loans.gpu, "
        "(SELECT max(leases.slot_size) FROM leases JOIN runs ON leases.run_id = runs.id WHERE leases.gpu = loans.gpu "
        "AND runs.job_id = loans.job_id AND runs.restart = loans.restart)"
    )
    return _select(record, columns, "loans", clauses, values)


def gpus(record: RunReader, wanted: RunFilter) -> Rows:
    """Return (node, uuid, index) of the GPUs in MIG mode that nodes have now."""
    values = Values()
    clauses = ["gpus.present", "gpus.mig"]
    if wanted.nodes:
        clauses.append(f"gpus.node IN {values.all(wanted.nodes)}")
    return _select(record, "gpus.node, gpus.uuid, gpus.gpu_index", "gpus", clauses, values)


def _select(record: RunReader, columns: str, tables: str, known: Iterable[str], values: Values, end: str = "") -> Rows:
    where = " AND ".join(f"({condition})" for condition in known)
    return record.rows(f"SELECT {columns} FROM {tables} WHERE {where}{end}", values.found)  # noqa: S608 names are constants


def _in_window(moment: str, wanted: RunFilter, values: Values) -> Iterator[str]:
    """Yield the conditions that a time is known and in the window, before its end."""
    yield f"{moment} IS NOT NULL"
    if wanted.start is not None:
        yield f"{moment} >= {values.one(wanted.start)}"
    if wanted.end is not None:
        yield f"{moment} < {values.one(wanted.end)}"
