"""The shims in a real slurmctld and in real sbatch, srun and salloc: service up, service down, changes, steps."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.decision import SubmitDecision
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.service import SubmitService
from slurm_migbatch.submit.shim import CLI_FILTER, JOB_SUBMIT, render
from slurm_migbatch.submit.table import write_table
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.workload.catalog import Partition, SiteCatalog
from slurm_migbatch.workload.hints import parse
from tests.support.gpu_kinds import H100
from tests.support.submit_running import running

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
DESCRIBED = "model=our-llama arch=layers:16+hidden:2048+heads:32+kv:8"
TRES_PER_TASK = (23, 11)
"""The release that has the option --tres-per-task."""
PER_TASK = ("gres/mig:auto", "gres/mig", "cpu:1,gres/mig:auto", "gres/mig:1g.10gb:1")
HINTS = "migbatch: model=bert-large batch=32 slo=200ms"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Socket, table and scripts, where slurmctld finds them: a Slurm of --slurm-root shares /run with the tests."""
    with tempfile.TemporaryDirectory(prefix="migbatch-filter-", dir="/run") as made:
        _render(Path(made))
        yield Path(made)


def _render(made: Path) -> None:
    made.chmod(0o755)
    names = {
        "socket": str(made / "submit.sock"),
        "table": str(made / "table.lua"),
        "catalog": SITE,
        "policy": SubmitPolicy(describe=str(made / "migbatch")),
    }
    (made / "migbatch").write_text(f'#!/bin/sh\necho "$0" "$@" >&2\ntest "$4" = /our/model && echo "{DESCRIBED}"\n')
    (made / "migbatch").chmod(0o755)
    for name in (JOB_SUBMIT, CLI_FILTER):
        # a slow machine must not decide whether service or table answers
        text = render(name, default_partition="gpu", deadline_ms=2000, **names)
        (made / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def bed(folder: Path, slurm_root: str) -> Iterator[Cluster]:
    # the service under test is in this process, so slurmctld must run as the same user
    spec = {"nodes": 1, "slurm_user": "root", "job_submit": str(folder / JOB_SUBMIT), "counts": COUNTS}
    with Cluster(None, slurm_root=slurm_root, **spec) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def chosen(chooser: Chooser) -> str:
    """The predictor's slice for HINTS: another than the default, which a shim that knows nothing would take."""
    profile = chooser.choose(parse(HINTS), SITE.partitions["gpu"]).offer.profile.gres_type
    assert profile != "1g.10gb"
    return profile


def run_as_alice(bed: Cluster, *command: str) -> subprocess.CompletedProcess[str]:
    return bed.run(list(command), "mbalice", check=False)


def job_of(bed: Cluster, job: int) -> tuple[str, str]:
    """`(TresPerNode, Comment)`."""
    text = bed.run(["scontrol", "show", "job", str(job)]).stdout
    values = dict(line.strip().partition("=")[::2] for line in text.splitlines())
    return values.get("TresPerNode", "").replace("gres/", "gres:"), values.get("Comment", "")


def test_service_answers_slurmctld_and_records_its_decisions(
    bed: Cluster, folder: Path, chooser: Chooser, chosen: str
) -> None:
    seen: list[SubmitDecision] = []
    service = SubmitService(SITE, chooser, seen.append)
    with running(folder / "submit.sock", service):
        job = bed.submit("-H", "--gres=mig:auto", f"--comment={HINTS}", wrap="true")
        tres, comment = job_of(bed, job)
        assert tres == f"gres:mig:{chosen}:1" and comment.startswith(f"{HINTS} [mig:{chosen}:1#")
        messages = run_as_alice(bed, "sbatch", "-H", "--gres=mig:auto", f"--comment={HINTS}", "--wrap=true").stderr
        assert f"{chosen} for mig:auto: the smallest slice that meets the request" in messages
    service.close()
    assert [decision.granted for decision in seen] == [f"mig:{chosen}:1"] * 2
    assert seen[0].id in comment


def test_without_the_service_the_table_answers(bed: Cluster, folder: Path, table: Path, chosen: str) -> None:
    write_table(folder / "table.lua", table.read_text())
    job = bed.submit("-H", "--gres=mig:auto", f"--comment={HINTS}", wrap="true")
    assert job_of(bed, job) == (f"gres:mig:{chosen}:1", f"{HINTS} [mig:{chosen}:1#auto]")
    (folder / "table.lua").chmod(0o666)  # a table that anybody can write is not read: the one read before stays in use
    job = bed.submit("-H", "--gres=mig:auto", f"--comment={HINTS}", wrap="true")
    assert job_of(bed, job)[0] == f"gres:mig:{chosen}:1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gres=mig:1g"], "1g.10gb, 1g.10gb.me, 1g.20gb"),
        (["--gres=mig:none"], "mig:none is reserved"),
        (["--gres=mig:5g.50gb"], "has a profile '5g.50gb'"),
        (["--gres=mig:auto", "--comment=migbatch: slo=0"], "a time with its unit"),
        (["--gres=mig:auto", "--comment=migbatch: model=x;id"], "the character ;"),
        (["--gres=mig:1g.10gb", "--comment=x [mig:7g.80gb:1]"], "copied from squeue"),
        (["--comment=[mig:7g.80gb:1]"], "copied from squeue"),
    ],
)
@pytest.mark.parametrize("command", ["sbatch", "srun", "salloc"])
def test_bad_requests_are_refused_with_a_sentence(bed: Cluster, command: str, options: list[str], words: str) -> None:
    result = run_as_alice(bed, command, *options, *(["--wrap=true"] if command == "sbatch" else ["true"]))
    assert result.returncode != 0 and words in result.stderr
    if command == "sbatch" and any("--gres" in option for option in options):
        assert "Invalid generic resource (gres) specification" in result.stderr


def test_a_job_without_slices_is_left_alone(bed: Cluster) -> None:
    job = bed.submit("-H", "--comment=my own", wrap="true")
    assert job_of(bed, job) == ("", "my own")


def test_arrays_and_heterogeneous_jobs_get_markers(bed: Cluster) -> None:
    array = bed.submit("-H", "-a", "1-2", "--gres=mig:1g.10gb", wrap="true")
    assert job_of(bed, array)[1] == "[mig:1g.10gb:1]"
    both = run_as_alice(
        bed, "sbatch", "--parsable", "-H", "--gres=mig:1g.10gb", "--wrap=true", ":", "--gres=mig:2g.20gb"
    )
    first = int(both.stdout.split(";")[0])
    text = bed.run(["scontrol", "show", "job", str(first)]).stdout
    assert "Comment=[mig:1g.10gb:1]" in text and "Comment=[mig:2g.20gb:1]" in text


def test_steps_run_in_jobs_that_asked_for_gpus(bed: Cluster) -> None:
    """The environment that sbatch leaves must not make steps request GPUs that the job does not have."""
    for options in (["--gpus=1"], ["--gpus-per-node=1"], ["--gpus-per-task=1", "-n1", "-N1"], ["--gres=gpu:1"]):
        job = bed.submit(*options, wrap="srun true && echo stepped")
        assert job_of(bed, job)[1] == "[mig:7g.80gb:1]"
        assert bed.wait_job(job) == "COMPLETED" and "stepped" in bed.output(job)


def test_steps_run_in_jobs_that_asked_for_any_slices_per_task(bed: Cluster) -> None:
    """Steps read what sbatch leaves of --tres-per-task in the environment."""
    if bed.root.version() < TRES_PER_TASK:
        assert "unrecognized option" in run_as_alice(bed, "sbatch", "--tres-per-task=gres/mig", "--wrap=true").stderr
        return
    for asked in ("gres/mig:auto", "gres/mig", "cpu:1,gres/mig:auto:1"):
        job = bed.submit("-n2", "-N1", f"--tres-per-task={asked}", wrap="srun true && echo stepped")
        assert job_of(bed, job) == ("gres:mig:1g.10gb:2", "[mig:1g.10gb:2#auto]")
        assert bed.wait_job(job) == "COMPLETED" and "stepped" in bed.output(job)


def test_updates_of_a_pending_job_rewrite_its_gres_and_marker(bed: Cluster) -> None:
    job = bed.submit("-H", "--gres=mig:2g.20gb", "--comment=mine", wrap="true")

    def change(*what: str) -> int:
        return run_as_alice(bed, "scontrol", "update", f"JobId={job}", *what).returncode

    assert change("Comment=other") == 0
    assert job_of(bed, job) == ("gres:mig:2g.20gb:1", "other [mig:2g.20gb:1]")
    assert change("Comment=x [mig:7g.80gb:1]") != 0
    assert change("Extra=[mig:7g.80gb:1]") != 0
    assert change("Gres=mig:1g") != 0
    assert change("Partition=train") != 0, "no partition of SITE"
    assert change("Partition=gpu") == 0
    assert change("Gres=mig:auto") == 0
    assert job_of(bed, job) == ("gres:mig:1g.10gb:1", "other [mig:1g.10gb:1#chgauto]")
    assert change("Gres=gpu:1") == 0
    assert job_of(bed, job) == ("gres:mig:7g.80gb:1", "other [mig:7g.80gb:1#chg]")
    assert change("Comment=") == 0
    assert job_of(bed, job)[1] == "[mig:7g.80gb:1#chg]"
    assert change("Gres=") == 0
    assert "[mig:" not in job_of(bed, job)[1]
    assert change("Gres=mig:1g.10gb:2") == 0
    assert job_of(bed, job) == ("gres:mig:1g.10gb:2", "[mig:1g.10gb:2#chg]")


def test_a_running_job_keeps_its_marker(bed: Cluster) -> None:
    job = bed.submit("--gres=mig:2g.20gb", wrap="sleep 600")
    bed.wait_job(job, "RUNNING")
    assert run_as_alice(bed, "scontrol", "update", f"JobId={job}", "Comment=new").returncode == 0
    assert job_of(bed, job)[1] == "new [mig:2g.20gb:1]"
    assert run_as_alice(bed, "scontrol", "update", f"JobId={job}", "Gres=mig:7g.80gb:1").returncode != 0
    assert run_as_alice(bed, "scancel", str(job)).returncode == 0


def test_cli_filter_makes_steps_match_their_job_and_refuses_bad_requests(folder: Path, slurm_root: str) -> None:
    """With cli_filter, srun's own steps request what the job has; bad requests do not reach slurmctld."""
    scripts = {"job_submit": str(folder / JOB_SUBMIT), "cli_filter": str(folder / CLI_FILTER)}
    with Cluster(None, nodes=1, counts=COUNTS, slurm_root=slurm_root, **scripts) as bed:
        for option in ("mig:auto", "mig", "mig:1g.10gb", "mig:1g.10gb+me", "gpu:1", "mig:1g.10gb,mig:2g.20gb"):
            assert run_as_alice(bed, "srun", "--immediate=180", f"--gres={option}", "true").returncode == 0, option
        for options in (["--gpus=1"], ["--gpus-per-node=1"], ["--gpus-per-task=1", "-n1", "-N1"]):
            assert run_as_alice(bed, "srun", "--immediate=180", *options, "true").returncode == 0, options
        assert run_as_alice(bed, "salloc", "--gpus=1", "srun", "true").returncode == 0
        assert run_as_alice(bed, "salloc", "--gres=mig:1g.10gb", "srun", "--gres=mig:auto", "true").returncode == 0
        for option in PER_TASK if bed.root.version() >= TRES_PER_TASK else ():
            words = "-n2", "-N1", f"--tres-per-task={option}"
            assert run_as_alice(bed, "srun", "--immediate=180", *words, "true").returncode == 0, option
            assert run_as_alice(bed, "salloc", *words, "srun", "true").returncode == 0, option
            step = run_as_alice(
                bed, "salloc", "-n2", "--gres=mig:1g.10gb:2", "srun", f"--tres-per-task={option}", "true"
            )
            assert step.returncode == 0, option
        for option in (
            "--gpus=1",
            "--gpus-per-task=1 -n1",
            "--gpus-per-node=1",
            "--gres=gpu:1",
        ):  # TaskProlog's variables
            own = "export MIGBATCH_JOB_SLICES=1 MIGBATCH_PROGRESS=/progress/$SLURM_JOB_ID.0"
            job = bed.submit("--gpus=1", wrap=f"{own}; srun {option} true && echo stepped")
            assert bed.wait_job(job) == "COMPLETED" and "stepped" in bed.output(job), option
        refused = run_as_alice(bed, "srun", "--gres=mig:1g", "true")
        assert refused.returncode != 0 and "cli_filter plugin terminated" in refused.stderr
        assert "for mig:auto" in run_as_alice(bed, "sbatch", "-v", "--gres=mig:auto", "--wrap=true").stderr
        job = bed.submit("-H", "--gres=mig:auto", "--comment=migbatch: model=/our/model mem=15gb", wrap="true")
        assert job_of(bed, job)[1].startswith(f"migbatch: {DESCRIBED} mem=15gb [mig:")


def test_nodes_of_a_job_with_a_slice_for_each_task_have_as_many_tasks_as_slices(folder: Path, slurm_root: str) -> None:
    """Slurm alone would put three of the four tasks on the first node."""
    scripts = {"job_submit": str(folder / JOB_SUBMIT), "cli_filter": str(folder / CLI_FILTER)}
    with Cluster(None, nodes=2, counts=COUNTS, slurm_root=slurm_root, **scripts) as bed:
        for option in ("--gpus-per-task=1g.10gb:1", "--gpus=1g.10gb:4"):
            words = "-N2", "-n4", option
            job = bed.submit(*words, wrap="srun printenv SLURM_NODEID")
            assert bed.wait_job(job) == "COMPLETED" and sorted(bed.output(job).split()) == ["0", "0", "1", "1"]
            done = run_as_alice(bed, "srun", "--immediate=180", *words, "printenv", "SLURM_NODEID")
            assert sorted(done.stdout.split()) == ["0", "0", "1", "1"], done.stderr
        words = "-n4", "--gpus-per-task=1g.10gb:1"  # without -N: one node
        job = bed.submit(*words, wrap="srun printenv SLURM_NODEID")
        assert job_of(bed, job)[1] == "[mig:1g.10gb:4]"
        assert bed.wait_job(job) == "COMPLETED" and bed.output(job).split() == ["0"] * 4
        done = run_as_alice(bed, "srun", "--immediate=180", *words, "printenv", "SLURM_NODEID")
        assert done.stdout.split() == ["0"] * 4, done.stderr


def tasks_of(bed: Cluster, array: int) -> dict[str, tuple[str, str]]:
    """`(TresPerNode, Comment)` of an array's records by their tasks, without decision ids."""
    found: dict[str, tuple[str, str]] = {}
    for record in bed.run(["scontrol", "show", "job", str(array)]).stdout.split("\n\n"):
        values = dict(line.strip().partition("=")[::2] for line in record.splitlines())
        tasks = re.search(r"ArrayTaskId=([^ %]+)", record)
        if tasks:
            tres = values.get("TresPerNode", "").replace("gres/", "gres:")
            found[tasks[1]] = tres, re.sub("#[0-9a-z]+]$", "]", values.get("Comment", ""))
    return found


@pytest.fixture(params=["service", "table"])
def decided(request: pytest.FixtureRequest, folder: Path, chooser: Chooser) -> Iterator[None]:
    """With the service, and without."""
    with running(folder / "submit.sock", SubmitService(SITE, chooser)) if request.param == "service" else nullcontext():
        yield


@pytest.fixture
def array(bed: Cluster, decided: None) -> Iterator[int]:
    """Four tasks in three records: the first runs, the second waits with a comment of its own, the others wait."""
    made = bed.submit("-H", "-a", "1-4", "--gres=mig:1g.10gb:1", "--comment=mine", wrap="sleep 600")
    assert run_as_alice(bed, "scontrol", "release", f"{made}_1").returncode == 0
    bed.wait("a running task", lambda: bed.run(["squeue", "-h", "-t", "R", "-j", str(made)]).stdout, 180)
    assert run_as_alice(bed, "scontrol", "update", f"JobId={made}_2", "Comment=second").returncode == 0
    slice_gres = "gres:mig:1g.10gb:1"
    marker = "[mig:1g.10gb:1]"
    assert tasks_of(bed, made) == {
        "1": (slice_gres, f"mine {marker}"),
        "2": (slice_gres, f"second {marker}"),
        "3-4": (slice_gres, f"mine {marker}"),
    }
    yield made
    run_as_alice(bed, "scancel", str(made))


def test_comment_update_of_a_split_array_changes_all_records(bed: Cluster, array: int) -> None:
    """slurmctld shows the filter the same description for all records, with what was written for the record before."""
    for text in ("all", "all", ""):
        changed = run_as_alice(bed, "scontrol", "update", f"JobId={array}", f"Comment={text}")
        assert changed.returncode == 0, changed.stderr
        whole = "gres:mig:1g.10gb:1", f"{text} [mig:1g.10gb:1]".strip()
        assert tasks_of(bed, array) == {"1": whole, "2": whole, "3-4": whole}


def test_gres_update_of_a_split_array_changes_its_pending_tasks(bed: Cluster, array: int) -> None:
    running = "gres:mig:1g.10gb:1", "mine [mig:1g.10gb:1]"
    for gres, kind in (("mig:2g.20gb:1", "2g.20gb:1"), ("mig:auto", "1g.10gb:1"), ("gpu:1", "7g.80gb:1")):
        changed = run_as_alice(bed, "scontrol", "update", f"JobId={array}", f"Gres={gres}")
        (failed,) = [line for line in changed.stderr.splitlines() if "No error" not in line]
        assert re.match(rf"{array}_\[?1\]?: ", failed)
        tasks = tasks_of(bed, array)
        assert tasks == {
            "1": running,
            "2": (f"gres:mig:{kind}", f"second [mig:{kind}]"),
            "3-4": (f"gres:mig:{kind}", f"mine [mig:{kind}]"),
        }
    run_as_alice(bed, "scontrol", "update", f"JobId={array}", "Gres=mig:3g.40gb:1", "Comment=both")
    changed = "gres:mig:3g.40gb:1", "both [mig:3g.40gb:1]"
    assert tasks_of(bed, array) == {"1": running, "2": changed, "3-4": changed}


def test_user_comment_that_repeats_the_marker_of_the_filter_is_refused(bed: Cluster, array: int) -> None:
    """Also right after the filter has written it, word for word."""

    def update_exit_code(target: int | str, comment: str) -> int:
        return run_as_alice(bed, "scontrol", "update", f"JobId={target}", f"Comment={comment}").returncode

    for task in ("1", "2", "3", "[3-4]"):
        for forged in ("new [mig:1g.10gb:1]", "new [mig:7g.80gb:1]", "mine [mig:1g.10gb:1]"):
            assert update_exit_code(f"{array}_{task}", "new") == 0
            before = tasks_of(bed, array)
            assert update_exit_code(f"{array}_{task}", forged) != 0
            assert update_exit_code(f"{array}", forged) != 0
            assert tasks_of(bed, array) == before
    assert update_exit_code(array, "new") == 0
    before = tasks_of(bed, array)
    assert {comment for _, comment in before.values()} == {"new [mig:1g.10gb:1]"}
    assert update_exit_code(array, "new [mig:7g.80gb:1]") != 0
    other = bed.submit("-H", "-a", "1-2", "--gres=mig:1g.10gb:1", wrap="true")
    assert update_exit_code(array, "new") == 0
    assert update_exit_code(other, "new [mig:1g.10gb:1]") != 0
    assert tasks_of(bed, other) == {"1-2": ("gres:mig:1g.10gb:1", "[mig:1g.10gb:1]")}
    # For another task of the same array, in the very next request: it is refused, or read as `new` itself.
    update_exit_code(f"{array}_2", "new")
    update_exit_code(f"{array}_1", "new [mig:1g.10gb:1]")
    assert tasks_of(bed, array).items() >= {"1": before["1"], "2": before["2"]}.items()
    run_as_alice(bed, "scancel", str(other))
