"""Return the node's status as one JSON-able object."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.node import plan, unwritable
from slurm_migbatch.node.client import SOCKET
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.liveness import LivenessError, sentences

if TYPE_CHECKING:
    from slurm_migbatch.mig.nvml import NvmlGpu


def status(config: NodeConfig, executor: Executor) -> dict[str, Any]:
    """Return GPUs with layouts and holders, zombies, the agent, the spool and the plan. Raises JournalError.

    `over` names runs that hold slices although Slurm has ended them, `unknown` says why that cannot be determined.
    """
    journal = executor.journal
    rows = journal.slices()
    try:
        withdrawn = executor.gpus.withdrawn()
        gpus = [_gpu(gpu, withdrawn.get(gpu.uuid)) for gpu in executor.gpus.listed()]
        problem = "; ".join(executor.gpus.unidentified().values())
    except DriverError as error:
        gpus, problem = [], str(error)
    try:
        running = journal.runs("state='running'")
        over, unknown = sentences(executor.liveness.once(running, Deadline(config.scontrol_timeout))), ""
    except LivenessError as error:
        over, unknown = [], str(error)
    for gpu in gpus:
        gpu["slices"] = [
            {**row.place, "state": row.state, "job": row.job, "uid": row.uid, "mig_uuid": row.mig_uuid}
            | ({"reason": row.reason} if row.reason else {})
            | ({"guest": True} if row.beside is not None else {})
            for row in rows
            if row.gpu == gpu["uuid"]
        ]
    return {
        "node": config.node,
        "agent": agent_answers(config),
        "gpus": gpus,
        "driver": problem or "ok",
        "zombies": sum(row.state == "zombie" for row in rows),
        "runs": [run._asdict() for run in journal.runs("state<>'ended'")],
        "over": over,
        "unknown": unknown,
        "journal_faults": unwritable.load(executor.paths.run).hooks,
        "spool": journal.spool_length(),
        "plan": plan.load(config.state_dir).version,
        "journal": journal.identity,
        "boot_id": journal.meta("boot_id"),
    }


def agent_answers(config: NodeConfig) -> bool:
    """Return whether the agent's socket accepts connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(1.0)
        try:
            link.connect(f"{config.run_dir}/{SOCKET}")
        except OSError:
            return False
    return True


def _gpu(gpu: NvmlGpu, withdrawn: DriverError | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"uuid": gpu.uuid, "minor": gpu.minor, "index": gpu.index, "name": gpu.name}
    try:
        if withdrawn is not None:
            raise withdrawn
        entry["mig"], entry["mig_pending"] = gpu.mig_mode()
    except DriverError as error:
        entry["mig"], entry["mig_pending"], entry["problem"] = False, False, str(error)
    return entry
