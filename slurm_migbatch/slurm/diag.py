"""Parse slurmctld's RPC counts by call and user from `sdiag`, for reports on the load that migbatch causes."""

from __future__ import annotations

import re

from slurm_migbatch.slurm.client import Diag, RpcCount, SlurmError

_ROW = re.compile(r"^\s+(\S+)\s+\(\s*\d+\)\s+count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)\s*$", re.MULTILINE)
_TYPES = "Remote Procedure Call statistics by message type"
_USERS = "Remote Procedure Call statistics by user"


def parse_sdiag(output: str) -> Diag:
    """Read sdiag's output; raises SlurmError if it has no statistics of calls."""
    head, found, rest = output.partition(_TYPES)
    types, also_found, rest = rest.partition(_USERS)
    if not found or not also_found:
        raise SlurmError(f"sdiag printed no statistics of remote procedure calls: {head.strip()[:200]!r}")
    return Diag(_rows(types), _rows(rest.partition("Pending RPC statistics")[0]))


def _rows(text: str) -> dict[str, RpcCount]:
    return {name: RpcCount(int(count), int(total) / 1e6) for name, count, total in _ROW.findall(text)}
