"""The order in which a test run distributes its files, and test runs beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.order import LONG_S, give_way, interleaved


def test_slow_and_quick_files_are_spread_over_the_run_largest_first() -> None:
    slow = {"failures": 40, "loan": 10, "asked": 30}
    quick = {"parsing": 500, "hints": 300, "paths": 200}
    assert interleaved(slow, quick) == ["failures", "parsing", "asked", "hints", "paths", "loan"]
    assert interleaved(slow, {}) == ["failures", "asked", "loan"]
    assert interleaved({}, {}) == []


def test_files_listed_as_slowest_exist() -> None:
    tests = Path(__file__).parents[1]
    assert [name for name in LONG_S if not (tests / name).is_file()] == []


def test_lowered_process_priority_is_restored_where_that_is_allowed() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    give_way(before, to_clusters=True)
    lower = os.getpriority(os.PRIO_PROCESS, 0)
    assert lower == min(19, before + 3)
    give_way(before, to_clusters=False)
    assert os.getpriority(os.PRIO_PROCESS, 0) in (before, lower)


def test_another_test_run_does_not_close_directories_of_this_one(open_tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "spread", __file__]
    done = subprocess.run(line, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    above = [place for place in open_tmp_path.parents if place.stat().st_uid == os.geteuid()]
    assert [place for place in (open_tmp_path, *above) if not place.stat().st_mode & 0o001] == []
