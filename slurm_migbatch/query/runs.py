"""`migacct`: requests, allocations and results of jobs, in the style of sacct."""

from __future__ import annotations

import time
from itertools import chain

from slurm_migbatch.query.redact import RedactedRun, allowed
from slurm_migbatch.query.reply import Reply, Unanswerable
from slurm_migbatch.query.selected import check_users, failed, selection
from slurm_migbatch.report import table
from slurm_migbatch.report.columns import BRIEF, DEFAULT, LONG, Context
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.format import parse_format
from slurm_migbatch.report.selection import is_number
from slurm_migbatch.report.units import UNITS, size_formatter
from slurm_migbatch.slurm.times import time_formatter
from slurm_migbatch.store.errors import ReadError
from slurm_migbatch.store.reader import open_reader
from slurm_migbatch.store.runquery import RunFilter
from slurm_migbatch.values import TYPE_CHECKING, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

    from slurm_migbatch.query.questions import RunsQuestion
    from slurm_migbatch.query.site import QuerySite
    from slurm_migbatch.report.columns import Column
    from slurm_migbatch.report.selection import Selection
    from slurm_migbatch.slurm.rights import Rights
    from slurm_migbatch.store.reader import RunReader
    from slurm_migbatch.store.runquery import Association

    Found = Iterable[tuple[Any, Sequence[Any]]]


_ASSOCIATIONS_S = 60.0
"""Seconds for which associations from slurmdbd are cached."""


def answer(question: RunsQuestion, rights: Rights, site: QuerySite) -> Reply:
    """Answer with the runs that the query selects; lines are generated while they are read."""
    now = time.time()
    try:
        columns, size = _columns(question), _units(question)
        selection = _selection(question, now, rights.uid)
        cluster = _cluster(question, columns, site)
        associations = _associations(question, cluster, site)
    except ReportError as error:
        raise Unanswerable(str(error)) from None
    reader = open_reader(site.url)
    try:
        check_users(question.users, rights, reader.has_run)
        wanted = allowed(rights, replace(selection.wanted, associations=associations))
        other_cluster = bool(question.clusters) and not {"all", cluster.lower()} & set(_clusters(question))
        fields = _Fields.of(question, columns)
        cut_at = now if question.truncate else None
        visible_runs = iter(() if other_cluster else _visible_runs(reader, rights, wanted, fields, cut_at))
        # read the first run now, to know whether there are any while a remark can still be made
        first = next(visible_runs, None)
        remarks = [selection.remark] if selection.remark else []
        if other_cluster:
            remarks.append(f"this record only has runs of the cluster {cluster}")
        elif first is None:
            remarks.extend(_unknown(wanted, reader))
        visible_runs = visible_runs if first is None else chain((first,), visible_runs)
        wholes = reader.wholes() if fields.weighs else {}
        context = Context(now, time_formatter(question.time_style or None, now), size, wholes, cluster, _group)
        lines = _lines(question, columns, visible_runs, wanted, context)
    except ReadError as error:
        reader.close()
        raise failed(error, site) from None
    except BaseException:
        reader.close()
        raise
    return Reply(_closing(reader, lines, site), tuple(f"migacct: warning: {remark}" for remark in remarks))


def _selection(question: RunsQuestion, now: float, uid: int) -> Selection:
    invalid = next((text for text in question.associations if not is_number(text)), None)
    if invalid is not None:
        raise ReportError(
            f"-x: {invalid!r} is not an association id; `sacctmgr show associations format=id` lists them"
        )
    return selection(
        question,
        now,
        uid,
        allusers=question.allusers,
        jobs=question.jobs,
        states=question.states,
        gids=_gids(question.groups),
        qos=question.qos,
        wckeys=question.wckeys,
        names=question.names,
        limit=(question.limit_min, question.limit_max),
        duplicates=question.duplicates,
    )


def _gids(groups: Iterable[str]) -> tuple[int, ...]:
    """Return the numbers of groups by name or number, as this host knows them. Raises ReportError."""
    gids = []
    for group in groups:
        try:
            gids.append(_gid(group))
        except (KeyError, OverflowError):
            raise ReportError(f"Invalid group id: {group}") from None
    return tuple(gids)


def _gid(group: str) -> int:
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        if not is_number(group):
            raise
    return grp.getgrgid(int(group)).gr_gid


def _unknown(wanted: RunFilter, reader: RunReader) -> Iterator[str]:
    """Yield the requested names that no run of the record has; only for an empty answer, because it reads all runs."""
    for noun, field, names in (
        ("account", "accounts", wanted.accounts),
        ("QOS", "qos", wanted.qos),
        ("wckey", "wckeys", wanted.wckeys),
    ):
        for name in names:
            if not reader.has_run(RunFilter(**{field: (name,), "only": wanted.only})):  # type: ignore[arg-type]
                yield f"no run visible to you has the {noun} {name!r}"


def _cluster(question: RunsQuestion, columns: Sequence[Column], site: QuerySite) -> str:
    """Return Slurm's name of the cluster if it matters; Slurm is queried for it."""
    required = any(name != "all" for name in _clusters(question)) or bool(question.associations)
    if not required and not any(column.name == "Cluster" for column in columns):
        return ""
    from slurm_migbatch.slurm.client import SlurmError

    try:
        return site.slurm().settings().get("clustername", "")
    except SlurmError:
        if required:
            raise
        return ""


def _clusters(question: RunsQuestion) -> Iterator[str]:
    """Return the requested clusters; Slurm's commands accept their names in any case."""
    return map(str.lower, question.clusters)


def _associations(question: RunsQuestion, cluster: str, site: QuerySite) -> tuple[Association, ...] | None:
    """Return the requested associations from slurmdbd; None if none was requested."""
    if not question.associations:
        return None
    by_id = site.kept(f"associations of {cluster}", _ASSOCIATIONS_S, lambda: site.slurm().associations(cluster))
    return tuple(by_id[id] for id in map(int, question.associations) if id in by_id)


def _columns(question: RunsQuestion) -> tuple[Column, ...]:
    default = LONG if question.long else BRIEF if question.brief else question.default_columns or DEFAULT
    return parse_format(question.columns or default, default)


def _units(question: RunsQuestion) -> Callable[[float | None], str]:
    units = question.units.upper() or None
    if units is not None and units not in UNITS:
        raise ReportError(f"Invalid unit type '{question.units}'. Possible options are '{UNITS}'")
    return size_formatter(unit=units, convert=question.convert)


class _Fields:
    """The fields of runs and slices that the answer needs."""

    def __init__(self, run: Iterable[str], slices: Iterable[str], weighs: bool) -> None:
        self.run, self.slices = set(run), set(slices)
        #: whether slices are weighted by their share of the GPU
        self.weighs = weighs

    @classmethod
    def of(cls, question: RunsQuestion, columns: Sequence[Column]) -> _Fields:
        if question.as_json or question.as_yaml:
            from slurm_migbatch.report import document

            return cls(document.RUN_FIELDS, document.SLICE_FIELDS, True)
        return cls(
            (name for column in columns for name in column.run),
            (name for column in columns for name in column.slice),
            any(column.name == "GPUHours" for column in columns),
        )


def _lines(
    question: RunsQuestion, columns: Sequence[Column], runs: Found, wanted: RunFilter, context: Context
) -> Iterator[str]:
    if question.as_json or question.as_yaml:
        from slurm_migbatch.report import document

        render = document.render_yaml if question.as_yaml else document.render
        return render(runs, wanted, context.now, context.wholes)
    style = table.Style(question.header, question.delimiter, question.closed, question.slices)
    return table.render(columns, runs, context, style)


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return str(gid)


def _visible_runs(
    reader: RunReader, rights: Rights, wanted: RunFilter, fields: _Fields, cut_at: float | None
) -> Iterator[tuple[Any, Sequence[Any]]]:
    run_fields, slice_fields = fields.run, fields.slices
    if cut_at is not None:
        run_fields = run_fields | {"started", "ended"}
        slice_fields = slice_fields | {"since", "until"} if slice_fields else slice_fields
    if not rights.everything:
        run_fields = run_fields | {"job_id", "uid", "account"}
    runs = reader.runs(wanted, run_fields, slice_fields)
    if cut_at is not None:
        assert wanted.start is not None and wanted.end is not None
        window = (wanted.start, max(wanted.start, min(wanted.end, cut_at)))
        runs = ((_cut(run, *window), [_cut(row, *window) for row in slices]) for run, slices in runs)
    if rights.everything:
        return runs
    return ((RedactedRun(rights, run), [RedactedRun(rights, row) for row in slices]) for run, slices in runs)


def _cut(row: Any, start: float, end: float) -> Any:
    """Return a row with its times limited to the window, as in sacct -T: what is still running ends with the window,
    which is over now at the latest.
    """
    names = row._fields
    changed: dict[str, float] = {}
    for first, last in (("started", "ended"), ("slice_since", "slice_until")):
        if first in names and last in names:
            began, ended = getattr(row, first), getattr(row, last)
            ended = row.ended if ended is None else ended  # see `columns.held_until`
            until = end if ended is None else min(ended, end)
            changed |= {first: min(max(began or until, start), until), last: until}
    return row._replace(**changed)


def _closing(reader: RunReader, lines: Iterator[str], site: QuerySite) -> Iterator[str]:
    """Yield the lines, then release the record."""
    try:
        yield from lines
    except ReadError as error:
        raise failed(error, site) from None
    finally:
        reader.close()
