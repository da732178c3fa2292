"""Supply on a real Slurm: no node drains, no job is lost, and GRES resets are corrected within seconds.

The nodes are simulated: they adopt plans and give each job that runs in Slurm a slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from slurm_migbatch.daemon.controller import RoundReport
from slurm_migbatch.decide.capacity.demand import slices
from slurm_migbatch.decide.supply.stage import SupplySettings
from slurm_migbatch.lab.bench.rpcs import diag
from slurm_migbatch.lab.slurm.clock import VirtualClock
from slurm_migbatch.lab.slurm.nodes import SimulatedNodes
from slurm_migbatch.lab.slurm.slurmctld import Slurmctld
from slurm_migbatch.node.journal_rows import JournalSlice
from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.controllers import SupplyController
from tests.support.end_to_end import gate
from tests.support.supply_gpus import H100

pytestmark = pytest.mark.slurm


class Followers(SimulatedNodes):
    """Nodes beside a real Slurm that learn its jobs in every round: no slot that they hold then is of an ended job."""

    def _ending(self, row: JournalSlice) -> bool:
        return False


class Site:
    """A private Slurm, the loop on it, and nodes that follow."""

    def __init__(self, cluster: Cluster, gpus: int) -> None:
        self.cluster = cluster
        self.client = CliClient(cluster.bin, cluster.slurm_conf)
        self.clock = VirtualClock(time.time())
        self.nodes = Followers(self.clock, Slurmctld(self.clock), strict=True)
        for name in cluster.spec.node_names:
            self.nodes.add(name, *([H100] * gpus))
        self.loop = SupplyController(self.client, self.nodes, time, SupplySettings(stuck_s=60), self._record)
        self.records: list[tuple[object, ...]] = []
        self.placed: dict[int, bool] = {}

    def _record(self, node: str, counts: dict[str, int], why: str) -> None:
        self.records.append((node, counts, why))

    def round(self) -> RoundReport:
        """One round, after the nodes did their part."""
        running = {row.job_id: row for row in self.client.jobs() if row.active and slices(row.gres)}
        for job in [job for job in self.placed if job not in running]:
            self.nodes.epilog(job)
            del self.placed[job]
        for job, row in running.items():
            if job not in self.placed and row.state == "RUNNING":
                self.placed[job] = self.nodes.prolog(row)
        self.nodes.report()
        self.nodes.poll()
        self.clock.until(time.time())
        return self.loop.round()

    def until(self, what: str, true: Callable[[], bool], timeout: float = 240) -> float:
        """Seconds until `true`, with one round every half second."""
        begun = time.monotonic()
        while time.monotonic() - begun < timeout:
            report = self.round()
            if true():
                return time.monotonic() - begun
            time.sleep(0.5)
        raise AssertionError(f"{what}: not within {timeout} s; last round: {report}; log: {report.notes}")

    def offered(self, node: str) -> dict[str, int]:
        return next({k: v for k, v in row.gres.items() if v} for row in self.client.nodes() if row.name == node)

    def free(self, node: str) -> dict[str, int]:
        """What Slurm can still give: after it has read its configuration again it may not count slices in use."""
        row = next(row for row in self.client.nodes() if row.name == node)
        free = {kind: count - row.used.get(kind, 0) for kind, count in row.gres.items() if kind != "none"}
        return {kind: count for kind, count in free.items() if count}

    def states(self) -> set[str]:
        return {flag for row in self.client.nodes() if row.name in self.nodes.gpus for flag in row.states}

    def state(self, job: int) -> str:
        return self.cluster.job_state(job)


@pytest.fixture
def site(new_cluster: Callable[..., Cluster]) -> Iterator[Site]:
    yield Site(new_cluster(nodes=2, gpus=2), 2)


def submit(site: Site, *options: str, seconds: int = 600, user: str = "mbalice") -> int:
    return site.cluster.submit(*options, wrap=f"sleep {seconds}", user=user)


def test_supply_follows_the_queue(site: Site) -> None:
    site.round()
    assert site.offered("n1")["4g.40gb"] == 2
    # the whole GPU first: small jobs may start on offered slots, on every GPU, before the next round
    jobs = [submit(site, "--gres=mig:7g.80gb:1")]
    site.until("the whole GPU", lambda: site.state(jobs[0]) == "RUNNING")
    jobs += [submit(site, f"--gres=mig:{kind}:1") for kind in ("3g.40gb", "1g.10gb.me", "1g.20gb")]
    jobs.append(submit(site, "--gres=mig:1g.10gb:3"))
    jobs.append(submit(site, "--gres=mig:1g.10gb:1", "--array=1-4"))
    site.until("all jobs run", lambda: sum(row.active for row in site.client.jobs()) == len(jobs) + 3)
    assert not site.nodes.misfits
    assert all(site.placed.values())
    assert not site.states() & {"DRAIN", "INVALID_REG", "DOWN"}


def test_gres_resets_are_corrected_and_no_node_drains(site: Site) -> None:
    site.round()
    small = submit(site, "--gres=mig:2g.20gb:1")
    large = submit(site, "--gres=mig:7g.80gb:1")
    site.until("both run", lambda: site.state(small) == site.state(large) == "RUNNING")
    site.round()
    wanted = {name: site.free(name) for name in site.nodes.gpus}
    before = {name: row.gres for name, row in ((r.name, r) for r in site.client.nodes())}

    def registered() -> int:
        known = diag(site.cluster).types.get("MESSAGE_NODE_REGISTRATION_STATUS")
        return known.count if known else 0

    def reset(what: str, nodes: int, do: Callable[[], object]) -> None:
        site.cluster.run(["sdiag", "--reset"])
        do()
        site.cluster.wait("slurmctld", lambda: bool(site.cluster.node_states()))
        # registrations, and the resets that they bring, come late
        site.until(f"registrations after {what}", lambda: registered() >= nodes)
        site.until(what, lambda: {n: site.free(n) for n in wanted} == wanted)
        assert not site.states() & {"DRAIN", "INVALID_REG"}, what
        assert site.state(small) == site.state(large) == "RUNNING", what

    reset("scontrol reconfigure", 2, lambda: site.cluster.run(["scontrol", "reconfigure"]))
    reset("a restart of slurmctld", 2, lambda: site.cluster.restart("slurmctld"))
    reset("a restart of slurmd", 1, lambda: site.cluster.restart("slurmd-n1"))
    assert {n: sum(g.values()) for n, g in before.items()} == {
        r.name: sum(r.gres.values()) for r in site.client.nodes()
    }
    job = submit(site, "--gres=mig:1g.10gb:1", seconds=1)
    site.until("a job after the restarts", lambda: site.state(job) == "COMPLETED")
    assert not site.nodes.misfits


def test_whole_gpu_job_is_not_starved_by_a_stream_of_small_jobs(new_cluster: Callable[..., Cluster]) -> None:
    site = Site(new_cluster(nodes=1, gpus=1), 1)
    site.round()
    opened, until_then = gate(site.cluster)  # opened when all the others are submitted
    for _ in range(7):
        site.cluster.submit("--gres=mig:1g.10gb:1", "-t", "1", wrap=until_then, user="mbalice")
    site.until("small jobs run", lambda: sum(r.active for r in site.client.jobs()) >= 5)
    large = submit(site, "--gres=mig:7g.80gb:1", "-t", "1", seconds=2)
    stream: set[int] = set()

    def waiting() -> int:
        return sum(row.pending and row.job_id in stream for row in site.client.jobs())

    def large_runs() -> bool:
        """The stream goes on all the time: Slurm may start a small job where one has just ended, before a round."""
        while waiting() < 14:
            stream.update(submit(site, "--gres=mig:1g.10gb:1", "-t", "1", seconds=3) for _ in range(7))
        return site.state(large) in ("RUNNING", "COMPLETING", "COMPLETED")

    assert not large_runs()
    assert "7g.80gb" not in site.offered("n1")
    opened.touch()
    site.until("the large job", large_runs)
    assert waiting() >= 7, "the large job came last"
    site.cluster.run(["scancel", "--state=PENDING", "--name=wrap"])
    site.until("the rest", lambda: not any(row.pending or row.active for row in site.client.jobs()))
    assert not site.nodes.misfits


def test_a_multi_node_job_gets_its_nodes(new_cluster: Callable[..., Cluster]) -> None:
    site = Site(new_cluster(nodes=2, gpus=1, catalog_nodes=2), 1)
    site.round()
    first = submit(site, "--gres=mig:1g.10gb:1", "-t", "1", seconds=20)
    site.until("the first runs", lambda: site.state(first) == "RUNNING")
    both = submit(site, "--gres=mig:7g.80gb:1", "-N", "2", "-t", "1", seconds=2)
    report = site.round()
    assert [len(r.places) for r in report.reservations] == [2]
    site.until("both nodes", lambda: site.state(both) in ("RUNNING", "COMPLETING", "COMPLETED"))
    assert not site.nodes.misfits


def test_components_offered_on_only_one_node_get_separate_nodes(
    new_cluster: Callable[..., Cluster],
) -> None:
    """Backfill looks for different nodes, so profiles that only one node offers would start neither component."""
    site = Site(new_cluster(nodes=2, gpus=2), 2)
    site.round()
    early = [submit(site, f"--gres=mig:{kind}:1", "-t", "1", seconds=2) for kind in ("3g.40gb", "1g.20gb")]
    site.until("the early ones", lambda: {site.state(job) for job in early} == {"COMPLETED"})
    offers = {kind: [n for n in site.nodes.gpus if kind in site.offered(n)] for kind in ("3g.40gb", "1g.20gb")}
    assert offers["3g.40gb"] == offers["1g.20gb"] and len(offers["3g.40gb"]) == 1
    job = submit(site, "-n1", "--gres=mig:3g.40gb:1", ":", "-n1", "--gres=mig:1g.20gb:1", seconds=600)
    site.until("both components", lambda: site.state(job) == site.state(job + 1) == "RUNNING")
    site.round()
    assert site.placed == {job: True, job + 1: True}
    assert not site.nodes.misfits


def test_heterogeneous_job_of_profiles_not_on_offer_completes(site: Site) -> None:
    site.round()
    job = submit(site, "-n1", "--gres=mig:1g.20gb:1", ":", "-n1", "--gres=mig:7g.80gb:1", seconds=2)
    site.until("the end", lambda: site.state(job) == site.state(job + 1) == "COMPLETED")
    assert not site.nodes.misfits


def test_first_component_does_not_take_the_only_node_for_the_second(
    new_cluster: Callable[..., Cluster],
) -> None:
    """Slurm takes n1, the first node that suits the first component, and does not revise that choice."""
    site = Site(new_cluster(nodes=2, gpus=1), 1)
    site.round()
    long = [submit(site, f"--gres=mig:{kind}:1", "-w", "n2") for kind in ("4g.40gb", "2g.20gb")]
    site.until("n2 is nearly full", lambda: {site.state(job) for job in long} == {"RUNNING"})
    assert all(site.offered(name).get("1g.10gb") for name in ("n1", "n2"))
    job = submit(site, "-n1", "--gres=mig:1g.10gb:1", ":", "-n1", "--gres=mig:3g.40gb:1")
    site.until("both components", lambda: site.state(job) == site.state(job + 1) == "RUNNING")
    assert {row.job_id: row.nodes for row in site.client.jobs() if row.het_job} == {job: ("n2",), job + 1: ("n1",)}
    assert not site.nodes.misfits


def test_heterogeneous_job_completes_with_the_whole_product(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(nodes=2, gpus=1, migbatch="all")
    options = ("-n1", "--gres=mig:3g.40gb:1", ":", "-n1", "--gres=mig:1g.20gb:1")
    show = "sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    job = cluster.submit(*options, wrap=f"srun --het-group=0 {show}; srun --het-group=1 {show}", user="mbalice")
    assert cluster.wait_job(job) == "COMPLETED", cluster.output(job)
    (first, first_devices), (second, second_devices) = (line.split() for line in cluster.output(job).splitlines())
    assert {first, second} == {"n1", "n2"}
    assert first_devices != second_devices


def test_many_jobs_of_all_sizes_complete_without_misfits(site: Site) -> None:
    site.round()
    kinds = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]
    for i in range(48):
        kind = kinds[i * 5 % len(kinds)]
        submit(site, f"--gres=mig:{kind}:1", seconds=1 + i % 3, user=("mbalice", "mbbob", "mbcarol")[i % 3])
    site.until("all are through", lambda: not any(slices(r.gres) for r in site.client.jobs()), 900)
    assert not site.nodes.misfits
    assert not site.states() & {"DRAIN", "INVALID_REG"}


def test_short_jobs_run_in_space_that_is_reserved_for_a_large_one(new_cluster: Callable[..., Cluster]) -> None:
    site = Site(new_cluster(nodes=1, gpus=2), 2)
    first = submit(site, "--gres=mig:7g.80gb:1", "--time=5", seconds=25)
    site.until("the first job", lambda: site.state(first) == "RUNNING")
    large = submit(site, "--gres=mig:7g.80gb:2", "--time=5", seconds=5)
    site.until("its reservation", lambda: any(r.job == large for r in site.loop.memory.supply.reservations))
    short = submit(site, "--gres=mig:1g.10gb:2", "--time=1", seconds=5)
    site.until("the short job", lambda: site.state(short) in ("RUNNING", "COMPLETED"))
    assert (site.state(first), site.state(large)) == ("RUNNING", "PENDING")
    site.until("the large job", lambda: site.state(large) in ("RUNNING", "COMPLETED"))
    assert not site.nodes.misfits


def test_a_job_starts_beside_slices_for_which_slurm_would_keep_the_nodes_free(site: Site) -> None:
    site.round()
    first = [submit(site, "--gres=mig:4g.40gb:1", "-t", "60", seconds=seconds) for seconds in (40, 600, 600, 600)]
    site.until("one runs on each GPU", lambda: all(site.state(job) == "RUNNING" for job in first))
    waiting = [submit(site, "--gres=mig:4g.40gb:1", "-t", "60") for _ in range(4)]
    longer = [submit(site, "--gres=mig:2g.20gb:1", "-t", "180") for _ in range(4)]
    site.until("the longer jobs run", lambda: all(site.state(job) == "RUNNING" for job in longer))
    assert {site.state(job) for job in waiting[1:]} == {"PENDING"}
    site.until("the next one has the place of the first", lambda: site.state(waiting[0]) == "RUNNING")
    assert not site.nodes.misfits
    assert not site.states() & {"DRAIN", "INVALID_REG", "DOWN"}
