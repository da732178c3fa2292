"""A record with runs of a model whose true times are known, and a configuration whose facts are far from them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from sqlalchemy import insert

from slurm_migbatch.config import ModelConfig
from slurm_migbatch.store.db import Store
from slurm_migbatch.store.models import Run, StoredDecision, StoredGpu, StoredLease, StoredNode
from tests.support.daemon_fakes import GEOMETRY

FACTS = ModelConfig(
    family="encoder", params_m=110, gflops=440.0, reference=128, kernels=170, activation_mib=40, weight_bytes=4
)
SMS = {"1g.10gb": 16, "2g.20gb": 32, "3g.40gb": 48, "7g.80gb": 112}


def truth_s(profile: str, batch: int = 32) -> float:
    """Return the true time of a batch, seconds: a twentieth of what the facts predict."""
    return 0.003 + 0.006 * batch / 32 * 112 / SMS[profile]


class Record:
    """The record of a site with one node that has an H100."""

    def __init__(self, store: Store) -> None:
        self.store, self.count, self.chance = store, 0, random.Random(1)
        entry = {"uuid": "GPU-0", "name": GEOMETRY["name"], "mig": True, "geometry": GEOMETRY, "facts": {}}
        with store.engine.begin() as connection:
            connection.execute(insert(StoredNode).values(node="n1", seen=1.0))
            connection.execute(
                insert(StoredGpu).values(node="n1", minor=0, gpu_index=0, present=True, seen=1.0, **entry)
            )

    def add(
        self,
        count: int,
        *,
        factor: float = 1.0,
        user: str | None = None,
        profiles: Sequence[str] = tuple(SMS),
        model: str = "net",
        noise: float = 0.05,
    ) -> None:
        """Add finished runs on slices, slower than the truth by `factor`; the jobs reported their figures."""
        decisions, runs, leases = [], [], []
        for _ in range(count):
            self.count += 1
            n, profile = self.count, profiles[self.count % len(profiles)]
            batch = (8, 32)[self.count // len(profiles) % 2]
            seconds = truth_s(profile, batch) * factor * math.exp(self.chance.gauss(0, noise))
            hints = {"model": model, "batch": batch, "role": "infer"}
            decisions.append({"id": f"d{n}", "ts": 1.0, "hints": hints, "candidates": [], "facts": {}})
            facts = {"by": {"latency_ms": "job", "memory_mib": "driver"}}
            runs.append({
                "id": n, "job_id": n, "restart": 0, "reuse": 0, "latest": True, "state": "COMPLETED",
                "state_from": "slurm", "user": user or ("ann", "bob", "cat")[n % 3], "submitted": 10.0 * n,
                "started": 10.0 * n, "ended": 10.0 * n + 5, "began": 10.0 * n, "span_class": 2, "decision": f"d{n}",
                "profile": profile, "slice_count": 1, "measured_latency_ms": 1e3 * seconds,
                "measured_memory_mib": 2000.0 + 10 * batch, "measured_facts": facts, "lesson": n,
            })  # fmt: skip
            lease = {"run_id": n, "job_id": n, "restart": 0, "node": "n1", "journal": "j", "position": 0}
            slot = {"gpu": "GPU-0", "profile": profile, "slot_start": 0, "slot_size": 1}
            leases.append({**lease, **slot})
        with self.store.engine.begin() as connection:
            for kind, rows in ((StoredDecision, decisions), (Run, runs), (StoredLease, leases)):
                connection.execute(insert(kind), rows)
