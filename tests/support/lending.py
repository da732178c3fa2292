"""Training jobs that borrow slices of a test cluster, and functions to observe them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.commands import migbatch

EXAMPLE = Path(__file__).resolve().parents[2] / "sbatch_examples/elastic_bash.sh"


#: waiting times of minutes are shortened to seconds, and a day to 14 minutes
LENDING = {
    "enabled": True,
    "partitions": ["train"],
    "min_idle_s": 2.0,
    "horizon_s": 10.0,
    "day_s": 864.0,
    "grace_s": 20.0,
    "start_s": 60.0,
    "restart_s": 2.0,
}

USER = "mbalice"


def train(
    bed: Cluster,
    hints: str = "signal=usr1",
    *words: str,
    steps: int = 2000,
    own: str | None = None,
) -> int:
    """Submit a training job of `steps` steps of a tenth of a second: elastic, or with a slice of its `own`.

    `words` are further options of sbatch.
    """
    script = bed.home(USER) / "elastic_bash.sh"
    if not script.exists():
        script.write_bytes(EXAMPLE.read_bytes())
        script.chmod(0o755)
    options = ["--parsable", f"--comment=migbatch: role=train {hints}", "--output=train-%j.out"]
    options += ["-p", "train"] if own is None else ["-p", "gpu", f"--gres=mig:{own}"]
    program = ["env", f"STEPS={steps}", bed.root.locate("sbatch")]
    done = bed.run([*program, *options, *words, str(script)], USER, check=False)
    assert done.stdout.strip().isdigit(), done.stdout + done.stderr
    return int(done.stdout)


def loans(bed: Cluster, *arguments: str) -> list[dict[str, Any]]:
    text = migbatch(bed, "loans", "-c", str(bed.product.config), "--json", *arguments)
    listed: list[dict[str, Any]] = json.loads(text)["loans"]
    return listed


def running(bed: Cluster) -> dict[int, str]:
    """Return the profile of each running loan, by job."""
    return {loan["job"]: loan["profile"] for loan in loans(bed) if loan["state"] == "running"}


def begun(bed: Cluster, job: int) -> list[int]:
    """Return the steps at which the runs of a training job continued."""
    path = bed.home(USER) / f"train-{job}.out"
    return [int(n) for n in re.findall(r"^from step (\d+)", path.read_text(), re.MULTILINE)] if path.exists() else []


def saved(bed: Cluster, job: int) -> int:
    """Return the step of a job's checkpoint; 0 without one."""
    path = bed.home(USER) / f"elastic-{job}.state"
    return int(path.read_text().split()[0]) if path.exists() else 0


def actions(bed: Cluster, job: int) -> list[dict[str, Any]]:
    """Return the recorded actions on a job, done or only decided (dry run)."""
    from slurm_migbatch.store.db import open_store

    with open_store(bed.product.record, readonly=True) as store:
        return store.actions([job])
