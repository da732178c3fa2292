"""How much memory runs have used at most, as the agent saw it: RunDir/peaks, root's, so that it outlives the agent.

    {"version": 1, "runs": {"17.0": {"watched_s": 180, "mib": {"MIG-<uuid>": 5120}}}}

A figure is for one slice and is the largest that was seen while a process lived on it, in MiB; it holds what the driver
itself keeps there, too. The file lies in RunDir because no slice survives a boot. Whoever releases a run (the agent or
an Epilog of its own) takes its figure from here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

NAME = "peaks"
MAX_BYTES = 1 << 20
RunId = tuple[int, int]


class Peak(NamedTuple):
    """One run: for how many seconds its slices were watched, and the most MiB seen by MIG UUID."""

    watched_s: float
    mib: Mapping[str, int]

    def with_sample(self, found: Mapping[str, int], seconds: float) -> Peak:
        """Return the peak after one more sample, `seconds` after the last."""
        most = {uuid: max(self.mib.get(uuid, 0), found.get(uuid, 0)) for uuid in {*self.mib, *found}}
        return Peak(self.watched_s + seconds, most)

    def maximum_mib(self, held_s: float) -> int | None:
        """Return the fullest slice's peak, MiB; None where it was watched less than half of the time, or never used."""
        return max(self.mib.values()) if self.mib and self.watched_s >= held_s / 2 else None


def load(run_dir: int) -> dict[RunId, Peak]:
    """Read all peaks; empty where there is no file or its form is not known."""
    try:
        handle = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=run_dir)
        with os.fdopen(handle, encoding="ascii") as file:
            stored = json.loads(file.read(MAX_BYTES))
        if stored["version"] != 1:
            return {}
        return {
            _run(name): Peak(float(row["watched_s"]), {str(uuid): int(mib) for uuid, mib in row["mib"].items()})
            for name, row in stored["runs"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def store(run_dir: int, peaks: Mapping[RunId, Peak], running: Collection[RunId]) -> None:
    """Write those of the runs that still are. Raises OSError."""
    rows = {
        f"{j}.{r}": {"watched_s": p.watched_s, "mib": dict(p.mib)} for (j, r), p in peaks.items() if (j, r) in running
    }
    temporary = f".{NAME}"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=run_dir)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o600, dir_fd=run_dir)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        json.dump({"version": 1, "runs": rows}, file, separators=(",", ":"))
    os.rename(temporary, NAME, src_dir_fd=run_dir, dst_dir_fd=run_dir)


def _run(name: str) -> RunId:
    job, _, restart = name.partition(".")
    return int(job), int(restart)
