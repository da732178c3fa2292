"""Inventory and events of nodes as supply receives them."""

from __future__ import annotations

from typing import Any

from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.decide.capacity.facts import GpuFacts
from tests.support.supply_gpus import H100, slot

INVENTORY: dict[str, Any] = {"kind": "inventory", "gpus": [{"uuid": "a", "mig": True, "geometry": H100.to_dict()}]}


def slice_entry(text: str) -> dict[str, Any]:
    held_slot = slot(text)
    return {
        "gpu": "a",
        "profile": held_slot.profile.name,
        "start": held_slot.placement.start,
        "size": held_slot.placement.size,
    }


def start(job: int, *places: str, restart: int = 0) -> dict[str, Any]:
    return {"kind": "start", "job": job, "restart": restart, "slices": [slice_entry(p) for p in places]}


def stop(job: int, *places: str, restart: int = 0) -> dict[str, Any]:
    return {**start(job, *places, restart=restart), "kind": "stop"}


def only(view: LiveView) -> GpuFacts:
    (gpu,) = view.facts()["n1"].gpus
    return gpu
