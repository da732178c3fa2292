"""`migbatch usage`: GPU-hours held by account, user, node and profile, and their idle share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from sqlalchemy import Connection

from slurm_migbatch.query.questions import UsageQuestion
from slurm_migbatch.query.reading import reading
from slurm_migbatch.query.redact import allowed
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.selected import check_users, selection
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report import usage as report
from slurm_migbatch.report.equivalents import WHOLE, gpu_equivalent
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.slurm.times import time_formatter
from slurm_migbatch.store.capacity import gpu_seconds
from slurm_migbatch.store.queries import RunFilter, any_run, whole_gpus
from slurm_migbatch.store.usage import GROUPS, HeldSlices, held_slices


def answer(question: UsageQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the sums that the user may see."""
    now = time.time()
    try:
        wanted = selection(question, now, rights.uid, allusers=not question.users).wanted
        by = report.parse_by(question.by)
        start = max(wanted.start or 0.0, 0.0)
        end = max(start, min(wanted.end or now, now))
        spans = report.spans(by, start, end)
    except ReportError as error:
        raise Unanswerable(str(error), 2) from None
    if "node" in by and not rights.nodes:
        raise Unanswerable("nodes are private (PrivateData=nodes)")
    wanted = allowed(rights, wanted, accounts="account" in by)
    with reading(site) as connection:
        check_users(question.users, rights, partial(any_run, connection))
        usage = _usage(connection, wanted, by, spans, now, capacity=rights.nodes)
    return Reply(list(_lines(question, usage, (start, end), now)))


def _usage(
    connection: Connection,
    wanted: RunFilter,
    by: tuple[str, ...],
    spans: Iterable[report.WindowPart],
    now: float,
    *,
    capacity: bool,
) -> report.Usage:
    groups = [name for name in by if name in GROUPS]
    holdings: list[tuple[report.WindowPart, HeldSlices]] = []
    capacities: dict[str, dict[str, float] | None] = {}
    for span in spans:
        slices = held_slices(connection, wanted, groups, span.start, span.end, now)
        holdings += [(span, holding) for holding in slices]
        capacities[span.month] = gpu_seconds(connection, span.start, span.end, wanted.nodes) if capacity else None
    known = {month: gpu_s for month, gpu_s in capacities.items() if gpu_s is not None}
    capacity_known = len(known) == len(capacities) and any(any(gpu_s.values()) for gpu_s in known.values())
    wholes = whole_gpus(connection)

    def equivalent(profile: str, size: int) -> float:
        return gpu_equivalent(profile, size, wholes.get((profile, size), WHOLE))

    return report.roll_up(holdings, by, equivalent, known if capacity_known else None)


def _lines(question: UsageQuestion, usage: report.Usage, window: tuple[float, float], now: float) -> Iterator[str]:
    start, end = window
    if question.as_json:
        yield report.document(usage, start, end, now)
    elif question.as_csv:
        yield from report.as_csv(usage, header=question.header)
    elif question.delimiter is not None:
        yield from report.separated(usage, question.delimiter, header=question.header)
    else:
        if question.header:
            yield _title(usage, start, end, question.time_style)
        yield from report.lines(usage, header=question.header)


def _title(usage: report.Usage, start: float, end: float, style: str) -> str:
    moment: Any = time_formatter(style or None, end)
    whole = "of the GPUs' time" if usage.percent_of == report.CAPACITY else "of the used time (capacity is unknown)"
    return f"Slices held from {moment(start)} to {moment(end)}; percent {whole}"
