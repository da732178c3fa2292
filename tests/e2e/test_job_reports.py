"""What a job achieves reaches the record, by its own reports and by what the node saw; reports of others do not."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import account, cancel, gate, holding, sbatch, settled, until

PID = 2**22 + 9
"""Above any pid: the simulated driver keeps such a process until it is ended."""

APPEND = """python3 -c 'import os; open(os.environ["MIGBATCH_PROGRESS"], "a").write("items=1200 seconds=60\\n")'"""

ATTEMPTS = """
import errno, os, sys
path, own = sys.argv[1:]
def write(flags):
    os.close(os.open(path, os.O_WRONLY | flags))
    print("written")
for call in (
    lambda: write(os.O_APPEND), lambda: write(os.O_TRUNC), lambda: os.truncate(path, 0), lambda: os.chmod(path, 0o666),
    lambda: os.chown(path, os.getuid(), -1), lambda: os.unlink(path), lambda: os.rename(path, path + "x"),
    lambda: os.rename(own, path), lambda: os.link(own, path + "x"), lambda: os.symlink(own, path + "x"),
    lambda: os.mkfifo(path + "x"), lambda: os.open(path, os.O_RDONLY),
):
    try:
        call()
        print("done")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
REPLACE = """
import errno, os, sys
path = sys.argv[1]
for call in (
    lambda: os.unlink(path), lambda: os.rename(path, path + "x"), lambda: os.symlink("/etc/shadow", path + "x"),
    lambda: os.mkfifo(path + "x"), lambda: os.link(path, path + "x"), lambda: os.chmod(os.path.dirname(path), 0o777),
):
    try:
        call()
        print("done")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


@pytest.fixture(autouse=True)
def no_jobs_left(stack: Cluster) -> Iterator[None]:
    """Cancel what a test left running, so that it does not affect the next one."""
    yield
    cancel(stack)


def progress_file(bed: Cluster, node: str, job: int) -> Path:
    return bed.node_directory(node) / "run" / "progress" / f"{job}.0"


def python(bed: Cluster, user: str, code: str, *arguments: object) -> set[str]:
    """What a Python program of a user prints."""
    return set(bed.run(["/usr/bin/python3", "-c", code, *map(str, arguments)], user).stdout.split())


def test_reports_of_a_job_and_measurements_of_the_driver_are_recorded(stack: Cluster) -> None:
    go, wait = gate(stack)
    job, _ = sbatch(
        stack,
        "--gres=mig:auto",
        "--comment=migbatch: model=bert-large batch=32 slo=200ms",
        wrap=f'echo "items=600 seconds=30 batch=32 latency_ms=12.5" >> $MIGBATCH_PROGRESS; {wait}; {APPEND}',
    )
    stack.wait_job(job, "RUNNING")
    node, uuid = holding(stack, job)
    assert progress_file(stack, node, job).stat().st_uid == stack.user("mbalice").uid
    stack.machine(node).start_process(uuid, PID, memory_mib=2048)
    try:
        peaks = stack.node_directory(node) / "run" / "peaks"
        until("a look at its memory", lambda: peaks.exists() and uuid in peaks.read_text())
    finally:
        stack.machine(node).end_process(PID)
    go.touch()
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    row = account(stack, job)
    until("the last report", lambda: account(stack, job)["measured_items"] == 1200)
    row = account(stack, job)
    assert (row["measured_throughput_per_s"], row["measured_latency_ms"]) == (20, 12.5)
    assert row["measured_memory_mib"] == 2048
    assert row["measured_by"] == ["driver", "job"]
    assert row["prediction_error"] == pytest.approx(20 / row["predicted_throughput_per_s"] - 1)
    shown = stack.product.migbatch("show", "-c", str(stack.product.config), str(job))
    assert "1200 items" in shown and "reported by the job" in shown and "relative to the prediction" in shown
    assert not progress_file(stack, node, job).exists()
    settled(stack)


def test_user_cannot_report_for_the_job_of_another_user(stack: Cluster) -> None:
    go, wait = gate(stack)
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", wrap=f'echo "items=5 seconds=1" >> $MIGBATCH_PROGRESS\n{wait}')
    stack.wait_job(job, "RUNNING")
    node, _ = holding(stack, job)
    path = progress_file(stack, node, job)
    until("its report", lambda: path.stat().st_size > 0)
    forged = stack.home("mbbob") / "forged"
    stack.run(["sh", "-c", f"echo items=666 seconds=1 > {forged}"], "mbbob")
    assert python(stack, "mbbob", ATTEMPTS, path, forged) <= {"EACCES", "EPERM", "EXDEV"}
    assert python(stack, "mbalice", REPLACE, path) <= {"EACCES", "EPERM"}
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(str(job))] == [f"{job}.0"]
    go.touch()
    assert stack.wait_job(job) == "COMPLETED"
    until("the report in the record", lambda: account(stack, job)["measured_items"] == 5)
    settled(stack)


def test_impossible_reports_are_refused_and_shown_as_doubts(stack: Cluster) -> None:
    lines = ["items=-5", "items=nan", "items=5; touch /tmp/x", "$(id)", "items=1e15 seconds=0.000001", "\\0\\0\\0"]
    wrap = "\n".join(f"printf '%b\\n' '{line}' >> $MIGBATCH_PROGRESS" for line in lines)
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", wrap=wrap)
    assert stack.wait_job(job) == "COMPLETED"
    until("the report in the record", lambda: account(stack, job)["measured_items"] is not None)
    assert account(stack, job)["measured_throughput_per_s"] is None
    shown = json.loads(stack.product.migbatch("show", "-c", str(stack.product.config), "--json", str(job)))
    doubts = shown["runs"][0]["measured_facts"]["doubts"]
    assert any("lines in its progress file" in doubt for doubt in doubts), doubts
    assert any("throughput_per_s" in doubt for doubt in doubts), doubts
    settled(stack)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 24 MiB for a node's journal, in a place that --slurm-root has too."""
    path = Path(f"/var/tmp/migbatch-small{time.monotonic_ns()}")
    path.mkdir(mode=0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=755", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
        path.rmdir()


FLOOD = """
import os, sys
keep = os.open(os.environ["MIGBATCH_PROGRESS"], os.O_WRONLY | os.O_APPEND)
try:
    os.link(os.environ["MIGBATCH_PROGRESS"], sys.argv[1])
except OSError:
    pass
block = b"items=1 seconds=1\\n" * 3640
for _ in range(2000):
    try:
        os.write(keep, block)
    except OSError:
        block = block[: len(block) // 2]
        if not block:
            break
"""


@pytest.mark.parametrize("migbatch", ["hooks", "all"])
def test_endless_reports_neither_keep_the_slice_nor_drain_the_node(
    new_cluster: Callable[..., Cluster], small_disk: Path, migbatch: str
) -> None:
    """Journal and reports were once on the same disk."""
    bed = new_cluster(nodes=1, migbatch=migbatch, node_conf={"StateDir": f"{small_disk}/%n"})
    code = bed.home("mbalice") / "flood.py"
    bed.run(["sh", "-c", f"cat > {code} << 'END'\n{FLOOD}\nEND"], "mbalice")
    marker = [] if migbatch == "all" else ["--comment=[mig:1g.10gb:1]"]
    for turn in range(2):
        wrap = f"/usr/bin/python3 {code} {small_disk}/link{turn}; sleep 1"
        job, message = sbatch(bed, "--gres=mig:1g.10gb:1", *marker, wrap=wrap)
        assert job, message
        assert bed.wait_job(job) == "COMPLETED", bed.output(job)
        settled(bed)
    job, _ = sbatch(bed, "--gres=mig:1g.10gb:1", *marker, user="mbbob", wrap=APPEND)
    assert bed.wait_job(job) == "COMPLETED", bed.output(job)
    settled(bed)
    assert os.statvfs(small_disk).f_bfree > 0
