"""How long planning and advertising take on a made-up large site: `measure` gives the seconds of each round by part."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller, NoRecord, RoundReport
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.decide.capacity.sharing import Place
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Slot
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow


class _LargeSite:
    """Slurm, the nodes' events and their plans, all of them perfect: nothing takes time here."""

    def __init__(self, geometry: Geometry, nodes: int, gpus: int, pending: int, load: float, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 a made-up site, no secret
        self._slots = sorted(geometry.slots)
        self._geometry = geometry
        self._plans: dict[str, Any] = {}
        self.view = LiveView()
        self.queue: list[JobRow] = []
        self.held: dict[str, dict[str, dict[Slot, tuple[int, int]]]] = {}
        self.gres: dict[str, dict[str, int]] = {}
        total = geometry.max_slots * gpus
        plain = [info.profile for info in geometry.profiles if not info.profile.suffix]
        now = time.time()
        for n in range(nodes):
            name = f"n{n:05d}"
            self.held[name] = {f"GPU-{n}-{g}": self._busy(name, now, load) for g in range(gpus)}
            kind = {"mig": True, "geometry": geometry.to_dict()}
            self.view.apply(name, [{"kind": "inventory", "gpus": [{"uuid": u, **kind} for u in self.held[name]]}])
            self._tell(name, "start", [(u, s, r) for u, held in self.held[name].items() for s, r in held.items()])
            self.gres[name] = {plain[-1].gres_type: total, "none": total}
        for number in range(pending):
            self.queue.append(self._job(10**6 + number, self.random.choice(plain), now))

    def _busy(self, node: str, now: float, load: float) -> dict[Slot, tuple[int, int]]:
        layout, held = EMPTY, {}
        while self.random.random() < load:
            fits = [s for s in self._slots if self._geometry.fits(layout, s)]
            if not fits:
                break
            slot = self.random.choice(fits)
            layout = layout.add(slot)
            job = len(self.queue) + 1
            row = self._job(job, slot.profile, now)
            end = now + self.random.uniform(60, 7200)
            self.queue.append(replace(row, state="RUNNING", nodes=(node,), start=now, end=end))
            held[slot] = (job, 0)
        return held

    def _job(self, number: int, profile: Profile, now: float) -> JobRow:
        return JobRow(
            number,
            partition=self.random.choice(("gpu", "train")),
            reason="Priority",
            priority=1,
            submit=now,
            eligible=now,
            time_limit_s=3600,
            gres=f"gres/mig:{profile.gres_type}:1",
        )

    # -- SlurmClient and plan board, as far as the loop needs them

    def jobs(self) -> list[JobRow]:
        return self.queue

    def nodes(self) -> list[NodeRow]:
        rows = []
        for name, gpus in self.held.items():
            used = Counter(slot.profile.gres_type for held in gpus.values() for slot in held)
            states, partitions = frozenset({"MIXED"}), ("gpu", "train")
            rows.append(NodeRow(name, states, gres=self.gres[name], used=used, partitions=partitions))
        return rows

    def set_gres(self, updates: Mapping[str, str]) -> None:
        for node, text in updates.items():
            parts = (entry.rpartition(":") for entry in text.split(","))
            self.gres[node] = {kind.partition(":")[2]: int(count) for kind, _, count in parts}

    def current(self, node: str) -> Any:
        return self._plans.get(node)

    def publish(
        self, node: str, gpus: Mapping[str, Sequence[tuple[str, int, int]]], guests: Mapping[int, Place] | None = None
    ) -> int:
        old = self._plans.get(node)
        plan = SimpleNamespace(version=old.version + 1 if old else 1, gpus=dict(gpus), guests=guests or {})
        self._plans[node] = plan
        return int(self._plans[node].version)

    def acked(self, node: str) -> int:
        plan = self._plans.get(node)
        return plan.version if plan else 0

    def wait_acked(self, _node: str, _version: int, _timeout: float) -> bool:
        return True

    def silence(self, _node: str) -> float:
        return 0.0

    def churn(self, share: float) -> None:
        """End some running jobs and cancel some pending ones, as happens between two rounds."""
        ended = {row.job_id for row in self.queue if row.active and self.random.random() < share}
        cancelled = {row.job_id for row in self.queue if row.pending and self.random.random() < share}
        self.queue = [row for row in self.queue if row.job_id not in ended and row.job_id not in cancelled]
        for node, gpus in self.held.items():
            ended_leases = [(u, s, run) for u, held in gpus.items() for s, run in held.items() if run[0] in ended]
            for uuid, slot, _ in ended_leases:
                del gpus[uuid][slot]
            self._tell(node, "stop", ended_leases)

    def _tell(self, node: str, kind: str, slices: Sequence[tuple[str, Slot, tuple[int, int]]]) -> None:
        events = []
        for uuid, slot, (job, restart) in slices:
            place = {"start": slot.placement.start, "size": slot.placement.size}
            slice_fields = {"gpu": uuid, "profile": slot.profile.name, **place}
            events.append({"kind": kind, "job": job, "restart": restart, "slices": [slice_fields]})
        if events:
            self.view.apply(node, events)


def measure(
    geometry: Geometry,
    *,
    nodes: int = 1000,
    gpus: int = 8,
    pending: int = 10_000,
    load: float = 0.7,
    rounds: int = 5,
    share: float = 0.01,
    seed: int = 1,
) -> list[Mapping[str, float]]:
    """Seconds of each round by part: the first finds everything new, in the others `share` of the jobs changed.

    Slurm and the nodes answer at once, so what is measured is ours: demands, plan, and the advertiser's own work.
    `updates` is the number of node updates in the round.
    """
    site = _LargeSite(geometry, nodes, gpus, pending, load, seed)
    advertiser = Advertiser(site, site, ack_timeout=10.0)  # type: ignore[arg-type]
    observer = Observer(site.view, site, advertiser.total)
    loop = Controller(Settings(), site, observer, advertiser, NoRecord(), time)  # type: ignore[arg-type]
    found: list[Mapping[str, float]] = []
    for _ in range(rounds):
        report: RoundReport = loop.round()
        found.append({**report.seconds, "updates": float(len(report.changes)), "pending": float(report.pending)})
        site.churn(share)
    return found
