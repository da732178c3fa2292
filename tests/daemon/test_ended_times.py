"""Times of ended jobs as squeue prints them."""

from __future__ import annotations

from datetime import datetime

import pytest

from slurm_migbatch.daemon.ended import HistoryClient


def test_times_of_ended_jobs_are_read_in_seconds_and_in_slurms_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    at = datetime(2026, 9, 21, 14, 13, 20)
    shown = ("7", "0", "COMPLETED", "0", str(int(at.timestamp())), at.isoformat(), "9.9.2026")
    client = HistoryClient()
    monkeypatch.setattr(client, "_run", lambda *command: "\x1f".join(shown) + "\x1f\n")
    (row,) = client.ended([7])
    assert (row["submit"], row["start"], row["end"]) == (at.timestamp(), at.timestamp(), None)
