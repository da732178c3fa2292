"""A real Slurm read by a client and by Slurm's commands, to compare what they show."""

from __future__ import annotations

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import JobRow, SlurmClient
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.contract import tasks
from tests.support.real_world import RealWorld


class ComparedWorld(RealWorld):
    def __init__(self, cluster: Cluster, client: SlurmClient) -> None:
        super().__init__(cluster, client)
        self.commands = CliClient(cluster.bin, cluster.slurm_conf)

    def same_rows(self) -> list[JobRow]:
        """Return the rows, read while the queue does not change; client and commands must agree."""
        for _ in self.passes():
            before, rows, after = self.commands.jobs(), self.client.jobs(), self.commands.jobs()
            if before == after:
                assert rows == after
                return rows
        raise AssertionError("the queue does not come to rest")


#: options of jobs whose rows are hard to read
TELLING: tuple[list[str], ...] = (
    ["--gres=mig:1g.10gb:1"],
    ["--gres=mig:1g.10gb:1,mig:none:0", "-n", "3", "-N", "1", "-t", "10"],
    ["--gres=mig:1", "-N", "2", "-n", "2"],
    ["--gres=mig"],
    ["--gres=mig:7g.80gb:1,mig:1g.10gb:1", "-t", "1-0", "-p", "train,gpu"],
    ["--gres=mig:3g.40gb:2", "--begin=now+1hour", "--comment=None", "-J", "None"],
    ["--gres=mig:1g.10gb:1", "-H", "--comment=a\x1fb\x1e|%\nNodeName=x \u00e9", "-J", "two\nlines"],
    ["--gres=mig:1g.20gb:1", "--array=0-400:2%4", "-t", "5"],
    ["--gres=mig:7g.80gb:1", "--array=1,3,5-9"],
    ["--gres=mig:1g.10gb:9", "--array=0-3%2"],
    ["--gres=mig:1g.10gb:1", "--dependency=afterany:1", "-p", "train"],
    ["--gres=mig:1g.10gb:1", "-w", "n2", "-p", "train"],
    ["--gres=mig:3g.40gb:1", ":", "--gres=mig:2g.20gb:1"],
    [],
    ["--gres=mig:7g.80gb:1", "--mem=3G", "-N", "2", "-n", "2"],
    ["--gres=mig:7g.80gb:1", "--mem-per-cpu=3333M", "-n", "2"],
    ["--gres=mig:1g.10gb:1", "-H", "--exclusive"],
    ["--gres=mig:1g.10gb:1", "-H", "--exclusive=user"],
)
#: 22.05 refuses these at submission; pyslurm shows nothing of them
UNCOUNTED = (["--gres=mig:1g.10gb"], ["--gres=mig:7g.80gb,mig:1g.10gb:1"], ["--gres=mig:3g.40gb,mig:2g.20gb"])


def rows_are_those_of_the_commands(world: ComparedWorld) -> None:
    """Assert that client and commands agree on jobs in many states, before and after changes, and on nodes."""
    ended = world.sbatch(wrap="false")
    for _ in world.passes():
        if ended not in {row.job_id for row in world.commands.jobs()}:
            break
    uncounted = UNCOUNTED if world.client.version() > (22, 5) else ()
    jobs = [world.sbatch(*options) for options in (*TELLING, *uncounted)]
    for _ in world.passes():
        if {row.state for row in world.commands.jobs()} == {"PENDING", "RUNNING"}:
            break
    rows = world.same_rows()
    assert {row.job_id for row in rows} >= set(jobs)
    assert ended not in {row.job_id for row in rows}
    assert {row.state for row in rows} == {"PENDING", "RUNNING"}
    array = jobs[7]
    world.client.update_jobs({f"{array}_4": {"Gres": "mig:3g.40gb:1"}, str(jobs[5]): {"Gres": "mig:2g.20gb:1"}})
    assert "4" in tasks(world, array)
    assert sum(row.tasks for row in tasks(world, array).values()) == 201
    world.same_rows()
    running = next(row for row in rows if row.state == "RUNNING" and row.array_job is None)
    world.client.requeue_all([running.job_id])
    world.same_rows()
    for _ in world.passes():  # a job may start or end between the two listings
        from_client, from_commands = world.client.nodes(), world.commands.nodes()
        if from_client == from_commands:
            break
    assert from_client == from_commands
    assert world.client.version() == world.commands.version()
