"""Synthetic input folders of the lending experiments: Pollux's traces with a request trace, and MISO's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np

from slurm_migbatch.lab.papers.goodput import Steps

STEPS: Final = Steps(0.05, 0.001, 0.02, 0.001, 0.01, 0.0005, 1.5)
STEP_S: Final = {"7g.40gb": 0.1, "4g.20gb": 0.13, "3g.20gb": 0.15, "2g.10gb": 0.2, "1g.5gb": 0.3}


def write_pollux(folder: Path) -> Path:
    """Write two workloads of one application, and a request trace."""
    app = folder / "sched" / "traces" / "cifar10"
    app.mkdir(parents=True)
    rows = ["placement,local_bsz,step_time,sync_time"]
    for placement, replicas in (("1", 1), ("2", 2), ("4", 4), ("44", 8), ("4444", 16)):
        for local in (32, 64, 128, 256):
            step = STEPS.iteration_s(replicas, len(placement), local)
            rows.append(f"{placement},{local},{step},{step - STEPS.gradient_s(local)}")
    (app / "placements.csv").write_text("\n".join(rows) + "\n")
    for batch in (128, 512, 2048):
        iterations = round(2_000_000 * (4000 + batch) / (4128 * batch))
        (app / f"validation-{batch}.csv").write_text(f"iteration\n{iterations}\n")
    loads = folder / "workloads"
    loads.mkdir()
    for number in (1, 2):
        jobs = [f"cifar10-{n},{n * 200 * number},cifar10,1,128" for n in range(12)]
        text = "\n".join(["name,time,application,num_replicas,batch_size", *jobs])
        (loads / f"workload-{number}.csv").write_text(text + "\n")
    rng = np.random.Generator(np.random.PCG64(1))
    times = np.cumsum(rng.exponential(300, 400)).astype(int)
    requests = [f"{at},10,5" for at in times.tolist()]
    (folder / "mooncake_conversation_1h.csv").write_text(
        "\n".join(["timestamp_ms,input_tokens,output_tokens", *requests]) + "\n"
    )
    return folder


def write_miso(folder: Path) -> Path:
    """Write two models in MISO's format: one fits on every slice, one on half a GPU or more."""
    raw = folder / "miso" / "raw"
    raw.mkdir(parents=True)
    rows = [
        "slice,model,batch,epochs_logged,steps_logged,first_step_s,mean_s,p50_s,p05_s,p95_s,p99_s",
        *(f"{name},resnet,64,1,100,1.0,{s},{s},{s},{s},{s}" for name, s in STEP_S.items()),
        *(f"{name},bert,8,1,100,1.0,{s},{s},{s},{s},{s}" for name, s in list(STEP_S.items())[:3]),
    ]
    (folder / "miso" / "miso_a100_40gb_train_step_times.csv").write_text("\n".join(rows) + "\n")
    models = {"0": "resnet_train64", "1": "bert_train8", "2": "dummy_train1"}
    (raw / "job_models.json").write_text(json.dumps(models))
    (raw / "exp_100.json").write_text(json.dumps({"0": 300, "1": 900, "2": 100}))
    return folder
