"""Many short jobs of several users on a test bed, and what must not happen to any of them.

Run by `make soak`. Exit status 0 only if every job ended well, none was sent back as a misfit or took a slot beside its
node's plan (which another job may miss later), no node was drained and nothing was left over.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, run

from .bed import FINAL
from .cluster import Cluster
from .errors import TestbedError
from .proc import wait_until
from .watch import Watch

#: request and how often it is drawn
MIX = (
    ("mig:1g.10gb:1", 6),
    ("mig:1g.20gb:1", 3),
    ("mig:2g.20gb:1", 4),
    ("mig:3g.40gb:1", 3),
    ("mig:4g.40gb:1", 1),
    ("mig:7g.80gb:1", 1),
    ("mig:1g.10gb:3", 2),
    ("mig:auto", 4),
)
_COMMENT = "migbatch: model=bert-large batch=32 slo=200ms"


@click.command(context_settings=HELP)
@click.option("--jobs", default=500, show_default=True)
@click.option("--nodes", default=2, show_default=True)
@click.option("--gpus", default=4, show_default=True)
@click.option("--latency", default="real", show_default=True, help="Seconds per driver call, or 'real'.")
@click.option("--seed", default=1, show_default=True)
@click.option("--timeout", default=1500.0, show_default=True, help="Seconds for all jobs.")
def soak(jobs: int, nodes: int, gpus: int, latency: str, seed: int, timeout: float) -> None:
    """Run many short jobs of three users on a test bed and print figures as one JSON object."""
    with Cluster(
        nodes=nodes,
        gpus=gpus,
        latency=latency if latency == "real" else float(latency),
        cpus=128,
        migbatch="all",
        options={"MaxJobCount": "20000"},
    ) as bed:
        figures = run_jobs(bed, jobs, seed, timeout)
    click.echo(json.dumps(figures, indent=2))
    faults = ("unfinished", "misfits", "unplanned_starts", "drained_nodes", "leftovers", "problems")
    bad = [key for key in faults if figures[key]]
    if bad:
        raise TestbedError(f"soak failed: {', '.join(bad)}")


def run_jobs(bed: Cluster, jobs: int, seed: int, timeout: float) -> dict[str, object]:
    """Submit, wait, and count what went wrong."""
    draw = random.Random(seed)  # noqa: S311 - a reproducible mix, no secret
    requests, weights = zip(*MIX, strict=True)
    began = time.monotonic()
    with Watch(bed) as watch:
        for i, user in enumerate(bed.users):
            lines = []
            share = jobs // len(bed.users) + (i < jobs % len(bed.users))
            for gres in draw.choices(requests, weights, k=share):
                comment = f' --comment="{_COMMENT}"' if gres == "mig:auto" else ""
                seconds = draw.choice(("0", "0.2", "0.5", "1"))
                lines.append(
                    f"sbatch --parsable -o /dev/null --gres={gres}{comment} --time=2 "
                    f"--wrap='test -n \"$CUDA_VISIBLE_DEVICES\" && sleep {seconds}'"
                )
            bed.run(["sh"], user.name, input="\n".join(lines) + "\n", timeout=600.0)
        submitted = time.monotonic() - began
        wait_until(lambda: not _unfinished(bed), timeout, "the end of all jobs", every=2.0)
        wall = time.monotonic() - began
    status = _nodes(bed)
    kinds = _events(bed)
    return {
        "jobs": jobs,
        "wall_s": round(wall, 1),
        "submission_s": round(submitted, 1),
        "states": _states(bed),
        "unfinished": len(_unfinished(bed)) + sum(n for state, n in _states(bed).items() if state != "COMPLETED"),
        "starts": kinds.get("start", 0),
        "warm_starts": kinds.get("warm", 0),
        "unplanned_starts": kinds.get("unplanned", 0),
        "creates": kinds.get("create", 0),
        "destroys": kinds.get("destroy", 0),
        "misfits": kinds.get("misfit", 0),
        "drained_nodes": [name for name, state in bed.node_states().items() if state.rstrip("*") != "idle"],
        "leftovers": [
            f"{node}: {piece['profile']} {piece['state']} of job {piece['job']}"
            for node, found in status.items()
            for gpu in found["gpus"]
            for piece in gpu["slices"]
            if piece["state"] != "idle"
        ],
        "watched_rounds": watch.rounds,
        "problems": watch.problems,
    }


def _states(bed: Cluster) -> dict[str, int]:
    return dict(Counter(bed.states().values()))


def _unfinished(bed: Cluster) -> list[str]:
    return [state for state in bed.states().values() if state not in FINAL]


def _nodes(bed: Cluster) -> dict[str, dict[str, Any]]:
    etc = str(bed.product.etc)
    return {
        node: json.loads(bed.product.migbatch("node", "status", "--etc", etc, "--node", node, "--json"))
        for node in bed.spec.node_names
    }


def _events(bed: Cluster) -> dict[str, int]:
    from sqlalchemy import func, select

    from slurm_migbatch.store.db import open_store
    from slurm_migbatch.store.models import NodeEvent

    with open_store(f"sqlite:///{bed.product.state}/migbatch.db", readonly=True) as store, store.reading() as link:
        counts = link.execute(select(NodeEvent.kind, func.count()).group_by(NodeEvent.kind))
        found: dict[str, int] = {kind: count for kind, count in counts}  # noqa: C416 - rows, not pairs
        starts = list(link.execute(select(NodeEvent.payload).where(NodeEvent.kind == "start")).scalars())
        found["warm"] = sum(1 for event in starts if event.get("warm"))
        found["unplanned"] = sum(1 for event in starts if not event.get("planned"))
    return found


def main() -> int:
    """Entry point."""
    return run(soak, Path(sys.argv[0]).stem)


if __name__ == "__main__":
    sys.exit(main())
