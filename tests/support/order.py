"""The order in which test files are assigned to the processes of a run, and the processes' scheduling priority."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

#: The slowest files of tests on a cluster: seconds with seven processes on two processors. Only the order of a run
#: depends on it: a slow file that starts last keeps a single process busy at the end.
LONG_S: Mapping[str, int] = {
    "e2e/test_dispatch_live.py": 320,
    "e2e/test_failures.py": 300,
    "e2e/test_failover.py": 230,
    "e2e/test_moved_jobs.py": 210,
    "e2e/test_loan_lifecycle.py": 180,
    "e2e/test_recurring_jobs.py": 140,
    "e2e/test_lost_record.py": 110,
    "slurm/test_client_live.py": 100,
    "e2e/test_chaos.py": 100,
    "decide/test_supply_live.py": 100,
    "node/test_real_ended_runs.py": 90,
    "testbed/test_cluster.py": 90,
    "e2e/test_learning.py": 90,
    "node/test_real_unwritable.py": 80,
    "e2e/test_elastic_waiting.py": 80,
    "e2e/test_attacks.py": 80,
    "e2e/test_job_lifecycle.py": 70,
    "e2e/test_named_nodes.py": 70,
    "e2e/test_slurm_releases.py": 70,
    "e2e/test_examples.py": 60,
    "e2e/test_elastic_jobs.py": 60,
    "daemon/test_flood.py": 60,
    "site/test_two_controllers.py": 50,
    "site/test_stock_site.py": 50,
}
#: nice value of tests without a cluster, for half the share of those with one, whose daemons have time-outs
_NICE = 3


def interleaved(*kinds: Mapping[T, int]) -> list[T]:
    """Return the keys of all `kinds`, each kind from the largest to the smallest and spread over the whole.

    Args:
        kinds: the keys with their sizes; sizes of different kinds need not be comparable.
    """
    placed: list[tuple[float, T]] = []
    for kind in kinds:
        total, before = sum(kind.values()), 0
        for key, size in sorted(kind.items(), key=lambda item: -item[1]):
            placed.append((before / total, key))
            before += size
    return [key for _, key in sorted(placed, key=lambda item: item[0])]


def give_way(nice: int, *, to_clusters: bool) -> None:
    """Set this process's nice value to `nice`, or to a larger one if tests on a cluster are to take precedence.

    Without CAP_SYS_NICE, as in many containers, it cannot be lowered again, so that all tests end up with the larger.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice + (_NICE if to_clusters else 0))
