"""A record of a month on two nodes with four GPUs each, with valid layouts and totals like those of a real site."""

from __future__ import annotations

import random
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from slurm_migbatch.store.db import Store
from slurm_migbatch.store.models import Run, StoredGpu, StoredLease, StoredLoan, span_class

#: layouts of a GPU: (profile, start, size)
_LAYOUTS = (
    (("7g.80gb", 0, 8),),
    (("3g.40gb", 0, 4), ("3g.40gb", 4, 4)),
    (("4g.40gb", 0, 4), ("2g.20gb", 4, 2), ("1g.10gb", 6, 1)),
    (("1g.20gb", 0, 2), ("2g.20gb", 2, 2), ("2g.20gb", 4, 2), ("1g.10gb+me", 6, 1)),
    tuple(("1g.10gb", start, 1) for start in range(7)),
)
HOUR, DAY = 3600.0, 86400.0
GPUS = [(f"n{node}", index) for node in (1, 2) for index in range(4)]


def fill(
    store: Store, start: float, days: int = 31, accounts: tuple[str, ...] = ("chemistry", "physics", "ml")
) -> None:
    """Fill an empty record with runs, slices, loans and GPUs of `days` days from `start` (unix seconds)."""
    chance = random.Random(7)
    rows: dict[Any, list[dict[str, Any]]] = {Run: [], StoredLease: [], StoredLoan: [], StoredGpu: []}
    for node, index in GPUS:
        uuid = f"GPU-{node}-{index}"
        rows[StoredGpu].append({"node": node, "uuid": uuid, "gpu_index": index, "mig": True, "present": True,
                                "seen": start, "geometry": {}, "facts": {}})  # fmt: skip
        now = start
        while now < start + days * DAY:
            duration_s = chance.uniform(1, 16) * HOUR
            busy = 0.9 if int(now / DAY) % 7 < 5 else 0.45
            for slot in chance.choice(_LAYOUTS):
                if chance.random() < busy:
                    _use(
                        rows,
                        (node, index, uuid),
                        slot,
                        now,
                        min(now + duration_s, start + days * DAY),
                        chance,
                        accounts,
                    )
            now += duration_s
    with Session(store.engine) as session, session.begin():
        for table, values in rows.items():
            session.execute(insert(table.__table__), values)


def _use(rows: Any, gpu: Any, slot: Any, since: float, until: float, chance: random.Random, accounts: Any) -> None:
    node, index, uuid = gpu
    profile, place, size = slot
    number = len(rows[Run]) + 1
    account = chance.choices(accounts, range(len(accounts), 0, -1))[0]
    waited = 0.0 if chance.random() < 0.3 else chance.lognormvariate(4.0, 2.5)
    until = min(until, since + chance.lognormvariate(9, 1))
    latency, rate, memory = chance.lognormvariate(3, 1), chance.lognormvariate(5, 1), size * 6000 * chance.random()
    sampled = chance.random() < 0.8
    error = chance.gauss(1.0, 0.15)
    rows[Run].append({
        "id": number, "job_id": number, "restart": 0, "reuse": 0, "latest": True, "uid": 1000 + number % 5,
        "user": f"user{number % 5}", "account": account, "partition": "gpu", "nodes": node,
        "name": "</script><script>alert(1)</script>",
        "state": "COMPLETED", "state_from": "slurm", "submitted": since - waited, "started": since,
        "ended": until, "began": since - waited, "span_class": span_class(since - waited, until), "profile": profile,
        "slice_count": 1, "predicted_latency_ms": latency * error, "measured_latency_ms": latency,
        "predicted_throughput_per_s": rate * error, "measured_throughput_per_s": rate,
        "predicted_memory_mib": memory * 1.1, "measured_memory_mib": memory,
        "measured_facts": {"sm": round(min(1.0, chance.betavariate(2, 1.5)), 4)} if sampled else {},
    })  # fmt: skip
    rows[StoredLease].append({
        "run_id": number, "job_id": number, "restart": 0, "node": node, "journal": "j", "position": 0, "gpu": uuid,
        "gpu_index": index, "profile": profile, "slot_start": place, "slot_size": size, "since": since, "until": until,
        "outcome": "released",
    })  # fmt: skip
    if chance.random() < 0.2:
        cause = chance.choices(["reclaim", "grow", "left"], [5, 2, 3])[0]
        called = cause != "left"
        rows[StoredLoan].append({
            "job_id": number, "restart": 0, "uid": 1000, "account": account, "partition": "gpu", "profile": profile,
            "state": "ended", "node": node, "gpu": uuid, "decided": since - 2, "released": since - 1, "started": since,
            "signalled": until - 9 if called else None, "requeued": until - 1 if called else None, "ended": until,
            "cause": cause,
        })  # fmt: skip
