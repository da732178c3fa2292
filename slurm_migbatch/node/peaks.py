"""Record the use of slices by runs, as sampled by the agent: RunDir/peaks, root's, so that it survives the agent.

    {"version": 1, "runs": {"17.0": {"watched_s": 180, "mib": {"MIG-<uuid>": 5120}, "busy": [165.0, 82.1, 40.3, 99.0],
                                     "energy": [165.0, 57750.0]}}}

A figure is for one slice, the largest sampled while a process was on it, in MiB; it includes the driver's own memory.
The file is in RunDir because no slice survives a boot. The process that releases a run (the agent or
an Epilog) takes its figure from here. `busy` sums over slices and samples: seconds, and seconds times the
share of SMs, of tensor cores and of memory bandwidth in use; if the driver reports them (Hopper and later). `energy`
sums over GPUs and samples, too: seconds and joules, of runs whose slices are whole GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from slurm_migbatch.mig.driver import Activity
from slurm_migbatch.node.paths import read, replace

NAME = "peaks"
MAX_BYTES = 1 << 20
RunId = tuple[int, int]


class RunPeak(NamedTuple):
    """One run: seconds for which its slices were sampled, the peak MiB by MIG UUID, sums of activity and of energy."""

    watched_s: float
    mib: Mapping[str, int]
    busy: tuple[float, ...] = ()
    energy: tuple[float, ...] = ()

    def with_sample(self, found: Mapping[str, int], seconds: float) -> RunPeak:
        """Return the peak after one more sample, `seconds` after the last."""
        most = {uuid: max(self.mib.get(uuid, 0), found.get(uuid, 0)) for uuid in {*self.mib, *found}}
        return self._replace(watched_s=self.watched_s + seconds, mib=most)

    def with_activity(self, found: Activity) -> RunPeak:
        """Return the peak with the activity of one slice over some seconds."""
        seconds, *shares = found
        totals = self.busy or (0.0,) * len(found)
        return self._replace(
            busy=tuple(a + b for a, b in zip(totals, (seconds, *(seconds * s for s in shares)), strict=True))
        )

    def with_energy(self, seconds: float, joules: float) -> RunPeak:
        """Return the peak with the energy of one slice's GPU over some seconds."""
        totals = self.energy or (0.0, 0.0)
        return self._replace(energy=(totals[0] + seconds, totals[1] + joules))

    def energy_j(self, held_s: float) -> float | None:
        """Return the joules of `held_s` seconds of its GPUs by their mean power; None if less than half was sampled.

        Never less than what was sampled: `held_s` may be too short because the clock was set back.
        """
        if len(self.energy) != 2 or self.energy[0] <= 0 or self.energy[0] < held_s / 2:
            return None
        return self.energy[1] * max(1.0, held_s / self.energy[0])

    def average(self) -> Activity | None:
        """Return the mean activity of the slices, and the slice-seconds that it covers; None if unknown."""
        if len(self.busy) != len(Activity._fields) or self.busy[0] <= 0:
            return None
        return Activity(self.busy[0], *(min(total / self.busy[0], 1.0) for total in self.busy[1:]))

    def maximum_mib(self, held_s: float) -> int | None:
        """Return the fullest slice's peak, MiB; None if it was sampled for less than half the time, or never used."""
        return max(self.mib.values()) if self.mib and self.watched_s >= held_s / 2 else None


def load(run_dir: int) -> dict[RunId, RunPeak]:
    """Read all peaks; empty if there is no file or its form is unknown."""
    try:
        stored = json.loads(read(NAME, MAX_BYTES, run_dir))
        if stored["version"] != 1:
            return {}
        return {
            _run(name): RunPeak(
                float(row["watched_s"]),
                {str(uuid): int(mib) for uuid, mib in row["mib"].items()},
                tuple(float(total) for total in row.get("busy", ())),
                tuple(float(total) for total in row.get("energy", ())),
            )
            for name, row in stored["runs"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def store(run_dir: int, peaks: Mapping[RunId, RunPeak], running: Collection[RunId]) -> None:
    """Write the peaks of the runs that still exist. Raises OSError."""
    rows = {
        f"{j}.{r}": {"watched_s": p.watched_s, "mib": dict(p.mib), "busy": p.busy, "energy": p.energy}
        for (j, r), p in peaks.items()
        if (j, r) in running
    }
    content = json.dumps({"version": 1, "runs": rows}, separators=(",", ":")).encode()
    replace(run_dir, NAME, content, NAME, durable=False)


def _run(name: str) -> RunId:
    job, _, restart = name.partition(".")
    return int(job), int(restart)
