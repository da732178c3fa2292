"""The hostile users' parts of the soak end by themselves and on SIGTERM, have an effect, and are judged by bars."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_migbatch.lab.bench import soak
from slurm_migbatch.testbed import hostile
from slurm_migbatch.testbed.proc import wait_until

PROGRAM = hostile.__file__


@pytest.fixture
def places(tmp_path):
    """(arguments of each part, environment): commands of Slurm that accept everything, sockets that nobody answers."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "scontrol", "scancel"):
        (commands / name).write_text("#!/bin/sh\necho 17\n")
        (commands / name).chmod(0o755)
    progress = tmp_path / "n1/state.progress/17.0"
    progress.parent.mkdir(parents=True)
    progress.touch()
    (tmp_path / "n1/scratch").mkdir()
    env = {"PATH": f"{commands}:/usr/bin:/bin", "MIGBATCH_PROGRESS": str(progress), "SLURM_JOB_ID": "17"}
    with (
        socket.create_server(("127.0.0.1", 0)) as api,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        listener.bind(str(tmp_path / "submit.sock"))
        listener.listen(50)
        arguments = {
            "submit": [],
            "report": [],
            "descriptors": ["3", "50"],
            "node_api": [str(api.getsockname()[1])],
            "submit_socket": [str(tmp_path / "submit.sock")],
        }
        yield arguments, env


def start(places, part, seconds, cwd):
    arguments, env = places
    line = [sys.executable, "-ISB", PROGRAM, part, str(seconds), *arguments[part]]
    return subprocess.Popen(line, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(hostile.PARTS))
def test_part_ends_by_itself_and_prints_its_counts(places, part, tmp_path):
    process = start(places, part, 2, tmp_path)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    counts = json.loads(output)
    assert counts and all(counts.values())
    assert not list(tmp_path.glob("**/linked.*"))


def catches_sigterm(pid):
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.parametrize("part", sorted(hostile.PARTS))
def test_part_ends_on_sigterm(places, part, tmp_path):
    process = start(places, part, 3600, tmp_path)
    try:
        wait_until(lambda: catches_sigterm(process.pid), 60.0, "a handler for SIGTERM")
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    counts = json.loads(output)
    if part == "descriptors":
        assert counts == {"processes": 3, "descriptors": 150}


@pytest.mark.slow
def test_report_part_fills_the_progress_file_up_to_its_bound_by_every_link(places, tmp_path, monkeypatch):
    """The bound is below the limit, so that a machine with room for everything survives it."""
    text = Path(PROGRAM).read_text().replace("128 << 20", "1 << 20")
    (tmp_path / "less.py").write_text(text)
    _, env = places
    done = subprocess.run(
        [sys.executable, str(tmp_path / "less.py"), "report", "3"],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    counts = json.loads(done.stdout)
    assert counts["hard links"] == 2
    size = os.stat(env["MIGBATCH_PROGRESS"]).st_size
    assert 1 << 20 <= size == counts["bytes"] < 2 << 20


GOOD = {
    "jobs": 5,
    "completed": 5,
    "misfits": 0,
    "unplanned_starts": 0,
    "drained_nodes": [],
    "leftovers": [],
    "problems": [],
    "ended": [],
    "supply_behind_s": 9.9,
    "hostile": {"mbdave submit": {"submissions": 3}},
}


@pytest.mark.parametrize(
    "fault",
    [
        {"completed": 4},
        {"misfits": 1},
        {"unplanned_starts": 1},
        {"drained_nodes": ["n1: drained: Epilog error"]},
        {"leftovers": ["n1: 1g.10gb held of job 3"]},
        {"problems": ["n1: MIG-1 of job 3 does not exist"]},
        {"ended": ["migbatchd"]},
        {"supply_behind_s": 10.1},
        {"hostile": {"mbdave submit": {}}},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_every_fault_fails_exactly_one_bar(fault):
    assert all(bar.ok for bar in soak.bars_of(GOOD))
    assert sum(not bar.ok for bar in soak.bars_of({**GOOD, **fault})) == 1
