"""Replay the decisions that migbatchd recorded on a test cluster."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from slurm_migbatch.cli.replay import replay
from slurm_migbatch.testbed.cluster import Cluster


def recordings_of(cluster: Cluster) -> list[Path]:
    """Return the files that migbatchd's flight recorder has written on this cluster, the oldest first."""
    return sorted((cluster.directory / "migbatch" / "decisions").glob("*.jsonl.gz"))


def assert_decided_alike(cluster: Cluster) -> int:
    """Assert that today's code decides what migbatchd decided in every recorded round, and return their number.

    A round that is being written is left out: an unfinished segment is read as far as possible. A service that was
    killed before its first round was written has left no rounds.
    """
    files = recordings_of(cluster)
    if not files:
        return 0
    done = CliRunner().invoke(replay, ["--json", *map(str, files)])
    if "this recording has no rounds" in done.stderr:
        return 0
    assert done.exit_code == 0, f"{done.output}{done.exception or ''}"
    rounds = json.loads(done.stdout.splitlines()[-1])["rounds"]
    assert isinstance(rounds, int)
    return rounds
