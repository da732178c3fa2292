"""Directories that cannot be written to: read-only, full, immutable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from slurm_migbatch.node.journal import NAME
from tests.support.nodes import Node


@contextmanager
def full(node: Node) -> Iterator[None]:
    """Fill the node's disk to the last byte."""
    ballast = node.disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def read_only(node: Node) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", node.disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", node.disk], check=True)


HOLD = """
import sqlite3, sys
link = sqlite3.connect(sys.argv[1], isolation_level=None)
link.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(node: Node) -> Iterator[None]:
    """Let another process hold a lock on the journal."""
    line = [sys.executable, "-c", HOLD, f"{node.config.state_dir}/{NAME}"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            holder.kill()  # closing the pipe is not enough: a hook forked meanwhile has it open too
