"""Real training, interrupted by signals at random steps and resumed with other micro-batches, against a straight run.

The tolerance is the effect of adding the same numbers in another order: losses of 90 steps agree to a relative 1e-9.
"""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm_migbatch import elastic
from slurm_migbatch.elastic.disk import Disk
from slurm_migbatch.node import progress, progressreport
from tests.support import small_training
from tests.support.small_training import BATCH, ITEMS, TOTAL, train

PROGRAM = str(Path(small_training.__file__))
TOLERANCE = 1e-9
KINDS = ("leave", "pause and leave", "kill", "pause and kill", "pause, nothing, and leave")


class Losses:
    """The output of runs: "step loss" lines; a repeated step has a repeated line."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def curve(self):
        return read_curve(self.text)


def read_curve(text):
    """The loss of each step; repeated steps must have the same loss."""
    curve = {}
    for line in text.splitlines():
        step, loss = line.split()
        if int(step) in curve:
            assert float(loss) == pytest.approx(curve[int(step)], rel=TOLERANCE)
        curve[int(step)] = float(loss)
    return curve


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The loss curve of uninterrupted training on a large slice."""
    losses = Losses()
    directory = tmp_path_factory.mktemp("straight")
    with elastic.Trainer(directory, items=ITEMS, effective_batch=BATCH, seed=11, environ={}) as run:
        train(run, losses)
    curve = losses.curve()
    assert list(curve) == list(range(TOTAL))
    losses_by_step = list(curve.values())
    assert sum(losses_by_step[-7:]) < 0.6 * sum(losses_by_step[:7])  # it does learn
    return curve


class Life:
    """Training as a process that is started repeatedly."""

    def __init__(self, directory):
        self.directory, self.losses = directory, directory / "losses"
        self.progress = directory / "17.0"
        self.losses.touch()

    def start(self, most, **care):
        self.progress.write_text("")
        options = [f"{key}={value}" for key, value in {"every_s": 0.0, "idle_s": 60.0, **care}.items()]
        return subprocess.Popen(
            [sys.executable, "-W", "error", PROGRAM, str(self.directory / "checkpoints"), str(self.losses), str(most),
             *options],
            env={"PYTHONPATH": ":".join(sys.path), "MIGBATCH_PROGRESS": str(self.progress)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def reports(self):
        return [progressreport.parse(line) for line in self.progress.read_bytes().splitlines()]

    def checkpoint(self):
        """The time of the newest reported checkpoint."""
        return max((line.checkpoint for line in self.reports() if line.checkpoint), default=0.0)

    def curve(self):
        return read_curve(self.losses.read_text())


def ended(child):
    """Exit code and error output."""
    _, errors = child.communicate(timeout=60)
    return child.returncode, errors


def until(ready):
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.005)


def reach(child, step):
    """Read until a step begins; False if the training ended before."""
    return any(int(line) >= step for line in child.stdout)


def interrupt(life, child, kind):
    """End a run in one of the possible ways."""
    if kind.startswith("pause"):
        before = time.time()
        child.send_signal(signal.SIGUSR1)
        until(lambda: life.checkpoint() >= before)
        size = life.losses.stat().st_size
        if "nothing" in kind:
            until(lambda: life.losses.stat().st_size > size)
        else:
            time.sleep(0.05)
            assert life.losses.stat().st_size == size  # it is paused
    child.send_signal(signal.SIGKILL if kind.endswith("kill") else signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_interrupted_and_resized_training_has_the_same_loss_curve(tmp_path, straight, seed):
    chance = random.Random(seed)
    life = Life(tmp_path)
    safe = 0
    for kind in chance.sample(KINDS, len(KINDS)):
        child = life.start(chance.choice((1, 3, 7, 16, 32)), idle_s=0.2 if "nothing" in kind else 60.0)
        assert reach(child, len(life.curve()) + chance.randrange(8))
        interrupt(life, child, kind)
        code, errors = ended(child)
        assert code == (-signal.SIGKILL if kind.endswith("kill") else 143), errors
        assert "Traceback" not in errors
        lines = life.reports()
        restored = next((line.restored for line in lines if line.restored is not None), 0)
        assert restored >= safe
        safe = max([line.steps for line in lines if line.checkpoint is not None], default=restored)
        if kind != "kill":
            assert safe == len(life.curve())  # nothing is lost
    assert ended(life.start(8))[0] == 0
    assert life.reports()[0].restored >= safe
    curve = life.curve()
    assert sorted(curve) == list(range(TOTAL))
    assert [curve[step] for step in range(TOTAL)] == pytest.approx(
        [straight[step] for step in range(TOTAL)], rel=TOLERANCE
    )


def test_fixed_micro_batches_give_bitwise_equal_losses(tmp_path):
    """micro= fixes the order of additions: not even the last digit differs."""
    curves = []
    for most, breaks in ((32, ()), (5, (10, 33))):
        losses = Losses()
        for end in (*breaks, TOTAL):
            with elastic.Trainer(
                tmp_path / str(most), items=ITEMS, effective_batch=BATCH, fits=most, micro=5, seed=11, environ={}
            ) as run:
                x, _ = small_training.data()
                assert x.shape == (ITEMS, 5)
                train(run, losses, end)
        curves.append(losses.curve())
    assert curves[0] == curves[1]


def test_different_micro_batches_change_only_rounding(tmp_path, straight):
    """This is the only reason for the tolerance."""
    losses = Losses()
    with elastic.Trainer(tmp_path, items=ITEMS, effective_batch=BATCH, fits=3, seed=11, environ={}) as run:
        train(run, losses)
    curve = losses.curve()
    assert curve != straight
    assert max(abs(curve[step] / straight[step] - 1) for step in curve) < TOLERANCE


def test_equal_weights_give_a_different_loss_curve(tmp_path, straight, monkeypatch):
    """Shows that the comparison of curves detects a wrong weight of the short last micro-batch."""
    from slurm_migbatch.elastic import micro_batches

    def equal(self):
        begin = 0
        for size in self._sizes:
            yield micro_batches.Micro(self._indices[begin : begin + size], 1 / len(self._sizes), False)
            begin += size

    monkeypatch.setattr(micro_batches.Step, "__iter__", equal)
    losses = Losses()
    with elastic.Trainer(tmp_path, items=ITEMS, effective_batch=BATCH, fits=5, seed=11, environ={}) as run:
        train(run, losses)
    assert max(abs(losses.curve()[step] / straight[step] - 1) for step in straight) > 1e-3


# -- signals, one by one


def test_training_pauses_without_cpu_use_after_usr1(tmp_path):
    life = Life(tmp_path)
    child = life.start(8)
    assert reach(child, 5)
    before = time.time()
    child.send_signal(signal.SIGUSR1)
    until(lambda: life.checkpoint() > before)
    clock = Path(f"/proc/{child.pid}/stat").read_text().split()[13:15]
    size = life.losses.stat().st_size
    time.sleep(0.5)
    assert life.losses.stat().st_size == size
    after = Path(f"/proc/{child.pid}/stat").read_text().split()[13:15]
    assert sum(map(int, after)) - sum(map(int, clock)) <= 2  # ticks of 10 ms
    child.send_signal(signal.SIGTERM)
    assert ended(child)[0] == 143
    assert life.reports()[-1].steps == len(life.curve())


def test_second_usr1_is_reported_without_writing_again(tmp_path):
    life = Life(tmp_path)
    child = life.start(8)
    assert reach(child, 5)
    for _ in range(3):
        before = time.time()
        child.send_signal(signal.SIGUSR1)
        until(lambda before=before: life.checkpoint() > before)
    files = {path: path.stat().st_ino for path in (tmp_path / "checkpoints").glob("step-*")}
    before = time.time()
    child.send_signal(signal.SIGUSR2)
    until(lambda: life.checkpoint() > before)
    assert {path: path.stat().st_ino for path in (tmp_path / "checkpoints").glob("step-*")} == files
    child.terminate()
    assert ended(child)[0] == 143


def test_training_continues_when_no_term_follows_usr1(tmp_path):
    """A reclaim may be cancelled."""
    life = Life(tmp_path)
    child = life.start(8, idle_s=0.3)
    assert reach(child, 5)
    child.send_signal(signal.SIGUSR1)
    code, errors = ended(child)
    assert code == 0
    assert "training continues" in errors
    assert list(life.curve()) == list(range(TOTAL))
    assert life.reports()[-1].done == 1


def test_term_saves_a_checkpoint_before_exit(tmp_path):
    life = Life(tmp_path)
    child = life.start(8, every_s=1e6)
    assert reach(child, 20)
    child.terminate()
    code, errors = ended(child)
    assert code == 143
    done = len(life.curve())
    assert f"step {done} is saved" in errors
    assert ended(life.start(3))[0] == 0
    assert [line.restored for line in life.reports() if line.restored is not None] == [done]
    assert len(life.losses.read_text().splitlines()) == TOTAL  # nothing was done twice


def test_no_checkpoint_is_started_when_too_little_time_is_left(tmp_path):
    life = Life(tmp_path)
    child = life.start(8, every_s=1e6, leave_s=0.0)
    assert reach(child, 20)
    child.terminate()
    code, errors = ended(child)
    assert (code, "not saved: too little time is left; step 1 is still saved" in errors) == (143, True)


def test_program_with_more_than_1023_open_files_pauses(tmp_path):
    """select(2) accepts no descriptor above 1023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        with elastic.Trainer(tmp_path, effective_batch=1, items=9, care=elastic.Care(idle_s=0.01)) as run:
            run.restore()
            steps = run.steps(2, dict)
            next(steps)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert next(steps).number == 1
    finally:
        for number in files:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_signal_handlers_are_restored_at_exit(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)]
    with elastic.Trainer(tmp_path, effective_batch=1, environ={}):
        assert signal.getsignal(signal.SIGUSR1) not in before
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)] == before


def test_data_loader_workers_end_on_term_and_not_on_usr1(tmp_path):
    """Workers inherit the handlers, and receive the signals too."""
    with elastic.Trainer(tmp_path, effective_batch=1, environ={}) as run:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"x")
            while True:
                time.sleep(1)
        os.read(read, 1)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.kill(pid, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
        os.close(read)
        os.close(write)
        assert not run._signals.pause


def test_programs_started_by_the_training_survive_usr1(tmp_path):
    """Every process of a job gets USR1. A spawned data loader's worker, or a compiler's, has the handlers of no one."""
    with elastic.Trainer(tmp_path, effective_batch=1, care=elastic.Care(idle_s=0.0), environ={}) as run:
        run.restore()
        done = [subprocess.run(["sh", "-c", "kill -USR1 $$; kill -USR2 $$; echo on"], capture_output=True, text=True)]
        for _ in run.steps(2, save=dict):
            done.append(subprocess.run(done[0].args, capture_output=True, text=True))
        assert [(program.returncode, program.stdout) for program in done] == [(0, "on\n")] * 3


def test_training_runs_on_systems_without_pipe2(tmp_path, monkeypatch):
    """macOS has none; there a training is tried before it is submitted."""
    monkeypatch.delattr(os, "pipe2")
    with elastic.Trainer(tmp_path, effective_batch=1, environ={}) as run:
        run.restore()
        assert len(list(run.steps(2, save=dict))) == 2


def test_usr1_right_before_the_end_does_not_end_the_program(tmp_path):
    with elastic.Trainer(tmp_path, effective_batch=1, environ={}):
        # to this thread, where it is blocked: another one, of pytest, might take it after the end
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


AFTERWARDS = """
import os, signal, sys
from slurm_migbatch import elastic
with elastic.Trainer(sys.argv[1], effective_batch=1, environ={}) as run:
    run.restore()
    for _ in run.steps(3, save=dict):
        if sys.argv[2] == "break":
            break
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
print("exported", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("by", ["the end", "break"])
def test_usr1_after_the_training_does_not_end_a_program_that_still_exports_the_model(tmp_path, by):
    done = subprocess.run([sys.executable, "-c", AFTERWARDS, str(tmp_path), by], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("exported\n", -signal.SIGTERM), done.stderr


def test_handler_of_the_program_itself_is_in_effect_again_after_the_training(tmp_path):
    got = []
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        with elastic.Trainer(tmp_path, effective_batch=1, environ={}) as run:
            run.restore()
            for _ in run.steps(1, save=dict):
                pass
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


# -- progress reports


def test_loop_left_by_break_is_saved_at_the_end(tmp_path):
    state = {"updates": 0}
    care = elastic.Care(every_s=1e6)
    with elastic.Trainer(tmp_path, effective_batch=1, items=9, care=care, environ={}) as run:
        run.restore()
        for step in run.steps(100, lambda: dict(state)):
            state["updates"] += 1
            if step.number == 6:
                break
    with elastic.Trainer(tmp_path, effective_batch=1, items=9, environ={}) as run:
        assert run.restore() == {"updates": 7}
        assert [step.number for step in run.steps(9, dict)] == [7, 8]


def test_loop_after_one_left_by_break_does_no_step_twice(tmp_path):
    numbers = []
    with elastic.Trainer(tmp_path, effective_batch=1, items=9, environ={}) as run:
        run.restore()
        for total in (5, 9):
            for step in run.steps(total, lambda: list(numbers)):
                numbers.append(step.number)
                if step.number == 2:
                    break
        assert numbers == list(range(9))
    with elastic.Trainer(tmp_path, effective_batch=1, items=9, environ={}) as run:
        assert run.restore() == numbers
        assert run.done == 9


@pytest.mark.parametrize("by", ["break", "zip"])
def test_step_of_which_no_micro_batch_was_taken_is_not_done(tmp_path, by):
    """As if a program stops at the top of its loop when its time is over, or its own data end."""
    trained = []
    for most in (4, 9):
        care = elastic.Care(every_s=1e6)
        with elastic.Trainer(tmp_path, effective_batch=2, items=18, micro=1, care=care, environ={}) as run:
            assert run.restore() == (trained or None)
            steps = run.steps(9, lambda: list(trained))
            data = range(run.done, most if by == "zip" else 99)
            for step, _ in zip(steps, data, strict=False):
                if step.number == most:
                    break
                for _ in step:
                    pass
                trained.append(step.number)
            assert trained == list(range(most))


def test_nothing_is_saved_at_the_end_if_a_step_failed(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        elastic.Trainer(tmp_path, effective_batch=1, items=9, care=elastic.Care(every_s=1e6), environ={}) as run,
    ):
        run.restore()
        for step in run.steps(100, dict):
            1 / (step.number - 6)
    with elastic.Trainer(tmp_path, effective_batch=1, items=9, environ={}) as run:
        run.restore()
        assert run.done == 1  # the first step is saved at once


def test_step_left_by_an_error_that_the_program_catches_is_done_again(tmp_path, caplog):
    with elastic.Trainer(tmp_path, effective_batch=2, items=9, micro=1, environ={}) as run:
        run.restore()
        done = []
        for failing in (2, 6, None):
            with contextlib.suppress(MemoryError):
                for step in run.steps(9, lambda: list(done)):
                    for _ in step:
                        if step.number == failing:
                            raise MemoryError
                    done.append(step.number)
        assert done == list(range(9))
    assert "the loop was left within step 3, which does not count; step 1 is still saved" in caplog.text


def test_step_left_by_an_error_that_the_program_catches_is_not_saved(tmp_path):
    with elastic.Trainer(tmp_path, effective_batch=2, items=9, micro=1, environ={}) as run:
        run.restore()
        with contextlib.suppress(MemoryError):
            for step in run.steps(9, dict):
                for _ in step:
                    if step.number == 6:
                        raise MemoryError
    with elastic.Trainer(tmp_path, effective_batch=2, items=9, micro=1, environ={}) as run:
        run.restore()
        assert run.done == 1  # the first step is saved at once


def test_loop_left_by_break_fails_if_it_cannot_be_saved(tmp_path):
    class Full(Disk):
        def create(self, _path):
            return os.open("/dev/full", os.O_WRONLY)

    with (
        pytest.raises(elastic.ElasticError, match=r"left by break, but no checkpoint of step 1 .*No space left"),
        elastic.Trainer(tmp_path, effective_batch=1, items=9, environ={}, disk=Full()) as run,
    ):
        run.restore()
        for _ in run.steps(100, dict):
            break


def test_progress_report_is_parsed_by_the_node(tmp_path):
    life = Life(tmp_path)
    begun = time.time()
    assert ended(life.start(8, report_s=0.0))[0] == 0
    lines = life.reports()
    assert None not in lines
    content = progress.Content(b"", life.progress.read_bytes(), 1, time.time())
    report = progressreport.understand(content, begun, ended=True)
    items = sum(min(BATCH, ITEMS - number % 7 * BATCH) for number in range(TOTAL))
    assert (report.items, report.steps, report.batch, report.done, report.refused) == (items, TOTAL, 8, True, 0)
    assert report.throughput_per_s > 0
    assert begun <= report.checkpoint <= time.time()
    assert 0 < report.ckpt_s < 60
    assert report.restored is None


def test_training_continues_when_progress_cannot_be_reported(tmp_path, caplog):
    environ = {"MIGBATCH_PROGRESS": str(tmp_path / "gone" / "17.0")}
    with elastic.Trainer(tmp_path / "run", effective_batch=1, environ=environ) as run:
        run.restore()
        assert len(list(run.steps(5, save=dict))) == 5
    assert len([r for r in caplog.records if "cannot report progress" in r.getMessage()]) == 1
