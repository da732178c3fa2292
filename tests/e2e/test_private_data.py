"""PrivateData=jobs: migbatchd shows a pending job to the users to whom slurmctld shows it, and to nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import PYTHON, gate, sbatch

ASK = """
import http.client, socket, sys
link = http.client.HTTPConnection("localhost")
link.sock = socket.socket(socket.AF_UNIX)
link.sock.connect(sys.argv[1])
link.request("GET", sys.argv[2])
print(link.getresponse().read().decode())
"""


def test_private_jobs_are_shown_to_the_users_to_whom_slurm_shows_them(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(migbatch="all", nodes=1, gpus=1, users=4, dbd=True, options={"PrivateData": "jobs"})
    bed.run(["sacctmgr", "-i", "modify", "user", "mbcarol", "set", "adminlevel=operator"])
    bed.run(["sacctmgr", "-i", "add", "account", "other", "Cluster=migbatch"])
    users = [user.name for user in bed.users]
    bed.run(["sacctmgr", "-i", "add", "coordinator", f"names={users[3]}", "accounts=migbatch"])
    opened, waiting = gate(bed)
    holder, _ = sbatch(bed, "--gres=mig:7g.80gb:1", wrap=waiting)
    bed.wait_job(holder, "RUNNING")
    job, _ = sbatch(bed, "--gres=mig:7g.80gb:1", wrap="true")

    def why(user: str) -> str:
        socket_path = str(bed.product.state / "api.sock")
        output = bed.run([PYTHON, "-c", ASK, socket_path, f"/v1/why/{job}"], user).stdout
        return str(json.loads(output)["why"])

    bed.wait("a reason", lambda: "reserved" in why("mbalice"))
    shown_by_migbatchd = {user: "does not list" not in why(user) for user in users}
    shown = {
        user: str(job) in bed.run(["squeue", "-h", "-a", "-t", "all", "-o", "%A"], user).stdout.split()
        for user in users
    }
    assert shown == {"mbalice": True, "mbbob": False, "mbcarol": True, users[3]: True}, "Slurm itself"
    assert shown_by_migbatchd == shown
    assert "reserved" in bed.product.migbatch("why", str(job))
    opened.touch()
    for job_id in (holder, job):
        assert bed.wait_job(job_id) == "COMPLETED"
