"""Files of data sets below a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.traces.files import below, first_below


def test_files_are_found_in_symlinked_directories(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "workloads").mkdir(parents=True)
    data = tmp_path / "data [1]"
    data.mkdir()
    (data / "pollux").symlink_to(elsewhere)
    for name in ("workloads/workload-2.csv", "workloads/workload-1.csv", "b.csv"):
        (elsewhere / name).write_text("x\n")
    (data / "a.csv").write_text("x\n")
    found = [data / "pollux/workloads/workload-1.csv", data / "pollux/workloads/workload-2.csv"]
    assert below(data, "workloads/workload-*.csv") == found
    assert first_below(data, "*.csv", "all") == data / "a.csv"
    with pytest.raises(NotMeasurable, match=r"Muri and Gavel are needed"):
        first_below(data, "philly*", "Muri and Gavel")
