"""What depends on Slurm's release: its metrics while supply changes, requests that 26.05 refuses, and uninstalling."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.slurmroot import SlurmRoot
from tests.support.end_to_end import PATIENCE_S, marked, on_offer, sbatch, settled, sights, until, untroubled

OPENMETRICS = (25, 11)
STEP_MANAGER = (24, 5)
PROFILES = ("7g.80gb", "4g.40gb", "3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb")


def findings(bed: Cluster, *options: str) -> list[dict[str, str]]:
    """The findings of doctor, whatever its exit code."""
    program = str(Path(sys.executable).with_name("migbatch"))
    line = bed.daemons.group.enter([program, "doctor", "-c", str(bed.product.config), "--json", *options])
    env = bed.client_env(inside=False)
    done = subprocess.run(line, env=env, cwd="/", capture_output=True, text=True, timeout=300, check=False)
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    assert done.returncode == (1 if any(finding["level"] == "FAIL" for finding in found) else 0)
    return found


def level(bed: Cluster, subject: str, *options: str) -> str:
    """The level of the one finding about a subject."""
    (found,) = [finding["level"] for finding in findings(bed, *options) if finding["subject"] == subject]
    return found


class Scraper(threading.Thread):
    """Queries each of the metrics of slurmctld repeatedly."""

    PATHS = ("/metrics/jobs", "/metrics/nodes", "/metrics/partitions", "/metrics/scheduler")

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port, self._over = port, threading.Event()
        self.answers: dict[str, int] = dict.fromkeys(self.PATHS, 0)
        self.nodes = ""
        self.errors: list[str] = []

    def run(self) -> None:
        while not self._over.is_set():
            for path in self.PATHS:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=60) as answer:
                        text = answer.read().decode()
                except OSError as error:
                    self.errors.append(f"{path}: {error}")
                    continue
                self.answers[path] += 1
                if path == "/metrics/nodes":
                    self.nodes = text
            self._over.wait(0.1)

    def stop(self) -> None:
        self._over.set()
        self.join(120)


def test_slurmctld_serves_its_metrics_while_supply_changes(
    new_cluster: Callable[..., Cluster], slurm_root: str
) -> None:
    """A slurmctld without metrics does not know the option; there supply changes without it."""
    has = SlurmRoot(Path(slurm_root) if slurm_root else None).version() >= OPENMETRICS
    options = {"MetricsType": "metrics/openmetrics"} if has else {}
    bed = new_cluster(migbatch="all", nodes=2, gpus=1, options=options)
    scrapers = [Scraper(bed.ports["slurmctld"]) for _ in range(2 if has else 0)]
    for scraper in scrapers:
        scraper.start()
    before = bed.daemons.get("slurmctld")
    assert before is not None
    for _ in range(3):
        for profile in PROFILES:
            jobs = [sbatch(bed, f"--gres=mig:{profile}:1", wrap="true", user=user.name)[0] for user in bed.users[:2]]
            for job in jobs:
                assert bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED"
                assert marked(bed, job) == (f"{profile}:1", f"{profile}:1")
    for scraper in scrapers:
        scraper.stop()
        assert not scraper.errors
        assert min(scraper.answers.values()) > 10, scraper.answers
        assert re.search(r"^slurm_nodes\S* \d", scraper.nodes, re.MULTILINE), scraper.nodes[:2000]
    after = bed.daemons.get("slurmctld")
    assert after is not None and after.id == before.id
    # doctor warns of metrics with 25.11.0 to 25.11.4, whose slurmctld may crash over them
    assert level(bed, "Slurm release") == "ok" or (has and bed.root.version() == (25, 11))
    settled(bed)
    untroubled(bed)


def test_scrontab_takes_a_request_and_one_hint(new_cluster: Callable[..., Cluster], slurm_root: str) -> None:
    if not Path(f"{slurm_root}/usr/bin/scrontab").exists():
        pytest.skip("this release of Debian has no scrontab")
    bed = new_cluster(migbatch="all", nodes=1, gpus=1, options={"ScronParameters": "enable"})
    entry = "#SCRON --gres=mig:auto --comment={} -t 2\n0 3 1 1 * true\n"
    done = bed.run(["scrontab", "-"], "mbalice", input=entry.format('"migbatch: mem=12gb"'), check=False)
    assert done.returncode and "Invalid option" in done.stderr
    assert (
        "1g.20gb for mig:auto" in bed.run(["scrontab", "-"], "mbalice", input=entry.format("migbatch:mem=12gb")).stderr
    )
    (job,) = bed.states()
    assert marked(bed, int(job)) == ("1g.20gb:1", "1g.20gb:1")


def test_filters_do_not_add_a_second_request_for_gpus(stack: Cluster) -> None:
    """26.05 refuses --gres=gpu with --gpus-per-node; what the filters make of one never has both."""
    both, message = sbatch(stack, "--gres=gpu:1", "--gpus-per-node=1", wrap="true")
    assert both == 0 and "mutually exclusive" in message if stack.root.version() >= (26, 5) else both, message
    for options in (["--gpus-per-node=1"], ["--gres=gpu:1"], ["--gpus=1"], ["--gpus-per-task=1", "-n1", "-N1"]):
        for command in (["srun", *options, "true"], ["salloc", *options, "srun", "true"]):
            done = stack.run(command, "mbbob", check=False)
            assert done.returncode == 0 and "mutually exclusive" not in done.stderr, (command, done.stderr)
        job, message = sbatch(stack, *options, wrap="srun true && echo stepped")
        assert job, message
        assert stack.wait_job(job, timeout=PATIENCE_S) == "COMPLETED", stack.output(job)
        assert stack.output(job).strip() == "stepped"
    settled(stack)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        (["--gpus=1"], 1),
        (["--gpus=1g.10gb:2", "-n2"], 2),
        (["--gpus=1", "--ntasks-per-gpu=1"], 1),
        (["--gres=gpu:1", "--ntasks-per-gpu=1"], 1),
        (["--gres=gpu:2", "--ntasks-per-gpu=1"], 2),
    ],
)
def test_scripts_with_cpus_and_memory_per_gpu_run_unchanged(stack: Cluster, options: list[str], tasks: int) -> None:
    """Slurm applies these options to gres/gpu only; steps would request GPUs that the job does not have."""
    step = "srun -J step sh -c 'test $SLURM_PROCID = 1 || scontrol -o show step $SLURM_JOB_ID.$SLURM_STEP_ID'"
    wrap = f"{step}; echo $SLURM_CPUS_PER_TASK; scontrol -o show job $SLURM_JOB_ID"
    job, message = sbatch(stack, *options, "--cpus-per-gpu=3", "--mem-per-gpu=50M", wrap=wrap)
    assert job and f"--cpus-per-task=3; --mem-per-gpu is granted as --mem={50 * tasks}M" in message, message
    assert stack.wait_job(job, timeout=PATIENCE_S) == "COMPLETED", stack.output(job)
    of_step, per_task, of_job = (line for line in stack.output(job).splitlines() if not line.startswith("srun: "))
    assert f" CPUs={3 * tasks} " in of_step
    assert per_task == "3"
    assert f" NumCPUs={3 * tasks} " in of_job and f" MinMemoryNode={50 * tasks}M " in of_job, of_job


def test_user_of_tasks_for_each_gpu_alone_is_told_to_state_the_slices(stack: Cluster) -> None:
    job, message = sbatch(stack, "-n2", "--ntasks-per-gpu=1", wrap="true")
    assert not job and "state their number too, --gpus=<number>" in message, message


def test_job_that_such_a_script_submits_starts_its_steps(stack: Cluster) -> None:
    inner = "sbatch --wait -o inner.out --gres=mig:1g.10gb --wrap 'srun echo stepped'; cat inner.out"
    job, message = sbatch(stack, "--gpus=1", "--cpus-per-gpu=3", wrap=inner)
    assert job and stack.wait_job(job, timeout=PATIENCE_S) == "COMPLETED", message
    assert stack.output(job).splitlines()[-1] == "stepped"


def test_jobs_get_their_slices_share_of_slurms_defaults_for_each_gpu(new_cluster: Callable[..., Cluster]) -> None:
    options = {"DefCpuPerGPU": "7", "DefMemPerGPU": "70", "SelectTypeParameters": "CR_CPU_Memory"}
    bed = new_cluster(migbatch="all", nodes=1, gpus=1, options=options)
    show = "scontrol -o show job $SLURM_JOB_ID"
    for request, cpus, memory in (("--gpus=1", 7, 70), ("--gres=mig:3g.40gb", 3, 30), ("--gres=mig:1g.10gb", 1, 10)):
        job, message = sbatch(bed, request, wrap=show)
        assert job and bed.wait_job(job, timeout=PATIENCE_S) == "COMPLETED", message
        shown = [bed.output(job)] + [
            bed.run([command, request, "sh", "-c", show], "mbbob").stdout for command in ("salloc", "srun")
        ]
        assert all(f" NumCPUs={cpus} " in text and f" MinMemoryNode={memory}M " in text for text in shown), shown
    step = bed.run(["srun", "--gpus=1", "sh", "-c", "scontrol -o show step $SLURM_JOB_ID.0"], "mbbob").stdout
    assert " CPUs=7 " in step


def test_parallel_steps_get_different_slices_with_a_step_manager(
    new_cluster: Callable[..., Cluster], slurm_root: str
) -> None:
    if SlurmRoot(Path(slurm_root) if slurm_root else None).version() < STEP_MANAGER:
        return
    options = {"SlurmctldParameters": "enable_stepmgr", "PrologFlags": "Contain"}
    bed = new_cluster(nodes=1, gpus=1, migbatch="all", options=options)
    step = "srun --exact -n1 --gres=mig:1 sh -c 'echo task $SLURM_STEP_ID $CUDA_VISIBLE_DEVICES; sleep 3' &"
    job, message = sbatch(bed, "-n2", "--gres=mig:1g.10gb:2", wrap="\n".join([step, step, "wait"]))
    assert job, message
    assert bed.wait_job(job) == "COMPLETED", bed.output(job)
    seen = sights(bed.output(job))
    assert [len(seen[task]) for task in ("task 0", "task 1")] == [1, 1] and seen["task 0"] != seen["task 1"], seen
    untroubled(bed)


def test_doctor_names_jobs_with_slices_that_prevent_uninstalling(new_cluster: Callable[..., Cluster]) -> None:
    """Once doctor names none, slurmctld starts without mig and no job is affected."""
    bed = new_cluster(migbatch="all", nodes=1, gpus=1)
    assert level(bed, "leaving", "--leaving") == "ok"
    held, _ = sbatch(bed, "--gres=mig:1g.10gb:1", "--hold", wrap="true")
    running, _ = sbatch(bed, "--gres=mig:1g.10gb:1", wrap="sleep 600")
    other, _ = sbatch(bed, "--hold", wrap="true")
    bed.wait_job(running, "RUNNING", timeout=PATIENCE_S)
    message = " ".join(finding["text"] for finding in findings(bed, "--leaving") if finding["level"] == "FAIL")
    assert f"{held} (pending)" in message and f"{running} (running)" in message and f"{other} (" not in message
    bed.run(["scancel", str(held), str(running)])
    until("nothing in the way", lambda: [finding["level"] for finding in findings(bed, "--leaving")] == ["ok"])
    settled(bed)
    for daemon in ("migbatchd", "agent-n1", "slurmd-n1"):
        bed.daemons.stop(daemon)
    without_mig(bed)
    bed.daemons.restart("slurmctld")
    until("slurmctld", lambda: bed.run(["scontrol", "ping"], check=False).stdout.count("UP") == 1)
    assert bed.job_state(other) == "PENDING"
    assert not on_offer(bed, "n1")


def without_mig(bed: Cluster) -> None:
    """Take the lines out of slurm.conf and gres.conf."""
    conf = bed.slurm_conf
    kept = [
        re.sub(r"\s[Gg]res=\S+", "", line).replace(",no-mig-slice-free[1-2]", "")
        for line in conf.read_text().splitlines()
        if line != "Include migbatch.conf"
    ]
    conf.write_text("\n".join(kept) + "\n")
    (conf.parent / "gres.conf").write_text("")
