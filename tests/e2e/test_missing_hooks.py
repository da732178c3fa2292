"""Nodes with other GPUs and without migbatch in a partition with MIG nodes: slurm.conf names a Prolog for all nodes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from slurm_migbatch.install import scripts
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.shim import JOB_SUBMIT, render
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.spec import Hooks
from slurm_migbatch.workload.catalog import Partition, SiteCatalog
from tests.support.end_to_end import sbatch
from tests.support.gpu_kinds import H100

pytestmark = pytest.mark.slurm


def test_update_that_slurm_refuses_drains_no_node_without_migbatch(
    slurm_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="migbatch-hooks-", dir="/run") as made:
        folder = Path(made)
        folder.chmod(0o755)
        driver, stub, script = folder / "nvidiactl", folder / "migbatch-prolog", folder / JOB_SUBMIT
        driver.touch()
        monkeypatch.setattr(scripts, "DRIVER", str(driver))
        stub.write_text(scripts.stub(str(folder / "hooks" / "prolog")))
        stub.chmod(0o755)
        site = SiteCatalog({"gpu": Partition("gpu", (H100,))})
        names = {"socket": str(folder / "none.sock"), "table": str(folder / "none.lua"), "catalog": site}
        script.write_text(render(JOB_SUBMIT, default_partition="gpu", policy=SubmitPolicy(), **names))
        hooks = Hooks(prolog=str(stub), epilog="/bin/true", task_prolog="/bin/true")
        spec = {"nodes": 1, "job_submit": str(script), "counts": {"1g.10gb": 7}, "hooks": hooks}
        with Cluster(None, slurm_root=slurm_root, **spec) as bed:
            job, _ = sbatch(bed, "--hold", wrap="true")
            change = ["scontrol", "update", f"JobId={job}", "Gres=mig:1g.10gb:1", "Nice=-100"]
            assert bed.run(change, "mbalice", check=False).returncode
            assert "[mig:1g.10gb:1#chg]" in bed.run(["squeue", "-h", "-o", "%k"]).stdout
            bed.run(["scontrol", "release", str(job)], "mbalice")
            assert bed.wait_job(job) == "COMPLETED"
            assert "drain" not in bed.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout
