"""Selection of runs, and its SQL: one text for SQLite, MariaDB and PostgreSQL.

Nothing here imports SQLAlchemy, which takes ten times as long to import as a query takes: `migacct` reads an SQLite
file without it (`store.reader`), and `store.queries` passes the same text to SQLAlchemy. Column names are qualified by
their table, so that none is taken for a keyword.
"""

from __future__ import annotations

from collections import namedtuple
from itertools import groupby
from operator import itemgetter

from slurm_migbatch.values import TYPE_CHECKING, Value, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    Execute = Callable[[str, Mapping[str, Any]], Iterable[Sequence[Any]]]

#: available fields of a run and of a slice: the columns of their tables
RUN_FIELDS = (
    "id", "job_id", "restart", "reuse", "latest", "array_job", "array_task", "het_job", "het_offset", "uid", "user",
    "account", "partition", "gid", "qos", "wckey", "comment", "name", "nodes", "state", "state_from", "reason",
    "exit_code", "signal", "submitted", "started", "ended", "suspended", "resumed", "time_limit_s", "began",
    "span_class", "placed", "asked", "bucket", "decision", "source", "profile", "slice_count", "warm", "setup_ms",
    "predicted_latency_ms", "predicted_throughput_per_s", "predicted_memory_mib", "measured_latency_ms",
    "measured_throughput_per_s", "measured_memory_mib", "measured_items", "measured_facts", "lesson",
)  # fmt: skip
SLICE_FIELDS = (
    "id", "run_id", "job_id", "restart", "node", "journal", "position", "gpu", "gpu_index", "profile", "slot_start",
    "slot_size", "gi", "ci", "mig_uuid", "since", "until", "outcome",
)  # fmt: skip


def _is_among(name: str, names: str) -> str:
    """Return the condition that a name is in a text of names with commas between them; MariaDB has no || for texts."""
    return f"replace(replace(',N,', 'N', {names}), replace(',N,', 'N', {name}), '') <> replace(',N,', 'N', {names})"


#: classes of runs by length, see `models.span_class`
OPEN, LAST_SPAN_CLASS = 0, 16
#: states of running or pending runs
LIVE_STATES = frozenset({"PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "STOPPED", "SIGNALING"})
#: beginning of the reason of a run for which its node had no slot
MISFIT = "misfit on "
#: outcome of a slice on a node that Slurm has taken from a job that went on (`scontrol update JobId= NumNodes=`)
RETURNED = "returned"
#: until when a slice of `leases` counts: to the end of its run, or to its release on a node that was given back before;
#: null while it is held
HELD_UNTIL = (
    f"CASE WHEN leases.outcome = '{RETURNED}' AND (runs.ended IS NULL OR leases.until < runs.ended) "
    "THEN leases.until ELSE runs.ended END"
)
#: a slice that is not on a node other than those that Slurm gave the run; root of a node can report slices of any run.
ON_ITS_NODES = (
    f"(runs.placed IS NULL OR NOT runs.placed OR leases.outcome = '{RETURNED}' OR "
    f"{_is_among('leases.node', 'runs.nodes')})"
)
_CLOCKS_S = 60.0
_MOST_PLACEHOLDERS = 100
_PUNCTUATION = dict.fromkeys(map(ord, "-_."))


class JobId(Value):
    """A job as users write it: 12, 12_3 (array task), 12+1 (component of a heterogeneous job)."""

    job: int
    task: str | None = None
    offset: int | None = None


class Association(Value):
    """A user's association with an account in slurmdbd.

    Attributes:
        partition: its partition; "" for all but `except_partitions`, which have their own associations.
    """

    account: str
    user: str
    partition: str = ""
    except_partitions: tuple[str, ...] = ()


class RunFilter(Value):
    """Filter of runs; an empty tuple or None does not filter. All conditions must hold.

    Attributes:
        start, end: window in unix seconds. Without `states`, runs that existed in it; with `states`, those that were
            in one of them at some time in it. As in sacct, runs that ended at `start` belong to it, those that were
            submitted at `end` do not; and if both are the same, the window is one second long.
        duplicates: include earlier runs of a job id (requeues, reused numbers). Without them, `select_runs` yields the
            newest of those that meet the conditions, as sacct does: its last run may be outside the window.
        only: (user, accounts): only runs of this user id or charged to one of these accounts, besides other conditions.
        associations: runs of one of these; no runs if empty, all runs for None.
        limits_s: minimum and maximum time limit, seconds, both included; (None, None): unlimited.
    """

    jobs: tuple[JobId, ...] = ()
    users: tuple[str, ...] = ()
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    wckeys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    associations: tuple[Association, ...] | None = None
    limits_s: tuple[int | None, int | None] | None = None
    start: float | None = None
    end: float | None = None
    duplicates: bool = True
    only: tuple[int, tuple[str, ...]] | None = None


class Values:
    """The values of a statement, by their names in its text."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def one(self, value: Any) -> str:
        """Return the placeholder of a value in the text."""
        name = f"v{len(self.found)}"
        if type(value) is str and not value.isascii():
            value = value.encode("utf-8", "replace").decode()  # as stored, see `clean`: an argument may be any bytes
        self.found[name] = value
        return f":{name}"

    def all(self, values: Iterable[Any]) -> str:
        """Return the text of a list of values after IN; a list that matches nothing if empty.

        Numbers and plain words of a long list, or after many values, stand in the text: SQLite before 3.32 accepts at
        most 999 placeholders.
        """
        return f"({', '.join(self.each(values)) or 'NULL'})"

    def each(self, values: Iterable[Any]) -> list[str]:
        """Return the text of each value, as in `all`."""
        listed = list(values)
        form = self.one if len(self.found) + len(listed) <= _MOST_PLACEHOLDERS else self._plain
        return [form(value) for value in listed]

    def _plain(self, value: Any) -> str:
        """Return a number, or a word of letters, digits, `-`, `_` and `.`, as SQL; of anything else the placeholder."""
        if type(value) is int:
            return str(value)
        if type(value) is str and value.isascii() and value.translate(_PUNCTUATION).isalnum():
            return f"'{value}'"
        return self.one(value)


class Statement(Value):
    """A SELECT with the names of its columns; the first column is the run's id.

    `slices` is the position of the slice's id among them, from which on they belong to the slice; None: runs only.
    """

    text: str
    values: Mapping[str, Any]
    names: tuple[str, ...]
    slices: int | None


def select_runs(
    execute: Execute,
    wanted: RunFilter,
    run_fields: Collection[str],
    slice_fields: Collection[str] = (),
    *,
    by_array: bool = False,
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the selected runs by job id, each with its slices, in one statement that fetches no other fields.

    Args:
        execute: runs a statement with its values and returns its rows.
        wanted: the filter.
        run_fields: names in RUN_FIELDS and RETYPED_FIELDS; "id" and, to leave out duplicates, "job_id" are added.
        slice_fields: names in SLICE_FIELDS, which appear as slice_<name>; () does not read slices at all.
        by_array: yield an array's tasks together, in the order of their numbers, those without a run of their own last.
            If Slurm gave the number of an array task again, this does not count as a duplicate then.

    Yields:
        (row with the run's fields, rows with its slices' fields). With slices, the first slice's row is the run's.
    """
    if not wanted.duplicates:
        run_fields = {*run_fields, "job_id"}
    statement = statement_of(wanted, run_fields, slice_fields, by_array=by_array)
    # the caller chooses the names
    row_type: Any = namedtuple("Row", statement.names)  # type: ignore[misc]
    make = row_type._make
    read = [(position, reader) for position, name in enumerate(statement.names) if (reader := _READERS.get(name))]
    rows: Iterable[Sequence[Any]] = execute(statement.text, statement.values)
    if read:
        rows = (_read(row, read) for row in rows)
    runs = _with_slices(map(make, rows), statement.slices)
    yield from runs if wanted.duplicates else _newest(runs)


def _with_slices(rows: Iterable[Any], slices: int | None) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield runs with their slices from rows by run; `slices`: see `Statement`."""
    if slices is None:
        for row in rows:
            yield row, ()
        return
    for _, group in groupby(rows, key=itemgetter(0)):
        lines = list(group)
        yield lines[0], lines if lines[0][slices] is not None else ()


def _newest(runs: Iterable[tuple[Any, Sequence[Any]]]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the last run of each job id; runs are in the order of `statement_of`."""
    last = None
    for run in runs:
        if last is not None and last[0].job_id != run[0].job_id:
            yield last
        last = run
    if last is not None:
        yield last


def any_run(execute: Execute, wanted: RunFilter) -> bool:
    """Return whether there is any such run."""
    values = Values()
    where = " AND ".join(f"({condition})" for condition in conditions(wanted, values)) or "1 = 1"
    return any(True for _ in execute(f"SELECT runs.id FROM runs WHERE {where} LIMIT 1", values.found))  # noqa: S608


def _read(row: Sequence[Any], readers: Iterable[tuple[int, Callable[[Any], Any]]]) -> list[Any]:
    values = list(row)
    for position, reader in readers:
        if values[position] is not None:
            values[position] = reader(values[position])
    return values


def _document(value: Any) -> Any:
    """Return the value of a JSON column, which some drivers already parse."""
    import json

    return json.loads(value) if isinstance(value, (str, bytes)) else value


_READERS: Mapping[str, Callable[[Any], Any]] = {"latest": bool, "warm": bool, "measured_facts": _document}


#: the array, its use of the job id, and whether a run is of several tasks: these have not started
_BY_ARRAY = (
    "coalesce(runs.array_job, runs.job_id), runs.reuse, runs.array_task LIKE '%-%' OR runs.array_task LIKE '%,%', "
    "length(runs.array_task), runs.array_task, "
)


def statement_of(
    wanted: RunFilter, run_fields: Collection[str], slice_fields: Collection[str] = (), *, by_array: bool = False
) -> Statement:
    """Return the statement of `select_runs`."""
    values = Values()
    names = ["id", *(name for name in run_fields if name != "id")]
    columns = [f"runs.{name}" if name in _RUN_FIELDS else RETYPED_FIELDS[name] for name in names]
    tables, order, slices = "runs", f"{_BY_ARRAY if by_array else ''}runs.job_id, runs.reuse, runs.restart", None
    if slice_fields:
        slices = len(names)
        wanted_slices = ["id", *(name for name in slice_fields if name != "id")]
        columns += [f"leases.{_slice(name)}" for name in wanted_slices]
        names += [f"slice_{name}" for name in wanted_slices]
        tables += (
            " LEFT JOIN leases ON leases.run_id = runs.id AND (leases.outcome IS NULL OR leases.outcome <> 'moved')"
            f" AND {ON_ITS_NODES}"
        )
        order += ", leases.node, leases.position, leases.id"
    where = " AND ".join(f"({condition})" for condition in conditions(wanted, values)) or "1 = 1"
    text = f"SELECT {', '.join(columns)} FROM {tables} WHERE {where} ORDER BY {order}"  # noqa: S608 names are constants
    return Statement(text, values.found, tuple(names), slices)


_RUN_FIELDS, _SLICE_FIELDS = frozenset(RUN_FIELDS), frozenset(SLICE_FIELDS)


def _slice(name: str) -> str:
    if name not in _SLICE_FIELDS:
        raise KeyError(name)
    return name


def conditions(wanted: RunFilter, values: Values) -> Iterator[str]:
    """Yield the conditions on `runs` of a filter, except `duplicates`; all must hold. Adds their values to `values`."""
    if wanted.start is not None and wanted.start == wanted.end:
        wanted = replace(wanted, end=wanted.start + 1)  # as in sacct
    if wanted.only is not None:
        uid, accounts = wanted.only
        yield f"runs.uid = {values.one(uid)} OR runs.account IN {values.all(accounts)}"
    if wanted.jobs:
        yield _any(list(_named(wanted.jobs, values)))
    yield from _chosen(wanted, values)
    # a list of jobs is short: its own indexes are best
    narrow = not wanted.jobs
    owner = _owner(wanted, values)
    windowed = narrow and (wanted.start is not None or wanted.end is not None)
    if owner and (not windowed or (wanted.users and wanted.uids)):
        yield owner
        owner = ""
    if wanted.states:
        yield " OR ".join(f"({state})" for state in _in_states(wanted, narrow, owner, values))
    elif wanted.start is not None or wanted.end is not None:
        yield overlapping(wanted.start, wanted.end, values, narrow=narrow, owner=owner)


def _owner(wanted: RunFilter, values: Values) -> str:
    owners = (("user", wanted.users), ("uid", wanted.uids))
    return " OR ".join(f"runs.{column} IN {values.all(chosen)}" for column, chosen in owners if chosen)


def _chosen(wanted: RunFilter, values: Values) -> Iterator[str]:
    """Yield the conditions of the filters on values of one column."""
    for column, chosen in (
        ("gid", wanted.gids), ("partition", wanted.partitions), ("wckey", _with_default(wanted.wckeys)),
        ("name", wanted.names),
    ):  # fmt: skip
        if chosen:
            yield f"runs.{column} IN {values.all(chosen)}"
    for column, chosen in (("runs.account", wanted.accounts), ("runs.qos", wanted.qos)):
        if chosen:
            yield in_any_case(column, chosen, values)
    if wanted.associations is not None:
        yield " OR ".join(_associated(association, values) for association in wanted.associations) or "1 = 0"
    if wanted.nodes:
        held = f"held.run_id = runs.id AND held.node IN {values.all(wanted.nodes)}"
        ran = [_is_among(node, "runs.nodes") for node in values.each(wanted.nodes)]
        yield f"EXISTS (SELECT held.id FROM leases held WHERE {held}) OR {_any(ran)}"  # noqa: S608
    if wanted.limits_s is not None:
        yield _limited(*wanted.limits_s, values)


def in_any_case(column: str, names: Collection[str], values: Values) -> str:
    """Return the condition that a column has one of these names; slurmdbd has accounts and QOS in lower case, and
    Slurm's commands accept any.
    """
    # SQLite's LOWER and slurmdbd change ASCII letters alone, other databases all
    lowered = dict.fromkeys(form for name in names for form in (name.lower(), _ascii_lower(name)))
    return f"LOWER({column}) IN {values.all(lowered)}"


def _ascii_lower(name: str) -> str:
    return name.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")


def _associated(association: Association, values: Values) -> str:
    account, user = values.one(association.account), values.one(association.user)
    of_user = f"runs.account = {account} AND runs.user = {user}"
    if association.partition:
        return f"({of_user} AND runs.partition = {values.one(association.partition)})"
    if association.except_partitions:
        return f"({of_user} AND runs.partition NOT IN {values.all(association.except_partitions)})"
    return f"({of_user})"


def _with_default(wckeys: Collection[str]) -> tuple[str, ...]:
    """Return the wckeys, each also with the star that Slurm puts before a user's default."""
    return tuple(name for key in wckeys for name in dict.fromkeys((key, f"*{key.removeprefix('*')}")))


def _limited(least: int | None, greatest: int | None, values: Values) -> str:
    if least is None and greatest is None:
        return "runs.time_limit_s IS NULL"
    low = f"runs.time_limit_s >= {values.one(least or 0)}"
    return low if greatest is None else f"{low} AND runs.time_limit_s <= {values.one(greatest)}"


def _any(conditions: Sequence[str]) -> str:
    """Return the condition that one of these holds, as a balanced tree: SQLite accepts a depth of a thousand."""
    if len(conditions) <= 2:
        return " OR ".join(conditions)
    middle = len(conditions) // 2
    return f"({_any(conditions[:middle])}) OR ({_any(conditions[middle:])})"


def _named(jobs: Collection[JobId], values: Values) -> Iterator[str]:
    """Yield the conditions for jobs: one for all whole jobs, and one for each array or heterogeneous job."""
    whole = [id.job for id in jobs if id.task is None and id.offset is None]
    if whole:
        among = values.all(whole)
        yield f"runs.job_id IN {among} OR runs.array_job IN {among} OR runs.het_job IN {among}"
    tasks: dict[int, list[str]] = {}
    components: dict[int, list[int]] = {}
    for id in jobs:
        if id.task is not None:
            tasks.setdefault(id.job, []).append(id.task)
        elif id.offset is not None:
            components.setdefault(id.job, []).append(id.offset)
    for job, names in tasks.items():
        yield f"(runs.array_job IN {values.all((job,))} AND runs.array_task IN {values.all(names)})"
    for job, offsets in components.items():
        yield f"(runs.het_job IN {values.all((job,))} AND runs.het_offset IN {values.all(offsets)})"


def overlapping(start: float | None, end: float | None, values: Values, *, narrow: bool = True, owner: str = "") -> str:
    """Return the condition that a run existed at some time from `start` on and before `end`; see `RunFilter`.

    With `narrow` it has a form that an index on (span_class, ended) answers in time proportional to the number of
    matches, not of runs: a run of a class whose runs last less than 4**c seconds and that began by `end` has ended by
    end + 4**c. `owner`, a condition on the user or the uid, is repeated in each range: indexes begin with these.
    """
    begins = "1 = 1" if end is None else f"runs.began < {values.one(end)}"
    low = "runs.ended IS NOT NULL" if start is None else f"runs.ended >= {values.one(start)}"
    if not narrow:
        return f"{begins} AND (runs.ended IS NULL OR {low})"
    prefix = f"{owner} AND " if owner else ""
    ranges = [f"{prefix}runs.span_class = {OPEN}"]
    for c in range(1, LAST_SPAN_CLASS + 1):
        bounded = end is not None and c < LAST_SPAN_CLASS
        high = f" AND runs.ended <= {values.one((end or 0.0) + 4.0**c)}" if bounded else ""
        ranges.append(f"({prefix}runs.span_class = {c} AND {low}{high})")
    return f"{begins} AND ({' OR '.join(ranges)})"


def _pending(start: float | None, _end: float | None, values: Values) -> str:
    if start is None:
        return "runs.submitted IS NOT NULL"
    low = values.one(start)
    return f"(runs.started > {low} OR runs.started IS NULL AND (runs.ended IS NULL OR runs.ended > {low}))"


def _running(start: float | None, end: float | None, values: Values) -> str:
    # as in sacct, one that is suspended now has not been running before
    running = "runs.started IS NOT NULL AND (runs.ended IS NOT NULL OR runs.state <> 'SUSPENDED')"
    if end is not None:
        running += f" AND runs.started < {values.one(end)}"
    if start is not None:
        running += f" AND (runs.ended IS NULL OR runs.ended > {values.one(start)})"
    return running


def _suspended(start: float | None, end: float | None, values: Values) -> str:
    was = "runs.suspended IS NOT NULL" if end is None else f"runs.suspended <= {values.one(end)}"
    if start is not None:
        was += f" AND coalesce(runs.resumed, runs.ended, {values.one(start)}) >= {values.one(start)}"
    # before migbatchd noted the time
    return f"(runs.suspended IS NULL AND runs.state = 'SUSPENDED' OR {was})"


def _in_states(wanted: RunFilter, narrow: bool, owner: str, values: Values) -> Iterator[str]:
    start, end = wanted.start, wanted.end
    window = "1 = 1"
    if start is not None or end is not None:
        window = overlapping(start, end, values, narrow=narrow, owner=owner)
    states = set(wanted.states)
    for state, condition in (("PENDING", _pending), ("RUNNING", _running), ("SUSPENDED", _suspended)):
        if state in states:
            yield f"{window} AND {condition(start, end, values)}"
    live = states & (LIVE_STATES - {"PENDING", "RUNNING", "SUSPENDED"})
    if live:
        yield f"{window} AND runs.state IN {values.all(sorted(live))}"
    if final := states - LIVE_STATES:
        ended = [f"runs.state IN {values.all(sorted(final))}", "runs.ended IS NOT NULL"]
        if start is not None:
            ended.append(f"runs.ended >= {values.one(start)}")
        if end is not None:
            ended.append(f"runs.ended <= {values.one(end)}")
        yield " AND ".join((window, *ended))


def _retyped(column: str, *, last: bool) -> str:
    """Return a field of the first or last re-type of a run; null if none.

    A re-type of an array's tasks is stored under the id of the array, which its last task has, too; so for a task only
    those to its own profile count.
    """
    of_run = (
        "(runs.array_job IS NULL AND actions.job_id = runs.job_id OR "
        "actions.job_id IN (runs.job_id, runs.array_job) AND actions.after = runs.profile)"
    )
    applied = "actions.kind = 'retype' AND actions.restart = runs.restart AND NOT actions.dry_run"
    # Slurm may have restarted its job ids; times are from several clocks
    in_time = (
        f"(runs.submitted IS NULL OR actions.ts >= runs.submitted - {_CLOCKS_S}) AND "
        f"(runs.started IS NULL OR actions.ts <= runs.started + {_CLOCKS_S})"
    )
    order = f"actions.id{' DESC' if last else ''}"
    where = f"{of_run} AND {applied} AND actions.outcome IS NULL AND {in_time}"
    return f"(SELECT actions.{column} FROM actions WHERE {where} ORDER BY {order} LIMIT 1)"  # noqa: S608


#: additional fields of a run: profiles before and after a re-type, and its reason
RETYPED_FIELDS: Mapping[str, str] = {
    f"retyped_{column}": _retyped(column, last=last)
    for column, last in (("before", False), ("after", True), ("why", True))
}
