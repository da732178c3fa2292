"""Check whether mig can be removed from slurm.conf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_migbatch.node.findings import FAIL, OK, Finding
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow


def check_leaving(jobs: Sequence[JobRow]) -> Iterator[Finding]:
    """Check for jobs that request or hold slices, so that mig cannot be removed from slurm.conf yet."""
    unread = [str(row.job_id) for row in jobs if row.unread]
    waiting = [_named(row) for row in jobs if row.pending and _needs_mig(row)]
    running = [_named(row) for row in jobs if not row.pending and _needs_mig(row)]
    if running:
        yield Finding(FAIL, "leaving", f"jobs hold slices: {_first(running)}", "wait until they end, or scancel them")
    if waiting:
        text = f"jobs wait for slices: {_first(waiting)}; a slurmctld without mig kills them or starts them without any"
        yield Finding(FAIL, "leaving", text, "let them run, scancel them, or change their request")
    if unread:
        yield Finding(
            FAIL, "leaving", f"cannot determine the requests of jobs {_first(unread)}", "check each in squeue"
        )
    if not (running or waiting or unread):
        yield Finding(OK, "leaving", "no job requests slices; mig can be removed from slurm.conf and gres.conf")


def _needs_mig(row: JobRow) -> bool:
    return any(gres.prefix_of(entry)[1].partition(":")[0] == "mig" for entry in gres.split(row.gres))


def _named(row: JobRow) -> str:
    name = str(row.job_id) if row.array_job is None else f"{row.array_job}_[{row.array_task}]"
    return f"{name} ({row.state.lower()})"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
