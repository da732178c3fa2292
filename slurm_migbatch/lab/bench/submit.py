"""What the submit filter costs: sbatch with and without it, the service behind it, and the table that replaces it.

Two clusters run side by side, one with the filter and one without, and take turns in blocks, so that whatever else the
machine does falls on both. Jobs are submitted by an ordinary user (root's pass the filter untouched) and held, so that
nothing is measured but the submission.
"""

from __future__ import annotations

import json
import math
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_migbatch.lab.bars import Bar, Times, mean_with_interval, quantile
from slurm_migbatch.lab.bench.hooks import BenchError
from slurm_migbatch.predict.facts import BUILT_IN
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol, shim
from slurm_migbatch.submit.request import Accept, JobRequest
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.submit.table import compile_table, write_table
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.catalog import SiteCatalog, load

RATIO_TARGET, SERVICE_TARGET_MS, TABLE_TARGET_US = 1.05, 2.0, 50.0
_USER = "mbalice"
_ASKED = ("--gres=mig:auto", "--comment=migbatch: model=bert-large batch=32 slo=200ms")
_GRANTED = ("--gres=mig:1g.10gb:1", "--comment=migbatch: model=bert-large batch=32 slo=200ms")
_MODELS = ("bert-large", "resnet50", "vit-b-16", "gpt2", "llama-3.1-8b", "unknown-model", "mobilenet-v2")
#: what a batch job has besides, of which the service makes a digest
_BATCH = {
    "batch": "1",
    "name": "train.sh",
    "account": "physics",
    "script": "#!/bin/bash\nmodule load cuda/12\n" + "python train.py --epoch 17 --out /scratch/run_2026-01-03\n" * 20,
}
#: seconds between two requests to the service
_PACE_S = 0.002
#: known models of a large site
_MANY = 1000
#: runs inside the test bed as the user: n submissions, one after the other; prints the seconds of each
_SUBMIT = """
import json, os, sys, time
n, argv = int(sys.argv[1]), sys.argv[2:]
null = os.open(os.devnull, os.O_WRONLY)
quiet = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
spent = []
for _ in range(n):
    began = time.perf_counter()
    pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=quiet)
    status = os.waitpid(pid, 0)[1]
    spent.append(time.perf_counter() - began)
    if status:
        sys.exit(f"sbatch ended with status {status}")
print(json.dumps(spent))
"""


def measure(
    submissions: int = 1000, block: int = 25, requests: int = 3000, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Run all three measurements.

    Args:
        submissions: of sbatch on each side.
        block: submissions before the other side has its turn.
        requests: to the service, over its socket.
        progress: is told what is going on.

    Returns:
        Figures and bars.

    Raises:
        BenchError: something could not be measured.
    """
    with ExitStack() as stack:
        progress("starting two clusters")
        filtered = stack.enter_context(Cluster(nodes=1, gpus=1, users=1, migbatch="all"))
        plain = stack.enter_context(Cluster(nodes=1, gpus=1, users=1))
        progress("sbatch with and without the filter, in turns")
        sbatch = compare(filtered, plain, submissions, block, _without_advice(filtered))
        progress("the same with cli_filter")
        advice = compare(filtered, plain, max(block * 2, submissions // 5), block)
        progress("the service over its socket")
        service = time_service(filtered.product.state / "submit.sock", requests)
        progress("the compiled table in Lua")
        script = filtered.product.etc / shim.JOB_SUBMIT
        table = time_table(script, filtered.product.state / "table.lua")
        progress(f"{_MANY} known models")
        many = time_many(load(filtered.product.state / "catalog.json"), script, requests)
        version = ".".join(f"{number:02d}" for number in filtered.root.version())
    bars = [
        Bar("sbatch with the filter over without, wall time", sbatch["ratio"], RATIO_TARGET),
        Bar("filter service p99, ms", service["p99_ms"], SERVICE_TARGET_MS),
        Bar("compiled-table look-up median, us", table["lookup_us"]["median"], TABLE_TARGET_US),
        Bar(f"one decision with {_MANY} known models p99, ms", many["decision"]["p99_ms"], SERVICE_TARGET_MS),
    ]
    return {
        "bench": "submit",
        "slurm": version,
        "python": sys.version.split()[0],
        "sbatch": sbatch,
        "sbatch_with_cli_filter": advice,
        "service": service,
        "table": table,
        "many_models": many,
        "bars": [bar.to_dict() for bar in bars],
    }


def _without_advice(cluster: Cluster) -> Path:
    """A slurm.conf for clients that does not load cli_filter, which is optional and runs inside sbatch itself."""
    conf = cluster.product.etc / "plain/slurm.conf"
    conf.parent.mkdir(exist_ok=True)
    lines = [line for line in cluster.conf_text().splitlines() if not line.startswith("CliFilterPlugins")]
    conf.write_text("\n".join(lines) + "\n")
    return conf


def compare(
    filtered: Cluster, plain: Cluster, submissions: int, block: int, conf: Path | None = None
) -> dict[str, Any]:
    """Submit to both in turns (with, without, without, with ...); `conf` is for the clients of the filtered side.

    Returns:
        `ratio` of the total wall times, the mean of the blocks' ratios with its 95 % interval, and times of one sbatch.
    """
    sides: dict[str, tuple[Cluster, Sequence[str], Path]] = {
        "with": (filtered, _ASKED, conf or filtered.slurm_conf),
        "without": (plain, _GRANTED, plain.slurm_conf),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        _submit(*side, 5)
    ratios = []
    for number in range(math.ceil(submissions / block)):
        pair = {}
        for name in ("with", "without") if number % 2 == 0 else ("without", "with"):
            spent = _submit(*sides[name], block)
            times[name] += spent
            pair[name] = sum(spent)
        ratios.append(pair["with"] / pair["without"])
    mean, low, high = mean_with_interval(ratios)
    granted = filtered.run(["squeue", "-h", "-o", "%k"]).stdout.count("[mig:")
    if granted < submissions:
        raise BenchError(f"the filter granted {granted} of {submissions} jobs a slice; what was timed is not its work")
    return {
        "submissions": len(times["with"]),
        "ratio": sum(times["with"]) / sum(times["without"]),
        "block_ratio_mean": mean,
        "block_ratio_interval_95": [low, high],
        "with": Times.of(times["with"]).to_dict(),
        "without": Times.of(times["without"]).to_dict(),
    }


def _submit(cluster: Cluster, options: Sequence[str], conf: Path, count: int) -> list[float]:
    sbatch = str(cluster.root.locate("sbatch"))
    argv = [sbatch, "--hold", "--output=/dev/null", *options, "--wrap=true"]
    line = ["/usr/bin/python3", "-ISc", _SUBMIT, str(count), *argv]
    done = cluster.run(line, _USER, check=False, env={"SLURM_CONF": str(conf)})
    if done.returncode:
        raise BenchError(f"sbatch failed: {done.stderr.strip()[-300:]}")
    spent: list[float] = json.loads(done.stdout)
    return spent


def time_service(path: Path, requests: int) -> dict[str, Any]:
    """Ask the running service as slurmctld does, over one connection; many different buckets, every second a batch job.

    About 400 times a second, which is more than slurmctld can submit: every decision is also recorded, by the service
    and by other processes, and those shall have their share of the time.
    """
    spent = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(10.0)
        link.connect(str(path))
        for number in range(requests + 50):
            fields = _request(_MODELS[number % len(_MODELS)], number).to_fields()
            message = protocol.encode({**fields, **_BATCH} if number % 2 else fields)
            time.sleep(_PACE_S)
            began = time.perf_counter()
            link.sendall(message)
            reply = link.recv(protocol.MAX_REQUEST)
            if number >= 50:
                spent.append(time.perf_counter() - began)
            if not isinstance(protocol.decode_answer(reply), Accept):
                raise BenchError(f"the service did not grant {message!r}: {reply!r}")
    return Times.of(spent).to_dict()


def _request(model: str, number: int) -> JobRequest:
    comment = f"migbatch: model={model} batch={1 << number % 8} slo={40 + number % 400}ms"
    return JobRequest(1000, partition="gpu", tres_per_node="gres:mig:auto", comment=comment, num_tasks=1)


def time_many(catalog: SiteCatalog, script: Path, requests: int, models: int = _MANY) -> dict[str, Any]:
    """The service's work on one request, and the compiled table, where many models are known."""
    chance = random.Random(models)  # noqa: S311  (the same models each time, no secret)
    facts = []
    for number in range(models):
        like, work = BUILT_IN[number % len(BUILT_IN)], chance.uniform(0.3, 3.0)
        facts.append(replace(like, name=f"model-{number}", aliases=(), gflops=like.gflops * work))
    chooser = Chooser(LearnedPredictor(None, facts))
    service = SubmitService(catalog, chooser, lambda decision: None)
    spent = []
    for number in range(requests):
        message = protocol.encode(_request(f"model-{chance.randrange(models)}", number).to_fields())
        began = time.perf_counter()
        service.handle(message)
        spent.append(time.perf_counter() - began)
        service.record()
    if service.statistics.answers["accept"] != requests:
        raise BenchError(f"the service did not grant every request: {dict(service.statistics.answers)}")
    began = time.perf_counter()
    text = compile_table(catalog, chooser)
    compiled = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.lua"
        write_table(table, text)
        return {
            "models": models,
            "buckets": sum(2 * len(grid.batches) * len(grid.inputs) for grid in chooser.grids.values()),
            "decision": Times.of(spent).to_dict(),
            "compile_s": round(compiled, 3),
            "table": time_table(script, table, rounds=50),
        }


def time_table(script: Path, table: Path, rounds: int = 200) -> dict[str, Any]:
    """The shim's own answer in lua5.1: figures of one bucket, and the whole rewrite; microseconds for one call.

    And how long slurmctld takes to open a table, in milliseconds.
    """
    harness = Path(__file__).with_name("lookup.lua")
    try:
        done = subprocess.run(
            ["lua5.1", str(harness), str(script), str(table), str(rounds)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BenchError("lua5.1 is missing; `make system` installs it") from None
    if done.returncode:
        raise BenchError(f"the shim could not be timed: {done.stderr.strip()[-300:]}")
    lookup, answer, opened = ([float(figure) for figure in line.split()] for line in done.stdout.splitlines())
    return {
        "table_bytes": table.stat().st_size,
        "lookup_us": {"median": statistics.median(lookup), "p99": quantile(lookup, 0.99)},
        "whole_answer_us": {"median": statistics.median(answer), "p99": quantile(answer, 0.99)},
        "open_ms": statistics.median(opened),
    }
