"""`migbatch report`: charts of a time window, for the runs that the user may see."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from slurm_migbatch.mig.text import printable
from slurm_migbatch.query.collection import no_collection
from slurm_migbatch.query.questions import PageQuestion
from slurm_migbatch.query.redact import allowed
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.selected import check_users, failed, selection
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.pictures import charts, sums
from slurm_migbatch.report.pictures.bins import TimeBins
from slurm_migbatch.report.pictures.charts import Chart
from slurm_migbatch.report.pictures.page import render
from slurm_migbatch.report.pictures.words import moment, zone
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.store import windows
from slurm_migbatch.store.errors import ReadError
from slurm_migbatch.store.reader import RunReader, open_reader
from slurm_migbatch.store.runquery import RunFilter
from slurm_migbatch.values import replace

_FINE, _COARSE = 250, 62
"""Number of bins of lines and layouts, and of bars."""
_ACCOUNTS, _GPUS, _PROFILES = 12, 32, 10
"""Number of accounts drawn; tables list all accounts."""
_FIGURES = (("Throughput", "items/s"), ("Latency of a batch", "ms"), ("Memory", "MiB"))


def answer(question: PageQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the HTML document."""
    now = time.time()
    try:
        wanted = selection(question, now, rights.uid, allusers=not question.users, duplicates=True).wanted
    except ReportError as error:
        raise Unanswerable(str(error), 2) from None
    with no_collection():
        return Reply([page(wanted, rights, site, now)])


def page(wanted: RunFilter, rights: Rights, site: QuerySite, now: float) -> str:
    """Return the HTML document.

    Args:
        wanted: has a window.
        rights: of the user; hidden runs of others do not count, hidden names are omitted.
        now: unix seconds; a window ends by then.

    Raises:
        Unanswerable: the window is empty, a user is unknown, or the database fails.
        StoreError: the record cannot be opened.
    """
    assert wanted.start is not None
    end = min(now, wanted.end if wanted.end is not None else now)
    if end <= wanted.start:
        problem = "is in the future" if wanted.start > now else "is empty; -E must be later than -S"
        raise Unanswerable(f"the window from {moment(wanted.start)} to {moment(end)} {problem}", 2)
    permitted = allowed(rights, replace(wanted, end=end))
    try:
        with contextlib.closing(open_reader(site.url)) as record:
            check_users((*wanted.users, *map(str, wanted.uids)), rights, record.has_run)
            drawn = [chart for chart in _charts(record, permitted, rights) if chart.table.rows]
    except ReadError as error:
        raise failed(error, site) from None
    notes = (
        []
        if permitted.only is None
        else ["Only your own runs and those of accounts that you coordinate (PrivateData)."]
    )
    if not drawn:
        notes.append("The record has no matching data.")
    return render(
        _title(wanted),
        f"From {moment(wanted.start)} to {moment(end)} ({zone(end)}).",
        drawn,
        f"Created by migbatch report on {moment(now)} from migbatch's record.",
        notes,
    )


def _title(wanted: RunFilter) -> str:
    filters = (
        ("account", wanted.accounts), ("user", (*wanted.users, *map(str, wanted.uids))),
        ("partition", wanted.partitions), ("node", wanted.nodes),
    )  # fmt: skip
    # an argument may be any bytes, which a file in UTF-8 cannot hold
    parts = [f"{noun} {printable(', '.join(names))}" for noun, names in filters if names]
    return f"GPU slices: {'; '.join(parts)}" if parts else "GPU slices"


def _charts(record: RunReader, wanted: RunFilter, rights: Rights) -> Iterator[Chart]:
    assert wanted.start is not None
    assert wanted.end is not None
    fine, coarse = (TimeBins.over(wanted.start, wanted.end, max_bins) for max_bins in (_FINE, _COARSE))
    wholes = record.wholes()
    held = sums.SliceColumns.of(windows.held_slices(record, wanted), wanted.end, wholes=wholes, named=rights.accounts)
    # idle GPUs belong only to a chart of all runs
    all_runs = not (wanted.accounts or wanted.users or wanted.uids or wanted.partitions or wanted.only)
    rows = windows.gpus(record, wanted) if all_runs and rights.nodes else ()
    gpus = [(str(row[0]), row[2], str(row[1])) for row in rows]
    uses = sums.use_by_account(held, coarse)
    if uses:
        yield charts.use_by_account(uses, _ACCOUNTS)
        yield charts.use_over_time(sums.use_over_time(held, coarse), coarse)
        yield charts.profiles_over_time(sums.profiles_over_time(held, fine), held.profiles, fine, len(gpus))
    bounds = [bound for bound, _ in sums.WAITS[:-1]]
    if waits := sums.waits_by_profile(windows.waits(record, wanted, bounds), _PROFILES):
        yield charts.waits(waits)
    if uses and rights.nodes:
        yield charts.layout(sums.layout_over_time(held, fine, gpus, _GPUS), held.profiles, fine)
    yield from _agreements(record, wanted)
    if loans := windows.loans(record, wanted):
        yield charts.loans(sums.loans_over_time(loans, coarse, wholes), coarse)


def _agreements(record: RunReader, wanted: RunFilter) -> Iterator[Chart]:
    rows = windows.predictions(record, wanted)
    columns = [np.array(column, np.float64) for column in zip(*rows, strict=True)] or [np.empty(0)] * 2 * len(_FIGURES)
    for number, (figure, unit) in enumerate(_FIGURES):
        agreement = sums.agreement(columns[2 * number], columns[2 * number + 1])
        if agreement is not None:
            yield charts.agreement(agreement, figure, unit)
