"""A private cluster works like any cluster and leaves nothing behind."""

from __future__ import annotations

import pwd
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.testbed import registry
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.errors import TestbedError
from slurm_migbatch.testbed.proc import start_time
from slurm_migbatch.testbed.process_group import CgroupProcessGroup

pytestmark = pytest.mark.slurm

# Slurm may show a node that has free CPUs as allocated (its own cache), so the two mean the same here.
BUSY = ({"n1": "mixed"}, {"n1": "allocated"})


def test_a_user_runs_a_job_in_a_slice(cluster: Cluster) -> None:
    job = cluster.submit("--gres=mig:1g.10gb:1", wrap="id -un; echo $SLURMD_NODENAME", user="mbbob")
    assert cluster.wait_job(job) == "COMPLETED"
    out = (cluster.home("mbbob") / f"slurm-{job}.out").read_text().split()
    assert out[0] == "mbbob"
    assert out[1] in cluster.spec.node_names


def test_down_leaves_no_process_user_group_or_file(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1, gpus=1)
    bed.wait_job(bed.submit(wrap="setsid sleep 600 & sleep 600"), "RUNNING")
    group = bed.daemons.group
    assert len(group.members()) > 3
    record = registry.find(bed.directory)
    assert record is not None
    bed.down()
    assert group.members() == set()
    assert not bed.directory.exists()
    assert not record.path.exists()
    assert not record.group or not Path(record.group).exists()
    assert str(bed.directory) not in Path("/proc/self/mounts").read_text()
    others = {name for other in registry.records() for name in other.users}
    assert not {entry.pw_name for entry in pwd.getpwall()} & (set(record.users) - others)


def test_down_finds_all_processes_without_control_groups_too(
    new_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CgroupProcessGroup, "hierarchy", staticmethod(lambda: None))
    bed = new_cluster(nodes=1, gpus=1)
    bed.wait_job(bed.submit(wrap="setsid sleep 600 & env -i sleep 600"), "RUNNING")
    bed.wait("the job's processes", lambda: "sleep 600" in proc_texts(bed.daemons.group.members(), "cmdline"))
    members = bed.daemons.group.members()
    assert {"slurmctld", "slurmd", "slurmstepd", "munged"} <= proc_texts(members, "comm")
    bed.down()
    assert [pid for pid in members if start_time(pid) is not None] == []
    assert not bed.directory.exists()


def proc_texts(pids: set[int], what: str) -> set[str]:
    """What this file in /proc says for each of the processes that is alive."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            found.add(Path(f"/proc/{pid}/{what}").read_text().replace("\0", " ").strip())
    return found


def test_wrappers_work_from_any_directory(cluster: Cluster, tmp_path: Path) -> None:
    for where in (tmp_path, Path("/"), Path(__file__).parent):
        done = subprocess.run([cluster.bin / "sinfo", "-h", "-n", "n1"], cwd=where, capture_output=True, text=True)
        assert "n1" in done.stdout, done.stderr


def test_two_clusters_at_once_are_independent(new_cluster: Callable[..., Cluster]) -> None:
    first, second = new_cluster(nodes=1), new_cluster(nodes=1)
    assert not set(first.ports.values()) & set(second.ports.values())
    job = first.submit("--gres=mig:1g.10gb:1", wrap="sleep 600")
    first.wait_job(job, "RUNNING")
    assert second.run(["squeue", "-h"]).stdout == ""
    assert first.machine("n1").dump()["boot_id"] != second.machine("n1").dump()["boot_id"]
    second.down()
    # The users are shared: they stay as long as a cluster needs them.
    assert first.run(["id", "-un"], "mbalice").stdout.strip() == "mbalice"
    assert first.job_state(job) == "RUNNING"


def test_running_job_survives_daemon_restarts_and_no_node_is_drained(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1)
    job = bed.submit("--gres=mig:1g.10gb:2", wrap="sleep 600")
    bed.wait_job(job, "RUNNING")
    for name in ("slurmd-n1", "slurmctld"):
        bed.restart(name)
        bed.wait("the node", lambda: bed.node_states() in BUSY)
        assert bed.job_state(job) == "RUNNING"
    bed.kill("slurmctld")
    assert bed.node_states() == {}
    bed.restart("slurmctld")
    bed.wait("the node", lambda: bed.node_states() in BUSY)
    assert bed.job_state(job) == "RUNNING"


def test_gres_counts_can_change_under_a_running_job(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1)
    bed.wait_job(bed.submit("--gres=mig:1g.10gb:1", wrap="sleep 600"), "RUNNING")
    waiting = bed.submit("--gres=mig:7g.80gb:1", wrap="true")
    assert bed.job_state(waiting) == "PENDING"
    bed.run(["scontrol", "update", "NodeName=n1", "Gres=mig:7g.80gb:1,mig:1g.10gb:1,mig:none:12"])
    assert bed.wait_job(waiting) == "COMPLETED"
    bed.wait("the node", lambda: bed.node_states() in BUSY)


def test_accounting_records_users_and_slices(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1, dbd=True)
    job = bed.submit("--gres=mig:1g.10gb:3", wrap="true", user="mbcarol")
    assert bed.wait_job(job) == "COMPLETED"
    ask = ["sacct", "-n", "-P", "-X", "-j", str(job), "-o", "User,Account,State,AllocTRES"]
    bed.wait("accounting", lambda: "COMPLETED" in bed.run(ask).stdout)
    user, account, state, tres = bed.run(ask).stdout.strip().split("|")
    assert (user, account, state) == ("mbcarol", "migbatch", "COMPLETED")
    assert "gres/mig:1g.10gb=3" in tres.split(",")


def test_error_for_an_ended_process_has_its_name_and_last_output(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(nodes=1)
    bed.spawn("short", ["sh", "-c", "sleep 2; echo the reason >&2; exit 3"])
    with pytest.raises(TestbedError, match="short has ended: the reason"):
        bed.wait("anything", lambda: False)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"gpu_type": "h999"}, "h999"),
        ({"slurm_root": "/nonexistent"}, "testbed root"),
        ({"users": 99}, "at most"),
        ({"slurm_user": "nobodyhere"}, "no user 'nobodyhere', as whom slurmctld runs"),
        ({"options": {"NoSuchKey": "1"}}, "NoSuchKey"),
    ],
)
def test_impossible_test_bed_is_an_error_and_leaves_nothing(spec: dict[str, Any], why: str) -> None:
    bed = Cluster(nodes=1, **spec)
    with pytest.raises(Exception, match=why):
        bed.up()
    assert not bed.directory.exists()
    assert registry.find(bed.directory) is None


def test_foreign_directories_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    bed = Cluster(tmp_path, nodes=1)
    with pytest.raises(TestbedError, match=r"not empty|walk through|too long"):
        bed.up()
    bed.down()
    assert (tmp_path / "precious").exists()
