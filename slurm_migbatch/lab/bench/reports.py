"""Measure the reports on a large store of synthetic runs, as whole commands."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from slurm_migbatch.lab.bars import Bar, NotMeasurable
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.store.db import Store, open_store
from slurm_migbatch.store.models import Run, StoredLease, span_class

TARGET_S = 0.5
PAGE_TARGET_S = 2.0
STARTS = 2.0
"""Target of the most common queries, in starts of the interpreter."""
_USUAL = ("one job", "one day of one user", "30 days of one user")
_NODES, _GPUS = 100, 8
_PROFILES = (("1g.10gb", 1), ("1g.20gb", 2), ("2g.20gb", 2), ("3g.40gb", 4), ("7g.80gb", 8))
_BATCH = 20000
_MIGACCT, _MIGBATCH = "slurm_migbatch.cli.migacct", "slurm_migbatch.cli.main"


def fill(store: Store, runs: int, days: float, end: float) -> None:
    """Put `runs` ended runs of 200 users, spread over `days` before `end` (unix seconds), into an empty store."""
    chance = random.Random(1)  # noqa: S311 synthetic data
    made, leases = [], []
    for number in range(1, runs + 1):
        submitted = end - days * 86400 * (1 - number / runs)
        started = submitted + chance.expovariate(1 / 300)
        ended = started + min(chance.lognormvariate(6.5, 1.8), 7 * 86400)
        made.append(_run(number, submitted, started, ended, chance))
        for position in range(1 if chance.random() < 0.9 else 3):
            leases.append(_lease(number, position, started, ended, chance))
        if len(made) == _BATCH or number == runs:
            with Session(store.engine) as session, session.begin():
                session.execute(insert(Run.__table__), made)  # type: ignore[arg-type]
                session.execute(insert(StoredLease.__table__), leases)  # type: ignore[arg-type]
            made, leases = [], []


def fill_present(store: Store, runs: int, now: float) -> None:
    """Add the nodes' descriptions, and a running job on each GPU, with ids after `runs`."""
    for node in range(_NODES):
        name = f"n{node:03d}"
        gpus = [
            {"uuid": f"GPU-{node:03d}-{gpu}", "index": gpu, "minor": gpu, "name": "H100", "mig": True, "geometry": {}}
            for gpu in range(_GPUS)
        ]
        events: list[dict[str, Any]] = [{"seq": 1, "ts": now - 7200, "kind": "inventory", "gpus": gpus}]
        for gpu in range(_GPUS):
            job = runs + 1 + node * _GPUS + gpu
            slices = [
                {"gpu": f"GPU-{node:03d}-{gpu}", "profile": "3g.40gb", "start": 0, "size": 4, "gi": 1, "ci": 0,
                 "mig_uuid": f"MIG-{job}"}
            ]  # fmt: skip
            facts = {"job": job, "restart": 0, "warm": True, "elapsed_ms": 1.0, "slices": slices}
            events.append({"seq": gpu + 2, "ts": now - 3600, "kind": "start", **facts})
        store.ingest(name, "present", "boot", events)


def _run(number: int, submitted: float, started: float, ended: float, chance: random.Random) -> dict[str, Any]:
    user = number % 200
    return {
        "id": number, "job_id": number, "restart": 0, "reuse": 0, "latest": True, "uid": 1000 + user,
        "user": f"user{user:03d}", "account": f"acct{user % 20:02d}", "partition": "gpu", "name": f"train{number % 50}",
        "array_job": number - number % 10 if number % 3 == 0 else None, "array_task": str(number % 10),
        "nodes": "n001", "state": chance.choice(("COMPLETED", "COMPLETED", "COMPLETED", "FAILED", "TIMEOUT")),
        "state_from": "node", "exit_code": 0, "signal": 0, "submitted": submitted, "started": started, "ended": ended,
        "began": submitted, "span_class": span_class(submitted, ended), "asked": "mig:auto", "slice_count": 1,
        "bucket": f"bert-large/infer/b{2 ** (number % 8)}/128tok/any/any", "decision": f"{number:08x}",
        "source": "service", "profile": chance.choice(_PROFILES)[0], "warm": number % 2 == 0, "setup_ms": 4.0,
        "predicted_latency_ms": chance.uniform(1, 100), "measured_latency_ms": chance.uniform(1, 100),
        "measured_facts": {"sm": round(chance.random(), 4)},
    }  # fmt: skip


def _lease(number: int, position: int, started: float, ended: float, chance: random.Random) -> dict[str, Any]:
    node, gpu = chance.randrange(_NODES), chance.randrange(_GPUS)
    profile, size = chance.choice(_PROFILES)
    return {
        "run_id": number, "job_id": number, "restart": 0, "node": f"n{node:03d}", "journal": "bench",
        "position": position, "gpu": f"GPU-{node:03d}-{gpu}", "gpu_index": gpu, "profile": profile,
        "slot_start": 0, "slot_size": size, "mig_uuid": f"MIG-{number:036d}", "since": started, "until": ended,
        "outcome": "released",
    }  # fmt: skip


def _queries(runs: int, days: float, end: float) -> Iterator[tuple[str, list[str]]]:
    def day(before: float, who: str = "-a", length: float = 1) -> list[str]:
        return [who, "-S", f"uts{int(end - before * 86400)}", "-E", f"uts{int(end - (before - length) * 86400)}"]

    yield "no job: startup only", ["-j", str(runs * 10)]
    yield "one job", ["-j", str(runs // 2)]
    yield "one array", ["-j", str(runs // 2 - runs // 2 % 30)]
    yield "last day", day(1)
    yield "one day in the middle", day(days // 2)
    yield "first day", day(days)
    yield "one day of one user", day(days // 2, "-uuser007")
    yield "30 days of one user", day(days // 2, "-uuser007", 30)
    yield "30 days", day(days // 2, length=30)
    yield "one day on one node", [*day(days // 2), "-N", "n042"]
    yield "one day, failed", [*day(days // 2), "-s", "F,TO"]


def _commands(runs: int, days: float, end: float, directory: Path, page: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (name in the result, description, words after `migbatch`)."""
    month = ["-S", f"uts{int(end - days // 2 * 86400)}", "-E", f"uts{int(end - (days // 2 - 30) * 86400)}"]
    tenth = ["-S", f"uts{int(end - 0.2 * days * 86400)}", "-E", f"uts{int(end - 0.1 * days * 86400)}"]
    conf = directory / "migbatch.toml"
    yield "usage", "migbatch usage, 30 days", ["usage", *month]
    yield "waste", "migbatch waste, 30 days", ["waste", *month]
    yield "top", f"migbatch top, first page of {_NODES} nodes", ["top", "-b", "-n", "1", "-c", str(conf)]
    yield "page", f"a page of charts of {runs // 10:,} runs", ["report", "--html", str(page), *tenth]


def measure(
    runs: int = 1_000_000, repeats: int = 5, days: float = 365.0, progress: Progress = silent
) -> dict[str, Any]:
    """Fill a store in a temporary directory; run `migacct` and the reports of `migbatch` on it.

    Returns:
        {"runs", "days", "fill_s", "file_mb", "start_s", "queries": [{"name", "median_s", "worst_s", "lines", "cpu_s",
        "starts"}], "usage", "waste", "top" and "page": the same, "drawn_s": seconds in which a headless Chromium has
        drawn the page, None if there is none, "bars": [...]}: `start_s` is the processor time of an interpreter that
        does nothing, `starts` the processor time of a command over it.
    """
    end = float(int(time.time()))
    # Chromium's helpers may write to the directory shortly after it has ended
    with tempfile.TemporaryDirectory(prefix="migacct-bench-", ignore_cleanup_errors=True) as directory:
        path, page = Path(directory) / "bench.db", Path(directory) / "page.html"
        progress(f"generating {runs:,} runs", 0)
        began = time.perf_counter()
        with open_store(f"sqlite:///{path}") as store:
            fill(store, runs, days, end)
            fill_present(store, runs, end)
        fill_s = time.perf_counter() - began
        # there is no Slurm here: only the command itself is measured
        Path(directory, "migbatch.toml").write_text(
            f'[store]\nurl = "sqlite:///{path}"\n[cluster]\nslurm_bin = "{directory}"\n', encoding="utf-8"
        )
        progress("timing the commands", 0)
        start_s = statistics.median(_timed([sys.executable, "-c", "pass"], _environment())[1] for _ in range(repeats))
        queries = [
            _time(path, _MIGACCT, name, ["-n", *options], repeats, start_s)
            for name, options in _queries(runs, days, end)
        ]
        configured = {"MIGBATCH_CONFIG": f"{directory}/migbatch.toml", "MIGBATCH_DB": ""}
        by_config = "one job, by migbatch.toml"
        queries.append(_time(path, _MIGACCT, by_config, ["-n", "-j", str(runs // 2)], repeats, start_s, configured))
        others = {
            key: _time(path, _MIGBATCH, name, words, repeats, start_s)
            for key, name, words in _commands(runs, days, end, Path(directory), page)
        }
        drawn_s = drawing_s(page, Path(directory), repeats)
        size = path.stat().st_size
    # writing a table of a hundred thousand lines takes long
    worst = max(query["median_s"] for query in queries if query["name"] != "30 days")
    generated_s = others["page"]["median_s"]
    drawn = "generated and drawn" if drawn_s is not None else "generated"
    return {
        "runs": runs,
        "days": days,
        "fill_s": fill_s,
        "file_mb": size / 1e6,
        "start_s": start_s,
        "queries": queries,
        **others,
        "drawn_s": drawn_s,
        "bars": [
            *(
                Bar(f"migacct, {query['name']} [starts of the interpreter]", query["starts"], STARTS).to_dict()
                for query in queries
                if query["name"] in _USUAL
            ),
            Bar("migacct, slowest query [s]", worst, TARGET_S).to_dict(),
            Bar(
                f"migbatch report, {runs // 10:,} runs, {drawn} [s]", generated_s + (drawn_s or 0), PAGE_TARGET_S
            ).to_dict(),
        ],
    }


def drawing_s(page: Path, directory: Path, repeats: int) -> float | None:
    """Return the seconds from opening a page until its last chart is drawn; None if there is no Chromium."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        return None
    words = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    words += ["--disable-background-networking", f"--user-data-dir={directory}/chromium", "--dump-dom", page.as_uri()]
    seconds = []
    for _ in range(repeats):
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        # the page notes when it has drawn all
        drawn = re.search(r'<body[^>]* data-drawn="(\d+)"', shown)
        if drawn is None:
            raise NotMeasurable(f"{program} has not drawn the page: run it by hand, {' '.join(words)}")
        seconds.append(int(drawn[1]) / 1000)
    return statistics.median(seconds)


def _environment() -> dict[str, str]:
    """Return this process's environment, with compiled modules cached between starts."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _time(
    path: Path,
    program: str,
    name: str,
    options: list[str],
    repeats: int,
    start_s: float,
    changed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Time a command. `changed`: variables of its environment, which names the record at `path` by default."""
    command = [sys.executable, "-c", f"from {program} import main; main()", *options]
    environment = {**_environment(), "MIGBATCH_DB": f"sqlite:///{path}", **(changed or {})}
    _timed(command, environment)
    runs = [_timed(command, environment) for _ in range(repeats)]
    times, cpu_s = [run[0] for run in runs], statistics.median(run[1] for run in runs)
    return {
        "name": name,
        "median_s": statistics.median(times),
        "worst_s": max(times),
        "lines": runs[-1][2],
        "cpu_s": cpu_s,
        "starts": cpu_s / start_s,
    }


def _timed(command: list[str], environment: dict[str, str]) -> tuple[float, float, int]:
    """Return how long a command took, its processor time (both seconds), and its lines."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    elapsed_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return elapsed_s, cpu_s, done.stdout.count(b"\n")
