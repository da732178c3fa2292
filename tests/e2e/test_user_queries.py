"""What a plain user can query on a login node: by the query service, with click and rich, without a database."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import account, gate, sbatch
from tests.support.login_node import LoginNode

HINTS = "migbatch: model=bert-large batch=32 slo=200ms"
# 23.11 clears the reason of a job that its backfill scheduler has looked at
REASONS = ("Resources", "ReqNodeNotAvail", "Priority", "None")
SECRETS = ("bert-large", "secretname", "slo=")


def test_unprivileged_user_sees_own_jobs_but_not_those_of_others(new_cluster: Callable[..., Cluster]) -> None:
    bed = new_cluster(migbatch="all", nodes=1, gpus=1, users=2, options={"PrivateData": "jobs"})
    login = LoginNode(bed)
    record = bed.product.state / "migbatch.db"
    if record.exists():  # none where the record is on a server
        denied = bed.run(["cat", str(record)], "mbalice", check=False)
        assert "Permission denied" in denied.stderr, "the user may not read the record"
    opened, until = gate(bed)
    holder, _ = sbatch(bed, "--gres=mig:7g.80gb:1", "--job-name=secretname", wrap=until)
    bed.wait_job(holder, "RUNNING")
    job, _ = sbatch(bed, "--gres=mig:auto", f"--comment={HINTS}", "--job-name=secretname", wrap="true")
    bed.wait(
        "the holder in the record",
        lambda: "7g.80gb" in login.out("mbalice", "migacct", "-n", "-j", str(holder), "-o", "profile"),
    )
    bed.wait("a reason", lambda: "not been planned" not in login.out("mbalice", "why", str(job)))

    why = login.out("mbalice", "why", str(job))
    assert f"{job} of mbalice" in why and "bert-large/infer" in why and "Supply:" in why and "1g.20gb" in why
    row = login.out("mbalice", "migacct", "-n", "-P", "-j", f"{holder},{job}", "-o", "jobid,jobname,profile,state")
    assert row.splitlines()[0] == f"{holder}|secretname|7g.80gb|RUNNING"
    shown = login.out("mbalice", "show", str(holder))
    assert "mbalice/" in shown and "7g.80gb at 0:8 of GPU 0 on n1" in shown
    assert f"7g.80gb {holder}" in login.out("mbalice", "nodes")
    assert login.out("mbalice", "loans").startswith("JOBID")
    page = login.out("mbalice", "top", "-b", "-n", "1")
    assert f"n1    0 |=7g.80gb {holder} mbalice=" in page and "\x1b" not in page
    (waits,) = re.findall(r"^1g\.20gb +1 .*$", page, re.MULTILINE)
    assert any(reason in waits for reason in REASONS)
    assert re.search(rf"start +n1 +{holder} mbalice +7g\.80gb", page)
    explained = login.out("mbalice", "explain", "--gres=mig:auto", "--comment", HINTS)
    assert "mig:1g.20gb:1 (fits)" in explained and "PROFILE" in explained
    assert login.run("mbalice", "explain", "--gres=mig:1g").returncode == 3, "refused"
    assert login.out("mbalice", "why", str(job), at="controller").splitlines()[:4] == why.splitlines()[:4]
    assert login.out(None, "migacct", "-n", "-X", "-o", "jobname", "-j", str(holder)).split() == ["secretname"]

    bob = {
        "migacct": login.run("mbbob", "migacct", "-n", "-a", "-S", "now-1hour"),
        "of alice": login.run("mbbob", "migacct", "-n", "-u", "mbalice", "-S", "now-1hour"),
        "show": login.run("mbbob", "show", str(holder)),
        "why": login.run("mbbob", "why", str(job)),
        "nodes": login.run("mbbob", "nodes"),
        "top": login.run("mbbob", "top", "-b", "-n", "1"),
        "loans": login.run("mbbob", "loans", "--all"),
    }
    assert (bob["migacct"].stdout, bob["of alice"].stdout) == ("", "")
    assert bob["of alice"].stderr == "" and bob["of alice"].returncode == 0
    assert f"job {holder} is not in the record" in bob["show"].stderr
    assert f"job {job} is not in the record" in bob["why"].stderr, "as of one that does not exist"
    assert "|7g.80gb -" in bob["nodes"].stdout and str(holder) not in bob["nodes"].stdout.split("7g.80gb")[1]
    assert "n1    0 |=7g.80gb -===" in bob["top"].stdout and "Waiting 0 " in bob["top"].stdout
    assert bob["loans"].stdout.split() == bob["loans"].stdout.split()[:10], "the header alone"
    for done in bob.values():
        assert not any(word in done.stdout + done.stderr for word in (*SECRETS, "mbalice")), done
    opened.touch()
    for job_id in (holder, job):
        assert bed.wait_job(job_id) == "COMPLETED"
    assert account(bed, job, decided=True)["profile"] == "1g.20gb"
    found = json.loads(login.out("mbalice", "migacct", "--json", "-j", str(job)))["jobs"]
    assert [row_found["state"] for row_found in found] == ["COMPLETED"]
    assert "Traceback" not in bed.daemons.log("migbatchd").read_text(errors="replace")
