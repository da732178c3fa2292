"""Helpers of the end-to-end tests: submit jobs, read the record, read the driver."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from sqlalchemy import select

from slurm_migbatch.cli.migacctclick import command as migacct
from slurm_migbatch.node import conf
from slurm_migbatch.node.journal import NAME, Journal
from slurm_migbatch.node.journal_rows import JournalSlice
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.models import StoredLease
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.proc import wait_until
from slurm_migbatch.testbed.running_cluster import FINAL

UUID = re.compile(r"MIG-[0-9a-f-]{36}")
PATIENCE_S = 180.0  # long, for busy machines
PYTHON = "/usr/bin/python3"
SHOW = "echo batch $CUDA_VISIBLE_DEVICES; srun sh -c 'echo task $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"


def sbatch(bed: Cluster, *options: str, wrap: str = SHOW, user: str = "mbalice") -> tuple[int, str]:
    """Submit as a user; return the job id (0 if it was refused) and the output that the user saw."""
    done = bed.run(["sbatch", *options, "--wrap", wrap], user, check=False)
    match = re.search(r"Submitted batch job (\d+)", done.stdout)
    return (int(match[1]) if match else 0), done.stdout + done.stderr


def exporting(bed: Cluster, variables: list[str], *options: str, wrap: str) -> int:
    """Submit a job with these variables in the environment (26.05 starts a login shell for `--export=NAME=...`)."""
    argv = ["env", *variables, bed.root.locate("sbatch"), "--parsable", "--export=ALL", *options, "--wrap", wrap]
    return int(bed.run(argv, "mbalice").stdout)


def refused(bed: Cluster, *options: str, user: str = "mbalice") -> str:
    """Return the output that the user saw; fail if the job was accepted."""
    job, output = sbatch(bed, *options, user=user)
    assert job == 0, f"accepted as {job}: {options}"
    return output


def output_so_far(bed: Cluster, job: int) -> str:
    """Return the output of a job that has started; empty if slurmd has not created the file yet."""
    try:
        return bed.output(job)
    except FileNotFoundError:
        return ""


def sights(text: str) -> dict[str, list[str]]:
    """Return the devices that the batch script (`batch`) and the tasks (`task 0` ...) of a SHOW job saw."""
    return {
        line[: match.start()].strip(): UUID.findall(line) for line in text.splitlines() if (match := UUID.search(line))
    }


def accounts(bed: Cluster) -> dict[str, dict[str, Any]]:
    """Return migacct's record of every job of this test bed.

    It is called in this process, because tests poll it and a new process would spend most of its time on imports.
    """
    environment = {"MIGBATCH_CONFIG": str(bed.product.config)}
    done = CliRunner().invoke(migacct, ["-a", "-S", "now-2hours", "--json"], env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return {row["job"]: row for row in json.loads(done.stdout)["jobs"]}


def account(bed: Cluster, job: int | str, state: str = "COMPLETED", *, decided: bool = False) -> dict[str, Any]:
    """Wait until the record of a job with slices is complete, with the filter's decision if `decided`; return it.

    States come from Slurm, slices and their ends from nodes, decisions from the submit filter, in any order.
    """
    row: dict[str, Any] = {}

    def accounted() -> bool:
        nonlocal row
        row = accounts(bed).get(str(job), {"state": "", "slices": []})
        ends = [entry["until_unix_s"] for entry in row["slices"]]
        over = bool(ends) and (state == "RUNNING" or None not in ends)
        return row["state"].startswith(state) and over and (row["bucket"] is not None or not decided)

    try:
        bed.wait(f"job {job} {state} in migacct", accounted, PATIENCE_S)
    except TestbedError as error:
        raise TestbedError(f"{error}; it says {row}") from None
    return row


def gate(bed: Cluster) -> tuple[Path, str]:
    """Return a path, and a shell command that waits until a file exists there."""
    path = bed.home("mbalice") / f"gate{time.monotonic_ns()}"
    return path, f"until test -e {shlex.quote(str(path))}; do sleep 0.2; done"


def first_step(bed: Cluster, job: int, user: str = "mbalice") -> None:
    """Wait until the first step of a SHOW job has run."""
    path = bed.home(user) / f"slurm-{job}.out"
    until(f"the first step of job {job}", lambda: path.exists() and "task 0" in path.read_text())


def status(bed: Cluster, node: str) -> dict[str, Any]:
    """Return the result of `migbatch node status --json` for one node."""
    etc = str(bed.product.etc)
    report: dict[str, Any] = json.loads(bed.product.migbatch("node", "status", "--etc", etc, "--node", node, "--json"))
    return report


def journalled(bed: Cluster, node: str) -> list[JournalSlice]:
    """Return the slices in a node's journal.

    It is opened in this process, because tests poll it and a process of `status` would spend its time on imports.
    """
    state = conf.read(str(bed.product.etc / conf.NAME), node)["StateDir"]
    with closing(Journal(f"{state}/{NAME}")) as journal:
        return list(journal.slices())


def held(bed: Cluster) -> list[tuple[str, int | None, str]]:
    """Return node, job and state of every slice that is not idle, by the nodes' own journals."""
    return [
        (node, row.job, row.state)
        for node in bed.spec.node_names
        for row in journalled(bed, node)
        if row.state != "idle"
    ]


def holding(bed: Cluster, job: int) -> tuple[str, str]:
    """Wait until a running job holds its slice, and return node and slice: Slurm may report it as running earlier."""
    holders: list[tuple[str, str]] = []

    def slices_held() -> bool:
        holders[:] = [
            (node, row.mig_uuid or "")
            for node in bed.spec.node_names
            for row in journalled(bed, node)
            if row.job == job and row.state == "held"
        ]
        return bool(holders)

    until(f"the slice of job {job}", slices_held)
    assert len(holders) == 1
    return holders[0]


def differences(bed: Cluster) -> list[str]:
    """Instances that only the driver has, or only the journal."""
    found = []
    for node in bed.spec.node_names:
        in_driver = {
            (gpu["uuid"], i["start"], i["size"], i["profile"])
            for gpu in bed.machine(node).dump()["gpus"]
            for i in gpu["instances"]
        }
        in_journal = {
            (row.gpu, row.slot.placement.start, row.slot.placement.size, row.slot.profile.name)
            for row in journalled(bed, node)
            if row.state in ("idle", "held", "zombie")
        }
        found += [f"{node}: only the driver has {extra}" for extra in in_driver - in_journal]
        found += [f"{node}: only the journal has {extra}" for extra in in_journal - in_driver]
    return found


def settled(bed: Cluster) -> None:
    """Wait until nothing is held, then assert: journal and driver agree, every device is root's, no node is drained."""
    bed.wait("the end of all leases", lambda: not held(bed), PATIENCE_S)
    found: list[str] = []

    def agreed() -> bool:
        nonlocal found
        found = differences(bed)  # two reads, between which a node may make changes
        return not found

    with suppress(TestbedError):
        bed.wait("journals that agree with drivers", agreed, 30.0)
    assert found == []
    assert [str(path) for path, owner in capabilities(bed) if owner != (0, 0)] == []
    bed.wait("idle nodes", lambda: {s.rstrip("*") for s in bed.node_states().values()} == {"idle"}, PATIENCE_S)


def capabilities(bed: Cluster) -> list[tuple[Path, tuple[int, int]]]:
    """Return every capability device, with its owner and the mode bits of other users."""
    found = []
    for node in bed.spec.node_names:
        for path in sorted((bed.machine(node).dev_root / "nvidia-caps").glob("nvidia-cap*")):
            with suppress(FileNotFoundError):  # its instance has just been destroyed
                status = path.stat()
                found.append((path, (status.st_uid, status.st_mode & 0o077)))
    return found


def offer(bed: Cluster) -> dict[str, int]:
    """Return the counts that all nodes offer to Slurm, by GRES type, without the filler."""
    counts: dict[str, int] = {}
    for line in bed.run(["scontrol", "-d", "-o", "show", "node", ",".join(bed.spec.node_names)]).stdout.splitlines():
        gres = re.search(r"\sGres=(\S+)", line)
        for gres_type, count in re.findall(r"mig:([^:,]+):(\d+)", gres[1] if gres else ""):
            counts[gres_type] = counts.get(gres_type, 0) + int(count)
    counts.pop("none", None)
    return {gres_type: count for gres_type, count in counts.items() if count}


def until(what: str, ready: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    """Wait for a condition while processes of the test bed may be dead, which `bed.wait` treats as an error."""
    wait_until(ready, timeout, what, every=0.1)


def more_rounds(bed: Cluster, loop: str, count: int = 3) -> None:
    """Wait until migbatchd has decided `count` more times; `loop` is `supply` or `lending`."""
    sample = re.compile(rf"^migbatch_{loop}_round_seconds_count (\d+)", re.MULTILINE)

    def rounds() -> int:
        match = sample.search(bed.product.metrics())
        return int(match[1]) if match else 0

    target = rounds() + count
    until(f"{count} rounds of {loop}", lambda: rounds() >= target)


def backfilled(bed: Cluster, count: int = 2) -> None:
    """Wait until Slurm has made `count` more backfill cycles; a job must be pending."""

    def cycles() -> int:
        text = bed.run(["sdiag"]).stdout
        return int(re.findall(r"Total cycles:\s*(\d+)", text[text.index("Backfilling stats") :])[0])

    target = cycles() + count
    until(f"{count} cycles of backfill", lambda: cycles() >= target)


def shown(bed: Cluster, job: int | str) -> str:
    """Return the output of `scontrol show job`, on one line."""
    return bed.run(["scontrol", "-d", "-o", "show", "job", str(job)]).stdout


def marked(bed: Cluster, job: int) -> tuple[str, str]:
    """Return a job's MIG request in slurmctld: the GRES per node, and the grant in the comment's marker."""
    text = bed.run(["squeue", "-h", "-t", "all", "-j", str(job), "-o", "%b\x1f%k"]).stdout
    gres, _, comment = text.removesuffix("\n").partition("\x1f")
    marker = re.search(r"\[mig:([0-9a-z.:,-]+)(?:#[0-9a-z]*)?\]\Z", comment)
    return ",".join(re.findall(r"mig:([^:,]+:\d+)", gres)), marker[1] if marker else ""


def leases(bed: Cluster, job: int) -> list[tuple[int, str | None, float | None]]:
    """Return restart, slice and end of every lease of a job, read from migbatchd's database directly."""
    columns = select(StoredLease.restart, StoredLease.mig_uuid, StoredLease.until)
    with open_store(bed.product.record, readonly=True) as store, store.reading() as link:
        rows = link.execute(columns.where(StoredLease.job_id == job).order_by(StoredLease.id))
        return [(restart, uuid, until) for restart, uuid, until in rows]


def instances(bed: Cluster, node: str) -> list[dict[str, Any]]:
    """Return the GPU instances of a node, by its driver."""
    return [instance for gpu in bed.machine(node).dump()["gpus"] for instance in gpu["instances"]]


def on_offer(bed: Cluster, node: str) -> Counter[str]:
    """Return the counts that one node offers to Slurm, by GRES type, without the filler."""
    return _counts(bed, node)[0]


def unused(bed: Cluster, node: str) -> Counter[str]:
    """Return the counts of one node that are free in Slurm, by GRES type, without the filler."""
    offered, used = _counts(bed, node)
    return offered - used


def _counts(bed: Cluster, node: str) -> tuple[Counter[str], Counter[str]]:
    """Return the counts of one node in Slurm and those in use, by GRES type, without the filler."""
    text = bed.run(["scontrol", "-d", "-o", "show", "node", node]).stdout
    counts = []
    for name in ("Gres", "GresUsed"):
        gres = re.search(rf"\s{name}=(\S+)", text)
        found = re.findall(r"mig:([^:,]+):(\d+)", gres[1] if gres else "")
        counts.append(+Counter({gres_type: int(count) for gres_type, count in found if gres_type != "none"}))
    return counts[0], counts[1]


def planned(bed: Cluster, node: str) -> Counter[str]:
    """Return the slots of the plan stored on a node, by GRES type; none if it has no plan yet."""
    path = bed.node_directory(node) / "state/plan.json"
    plan = json.loads(path.read_text()) if path.exists() else {"gpus": {}}
    return Counter(slot[0].replace("+", ".") for slots in plan["gpus"].values() for slot in slots)


def cancel(bed: Cluster) -> None:
    """Cancel every job and wait until Slurm has ended them."""
    for user in bed.users:
        bed.run(["scancel", "-u", user.name])
    bed.wait("an empty queue", lambda: not bed.run(["squeue", "-h"]).stdout.strip(), PATIENCE_S)


def untroubled(bed: Cluster) -> None:
    """Assert that no node is drained or down."""
    states = bed.run(["sinfo", "-h", "-N", "-n", ",".join(bed.spec.node_names), "-o", "%N %T"]).stdout
    assert not re.search(r"drain|down|inval|fail", states), states


def hasten(bed: Cluster, job: int) -> str:
    """Start a job soon after each requeue, not after Slurm's two minutes; return its last state."""
    end = time.monotonic() + 600.0
    while (state := bed.job_state(job)) not in FINAL and time.monotonic() < end:
        time.sleep(3.0)
        if state == "PENDING":
            bed.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
    return state
