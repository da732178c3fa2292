"""Elastic training with the real torch, on the GPU if there is one (`make test-torch`)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/support/torch_training.py"
STEPS = 90

pytestmark = pytest.mark.torch


class Training:
    """A training that is interrupted and restarted in the same directory."""

    def __init__(self, directory: Path, megabytes: int = 0) -> None:
        self.directory, self.megabytes = directory, megabytes
        directory.mkdir()
        (directory / "checkpoints").mkdir(mode=0o700)
        self.losses, self.log = directory / "losses", directory / "log"
        self.losses.touch()

    def start(self) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "MIGBATCH_PROGRESS": str(self.directory / "progress")}
        environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MIGBATCH_PROFILE": "1g.10gb", "MIGBATCH_MEMORY_MIB": "9856"}
        (self.directory / "progress").write_text("")
        arguments = [self.directory / "checkpoints", self.losses, STEPS, self.megabytes]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, arguments)], env=environ, stdout=log, stderr=log
            )

    def done(self) -> int:
        return max(
            (int(line.split()[0]) for line in self.losses.read_text().splitlines() if line[:1].isdigit()), default=-1
        )

    def reach(self, child: subprocess.Popen[bytes], step: int) -> None:
        end = time.monotonic() + 120
        while self.done() < step:
            assert child.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def finish(self, child: subprocess.Popen[bytes]) -> None:
        assert child.wait(timeout=240) == 0, self.log.read_text()

    def curve(self) -> dict[str, str]:
        """The loss that each step had when it was done for the last time, and the sums of the weights."""
        return dict(line.split(" ", 1) for line in self.losses.read_text().splitlines())


@pytest.mark.parametrize("kind", ["told", "killed"])
def test_interrupted_training_ends_with_the_same_weights(tmp_path: Path, kind: str) -> None:
    straight, broken = Training(tmp_path / "straight"), Training(tmp_path / "broken", megabytes=64)
    straight.finish(straight.start())
    for step in (20, 50):
        child = broken.start()
        broken.reach(child, step)
        if kind == "told":
            child.send_signal(signal.SIGUSR1)
            until_checkpoint(broken, child, step)
            child.terminate()
            assert child.wait(timeout=120) != 0
        else:
            child.kill()
            child.wait()
    broken.finish(broken.start())
    assert broken.curve() == straight.curve()
    assert len(straight.curve()) == STEPS + 1


def until_checkpoint(training: Training, child: subprocess.Popen[bytes], step: int) -> None:
    end = time.monotonic() + 120
    while not any(int(path.stem.split("-")[1]) > step for path in (training.directory / "checkpoints").glob("step-*")):
        assert child.poll() is None and time.monotonic() < end, training.log.read_text()
        time.sleep(0.01)


def test_state_of_gigabytes_is_saved_and_restored(tmp_path: Path) -> None:
    training = Training(tmp_path / "large", megabytes=1024)
    child = training.start()
    training.reach(child, 5)
    child.send_signal(signal.SIGUSR1)
    until_checkpoint(training, child, 5)
    child.terminate()
    child.wait(timeout=120)
    saved = max((training.directory / "checkpoints").glob("step-*")).stat().st_size
    assert saved > 1024 << 20
    child = training.start()
    training.reach(child, 20)
    child.kill()
    child.wait()
    restored = [int(number) for number in re.findall(r"restored (\d+) steps", training.log.read_text())]
    assert len(restored) == 2 and restored[0] == 0 and restored[1] > 5
