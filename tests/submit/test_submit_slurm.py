"""The shims in a real slurmctld and in real sbatch, srun and salloc: service up, service down, changes, steps."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_kinds import H100
from lua_shim import TEMPLATES
from test_submit_service import running

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.rewrite import Policy
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.submit.shim import CLI_FILTER, JOB_SUBMIT, render
from slurm_migbatch.submit.table import compile_table, write_table
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.catalog import Partition, SiteCatalog
from slurm_migbatch.workload.hints import parse

pytestmark = pytest.mark.slurm

SITE = SiteCatalog({"gpu": Partition("gpu", (H100,))})
COUNTS = {
    "1g.10gb": 4,
    "1g.10gb.me": 1,
    "1g.20gb": 1,
    "2g.20gb": 2,
    "3g.40gb": 1,
    "4g.40gb": 1,
    "7g.80gb": 2,
    "none": 4,
}
HINTS = "migbatch: model=bert-large batch=32 slo=200ms"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Socket, table and scripts, where slurmctld finds them: a Slurm of --slurm-root has /run in common with us."""
    with tempfile.TemporaryDirectory(prefix="migbatch-filter-", dir="/run") as made:
        _render(Path(made))
        yield Path(made)


def _render(made: Path) -> None:
    made.chmod(0o755)
    names = {"socket": str(made / "submit.sock"), "table": str(made / "table.lua"), "catalog": SITE, "policy": Policy()}
    for name in (JOB_SUBMIT, CLI_FILTER):
        # a slow machine must not decide whether service or table answers
        text = render(name, TEMPLATES, default_partition="gpu", deadline_ms=2000, **names)
        (made / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def bed(folder: Path, slurm_root: str) -> Iterator[Cluster]:
    spec = {"nodes": 1, "job_submit": str(folder / JOB_SUBMIT), "counts": COUNTS}
    with Cluster(None, slurm_root=slurm_root, **spec) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def chosen(chooser: Chooser) -> str:
    """What the predictor has for HINTS: another slice than the default, which a shim that knows nothing would take."""
    profile = chooser.choose(parse(HINTS), SITE.partitions["gpu"]).offer.profile.gres_type
    assert profile != "1g.10gb"
    return profile


def said(bed: Cluster, *command: str) -> subprocess.CompletedProcess[str]:
    return bed.run(list(command), "mbalice", check=False)


def job_of(bed: Cluster, job: int) -> tuple[str, str]:
    """`(TresPerNode, Comment)`."""
    text = bed.run(["scontrol", "show", "job", str(job)]).stdout
    values = dict(line.strip().partition("=")[::2] for line in text.splitlines())
    return values.get("TresPerNode", "").replace("gres/", "gres:"), values.get("Comment", "")


def test_with_the_service(bed: Cluster, folder: Path, chooser: Chooser, chosen: str) -> None:
    seen: list[object] = []
    service = SubmitService(SITE, chooser, seen.append)
    with running(folder / "submit.sock", service):
        job = bed.submit("-H", "--gres=mig:auto", f"--comment={HINTS}", wrap="true")
        tres, comment = job_of(bed, job)
        assert tres == f"gres:mig:{chosen}:1" and comment.startswith(f"{HINTS} [mig:{chosen}:1#")
        told = said(bed, "sbatch", "-H", "--gres=mig:auto", f"--comment={HINTS}", "--wrap=true").stderr
        assert f"{chosen} for mig:auto: the smallest slice that does it" in told
    service.close()
    assert [decision.granted for decision in seen] == [f"mig:{chosen}:1"] * 2
    assert seen[0].id in comment


def test_without_the_service_the_table_answers(bed: Cluster, folder: Path, chooser: Chooser, chosen: str) -> None:
    write_table(folder / "table.lua", compile_table(SITE, chooser))
    job = bed.submit("-H", "--gres=mig:auto", f"--comment={HINTS}", wrap="true")
    assert job_of(bed, job) == (f"gres:mig:{chosen}:1", f"{HINTS} [mig:{chosen}:1#auto]")
    (folder / "table.lua").chmod(0o666)  # anybody's table is nobody's: what was read before stays
    job = bed.submit("-H", "--gres=mig:auto", f"--comment={HINTS}", wrap="true")
    assert job_of(bed, job)[0] == f"gres:mig:{chosen}:1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gres=mig:1g"], "1g.10gb, 1g.10gb.me, 1g.20gb"),
        (["--gres=mig:none"], "mig:none is not for jobs"),
        (["--gres=mig:5g.50gb"], "has a profile '5g.50gb'"),
        (["--gres=mig:auto", "--comment=migbatch: slo=0"], "a time with its unit"),
        (["--gres=mig:auto", "--comment=migbatch: model=x;id"], "the character ;"),
        (["--gres=mig:1g.10gb", "--comment=x [mig:7g.80gb:1]"], "copied from squeue"),
        (["--comment=[mig:7g.80gb:1]"], "copied from squeue"),
    ],
)
@pytest.mark.parametrize("command", ["sbatch", "srun", "salloc"])
def test_bad_requests_are_refused_with_a_sentence(bed: Cluster, command: str, options: list[str], words: str) -> None:
    result = said(bed, command, *options, *(["--wrap=true"] if command == "sbatch" else ["true"]))
    assert result.returncode != 0 and words in result.stderr


def test_a_job_without_slices_is_left_alone(bed: Cluster) -> None:
    job = bed.submit("-H", "--comment=my own", wrap="true")
    assert job_of(bed, job) == ("", "my own")


def test_arrays_and_het_jobs(bed: Cluster) -> None:
    array = bed.submit("-H", "-a", "1-2", "--gres=mig:1g.10gb", wrap="true")
    assert job_of(bed, array)[1] == "[mig:1g.10gb:1]"
    both = said(bed, "sbatch", "--parsable", "-H", "--gres=mig:1g.10gb", "--wrap=true", ":", "--gres=mig:2g.20gb")
    first = int(both.stdout.split(";")[0])
    text = bed.run(["scontrol", "show", "job", str(first)]).stdout
    assert "Comment=[mig:1g.10gb:1]" in text and "Comment=[mig:2g.20gb:1]" in text


def test_steps_run_in_jobs_that_asked_for_gpus(bed: Cluster) -> None:
    """The environment that sbatch leaves must not make steps ask for GPUs that the job does not have."""
    for options in (["--gpus=1"], ["--gpus-per-node=1"], ["--gpus-per-task=1", "-n1", "-N1"], ["--gres=gpu:1"]):
        job = bed.submit(*options, wrap="srun true && echo stepped")
        assert job_of(bed, job)[1] == "[mig:7g.80gb:1]"
        assert bed.wait_job(job) == "COMPLETED" and "stepped" in bed.output(job)


def test_changes_of_a_pending_job(bed: Cluster) -> None:
    job = bed.submit("-H", "--gres=mig:2g.20gb", "--comment=mine", wrap="true")

    def change(*what: str) -> int:
        return said(bed, "scontrol", "update", f"JobId={job}", *what).returncode

    assert change("Comment=other") == 0
    assert job_of(bed, job) == ("gres:mig:2g.20gb:1", "other [mig:2g.20gb:1]")
    assert change("Comment=x [mig:7g.80gb:1]") != 0
    assert change("Extra=[mig:7g.80gb:1]") != 0
    assert change("Gres=mig:1g") != 0
    assert change("Gres=mig:auto") == 0
    assert job_of(bed, job) == ("gres:mig:1g.10gb:1", "other [mig:1g.10gb:1#auto]")
    assert change("Gres=gpu:1") == 0
    assert job_of(bed, job) == ("gres:mig:7g.80gb:1", "other [mig:7g.80gb:1]")
    assert change("Comment=") == 0
    assert job_of(bed, job)[1] == "[mig:7g.80gb:1]"
    assert change("Gres=") == 0
    assert "[mig:" not in job_of(bed, job)[1]
    assert change("Gres=mig:1g.10gb:2") == 0
    assert job_of(bed, job) == ("gres:mig:1g.10gb:2", "[mig:1g.10gb:2]")


def test_a_running_job_keeps_its_marker(bed: Cluster) -> None:
    job = bed.submit("--gres=mig:2g.20gb", wrap="sleep 600")
    bed.wait_job(job, "RUNNING")
    assert said(bed, "scontrol", "update", f"JobId={job}", "Comment=new").returncode == 0
    assert job_of(bed, job)[1] == "new [mig:2g.20gb:1]"
    assert said(bed, "scontrol", "update", f"JobId={job}", "Gres=mig:7g.80gb:1").returncode != 0
    assert said(bed, "scancel", str(job)).returncode == 0


def test_the_users_side(folder: Path, slurm_root: str) -> None:
    """With cli_filter, srun's own steps ask for what the job has; bad requests do not reach slurmctld."""
    scripts = {"job_submit": str(folder / JOB_SUBMIT), "cli_filter": str(folder / CLI_FILTER)}
    with Cluster(None, nodes=1, counts=COUNTS, slurm_root=slurm_root, **scripts) as bed:
        for option in ("mig:auto", "mig", "mig:1g.10gb", "mig:1g.10gb+me", "gpu:1", "mig:1g.10gb,mig:2g.20gb"):
            assert said(bed, "srun", "--immediate=180", f"--gres={option}", "true").returncode == 0, option
        for options in (["--gpus=1"], ["--gpus-per-node=1"], ["--gpus-per-task=1", "-n1", "-N1"]):
            assert said(bed, "srun", "--immediate=180", *options, "true").returncode == 0, options
        assert said(bed, "salloc", "--gpus=1", "srun", "true").returncode == 0
        refused = said(bed, "srun", "--gres=mig:1g", "true")
        assert refused.returncode != 0 and "cli_filter plugin terminated" in refused.stderr
        assert "for mig:auto" in said(bed, "sbatch", "-v", "--gres=mig:auto", "--wrap=true").stderr
