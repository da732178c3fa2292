"""Yield the jobs of `sacct -P`, with any delimiter, of `sacct --json`, or of the log that slurmctld writes with
`JobCompType=jobcomp/filetxt`, as lines with sacct's columns.

sacct does not escape the delimiter or a newline in users' text, so such a row has too many or too few cells. They are
joined again if only one column with users' text can have them; `RowMender` leaves out the other rows, and counts them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.traces.csvlines import CsvLine, TraceError, UnusedRows, lines, opened

AMBIGUOUS: Final = "lines with a delimiter or a newline in a text of their user"
"""What is skipped, for the notice."""
TEXTS: Final = frozenset(
    {"AdminComment", "Comment", "Constraints", "Extra", "JobName", "SubmitLine", "SystemComment", "WCKey", "WorkDir"}
)
"""Columns that may contain the delimiter."""
_DELIMITED: Final = re.compile(r'(?:"?[A-Za-z]+"?|(?=,))([^A-Za-z0-9_%" \r\n])')
_TRES: Final = re.compile(r"((?:billing|cpu|energy|mem|node|pages|vmem|(?:bb|fs|gres|ic|license)/[^=]*)=)", re.ASCII)
_ENDED_RUN: Final = frozenset({"REQUEUED", "RESIZING"})
"""Flags that are the state of a run that has ended; in JSON they follow the state in the queue."""
_JSON_COLUMNS: Final = (
    "JobID", "User", "Partition", "Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "State",
    "AllocTRES",
)  # fmt: skip


def read(path: Path, columns: Sequence[str], command: str, unused: UnusedRows) -> Iterator[CsvLine]:
    """Yield every line; `command` prints such a file. Raises TraceError.

    Args:
        columns: required columns; `a|b` requires one of them.
        unused: counts lines that are skipped, and lines and jobs that cannot be read.
    """
    with opened(path, "replace") as file:
        head = file.read(1 << 16).lstrip("\ufeff \t\r\n")
    if head.startswith(("{", "[")):
        yield from _json_jobs(path, command, unused)
        return
    if head.startswith("JobId="):
        yield from _completed_jobs(path, command, unused)
        return
    match = _DELIMITED.match(head)
    delimiter = match[1] if match and "|" not in head.partition("\n")[0] else "|"
    mender = RowMender(delimiter, unused.skipped)
    yield from lines(path, columns, delimiter, errors="replace", command=command, mend=mender.mend, unused=unused)
    mender.end()


class RowMender:
    """Joins the cells of rows that were divided in a text."""

    def __init__(self, delimiter: str, skipped: Counter[str]) -> None:
        """Count rows that cannot be joined in `skipped`."""
        self._delimiter, self._skipped = delimiter, skipped
        self._begun: list[str] = []

    def mend(self, header: Sequence[str], cells: list[str]) -> list[str] | None:
        """Return the cells of a row; None: it continues in the next one, or is skipped.

        A row that cannot be explained by users' text is returned with its wrong number of cells.
        """
        width = len(header)
        if len(cells) > width and self._delimiter == ",":
            cells = _tres_joined(cells)
        begun, self._begun = self._begun, []
        if begun and (len(cells) != width or not _begins_row(header, cells)):
            cells = [*begun[:-1], f"{begun[-1]}\n{cells[0]}", *cells[1:]]
        elif begun:
            self._skipped[AMBIGUOUS] += 1
        if len(cells) == width:
            return cells
        texts = [place for place, name in enumerate(header) if name.strip() in TEXTS]
        if len(cells) > width:
            return self._narrowed(texts, cells, len(cells) - width) if texts else cells
        if begun and len(texts) == 1:
            cells = [*cells[: texts[0]], self._delimiter.join(cells[texts[0] :])]
        if len(cells) - 1 not in texts:
            return cells
        self._begun = cells
        return None

    def _narrowed(self, texts: Sequence[int], cells: list[str], surplus: int) -> list[str] | None:
        if len(texts) > 1:
            self._skipped[AMBIGUOUS] += 1
            return None
        begin, end = texts[0], texts[0] + surplus + 1
        return [*cells[:begin], self._delimiter.join(cells[begin:end]), *cells[end:]]

    def end(self) -> None:
        """Count a row that was not complete at the end of the file."""
        if self._begun:
            self._skipped[AMBIGUOUS] += 1


def _begins_row(header: Sequence[str], cells: Sequence[str]) -> bool:
    return not header[0].startswith("JobID") or cells[0][:1].isdecimal()


def _tres_joined(cells: Sequence[str]) -> list[str]:
    """Join what a comma as the delimiter divides in lists of TRES; a list has each name once."""
    joined: list[str] = []
    names: set[str] = set()
    for cell in cells:
        match = _TRES.match(cell)
        if match is None or match[1] in names:
            names = set()
        if match is not None and names:
            joined[-1] += f",{cell}"
        else:
            joined.append(cell)
        if match is not None:
            names.add(match[1])
    return joined


# -- jobcomp/filetxt ---------------------------------------------------------------------------------------------------


_COMPLETED: Final = re.compile(
    r"JobId=(\d+) UserId=([^ (]*)\(\d+\) .* JobState=([A-Z_]+) Partition=(\S*) TimeLimit=(\S*) StartTime=(\S+)"
    r" EndTime=(\S+) NodeList=(\S*) .* Tres=(\S*) .* SubmitTime=(\S+) EligibleTime=(\S+)"
    r"(?: ArrayJobId=(\d+) ArrayTaskId=(\d+))?(?: HetJobId=(\d+) HetJobOffset=(\d+))? DerivedExitCode=.*\s*",
    re.ASCII,
)
"""A line; what is between the fields contains users' text."""


def _completed_jobs(path: Path, command: str, unused: UnusedRows) -> Iterator[CsvLine]:
    columns = {name: place for place, name in enumerate(_JSON_COLUMNS)}
    with opened(path, "replace") as file:
        for number, text in enumerate(file, 1):
            match = _COMPLETED.fullmatch(text)
            if match is not None:
                yield CsvLine(path, number, columns, _completed(match))
            elif text.strip():
                wrong = "is not a line of jobcomp/filetxt, which begins with JobId= and has SubmitTime="
                unused.add(TraceError(path, number, f"{wrong}; write the file with {command}"))


def _completed(match: re.Match[str]) -> tuple[str, ...]:
    """Return the cells of one job, in the order of `_JSON_COLUMNS`."""
    job_id, user, state, partition, limit, start, end, nodes, tres, submit, eligible, *array_or_het = match.groups()
    array_id, task, het_id, offset = array_or_het
    job_id = f"{array_id}_{task}" if array_id else f"{het_id}+{offset}" if het_id else job_id
    known = eligible if eligible.lower() != "unknown" else ""
    begun = start if nodes != "(null)" else "Unknown"
    # a run is written when it ends, with its state in the queue: PENDING after a requeue
    ended_as = "REQUEUED" if state == "PENDING" else state
    return job_id, user, partition, submit, known, begun, end, _between(start, end), limit, ended_as, tres


def _between(start: str, end: str) -> str:
    with suppress(ValueError, OverflowError):
        return f"{datetime.fromisoformat(end).timestamp() - datetime.fromisoformat(start).timestamp():.0f}"
    return ""


# -- sacct --json ----------------------------------------------------------------------------------------------------


class _JsonJob(CsvLine):
    """A job of a JSON list, with the columns that sacct would print."""

    __slots__ = ()

    def wrong(self, text: str) -> TraceError:
        """Return an error that names the job by its place in the list."""
        return TraceError(self.path, 0, f"job {self.number} of the list: {text}")


def _json_jobs(path: Path, command: str, unused: UnusedRows) -> Iterator[CsvLine]:
    try:
        with opened(path, "replace") as file:
            jobs = json.load(file, object_hook=_without_steps)["jobs"]
        if not isinstance(jobs, list):
            raise TypeError
    except (ValueError, RecursionError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(path, 0, f"is not complete JSON ({error}); write the file with {command}") from None
    except (KeyError, TypeError):
        why = "is JSON, but not of sacct --json, which has a list of jobs"
        raise TraceError(path, 0, f"{why}; write the file with {command}") from None
    columns = {name: place for place, name in enumerate(_JSON_COLUMNS)}
    for number, job in enumerate(jobs):
        cells: Sequence[str] = ()
        with unused:
            try:
                cells = _cells(job)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                text = f"lacks {error}" if isinstance(error, KeyError) else "is not a job as sacct --json prints it"
                raise TraceError(path, 0, f"job {number} of the list: {text}; write the file with {command}") from None
        if cells:
            yield _JsonJob(path, number, columns, cells)


def _without_steps(row: dict[str, Any]) -> dict[str, Any]:
    """Drop the steps of a job once they are parsed: they are most of the file."""
    row.pop("steps", None)
    return row


def _cells(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one job, in the order of `_JSON_COLUMNS`."""
    times, state = job["time"], job["state"]
    current = state["current"] if isinstance(state, Mapping) else state
    held = (entry for entry in job["tres"]["allocated"] if entry["type"] == "gres")
    return (
        _job_id(job),
        job.get("user") or job.get("association", {}).get("user") or "",
        job.get("partition") or "",
        _number(times["submission"]),
        _number(times.get("eligible")),
        _number(times["start"]) or "Unknown",
        _number(times["end"]) or "Unknown",
        _number(times["elapsed"]) or "0",
        _number(times.get("limit")),
        current if isinstance(current, str) else next(filter(_ENDED_RUN.__contains__, current), current[0]),
        ",".join(f"gres/{entry['name']}={entry['count']}" for entry in held),
    )


def _job_id(job: Mapping[str, Any]) -> str:
    array = job.get("array") or {}
    task = array.get("task_id", array.get("task"))
    known = isinstance(task, int) or (isinstance(task, Mapping) and task.get("set"))
    if array.get("job_id") and known:
        return f"{array['job_id']}_{_number(task) or 0}"
    component = job.get("het") or {}
    if job_id := _number(component.get("job_id")):
        return f"{job_id}+{_number(component.get('job_offset')) or 0}"
    return str(job["job_id"])


def _number(value: object) -> str:
    """Return a number as text, empty if it is 0, not set or infinite; some releases have `{set, infinite, number}`."""
    if isinstance(value, Mapping):
        value = value["number"] if value.get("set") and not value.get("infinite") else 0
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError
    return str(value) if value else ""
