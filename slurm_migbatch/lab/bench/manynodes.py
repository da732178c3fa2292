"""Run hundreds of nodes on one machine and count migbatchd's requests to a real slurmctld, idle and with changing
offers.

Then compare with one request per node: the same updates in both ways, timed, with migbatchd stopped.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

from slurm_migbatch.daemon.advertiser import gres_string
from slurm_migbatch.lab.bench.rpcs import RpcCount, diag
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.proc import wait_until
from slurm_migbatch.workload.loans import LOAN

#: requests of jobs in turn: none of them is what an idle node offers most of
PROFILES: Final = ("7g.80gb", "1g.10gb", "3g.40gb", "2g.20gb")
REST_S: Final = 30.0
UPDATE: Final = "REQUEST_UPDATE_NODE"
_PATIENCE_S: Final = 900.0
_ROUND: Final = re.compile(r"(?m)^migbatch_supply_round_seconds_(sum|count) (\S+)$")


def measure(
    nodes: int = 256,
    gpus: int = 8,
    jobs: int = 512,
    progress: Progress = silent,
    slurm_root: str = "",
    rest_s: float = REST_S,
) -> dict[str, Any]:
    """Run the whole measurement (root, some minutes).

    Args:
        nodes, gpus: of the test bed, H100s.
        jobs: of a second each, all submitted at once.
        slurm_root: run the Slurm of this debootstrapped Debian.
        rest_s: seconds without jobs before the first submission.

    Returns:
        {"nodes", "gpus", "jobs", "start_s", "phases": {"rest" and "jobs": {"seconds", "rpcs": {type: [calls, seconds]},
        "changes" (changed offers of nodes), "rounds", "round_s" (mean)}}, "updates": {"together" and "apart":
        {"seconds", "rpcs", "rpc_s"}}}: seconds of RPCs are those in slurmctld's statistics.

    Raises:
        TestbedError: the test bed failed.
    """
    begun = time.monotonic()
    progress(f"{nodes} nodes start", 4)
    with Cluster(nodes=nodes, gpus=gpus, cpus=64, slurm_root=slurm_root, migbatch="all") as bed:
        client = CliClient(bed.bin, bed.slurm_conf)
        wait_until(lambda: _offering(client) >= nodes, _PATIENCE_S, "an offer of every node", every=1.0)
        start_s = time.monotonic() - begun
        progress(f"without jobs, {rest_s:g} s", 4)
        without_jobs = _phase(bed, lambda: time.sleep(rest_s))
        progress(f"{jobs} jobs", 4)
        busy = _phase(bed, lambda: _run(bed, client, jobs))
        progress("updates of all nodes, combined and one by one", 4)
        bed.stop("migbatchd")
        updates = _updates(bed, client)
    return {
        "bench": "nodes",
        "nodes": nodes,
        "gpus": gpus,
        "jobs": jobs,
        "start_s": start_s,
        "phases": {"rest": without_jobs, "jobs": busy},
        "updates": updates,
    }


def _run(bed: Cluster, client: CliClient, jobs: int) -> None:
    for number, profile in enumerate(PROFILES):
        if tasks := len(range(number, jobs, len(PROFILES))):
            words = ["sbatch", "-p", "gpu", f"--gres=mig:{profile}", f"--array=1-{tasks}", "-t", "5", "-o", "/dev/null"]
            bed.run([*words, "--wrap=sleep 1"], "mbalice")
    wait_until(lambda: not client.jobs(), _PATIENCE_S, "the end of all jobs", every=2.0)


def _phase(bed: Cluster, work: Callable[[], None]) -> dict[str, Any]:
    before, rounds, changes, begun = diag(bed), _rounds(bed), _changes(bed), time.monotonic()
    work()
    seconds = time.monotonic() - begun
    rpcs = diag(bed).since(before)
    count, spent = (later - earlier for later, earlier in zip(_rounds(bed), rounds, strict=True))
    return {
        "seconds": seconds,
        "rpcs": {name: [rpc.count, round(rpc.seconds, 3)] for name, rpc in sorted(rpcs.types.items())},
        "changes": _changes(bed) - changes,
        "rounds": int(count),
        "round_s": spent / count if count else 0.0,
    }


def _offering(client: CliClient) -> int:
    """Count the nodes with offers, except catalog nodes."""
    return sum("DOWN" not in row.states and any(row.gres.get(name) for name in PROFILES) for row in client.nodes())


def _rounds(bed: Cluster) -> tuple[float, float]:
    """Return the rounds of supply and their seconds since migbatchd's start."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        # all nodes share one address here: new connections may close this one
        try:
            samples = {name: float(value) for name, value in _ROUND.findall(bed.product.metrics())}
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return samples.get("count", 0.0), samples.get("sum", 0.0)


def _changes(bed: Cluster) -> int:
    """Return how often the offer of a node was changed."""
    path = bed.product.record.removeprefix("sqlite:///")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as record:
        return int(record.execute("SELECT count(*) FROM supply_changes").fetchone()[0])


def _updates(bed: Cluster, client: CliClient) -> dict[str, dict[str, Any]]:
    """Set every node's current offer, by the calls of a round and by one call for each node."""
    rows = [row for row in client.nodes() if "DOWN" not in row.states and row.gres]
    offers = {row.name: gres_string({k: n for k, n in row.gres.items() if k != LOAN}, row) for row in rows}
    figures = {}
    for way, calls in (("together", [offers]), ("apart", [{name: offer} for name, offer in offers.items()])):
        before, begun = diag(bed), time.monotonic()
        for call in calls:
            client.set_gres(call)
        seconds = time.monotonic() - begun
        rpcs = diag(bed).since(before).types.get(UPDATE, RpcCount(0, 0.0))
        figures[way] = {"seconds": seconds, "rpcs": rpcs.count, "rpc_s": rpcs.seconds}
    return figures
