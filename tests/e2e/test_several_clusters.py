"""Two clusters on one slurmdbd: jobs sent to the other cluster, and jobs of a federation with their large ids.

The tests build on each other. Each cluster has its own record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.migacctclick import command
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.commands import invoke
from tests.support.end_to_end import UUID, account, accounts, on_offer, until
from tests.support.several_clusters import two_clusters

pytestmark = pytest.mark.slurm
USER = "mbalice"
#: bits of a federated job id that number it within its cluster
OWN_BITS = 26
SEEN = "echo $SLURM_CLUSTER_NAME $MIGBATCH_PROFILE $CUDA_VISIBLE_DEVICES"
#: what jobs get from 23.11 instead of their cluster's name
UNNAMED = "(null)"
ODD = "neither on the node nor in its plan"
Pair = tuple[Cluster, Cluster]


@pytest.fixture(scope="module")
def pair(slurm_root: str) -> Iterator[Pair]:
    with two_clusters(slurm_root) as both:
        yield both


def submitted(bed: Cluster, *options: str, wrap: str = SEEN) -> int:
    """The job id that sbatch printed, with or without the cluster's name after it."""
    line = ["sbatch", "--parsable", *options, "-o", "out-%A", "--wrap", wrap]
    return int(bed.run(line, USER).stdout.split(";")[0])


def shown(bed: Cluster, job: int) -> str:
    return bed.run(["scontrol", "--local", "-o", "show", "job", str(job)], check=False).stdout


def wrote(bed: Cluster, job: int) -> list[str]:
    """The output of a SEEN job that was submitted there."""
    return (bed.home(USER) / f"out-{job}").read_text().split()


def test_a_job_sent_to_the_other_cluster_waits_and_gets_its_slice(pair: Pair) -> None:
    one, two = pair
    assert not on_offer(two, "n1")["7g.80gb"]
    for gres, comment, profile in (
        ("mig:7g.80gb", "", "7g.80gb"),
        ("mig:auto", "--comment=migbatch: mem=30gb", "3g.40gb"),
    ):
        job = submitted(one, "-M", "two", f"--gres={gres}", *filter(None, [comment]))
        row = account(two, job)
        assert [entry["profile"] for entry in row["slices"]] == [profile]
        name, shown_profile, uuid = wrote(one, job)
        assert name in ("two", UNNAMED) and shown_profile == profile and UUID.fullmatch(uuid)
    assert accounts(one) == {}


def test_migacct_names_the_cluster_of_its_record(pair: Pair) -> None:
    _, two = pair
    asked = ("-a", "-n", "-X", "-P", "-S", "now-2hours", "-o", "jobid,cluster", "-M")
    rows = migacct(two, *asked, "two")[0].split()
    assert rows and all(row.endswith("|two") for row in rows)
    warning = "migacct: warning: this record only has runs of the cluster two\n"
    assert migacct(two, *asked, "one") == ("", warning)


def migacct(bed: Cluster, *words: str) -> tuple[str, str]:
    """What migacct writes as root on the controller of a cluster: its table, its warnings."""
    env = {**bed.client_env(inside=False), "MIGBATCH_CONFIG": str(bed.product.config)}
    done = CliRunner().invoke(command, list(words), env=env, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def test_federated_jobs_with_slices_run_where_they_were_submitted(pair: Pair) -> None:
    """Only there job_submit.lua has run for them. Other jobs may run on either; nodes of one name are distinguished."""
    one, two = pair
    one.run(["sacctmgr", "-i", "add", "federation", "fed", "clusters=one,two"])
    until("the federation", lambda: all("PersistConnSend/Recv:Yes/Yes" in federation(bed) for bed in pair))
    jobs = {submitted(bed, "--gres=mig:7g.80gb", *more): bed for bed in pair for more in ([], ["-M", "two"])}
    assert sorted(job >> OWN_BITS for job in jobs) == [1, 2, 2, 2]
    for job, bed in jobs.items():
        own = pair[(job >> OWN_BITS) - 1]
        assert account(own, job)["nodes"] == ["n1"]
        assert f"FedViableSiblings={own.spec.name} " in shown(own, job)
        name, profile, uuid = wrote(bed, job)
        assert name in (own.spec.name, UNNAMED) and profile == "7g.80gb" and UUID.fullmatch(uuid)
    plain = submitted(one, "--begin=now+1hour")
    assert "FedViableSiblings=one,two " in shown(one, plain)
    array = submitted(two, "--array=0-2", "--gres=mig:3g.40gb", wrap="sleep 3")
    for task in range(3):
        account(two, f"{array}_{task}")
    assert not [job for job in accounts(one) if int(job.split("_")[0]) >> OWN_BITS == 2]


def federation(bed: Cluster) -> str:
    return bed.run(["scontrol", "show", "federation"]).stdout


def test_why_explains_a_waiting_job_with_a_federated_id(pair: Pair) -> None:
    for bed in pair:
        holder = submitted(bed, "--gres=mig:7g.80gb", wrap="sleep 600")
        until("a full GPU", lambda bed=bed, holder=holder: "JobState=RUNNING" in shown(bed, holder))  # type: ignore[misc]
        waiting = submitted(bed, "--gres=mig:1g.10gb")
        until("why", lambda bed=bed, job=waiting, holder=holder: str(holder) in why(bed, job))  # type: ignore[misc]
        bed.run(["scancel", str(holder)])
        account(bed, waiting)
        name, profile, _ = wrote(bed, waiting)
        assert name in (bed.spec.name, UNNAMED) and profile == "1g.10gb"


def why(bed: Cluster, job: int) -> str:
    return invoke(bed, "why", str(job)).stdout


def test_doctor_finds_nothing_to_correct_on_either_cluster(pair: Pair) -> None:
    for bed in pair:
        until("0 failed", lambda bed=bed: wrong(bed) == [])  # type: ignore[misc]
        assert ODD not in bed.daemons.log("migbatchd").read_text(), "for more than a short time"


def wrong(bed: Cluster) -> list[str]:
    found = json.loads(invoke(bed, "doctor", "--json", "--nodes", "-c", str(bed.product.config)).stdout)["findings"]
    return [f"{row['subject']}: {row['text']}" for row in found if row["level"] == "FAIL"]
