"""Plans of a node with promised slices."""

from __future__ import annotations

import json

from slurm_migbatch.node import plan
from tests.support.nodes import Node

TWO = ["h100-80gb", "h100-80gb"]


def uuids(node: Node) -> list[str]:
    return [gpu.uuid for gpu in node.executor.gpus.listed()]


def publish(node: Node, *layouts: object, version: int = 7) -> None:
    gpus = dict(zip(uuids(node), layouts, strict=True))
    plan.store(str(node.config.state_dir), json.dumps({"version": version, "gpus": gpus}).encode())
