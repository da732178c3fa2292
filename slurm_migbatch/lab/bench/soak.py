"""Run many short jobs of several users on a test bed next to hostile users, and check that none of them is harmed.

Run by `make soak`. Exit status 0 only if every target is met: all jobs complete, none is requeued as a misfit or takes
a slot outside its node's plan (which another job may lack later), no node is drained, nothing is left over, and offers
never follow an observation of Slurm that is older than `STALE_S`.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, run
from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.hostile import PARTS, Hostiles
from slurm_migbatch.testbed.proc import wait_until
from slurm_migbatch.testbed.running_cluster import FINAL
from slurm_migbatch.testbed.watch import HandoffWatch, Watch, handoffs

#: request and its weight
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

#: ordinary users, whose jobs count; as many hostile ones are added
HONEST = 3
#: maximum lag of supply behind Slurm, in seconds
STALE_S = 10.0
#: size of the disk on which a node keeps its journal and the progress files: small, so that a job can fill it
DISK = "48m"
#: seconds in which a node must have cleaned up after the last job
SETTLE_S = 120.0
_CLONE_NEWNS = 0x00020000
#: printed lines of a list, and stored characters of a complaint
_SHOWN, _COMPLAINT = 12, 160


@click.command(context_settings=HELP)
@click.option("--jobs", default=500, show_default=True)
@click.option("--nodes", default=2, show_default=True)
@click.option("--gpus", default=4, show_default=True)
@click.option("--latency", default="real", show_default=True, help="Seconds per driver call, or 'real'.")
@click.option("--seed", default=1, show_default=True)
@click.option("--timeout", default=1500.0, show_default=True, help="Seconds for all jobs.")
@click.option("--hostile/--no-hostile", default=True, show_default=True, help="Add three hostile users.")
@click.option("--part", "parts", multiple=True, type=click.Choice(sorted(PARTS)), help="Run only this hostile part.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def soak(  # noqa: PLR0913 - click passes one argument for each option
    jobs: int,
    nodes: int,
    gpus: int,
    latency: str,
    seed: int,
    timeout: float,
    hostile: bool,
    parts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run many short jobs of three users on a test bed, and compare the results with targets."""
    with (
        _disks(nodes) as disks,
        Cluster(
            nodes=nodes,
            gpus=gpus,
            users=2 * HONEST if hostile else HONEST,
            latency=latency if latency == "real" else float(latency),
            cpus=128,
            migbatch="all",
            options={"MaxJobCount": "100000"},
            node_conf={"StateDir": f"{disks}/%n/state"},
        ) as bed,
    ):
        hostiles = Hostiles(bed, [user.name for user in bed.users[HONEST:]], timeout + 60.0, parts) if hostile else None
        figures = run_jobs(bed, jobs, seed, timeout, hostiles)
    bars = bars_of(figures)
    if as_json:
        click.echo(json.dumps({**figures, "bars": [bar.to_dict() for bar in bars]}, indent=2))
    else:
        for key, value in figures.items():
            _print_value(key, value)
        for bar in bars:
            click.echo(bar.line())
    if missed := [bar.name for bar in bars if not bar.ok]:
        raise TestbedError(f"soak failed: {', '.join(missed)}")


def _print_value(key: str, value: object) -> None:
    """Print a figure; of a long list its first lines."""
    if not isinstance(value, (list, dict)) or len(json.dumps(value)) < 100:
        click.echo(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
        return
    lines = [f"{name}: {json.dumps(entry)}" for name, entry in value.items()] if isinstance(value, dict) else value
    click.echo(f"{key}: {len(lines)}")
    for line in lines[:_SHOWN]:
        click.echo(f"  {line}")


def bars_of(figures: Mapping[str, Any]) -> list[Bar]:
    """Return the targets."""
    bars = [
        Bar("jobs that completed", figures["completed"], figures["jobs"], at_least=True),
        Bar("misfits", figures["misfits"], 0),
        Bar("starts outside the plan", figures["unplanned_starts"], 0),
        Bar("nodes drained or down", len(figures["drained_nodes"]), 0),
        Bar("leftovers", len(figures["leftovers"]), 0),
        Bar("slices in wrong places", len(figures["problems"]), 0),
        Bar("cluster processes that ended", len(figures["ended"]), 0),
        Bar("longest lag of supply behind Slurm, s", figures["supply_behind_s"], STALE_S),
    ]
    if "hostile" in figures:
        idle = [name for name, counts in figures["hostile"].items() if not any(counts.values())]
        bars.append(Bar("hostile parts without effect", len(idle), 0))
    return bars


class ClusterWatch(Watch):
    """Observe the nodes' states and migbatchd's health periodically, in a thread, and once at the end."""

    def __init__(self, bed: Cluster) -> None:
        super().__init__(2.0)
        self._bed = bed
        self._began = time.monotonic()
        self._started = 0.0
        #: nodes that were drained or down -> the reason that Slurm has
        self.drained: dict[str, str] = {}
        #: problem that migbatchd reported -> how often it was seen
        self.complaints: Counter[str] = Counter()
        self.behind_s = 0.0
        self.unanswered = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self.observe()

    def observe(self) -> None:
        """Observe nodes, services and complaints once."""
        names = ",".join(self._bed.spec.node_names)
        listing = self._bed.run(["sinfo", "-h", "-N", "-p", "gpu", "-n", names, "-o", "%N|%T|%E"], check=False)
        for line in listing.stdout.splitlines() if listing.returncode == 0 else ():
            name, state, reason = line.split("|", 2)
            if re.search(r"drain|down|fail|inval", state):
                self.drained.setdefault(name, f"{state}: {reason}")
        try:
            health, metrics = self._bed.product.health(), self._bed.product.metrics()
        except (OSError, ValueError):
            self.unanswered += 1
            return
        self.complaints.update(
            f"{part}: {text}"[:_COMPLAINT] for part, text in (health or {}).get("checks", {}).items() if text != "ok"
        )
        values = dict(re.findall(r"^(migbatch_\S+) (\S+)$", metrics, re.MULTILINE))
        started = float(values.get("migbatch_start_time_seconds", 0))
        if self._started and started != self._started:
            self.complaints["migbatchd was restarted"] += 1
        self._started = started
        behind = values.get('migbatch_supply_age_seconds{what="longest"}')
        self.behind_s = max(self.behind_s, float(behind) if behind else time.monotonic() - self._began)


def run_jobs(bed: Cluster, jobs: int, seed: int, timeout: float, enemies: Hostiles | None) -> dict[str, Any]:
    """Submit, wait, and count what went wrong."""
    honest = [user.name for user in bed.users[:HONEST]]
    began = time.monotonic()
    with HandoffWatch(bed) as watch, ClusterWatch(bed) as observed:
        with enemies or nullcontext():
            submitted = {user: _submit(bed, user, texts) for user, texts in _scripts(honest, jobs, seed)}
            submission_s = time.monotonic() - began
            ids = [job for of_user in submitted.values() for job in of_user]
            with suppress(TestbedError):  # reported as jobs that did not complete
                wait_until(lambda: not _open(bed, honest), timeout, "the end of all jobs", every=2.0)
            wall = time.monotonic() - began
            states = {job: state for job, state in _states(bed, honest).items() if job in ids}
        settle_error = ""
        try:
            wait_until(lambda: not _open(bed) and not leftovers(bed), SETTLE_S, "order after the last job", every=2.0)
        except TestbedError as error:
            settle_error = str(error)
        remaining = leftovers(bed) + [f"job {job} of the end: {state}" for job, state in _open(bed).items()]
    event_counts = _events(bed)
    figures = {
        "jobs": jobs,
        "submitted": len(ids),
        "completed": sum(state == "COMPLETED" for state in states.values()),
        "states": dict(Counter(states.values())),
        "wall_s": round(wall, 1),
        "submission_s": round(submission_s, 1),
        "starts": event_counts.get("start", 0),
        "warm_starts": event_counts.get("warm", 0),
        "unplanned_starts": event_counts.get("unplanned", 0),
        "creates": event_counts.get("create", 0),
        "destroys": event_counts.get("destroy", 0),
        "misfits": event_counts.get("misfit", 0),
        "drained_nodes": [f"{node}: {why}" for node, why in observed.drained.items()],
        "leftovers": remaining if settle_error else [],
        "ended": [daemon.name for daemon in bed.daemons.all() if not daemon.id.alive],
        "supply_behind_s": round(observed.behind_s, 2),
        "complaints": dict(observed.complaints),
        "unanswered": observed.unanswered,
        "watched_rounds": watch.rounds,
        "problems": watch.problems,
    }
    return {**figures, "hostile": enemies.counts} if enemies else figures


def _scripts(users: list[str], jobs: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield each user with a shell script that has one submission a line."""
    draw = random.Random(seed)  # noqa: S311 - a reproducible mix, not a secret
    requests, weights = zip(*MIX, strict=True)
    for i, user in enumerate(users):
        lines = []
        for gres in draw.choices(requests, weights, k=jobs // len(users) + (i < jobs % len(users))):
            comment = f' --comment="{_COMMENT}"' if gres == "mig:auto" else ""
            seconds = draw.choice(("0", "0.2", "0.5", "1"))
            lines.append(
                f"sbatch --parsable -o /dev/null --gres={gres}{comment} --time=2 "
                f"--wrap='test -n \"$CUDA_VISIBLE_DEVICES\" && sleep {seconds}'"
            )
        yield user, "\n".join(lines) + "\n"


def _submit(bed: Cluster, user: str, script: str) -> list[str]:
    return bed.run(["sh"], user, input=script, check=False, timeout=1200.0).stdout.split()


def _states(bed: Cluster, users: list[str] | None = None) -> dict[str, str]:
    chosen = ["-u", ",".join(users)] if users else []
    text = bed.run(["squeue", "-h", "-a", "-r", "-t", "all", *chosen, "-o", "%i|%T"]).stdout
    return dict(line.split("|") for line in text.splitlines())


def _open(bed: Cluster, users: list[str] | None = None) -> dict[str, str]:
    return {job: state for job, state in _states(bed, users).items() if state not in FINAL}


def leftovers(bed: Cluster) -> list[str]:
    """Return leftovers of ended jobs: slices, leases, open devices, files and processes."""
    from slurm_migbatch.node.config import load

    found = []
    uids = {user.uid: user.name for user in bed.users}
    for node in bed.spec.node_names:
        etc = str(bed.product.etc)
        try:
            status = json.loads(bed.product.migbatch("node", "status", "--etc", etc, "--node", node, "--json"))
        except TestbedError as error:
            found.append(f"{node}: cannot be queried: {error}")
            continue
        slice_rows = [slice_row for gpu in status["gpus"] for slice_row in gpu["slices"]]
        found += [
            f"{node}: {slice_row['profile']} {slice_row['state']} of job {slice_row['job']}"
            for slice_row in slice_rows
            if slice_row["state"] != "idle"
        ]
        found += [f"{node}: run of job {run['job']} is {run['state']}" for run in status["runs"]]
        instance_count = sum(len(gpu["instances"]) for gpu in bed.machine(node).dump()["gpus"])
        if instance_count != len(slice_rows):
            found.append(f"{node}: {instance_count} GPU instances, {len(slice_rows)} in the journal")
        for path in (bed.machine(node).dev_root / "nvidia-caps").glob("nvidia-cap*"):
            with suppress(FileNotFoundError):
                if owner := path.stat().st_uid:
                    found.append(f"{node}: {path.name} belongs to {uids.get(owner, owner)}")
        found += [f"{node}: hand-off of job {job}" for (job, _), slices in handoffs(bed, node).items() if slices]
        found += [f"{node}: {path}" for path in Path(load(etc, node).progress_path).glob("*")]
    for pid in bed.daemons.group.members():
        with suppress(FileNotFoundError, ProcessLookupError):
            if name := uids.get(Path(f"/proc/{pid}").stat().st_uid):
                found.append(f"process {pid} of {name}: {Path(f'/proc/{pid}/comm').read_text().strip()}")
    with _record(bed) as link:
        from sqlalchemy import select

        from slurm_migbatch.store.models import StoredLease

        held = select(StoredLease.node, StoredLease.job_id, StoredLease.profile).where(StoredLease.until.is_(None))
        found += [f"record: job {job} holds {profile} on {node}" for node, job, profile in link.execute(held)]
    return found


@contextmanager
def _record(bed: Cluster) -> Iterator[Any]:
    """Open migbatchd's database for reading."""
    from slurm_migbatch.store.db import open_store

    with open_store(bed.product.record, readonly=True) as store, store.reading() as link:
        yield link


def _events(bed: Cluster) -> dict[str, int]:
    from sqlalchemy import func, select

    from slurm_migbatch.store.models import NodeEvent

    with _record(bed) as link:
        counts = link.execute(select(NodeEvent.kind, func.count()).group_by(NodeEvent.kind))
        event_counts: dict[str, int] = {kind: count for kind, count in counts}  # noqa: C416 - rows, not pairs
        starts = list(link.execute(select(NodeEvent.payload).where(NodeEvent.kind == "start")).scalars())
        event_counts["warm"] = sum(1 for event in starts if event.get("warm"))
        event_counts["unplanned"] = sum(1 for event in starts if not event.get("planned"))
    return event_counts


@contextmanager
def _disks(nodes: int) -> Iterator[Path]:
    """Yield a directory with a small file system for each node (n1, ...); the mounts end with this process.

    Each has a directory in which every user may write, like a disk with /var/lib and /var/tmp.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise TestbedError(f"mounting the nodes' disks needs root: {os.strerror(ctypes.get_errno())}")
    _mount("--make-rprivate", "/")
    with tempfile.TemporaryDirectory(prefix="migbatch-soak-", dir="/var/tmp") as text:
        base = Path(text)
        base.chmod(0o755)
        _mount("-t", "tmpfs", "-o", "mode=755,size=1m", "disks", text)
        for number in range(1, nodes + 1):
            disk = base / f"n{number}"
            disk.mkdir()
            _mount("-t", "tmpfs", "-o", f"mode=755,size={DISK}", "disk", str(disk))
            (disk / "scratch").mkdir()
            (disk / "scratch").chmod(0o1777)
        try:
            yield base
        finally:
            subprocess.run(["umount", "-R", "-l", text], check=True)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise TestbedError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def main() -> int:
    """Run the command."""
    return run(soak, Path(sys.argv[0]).stem)


if __name__ == "__main__":
    sys.exit(main())
