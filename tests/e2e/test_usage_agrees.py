"""`migbatch usage` against sreport, on a real slurmdbd.

sreport covers only whole hours that are over. So the jobs are moved back by some hours, in slurmdbd's database and in a
copy of the record alike, so that one job crosses the border of two hours; slurmdbd then rolls them up.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from slurm_migbatch.cli.migacctclick import command as migacct
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PATIENCE_S, account, accounts

HOUR = 3600
JOB_TIMES = ("time_submit", "time_eligible", "time_start", "time_end")
MADE = ("migbatch_assoc_table", "cluster_table", "user_table", "acct_table")
RUN_TIMES = ("submitted", "started", "ended", "began")


@pytest.mark.sqlite  # a copy of the record is put back in time
def test_usage_of_slices_agrees_with_sreport(new_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    bed = new_cluster(migbatch="all", nodes=2, gpus=1, dbd=True)
    bed.run(["sacctmgr", "-i", "add", "account", "chemistry", "Cluster=migbatch"])
    bed.run(["sacctmgr", "-i", "add", "user", "mbalice", "Account=chemistry"])
    jobs = [
        submit(bed, "mbalice", "chemistry", "--gres=mig:1g.10gb:1", seconds=11),
        submit(bed, "mbalice", "chemistry", "--gres=mig:1g.10gb:2,mig:2g.20gb:1", seconds=4),
        submit(bed, "mbalice", "migbatch", "--gres=mig:2g.20gb:1", seconds=5),
        submit(bed, "mbbob", "migbatch", "--gres=mig:1g.10gb:1", "-N2", seconds=6),
    ]
    first, *_ = [account(bed, job) for job in jobs]

    def told_by_slurm() -> bool:
        """Whether all times are Slurm's, which are in whole seconds; a node's own may come first."""
        rows = accounts(bed)
        return all(rows[str(job)][name] % 1 == 0 for job in jobs for name in ("started_unix_s", "ended_unix_s"))

    bed.wait("Slurm's word on every job", told_by_slurm, PATIENCE_S)
    by_association = {id: of_association(bed, id) for id in users_associations(bed)}
    assert len([found for found, _ in by_association.values() if found]) == 3
    assert [id for id, (ours, theirs) in by_association.items() if ours != theirs] == []
    record = tmp_path / "record.db"
    source = sqlite3.connect(bed.product.state / "migbatch.db")
    with closing(source), closing(sqlite3.connect(record)) as copy:
        source.backup(copy)
    # the middle of the first job becomes the border of two hours that are over
    border = int(time.time()) // HOUR * HOUR - 2 * HOUR
    back = int(first["started_unix_s"] + 5) - border
    put_back(bed, record, back)
    bed.run(["sacctmgr", "-i", "rollup", moment(border - HOUR), moment(border + HOUR)])
    for start, end in ((border - HOUR, border), (border, border + HOUR), (border - HOUR, border + HOUR)):
        ours, theirs = used(record, start, end), reported(bed, moment(start), moment(end))
        assert theirs and ours == theirs, (start, end)


def users_associations(bed: Cluster) -> list[str]:
    output = bed.run(["sacctmgr", "-n", "-P", "show", "associations", "format=id,user"]).stdout
    return [id for id, _, user in (line.partition("|") for line in output.splitlines()) if user]


def of_association(bed: Cluster, id: str) -> tuple[list[str], list[str]]:
    """The jobs of an association as migacct and as sacct know them."""
    options = ["-a", "-X", "-n", "-P", "-S", "now-1hour", "-o", "jobid", "-x", id]
    ours = CliRunner().invoke(
        migacct, options, env={"MIGBATCH_CONFIG": str(bed.product.config)}, catch_exceptions=False
    )
    return sorted(ours.stdout.split()), sorted(bed.run(["sacct", *options]).stdout.split())


def moment(ts: float) -> str:
    return datetime.fromtimestamp(ts).isoformat()


def submit(bed: Cluster, user: str, charged: str, *options: str, seconds: int) -> int:
    output = bed.run(["sbatch", "--parsable", "-A", charged, *options, "--wrap", f"sleep {seconds}"], user).stdout
    return int(output)


def put_back(bed: Cluster, record: Path, seconds: int) -> None:
    earlier = ", ".join(f"{name} = {name} - {seconds}" for name in JOB_TIMES)
    statements = [f"update migbatch_job_table set {earlier}"]
    # sreport leaves out what was created after its window, also the cluster and its TRES
    statements += [f"update {name} set creation_time = creation_time - {seconds + HOUR}" for name in MADE]
    statements += [f"update migbatch_event_table set time_start = time_start - {seconds + HOUR}"]
    socket = f"--socket={bed.directory}/db/mysql.sock"
    line = ["mariadb", "--no-defaults", socket, "-uroot", "slurm_acct_db", "-e", "; ".join(statements)]
    subprocess.run(line, check=True)
    with closing(sqlite3.connect(record)) as copy, copy:
        copy.execute("update runs set " + ", ".join(f"{name} = {name} - {seconds}" for name in RUN_TIMES))


def used(record: Path, start: int, end: int) -> dict[tuple[str, str, str], int]:
    """Slice-seconds by account, user and profile, as `migbatch usage` reports them."""
    window = ["-S", f"uts{start}", "-E", f"uts{end}"]
    options = ["--db", f"sqlite:///{record}", "--by", "account,user,profile", "--json", *window]
    done = CliRunner().invoke(cli, ["usage", *options], catch_exceptions=False)
    rows = json.loads(done.stdout)["rows"]
    return {(row["account"], row["user"], row["profile"]): round(row["slice_hours"] * HOUR) for row in rows}


def reported(bed: Cluster, start: str, end: str) -> dict[tuple[str, str, str], int]:
    """The same as sreport reports it."""
    profiles = ("1g.10gb", "2g.20gb")
    report = ["sreport", "-n", "-P", "-t", "Seconds", "-T", ",".join(f"gres/mig:{name}" for name in profiles)]
    report += ["cluster", "AccountUtilizationByUser", f"start={start}", f"end={end}"]
    found = {}
    for line in bed.run([*report, "format=Account,Login,TresName,Used"]).stdout.splitlines():
        charged, user, name, seconds = line.split("|")
        if user and int(seconds):
            found[charged, user, name.removeprefix("gres/mig:")] = int(seconds)
    return found
