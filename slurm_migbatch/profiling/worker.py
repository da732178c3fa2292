"""Measure one point in a process with its own CUDA context and memory.

Runs in the Python of the measured program, which need not be migbatch's: standard library and three light modules.
It exchanges JSON, one object a line: the order comes on standard input; events go to the former standard output (the
program's output goes to standard error instead).

    order   {"python": [where, attribute]} or {"command": [words]}, with batch, input_size, flops and effort
    events  {"event": "ready"}, then, after the line `go`, {"event": "enough"}, then, after the line `stop`,
            {"event": "done", "pieces": [[items, seconds], ...], ...}
            or at any time {"event": "oom", "text"} or {"event": "error", "text"}, which are the last
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from slurm_migbatch.profiling import oom, target, timing

_MIB = 1 << 20
_PR_SET_PDEATHSIG = 1
_OURS = re.compile(r"/slurm_migbatch/profiling/|<frozen importlib|/importlib/__init__\.py")
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class CommandFailed(target.TargetError):
    """A command that failed; its output may show that memory ran out."""


class OutOfMemory(MemoryError):
    """A command that ran out of memory; the message gives the evidence."""


class Parent:
    """The parent process: a line-wise channel each way."""

    def __init__(self) -> None:
        self._in = os.dup(0)
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._waiting = b""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def send(self, event: str, **more: object) -> None:
        """Send an event."""
        self._out.write(json.dumps({"event": event, **more}) + "\n")
        self._out.flush()

    def listen(self) -> str:
        """Read the next line; exit if the parent has ended."""
        while b"\n" not in self._waiting:
            data = os.read(self._in, 65536)
            if not data:
                raise SystemExit(1)
            self._waiting += data
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line.decode("utf-8")

    def is_silent(self) -> bool:
        """Return whether no line has come yet."""
        return b"\n" not in self._waiting and not select.select([self._in], [], [], 0)[0]


def main(ordered_by: int) -> None:
    """Measure one point as ordered on standard input by the parent process `ordered_by`; end when the parent ends."""
    with contextlib.suppress(OSError, AttributeError):  # if the C library has no prctl, the parent's kill must suffice
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != ordered_by:
        return
    parent = Parent()
    try:
        order = json.loads(parent.listen())
        effort = timing.Effort(**order["effort"])
        result = (_command if "command" in order else _python)(parent, order, effort)
    except target.TargetError as error:
        parent.send("error", text=str(error), of_command=isinstance(error, CommandFailed))
    except OutOfMemory as error:
        parent.send("oom", text=str(error), software="")
    except (Exception, SystemExit) as error:
        if oom.is_oom(error):
            parent.send("oom", text=_last_line(error), software=_software())
        else:
            _explain(error)
            parent.send("error", text=_last_line(error))
    else:
        parent.send("done", **result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # frameworks may hang or crash at exit, which does not affect the measurement


# -- a Python factory ----------------------------------------------------------------------------------------------


def _python(parent: Parent, order: dict[str, Any], effort: timing.Effort) -> dict[str, Any]:
    make = target.load(target.Python(*order["python"]))
    step = target.prepare(make, order["batch"], order["input_size"])

    def once() -> float:
        start = time.perf_counter()
        _wait(step, step())
        return time.perf_counter() - start

    timing.warm_up(once, effort)
    parent.send("ready")
    parent.listen()
    reported = False

    def go_on() -> bool:
        nonlocal reported
        if not reported:
            parent.send("enough")
            reported = True
        return not order["alone"] and parent.is_silent()

    # of several processes, the fast ones continue while the slow ones still measure
    times = timing.collect(once, effort, go_on)
    parent.listen()
    result: dict[str, Any] = {
        "pieces": [[order["batch"], seconds] for seconds in times],
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "software": _software(),
        "params": _number(step, "params") or _parameters(step),
        "flops_per_item": _number(step, "flops_per_item"),
        **_cuda(),
    }
    if order["flops"] and result["flops_per_item"] is None:
        result["flops_per_item"] = _flops(step, order["batch"])
    return result


def _wait(step: Callable[[], Any], result: object) -> None:
    """Wait until the batch is complete, by any framework."""
    sync = getattr(step, "sync", None)
    if sync is not None:
        sync()
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.block_until_ready(result)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()


def _cuda() -> dict[str, Any]:
    """Return torch's data on the GPU it used; empty if it used none."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "sm_count": int(properties.multi_processor_count),
        "reserved_mib": torch.cuda.max_memory_reserved() / _MIB,
    }


def _software() -> str:
    """Return the frameworks that were loaded, `torch 2.6.0 cuda 12.4`."""
    versions = []
    for name in ("torch", "jax", "cupy", "tensorflow", "onnxruntime"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions.append(f"{name} {version}")
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return " ".join([*versions, *([f"cuda {cuda}"] if cuda else [])])


def _number(step: object, name: str) -> float | None:
    value = getattr(step, name, None)
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _modules(step: Any) -> list[Any]:
    """Find the torch modules of a batch: named by `model`, the callable itself, or held in its closure."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    candidates = [getattr(step, "model", None), step, getattr(step, "__self__", None), getattr(step, "func", None)]
    # torch.inference_mode()(step) keeps what it wraps
    for function in (step, getattr(step, "__wrapped__", None)):
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                candidates.append(cell.cell_contents)
    modules = [module for module in candidates if isinstance(module, torch.nn.Module)]
    return modules[:1] if isinstance(getattr(step, "model", None), torch.nn.Module) else modules


def _parameters(step: object) -> float | None:
    """Return the number of parameters of the modules, shared ones counted once."""
    weights = {id(weight): weight.numel() for module in _modules(step) for weight in module.parameters()}
    return float(sum(weights.values())) or None


def _flops(step: Callable[[], Any], batch: int) -> float | None:
    """Return the operations of one more batch per item, counted by torch; None if it cannot."""
    if not _modules(step):
        return None
    try:
        from torch.utils.flop_counter import FlopCounterMode  # type: ignore[import-not-found, unused-ignore]

        with FlopCounterMode(display=False) as counter:
            step()
        return float(counter.get_total_flops()) / batch or None
    except Exception:  # compiled models, exotic operators: the column stays empty
        return None


# -- a command -----------------------------------------------------------------------------------------------------


def _command(parent: Parent, order: dict[str, Any], effort: timing.Effort) -> dict[str, Any]:
    """Measure one point by a program that prints a line for each batch."""
    values = {
        "batch": order["batch"],
        "input": order["input_size"],
        "repeats": effort.repeats,
        "seconds": effort.min_seconds,
    }
    arguments = target.fill(tuple(order["command"]), values)
    parent.send("ready")
    parent.listen()
    try:
        program = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise target.TargetError(f"the command cannot be started: {arguments[0]}: {error.strerror}") from None
    with program:
        assert program.stdout is not None
        try:
            timings, figures, ran_out = _read_output(program.stdout, float(order["batch"]))
        except target.TargetError:
            program.kill()
            raise
    if ran_out:
        raise OutOfMemory("reported by the command")
    if program.returncode in _KILLED:
        raise OutOfMemory("the command was killed (SIGKILL), most likely for memory")
    if program.returncode:
        sys.stderr.flush()
        raise CommandFailed(f"the command ended with {target.status(program.returncode)}")
    if not timings:
        raise target.TargetError(
            "the command wrote no line 'migbatch: items=<number> seconds=<number>': it must print one for each batch "
            "(or group of batches) that it timed"
        )
    parent.send("enough")
    parent.listen()
    return {
        "pieces": timings,
        "rss_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "software": "",
        "memory_mib": figures.get("memory_mib"),
        "params": figures.get("params"),
        "flops_per_item": figures.get("flops_per_item"),
    }


def _read_output(lines: Iterable[str], batch: float) -> tuple[list[list[float]], dict[str, float], bool]:
    """Return items (by default a batch) and seconds of each timing that a command prints, its other figures, and
    whether it reports that memory ran out; copy other lines to standard error. Raises TargetError.
    """
    timings: list[list[float]] = []
    figures: dict[str, float] = {}
    ran_out = False
    for line in lines:
        if line.strip() == oom.MARK:
            ran_out, numbers = True, None
        else:
            numbers = target.parse_line(line)
        if numbers is None:
            sys.stderr.write(line)
            continue
        if "seconds" in numbers:
            timings.append([numbers.pop("items", batch), numbers.pop("seconds")])
        figures.update(numbers)
    return timings, figures, ran_out


def _explain(error: BaseException) -> None:
    """Print the traceback on standard error, from the first line of the target."""
    trace = error.__traceback__
    while trace is not None and _OURS.search(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def _last_line(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    return (lines[-1].strip() if lines else type(error).__name__)[:500]
