"""More of the contract, for clients of a real Slurm: arrays, signals that arrive, holds, free text, statistics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, SlurmRefused
from tests.support.contract import NOBODY, offer, refused, row, until
from tests.support.real_world import RealWorld

TEXT = "x\x1f\x1e\n|%é'\"$(id) \\ NodeName=n1 State=DOWN\tz"


def tasks(world: RealWorld, array: int) -> dict[str, JobRow]:
    return {r.array_task: r for r in world.client.jobs() if r.array_job == array and r.array_task is not None}


def kinds(found: dict[str, JobRow]) -> dict[str, dict[str, int]]:
    return {task: gres.counts(r.gres, "mig") for task, r in found.items()}


def _traps(directory: Path) -> str:
    """A script that says when it is ready and when it got USR1, in a directory that everyone may write to."""
    directory.chmod(0o777)
    for parent in list(directory.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    task = "$SLURM_ARRAY_TASK_ID"
    return f"trap 'echo USR1 {task} >> {directory}/got' USR1; touch {directory}/up{task}; while :; do sleep 0.1; done"


class Arrays:
    """Tasks that wait share a row until they are told apart."""

    def test_waiting_tasks_share_a_row_and_running_ones_have_their_own(self, world: RealWorld) -> None:
        array = world.sbatch("--gres=mig:1g.10gb:8", "--array=0-9%3")
        for _ in world.passes():
            found = tasks(world, array)
            if len(found) == 3:
                break
        assert set(found) == {"0", "1", "2-9%3"}
        assert [found[t].state for t in ("0", "1", "2-9%3")] == ["RUNNING", "RUNNING", "PENDING"]
        assert [found[t].tasks for t in ("0", "1", "2-9%3")] == [1, 1, 8]
        assert [found[t].throttle for t in ("0", "1", "2-9%3")] == [None, None, 3]
        assert found["2-9%3"].job_id == array

    def test_the_arrays_id_types_all_waiting_tasks_anew_and_a_tasks_id_this_one(self, world: RealWorld) -> None:
        array = world.sbatch("--gres=mig:1g.10gb:8", "--array=0-5")
        for _ in world.passes():
            if len(tasks(world, array)) == 3:
                break
        world.client.update_jobs({str(array): {"Gres": "mig:4g.40gb:1"}, f"{array}_4": {"Gres": "mig:3g.40gb:1"}})
        assert kinds(tasks(world, array)) == {
            "0": {"1g.10gb": 8},
            "1": {"1g.10gb": 8},
            "2-3,5": {"4g.40gb": 1},
            "4": {"3g.40gb": 1},
        }
        world.client.update_jobs({str(array): {"Gres": "mig:2g.20gb:1"}})
        found = kinds(tasks(world, array))
        assert (found["2-3,5"], found["4"], found["0"]) == ({"2g.20gb": 1}, {"3g.40gb": 1}, {"1g.10gb": 8})
        said = refused(lambda: world.client.update_jobs({f"{array}_0": {"Gres": "mig:2g.20gb:1"}}), f"{array}_0")
        assert set(said.values()) == {"Job is no longer pending execution"}

    def test_the_throttle_of_an_array_can_be_changed_and_lifted(self, world: RealWorld) -> None:
        array = world.sbatch("--gres=mig:3g.40gb:1", "--array=1-8%2")
        for value, throttle, task in (("5", 5, "1-8%5"), ("0", None, "1-8"), ("1", 1, "1-8%1")):
            world.client.update_jobs({str(array): {"ArrayTaskThrottle": value}})
            assert {t: r.throttle for t, r in tasks(world, array).items()} == {task: throttle}

    def test_a_requeued_task_has_a_row_of_its_own(self, world: RealWorld) -> None:
        array = world.sbatch("--gres=mig:1g.10gb:14", "--array=0-5%4")
        for _ in world.passes():
            if len(tasks(world, array)) == 3:
                break
        world.client.requeue_all([f"{array}_0"])
        for _ in world.passes():
            found = tasks(world, array)
            if "0" in found and found["0"].pending:
                break
        assert (found["0"].restarts, found["0"].tasks) == (1, 1)
        world.client.update_jobs({f"{array}_0": {"Gres": "mig:2g.20gb:1", "StartTime": "now+2"}})
        found = tasks(world, array)
        assert kinds(found)["0"] == {"2g.20gb": 1}
        assert all(kind == {"1g.10gb": 14} for task, kind in kinds(found).items() if task != "0")
        assert all(r.restarts == 0 for task, r in found.items() if task != "0")
        assert [r.throttle for r in found.values() if r.job_id == array] == [4]

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


class Control:
    """One job from hold to its end, and what reaches it."""

    def test_a_text_of_a_user_stays_a_text(self, world: RealWorld) -> None:
        first, second = world.submit("mig:1g.10gb:1", hold=True), world.submit("mig:1g.10gb:1", hold=True)
        world.client.update_jobs({str(first): {"Comment": TEXT}, str(second): {"Comment": "a b", "Name": "n m"}})
        found = {r.job_id: (r.comment, r.name) for r in world.client.jobs()}
        assert found == {first: (TEXT, "wrap"), second: ("a b", "n m")}
        assert all(node.open for node in world.client.nodes() if node.name in world.nodes)

    def test_hold_and_release_and_cancel(self, world: RealWorld) -> None:
        job = world.submit("mig:1g.10gb:1", hold=True)
        held = row(world, job)
        assert held is not None
        assert (held.reason, held.priority, held.eligible) == ("JobHeldUser", 0, None)
        world.client.release(job)
        until(world, job, "RUNNING")
        world.client.cancel(job)
        for _ in world.passes():
            if row(world, job) is None:
                break
        world.client.cancel(job)
        world.client.cancel(NOBODY)
        with pytest.raises(SlurmRefused, match="Invalid job id"):
            world.client.update_job(NOBODY, Comment="x")

    def test_a_signal_reaches_the_script_and_its_children(self, world: RealWorld, tmp_path: Path) -> None:
        job = world.sbatch("--gres=mig:1g.10gb:1", wrap=_traps(tmp_path))
        for _ in world.passes():
            if list(tmp_path.glob("up*")):
                break
        world.client.signal(job, "USR1")
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

    def test_a_requeued_job_can_be_hastened(self, world: RealWorld) -> None:
        job = world.submit("mig:1g.10gb:1")
        until(world, job, "RUNNING")
        world.client.requeue(job)
        until(world, job, "PENDING")
        world.client.hasten(job)
        assert until(world, job, "RUNNING").restarts == 1

    def test_the_higher_tier_comes_first(self, world: RealWorld) -> None:
        low = world.submit("mig:3g.40gb:1", partition="train")
        high = world.submit("mig:3g.40gb:1")
        both = world.submit("mig:3g.40gb:1", partition="train,gpu")
        rows = [r for r in world.client.jobs() if r.pending]
        assert [r.job_id for r in rows] == [high, both, low]
        assert set(rows[1].partition.split(",")) == {"gpu", "train"}

    def test_a_shrinking_offer_and_a_growing_one_in_one_call(self, world: RealWorld) -> None:
        first, second = world.nodes
        world.client.set_gres({first: offer(world, first, **{"7g_80gb": 1}), second: offer(world, second)})
        found = {node.name: {k: v for k, v in node.gres.items() if v} for node in world.client.nodes()}
        total = sum(found[second].values())
        assert (found[first], found[second]) == ({"7g.80gb": 1, "none": total - 1}, {"none": total})

    def test_the_partition_of_those_who_name_none(self, world: RealWorld) -> None:
        assert world.client.default_partition() == "gpu"

    def test_calls_of_slurmctld_are_counted(self, world: RealWorld) -> None:
        before = world.client.diag()
        world.submit("mig:1g.10gb:1", hold=True)
        world.client.jobs()
        grown = world.client.diag().since(before)
        assert grown.types["REQUEST_SUBMIT_BATCH_JOB"].count == 1
        assert grown.types["REQUEST_JOB_INFO"].count >= 1
        assert grown.types["REQUEST_JOB_INFO"].seconds >= 0
        assert grown.users["root"].count >= 1

    def test_components_of_a_heterogeneous_job_know_each_other(self, world: RealWorld) -> None:
        job = world.sbatch("--gres=mig:3g.40gb:1", ":", "--gres=mig:2g.20gb:1")
        rows = world.client.jobs()
        assert {r.het_job for r in rows} == {job}
        assert [kinds({"": r})[""] for r in sorted(rows, key=lambda r: r.job_id)] == [{"3g.40gb": 1}, {"2g.20gb": 1}]
        assert replace(rows[0], job_id=0).user == "mbalice"
