"""Run a hook without the agent: the same executor, in a child process of the hook (`supervised.py`)."""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH123

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from slurm_migbatch.node import exits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_migbatch.node.config import NodeConfig
    from slurm_migbatch.node.executor import Outcome
    from slurm_migbatch.node.hookenv import HookEnv

SLURM_QUERY_S = 6.0
"""How long a hook may ask Slurm whether other runs are over, after its own work."""
SPARE_S = {"prolog": 4.0, "epilog": 10.0}
"""Seconds after its deadline in which a hook that got no lock or no journal in time ends by itself."""
GIVE_UP_S = 5.0
START_S = 5.0
"""Seconds for the start of the hook's interpreter and processes on a busy node."""


def longest(config: NodeConfig, hook: str) -> float:
    """Return after how many seconds a hook has ended if the agent and the driver hang; slurmd must wait that long."""
    own = config.hook_deadline + GIVE_UP_S if hook == "prolog" else config.epilog_deadline
    return START_S + config.agent_wait + own + SPARE_S[hook]


def run(hook: str, etc: str, environ: dict[bytes, bytes], reason: str, sluid: bytes = b"") -> tuple[int, str]:
    """Return exit code and line. `reason` says why the agent did not run the hook; `sluid`: see `inside_job`."""
    from slurm_migbatch.node import supervised
    from slurm_migbatch.node.conf import ConfError
    from slurm_migbatch.node.config import load
    from slurm_migbatch.node.hookenv import HookEnv, HookEnvError

    os.environ.clear()
    os.environ.update({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"})
    try:
        env = HookEnv.read(hook, environ)
        inside = inside_job(env.job, sluid)
        if inside:
            return exits.CONTEXT, inside
        config = load(etc, env.node)
    except HookEnvError as error:
        return exits.CONTEXT, str(error)
    except ConfError as error:
        return exits.INSTALLATION, str(error)
    seconds = (config.hook_deadline if hook == "prolog" else config.epilog_deadline) + SPARE_S[hook]
    try:
        code, line = supervised.run(lambda: _work(config, env), seconds)
    except supervised.Hung as error:
        code, line = _give_up(config, env, str(error))
    return code, f"{line} ({reason})" if line else ""


def _work(config: NodeConfig, env: HookEnv) -> Iterator[Outcome]:
    """Yield the hook's result, then look for runs whose Epilog is missing: without the agent only hooks find them."""
    from slurm_migbatch.mig.driver import DriverError
    from slurm_migbatch.node.deadline import Deadline, TooLate
    from slurm_migbatch.node.executor import Executor
    from slurm_migbatch.node.journal import JournalError
    from slurm_migbatch.node.liveness import LivenessError
    from slurm_migbatch.node.paths import PathsError

    try:
        try:
            executor = Executor(config)
            outcome = executor.run(env)
        except (JournalError, TooLate, DriverError, OSError) as error:  # the last three while a journal is rebuilt
            yield without_journal(config, env, str(error))
            return
    except PathsError as error:
        yield exits.INSTALLATION, str(error)
        return
    yield outcome
    with suppress(LivenessError, JournalError, DriverError, TooLate, OSError):
        executor.run_repairer.orphans(Deadline(SLURM_QUERY_S))


def _give_up(config: NodeConfig, env: HookEnv, why: str) -> Outcome:
    """End a hook whose work hangs: an Epilog leaves its note, a Prolog refuses the run without calling the driver."""
    from slurm_migbatch.node import supervised
    from slurm_migbatch.node.executor import Executor

    if env.hook == "epilog":
        return exits.OK, f"{env.run}: {why}; the agent or the next hook completes the release"
    try:
        return supervised.run(lambda: iter([Executor(config).give_up(env, why)]), GIVE_UP_S)
    except supervised.Hung as error:
        return exits.UNSAFE, f"{env.run}: {why}; it could not be requeued: {error}"


def without_journal(config: NodeConfig, env: HookEnv, why: str) -> tuple[int, str]:
    """Run the hook if the journal cannot be opened. Raises PathsError."""
    from slurm_migbatch.node import ending
    from slurm_migbatch.node.caps import Caps
    from slurm_migbatch.node.gpus import Gpus
    from slurm_migbatch.node.jobmaps import JobMaps
    from slurm_migbatch.node.paths import Paths
    from slurm_migbatch.node.unwritable import Unwritable

    paths = Paths.open(config)
    ending.ensure(paths.run)
    caps, maps = Caps(config.proc_root, config.dev_root), JobMaps(config, paths)
    return Unwritable(config, paths, Gpus(config), caps, maps).run(env, why)


def inside_job(job: int, sluid: bytes) -> str:
    """Return why this process is in the wrong cgroup, if it is: PrologFlags=RunInJob would hide the devices from it.

    `sluid`: the name of the job by which Slurm 26.05 names cgroups, unless cgroup.conf sets CgroupJobIdPaths=yes.
    """
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return ""
    if f"/job_{job}/" in text or (sluid and f"/{sluid.decode('ascii', 'replace')}/" in text):
        return "slurm.conf sets PrologFlags=RunInJob; migbatch needs its Prolog to run outside the job: remove RunInJob"
    return ""
