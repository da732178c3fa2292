"""Measure one cell: start a child for each process, run them at the same time, and read their results."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import slurm_migbatch
from slurm_migbatch.profiling.cells import MeasurementCell
from slurm_migbatch.profiling.device import Device, MemoryPeak, NvmlMeter
from slurm_migbatch.profiling.oom import reports_oom
from slurm_migbatch.profiling.target import Python, status
from slurm_migbatch.profiling.timing import Effort, Summary

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 15
_POLL_S = 0.5
_END_S = 10.0
_ROOT: Final = str(Path(slurm_migbatch.__file__).resolve().parents[1])
_START: Final = (
    "import sys; root, parent = sys.argv[1:]; del sys.argv[1:]; sys.path.insert(0, root); "
    "from slurm_migbatch.profiling.worker import main; sys.path.remove(root); main(int(parent))"
)
"""migbatch is on the path for this one import only, so that its Python packages do not mix with the program's."""


class PointFailed(RuntimeError):
    """A point that failed for another reason than memory; the message ends with the last lines of the program."""


@dataclass(frozen=True)
class Ran:
    """A cell that ran.

    `throughput` counts items of all processes a second, `summary` has the times of one batch (all processes' together),
    `memory_mib` is the peak of all processes together. `params`, `flops_per_item`, `software` and `sm_count` are
    reported by the program or its framework.
    """

    throughput: float
    summary: Summary
    memory_mib: float | None = None
    params: float | None = None
    flops_per_item: float | None = None
    software: str = ""
    sm_count: int | None = None


@dataclass(frozen=True)
class DidNotFit:
    """A cell that ran out of memory; `text` is the message about it, `software` as in Ran."""

    text: str
    software: str = ""


@dataclass(frozen=True)
class Program:
    """What is measured and how.

    `target` is a Python factory or the words of a command; `interpreter` the Python in which the children run;
    `timeout` the seconds that a point may take in all; `count_flops` lets torch count the operations of a batch.
    """

    target: Python | tuple[str, ...]
    interpreter: str
    effort: Effort = field(default_factory=Effort)
    timeout: float = 900.0
    count_flops: bool = False


def measure(program: Program, device: Device, meter: NvmlMeter | None, cell: MeasurementCell) -> Ran | DidNotFit:
    """Run the cell in processes of its own. `meter`: None on the CPU, where the processes report their own memory.

    Raises PointFailed, also if the program did not use the device, and DriverError if the device cannot be queried.
    """
    events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    sessions: set[int] = set()
    with ExitStack() as stack:
        peak = stack.enter_context(meter.watch(sessions)) if meter else MemoryPeak()
        children: list[_Child] = []
        for number in range(cell.procs):
            children.append(stack.enter_context(_Child(number, program, device, cell, events)))
            sessions.add(children[-1].pid)
        deadline = time.monotonic() + program.timeout
        results: dict[int, dict[str, Any]] = {}
        for expected, answer in (("ready", "go"), ("enough", "stop"), ("done", "")):
            waiting = set(range(cell.procs))
            while waiting:
                number, event = _next(events, children, waiting, deadline, program.timeout, cell)
                if event is None and expected == "done" and number not in waiting:
                    continue  # the child has already sent all its events
                failure = _bad_end(children[number], cell, event)
                if failure is not None:
                    return failure
                assert event is not None
                if event["event"] == expected:
                    waiting.discard(number)
                    results[number] = event
            for child in children:
                child.send(answer)
    return _result(list(results.values()), cell, device, peak.mib)


def _next(
    events: queue.Queue[tuple[int, dict[str, Any] | None]],
    children: Sequence[_Child],
    waiting: set[int],
    deadline: float,
    timeout: float,
    cell: MeasurementCell,
) -> tuple[int, dict[str, Any] | None]:
    """Wait for the next event; return the child's number with it, or with None if the child ended without one."""
    while True:
        try:
            return events.get(timeout=_POLL_S)
        except queue.Empty:
            for number in waiting:
                if not children[number].alive:  # a descendant may still hold its end of the pipe
                    return number, None
        if time.monotonic() > deadline:
            tail = children[min(waiting)].tail()
            raise PointFailed(f"{cell}: not finished after {timeout:g} s (--timeout){_quoted(tail)}")


def _bad_end(child: _Child, cell: MeasurementCell, event: dict[str, Any] | None) -> DidNotFit | None:
    """Return DidNotFit if an event says that memory ran out, None if the child has not failed. Raises PointFailed."""
    if event is None:
        code = child.wait()
        tail = child.tail()
        if code == -signal.SIGKILL:
            return DidNotFit("the process was killed (SIGKILL), most likely for memory")
        if reports_oom(tail):
            return DidNotFit(_oom_line(tail))
        raise PointFailed(f"{cell}: the process ended with {status(code)}{_quoted(tail)}")
    if event["event"] == "oom":
        return DidNotFit(str(event["text"]), str(event["software"]))
    if event["event"] == "error":
        tail = child.tail()
        if event.get("of_command") and reports_oom(tail):
            return DidNotFit(_oom_line(tail))
        raise PointFailed(f"{cell}: {event['text']}{_quoted(tail)}")
    return None


def _result(results: Sequence[dict[str, Any]], cell: MeasurementCell, device: Device, peak_mib: float | None) -> Ran:
    throughput, times = 0.0, []
    for result in results:
        items = math.fsum(timing[0] for timing in result["pieces"])
        throughput += items / math.fsum(timing[1] for timing in result["pieces"])
        times += [seconds * cell.batch / items for items, seconds in result["pieces"]]
    first = results[0]
    if not device.is_cpu and peak_mib is None and "sm_count" not in first:
        raise PointFailed(
            f"{cell}: the target used no memory of {device.gpu}, so it ran on another device: put the model on the "
            "GPU, or use --device cpu for a trial"
        )
    total = _total(results, "memory_mib")
    if device.is_cpu:
        memory = total or _total(results, "rss_mib")
    else:
        memory = max((mib for mib in (peak_mib, total, _total(results, "reserved_mib")) if mib), default=None)
    return Ran(
        throughput=throughput,
        summary=Summary.of(times),
        memory_mib=memory,
        params=first["params"],
        flops_per_item=first["flops_per_item"],
        software=first["software"],
        sm_count=first.get("sm_count"),
    )


def _total(results: Sequence[dict[str, Any]], key: str) -> float | None:
    """Return the sum over the processes; None if one of them reports nothing."""
    values = [result.get(key) for result in results]
    return math.fsum(value for value in values if value) if all(values) else None


class _Child:
    """One measuring process, in a session of its own, with all its descendants."""

    def __init__(
        self,
        number: int,
        program: Program,
        device: Device,
        cell: MeasurementCell,
        events: queue.Queue[tuple[int, dict[str, Any] | None]],
    ) -> None:
        self._number, self._events = number, events
        self._errors: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (appends wherever tail() reads)
        self._process = subprocess.Popen(
            [program.interpreter, "-c", _START, _ROOT, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=device.environment(os.environ),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"process {number}", daemon=True)
        self._reader.start()
        order: dict[str, Any] = {
            "batch": cell.batch,
            "input_size": cell.input_size,
            "alone": cell.procs == 1,
            "flops": program.count_flops,
            "effort": asdict(program.effort),
        }
        order["python" if isinstance(program.target, Python) else "command"] = list(program.target)
        self.send(json.dumps(order))

    @property
    def pid(self) -> int:
        """Its process id, which is also its session id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def send(self, line: str) -> None:
        """Send a line; ignored if the child has ended."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), line.encode() + b"\n")
        except BrokenPipeError:
            return  # `_read` reports that it has ended

    def wait(self) -> int:
        """Wait for the process; return its exit code."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            return 1

    def tail(self) -> str:
        """Return the last output of it and its program."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL_BYTES))
        return self._errors.read().decode("utf-8", "replace").strip()

    def kill(self) -> None:
        """Kill it and its descendants."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._errors.close()
        self._reader.join(_POLL_S)
        if not self._reader.is_alive():  # otherwise a process that left the session holds the pipe
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):  # otherwise it ended during the write
                self._events.put((self._number, json.loads(line)))
        self._events.put((self._number, None))


def _quoted(tail: str) -> str:
    lines = tail.splitlines()[-_TAIL_LINES:]
    return "; its last output:\n" + "\n".join(f"  {line[:300]}" for line in lines) if lines else ""


def _oom_line(tail: str) -> str:
    return next(line.strip()[:300] for line in tail.splitlines() if reports_oom(line))
