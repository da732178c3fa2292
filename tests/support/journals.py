"""Damage to a journal on disk."""

from __future__ import annotations

import sqlite3

from slurm_migbatch.node.journal import NAME
from tests.support.nodes import Node


def damage(node: Node, how: str) -> None:
    path = node.root / "state" / NAME
    node.forget_executor()
    if how == "garbage":
        path.write_bytes(b"not a database at all" * 500)
    elif how in ("table gone", "older schema"):
        link = sqlite3.connect(path)
        link.execute("DROP TABLE slices" if how == "table gone" else "PRAGMA user_version=1")
        link.commit()
        link.close()
    elif how == "deleted":
        for name in path.parent.glob(f"{NAME}*"):
            name.unlink()
