"""Measure Prolog, TaskProlog and Epilog as slurmd starts them, relative to starting Python.

The simulated driver has no latency here, so only migbatch's own cost is measured: interpreter, imports, files, locks,
journal and the request to the agent. Base and hooks alternate, so that a busy machine slows all of them equally.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_migbatch.lab.bars import Bar, times_of
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.node.install import InstallError, compile_imports, programs
from slurm_migbatch.testbed.registry import unmount_below
from slurm_migbatch.testbed.simdriver import SimulatedMachine

MEDIAN_TARGET, P99_TARGET = 3.0, 6.0
NODE = "bench"
HOOKS = ("prolog", "task_prolog", "epilog")
#: NVML calls that create or destroy instances
CHANGES = (
    "nvmlDeviceCreateGpuInstance",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    "nvmlComputeInstanceDestroy",
)


class BenchError(RuntimeError):
    """A measurement is not possible; the message says why."""


def measure(rounds: int = 300, progress: Progress = silent) -> dict[str, Any]:
    """Run the hooks of `rounds` jobs with the agent and as many without it.

    Returns:
        Figures and bars. Ratios are to the median of `python3 -I -S -c pass` in the same round.

    Raises:
        BenchError: not root, or a hook failed.
    """
    if os.geteuid() != 0:
        raise BenchError("hooks run as root: run this as root")
    # hooks refuse to run from a directory that others may write, so not below /tmp
    with tempfile.TemporaryDirectory(prefix="migbatch-bench-", dir=_place()) as name:
        home = Path(name)
        home.chmod(0o755)
        machine = SimulatedMachine.create(home / "driver", ["h100-80gb"])
        _install(home)
        try:
            with_agent, alone = _both(home, machine, rounds, progress)
        finally:
            unmount_below(home)
    bars = [
        bar
        for hook in HOOKS
        for bar in (
            Bar(f"{hook}: median over python start", with_agent["ratios"][hook]["median"], MEDIAN_TARGET),
            Bar(f"{hook}: p99 over python start", with_agent["ratios"][hook]["p99"], P99_TARGET),
        )
    ]
    changes = sum(with_agent["driver_changes"].values()) + sum(alone["driver_changes"].values())
    bars.append(Bar("driver creates and destroys in warm reuse", float(changes), 0.0))
    return {
        "bench": "hooks",
        "rounds": rounds,
        "interpreter": sys.executable,
        "python": sys.version.split()[0],
        "agent": with_agent,
        "in_process": alone,
        "bars": [bar.to_dict() for bar in bars],
    }


def _both(
    home: Path, machine: SimulatedMachine, rounds: int, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the series with the agent, then the one without it."""
    agent = _start_agent(home)
    try:
        _job(home, 1, {})
        if not any(machine.calls()[name] for name in CHANGES):
            raise BenchError("the first job created no slice, so nothing can be measured")
        progress(f"{rounds} jobs with the agent", 2)
        with_agent = _series(home, machine, rounds, first_job=2)
    finally:
        agent.terminate()
        agent.communicate(timeout=30)
    progress(f"{rounds} jobs in the hook's own process", 2)
    return with_agent, _series(home, machine, rounds, first_job=rounds + 3)


def _place() -> str:
    return "/run" if os.access("/run", os.W_OK) else "/var/lib"


def _install(home: Path) -> None:
    etc, driver = home / "etc", home / "driver"
    etc.mkdir()
    lines = {
        "StateDir": home / "state",
        "RunDir": home / "run",
        "NvmlLibrary": driver / "libnvidia-ml.so.1",
        "ProcRoot": driver / "proc",
        "DevRoot": driver / "dev",
        "BootIdFile": driver / "boot_id",
    }
    (etc / "node.conf").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    try:
        for path, text in programs(home / "hooks", etc, sys.executable):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        compile_imports(sys.executable)
    except InstallError as error:
        raise BenchError(str(error)) from None


def _start_agent(home: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "slurm_migbatch.cli", "node", "agent", "--etc", str(home / "etc"), "--node", NODE]
    agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"})
    end = time.monotonic() + 30
    while not (home / "run/agent.sock").exists():
        if agent.poll() is not None or time.monotonic() > end:
            agent.kill()
            _, output = agent.communicate()
            raise BenchError(f"the agent does not start: {output.decode(errors='replace').strip()}")
        time.sleep(0.02)
    return agent


def _series(home: Path, machine: SimulatedMachine, rounds: int, first_job: int) -> dict[str, Any]:
    """Run one warm-up job, which creates the slice, then time `rounds` jobs that reuse it."""
    base = [sys.executable, "-I", "-S", "-c", "pass"]
    times: dict[str, list[float]] = {name: [] for name in ("python", *HOOKS)}
    _job(home, first_job, {})
    machine.calls(reset=True)
    for number in range(1, rounds + 1):
        times["python"].append(_run(base, {}))
        _job(home, first_job + number, times)
    calls: Counter[str] = machine.calls()
    figures = {name: times_of(values) for name, values in times.items()}
    start = figures["python"]["median_ms"]
    return {
        "times": figures,
        "ratios": {
            hook: {"median": figures[hook]["median_ms"] / start, "p99": figures[hook]["p99_ms"] / start}
            for hook in HOOKS
        },
        "driver_changes": {name: calls[name] for name in CHANGES if calls[name]},
    }


def _job(home: Path, job: int, times: Mapping[str, list[float]]) -> None:
    common = {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_USER": "root",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_ACCOUNT": "bench",
        "SLURM_JOB_COMMENT": "a comment [mig:1g.10gb:1#bench]",
        "SLURM_JOB_RESTART_COUNT": "0",
        "SLURMD_NODENAME": NODE,
    }
    hook_variables = {
        "prolog": {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"},
        "task_prolog": {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        "epilog": {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd", "SLURM_JOB_EXIT_CODE2": "0:0"},
    }
    for hook in HOOKS:
        spent = _run(
            [str(home / "hooks" / hook)],
            {**common, **hook_variables[hook]},
            expect="MIG-" if hook == "task_prolog" else "",
        )
        if times:
            times[hook].append(spent)


def _run(argv: Sequence[str], env: Mapping[str, str], expect: str = "") -> float:
    """Run a process; return the seconds from its start to its end, as slurmd sees them.

    Raises:
        BenchError: it failed, or its output is not as expected.
    """
    read, write = os.pipe()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_DUP2, write, 2)]
        began = time.perf_counter()
        pid = os.posix_spawn(argv[0], list(argv), dict(env), file_actions=actions)
        _, status = os.waitpid(pid, 0)
        spent = time.perf_counter() - began
        os.close(write)
        write = -1
        output = os.read(read, 65536).decode(errors="replace")
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
    if status or expect not in output:
        code = os.waitstatus_to_exitcode(status)
        raise BenchError(f"{Path(argv[0]).name} ended with {code}: {output.strip() or 'no output'}")
    return spent
