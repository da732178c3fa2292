"""Jobs that name nodes, features or a reservation wait for a profile that is not on offer there, and then start."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import backfilled, cancel, more_rounds, on_offer, refused, sbatch, shown, until

pytestmark = pytest.mark.slurm
NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="module")
def whole(slurm_root: str) -> Iterator[Cluster]:
    features = {"n1": "fast", "n2": "fast,big", "n3": "big"}
    with Cluster(nodes=3, gpus=1, migbatch="all", features=features, slurm_root=slurm_root) as bed:
        yield bed


@pytest.fixture
def bed(whole: Cluster) -> Iterator[Cluster]:
    yield whole
    cancel(whole)
    for name in re.findall(r"ReservationName=(\S+)", whole.run(["scontrol", "-o", "show", "reservation"]).stdout):
        whole.run(["scontrol", "delete", f"ReservationName={name}"])


def nodes_of(bed: Cluster, job: int) -> str:
    found = re.search(r" NodeList=(\S+)", shown(bed, job))
    return found[1] if found else ""


def started(bed: Cluster, *options: str, wrap: str = "true") -> str:
    """Run a job with these options; return its nodes."""
    job, message = sbatch(bed, *options, wrap=wrap)
    assert job, message
    bed.wait_job(job, "COMPLETED")
    return nodes_of(bed, job)


def taken(bed: Cluster, profile: str, *nodes: str) -> list[int]:
    """Jobs that hold a slice of this profile on each of the nodes: only the rest of their GPUs can be offered."""
    jobs = []
    for node in nodes:
        job, message = sbatch(bed, f"--gres=mig:{profile}", "-w", node, wrap="sleep 600")
        assert job, message
        bed.wait_job(job, "RUNNING")
        assert nodes_of(bed, job) == node
        jobs.append(job)
    return jobs


@pytest.mark.parametrize("node", NODES)
def test_a_job_waits_for_the_node_that_it_names(bed: Cluster, node: str) -> None:
    """None of them offers a whole GPU at first; then only others do."""
    assert started(bed, "--gres=mig:7g.80gb", "-w", node) == node
    assert started(bed, "--gres=mig:1g.10gb:7", "-w", node) == node
    assert started(bed, "--gres=mig:auto", "--comment=migbatch: mem=60gb", "-w", node, "-C", "fast|big") == node
    assert started(bed, "--gpus=1", f"--nodelist={node}") == node


def test_job_waits_while_the_node_that_it_names_is_in_use(bed: Cluster) -> None:
    (holder,) = taken(bed, "1g.10gb", "n2")
    until("a whole GPU taken from n2's offer", lambda: on_offer(bed, "n2")["7g.80gb"] == 0)
    job, message = sbatch(bed, "--gres=mig:7g.80gb", "-w", "n2", wrap="true")
    assert job, message
    backfilled(bed)
    assert bed.job_state(job) == "PENDING"
    bed.run(["scancel", str(holder)])
    bed.wait_job(job, "COMPLETED")
    assert nodes_of(bed, job) == "n2"


def test_job_gets_all_the_nodes_that_it_names(bed: Cluster) -> None:
    assert started(bed, "--gres=mig:7g.80gb", "-w", "n[1,3]") == "n[1,3]"
    assert started(bed, "--gres=mig:3g.40gb:2", "-w", "n1,n2", "-N2") == "n[1-2]"


def test_excluded_nodes_and_features_are_respected(bed: Cluster) -> None:
    assert started(bed, "--gres=mig:7g.80gb", "-x", "n1,n2") == "n3"
    assert started(bed, "--gres=mig:1g.10gb:7", "-x", "n[2-3]") == "n1"
    assert started(bed, "--gres=mig:7g.80gb", "-C", "fast&big") == "n2"
    assert started(bed, "--gres=mig:1g.10gb:7", "-C", "big", "-x", "n2") == "n3"
    assert started(bed, "--gres=mig:7g.80gb", "-C", "[fast|big]") in NODES


def test_nothing_is_offered_for_a_job_on_a_node_that_it_excludes(bed: Cluster) -> None:
    """The whole GPU of n1 is idle; it is offered for the job only once its user no longer excludes n1."""
    assert started(bed, "--gres=mig:1g.10gb:7", "-w", "n1") == "n1", (
        "whatever it offered before, it has small slices now"
    )
    taken(bed, "7g.80gb", "n2", "n3")
    job, message = sbatch(bed, "--gres=mig:7g.80gb", "-x", "n1", wrap="true")
    assert job, message
    assert re.search(r" Comment=\[mig-exclude:n1\] \[mig:7g\.80gb:1", shown(bed, job))
    more_rounds(bed, "supply", 4)
    assert bed.job_state(job) == "PENDING" and on_offer(bed, "n1")["7g.80gb"] == 0
    bed.run(["scontrol", "update", f"JobId={job}", "ExcNodeList="], "mbalice")
    bed.wait_job(job, "COMPLETED")
    assert nodes_of(bed, job) == "n1" and "mig-exclude" not in shown(bed, job)


def test_node_excluded_by_an_update_is_added_to_the_comment(bed: Cluster) -> None:
    job, message = sbatch(bed, "-H", "--gres=mig:7g.80gb", "--comment=mine", wrap="true")
    assert job, message
    bed.run(["scontrol", "update", f"JobId={job}", "ExcNodeList=n[1-2]"], "mbalice")
    assert re.search(r" Comment=mine \[mig-exclude:n\[1-2\]\] \[mig:7g\.80gb:1", shown(bed, job))
    bed.run(["scontrol", "release", str(job)])
    bed.wait_job(job, "COMPLETED")
    assert nodes_of(bed, job) == "n3"


def test_jobs_with_exclusive_user_or_switches_get_their_slices(bed: Cluster) -> None:
    assert started(bed, "--gres=mig:7g.80gb", "--exclusive=user") in NODES
    assert started(bed, "--gres=mig:1g.10gb:7", "--exclusive=user", "-w", "n2") == "n2"
    assert started(bed, "--gres=mig:7g.80gb", "-N2", "--switches=1") in ("n[1-2]", "n[2-3]", "n[1,3]")


def reserve(
    bed: Cluster, name: str, nodes: str, user: str = "mbalice", flags: str = "IGNORE_JOBS", start: str = "now"
) -> None:
    what = [f"ReservationName={name}", f"Nodes={nodes}", f"Users={user}"]
    bed.run(["scontrol", "create", "reservation", *what, f"StartTime={start}", "Duration=60", f"Flags={flags}"])


def test_jobs_wait_in_a_reservation_that_has_the_catalog_node(bed: Cluster) -> None:
    for node in NODES:
        reserve(bed, f"r{node}", f"{node},no-mig-slice-free1")
        assert started(bed, "--gres=mig:7g.80gb", f"--reservation=r{node}") == node
        assert started(bed, "--gres=mig:1g.10gb:7", f"--reservation=r{node}") == node
        bed.run(["scontrol", "delete", f"ReservationName=r{node}"])


def test_jobs_wait_in_a_maintenance_reservation(bed: Cluster) -> None:
    """An administrator tries slices on nodes that are in maintenance; jobs of others stay away from these."""
    reserve(bed, "maint", "n[1-2],no-mig-slice-free1", flags="MAINT,IGNORE_JOBS")
    for profile in ("7g.80gb", "1g.10gb:7", "3g.40gb:2"):
        assert started(bed, f"--gres=mig:{profile}", "--reservation=maint") in ("n1", "n2")
        assert started(bed, f"--gres=mig:{profile}") == "n3"


def test_jobs_without_a_reservation_run_on_unreserved_nodes(bed: Cluster) -> None:
    reserve(bed, "most", "n[1-2],no-mig-slice-free1", "mbbob")
    for profile in ("7g.80gb", "3g.40gb:2", "1g.10gb:7"):
        assert started(bed, f"--gres=mig:{profile}") == "n3"


def test_long_jobs_hold_no_slices_before_a_coming_reservation(bed: Cluster) -> None:
    """Before maintenance only short jobs can start; migbatchd reads coming reservations when it starts."""
    reserve(bed, "soon", "n[1-3]", "root", "MAINT,IGNORE_JOBS", "now+1hour")
    bed.restart("migbatchd")
    for profile in ("7g.80gb", "4g.40gb", "1g.10gb:7", "3g.40gb:2"):
        assert sbatch(bed, f"--gres=mig:{profile}", "--time=2:00:00", wrap="true")[0]
    assert started(bed, "--gres=mig:1g.20gb:4", "--time=10") in NODES
    assert started(bed, "--gres=mig:2g.20gb:3", "--time=10") in NODES
    assert set(bed.run(["squeue", "-h", "-o", "%T"]).stdout.split()) == {"PENDING"}
    bed.run(["scontrol", "delete", "ReservationName=soon"])
    bed.restart("migbatchd")
    bed.wait("the long jobs", lambda: not bed.run(["squeue", "-h"]).stdout.strip(), 120.0)


def test_refusal_names_a_reservation_without_the_catalog_node(bed: Cluster) -> None:
    assert started(bed, "--gres=mig:7g.80gb", "-w", "n1") == "n1", (
        "whatever it offered before, it has no small slices now"
    )
    reserve(bed, "bare", "n1")
    message = refused(bed, "--gres=mig:1g.20gb:4", "--reservation=bare")
    assert "the reservation has no catalog node (no-mig-slice-free...)" in message


def test_request_that_no_node_can_ever_meet_is_refused(bed: Cluster) -> None:
    for options, sentence in (
        (
            ["--gres=mig:7g.80gb:1,mig:1g.10gb:1"],
            "no node available to the job can ever hold mig:7g.80gb:1,mig:1g.10gb:1",
        ),
        (["--gres=mig:7g.80gb:2"], "can ever hold mig:7g.80gb:2"),
        (["--gres=mig:7g.80gb", "-w", "n9"], "--nodelist names n9, which is no node with MIG GPUs of partition gpu"),
        (["--gres=mig:7g.80gb", "-w", "n1", "-C", "big"], "--nodelist names n1, which"),
        (["--gres=mig:7g.80gb", "-N2", "-w", "n1"], "the job asks for 2 nodes and --nodelist names 1"),
        (["--gres=mig:7g.80gb", "-C", "none"], "no node with MIG GPUs of partition gpu meets --constraint"),
    ):
        assert sentence in refused(bed, *options)


def test_interactive_job_runs_on_the_node_that_it_names(bed: Cluster) -> None:
    done = bed.run(["srun", "--gres=mig:7g.80gb", "-w", "n2", "sh", "-c", "echo $SLURMD_NODENAME"], "mbalice")
    assert done.stdout.strip() == "n2"


def test_pending_job_is_moved_to_another_node_by_its_features(bed: Cluster) -> None:
    job, message = sbatch(bed, "-H", "--gres=mig:7g.80gb", "-w", "n1", wrap="true")
    assert job, message
    done = bed.run(["scontrol", "update", f"JobId={job}", "ReqNodeList=n2"], "mbalice", check=False)
    assert done.returncode != 0
    bed.run(["scontrol", "update", f"JobId={job}", "Features=mig_node_n2"], "mbalice")
    bed.run(["scontrol", "release", str(job)])
    bed.wait_job(job, "COMPLETED")
    assert nodes_of(bed, job) == "n2"
