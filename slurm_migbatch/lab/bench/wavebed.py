"""Run the jobs of a wave on a test bed: submit them on time, wait for them, and collect their results.

Shared by the measurements of `bench live`. Every figure is read from the record that migbatchd keeps and from the
training jobs' own output.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from slurm_migbatch.decide.supply.moves import MOVE
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.bench.rpcs import diag
from slurm_migbatch.lab.progress import Progress
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.proc import wait_until
from slurm_migbatch.testbed.running_cluster import FINAL

END_S: Final = 1500.0
INFERENCE_USER: Final = "mbalice"
TRAINING_USER: Final = "mbbob"
_ACTIONS: Final = 100_000
_TRAINING = Path(__file__).with_name("wave_training.py")
_PACKAGE = Path(__file__).resolve().parents[2]
_LINE = re.compile(r"^(begin|saved|end) (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class WaveJob:
    """One job to submit: `at` seconds after the wave's begin, with these options of sbatch and this --wrap."""

    at: float
    options: tuple[str, ...]
    wrap: str


@dataclass(frozen=True)
class WaveJobResult:
    """One job of the wave: when it was submitted, first started and ended (unix s), its runs, and how it ended.

    `pauses_s` are the seconds from the end of each run to the start of the next.
    """

    job: int
    submitted: float
    started: float
    ended: float
    runs: int
    state: str
    pauses_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class PlayedWave:
    """Result of a wave.

    Attributes:
        jobs: by user, in the order of the plan.
        moved: the job of each move.
        steps_lost: steps that training jobs reported as saved and did not resume from.
        drained: nodes that are not idle afterwards.
        rpcs: requests that slurmctld answered meanwhile.
        makespan_s: from the first submission to the last end.
    """

    jobs: Mapping[str, Sequence[WaveJobResult]]
    moved: tuple[int, ...]
    steps_lost: int
    drained: tuple[str, ...]
    rpcs: int
    makespan_s: float

    def failed(self, user: str) -> int:
        """Return how many jobs of a user did not complete."""
        return sum(1 for job in self.jobs[user] if job.state != "COMPLETED")


class WaveSite(Protocol):
    """Cluster of a wave."""

    @property
    def nodes(self) -> int:
        """Nodes."""

    @property
    def gpus(self) -> int:
        """GPUs per node."""

    @property
    def gpu_type(self) -> str:
        """Their model."""


def bed_for(
    site: WaveSite,
    config: Mapping[str, Mapping[str, object]],
    slurm_root: str,
    partitions: Mapping[str, str],
    options: Mapping[str, str] | None = None,
) -> Cluster:
    """Return the test bed of a wave: `config` has the changes to the default migbatch.toml, `options` slurm.conf's."""
    return Cluster(
        nodes=site.nodes,
        gpus=site.gpus,
        gpu_type=site.gpu_type,
        slurm_root=slurm_root,
        cpus=256,
        latency="real",
        migbatch="all",
        config=config,
        options={"MaxJobCount": "20000", "KillWait": "5", **(options or {})},
        partition_nodes=partitions,
    )


def play(bed: Cluster, plans: Mapping[str, Sequence[WaveJob]], progress: Progress) -> PlayedWave:
    """Submit everything and wait until it has ended.

    Raises:
        NotMeasurable: a job was refused, or never started.
        TestbedError: jobs did not end in time.
    """
    before = diag(bed)
    begun = time.time()
    job_ids = _submit(bed, plans)
    progress(f"all submitted after {time.time() - begun:.0f} s", 0)
    _await_end(bed, [job for of_user in job_ids.values() for job in of_user])
    after = diag(bed)
    recorded = _records(bed)
    jobs = {user: [_ended(recorded, job) for job in of_user] for user, of_user in job_ids.items()}
    return PlayedWave(
        jobs,
        _moved(bed),
        sum(_steps_lost(bed, job) for job in job_ids.get(TRAINING_USER, ())),
        tuple(name for name, state in bed.node_states().items() if state.rstrip("*") != "idle"),
        sum(count.count for count in after.since(before).types.values()),
        round(max(job.ended for of_user in jobs.values() for job in of_user) - begun, 1),
    )


def install(library: Path) -> Path:
    """Copy the training job and its imports to `library`: ordinary users may not be able to read the checkout."""
    (library / "slurm_migbatch").mkdir(parents=True)
    shutil.copyfile(_PACKAGE / "__init__.py", library / "slurm_migbatch/__init__.py")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_PACKAGE / "elastic", library / "slurm_migbatch/elastic", ignore=ignore)
    shutil.copyfile(_TRAINING, library / _TRAINING.name)
    for path in (library, *library.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return library


def training_command(library: Path, steps: int, step_s: float) -> str:
    """Return a training job's --wrap; a step takes `step_s` seconds on a whole GPU, `library` is that of `install`."""
    return f"exec python3 -I {library}/{_TRAINING.name} {library} wave-$SLURM_JOB_ID {steps} {step_s}"


def _submit(bed: Cluster, plans: Mapping[str, Sequence[WaveJob]]) -> dict[str, tuple[int, ...]]:
    """Submit each user's jobs on time, each user in a thread, so that none delays another.

    Returns:
        Job ids by user, in the order of the plan.

    Raises:
        NotMeasurable: Slurm refuses a job.
    """
    begin = time.monotonic() + 1.0
    job_ids: dict[str, list[int]] = {user: [] for user in plans}
    failed: list[str] = []

    def work(user: str) -> None:
        try:
            for job in plans[user]:
                time.sleep(max(0.0, begin + job.at - time.monotonic()))
                job_ids[user].append(bed.submit(*job.options, wrap=job.wrap, user=user))
        except Exception as error:
            failed.append(f"a job of the wave was rejected: {error}")

    threads = [threading.Thread(target=work, args=(user,)) for user in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise NotMeasurable(failed[0])
    return {user: tuple(jobs) for user, jobs in job_ids.items()}


def _await_end(bed: Cluster, jobs: Sequence[int]) -> None:
    """Wait until all jobs have ended, at most `END_S` seconds. Raises TestbedError."""
    job_ids = {str(job) for job in jobs}

    def over() -> bool:
        states = bed.states()
        return all(states.get(job, "COMPLETED") in FINAL for job in job_ids)

    wait_until(over, END_S, "the end of the wave", every=2.0)


def _records(bed: Cluster) -> dict[int, list[Any]]:
    """Return the runs by job id, the oldest first."""
    from sqlalchemy import select

    from slurm_migbatch.store.db import open_store
    from slurm_migbatch.store.models import Run

    def read() -> dict[int, list[Any]]:
        columns = (Run.job_id, Run.restart, Run.state, Run.submitted, Run.started, Run.ended)
        query = select(*columns).order_by(Run.job_id, Run.restart)
        with open_store(bed.product.record, readonly=True) as store, store.reading() as link:
            rows = link.execute(query).all()
        by_job: dict[int, list[Any]] = {}
        for row in rows:
            by_job.setdefault(row.job_id, []).append(row)
        return by_job

    wait_until(lambda: all(runs[-1].ended for runs in read().values()), 60.0, "the record of all jobs", every=1.0)
    return read()


def _ended(recorded: Mapping[int, Sequence[Any]], job: int) -> WaveJobResult:
    """Return the result of a job by the record. Raises NotMeasurable."""
    runs = [run for run in recorded.get(job, ()) if run.started is not None]
    if not runs:
        raise NotMeasurable(f"job {job} never started, or was not recorded")
    submitted = min(run.submitted for run in recorded[job] if run.submitted is not None)
    pauses = tuple(later.started - earlier.ended for earlier, later in pairwise(runs) if earlier.ended is not None)
    return WaveJobResult(job, submitted, runs[0].started, runs[-1].ended, len(runs), runs[-1].state, pauses)


def _moved(bed: Cluster) -> tuple[int, ...]:
    """Return the job of each requeue that moved a training job; a repeated order counts once."""
    from slurm_migbatch.store.db import open_store

    with open_store(bed.product.record, readonly=True) as store:
        rows = store.actions(limit=_ACTIONS)
    requeues = {
        (row["job_id"], row["restart"])
        for row in rows
        if row["kind"] == MOVE and row["after"] == "PENDING" and not row["outcome"]
    }
    return tuple(job for job, _ in sorted(requeues))


def _steps_lost(bed: Cluster, job: int) -> int:
    """Return the steps that the job reported as saved and did not resume from."""
    lost = 0
    saved = 0
    for event, number in _LINE.findall(bed.output(job, TRAINING_USER)):
        if event == "begin":
            lost += max(0, saved - int(number))
        else:
            saved = int(number)
    return lost
