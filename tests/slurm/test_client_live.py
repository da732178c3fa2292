"""The client against a real Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from slurm_migbatch.decide.capacity.demand import waits_for_begin
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.testbed.cluster import Cluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def client(cluster: Cluster) -> CliClient:
    return CliClient(cluster.bin, cluster.slurm_conf)


def row(client: CliClient, job: int) -> JobRow | None:
    return next((r for r in client.jobs() if r.job_id == job), None)


def until(client: CliClient, job: int, state: str, timeout: float = 180.0) -> JobRow:
    deadline = time.monotonic() + timeout
    found = None
    while time.monotonic() < deadline:
        found = row(client, job)
        if found is not None and found.state == state:
            return found
        time.sleep(0.1)
    raise AssertionError(f"job {job} is {found}, not {state}")


def test_client_reports_the_version_of_the_cluster(cluster: Cluster, client: CliClient) -> None:
    assert client.version() == cluster.root.version()


def test_job_is_held_updated_requeued_hastened_and_cancelled(cluster: Cluster, client: CliClient) -> None:
    text = "x\x1f\x1e\n|%é'\"$(id)"
    job = cluster.submit("--gres=mig:1g.10gb:1", "-H", f"--comment={text}", "-J", "a\nb", wrap="sleep 600")
    held = row(client, job)
    assert held is not None
    assert (held.comment, held.name, held.reason) == (text, "a\nb", "JobHeldUser")
    client.update_jobs({str(job): {"Comment": text + " more", "Gres": "mig:1g.10gb:2"}})
    cluster.run(["scontrol", "release", str(job)])
    running = until(client, job, "RUNNING")
    assert running.comment == text + " more"
    assert running.gres.endswith("mig:1g.10gb:2")
    used = {node.name: node.used.get("1g.10gb", 0) for node in client.nodes()}
    assert used[running.nodes[0]] >= 2
    for restarts in (1, 2, 3):
        client.requeue_all([job])
        assert until(client, job, "PENDING").restarts == restarts
        client.shorten_requeue_delay(job)  # Slurm itself would delay it for two minutes
        assert until(client, job, "RUNNING").restarts == restarts
    client.cancel(job)
    cluster.wait_job(job)
    client.cancel(job)
    client.cancel(10**8)


def test_comments_are_stored_as_they_are_written(cluster: Cluster, client: CliClient) -> None:
    """Several updates are sent to one process of scontrol, whose input is read in another way than its arguments."""
    comments = (
        "[mig:1g.10gb:1#3f2a]",
        "two words [mig:1g.10gb:1]",
        "migbatch: model=x # [mig:1g.10gb:1#3f2b]",
        "plain",
    )
    jobs = [cluster.submit("--gres=mig:1g.10gb:1", "-H", wrap="true") for _ in comments]
    client.update_jobs({str(job): {"Comment": text} for job, text in zip(jobs, comments, strict=True)})
    stored = {found.job_id: found.comment for found in client.jobs()}
    assert [stored[job] for job in jobs] == list(comments)
    for job in jobs:
        client.cancel(job)


def test_job_whose_start_time_was_overlooked_starts_on_request(
    new_cluster: Callable[..., Cluster],
) -> None:
    """On a quiet cluster Slurm may examine it up to a minute late; `daemon.begin_times` relies on this update."""
    cluster = new_cluster(nodes=1, gpus=1)
    client = CliClient(cluster.bin, cluster.slurm_conf)
    for _ in range(5):
        job = cluster.submit("--begin=now+1hour", wrap="sleep 600")
        time.sleep(3.0)  # until nothing changes any more
        client.shorten_requeue_delay(job)
        given = time.time()
        while (found := row(client, job)) is not None and found.pending and time.time() < given + 5.0:
            time.sleep(0.5)
        assert found is not None
        overlooked = found.pending
        if overlooked:
            assert found.eligible is not None and found.eligible <= time.time() - 1.0
            assert waits_for_begin(found, time.time())
            client.update_jobs({str(job): {"StartTime": "now"}})
            assert until(client, job, "RUNNING", timeout=30.0)
        client.cancel(job)
        cluster.wait_job(job)
        if overlooked:
            break
    else:
        pytest.fail("Slurm examined each job in time")


@pytest.mark.parametrize("limit", ["--time=5", "--time=UNLIMITED"])
def test_a_requeued_run_keeps_its_restart_count_until_it_has_ended(
    cluster: Cluster, client: CliClient, limit: str
) -> None:
    """The run takes three seconds to end; meanwhile Slurm already shows the next run's count."""
    trap = "trap 'sleep 3; exit 0' TERM; touch trap-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    job = cluster.submit("--requeue", limit, wrap=f"{trap}; while :; do sleep 0.1; done")
    ending: list[JobRow] = []
    runs = 0
    while not ending and runs < 5:  # on a busy machine the polls may miss a run's end
        submitted = until(client, job, "RUNNING").submit
        cluster.wait("the trap", (cluster.home("mbalice") / f"trap-{job}-{runs}").exists)
        client.requeue_all([job])
        while (found := row(client, job)) is None or not found.pending:
            ending += [found] if found is not None and found.state == "COMPLETING" else []
        assert all((r.restarts, r.submit, r.start, r.end) == (runs, submitted, None, None) for r in ending), ending
        runs += 1
        assert found.restarts == runs and found.submit > submitted
        client.shorten_requeue_delay(job)
    assert ending
    runs = until(client, job, "RUNNING").restarts
    client.cancel(job)
    seen = {(found.state, found.restarts) for _ in range(10) if (found := row(client, job)) is not None}
    assert seen and seen <= {(state, runs) for state in ("RUNNING", "COMPLETING", "CANCELLED")}, seen
    cluster.wait_job(job)


def test_jobs_in_special_pending_states_are_listed(new_cluster: Callable[..., Cluster]) -> None:
    """A job of `--requeue=expedite` waits as EXPEDITING (25.11); earlier releases refuse that option."""
    cluster = new_cluster(nodes=1, options={"SlurmctldParameters": "enable_expedited_requeue"})
    client = CliClient(cluster.bin, cluster.slurm_conf)
    special = cluster.submit(wrap="sleep 600")
    until(client, special, "RUNNING")
    cluster.run(["scontrol", "requeuehold", "State=SpecialExit", str(special)])
    until(client, special, "SPECIAL_EXIT")
    expedites = client.version() >= (25, 11)
    requeue = "--requeue=expedite" if expedites else "--requeue"
    job = cluster.submit(requeue, wrap="sleep 600")
    until(client, job, "RUNNING")
    cluster.kill("slurmd-n1")
    cluster.run(["scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test"])
    assert until(client, job, "PENDING").restarts >= 1
    shown = cluster.run(["squeue", "--noheader", f"--jobs={job}", "--Format=State"]).stdout.strip()
    assert shown == ("EXPEDITING" if expedites else "PENDING")


def test_refusal_by_slurm_is_an_error_with_its_message(client: CliClient) -> None:
    with pytest.raises(SlurmError, match="Invalid job id"):
        client.requeue_all([10**8])
    with pytest.raises(SlurmError, match="Invalid node name"):
        client.set_gres({"nosuchnode": "mig:none:1"})


def test_gres_counts_are_set_on_many_nodes_in_one_call(cluster: Cluster, client: CliClient) -> None:
    before = {node.name: node for node in client.nodes()}
    names = list(cluster.spec.node_names)
    total = sum(before[names[0]].gres.values())
    wanted = {names[0]: {"7g.80gb": 1, "none": total - 1}, names[1]: {"1g.20gb": 2, "none": total - 2}}
    client.calls = 0
    try:
        client.set_gres({n: ",".join(f"mig:{k}:{v}" for k, v in c.items()) for n, c in wanted.items()})
        assert client.calls == 1
        after = {node.name: {k: v for k, v in node.gres.items() if v} for node in client.nodes()}
        assert {n: after[n] for n in names} == wanted
    finally:
        client.set_gres({n: ",".join(f"mig:{k}:{v}" for k, v in before[n].gres.items() if v) for n in names})


def test_missing_slurm_is_an_error_and_not_an_empty_queue(cluster: Cluster) -> None:
    stranger = CliClient(cluster.bin.parent / "nowhere", timeout=5)
    with pytest.raises(SlurmError):
        stranger.jobs()


def test_queue_is_in_the_order_of_partitions_with_capital_letters(new_cluster: Callable[..., Cluster]) -> None:
    tiers = {"Low": 3, "GPU": 15, "Big": 20}  # beside gpu, of tier 10, and train, of tier 1
    lines = [f"{name} Nodes=n1 State=UP PriorityTier={tier}" for name, tier in tiers.items()]
    cluster = new_cluster(nodes=1, gpus=1, options={"PartitionName": "\nPartitionName=".join(lines)})
    for names in ("train", "Low", "gpu", "GPU", "Big", "gpu,GPU"):
        cluster.submit("--begin=now+1hour", "-p", names, wrap="sleep 1")
    rows = CliClient(cluster.bin, cluster.slurm_conf).jobs()
    assert [row.partition for row in rows] == ["Big", "GPU", "GPU,gpu", "gpu", "Low", "train"]
