"""The slices of steps that request some of those of their job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.node import step_slices
from slurm_migbatch.node.step_slices import Request, choose, of_step, requested
from tests.support.directories import open_to_users
from tests.support.nodes import ALICE

SLICES = [[f"MIG-{i}", profile, "9728", "GPU-0"] for i, profile in enumerate(["1g.10gb", "1g.10gb", "1g.20gb+me"])]


@pytest.fixture
def tasks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that live until their input is closed."""
    line = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started = [subprocess.Popen(line, stdin=subprocess.PIPE) for _ in range(2)]
    yield started
    for task in started:
        end(task)


def end(task: subprocess.Popen[bytes]) -> None:
    """End a task, and wait for it."""
    task.communicate()


def one() -> Request:
    """Request any slice."""
    return [("", 1)]


def unknown() -> Request:
    """Fail, because what the step requested is known already."""
    raise AssertionError


def names(chosen: list[list[str]]) -> list[str]:
    """Return the UUIDs of slices."""
    return [row[0] for row in chosen]


SHOWN = """StepId=17.0 UserId=1001 StartTime=2026-11-29T02:12:28 TimeLimit=UNLIMITED
   State=RUNNING Partition=gpu NodeList=n1
   Nodes=1 CPUs=2 Tasks=2 Name=a TresPerNode=gres/mig:7 Network=(null)
   TRES=cpu=2,mem=0,node=1
   SrunHost:Pid=n1:16536
   TresBind=gres/mig:per_task:1
   TresPerStep=cpu:2
"""


@pytest.mark.parametrize(
    ("shown", "request_of"),
    [
        ("TresPerNode=gres:mig:1g.10gb:1", [("1g.10gb", 1)]),  # 22.05
        ("TresPerNode=gres/mig:2,gres/fpga:3,gres/mig:1g.20gb.me:1", [("1g.20gb.me", 1), ("", 2)]),  # 23.11 and later
        ("TresPerTask=cpu:2,gres/mig:1g.10gb:2", [("1g.10gb", 6)]),
        ("TresPerTask=cpu=2,gres/mig=1", [("", 3)]),  # the user's own form (24.11 and later)
        ("TresPerNode=gres/mig:1g.10gb=2", [("1g.10gb", 2)]),
        ("TresPerNode=gres/mig", [("", 1)]),
        ("TresPerNode=gres/mig:1g.10gb", [("1g.10gb", 1)]),
        ("TresPerNode=gres/mig:0", []),
        ("TresPerNode=gres/migrate:1,gres/gpu:2", []),
        ("TresPerNode=(null)", []),
    ],
)
def test_request_of_a_step_is_read(shown: str, request_of: Request) -> None:
    assert requested(SHOWN + f"   {shown}\n\n", 0, 3) == request_of


def test_other_steps_of_the_job_are_not_read() -> None:
    """Slurm 24.05 to 25.11 with a step manager shows all steps of the job."""
    steps = {0: "TresPerNode=gres/mig:2", 1: "TresPerNode=gres/mig:1", 10: "TresPerNode=(null)"}
    shown = "".join(SHOWN.replace("=17.0 ", f"=17.{step} ") + f"   {tres}\n\n" for step, tres in steps.items())
    assert [requested(shown, step, 1) for step in steps] == [[("", 2)], [("", 1)], []]


@given(st.text(max_size=30), st.integers(1, 200))
def test_any_output_is_read(text: str, tasks: int) -> None:
    assert requested("", 0, tasks) == []
    assert all(number > 0 for _, number in requested(f"TresPerNode={text}", 0, tasks))
    assert all(number > 0 for _, number in requested(f"TresPerTask=gres/mig:{text}", 0, tasks))


@given(
    st.lists(st.sampled_from(["1g.10gb", "2g.20gb"]), min_size=1, max_size=9),
    st.lists(st.tuples(st.sampled_from(["1g.10gb", "2g.20gb", ""]), st.integers(1, 4)), min_size=1, max_size=3),
    st.dictionaries(st.integers(0, 8), st.integers(1, 3)),
)
def test_as_many_slices_are_chosen_as_requested_while_there_are_any(
    profiles: list[str], request: list[tuple[str, int]], used: dict[int, int]
) -> None:
    slices = [[f"MIG-{i}", profile, "9728", "GPU-0"] for i, profile in enumerate(profiles)]
    chosen = choose(slices, request, {f"MIG-{i}": count for i, count in used.items()})
    assert len(chosen) == min(len(slices), sum(number for _, number in request))
    assert [row for row in slices if row in chosen] == chosen, "in their order, each once"
    for profile in ("1g.10gb", "2g.20gb"):
        asked = sum(number for name, number in request if name == profile)
        assert sum(row[1] == profile for row in chosen) >= min(asked, profiles.count(profile)) or not asked


def test_profile_with_an_attribute_is_found_under_its_gres_type() -> None:
    assert names(choose(SLICES, [("1g.20gb.me", 1)], {})) == ["MIG-2"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file, as root creates it."""
    file = tmp_path / "17.0.steps"
    file.touch(0o600)
    return file


def test_running_steps_of_a_job_have_different_slices(path: Path, tasks: list[subprocess.Popen[bytes]]) -> None:
    def slices_of(step: int, task: int, number: int = 1) -> list[str]:
        return names(of_step(str(path), step, str(tasks[task].pid), SLICES, lambda: [("1g.10gb", number)]))

    assert slices_of(0, 0) == ["MIG-0"]
    assert slices_of(1, 1) == ["MIG-1"]
    first = of_step(str(path), 0, str(tasks[0].pid), SLICES, unknown)
    assert names(first) == ["MIG-0"], "another task of the first step, without a query"
    assert len(slices_of(3, 1)) == 1, "an overlapping step shares"
    end(tasks[0])
    assert slices_of(4, 1) == ["MIG-0"], "of the step that has ended"


def test_step_lives_while_one_of_its_tasks_does(path: Path, tasks: list[subprocess.Popen[bytes]]) -> None:
    for task in tasks:
        of_step(str(path), 0, str(task.pid), SLICES, one)
    end(tasks[1])
    assert names(of_step(str(path), 1, str(tasks[0].pid), SLICES, one)) == ["MIG-1"]


def test_number_of_a_process_that_is_used_again_is_not_the_task(
    path: Path, tasks: list[subprocess.Popen[bytes]]
) -> None:
    path.write_text(f"0 {tasks[0].pid} 1 0\n")
    assert names(of_step(str(path), 1, str(tasks[1].pid), SLICES, one)) == ["MIG-0"]


HIDDEN = """
import os, sys
from slurm_migbatch.node.step_slices import of_step

def task(step):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # as slurmstepd's: another user's now, and no program started yet
        user = int(sys.argv[2])
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        own = str(os.getpid())
        if os.fork() == 0:
            assert not os.path.exists(f"/proc/{own}")
            chosen = of_step(sys.argv[1], step, own, [["MIG-0", "", "", ""], ["MIG-1", "", "", ""]], lambda: [("", 1)])
            os.write(writer, chosen[0][0].encode())
            os._exit(0)
        os.wait()
        os.read(0, 1)
        os._exit(0)
    os.close(writer)
    return os.read(reader, 9).decode()

print(*[task(step) for step in range(2)])
"""


def test_task_that_proc_hides_until_it_starts_its_program_lives(path: Path) -> None:
    """With hidepid= of proc(5), as on many clusters, its own user does not see it before."""
    os.chown(path, ALICE, ALICE)
    open_to_users(path.parent)
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    line = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", HIDDEN, str(path), str(ALICE)]
    ended = subprocess.run(line, stdin=subprocess.PIPE, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("MIG-0 MIG-1\n", "")


@pytest.mark.parametrize("content", [b"", b"\xff\n 1 2\n0 x y 0\n", b"0 1  0\n", b"a" * 3000 + b"\n", b"0 1 2 9\n\n\n"])
def test_damaged_lines_are_ignored(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    own = str(os.getpid())
    assert names(of_step(str(path), 1, own, SLICES, one)) == ["MIG-0"]
    assert path.read_text(errors="replace").splitlines()[-1].startswith(f"1 {own} ")


def test_job_of_very_many_steps_uses_little_of_the_file(path: Path, tasks: list[subprocess.Popen[bytes]]) -> None:
    """Only the agent can shorten it: `progress.py` says why."""
    of_step(str(path), 0, str(tasks[0].pid), SLICES, one)
    path.write_text(path.read_text() + "".join(f"{step} {tasks[1].pid} 1 1\n" for step in range(1, 1000)))
    for step in range(1000, 1002):
        assert names(of_step(str(path), step, str(tasks[1].pid), SLICES, one)) != ["MIG-0"]
    assert len(path.read_text().rpartition("\n\n")[2].splitlines()) == 3, "of the steps that run"


@pytest.mark.parametrize("kind", ["none", "missing", "link", "directory"])
def test_step_without_the_file_gets_the_first_slices(tmp_path: Path, kind: str) -> None:
    path = "" if kind == "none" else str(tmp_path / "steps")
    if kind == "link":
        (tmp_path / "target").touch()
        (tmp_path / "steps").symlink_to("target")
    elif kind == "directory":
        (tmp_path / "steps").mkdir()
    assert names(of_step(path, 1, str(os.getpid()), SLICES, lambda: [("", 2)])) == ["MIG-0", "MIG-1"]
    if kind == "link":
        assert not (tmp_path / "target").read_text()


def test_step_does_not_wait_for_a_lock_that_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_slices, "LOCK_S", 0.01)
    code = "import os, sys; f = open(sys.argv[1], 'w'); os.lockf(f.fileno(), os.F_LOCK, 0); print(flush=True); input()"
    line = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert names(of_step(str(path), 1, str(os.getpid()), SLICES, one)) == ["MIG-0"]
        holder.communicate(b"\n")


ASKING = """
import sys
from slurm_migbatch.node.step_slices import of_step

def ask():
    print("asks", flush=True)
    input()
    return [("", 1)]

path, step, pid = sys.argv[1:]
print(*[row[0] for row in of_step(path, int(step), pid, [["MIG-0", "", "", ""], ["MIG-1", "", "", ""]], ask, 60.0)])
"""


def test_steps_that_start_together_ask_at_the_same_time(path: Path, tasks: list[subprocess.Popen[bytes]]) -> None:
    """Otherwise they would wait for each other at a slow slurmctld, and then give up."""

    def start(step: str, task: int) -> subprocess.Popen[str]:
        line = [sys.executable, "-c", ASKING, str(path), step, str(tasks[task].pid)]
        return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start("0", 0) as first, start("1", 1) as second:
        for step in (first, second):
            assert step.stdout is not None
            assert step.stdout.readline() == "asks\n"
        with start("0", 1) as other:
            assert [step.communicate("\n")[0] for step in (second, first)] == ["MIG-0\n", "MIG-1\n"]
            assert other.communicate()[0] == "MIG-1\n", "another task of the first step, which asked nothing"


@pytest.mark.parametrize("request_of", [[("", 3)], [("", 9)], []])
def test_step_with_all_slices_leaves_the_others_their_own(
    path: Path, tasks: list[subprocess.Popen[bytes]], request_of: Request
) -> None:
    """A step that requested none has all of its job."""
    pid = str(tasks[0].pid)
    assert of_step(str(path), 0, pid, SLICES, lambda: request_of) == SLICES
    assert of_step(str(path), 0, pid, SLICES, unknown) == SLICES
    assert names(of_step(str(path), 1, pid, SLICES, one)) == ["MIG-0"]
