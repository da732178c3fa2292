"""Draw the GPUs of a page of `migbatch top`: one line for each, its memory slices as a bar.

Every kind of slot has its own pattern besides its colour; the colours are those of Okabe and Ito, which are
distinguishable with colour vision deficiencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from slurm_migbatch.mig.text import printable
from slurm_migbatch.report.cells import columns, job_text, longest_name
from slurm_migbatch.report.page import FAULTY, LOAN, OFFERED, USED, GpuRow, SlotRow
from slurm_migbatch.report.pagestate import PageState

#: kind -> the character that fills its slots
PATTERN: Final = {USED: "=", LOAN: "~", OFFERED: ":", FAULTY: "!"}
FREE: Final = "."
CLOSED: Final = "x"
STYLE: Final = {
    USED: "white on #0072b2",
    LOAN: "black on #e69f00",
    OFFERED: "black on #009e73",
    FAULTY: "bold black on #cc79a7",
    FREE: "dim",
    CLOSED: "bold #d55e00",
}
#: characters of one memory slice
_WIDEST_CELL: Final = 16
_NARROWEST_CELL: Final = 2
_MOST_SLICES: Final = 64


@dataclass(frozen=True)
class GridWidths:
    """Widths of the columns of GPUs: node names, a memory slice; the maximum number of slices of a GPU.

    `jobs`: names of jobs by their number.
    """

    width: int
    names: int
    cell: int
    most: int
    jobs: Mapping[int, str]

    @classmethod
    def of(cls, gpus: Sequence[GpuRow], width: int, jobs: Mapping[int, str]) -> GridWidths:
        """Return the widths for these GPUs on a page of a width."""
        slices = max(1, min(_MOST_SLICES, max((gpu.slices for gpu in gpus), default=8)))
        names = max(4, longest_name((gpu.node for gpu in gpus), width))
        state = 16 if width >= 100 else 6
        cell = min(_WIDEST_CELL, max(_NARROWEST_CELL, (width - names - 5 - state) // slices))
        return cls(width, names, cell, slices, jobs)

    @property
    def title(self) -> str:
        """The line above the GPUs."""
        cells = (("NODE", self.names), ("G", -2), ("MEMORY SLICES", self.most * self.cell + 1), ("STATE", 0))
        return columns(cells, self.width)

    def line(self, gpu: GpuRow, again: bool) -> Text:
        """Return node, number, memory slices and the state of the node; `again`: same node as the previous GPU."""
        name, number = "" if again else gpu.node, "?" if gpu.number < 0 else str(gpu.number)
        line = Text(columns(((name, self.names), (number, -2), ("", 0)), self.width))
        line.append_text(_bar(gpu, min(gpu.slices, self.most), self.cell, self.jobs))
        note = "; ".join(text for text in (gpu.state.replace("allocated", "alloc"), gpu.trouble) if text)
        line.append(" " * max(0, self.names + 5 + self.most * self.cell - cell_len(line.plain)) + " " + printable(note))
        line.truncate(self.width, overflow="crop")
        return line


def _bar(gpu: GpuRow, slices: int, cell: int, jobs: Mapping[int, str]) -> Text:
    if slices <= 0:
        return Text(" MIG is off")
    free = CLOSED if gpu.closed else FREE
    owners: list[SlotRow | None] = [None] * slices
    for slot in gpu.slots:
        if slot.start >= 0 and slot.size > 0 and slot.start + slot.size <= slices:
            owners[slot.start : slot.start + slot.size] = [slot] * slot.size
    bar, position = Text("|"), 0
    while position < slices:
        owner = owners[position]
        if owner is None or owners[position : position + owner.size] != [owner] * owner.size:  # another may cover it
            size = 1
            bar.append(free * (cell - 1), STYLE[free])
        else:
            size = owner.size
            bar.append(_label(owner, size * cell - 1, jobs), STYLE.get(owner.kind, ""))
        bar.append("|")
        position += size
    return bar


def _label(slot: SlotRow, width: int, jobs: Mapping[int, str]) -> str:
    """Return the longest text about a slot that fits, after its pattern, and padded with it.

    The number of an array task is shorter than 12_3; but its last task has the number of the array, which means all.
    """
    fill = PATTERN.get(slot.kind, "?")
    if slot.kind in (OFFERED, FAULTY):
        texts = [slot.profile, slot.profile.partition(".")[0]]
    else:
        job = job_text(slot.job, jobs) or "-"
        job += f"+{job_text(slot.guest, jobs)}" if slot.guest else ""
        texts = [f"{slot.profile} {job} {slot.user}", f"{job} {slot.user}", f"{slot.profile} {job}", job]
        if not slot.guest and not job.startswith(f"{slot.job}_"):
            texts.append(str(slot.job or "-"))
    for text in (printable(" ".join(text.split())) for text in texts):
        if text and cell_len(text) < width:
            return set_cell_size(fill + text, cell_len(text) + 1) + fill * (width - cell_len(text) - 1)
    return fill * width


def ordered_gpus(gpus: Sequence[GpuRow], now: float, state: PageState) -> list[GpuRow]:
    """Return the GPUs in order; the service has them by node and number."""
    if state.sort == "node":
        return list(gpus)[::-1] if state.reverse else list(gpus)

    def weight(gpu: GpuRow) -> float:
        held = [slot for slot in gpu.slots if slot.kind in (USED, LOAN)]
        if state.sort == "memory":
            return sum(slot.size for slot in held)
        if state.sort == "compute":
            return sum(_compute(slot.profile) for slot in held)
        ages = [now - slot.since for slot in held if slot.since > 0 and math.isfinite(now - slot.since)]
        return max(ages, default=0.0)

    return sorted(gpus, key=weight, reverse=not state.reverse)


def _compute(profile: str) -> int:
    count = profile.partition("g.")[0]
    return int(count) if count.isascii() and count.isdigit() and len(count) < 3 else 0
