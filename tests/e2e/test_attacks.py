"""Attacks by users: another user's slice, a larger slice, a command run by root. None works, and no node is harmed."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.testbed.cluster import Cluster
from tests.support.end_to_end import (
    PATIENCE_S,
    PYTHON,
    SHOW,
    account,
    accounts,
    capabilities,
    exporting,
    first_step,
    hasten,
    held,
    leases,
    marked,
    sbatch,
    settled,
    sights,
    status,
    until,
    untroubled,
)

FORGED = (
    "[mig:7g.80gb:1]",
    "x [mig:7g.80gb:1#abcdefgh]",
    "[mig:7g.80gb:1] y",
    "[mig:",
    "x\n[mig:7g.80gb:1]",
    "[mig:7g.80gb:1]\n",
    "migbatch: model=bert-large [mig:7g.80gb:1]",
)

TRY = """
import errno, os, sys
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, getattr(os, sys.argv[1])))
        print("opened")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def python(bed: Cluster, user: str, code: str, *arguments: object) -> list[str]:
    """Words that a Python program of a user prints."""
    return bed.run([PYTHON, "-c", code, *map(str, arguments)], user).stdout.split()


def attempts(bed: Cluster, user: str, how: str, paths: list[Path]) -> set[str]:
    """The results of opening each of the files as a user."""
    return set(python(bed, user, TRY, how, *paths))


def caps_of(bed: Cluster, user: str) -> list[Path]:
    """The capability devices that belong to a user now."""
    uid = bed.user(user).uid
    return [path for path, (owner, _) in capabilities(bed) if owner == uid]


def running(bed: Cluster, *options: str, user: str = "mbalice", wrap: str = f"{SHOW}; sleep 600") -> int:
    """A job that has run its first step."""
    job, message = sbatch(bed, *options, user=user, wrap=wrap)
    assert job, message
    bed.wait_job(job, "RUNNING")
    first_step(bed, job, user)
    return job


def cancel(bed: Cluster, *jobs: int) -> None:
    bed.run(["scancel", *map(str, jobs)])
    settled(bed)


@pytest.fixture(autouse=True)
def no_jobs_left(stack: Cluster) -> Iterator[None]:
    """Cancel what a test left running, so that it does not affect the next one."""
    yield
    for user in stack.users:
        stack.run(["scancel", "-u", user.name])
    until("the end of all jobs", lambda: stack.run(["squeue", "-h"]).stdout == "")


@pytest.fixture
def canary(stack: Cluster) -> Iterator[Path]:
    """A path where only root can create a file; after the test there must be none, and no node in trouble."""
    path = stack.directory / f"canary{time.monotonic_ns()}"
    yield path
    assert not path.exists()
    untroubled(stack)


# -- devices ------------------------------------------------------------------------------------------------------


def test_user_cannot_open_the_devices_of_another_user(stack: Cluster) -> None:
    job = running(stack, "--gres=mig:2g.20gb:1")
    own = caps_of(stack, "mbalice")
    assert len(own) == 2
    # Past the permission check the simulated device has no driver: ENXIO.
    assert attempts(stack, "mbalice", "O_RDONLY", own) == {"ENXIO"}
    assert attempts(stack, "mbalice", "O_RDWR", own) == {"EACCES"}
    assert attempts(stack, "mbbob", "O_RDONLY", own) == {"EACCES"}
    assert attempts(stack, "mbbob", "O_RDWR", own) == {"EACCES"}
    link = """
import os, sys
for path in sys.argv[1:]:
    for what, call in (("link", os.link), ("symlink", os.symlink)):
        copy = f"{what}{os.path.basename(path)}"
        try:
            call(path, copy)
        except OSError:
            continue
        print(os.path.abspath(copy))
"""
    copies = [Path(line) for line in python(stack, "mbbob", link, *own)]
    assert len(copies) >= 2
    assert attempts(stack, "mbbob", "O_RDONLY", copies) == {"EACCES"}
    again = """
import errno, os, sys
for path in sys.argv[1:]:
    for call in (lambda: os.open(f"/proc/self/fd/{os.open(path, os.O_PATH)}", os.O_RDONLY),
                 lambda: os.chmod(path, 0o666), lambda: os.chown(path, os.getuid(), -1), lambda: os.unlink(path),
                 lambda: os.rename(path, path + "x"), lambda: os.mknod("made", 0o20444, os.stat(path).st_rdev)):
        try:
            call()
            print("done")
        except OSError as error:
            print(errno.errorcode[error.errno])
"""
    assert set(python(stack, "mbbob", again, *own)) <= {"EACCES", "EPERM"}
    cancel(stack, job)
    for user in ("mbalice", "mbbob"):
        assert attempts(stack, user, "O_RDONLY", own) == {"EACCES"}


def test_links_and_handles_to_devices_are_useless_after_the_job(stack: Cluster) -> None:
    """Hard links where the file systems allow them, and handles that survive the job."""
    job = running(stack, "--gres=mig:2g.20gb:1")
    own = caps_of(stack, "mbalice")
    keep = """
import os, sys, time
for path in sys.argv[1:]:
    os.link(path, "kept" + os.path.basename(path))
    os.open(path, os.O_PATH)
print("ready", flush=True)
sys.stdin.readline()
for handle in range(3, 3 + len(sys.argv) - 1):
    try:
        os.open(f"/proc/self/fd/{handle}", os.O_RDONLY)
    except OSError as error:
        print(error.errno, flush=True)
"""
    holder = subprocess.Popen(
        stack.command([PYTHON, "-c", keep, *map(str, own)], "mbalice"),
        env=stack.client_env("mbalice"),
        cwd=stack.home("mbalice"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        kept = [stack.home("mbalice") / f"kept{path.name}" for path in own]
        assert all(path.exists() for path in kept)
        cancel(stack, job)
        assert attempts(stack, "mbalice", "O_RDONLY", kept) == {"EACCES"}
        message, _ = holder.communicate("go\n", timeout=PATIENCE_S)
        assert message.split() == ["13", "13"]
    other = running(stack, "--gres=mig:2g.20gb:1", user="mbbob")
    assert attempts(stack, "mbalice", "O_RDONLY", [*kept, *caps_of(stack, "mbbob")]) == {"EACCES"}
    cancel(stack, other)


def test_a_job_sees_its_own_slice_whatever_it_exports(stack: Cluster) -> None:
    other = running(stack, "--gres=mig:3g.40gb:1", user="mbbob")
    (foreign,) = account(stack, other, "RUNNING")["slices"]
    paths = caps_of(stack, "mbbob")
    names = ("CUDA_VISIBLE_DEVICES", "MIGBATCH_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    export = [f"{name}={foreign['mig_uuid']}" for name in names]
    open_command = f"{PYTHON} -c {shlex.quote(TRY)} O_RDONLY {' '.join(map(str, paths))}"
    wrap = f"{SHOW}; CUDA_VISIBLE_DEVICES={foreign['mig_uuid']} srun {open_command}"
    job = exporting(stack, export, "--gres=mig:1g.10gb:1", wrap=wrap)
    assert stack.wait_job(job) == "COMPLETED"
    text = stack.output(job)
    (slice_row,) = account(stack, job)["slices"]
    assert sights(text)["batch"] == sights(text)["task 0"] == [slice_row["mig_uuid"]] != [foreign["mig_uuid"]]
    assert text.split()[-2:] == ["EACCES", "EACCES"]
    cancel(stack, other)


# -- larger slices ------------------------------------------------------------------------------------------------


def no_client_filter(bed: Cluster, user: str) -> dict[str, str]:
    """An environment in which the user's commands do not load the cli_filter, by a slurm.conf of the user's own."""
    mine = bed.home(user) / "slurm.conf"
    text = bed.conf_text()
    mine.write_text("\n".join(line for line in text.splitlines() if not line.startswith("CliFilterPlugins")))
    return {"SLURM_CONF": str(mine)}


@pytest.mark.parametrize("field", ["comment", "extra"])
@pytest.mark.parametrize("forged", FORGED)
def test_forged_markers_are_refused(stack: Cluster, field: str, forged: str) -> None:
    env = no_client_filter(stack, "mbalice")
    sbatch_itself = stack.root.locate("sbatch")
    for options in (["--gres=mig:1g.10gb:1"], ["--gpus=1"], []):
        argv = [sbatch_itself, *options, f"--{field}={forged}", "--wrap", "true"]
        done = stack.run(argv, "mbalice", check=False, env=env)
        if field == "extra" and "first arg of -B" in done.stderr:
            return  # 22.05 has no --extra, and takes it for the beginning of --extra-node-info
        assert done.returncode != 0, (options, done.stdout)
        assert "must not contain '[mig:'" in done.stderr


CHANGES = (
    *(f"Comment={forged}" for forged in FORGED),
    *(f"Extra={forged}" for forged in FORGED),
    "Comment=migbatch: min=7g.80gb",
    "Comment=migbatch: mem=70gb",
    "Extra=migbatch: min=7g.80gb",
    "Comment=",
    "Comment=mine",
    "Gres=mig:none:1",
    "Gres=mig:1g",
    "Gres=mig:1g.10gb:0",
    "Gres=gpu:1",
    "Gres=mig:7g.80gb:1",
    "Gres=mig:auto",
    "Gres=",
    "AdminComment=[mig:7g.80gb:1]",
    "Name=[mig:7g.80gb:1]",
    "Gres=mig:1g.10gb:1 Comment=[mig:7g.80gb:1]",
    "Gres=mig:1g.10gb:1 Comment=free",
)


def update(bed: Cluster, job: int, change: str) -> None:
    """Update a job as its owner, with a client that does not prevent it."""
    argv = [bed.root.locate("scontrol"), "update", f"JobId={job}", *re.split(r" (?=Comment=)", change)]
    bed.run(argv, "mbalice", check=False, env=no_client_filter(bed, "mbalice"))


def test_marker_of_a_pending_job_always_equals_its_gres_in_slurm(stack: Cluster) -> None:
    """Whatever is tried, the marker, which the node reads, says what slurmctld has."""
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", "--hold")
    for change in (*CHANGES, *reversed(CHANGES)):
        update(stack, job, change)
        gres, marker = marked(stack, job)
        assert gres == marker or (not gres and not marker), change
    stack.run(["scancel", str(job)])
    # Another job: Slurm 22.05 also allocates the types that a pending job asked for before its Gres was changed.
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", "--hold")
    update(stack, job, "Gres=mig:1g.20gb:1 Comment=mine")
    assert marked(stack, job) == ("1g.20gb:1", "1g.20gb:1")
    for change in CHANGES:
        if not change.startswith("Gres="):
            update(stack, job, change)
    stack.run(["scontrol", "release", str(job)], "mbalice")
    assert stack.wait_job(job) == "COMPLETED"
    assert [slice_row["profile"] for slice_row in account(stack, job)["slices"]] == ["1g.20gb"]
    settled(stack)


@pytest.mark.parametrize("refused", ["Nice=-100", "Deadline=2001-01-01", "CoreSpec=1"])
def test_update_that_slurm_refuses_makes_no_slice_larger(stack: Cluster, refused: str) -> None:
    """slurmctld keeps the comment of an update that it refuses later, and with it the marker, but not the GRES."""
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", "--hold")
    argv = [stack.root.locate("scontrol"), "update", f"JobId={job}", "Gres=mig:7g.80gb:1", refused]
    done = stack.run(argv, "mbalice", check=False, env=no_client_filter(stack, "mbalice"))
    assert done.returncode != 0 and marked(stack, job)[0] == "1g.10gb:1"
    update(stack, job, "Comment=mine")
    stack.run(argv, "mbalice", check=False, env=no_client_filter(stack, "mbalice"))
    stack.run(["scontrol", "release", str(job)], "mbalice")
    assert stack.wait_job(job) == "COMPLETED"
    assert [slice_row["profile"] for slice_row in account(stack, job)["slices"]] == ["1g.10gb"]
    settled(stack)


def given_in_first_run(stack: Cluster, job: int) -> set[str]:
    """Release a held job, cancel it after its first run, and return the profiles that its node gave it."""
    stack.run(["scontrol", "release", str(job)], "mbalice")
    asked = ["squeue", "-h", "-t", "all", "-j", str(job), "--Format=State:0|,RestartCnt:0"]
    first = ("PENDING|0", "CONFIGURING|0", "RUNNING|0")
    until("the end of a run", lambda: stack.run(asked).stdout.strip() not in first)
    stack.run(["scancel", str(job)])
    settled(stack)
    return recorded_profiles(stack, job)


def recorded_profiles(stack: Cluster, job: int) -> set[str]:
    """Return the profiles that a job's runs had, as far as its nodes have reported them."""
    found = accounts(stack).get(str(job), {"slices": []})["slices"]
    return {slice_row["profile"] for slice_row in found}


def test_line_breaks_in_a_gres_make_no_slice_larger(stack: Cluster) -> None:
    """The node reads the GRES of a changed job in slurmctld; from 23.11 on an entry with count 0 may have any bytes."""
    job, _ = sbatch(stack, "--gres=mig:1g.20gb:1", "--hold")
    gres = f"mig:1g.10gb:1,gpu:a b\n{job} mig:7g.80gb:1\nx:0"
    update(stack, job, f"Gres={gres}")
    assert given_in_first_run(stack, job) <= {"1g.10gb", "1g.20gb"}


def test_updated_job_gets_its_slice_in_every_run(stack: Cluster) -> None:
    """Its nodes query slurmctld for its GRES and its restart count in each run."""
    wrap = f"{SHOW}; sleep $((600-600*SLURM_RESTART_COUNT))"
    job, _ = sbatch(stack, "--gres=mig:1g.10gb:1", "--hold", "--requeue", wrap=wrap)
    update(stack, job, "Gres=mig:1g.20gb:1")
    stack.run(["scontrol", "release", str(job)], "mbalice")
    stack.wait_job(job, "RUNNING")
    first_step(stack, job)
    stack.run(["scontrol", "requeue", str(job)], "mbalice")
    hasten(stack, job)
    found = account(stack, job)
    assert {slice_row["profile"] for slice_row in found["slices"]} == {"1g.20gb"}


NOT_READ = ["gres/gpu:0,mig:7g.80gb:1", "mig:7g.80gb:1", "mig:7g.80gb:1,xgres/mig:1g.10gb:1"]


@pytest.mark.parametrize("gres", NOT_READ)
def test_gres_entry_that_slurm_ignores_makes_no_slice_larger(stack: Cluster, gres: str) -> None:
    """slurmctld keeps the text of TresPerNode= as it came; Slurm up to 23.11 skips entries without its prefix."""
    job, _ = sbatch(stack, "--gres=mig:1g.20gb:1", "--hold")
    done = stack.run(["scontrol", "update", f"JobId={job}", f"TresPerNode={gres}"], "mbalice", check=False)
    assert done.returncode
    stack.run(["scontrol", "release", str(job)], "mbalice")
    assert {slice_row["profile"] for slice_row in account(stack, job)["slices"]} == {"1g.20gb"}


def test_gres_with_a_prefix_of_another_release_gives_only_allocated_slices(stack: Cluster) -> None:
    """Slurm 22.05 reads gres: and skips gres/; for a job that had no GRES the filter cannot know which one is read."""
    job, _ = sbatch(stack, "--hold")
    stack.run(["scontrol", "update", f"JobId={job}", "TresPerNode=gres/mig:2g.20gb:1"], "mbalice", check=False)
    given = given_in_first_run(stack, job)
    allocated = "JOB_GRES=mig:2g.20gb:1" in stack.run(["scontrol", "-d", "show", "job", str(job)]).stdout
    assert given <= ({"2g.20gb"} if allocated else set())
    if allocated:
        until("the record of its slice", lambda: recorded_profiles(stack, job) == {"2g.20gb"})


def test_updates_do_not_change_the_slice_of_a_running_or_requeued_job(stack: Cluster) -> None:
    wrap = f"{SHOW}; sleep $((600-600*SLURM_RESTART_COUNT))"
    job = running(stack, "--gres=mig:1g.20gb:1", "--open-mode=append", wrap=wrap)
    before = held(stack)
    for change in CHANGES:
        update(stack, job, change)
        assert marked(stack, job) == ("1g.20gb:1", "1g.20gb:1"), change
    assert held(stack) == before
    update(stack, job, "Comment=migbatch: min=7g.80gb mem=70gb")
    stack.run(["scontrol", "requeue", str(job)], "mbalice")
    until("the end of the first run", lambda: stack.job_state(job) != "RUNNING")
    for change in CHANGES:
        if not change.startswith("Gres="):
            update(stack, job, change)
    assert marked(stack, job)[0] == marked(stack, job)[1]
    assert hasten(stack, job) == "COMPLETED"
    assert {slice_row["profile"] for slice_row in account(stack, job)["slices"]} == {"1g.20gb"}
    settled(stack)


@pytest.mark.parametrize("change", ["NumNodes=1", "NodeList=n1", "ReqNodeList=n1"])
def test_running_job_gives_up_no_node_on_which_it_has_slices(stack: Cluster, change: str) -> None:
    """Slurm would count its slices there no more, and processes that it has left there would keep them."""
    job = running(stack, "-N2", "--gres=mig:2g.20gb:1")
    before = held(stack)
    update(stack, job, change)
    assert stack.run(["squeue", "-h", "-j", str(job), "-o", "%N"]).stdout.strip() == "n[1-2]"
    assert held(stack) == before
    cancel(stack, job)


# -- commands for root --------------------------------------------------------------------------------------------


def commands(canary: Path) -> list[str]:
    """Texts that run a command if they are passed to a shell, or that may break something else."""
    touch = f"touch {canary}"
    return [
        f"$({touch})",
        f"`{touch}`",
        f"; {touch};",
        f"| {touch}",
        f"\n{touch}\n",
        f"'; {touch}; '",
        f'"; {touch}; "',
        f"x && {touch} &",
        f"$({touch}) [mig",
        "%s%n%s%n%d",
        "'; DROP TABLE runs; --",
        "../../../../etc/passwd",
        "\\",
        "\x1f\x1b[2J\t",
        "\udcff\udcfe",
        "é漢字",
        "x" * 900,
    ]


@pytest.mark.parametrize("option", ["--job-name", "--comment", "--account", "--extra", "--output", "--wckey"])
def test_texts_of_users_are_never_run_as_commands(stack: Cluster, canary: Path, option: str) -> None:
    jobs = []
    for text in commands(canary):
        job, message = sbatch(stack, "--gres=mig:1g.10gb:1", f"{option}={text}", "--time=10")
        if option == "--extra" and "first arg of -B" in message:
            return
        if job:
            jobs.append(job)
    assert jobs
    for job in jobs:
        state = stack.wait_job(job, timeout=600.0)
        # An output file that cannot be created is the user's own failure.
        assert state == "COMPLETED" or option == "--output", (option, state)
    settled(stack)


def test_jobs_with_comments_up_to_slurms_limit_get_their_slice(stack: Cluster) -> None:
    for length in (1023, 1024, 2000, 60_000):
        job, message = sbatch(stack, "--gres=mig:1g.10gb:1", "--comment=" + "y" * length)
        if not job:
            assert "character" in message or "long" in message, message
            continue
        assert marked(stack, job) == ("1g.10gb:1", "1g.10gb:1")
        assert stack.wait_job(job) == "COMPLETED"
        assert len(sights(stack.output(job))["task 0"]) == 1
    settled(stack)


def test_jobs_run_in_work_directories_with_odd_names(stack: Cluster, canary: Path) -> None:
    names = ["dirs/" + text.replace("/", "_") for text in commands(canary) if len(text) < 200]
    made = "import os, sys\nfor name in sys.argv[1:]: os.makedirs(name, exist_ok=True)"
    python(stack, "mbalice", made, *names)
    jobs = []
    for name in names:
        job, message = sbatch(
            stack, "--gres=mig:1g.10gb:1", f"--chdir={stack.home('mbalice')}/{name}", "-o", "/dev/null"
        )
        assert job, message
        jobs.append(job)
    for job in jobs:
        assert stack.wait_job(job, timeout=600.0) == "COMPLETED"
    settled(stack)


CANARY_LIBRARY = """
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) {
    int file = open(PLACE, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (file >= 0) { dprintf(file, "%d\\n", (int)getuid()); close(file); }
}
"""


def test_exported_variables_do_not_reach_roots_hooks(stack: Cluster, tmp_path: Path) -> None:
    evil = stack.home("mbalice") / "evil"
    evil.mkdir()
    evil.chmod(0o777)  # root may write here too, if it can be made to
    place = evil / "loaded"
    source = tmp_path / "canary.c"
    source.write_text(CANARY_LIBRARY)
    library = evil / "canary.so"
    define = f'-DPLACE="{place}"'
    subprocess.run(["cc", "-shared", "-fPIC", "-w", define, "-o", str(library), str(source)], check=True)
    code = f"import os\nopen({str(evil / 'imported')!r}, 'a').write(f'{{os.getuid()}}\\n')\n"
    for name in ("sitecustomize", "usercustomize", "slurm_migbatch", "pynvml", "json", "_socket", "start"):
        (evil / f"{name}.py").write_text(code)
    (evil / "shell").write_text(f"id -u >> {evil / 'sourced'}\n")
    variables = {
        "LD_PRELOAD": library,
        "LD_LIBRARY_PATH": evil,
        "PYTHONPATH": evil,
        "PYTHONHOME": evil,
        "PYTHONSTARTUP": evil / "start.py",
        "BASH_ENV": evil / "shell",
        "ENV": evil / "shell",
        "MIGBATCH_ETC": evil,
        "MIGBATCH_CONFIG": evil / "migbatch.toml",
        "MIGBATCH_SIM_DIR": evil,
        "SLURM_JOB_COMMENT": "[mig:7g.80gb:1]",
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_USER": "root",
        "SLURM_JOB_ID": "1",
        "SLURMD_NODENAME": "../../evil",
        "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
    }
    export = [f"{name}={value}" for name, value in variables.items()]
    job = exporting(stack, export, "--gres=mig:1g.20gb:1", wrap="echo $CUDA_VISIBLE_DEVICES")
    assert stack.wait_job(job) in ("COMPLETED", "FAILED")
    until("its lease", lambda: [end is not None for _, _, end in leases(stack, job)] == [True])
    row = account(stack, job, "")
    assert [slice_row["profile"] for slice_row in row["slices"]] == ["1g.20gb"] and row["user"] == "mbalice"
    settled(stack)
    uid = str(stack.user("mbalice").uid)
    assert place.read_text().split(), "the library was loaded nowhere, so this test shows nothing"
    for witness in (place, evil / "imported", evil / "sourced"):
        if witness.exists():
            assert set(witness.read_text().split()) == {uid}, witness.name
    untroubled(stack)


def layout(bed: Cluster, node: str) -> tuple[object, ...]:
    """The state of a node's journal and driver, without reports and plans, which change by themselves."""
    seen = status(bed, node)
    return seen["gpus"], seen["runs"], seen["driver"], seen["zombies"]


def test_hooks_run_by_a_user_do_nothing(stack: Cluster) -> None:
    settled(stack)
    before = [layout(stack, node) for node in stack.spec.node_names]
    env = {
        "SLURM_JOB_ID": "4000",
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_USER": "root",
        "SLURM_JOB_COMMENT": "[mig:7g.80gb:1]",
        "SLURMD_NODENAME": "n1",
    }
    for hook in ("prolog", "epilog"):
        context = {"SLURM_SCRIPT_CONTEXT": f"{hook}_slurmd"}
        done = stack.run([str(stack.directory / "hooks" / hook)], "mbbob", check=False, env={**env, **context})
        assert done.returncode != 0 and "root" in done.stderr
    assert [layout(stack, node) for node in stack.spec.node_names] == before


# -- what belongs to root -----------------------------------------------------------------------------------------


def test_users_cannot_open_agent_socket_journal_plan_or_hand_offs(stack: Cluster) -> None:
    job = running(stack, "--gres=mig:1g.10gb:1")
    connect = """
import errno, socket, sys
try:
    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(sys.argv[1])
    print("connected")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    for node in stack.spec.node_names:
        home = stack.node_directory(node)
        assert python(stack, "mbbob", connect, home / "run/agent.sock") == ["EACCES"]
        secrets = [home / "state/journal.db", home / "state/plan.json", stack.directory / "etc/token"]
        until("the plan", secrets[1].exists)
        assert all(path.exists() for path in secrets)
        assert attempts(stack, "mbbob", "O_RDONLY", secrets) == {"EACCES"}
        for place in ("run/job/1.0", "run/job/x", "run/lock/x", "run/x", "state/x"):
            plant = "import os, sys\ntry: os.symlink('/etc/passwd', sys.argv[1])\nexcept OSError as e: print(e.errno)"
            assert python(stack, "mbbob", plant, home / place) in (["13"], ["17"]), place
        handed = [path for path in (home / "run/job").iterdir() if path.is_file()]
        if handed:
            assert attempts(stack, "mbbob", "O_RDWR", handed) == {"EACCES"}
            assert set(python(stack, "mbalice", TRY, "O_RDWR", *handed)) == {"EACCES"}
    cancel(stack, job)


def test_task_prolog_uses_only_hand_offs_written_by_root(stack: Cluster) -> None:
    job = running(stack, "--gres=mig:1g.10gb:1")
    node = next(name for name, holder, _ in held(stack) if holder == job)
    hook = str(stack.directory / "hooks/task_prolog")
    env = {"SLURM_JOB_ID": str(job), "SLURMD_NODENAME": node}
    assert "CUDA_VISIBLE_DEVICES" in stack.run([hook], "mbalice", env=env).stdout
    # another user's job, and a forged hand-off reached through a node name that is no node's
    assert "MIG-" not in stack.run([hook], "mbbob", check=False, env=env).stdout
    fake = stack.home("mbbob") / "fake/run/job"
    text = (stack.node_directory(node) / f"run/job/{job}.0").read_text()
    text = text.replace(f"uid {stack.user('mbalice').uid}", f"uid {stack.user('mbbob').uid}")
    plant = "import os, sys\nos.makedirs(sys.argv[1])\nopen(sys.argv[1] + '/' + sys.argv[2], 'w').write(sys.argv[3])"
    python(stack, "mbbob", plant, fake, f"{job}.0", text)
    env["SLURMD_NODENAME"] = "../home/mbbob/fake"
    assert "MIG-" not in stack.run([hook], "mbbob", check=False, env=env).stdout
    cancel(stack, job)


POST = """
import sys, urllib.error, urllib.request
url, path, body, scheme, credential = sys.argv[1:]
request = urllib.request.Request(url + path, body.encode(), {"Content-Type": "application/json"})
if scheme == "own":
    sys.path.insert(0, sys.argv[5].split("|")[0])
    from slurm_migbatch.node.auth import MungeSigner, headers
    signer = MungeSigner(sys.argv[5].split("|")[1])
    for name, value in headers(signer, "POST", path, "n1", body.encode())[0].items():
        request.add_header(name, value)
elif scheme:
    request.add_header("Authorization", f"MigBatch {scheme} {credential}")
try:
    print(urllib.request.urlopen(request, timeout=120).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.mark.parametrize("path", ["/node/v1/plan", "/node/v1/events"])
def test_node_api_requires_a_credential_of_root(stack: Cluster, path: str) -> None:
    url = f"http://127.0.0.1:{stack.ports['migbatchd']}"
    lie = {"seq": 10**6, "ts": time.time(), "kind": "fault", "gpu": None, "what": "x", "action": "x", "drain": True}
    body = json.dumps({"node": "n1", "have": 0, "wait": 0, "journal": "ab", "boot_id": "ab", "events": [lie]})
    own = f"{stack.directory / 'lib'}|{stack.munge_socket}"
    for scheme, credential in (("", ""), ("munge", "MUNGE:x:"), ("token", "x"), ("", "x"), ("own", own)):
        assert python(stack, "mbbob", POST, url, path, body, scheme, credential) in (["401"], ["403"]), scheme
    for method in ("GET", "PUT", "DELETE"):
        request = urllib.request.Request(url + path, method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        with refused.value:
            assert refused.value.code in (401, 403, 405)
    untroubled(stack)


ASK = """
import socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(sys.argv[1])
link.send(f"kind=submit\\nuid={sys.argv[2]}\\npartition=gpu\\ntres_per_node=mig:auto\\n\\n".encode())
print(link.recv(65536).decode().replace("\\n", " "))
"""


def test_submit_service_answers_users_only_about_themselves(stack: Cluster) -> None:
    socket_path = str(stack.product.state / "submit.sock")
    alice, bob = stack.user("mbalice").uid, stack.user("mbbob").uid
    assert "verdict=accept" in python(stack, "mbbob", ASK, socket_path, bob)
    for other in (alice, 0):
        assert "verdict=accept" not in python(stack, "mbbob", ASK, socket_path, other)
    assert python(
        stack, "mbbob", "import os, sys\ntry: os.unlink(sys.argv[1])\nexcept OSError as e: print(e.errno)", socket_path
    ) == ["13"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(socket_path)  # still served
