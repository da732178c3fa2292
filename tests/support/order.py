"""The order in which the files of a run are handed out to its processes, and their priority on the processors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

#: nice value of tests without a cluster, half the share of those on one: these wait for daemons that have time-outs
_NICE = 3


def interleaved(*kinds: Mapping[T, int]) -> list[T]:
    """Return the keys of all `kinds`, each kind from the largest to the smallest and spread over the whole.

    Args:
        kinds: what is to be ordered, with its size; sizes of different kinds need not be comparable.
    """
    placed: list[tuple[float, T]] = []
    for kind in kinds:
        total, before = sum(kind.values()), 0
        for key, size in sorted(kind.items(), key=lambda item: -item[1]):
            placed.append((before / total, key))
            before += size
    return [key for _, key in sorted(placed, key=lambda item: item[0])]


def give_way(nice: int, *, to_clusters: bool) -> None:
    """Set this process's nice value: `nice`, and a larger one where tests on a cluster are to come first.

    Where it may not be lowered again (without CAP_SYS_NICE, as in many containers) all tests come to have the larger.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice + (_NICE if to_clusters else 0))
