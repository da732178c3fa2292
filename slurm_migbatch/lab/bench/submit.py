"""Measure the submit filter: sbatch with and without it, the service behind it, and the table that replaces it."""

from __future__ import annotations

import gc
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_migbatch.daemon.garbage import collect_when_idle, collect_young
from slurm_migbatch.lab.bars import Bar, times_of
from slurm_migbatch.lab.bench.hooks import BenchError
from slurm_migbatch.lab.bench.sbatch import KINDS, SAME, compare, crowd, started
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.predict.facts import BUILT_IN
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit import protocol, shim
from slurm_migbatch.submit.request import Accept, JobRequest
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.submit.table import TableCompiler, write_table
from slurm_migbatch.values.quantiles import quantile
from slurm_migbatch.workload.catalog import SiteCatalog, load

RATIO_TARGET, ADVISED_TARGET, SERVICE_TARGET_MS, TABLE_TARGET_US = 1.05, 1.15, 2.0, 50.0
#: users that submit at once
_USERS = 8
_MODELS = ("bert-large", "resnet50", "vit-b-16", "gpt2", "llama-3.1-8b", "unknown-model", "mobilenet-v2")
#: other parts of a batch job, of which the service makes a digest
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


def measure(
    submissions: int = 1000, block: int = 25, requests: int = 3000, progress: Progress = silent
) -> dict[str, Any]:
    """Run all measurements.

    Args:
        submissions: number of sbatch calls on each side, of each kind.
        block: number of submissions before the other side's block.
        requests: number of requests to the service, over its socket.

    Raises:
        BenchError: a measurement was not possible.
    """
    with tempfile.TemporaryDirectory(prefix="migbatch-bench-") as folder:
        Path(folder).chmod(0o755)
        progress("starting four clusters", 7)
        with started(Path(folder), _USERS) as clusters:
            filtered = clusters.filtered
            progress("sbatch with the filter, with smaller scripts and without, alternating", 7)
            sbatch = compare(clusters, KINDS, submissions, block)
            progress("the same with cli_filter", 7)
            advice = compare(clusters, [SAME], max(block * 2, submissions // 2), block, advice=True)
            progress(f"{_USERS} users at once", 7)
            at_once = crowd(filtered, submissions // 4)
            progress("the service over its socket", 7)
            service = time_service(filtered.product.state / "submit.sock", requests)
            progress("the compiled table in Lua", 7)
            script = filtered.product.etc / shim.JOB_SUBMIT
            table = time_table(script, filtered.product.state / "table.lua")
            progress(f"{_MANY} known models", 7)
            many = time_many(load(filtered.product.state / "catalog.json"), script, requests)
            version = ".".join(f"{number:02d}" for number in filtered.root.version())
    bars = [
        *(
            _bar(f"sbatch with the filter relative to without, {name}", kind, RATIO_TARGET)
            for name, kind in sbatch.items()
        ),
        _bar("sbatch with cli_filter relative to without", advice[SAME.name], ADVISED_TARGET),
        Bar(f"of {at_once['submissions']} jobs of concurrent users decided by the table", at_once["by_table"], 0.0),
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
        "crowd": at_once,
        "service": service,
        "table": table,
        "many_models": many,
        "bars": [bar.to_dict() for bar in bars],
    }


def _bar(name: str, kind: Mapping[str, Any], target: float) -> Bar:
    """Return the bar of one kind of submission; scripts that do nothing are its floor."""
    return Bar(name, kind["filter_over_none"]["ratio"], target, floor=kind["empty_over_none"]["ratio"])


def time_service(path: Path, requests: int) -> dict[str, Any]:
    """Send requests to the running service like slurmctld, over one connection; many buckets, every second a batch job.

    About 400 times a second, which is more than slurmctld can submit: every decision is also recorded, by the service
    and by other processes, which need their share of the time.
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
    return times_of(spent)


def _request(model: str, number: int) -> JobRequest:
    comment = f"migbatch: model={model} batch={1 << number % 8} slo={40 + number % 400}ms"
    return JobRequest(1000, partition="gpu", tres_per_node="gres:mig:auto", comment=comment, num_tasks=1)


def time_many(catalog: SiteCatalog, script: Path, requests: int) -> dict[str, Any]:
    """Time the service's work on one request, and the compiled table, with many known models."""
    chance = random.Random(_MANY)  # noqa: S311 (the same models each time, not a secret)
    facts = []
    for number in range(_MANY):
        template, factor = BUILT_IN[number % len(BUILT_IN)], chance.uniform(0.3, 3.0)
        facts.append(replace(template, name=f"model-{number}", aliases=(), gflops=template.gflops * factor))
    chooser = Chooser(LearnedPredictor(None, facts))
    service = SubmitService(catalog, chooser, lambda decision: None)
    spent = []
    collect_when_idle()  # as the process that answers submissions
    try:
        for number in range(requests):
            message = protocol.encode(_request(f"model-{chance.randrange(_MANY)}", number).to_fields())
            began = time.perf_counter()
            service.handle(message)
            spent.append(time.perf_counter() - began)
            service.record()
            collect_young()
    finally:
        gc.unfreeze()
        gc.enable()
    if service.statistics.answers["accept"] != requests:
        raise BenchError(f"the service did not grant every request: {dict(service.statistics.answers)}")
    began = time.perf_counter()
    text = TableCompiler(chooser).text(catalog)
    compiled = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.lua"
        write_table(table, text)
        return {
            "models": _MANY,
            "buckets": sum(2 * len(grid.batches) * len(grid.inputs) for grid in chooser.grids.values()),
            "decision": times_of(spent),
            "compile_s": round(compiled, 3),
            "table": time_table(script, table, rounds=50),
        }


def time_table(script: Path, table: Path, rounds: int = 200) -> dict[str, Any]:
    """Time the shim's own answer in lua5.1: figures of one bucket, and the whole rewrite; microseconds for one call.

    Also the time in which slurmctld opens a table, in milliseconds.
    """
    harness = Path(__file__).with_name("lookup.lua")
    try:
        done = subprocess.run(
            ["lua5.1", str(harness), str(script), str(table), str(rounds)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BenchError("lua5.1 is missing; `make system` installs it") from None
    if done.returncode:
        raise BenchError(f"the shim could not be measured: {done.stderr.strip()[-300:]}")
    lookup, answer, opened = ([float(figure) for figure in line.split()] for line in done.stdout.splitlines())
    return {
        "table_bytes": table.stat().st_size,
        "lookup_us": {"median": statistics.median(lookup), "p99": quantile(lookup, 0.99)},
        "whole_answer_us": {"median": statistics.median(answer), "p99": quantile(answer, 0.99)},
        "open_ms": statistics.median(opened),
    }
