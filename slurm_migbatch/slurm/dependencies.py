"""Read which jobs a pending job waits for, within bounds: a user may name thousands of jobs in --dependency.

squeue fills a column of limited width with spaces, so its listing of all jobs has one that is just wide enough for two
ids. More are needed only of jobs of pipelines: they are read by one more command while the listing does not show all
dependencies of such a job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from slurm_migbatch.slurm.client import OTHERS, JobRow

PIPELINE_HINT: Final = "pipeline="
"""The hint of jobs whose order `decide.dispatch.pipelines` needs."""
MOST: Final = 64
"""Number of ids that are read for a job."""
LONGEST: Final = 4096
"""Bytes of a job's dependencies that are read."""
NARROW: Final = 64
"""The same in the listing of all jobs."""
TRUST_S: Final = 60.0
"""Seconds for which ids are used while the listing shows no change: its user may have changed those that it lacks."""
_AT_ONCE: Final = 1024
"""Jobs whose dependencies are read by one command."""
#: afterok:12(unfulfilled), after:12+5, afterany:12_*:13_4, with , or ? between several
_WAITED_FOR = re.compile(r"(?<=:)([0-9]{1,10})(?![0-9])")


def jobs_waited_for(text: str, width: int = LONGEST) -> tuple[int, ...]:
    """Return the ids of the jobs in a dependency as Slurm writes it, ascending, and `OTHERS` first if there are more.

    Args:
        width: after so many bytes the text is cut, perhaps within an id; a shorter one may be filled with spaces.
    """
    text = text[:width].rstrip(" ")
    more = len(text) >= width
    if more:
        text = text[: max(0, text.rfind(","), text.rfind("?"))]
    found = [int(match[1]) for match in islice(_WAITED_FOR.finditer(text), MOST + 1)]
    more = more or len(found) > MOST
    ids = sorted(set(found[:MOST]) - {OTHERS})
    return (OTHERS, *ids) if more else tuple(ids)


@dataclass(frozen=True)
class _Read:
    """Dependencies that were read: the row in the listing, the same row with them, and when."""

    listed: JobRow
    row: JobRow
    at: float


class LongDependencies:
    """Completes the rows of pending jobs of pipelines whose dependencies are too long for the listing of all jobs.

    Args:
        read: returns the ids of the jobs that each of these jobs waits for; one that has left the queue may be missing.
        clock: seconds, never set back.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Mapping[int, tuple[int, ...]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._known: dict[int, _Read] = {}

    def of(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """Return the rows; one that has not changed is the same object as before."""
        cut = [row for row in rows if row.after and row.after[0] == OTHERS and _in_pipeline(row)][:_AT_ONCE]
        now = self._clock()
        known = {row.job_id: found for row in cut if (found := self._current(row, now)) is not None}
        if missing := [row for row in cut if row.job_id not in known]:
            read = self._read([row.job_id for row in missing])
            for row in missing:
                known[row.job_id] = _Read(row, replace(row, after=read.get(row.job_id, row.after)), now)
        self._known = known
        return [known[row.job_id].row if row.job_id in known else row for row in rows] if known else list(rows)

    def _current(self, row: JobRow, now: float) -> _Read | None:
        found = self._known.get(row.job_id)
        if found is None or found.listed.after != row.after or now - found.at >= TRUST_S:
            return None
        return found if found.listed is row else _Read(row, replace(row, after=found.row.after), found.at)


def _in_pipeline(row: JobRow) -> bool:
    return row.pending and PIPELINE_HINT in row.comment
