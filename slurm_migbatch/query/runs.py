"""What `migacct` tells: what jobs asked for, got and did with it, in the way of sacct."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from slurm_migbatch.query.questions import RunsQuestion
from slurm_migbatch.query.redact import RedactedRun, allowed
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.report import document, table
from slurm_migbatch.report.columns import BRIEF, DEFAULT, LONG, Column, Context
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.format import parse_format
from slurm_migbatch.report.selection import ReportOptions, Selection, make_selection
from slurm_migbatch.report.units import UNITS, size_formatter
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.slurm.times import time_formatter
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.queries import RunFilter, select_runs


def answer(question: RunsQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the runs that the question selects; lines are made while they are read."""
    now = time.time()
    try:
        selection, columns, context = _selection(question, now, rights.uid), _columns(question), _context(question, now)
    except ReportError as error:
        raise Unanswerable(str(error)) from None
    remarks = (f"migacct: warning: {selection.remark}",) if selection.remark else ()
    store, wanted = open_store(site.config.store.url, readonly=True), allowed(rights, selection.wanted)
    if question.as_json:
        lines = _document(store, rights, wanted, now)
    else:
        lines = _table(store, rights, wanted, columns, context, _style(question))
    return Reply(_closing(store, lines, site), remarks)


def _selection(question: RunsQuestion, now: float, uid: int) -> Selection:
    asked = ReportOptions(
        jobs=question.jobs,
        users=question.users,
        allusers=question.allusers,
        accounts=question.accounts,
        partitions=question.partitions,
        nodes=question.nodes,
        states=question.states,
        start=question.start,
        end=question.end,
        duplicates=question.duplicates,
    )
    return make_selection(asked, now, uid)


def _columns(question: RunsQuestion) -> tuple[Column, ...]:
    default = LONG if question.long else BRIEF if question.brief else question.default_columns or DEFAULT
    return parse_format(question.columns or default, default)


def _context(question: RunsQuestion, now: float) -> Context:
    units = question.units.upper() or None
    if units is not None and units not in UNITS:
        raise ReportError(f"--units {question.units!r} is not one of {', '.join(UNITS)}")
    moment = time_formatter(question.time_style or None, now)
    return Context(now, moment, size_formatter(unit=units, convert=question.convert))


def _style(question: RunsQuestion) -> table.Style:
    return table.Style(question.header, question.delimiter, question.closed, question.slices)


def _table(
    store: Store, rights: Rights, wanted: RunFilter, columns: tuple[Column, ...], context: Context, style: table.Style
) -> Iterator[str]:
    run_fields = {name for column in columns for name in column.run}
    slice_fields = {name for column in columns for name in column.slice}
    with store.reading() as connection:
        found = _visible_runs(rights, connection, wanted, run_fields, slice_fields)
        yield from table.render(columns, found, context, style)


def _document(store: Store, rights: Rights, wanted: RunFilter, now: float) -> Iterator[str]:
    with store.reading() as connection:
        found = _visible_runs(rights, connection, wanted, document.RUN_FIELDS, document.SLICE_FIELDS)
        yield from document.render(found, wanted, now)


def _visible_runs(
    rights: Rights,
    connection: Connection,
    wanted: RunFilter,
    run_fields: Collection[str],
    slice_fields: Collection[str],
) -> Iterator[tuple[Any, Sequence[Any]]]:
    if rights.everything:
        yield from select_runs(connection, wanted, run_fields, slice_fields)
        return
    for run, slices in select_runs(connection, wanted, {*run_fields, "uid", "account"}, slice_fields):
        yield RedactedRun(rights, run), [RedactedRun(rights, row) for row in slices]


def _closing(store: Store, lines: Iterator[str], site: QuerySite) -> Iterator[str]:
    """Yield the lines, then let go of the record."""
    try:
        yield from lines
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", error)
        raise Unanswerable(f"reading the database failed{site.detail(cause)}", detail=str(cause)) from None
    finally:
        store.close()
