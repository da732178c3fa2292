"""More of the contract, for clients of a real Slurm: arrays, signals that arrive, holds, free text, statistics."""

from __future__ import annotations

import shlex
from pathlib import Path

from slurm_migbatch.lab.bench.rpcs import diag
from tests.support.contract import row, until
from tests.support.real_world import RealWorld

TEXT = "x\x1f\x1e\n|%é'\"$(id) \\ NodeName=n1 State=DOWN\tz"


def _traps(directory: Path) -> str:
    """Return a script that creates files when it is ready and when it gets USR1, in a world-writable directory."""
    directory.chmod(0o777)
    for parent in list(directory.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    task = "$SLURM_ARRAY_TASK_ID"
    return f"trap 'echo USR1 {task} >> {directory}/got' USR1; touch {directory}/up{task}; while :; do sleep 0.1; done"


class Control:
    """Control of a job from its hold to its end, and delivery of signals."""

    def test_a_text_of_a_user_stays_a_text(self, world: RealWorld) -> None:
        first, second = world.submit("mig:1g.10gb:1", hold=True), world.submit("mig:1g.10gb:1", hold=True)
        world.client.update_jobs({str(first): {"Comment": TEXT}, str(second): {"Comment": "a b", "Name": "n m"}})
        found = {r.job_id: (r.comment, r.name) for r in world.client.jobs()}
        assert found == {first: (TEXT, "wrap"), second: ("a b", "n m")}
        assert all(node.open for node in world.client.nodes() if node.name in world.nodes)

    def test_a_signal_reaches_the_script_and_its_children(self, world: RealWorld, tmp_path: Path) -> None:
        job = world.sbatch("--gres=mig:1g.10gb:1", wrap=_traps(tmp_path))
        for _ in world.passes():
            if list(tmp_path.glob("up*")):
                break
        world.client.signal_all([job], "USR1")
        for _ in world.passes():
            if (tmp_path / "got").exists() and (tmp_path / "got").read_text():
                break
        assert (tmp_path / "got").read_text().split() == ["USR1"]
        assert until(world, job, "RUNNING").restarts == 0

    def test_a_signal_to_the_steps_does_not_reach_the_script(self, world: RealWorld, tmp_path: Path) -> None:
        step = f"srun --overlap sh -c {shlex.quote(_traps(tmp_path))}"
        job = world.sbatch("--gres=mig:1g.10gb:1", wrap=f"trap 'echo script >> {tmp_path}/got; exit 1' USR1\n{step}")
        for _ in world.passes():
            if list(tmp_path.glob("up*")):
                break
        world.client.signal_all([job], "USR1", script=False)
        for _ in world.passes():
            if (tmp_path / "got").exists() and (tmp_path / "got").read_text():
                break
        assert (tmp_path / "got").read_text().split() == ["USR1"]
        assert until(world, job, "RUNNING").restarts == 0

    def test_a_job_that_has_completed_is_not_started_again(self, world: RealWorld) -> None:
        job = world.sbatch("--gres=mig:1g.10gb:1", wrap="true")
        world.cluster.wait_job(job)
        world.client.requeue_all([job])
        assert row(world, job) is None
        assert world.cluster.job_state(job) in ("COMPLETED", "COMPLETING")

    def test_calls_of_slurmctld_are_counted(self, world: RealWorld) -> None:
        before = diag(world.cluster)
        world.submit("mig:1g.10gb:1", hold=True)
        world.client.jobs()
        grown = diag(world.cluster).since(before)
        assert grown.types["REQUEST_SUBMIT_BATCH_JOB"].count == 1
        assert grown.types["REQUEST_JOB_INFO"].count >= 1
        assert grown.types["REQUEST_JOB_INFO"].seconds >= 0
        assert grown.users["root"].count >= 1

    def test_a_signal_reaches_a_task_once(self, world: RealWorld, tmp_path: Path) -> None:
        array = world.sbatch("--gres=mig:1g.10gb:1", "--array=0-1", wrap=_traps(tmp_path))
        for _ in world.passes():
            if len(list(tmp_path.glob("up*"))) == 2:
                break
        world.client.signal_all([f"{array}_1"], "USR1")
        for _ in world.passes():
            if (tmp_path / "got").exists() and (tmp_path / "got").read_text():
                break
        assert (tmp_path / "got").read_text().split() == ["USR1", "1"]
