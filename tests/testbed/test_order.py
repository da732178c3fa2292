"""The order in which a run hands out its files."""

from __future__ import annotations

import os

from tests.support.order import give_way, interleaved


def test_each_kind_is_spread_over_the_whole_the_largest_first() -> None:
    slow = {"failures": 40, "loan": 10, "asked": 30}
    quick = {"parsing": 500, "hints": 300, "paths": 200}
    assert interleaved(slow, quick) == ["failures", "parsing", "asked", "hints", "paths", "loan"]
    assert interleaved(slow, {}) == ["failures", "asked", "loan"]
    assert interleaved({}, {}) == []


def test_what_gives_way_comes_first_again() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    give_way(before, to_clusters=True)
    lower = min(19, before + 5) if os.geteuid() == 0 else before
    assert os.getpriority(os.PRIO_PROCESS, 0) == lower
    give_way(before, to_clusters=False)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
