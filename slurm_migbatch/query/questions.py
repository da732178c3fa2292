"""User queries as typed values: no command lines, file names or addresses.

A query comes over the network from any user, so `read` trusts nothing: every field has a type and a bound, unknown
fields are refused, and texts have no control characters but those between columns. The standard library only: login
nodes import this.
"""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Field, Pattern, Value, fields

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar

MAX_QUESTION = 65536
"""Maximum size of a query on the wire, in bytes."""
_WORDS = 500
SEPARATORS = "\t\x1c\x1d\x1e\x1f"
"""Control characters that may separate columns."""
JOB = Pattern(
    r"(\d{1,18})(?:_(\d{1,9})|_\[[\d,:-]*?(\d{1,9})(?::\d+|[,-]\d*\.\.\.)?(?:%\d+)?\]|\+(\d{1,9}))?(?:\.[\w+]+)?",
    "ASCII",
)
"""A job id as Slurm prints it; of the waiting tasks of an array (12_[4,8-50%2]) the last one, which starts last."""
#: field -> its form, and the variable that sets it. A strftime format has no widths: a C library may allocate as much.
_FORMS = {
    "time_style": (Pattern(r"(?:[^%]|%[-_0^#]?[a-zA-Z%])*"), "SLURM_TIME_FORMAT"),
    "zone": (Pattern(r"(?![/:])(?!.*\.\.)[A-Za-z0-9_+,.:/<>-]*"), "TZ"),
}


class QuestionError(ValueError):
    """An invalid query; the message says which field is wrong."""


def text(limit: int, *, optional: bool = False) -> Any:
    """Declare a text of at most `limit` characters; default "", None if it is `optional`."""
    return Field(None if optional else "", limit=limit, optional=optional)


def words(limit: int) -> Any:
    """Declare a list of texts of at most `limit` characters each."""
    return Field((), limit=limit)


def number(limit: int) -> Any:
    """Declare an integer from 1 to `limit`, default None."""
    return Field(None, limit=limit)


class Question(Value, kw_only=True):
    """Base of all queries.

    Attributes:
        kind: its name on the wire.
        bytewise: its texts have one character per byte.
        zone: time zone of the user (TZ); "" for the answering host's.
    """

    kind: ClassVar[str]
    bytewise: ClassVar[bool] = False

    zone: str = text(64)


class SelectedRuns(Question, kw_only=True):
    """The part of a query that selects runs, as the options of migacct of these names do."""

    users: tuple[str, ...] = words(256)
    accounts: tuple[str, ...] = words(256)
    partitions: tuple[str, ...] = words(256)
    nodes: str = text(8192)
    start: str = text(64)
    end: str = text(64)


class RunsQuestion(SelectedRuns):
    """`migacct`: runs of the record, selected and shown according to its options.

    Attributes:
        groups: names or numbers.
        associations: ids of slurmdbd.
        clusters: clusters of the runs; () and "all" for all in the record.
        limit_min, limit_max: time limits, as in -k and -K.
        truncate: limit times and durations to the window.
        columns: as in -o; "" for the default of `brief`, `long` or neither.
        default_columns: the columns if none of the three is given, and the base of "+name"; "" for ours.
        delimiter: separator of columns; None for fixed widths.
        time_style: SLURM_TIME_FORMAT of the user.
    """

    kind: ClassVar[str] = "runs"

    jobs: str = text(32768)
    allusers: bool = False
    states: str = text(1024)
    duplicates: bool = False
    groups: tuple[str, ...] = words(256)
    qos: tuple[str, ...] = words(256)
    wckeys: tuple[str, ...] = words(256)
    names: tuple[str, ...] = words(256)
    clusters: tuple[str, ...] = words(256)
    associations: tuple[str, ...] = words(18)
    limit_min: str = text(64)
    limit_max: str = text(64)
    truncate: bool = False
    slices: bool = True
    columns: str = text(4096)
    default_columns: str = text(4096)
    brief: bool = False
    long: bool = False
    header: bool = True
    delimiter: str | None = text(16, optional=True)
    closed: bool = False
    as_json: bool = False
    as_yaml: bool = False
    convert: bool = True
    units: str = text(1)
    time_style: str = text(64)


class ShowQuestion(Question):
    """`migbatch show`: one job in detail."""

    kind: ClassVar[str] = "show"

    job: str = text(64)
    duplicates: bool = False
    as_json: bool = False


class WhyQuestion(Question):
    """`migbatch why`: why a job waits."""

    kind: ClassVar[str] = "why"

    job: str = text(64)


class NodesQuestion(Question):
    """`migbatch nodes`: nodes, GPUs, layouts and slices."""

    kind: ClassVar[str] = "nodes"

    names: str | None = text(8192, optional=True)
    reasons: bool = False
    as_json: bool = False
    header: bool = True


class LoansQuestion(Question):
    """`migbatch loans`: slices on loan, and training jobs that wait for one."""

    kind: ClassVar[str] = "loans"

    jobs: str | None = text(8192, optional=True)
    over: bool = False
    as_json: bool = False
    delimiter: str | None = text(16, optional=True)
    closed: bool = False
    header: bool = True
    time_style: str = text(64)


class TopQuestion(Question):
    """`migbatch top`, `migbatch nodes --watch`: one page of the current cluster state.

    Attributes:
        names: only these nodes, such as gpu[1-4].
        user: only this user's jobs, a name or a uid; "" for all.
        only: only this profile or partition; "" for all.
    """

    kind: ClassVar[str] = "top"

    names: str | None = text(8192, optional=True)
    user: str = text(256)
    only: str = text(256)


class UsageQuestion(SelectedRuns):
    """`migbatch usage`: sums of held slices.

    Attributes:
        by: columns to group by, separated by commas; "" for the default.
        delimiter: separator of columns; None for a table.
        time_style: SLURM_TIME_FORMAT of the user.
    """

    kind: ClassVar[str] = "usage"

    by: str = text(64)
    header: bool = True
    delimiter: str | None = text(16, optional=True)
    as_csv: bool = False
    as_json: bool = False
    time_style: str = text(64)


class WasteQuestion(SelectedRuns):
    """`migbatch waste`: what was held but not used, by one job, or by the runs that ended in a window.

    Attributes:
        job: as Slurm prints it; "" for a table of the runs that the other fields select.
        limit: number of lines of the table, worst first.
        delimiter: separator of columns; None for a table.
    """

    kind: ClassVar[str] = "waste"

    job: str = text(64)
    limit: int | None = number(100_000)
    header: bool = True
    delimiter: str | None = text(16, optional=True)
    as_csv: bool = False
    as_json: bool = False


class ExplainQuestion(Question):
    """`migbatch explain`: the submit filter's result for a request.

    Its texts are as the filter sees them, one character per byte.
    """

    kind: ClassVar[str] = "explain"
    bytewise: ClassVar[bool] = True

    gres: str | None = text(1024, optional=True)
    gpus: str | None = text(1024, optional=True)
    gpus_per_node: str | None = text(1024, optional=True)
    gpus_per_task: str | None = text(1024, optional=True)
    gpus_per_socket: str | None = text(1024, optional=True)
    comment: str | None = text(1024, optional=True)
    extra: str | None = text(1024, optional=True)
    partition: str | None = text(1024, optional=True)
    nodes: int | None = number(100_000)
    ntasks: int | None = number(1_000_000)
    ntasks_per_node: int | None = number(100_000)
    as_json: bool = False


class PageQuestion(SelectedRuns):
    """`migbatch report`: charts of a time window as one HTML document."""

    kind: ClassVar[str] = "page"


KINDS: Mapping[str, type[Question]] = {
    kind.kind: kind
    for kind in (
        RunsQuestion, ShowQuestion, WhyQuestion, NodesQuestion, LoansQuestion, TopQuestion, UsageQuestion,
        WasteQuestion, ExplainQuestion, PageQuestion,
    )
}  # fmt: skip


def is_job(written: str) -> bool:
    """Return whether a text is a job id as Slurm prints it: 12, 12_3 (array task), 12_[4-9%2] (waiting tasks), 12+1
    (component), 12.0 (step).
    """
    return JOB.fullmatch(written) is not None


def checked(question: Question) -> Question:
    """Return the query if every field is within its bounds. Raises QuestionError."""
    for name, bounds in fields(question):
        _check(question, name, bounds, getattr(question, name))
    return question


def write(question: Question) -> bytes:
    """Return the query in wire format, without defaults, so that services of other releases mostly understand it.

    Raises QuestionError if a field is out of bounds.
    """
    checked(question)
    import json

    defaults = type(question)()
    given = {
        name: value for name, _ in fields(defaults) if (value := getattr(question, name)) != getattr(defaults, name)
    }
    body = json.dumps({"ask": question.kind, **given}, separators=(",", ":")).encode()
    if len(body) > MAX_QUESTION:
        raise QuestionError(f"the query is too large: more than {MAX_QUESTION} bytes")
    return body


def read(body: bytes) -> Question:
    """Parse the wire format. Raises QuestionError for everything that `write` cannot produce."""
    if len(body) > MAX_QUESTION:
        raise QuestionError(f"the query is longer than {MAX_QUESTION} bytes")
    import json

    try:
        given = json.loads(body.decode())  # of bytes, json reads other encodings too, which the worker does not
    except (ValueError, RecursionError):
        raise QuestionError("the query is not JSON") from None
    if not isinstance(given, dict):
        raise QuestionError("the query is not an object")
    name = given.pop("ask", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise QuestionError(f"ask must be one of {', '.join(KINDS)}")
    field_names = {name for name, _ in fields(kind)}
    if given.keys() - field_names:
        raise QuestionError("the query has an unknown field: command and service must be of the same release")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return checked(kind(**values))


def _check(question: Question, name: str, bounds: Mapping[str, Any], value: Any) -> None:
    kind = bounds["kind"]
    if kind == "bool":
        valid = isinstance(value, bool)
    elif kind.startswith("int"):
        valid = value is None or (type(value) is int and 1 <= value <= bounds["limit"])
    elif kind.startswith("tuple"):
        valid = isinstance(value, tuple) and len(value) <= _WORDS and all(_plain(v, bounds["limit"]) for v in value)
    elif value is None:
        valid = bounds["optional"]
    elif question.bytewise:
        valid = isinstance(value, str) and len(value) <= bounds["limit"] and all(char <= "\xff" for char in value)
    else:
        valid = _plain(value, bounds["limit"], SEPARATORS if name == "delimiter" else "")
    form, setting = _FORMS.get(name, (None, name))
    if not valid or (form is not None and form.fullmatch(value) is None):
        raise QuestionError(f"{setting} has a wrong type, is too long, or has invalid content")


def _plain(value: Any, limit: int, allowed: str = "") -> bool:
    """Return whether a value is a text without lone surrogates and control characters, except those `allowed`."""
    return (
        isinstance(value, str)
        and len(value) <= limit
        and not any(
            (char < " " and char not in allowed) or char == "\x7f" or "\ud800" <= char <= "\udfff" for char in value
        )
    )
