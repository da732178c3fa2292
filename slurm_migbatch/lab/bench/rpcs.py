"""Read slurmctld's RPC counts by call and user from `sdiag`: the load that migbatch causes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.testbed.cluster import Cluster

_ROW = re.compile(r"^\s+(\S+)\s+\(\s*\d+\)\s+count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)\s*$", re.MULTILINE)
_TYPES = "Remote Procedure Call statistics by message type"
_USERS = "Remote Procedure Call statistics by user"


@dataclass(frozen=True)
class RpcCount:
    """Number of calls of slurmctld, and their total seconds."""

    count: int
    seconds: float


@dataclass(frozen=True)
class Diag:
    """slurmctld's statistics of remote procedure calls since its start (or since midnight UTC, or `sdiag --reset`)."""

    types: Mapping[str, RpcCount] = field(default_factory=dict)  # REQUEST_UPDATE_JOB ...
    users: Mapping[str, RpcCount] = field(default_factory=dict)

    def since(self, before: Diag) -> Diag:
        """Return the counts since `before`, without zeros; after a reset in between, the counts since the reset."""
        return Diag(_since(self.types, before.types), _since(self.users, before.users))


def _since(now: Mapping[str, RpcCount], before: Mapping[str, RpcCount]) -> dict[str, RpcCount]:
    grown = {}
    for name, total in now.items():
        old = before.get(name, RpcCount(0, 0.0))
        if old.count > total.count:
            old = RpcCount(0, 0.0)
        if total.count > old.count:
            grown[name] = RpcCount(total.count - old.count, max(0.0, total.seconds - old.seconds))
    return grown


def diag(bed: Cluster) -> Diag:
    """Return the statistics of a test bed's slurmctld."""
    return parse_sdiag(bed.run(["sdiag"]).stdout)


def parse_sdiag(output: str) -> Diag:
    """Read sdiag's output; raises SlurmError if it has no statistics of calls."""
    head, types_title, rest = output.partition(_TYPES)
    types, users_title, rest = rest.partition(_USERS)
    if not types_title or not users_title:
        raise SlurmError(f"sdiag printed no statistics of remote procedure calls: {head.strip()[:200]!r}")
    return Diag(_rows(types), _rows(rest.partition("Pending RPC statistics")[0]))


def _rows(text: str) -> dict[str, RpcCount]:
    return {name: RpcCount(int(count), int(total) / 1e6) for name, count, total in _ROW.findall(text)}
