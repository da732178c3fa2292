"""Measure learning: a refit on many runs, and predictions with very many known models.

Runs are synthetic: a thousand models with known specifications whose true curves differ from physics by a factor of
about two, run on slices of an H100 at several batches by a few dozen users. The refit is everything that migbatchd's
child does (reading the record from SQLite, the check against the current model, writing the version); predictions are
those of the chooser that answers submissions, for new cells.

Both mostly compute, so their targets are in processor time, independent of other work on
this machine. Elapsed time is printed as well.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy import insert

from slurm_migbatch.config import Config, ModelConfig
from slurm_migbatch.daemon.facts import chooser_of, known_models
from slurm_migbatch.daemon.refit import run
from slurm_migbatch.lab.bars import Bar, times_of
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.predict.facts import BUILT_IN, ModelFacts
from slurm_migbatch.predict.known import from_facts
from slurm_migbatch.predict.llm.names import generates
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.models import Run, StoredDecision, StoredGpu, StoredLease, StoredNode
from slurm_migbatch.testbed.simdriver import SimulatedMachine
from slurm_migbatch.workload.catalog import GpuKind, Partition
from slurm_migbatch.workload.gpufacts import facts_of, short_name
from slurm_migbatch.workload.hints import Hints

REFIT_TARGET_S: Final = 60.0
PREDICT_TARGET_MS: Final = 2.0
USERS: Final = 40
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_GPU: Final = "GPU-00000000-0000-0000-0000-000000000000"
_AT_ONCE: Final = 1000
_EPOCH: Final = 1.7e9
_ASKED: Final = 3000
_NICE: Final = -10


def measure(runs: int = 10_000, models: int = 1000, progress: Progress = silent) -> dict[str, Any]:
    """Learn twice from `runs` runs of `models` models, and predict."""
    chance = random.Random(20)  # noqa: S311 synthetic jobs
    with tempfile.TemporaryDirectory(prefix="migbatch-bench-") as folder:
        geometry = _geometry(Path(folder) / "machine")
        config = _config(Path(folder), _invented(models, chance))
        progress(f"generating {runs} runs", 0)
        _fill(config, geometry, runs, chance)
        first = _refit(config, progress)
        again = _refit(config, progress)
        progress("predicting", 0)
        predictions = _predict(config, geometry, chance)
    bars = [
        Bar(f"refit on {runs:,} runs (s)", again["own_s"], REFIT_TARGET_S),
        Bar(f"prediction p99 with {models:,} models (ms)", predictions["own"]["p99_ms"], PREDICT_TARGET_MS),
    ]
    return {
        "bench": "learn",
        "runs": runs,
        "models": models,
        "refit": {"first": first, "again": again},
        "prediction": predictions,
        "bars": [bar.to_dict() for bar in bars],
    }


def _geometry(place: Path) -> Geometry:
    from slurm_migbatch.mig.nvml import NvmlDriver

    machine = SimulatedMachine.create(place, gpus=["h100-80gb"])
    driver = NvmlDriver(str(machine.library))
    try:
        gpu = driver.gpus()[0]
        gpu.set_mig_mode(True)
        return gpu.geometry()
    finally:
        driver.close()


def _invented(count: int, chance: random.Random) -> dict[str, ModelConfig]:
    """Return specifications of models in addition to the built-in ones with curves, `count` in all."""
    specifications = {}
    for number in range(count - sum(not generates(model.name) for model in BUILT_IN)):
        is_text = chance.random() < 0.5
        specifications[f"made-up-{number}"] = ModelConfig(
            family="encoder" if is_text else "cnn",
            params_m=math.exp(chance.uniform(math.log(5), math.log(1500))),
            gflops=math.exp(chance.uniform(math.log(0.5), math.log(300))),
            unit="tok" if is_text else "px",
            reference=128 if is_text else 224,
            kernels=chance.randint(50, 600),
            activation_mib=math.exp(chance.uniform(math.log(2), math.log(200))),
        )
    return specifications


def _config(place: Path, models: dict[str, ModelConfig]) -> Config:
    base = Config()
    return replace(
        base,
        models=models,
        store=replace(base.store, url=f"sqlite:///{place}/record.db"),
        learning=replace(base.learning, models=str(place / "models"), runs=10**6),
    )


def _fill(config: Config, geometry: Geometry, runs: int, chance: random.Random) -> None:
    with open_store(config.store.url) as store, store.engine.begin() as connection:
        connection.execute(insert(StoredNode).values(node="n1", seen=_EPOCH))
        gpu = {
            "node": "n1", "uuid": _GPU, "minor": 0, "gpu_index": 0, "name": geometry.name, "mig": True,
            "geometry": geometry.to_dict(), "facts": {}, "present": True, "seen": _EPOCH,
        }  # fmt: skip
        connection.execute(insert(StoredGpu).values(**gpu))
        curves = [model for model in known_models(config) if not generates(model.name)]
        rows = list(_runs(curves, geometry, runs, chance))
        for table, part in ((StoredDecision, 0), (Run, 1), (StoredLease, 2)):
            for start in range(0, runs, _AT_ONCE):
                connection.execute(insert(table), [row[part] for row in rows[start : start + _AT_ONCE]])


def _runs(
    facts: list[ModelFacts], geometry: Geometry, runs: int, chance: random.Random
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Yield the rows of decision, run and lease of each run."""
    speed = facts_of(geometry.name)
    assert speed is not None
    plain = [info for info in geometry.profiles if not info.profile.suffix]
    slow = {model.name: math.exp(chance.gauss(0.0, 0.7)) for model in facts}
    for number in range(1, runs + 1):
        model, info, batch = facts[number % len(facts)], chance.choice(plain), chance.choice(BATCHES)
        known = from_facts(model)
        share = info.sm_count / speed.sm_count
        device = batch * known.flops / (0.3 * speed.tflops * 1e12 * share) * slow[model.name]
        seconds = max(device, 30e-6 * known.kernels) * math.exp(chance.gauss(0.0, 0.1))
        memory = 700.0 + known.weight_mib + batch * known.alive_mib
        id, at = f"d{number}", _EPOCH + 60.0 * number
        hints = {"model": model.name, "batch": batch, "role": "infer"}
        sources = {"by": {"latency_ms": "job", "throughput_per_s": "job", "memory_mib": "driver"}}
        yield (
            {"id": id, "ts": at, "hints": hints, "candidates": [], "facts": {}},
            {
                "id": number, "job_id": number, "restart": 0, "reuse": 0, "latest": True, "state": "COMPLETED",
                "state_from": "slurm", "user": f"user{chance.randrange(USERS)}", "submitted": at, "started": at,
                "ended": at + 50.0, "began": at, "span_class": 3, "decision": id, "profile": info.profile.name,
                "slice_count": 1, "measured_latency_ms": seconds * 1e3, "measured_throughput_per_s": batch / seconds,
                "measured_memory_mib": min(memory, 0.95 * info.memory_mib), "measured_facts": sources, "lesson": number,
            },
            {
                "run_id": number, "job_id": number, "restart": 0, "node": "n1", "journal": "bench", "position": 0,
                "gpu": _GPU, "profile": info.profile.name, "slot_start": 0, "slot_size": info.memory_slices,
                "since": at, "until": at + 50.0, "outcome": "released",
            },
        )  # fmt: skip


def _refit(config: Config, progress: Progress) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    refit = run(config, force="a benchmark", progress=progress)["refit"]
    return {
        "wall_s": round(time.perf_counter() - wall, 2),
        "own_s": round(time.process_time() - cpu, 2),
        **{name: refit.get(name) for name in ("outcome", "why", "rows", "check")},
    }


def _predict(config: Config, geometry: Geometry, chance: random.Random) -> dict[str, Any]:
    """Time choices of slices, each for another cell, as in the submit service."""
    began = time.perf_counter()
    chooser = chooser_of(config)
    loading = time.perf_counter() - began
    speed = facts_of(geometry.name)
    assert speed is not None
    name = short_name(geometry.name, geometry.full.profile.memory_gb)
    partition = Partition("gpu", (GpuKind(name, geometry, speed.tflops, speed.bandwidth_gbs, speed.sm_count),))
    names = sorted(chooser.grids)
    wall_s: list[float] = []
    cpu_s: list[float] = []
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # priority and disabled collector as in the answering process
    gc.disable()
    try:
        for number in range(_ASKED + 50):
            model = names[number % len(names)]
            hints = Hints(model=model, batch=chance.choice(BATCHES), slo_us=chance.randrange(10_000, 500_000))
            began, thread_began = time.perf_counter(), time.thread_time()
            chooser.choose(hints, partition)
            if number >= 50:
                cpu_s.append(time.thread_time() - thread_began)
                wall_s.append(time.perf_counter() - began)
    finally:
        gc.enable()
    return {
        "known": len(names),
        "loading_s": round(loading, 3),
        "own": times_of(cpu_s),
        "wall": times_of(wall_s),
    }
