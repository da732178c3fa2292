"""Dependencies of jobs, read within bounds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import OTHERS, JobRow
from slurm_migbatch.slurm.dependencies import LONGEST, MOST, NARROW, TRUST_S, LongDependencies, jobs_waited_for
from slurm_migbatch.slurm.listing import SQUEUE_FIELDS, parse_jobs, squeue_command

IDS = tuple(range(1001, 13_001))


def written(jobs: Sequence[int]) -> str:
    return ",".join(f"afterok:{job}(unfulfilled)" for job in jobs)


def column(text: str, width: int) -> str:
    """As squeue prints it with this width."""
    return text[:width].ljust(width)


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        ("afterok:12(unfulfilled)", (12,)),
        ("afterany:12_*:13_4(unfulfilled),after:11+5(unfulfilled)", (11, 12, 13)),
        ("afterok:9(unfulfilled)?afternotok:8(failed)", (8, 9)),
        ("singleton(unfulfilled)", ()),
        ("", ()),
    ],
)
def test_ids_in_slurms_form_are_read(text: str, jobs: tuple[int, ...]) -> None:
    assert jobs_waited_for(text) == jobs_waited_for(column(text, NARROW), NARROW) == jobs


def test_no_more_than_the_first_ids_are_read() -> None:
    assert jobs_waited_for(written(IDS[:MOST])) == IDS[:MOST]
    assert jobs_waited_for(written(IDS)) == (OTHERS, *IDS[:MOST])
    assert jobs_waited_for(written(IDS), NARROW) == (OTHERS, *IDS[:2])
    assert jobs_waited_for("afterok:1," + "x" * LONGEST) == (OTHERS, 1)


@given(st.lists(st.integers(1, 2**31), min_size=1, max_size=30, unique=True), st.integers(1, 400))
def test_id_cut_off_at_the_width_is_not_read_as_another(jobs: list[int], width: int) -> None:
    found = jobs_waited_for(column(written(jobs), width), width)
    shown = [job for job in found if job != OTHERS]
    assert set(shown) <= set(jobs) and shown == sorted(shown)
    assert set(shown) == set(jobs) or found[0] == OTHERS
    assert len(written(jobs)) >= width or found == tuple(sorted(jobs))


def test_row_keeps_the_first_dependencies_of_the_listing() -> None:
    values = dict.fromkeys(SQUEUE_FIELDS, "1") | {"State": "PENDING", "ArrayTaskID": "N/A", "TimeLimit": "1:00"}
    for text, after in (("(null)", ()), (written(IDS[:2]), IDS[:2]), (written(IDS), (OTHERS, *IDS[:2]))):
        row = "".join((column(text, NARROW) if name == "Dependency" else values[name]) + "|" for name in SQUEUE_FIELDS)
        assert [found.after for found in parse_jobs(f"{row}\n", "|")] == [after]


# -- jobs of pipelines -------------------------------------------------------------------------------------------------


def waiting(job: int, *after: int, comment: str = "migbatch: pipeline=p") -> JobRow:
    return JobRow(job, comment=comment, after=after)


class Reader:
    """Reads dependencies; the jobs that were asked for, and a clock."""

    def __init__(self, found: Mapping[int, tuple[int, ...]]) -> None:
        self.found, self.asked, self.now = dict(found), list[list[int]](), 0.0
        self.long = LongDependencies(self.read, lambda: self.now)

    def read(self, jobs: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
        self.asked.append(list(jobs))
        return {job: self.found[job] for job in jobs if job in self.found}


def test_dependencies_are_read_only_of_pending_jobs_of_pipelines_that_the_listing_cuts() -> None:
    reader = Reader({1: (5, 6, 7)})
    others = [waiting(2, 5, 6), waiting(3, OTHERS, 5, comment="mine"), replace(waiting(4, OTHERS, 5), state="RUNNING")]
    assert reader.long.of(others) == others and not reader.asked
    cut = waiting(1, OTHERS, 5, 6)
    found = reader.long.of([cut, *others])
    assert found == [replace(cut, after=(5, 6, 7)), *others]
    assert reader.asked == [[1]]


def test_dependencies_are_read_again_if_the_listing_changes_or_they_are_old() -> None:
    reader = Reader({1: (5, 6, 7)})
    cut = waiting(1, OTHERS, 5, 6)
    (first,) = reader.long.of([cut])
    reader.now = TRUST_S - 1
    assert reader.long.of([cut])[0] is first, "an unchanged row is the same object"
    assert reader.long.of([replace(cut, priority=9)]) == [replace(first, priority=9)] and len(reader.asked) == 1
    reader.found[1] = (6, 7)
    assert reader.long.of([replace(cut, after=(OTHERS, 6))])[0].after == (6, 7)
    reader.now += TRUST_S
    reader.found[1] = (7,)
    assert reader.long.of([replace(cut, after=(OTHERS, 6))])[0].after == (7,)
    reader.long.of([])
    assert reader.long.of([cut])[0].after == (7,) and len(reader.asked) == 4


def test_row_stays_as_listed_if_the_job_has_left_meanwhile() -> None:
    reader = Reader({})
    cut = waiting(1, OTHERS, 5, 6)
    assert reader.long.of([cut]) == [cut] == reader.long.of([cut])
    assert len(reader.asked) == 1


#: a stand-in for squeue that fills and cuts columns as Slurm's does
SQUEUE = f"""#!{sys.executable}
import sys
values = {{"JobID": "9", "UserID": "1", "UserName": "a", "State": "PENDING", "ArrayTaskID": "N/A", "SubmitTime": "1"}}
values |= {{"Comment": "migbatch: pipeline=p", "TimeLimit": "1:00", "NumNodes": "1"}}
values["Dependency"] = ",".join("afterok:%d(unfulfilled)" % job for job in range(1001, 13001))
with open(__file__ + ".log", "a") as log:
    log.write(" ".join(word for word in sys.argv if word.startswith("--jobs")) + "\\n")
if "--version" in sys.argv:
    print("slurm 24.11.5")
for words in (word[9:].split(",") for word in sys.argv if word.startswith("--Format=")):
    for column in words:
        name, _, rest = column.partition(":")
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        text, width = values.get(name, "(null)"), int(digits)
        print((text[:width].ljust(width) if width else text) + rest[len(digits):], end="")
    print()
"""


def test_client_reads_a_bounded_part_of_a_job_with_thousands_of_dependencies(tmp_path: Path) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(SQUEUE)
    squeue.chmod(0o755)
    client = CliClient(tmp_path)
    for _ in range(2):
        (row,) = client.jobs()
        assert row.after == (OTHERS, *IDS[:MOST])
    asked = (tmp_path / "squeue.log").read_text().split("\n")
    assert [line for line in asked if line] == ["--jobs=9,9"], "once in a while"
    assert f"Dependency:{NARROW}|" in squeue_command("|")[-1]
