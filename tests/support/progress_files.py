"""Files in which jobs report their progress."""

from __future__ import annotations

from pathlib import Path

from tests.support.nodes import Node


def path(node: Node, job: int = 1, restart: int = 0) -> Path:
    return node.root / "run" / "progress" / f"{job}.{restart}"


def write(node: Node, text: str, job: int = 1) -> None:
    with open(path(node, job), "a") as file:
        file.write(text)
