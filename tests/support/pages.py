"""A page of a small cluster, as `migbatch top` draws it."""

from __future__ import annotations

from slurm_migbatch.report.page import (
    FAULTY,
    LOAN,
    OFFERED,
    USED,
    EventRow,
    GpuRow,
    LoanRow,
    Page,
    ProfileRow,
    QueueRow,
    SlotRow,
    Totals,
)

NOW = 1_790_000_000.0


def slot(kind: str, start: int, size: int, profile: str, job: int = 0, user: str = "", age: float = 0.0) -> SlotRow:
    return SlotRow(kind, start, size, profile, job, 0, user, NOW - age if age else 0.0)


def gpu(node: str, number: int, *slots: SlotRow, state: str = "mixed", closed: bool = False) -> GpuRow:
    return GpuRow(node, number, 8, state, closed, "", slots)


def page() -> Page:
    gpus = (
        gpu("gpu1", 0, slot(USED, 0, 4, "3g.40gb", 4711, "alice", 900), slot(USED, 4, 1, "1g.10gb", 4712, "bob", 60),
            slot(OFFERED, 5, 1, "1g.10gb")),
        gpu("gpu1", 1, slot(LOAN, 0, 4, "4g.40gb", 4690, "carol", 7200), slot(OFFERED, 4, 2, "2g.20gb"),
            slot(FAULTY, 6, 1, "1g.10gb")),
        gpu("gpu2", 0, slot(USED, 0, 8, "7g.80gb", 4700, "alice", 3600), state="allocated"),
        gpu("gpu3", 0, state="down", closed=True),
    )  # fmt: skip
    return Page(
        NOW, "hpc", Totals(3, 1, 4, 32, 17),
        (ProfileRow("1g.10gb", 1, 1), ProfileRow("2g.20gb", 0, 1), ProfileRow("3g.40gb", 1, 0),
         ProfileRow("4g.40gb", 1, 0), ProfileRow("7g.80gb", 1, 0)), 14, gpus,
        (QueueRow("7g.80gb", 2, NOW - 4000, "Resources", "reserved on gpu2", "at", NOW + 1800),
         QueueRow("1g.10gb", 12, NOW - 90, "Priority", "", "now", 0.0)),
        (LoanRow("4690", "carol", "4g.40gb", "gpu1", "1", NOW - 7200, "running", 1, 5200, 3.0, 4.0, "idle"),
         LoanRow("4720", "carol", "", "", "", NOW - 30, "waiting", 0, -1, -1, -1, "no GPU has room")),
        (EventRow(NOW - 900, "start", "gpu1", 4711, "alice", "3g.40gb"),
         EventRow(NOW - 60, "fault", "gpu3", 0, "", "GPU 0: fell off the bus")),
    )  # fmt: skip
