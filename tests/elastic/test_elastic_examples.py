"""The examples, as Slurm runs them: USR1, then TERM or KILL, then restart, with the result of an uninterrupted run."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slurm_migbatch
from slurm_migbatch import elastic
from slurm_migbatch.node import progressreport
from slurm_migbatch.workload import hints

ROOT = Path(slurm_migbatch.__file__).parent.parent
EXAMPLES = ROOT / "sbatch_examples"
SIZES = [("1g.10gb", 9856), ("3g.40gb", 40192), ("2g.20gb", 20096)]


class Job:
    """A batch job of 120 steps that is requeued and restarted in the same directory."""

    def __init__(self, script, directory):
        self.script, self.directory, self.restarts = script, directory, 0
        self.progress = directory / "progress"
        self.out = directory / "out"

    def start(self):
        """Start a run in its own process group, as Slurm signals it."""
        profile, memory = SIZES[self.restarts % len(SIZES)]
        self.progress.write_text("")
        environ = {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "STEPS": "120",
            "STEP_SECONDS": "0.01", "EVERY": "10", "SLURM_SUBMIT_DIR": str(self.directory), "SLURM_JOB_ID": "17",
            "TRAINING": str(EXAMPLES / "elastic_training.py"), "MIGBATCH_PROGRESS": str(self.progress),
            "MIGBATCH_PROFILE": profile, "MIGBATCH_MEMORY_MIB": str(memory), "IDLE_SECONDS": "600",
            "SLURM_RESTART_COUNT": str(self.restarts),
        }  # fmt: skip
        self.restarts += 1
        with self.out.open("ab") as out:
            return subprocess.Popen(
                ["bash", str(EXAMPLES / self.script)], env=environ, stdout=out, stderr=out, start_new_session=True
            )

    def reports(self):
        return [progressreport.parse(line) for line in self.progress.read_bytes().splitlines()]

    def checkpoint(self):
        return max((line.checkpoint for line in self.reports() if line.checkpoint), default=0.0)

    def steps(self):
        return max((line.steps for line in self.reports() if line.steps), default=0)

    def result(self):
        return [
            line for line in self.out.read_text().splitlines() if line.startswith(("step 100:", "state", "trained"))
        ]


def until(ready):
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def tell(child, number):
    """Signal every process of the job, as `scancel --full` and the end of a job do."""
    os.killpg(child.pid, number)


@pytest.fixture(params=["elastic_training.sh", "elastic_bash.sh"])
def job(request, tmp_path):
    return Job(request.param, tmp_path)


@pytest.fixture
def quiet(job, tmp_path_factory):
    """The last lines of an uninterrupted run."""
    alone = Job(job.script, tmp_path_factory.mktemp("quiet"))
    assert alone.start().wait(60) == 0
    assert alone.reports()[-1].done == 1
    return alone.result()


@pytest.mark.slow
def test_interrupted_example_ends_with_the_same_result(job, quiet):
    child = job.start()
    until(job.reports)
    asked = time.time()
    tell(child, signal.SIGUSR1)
    until(lambda: job.checkpoint() >= asked)
    time.sleep(0.1)
    stood = job.steps()
    assert child.poll() is None
    tell(child, signal.SIGTERM)
    assert child.wait(60) == 143

    child = job.start()  # killed without warning: the work since the last checkpoint is repeated
    until(job.reports)
    assert job.reports()[0].restored == stood
    time.sleep(0.3)
    assert child.poll() is None
    tell(child, signal.SIGKILL)
    child.wait()

    child = job.start()
    until(job.reports)
    tell(child, signal.SIGTERM)
    assert child.wait(60) == 143

    child = job.start()
    assert child.wait(60) == 0, job.out.read_text()
    assert job.reports()[-1].done == 1
    assert None not in job.reports()
    assert job.result() == quiet
    profiles = [line for line in job.out.read_text().splitlines() if "from step" in line]
    assert len(profiles) == 4 and "3g.40gb" in profiles[1]


def test_bash_example_continues_when_no_term_follows_usr1(tmp_path):
    job = Job("elastic_bash.sh", tmp_path)
    child = job.start()
    until(job.reports)
    asked = time.time()
    tell(child, signal.SIGUSR1)
    until(lambda: job.checkpoint() >= asked)
    asked = time.time()
    tell(child, signal.SIGUSR1)  # which ends the wait
    until(lambda: job.checkpoint() >= asked)
    tell(child, signal.SIGTERM)
    assert child.wait(60) == 143


def test_bash_example_keeps_its_checkpoint_on_a_full_disk(tmp_path):
    job = Job("elastic_bash.sh", tmp_path)
    child = job.start()
    until(job.checkpoint)
    whole = tmp_path / "elastic-17.state"
    beside = tmp_path / "elastic-17.state.new"
    until(lambda: not beside.exists())
    beside.symlink_to("/dev/full")
    until(lambda: "No space left" in job.out.read_text())
    step, state = whole.read_text().split()
    assert int(step) > 0 and int(state) > 0
    tell(child, signal.SIGKILL)
    child.wait()


@pytest.mark.slow
def test_bash_example_fails_if_its_last_checkpoint_cannot_be_written(tmp_path):
    job = Job("elastic_bash.sh", tmp_path)
    (tmp_path / "elastic-17.state.new").symlink_to("/dev/full")
    assert job.start().wait(60) == 1
    assert "No space left" in job.out.read_text() and not any(line.done for line in job.reports())


def test_bash_example_saves_even_if_it_cannot_report(tmp_path):
    text = (EXAMPLES / "elastic_bash.sh").read_text()
    functions = text[text.index("report()") : text.index("step=0 state=1")]
    variables = f"CHECKPOINT={tmp_path}/state MIGBATCH_PROGRESS=/dev/full step=3 state=4\n"
    done = subprocess.run(["bash", "-c", f"{variables}{functions}save"], capture_output=True)
    assert (tmp_path / "state").read_text() == "3 4\n"
    assert b"No space left" in done.stderr and done.returncode == 0


def test_bash_example_reports_checkpoints_where_directories_cannot_be_synced(tmp_path, monkeypatch):
    foreign = tmp_path / "bin" / "sync"
    foreign.parent.mkdir()
    foreign.write_text(f'#!/bin/sh\nif [ -d "$1" ]; then exit 1; fi\nexec {shutil.which("sync")} "$@"\n')
    foreign.chmod(0o755)
    monkeypatch.setenv("PATH", f"{foreign.parent}:{os.environ['PATH']}")
    job = Job("elastic_bash.sh", tmp_path)
    child = job.start()
    until(lambda: job.checkpoint() or child.poll() is not None)
    tell(child, signal.SIGTERM)
    assert child.wait(60) == 143


def test_bash_example_fails_when_its_program_fails(tmp_path):
    script = (EXAMPLES / "elastic_bash.sh").read_text().replace("exec sleep", "exec false")
    (tmp_path / "failing.sh").write_text(script)
    done = subprocess.run(
        ["bash", str(tmp_path / "failing.sh")], env={"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    )
    assert done.returncode == 1


@pytest.mark.parametrize("name", ["elastic_training.sh", "elastic_bash.sh"])
def test_example_scripts_request_the_needed_options(name):
    options = [line for line in (EXAMPLES / name).read_text().splitlines() if line.startswith("#SBATCH")]
    for option in ("--requeue", "--open-mode=append", "--gres=mig:auto"):
        assert f"#SBATCH {option}" in options
    (comment,) = [line for line in options if "--comment" in line]
    assert "role=train" in comment and "signal=usr1" in comment and len(comment) < 200


@pytest.mark.parametrize(("profile", "memory_mib"), SIZES)
def test_example_takes_no_more_memory_than_it_states(profile, memory_mib):
    """Another job of the same user may share the slice, and gets the rest of its memory."""
    (comment,) = re.findall(r'--comment="(.*)"', (EXAMPLES / "elastic_training.sh").read_text())
    stated = hints.parse(comment).mem_mib
    (per_item, fixed) = re.search(
        r"Memory\(bytes_per_item=(\S+), fixed_bytes=(\S+)\)", (EXAMPLES / "elastic_training.py").read_text()
    ).groups()
    fits = elastic.Memory(float(per_item), float(fixed))
    taken_mib = (float(fixed) + fits(elastic.Slice(profile, memory_mib)) * float(per_item)) / 2**20
    assert stated is None or taken_mib <= stated


def test_bash_example_reads_no_checkpoint_of_another_user(tmp_path):
    """In a directory where others may write; bash would run what the text asks for."""
    foreign = tmp_path / "elastic-17.state"
    foreign.write_text(f"a[$(touch${{IFS}}{tmp_path}/run)] 1\n")
    os.chown(foreign, 65534, 65534)
    job = Job("elastic_bash.sh", tmp_path)
    assert job.start().wait(60) == 1
    assert "belongs to another user" in job.out.read_text() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("owner", [0, 65534])
def test_lora_example_resumes_from_no_checkpoint_of_another_user(tmp_path, owner):
    (tmp_path / "lora-17/checkpoint-5").mkdir(parents=True)
    (tmp_path / "lora-17/checkpoint-5/trainer_state.json").touch()
    os.chown(tmp_path / "lora-17", owner, owner)
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", EXAMPLES / "lora.sh"], env=environ, capture_output=True, text=True)
    assert done.returncode == (1 if owner else 0)
    assert ("--resume_from_checkpoint" in done.stdout) is (not owner)
