"""A job on a real Slurm from start to end: what it requests, what it gets, what it sees, what is recorded."""

from __future__ import annotations

import re
import time

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import (
    PATIENCE_S,
    SHOW,
    account,
    exporting,
    first_step,
    gate,
    hasten,
    held,
    offer,
    refused,
    sbatch,
    settled,
    sights,
)


def test_auto_request_gets_a_slice_and_is_recorded(stack: Cluster) -> None:
    job, message = sbatch(stack, "--gres=mig:auto", "--comment=migbatch: model=bert-large batch=32 slo=200ms")
    assert re.search(r"migbatch: \S+g\.\d+gb for mig:auto", message), message
    assert stack.wait_job(job) == "COMPLETED"
    row = account(stack, job, decided=True)
    (slice_row,) = row["slices"]
    assert sights(stack.output(job)) == {"batch": [slice_row["mig_uuid"]], "task 0": [slice_row["mig_uuid"]]}
    assert (
        row["asked"].startswith("--gres=mig:auto ")
        and row["bucket"].startswith("bert-large/")
        and row["profile"] in message
    )
    assert row["predicted_latency_ms"] and row["user"] == "mbalice" and row["exit_code"] == 0
    settled(stack)


def test_batch_size_and_copies_are_set_in_the_environment_of_batch_jobs(stack: Cluster) -> None:
    """Batch size and copies for the slice, which a script may follow; a value that the user sets is kept."""
    wrap = "echo $MIGBATCH_BATCH $MIGBATCH_COPIES"
    hints = ("--gres=mig:auto", "--comment=migbatch: model=resnet50")
    free, _ = sbatch(stack, *hints, wrap=wrap)
    mine = exporting(stack, ["MIGBATCH_BATCH=7"], *hints, wrap=wrap)
    assert stack.wait_job(free) == stack.wait_job(mine) == "COMPLETED"
    batch, copies = stack.output(free).split()
    assert int(batch) >= 1 and 1 <= int(copies) <= 4
    assert stack.output(mine).split() == ["7", copies]
    settled(stack)


def test_batch_size_chosen_with_the_slice_is_shown_to_user_and_job(stack: Cluster) -> None:
    job, message = sbatch(
        stack, "--gres=mig:auto", "--comment=migbatch: model=resnet50 slo=9ms", wrap="echo $MIGBATCH_BATCH"
    )
    assert stack.wait_job(job) == "COMPLETED"
    assert f"run batches of {stack.output(job).strip()} (MIGBATCH_BATCH)" in message
    settled(stack)


def test_three_tasks_get_one_of_three_slices_each(stack: Cluster) -> None:
    job, _ = sbatch(stack, "-N1", "-n3", "--gres=mig:1g.10gb:3")
    assert stack.wait_job(job) == "COMPLETED"
    seen = sights(stack.output(job))
    assert [seen[f"task {i}"] for i in range(3)] == [[uuid] for uuid in seen["batch"]]
    assert len(set(seen["batch"])) == 3


def test_parallel_steps_of_a_job_get_different_slices(stack: Cluster) -> None:
    """As with whole GPUs: srun in the background for each program; Slurm starts no more than there are slices for."""
    command = "sh -c 'echo task NAME $CUDA_VISIBLE_DEVICES; sleep 3'"
    for options in (("--gres=mig:1g.10gb:1", "--gres=mig:1"), ("--gpus=1", "--gpus-per-task=1")):
        steps = [*options, options[0]]
        lines = [f"srun --exact -n1 {option} {command.replace('NAME', str(n))} &" for n, option in enumerate(steps)]
        script = "echo batch $CUDA_VISIBLE_DEVICES\n" + "\n".join(lines) + "\nwait"
        job, message = sbatch(stack, "-N1", "-n3", "--gres=mig:1g.10gb:2", wrap=script)
        assert job, message
        assert stack.wait_job(job) == "COMPLETED", stack.output(job)
        seen = sights(stack.output(job))
        tasks = [seen[f"task {n}"] for n in range(3)]
        assert all(len(uuids) == 1 for uuids in tasks), seen
        assert {uuid for uuids in tasks for uuid in uuids} == set(seen["batch"])
        first, second = [line for line in stack.output(job).splitlines() if line.startswith("task ")][:2]
        assert first.split()[2] != second.split()[2], "they ran at the same time"
    settled(stack)


def test_step_gets_the_slice_of_the_profile_that_it_requests(stack: Cluster) -> None:
    profiles = ("1g.10gb", "2g.20gb")
    lines = [f"srun --exact -n1 --gres=mig:{p}:1 sh -c 'echo got $MIGBATCH_PROFILE' &" for p in reversed(profiles)]
    job, message = sbatch(stack, "-N1", "-n2", "--gres=mig:1g.10gb:1,mig:2g.20gb:1", wrap="\n".join([*lines, "wait"]))
    assert job, message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    assert sorted(line for line in stack.output(job).splitlines() if line.startswith("got")) == [
        f"got {profile}" for profile in profiles
    ]
    settled(stack)


def test_array_tasks_never_share_a_slice(stack: Cluster) -> None:
    job, _ = sbatch(stack, "--array=0-3", "--gres=mig:1g.20gb:1", "-o", "array-%a.out", wrap=f"{SHOW}; sleep 2")
    rows = [account(stack, f"{job}_{i}") for i in range(4)]
    for i, row in enumerate(rows):
        text = (stack.home("mbalice") / f"array-{i}.out").read_text()
        assert sights(text)["task 0"] == [row["slices"][0]["mig_uuid"]]
    # the nodes' own times; Slurm's are in whole seconds
    spans = [(s["mig_uuid"], s["since_unix_s"], s["until_unix_s"]) for row in rows for s in row["slices"]]
    for uuid, start, end in spans:
        assert [s for s in spans if s[0] == uuid and s[1] < end and start < s[2]] == [(uuid, start, end)]


def test_step_without_gpus_in_a_script_for_gpus_sees_none(stack: Cluster) -> None:
    """Though the filter leaves a zero of the job's own --gpus in its environment."""
    lines = [f"srun {option} sh -c 'echo task {n} $CUDA_VISIBLE_DEVICES'" for n, option in enumerate(("", "--gpus=0"))]
    job, message = sbatch(stack, "--gpus=1", wrap="\n".join(lines))
    assert job, message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    assert set(sights(stack.output(job))) == {"task 0"} and "task 1" in stack.output(job)


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_script_for_whole_gpus_runs_unchanged(stack: Cluster, tasks: int) -> None:
    job, message = sbatch(stack, "--gpus=1", f"-n{tasks}")
    assert "7g.80gb" in message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    assert account(stack, job)["profile"] == "7g.80gb"
    seen = sights(stack.output(job))
    assert [seen[f"task {task}"] for task in range(tasks)] == [seen["batch"]] * tasks


def test_a_script_with_a_gpu_for_each_task_gets_one_node(stack: Cluster) -> None:
    job, message = sbatch(stack, "--gpus=1g.10gb:2", "-n2")
    assert "all of them on one node" in message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    seen = sights(stack.output(job))
    assert [seen[f"task {task}"] for task in range(2)] == [[uuid] for uuid in seen["batch"]]


@pytest.mark.parametrize("option", ["--gres=gpu:h100_2g.19gb:1", "--gpus=nvidia_h100_mig_2g.20gb:1"])
def test_a_script_for_slices_of_static_mig_runs_unchanged(stack: Cluster, option: str) -> None:
    job, message = sbatch(stack, option)
    assert "is granted as --gres=mig:2g.20gb" in message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    assert account(stack, job)["profile"] == "2g.20gb"
    done = stack.run(["srun", option, "sh", "-c", "echo task 0 $CUDA_VISIBLE_DEVICES"], "mbbob")
    assert len(sights(done.stdout)["task 0"]) == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--gres=gpu:2"],
        ["--gpus-per-node=2"],
        ["--gpus=2", "-N1"],
        ["--gres=gpu:2", "--gpus=2"],
        ["--gpus-per-node=2", "--gpus-per-task=1", "-n2"],
    ],
)
def test_two_whole_gpus_are_two_slices_of_one_node(stack: Cluster, options: list[str]) -> None:
    job, _ = sbatch(stack, *options)
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    assert [slice_row["profile"] for slice_row in account(stack, job)["slices"]] == ["7g.80gb"] * 2


def test_srun_without_an_allocation_gets_a_slice(stack: Cluster) -> None:
    done = stack.run(["srun", "--gres=mig:2g.20gb:1", "sh", "-c", "echo task 0 $CUDA_VISIBLE_DEVICES"], "mbbob")
    assert len(sights(done.stdout)["task 0"]) == 1
    done = stack.run(["srun", "--gpus=1", "sh", "-c", "echo task 0 $CUDA_VISIBLE_DEVICES"], "mbbob")
    assert len(sights(done.stdout)["task 0"]) == 1


@pytest.mark.parametrize("request_", ["--gres=mig:2g.20gb:1", "--gpus=1", "--gpus=1 -n2"])
def test_steps_in_salloc_see_the_same_slice(stack: Cluster, request_: str) -> None:
    inner = "srun sh -c 'echo task $SLURM_STEP_ID $CUDA_VISIBLE_DEVICES'"
    done = stack.run(["salloc", *request_.split(), "sh", "-c", f"{inner}; {inner}"], "mbbob")
    seen = sights(done.stdout)
    assert set(seen) == {"task 0", "task 1"} and seen["task 0"] == seen["task 1"]


@pytest.mark.parametrize("request_", ["--gres=mig:1g.10gb:1", "--gpus=1"])
def test_steps_in_salloc_may_request_the_gpu_again(stack: Cluster, request_: str) -> None:
    inner = "srun --gpus=1 sh -c 'echo task 0 $CUDA_VISIBLE_DEVICES'"
    done = stack.run(["salloc", request_, "sh", "-c", inner], "mbbob")
    assert len(sights(done.stdout)["task 0"]) == 1


def test_step_in_salloc_without_gpus_sees_none(stack: Cluster) -> None:
    lines = [f"srun {option} sh -c 'echo task {n} $CUDA_VISIBLE_DEVICES'" for n, option in enumerate(("", "--gpus=0"))]
    done = stack.run(["salloc", "--gpus=1", "sh", "-c", "; ".join(lines)], "mbbob")
    assert set(sights(done.stdout)) == {"task 0"} and "task 1" in done.stdout


def test_components_of_a_heterogeneous_job_get_different_slices(stack: Cluster) -> None:
    show = "srun --het-group=0 sh -c 'echo task 0 $CUDA_VISIBLE_DEVICES'"
    show += "; srun --het-group=1 sh -c 'echo task 1 $CUDA_VISIBLE_DEVICES'"
    job, message = sbatch(stack, "-n1", "--gres=mig:1g.10gb:1", ":", "-n1", "--gres=mig:auto", wrap=show)
    assert job, message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    seen = sights(stack.output(job))
    assert len(seen["task 0"]) == len(seen["task 1"]) == 1 and seen["task 0"] != seen["task 1"]


def test_tasks_of_a_step_over_two_components_get_different_slices(stack: Cluster) -> None:
    show = "srun --het-group=0,1 sh -c 'echo task $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
    first, second = ("-n1", "--gres=mig:1g.10gb:1", "-w", "n2"), ("-n2", "--gres=mig:1g.10gb:2", "-w", "n1")
    job, message = sbatch(stack, *first, ":", *second, wrap=show)
    assert job, message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    seen = sights(stack.output(job))
    assert len({tuple(seen[f"task {task}"]) for task in range(3)}) == 3, seen
    assert {len(uuids) for uuids in seen.values()} == {1}, seen


def test_components_that_srun_allocates_get_their_slices(stack: Cluster) -> None:
    show = ["sh", "-c", "echo task $SLURM_PROCID $CUDA_VISIBLE_DEVICES"]
    first, second = ["srun", "-n1", "--gres=mig:1g.10gb", *show], ["-n2", "--gres=mig:auto:2", *show]
    seen = sights(stack.run([*first, ":", *second], "mbbob").stdout)
    assert len({tuple(seen[f"task {task}"]) for task in range(3)}) == 3, seen
    assert {len(uuids) for uuids in seen.values()} == {1}, seen


def test_job_on_two_nodes_gets_a_slice_of_each(stack: Cluster) -> None:
    job, _ = sbatch(stack, "-N2", "-n2", "--ntasks-per-node=1", "--gres=mig:3g.40gb:1")
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    seen = sights(stack.output(job))
    assert len({seen["task 0"][0], seen["task 1"][0]}) == 2


def test_profile_that_is_not_on_offer_is_created_for_a_job(stack: Cluster) -> None:
    settled(stack)
    offered = offer(stack)
    missing = [p for p in ("1g.10gb.me", "2g.20gb", "4g.40gb", "3g.40gb", "1g.20gb", "7g.80gb") if p not in offered]
    assert missing, "everything is on offer at once"
    job, _ = sbatch(stack, f"--gres=mig:{missing[0]}:1")
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)


def test_job_for_a_whole_gpu_is_not_starved_by_small_jobs(stack: Cluster) -> None:
    """Starvation: all four GPUs have small jobs on them, and more small ones arrive all the time."""
    opened, waiting = gate(stack)
    first = [sbatch(stack, "--gres=mig:4g.40gb:1", "--time=5", wrap=f"{waiting}; sleep 3")[0] for _ in range(4)]
    for job in first:
        stack.wait_job(job, "RUNNING")
    large, _ = sbatch(stack, "--gres=mig:7g.80gb:1", "--time=5", user="mbbob")
    opened.touch()
    small = []
    end = time.monotonic() + PATIENCE_S
    while stack.job_state(large) == "PENDING" and time.monotonic() < end:
        small.append(sbatch(stack, "--gres=mig:1g.10gb:1", "--time=5", wrap="sleep 4", user="mbcarol")[0])
        time.sleep(0.5)
    assert stack.wait_job(large) == "COMPLETED"
    for job in small:
        stack.run(["scancel", str(job)])
    settled(stack)


def test_whole_gpus_kept_for_a_larger_job_are_used_by_jobs_that_end_in_time(stack: Cluster) -> None:
    """Backfill by Slurm itself: one GPU of a node is busy for up to an hour, and a job waits for both."""
    opened, waiting = gate(stack)
    on_first = ("-w", stack.spec.node_names[0])
    first, _ = sbatch(stack, "--gres=mig:7g.80gb:1", *on_first, "-t60", wrap=waiting)
    stack.wait_job(first, "RUNNING")
    large, _ = sbatch(stack, "--gres=mig:7g.80gb:2", *on_first, "-t60", user="mbbob")
    long, _ = sbatch(stack, "--gres=mig:7g.80gb:1", *on_first, "-t120")
    short, _ = sbatch(stack, "--gres=mig:7g.80gb:1", *on_first, "-t20", user="mbcarol")
    assert stack.wait_job(short) == "COMPLETED"
    assert {stack.job_state(job) for job in (large, long)} == {"PENDING"}
    opened.touch()
    assert [stack.wait_job(job) for job in (large, long)] == ["COMPLETED"] * 2
    large_since, long_since = (account(stack, job)["slices"][0]["since_unix_s"] for job in (large, long))
    assert large_since < long_since
    settled(stack)


def test_cancelled_job_releases_its_slice(stack: Cluster) -> None:
    job, _ = sbatch(stack, "--gres=mig:3g.40gb:1", wrap="sleep 600")
    stack.wait_job(job, "RUNNING")
    stack.wait("the lease", lambda: any(held_job == job for _, held_job, _ in held(stack)))
    stack.run(["scancel", str(job)], "mbalice")
    assert account(stack, job, "CANCELLED")["slices"]
    settled(stack)


def test_a_requeued_job_is_a_new_run(stack: Cluster) -> None:
    wrap = f"{SHOW}; sleep $((600-600*SLURM_RESTART_COUNT))"
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", "--open-mode=append", wrap=wrap)
    stack.wait_job(job, "RUNNING")
    first_step(stack, job)
    stack.run(["scontrol", "requeue", str(job)])
    assert hasten(stack, job) == "COMPLETED"
    row = account(stack, job)
    # 22.05 may skip the Prolog of a job that restarts at once; then it is requeued once more
    assert row["restarts"] >= 1 and len(row["slices"]) == 1
    settled(stack)


def test_pending_job_can_be_changed_to_another_profile(stack: Cluster) -> None:
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", "--hold")
    stack.run(["scontrol", "update", f"JobId={job}", "Gres=mig:2g.20gb:1"], "mbalice")
    stack.run(["scontrol", "release", str(job)], "mbalice")
    assert stack.wait_job(job) == "COMPLETED"
    row = account(stack, job)
    assert (row["profile"], row["asked"]) == ("2g.20gb", "--gres=mig:2g.20gb:1")


@pytest.mark.parametrize(
    ("change", "profile"), [("Gres=mig:1g.10gb:1", "1g.10gb"), ("Comment=looked at", "2g.20gb"), ("Gres=", "")]
)
def test_pending_job_that_root_changes_gets_the_slices_slurm_allocates(
    stack: Cluster, change: str, profile: str
) -> None:
    """No more and no less: it is not ended by the audit, and does not run without its slice."""
    seen = f"{SHOW}; sleep 3"  # longer than the audit takes
    job, _ = sbatch(stack, "--gres=mig:2g.20gb:1", "--hold", wrap=seen)
    stack.run(["scontrol", "update", f"JobId={job}", change])
    stack.run(["scontrol", "release", str(job)])
    assert stack.wait_job(job) == "COMPLETED"
    if profile:
        (slice_row,) = account(stack, job)["slices"]
        assert slice_row["profile"] == profile and sights(stack.output(job))["batch"] == [slice_row["mig_uuid"]]
    else:
        assert "MIG-" not in stack.output(job)
    settled(stack)


def test_job_without_slices_runs_after_an_update_that_slurm_refused(stack: Cluster) -> None:
    """slurmctld keeps the comment of the update, and with it the marker."""
    job, _ = sbatch(stack, "--hold")
    update = ["scontrol", "update", f"JobId={job}", "Gres=mig:1g.10gb:1", "Nice=-100"]
    assert stack.run(update, "mbalice", check=False).returncode
    stack.run(["scontrol", "release", str(job)], "mbalice")
    assert stack.wait_job(job) == "COMPLETED"
    assert "MIG-" not in stack.output(job)


def test_a_job_that_root_submits_for_a_user_gets_its_slice(stack: Cluster) -> None:
    output = stack.home("mbalice") / "by-root.out"
    options = ["--uid=mbalice", "--gid=mbalice", f"--chdir={stack.home('mbalice')}", "-o", str(output)]
    done = stack.run(["sbatch", "--parsable", *options, "--gres=mig:auto", "--wrap", SHOW])
    job = int(done.stdout)
    assert stack.wait_job(job) == "COMPLETED"
    row = account(stack, job)
    assert row["user"] == "mbalice" and sights(output.read_text())["batch"] == [row["slices"][0]["mig_uuid"]]
    settled(stack)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--gres=mig:1g"], "1g.10gb"),
        (["--gres=mig:none:1"], "profile"),
        (["--gres=mig:9g.90gb:1"], "7g.80gb"),
        (["--gres=mig:auto", "--comment=migbatch: colour=red"], "model"),
        (["--gres=mig:auto", "--comment=migbatch: slo=0ms"], "slo"),
        (["--gres=mig:auto", "--comment=migbatch: min=3g.40gb max=1g.10gb"], "min"),
        (["--gres=mig:auto", "--comment=migbatch: mem=500gb"], "mem"),
        (["--gres=mig:auto", "--comment=migbatch: model=$(reboot)"], "character $"),
        (["--gres=mig:auto", "--comment=migbatch: model=x'; drop table runs"], "character '"),
        (["--gres=mig:auto", "--comment=migbatch: model=" + "x" * 1000], "the limit is 999"),
        (["--gres=mig:auto", "--comment=migbatch: model=\udcff\udcfe"], "ASCII"),
    ],
)
def test_bad_requests_are_refused_with_advice(stack: Cluster, options: list[str], advice: str) -> None:
    message = refused(stack, *options)
    assert advice.lower() in message.lower(), message


def test_jobs_without_mig_are_not_changed(stack: Cluster) -> None:
    job, message = sbatch(stack, "--comment=mine", wrap="echo ${CUDA_VISIBLE_DEVICES-none}")
    assert "migbatch" not in message
    assert stack.wait_job(job) == "COMPLETED"
    assert stack.output(job).strip() == "none"
    assert " Comment=mine " in stack.run(["scontrol", "-o", "show", "job", str(job)]).stdout


def test_job_of_root_is_not_changed_and_still_gets_its_slice(stack: Cluster) -> None:
    opened, waiting = gate(stack)
    done = stack.run(["sbatch", "--parsable", "--gres=mig:2g.20gb:1", "-o", "/dev/null", "--wrap", waiting])
    job = int(done.stdout)
    stack.wait_job(job, "RUNNING")
    stack.wait("root's lease", lambda: any(held_job == job for _, held_job, _ in held(stack)))
    opened.touch()
    assert stack.wait_job(job) == "COMPLETED"
    settled(stack)


def test_step_that_requests_no_slice_sees_none(stack: Cluster) -> None:
    """However its environment is exported; steps after it, and its own, see what they would without it."""
    command = (
        "/bin/sh -c 'echo NAME=${CUDA_VISIBLE_DEVICES-unset} $MIGBATCH_SLICES. $FOO. $BAR. ${MIGBATCH_STEP_GRES-unset}'"
    )
    lines = ["export FOO=mine"]
    for name, options in (
        ("before", ""),
        ("none", "--gres=none"),
        ("all", "--gres=none --export=ALL,BAR=other"),
        ("one", "--gres=none --export=FOO"),
        ("nothing", "--gres=none --export=NONE"),
        ("zero", "--gpus=0"),
        ("zeros", "--gres=gpu:0"),
        ("asked", "--gres=mig:1g.10gb:1"),
    ):
        lines.append(f"srun {options} {command.replace('NAME', name)}")
    lines.append(f"SLURM_GRES=none srun {command.replace('NAME', 'variable')}")
    job, message = sbatch(stack, "--gres=mig:1g.10gb:1", wrap="\n".join(lines))
    assert job, message
    assert stack.wait_job(job) == "COMPLETED", stack.output(job)
    (slice_row,) = account(stack, job)["slices"]
    lines = [line for line in stack.output(job).splitlines() if "=" in line and not line.startswith("srun: ")]
    assert dict(line.split("=", 1) for line in lines) == {
        "before": f"{slice_row['mig_uuid']} 1. mine. . unset",
        "none": " . mine. . unset",
        "all": " . mine. other. unset",
        "one": " . mine. . unset",
        "nothing": " . . . unset",
        "zero": " . mine. . unset",
        "zeros": " . mine. . unset",
        "asked": f"{slice_row['mig_uuid']} 1. mine. . unset",
        "variable": " . mine. . unset",
    }
    settled(stack)
