"""Lending on a real Slurm: the same wave with and without, and what `migbatch simulate`'s Slurm had predicted of both.

Two nodes of four simulated H100s. Inference belongs on the first half of the nodes. *half*: training has the other half
and nothing more, under the same migbatchd, with the same elastic jobs and sizes. *lending*: it may have what is idle
on the first half too.

Both have migbatchd's decision, with the shipped configuration but for `waves.settings`. Every figure is read from the
record that migbatchd keeps and from what the training jobs themselves wrote.
"""

from __future__ import annotations

import re
import shutil
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.lab.bars import Bar, NotMeasurable, quantile
from slurm_migbatch.lab.experiments.wave import Wave, draw
from slurm_migbatch.lab.say import Say, silent
from slurm_migbatch.lab.shipped import DECIDES, provenance
from slurm_migbatch.lab.slurm import waves
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.proc import wait_until
from slurm_migbatch.testbed.running_cluster import FINAL

TARGET_JCT: Final = 0.70
TARGET_DELAY_S: Final = 5.0
TARGET_RESTARTS: Final = 3.0
TARGET_PREDICTION: Final = 0.10
END_S: Final = 1500.0
_TRAINING = Path(__file__).with_name("wave_training.py")
_PACKAGE = Path(__file__).resolve().parents[2]
_LINE = re.compile(r"^(begin|saved|end) (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class WaveJobResult:
    """One job of the wave: when it was submitted, first started and ended (unix s), its runs, and how it ended."""

    job: int
    submitted: float
    started: float
    ended: float
    runs: int
    state: str


def measure(
    seed: int = 1,
    wave: Wave | None = None,
    say: Say = silent,
    slurm_root: str = "",
) -> dict[str, Any]:
    """The whole experiment: both ways on a test bed of their own, one after the other (root, about 20 minutes).

    Raises:
        NotMeasurable: a job was refused, or did not end.
        TestbedError: the test bed is at fault.
    """
    wave = wave or draw(seed)
    ways: dict[str, dict[str, Any]] = {}
    for name, lending in (("half", False), ("lending", True)):
        say(f"{name}: the simulator", 0)
        predicted = waves.predict(wave, lending)
        say(f"{name}: {len(wave.requests)} inference and {len(wave.trainings)} training jobs on a real Slurm", 0)
        ways[name] = {**run(wave, lending, say, slurm_root), "predicted": predicted}
    return {
        "bench": "live",
        "seed": seed,
        "requests": len(wave.requests),
        "trainings": len(wave.trainings),
        "day_s": wave.day_s,
        "nodes": wave.nodes,
        "gpus": wave.gpus,
        **provenance(DECIDES, waves.config(wave)),
        "changed": waves.settings(wave),
        "ways": ways,
        "bars": [bar.to_dict() for bar in _bars(ways["half"], ways["lending"])],
    }


def _bars(half: Mapping[str, Any], lending: Mapping[str, Any]) -> list[Bar]:
    bars = [
        Bar("mean JCT of training over that without lending", lending["jct_s"] / half["jct_s"], TARGET_JCT),
        Bar("p95 start delay of inference beyond that without [s]", lending["p95_s"] - half["p95_s"], TARGET_DELAY_S),
        Bar("restarts per training job", lending["restarts"], TARGET_RESTARTS),
        Bar("inference jobs that did not complete", float(lending["inference_failed"] + half["inference_failed"]), 0.0),
        Bar("training jobs that did not complete", float(lending["training_failed"] + half["training_failed"]), 0.0),
        Bar("steps lost that a checkpoint had saved", float(lending["steps_lost"] + half["steps_lost"]), 0.0),
    ]
    for name, way in (("half", half), ("lending", lending)):
        off = abs(way["jct_s"] / way["predicted"]["jct_s"] - 1.0)
        bars.append(Bar(f"{name}: measured mean JCT off the predicted one", off, TARGET_PREDICTION))
    return bars


def run(wave: Wave, lending: bool, say: Say = silent, slurm_root: str = "") -> dict[str, Any]:
    """One way, on a test bed of its own (with the Slurm of `slurm_root`, where given); its figures."""
    with Cluster(
        nodes=wave.nodes,
        gpus=wave.gpus,
        gpu_type=wave.gpu_type,
        slurm_root=slurm_root,
        cpus=256,
        latency="real",
        migbatch="all",
        config=waves.settings(wave),
        options={"MaxJobCount": "20000", "KillWait": "5"},
        partition_nodes=_partitions(wave, lending),
    ) as bed:
        library = install(bed.directory / "elastic")
        client = CliClient(bed.bin, bed.slurm_conf)
        before = client.diag()
        begun = time.time()
        jobs = _Submitter(bed, wave, library).run()
        say(f"all submitted after {time.time() - begun:.0f} s", 0)
        _await_end(bed, [*jobs.inference, *jobs.training])
        after = client.diag()
        records = _records(bed)
        inference = [_ended(records, job) for job in jobs.inference]
        training = [_ended(records, job) for job in jobs.training]
        delays = [job.started - job.submitted for job in inference if job.started]
        jct = [job.ended - job.submitted for job in training]
        return {
            "jct_s": round(statistics.fmean(jct), 2),
            "jct_p95_s": round(quantile(jct, 0.95), 2),
            "mean_delay_s": round(statistics.fmean(delays), 2),
            "p95_s": round(quantile(delays, 0.95), 2),
            "restarts": round(statistics.fmean(job.runs - 1 for job in training), 3),
            "restarts_max": max(job.runs - 1 for job in training),
            "inference_failed": sum(1 for job in inference if job.state != "COMPLETED"),
            "training_failed": sum(1 for job in training if job.state != "COMPLETED"),
            "steps_lost": sum(_lost(bed, job) for job in jobs.training),
            "drained_nodes": [n for n, state in bed.node_states().items() if state.rstrip("*") != "idle"],
            "rpcs": sum(count.count for count in after.since(before).types.values()),
            "makespan_s": round(max(job.ended for job in (*inference, *training)) - begun, 1),
        }


def _partitions(wave: Wave, lending: bool) -> dict[str, str]:
    names = [f"n{number}" for number in range(1, wave.nodes + 1)]
    half = wave.nodes // 2
    return {"gpu": ",".join(names[:half]), "train": ",".join(names if lending else names[half:])}


def install(library: Path) -> Path:
    """Copy the training job and what it imports to `library`: a checkout may lie where ordinary users cannot read."""
    (library / "slurm_migbatch").mkdir(parents=True)
    shutil.copyfile(_PACKAGE / "__init__.py", library / "slurm_migbatch/__init__.py")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_PACKAGE / "elastic", library / "slurm_migbatch/elastic", ignore=ignore)
    shutil.copyfile(_TRAINING, library / _TRAINING.name)
    for path in (library, *library.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return library


@dataclass(frozen=True)
class Submitted:
    """Job ids in the order of the wave."""

    inference: tuple[int, ...]
    training: tuple[int, ...]


class _Submitter:
    """Submits a wave in its time; two threads, so that neither half holds up the other."""

    def __init__(self, bed: Cluster, wave: Wave, library: Path) -> None:
        self._bed, self._wave, self._library = bed, wave, library
        self._failed: list[str] = []

    def run(self) -> Submitted:
        """Submit everything. Raises NotMeasurable where Slurm refuses a job."""
        begin = time.monotonic() + 1.0
        found: dict[str, list[int]] = {"inference": [], "training": []}
        inference = [
            (
                request.at,
                "mbalice",
                ["-p", "gpu", f"--gres=mig:{request.profile}:1", "-o", "/dev/null"],
                f"sleep {request.seconds}",
            )
            for request in self._wave.requests
        ]
        training = [
            (
                job.at,
                "mbbob",
                [
                    *("-p", "train", "--gres=mig:auto", "--requeue", "--open-mode=append"),
                    f"--comment=migbatch: role=train min={job.least} max={job.most} signal=usr1",
                ],
                f"exec python3 -I {self._library}/{_TRAINING.name} {self._library} wave-$SLURM_JOB_ID "
                f"{job.steps} {job.step_s}",
            )
            for job in self._wave.trainings
        ]
        threads = [
            threading.Thread(target=self._submit, args=(begin, plan, found[name]))
            for name, plan in (("inference", inference), ("training", training))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise NotMeasurable(self._failed[0])
        return Submitted(tuple(found["inference"]), tuple(found["training"]))

    def _submit(self, begin: float, plan: Sequence[tuple[float, str, list[str], str]], found: list[int]) -> None:
        try:
            for at, user, options, wrap in plan:
                time.sleep(max(0.0, begin + at - time.monotonic()))
                found.append(self._bed.submit("--time=60", *options, wrap=wrap, user=user))
        except Exception as error:
            self._failed.append(f"a job of the wave was not accepted: {error}")


def _await_end(bed: Cluster, jobs: Sequence[int]) -> None:
    wanted = {str(job) for job in jobs}

    def over() -> bool:
        states = bed.states()
        return all(states.get(job, "COMPLETED") in FINAL for job in wanted)

    wait_until(over, END_S, "the end of the wave", every=2.0)


def _records(bed: Cluster) -> dict[int, list[Any]]:
    """Runs by job id, the oldest first."""
    from sqlalchemy import select

    from slurm_migbatch.store.db import open_store
    from slurm_migbatch.store.models import Run

    def read() -> dict[int, list[Any]]:
        columns = (Run.job_id, Run.restart, Run.state, Run.submitted, Run.started, Run.ended)
        asked = select(*columns).order_by(Run.job_id, Run.restart)
        with open_store(bed.product.record, readonly=True) as store, store.reading() as link:
            rows = link.execute(asked).all()
        found: dict[int, list[Any]] = {}
        for row in rows:
            found.setdefault(row.job_id, []).append(row)
        return found

    wait_until(lambda: all(runs[-1].ended for runs in read().values()), 60.0, "the record of all jobs", every=1.0)
    return read()


def _ended(records: Mapping[int, Sequence[Any]], job: int) -> WaveJobResult:
    runs = [run for run in records.get(job, ()) if run.started is not None]
    if not runs:
        raise NotMeasurable(f"job {job} never started, or was not recorded")
    submitted = min(run.submitted for run in records[job] if run.submitted is not None)
    return WaveJobResult(job, submitted, runs[0].started, runs[-1].ended, len(runs), runs[-1].state)


def _lost(bed: Cluster, job: int) -> int:
    """Return the steps that the job reported as saved and did not resume from."""
    lost = 0
    saved = 0
    for event, number in _LINE.findall(bed.output(job, "mbbob")):
        if event == "begin":
            lost += max(0, saved - int(number))
        else:
            saved = int(number)
    return lost
