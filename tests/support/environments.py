"""The environment that a task prolog exports."""

from __future__ import annotations

from slurm_migbatch.node.task_prolog import exports
from tests.support.nodes import ALICE, Node


def exported(node: Node, job: object, uid: int = ALICE, **environ: str) -> dict[str, str]:
    values = {b"SLURM_JOB_ID": str(job).encode(), b"SLURMD_NODENAME": b"n1"}
    text = exports(str(node.etc), values | {k.encode(): v.encode() for k, v in environ.items()}, uid)
    lines = [line for line in text.splitlines() if not line.startswith("unset ")]
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)
