"""Run a hook without the agent: the same executor in the hook's own process."""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH123

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from slurm_migbatch.node import exits

if TYPE_CHECKING:
    from slurm_migbatch.node.config import NodeConfig
    from slurm_migbatch.node.hookenv import HookEnv

SLURM_QUERY_S = 6.0
"""How long a hook may ask Slurm whether other runs are over, after its own work."""


def run(hook: str, etc: str, environ: dict[bytes, bytes], reason: str, sluid: bytes = b"") -> tuple[int, str]:
    """Return exit code and line. `reason` says why the agent did not run the hook; `sluid`: see `inside_job`."""
    from slurm_migbatch.mig.driver import DriverError
    from slurm_migbatch.node.conf import ConfError
    from slurm_migbatch.node.config import load
    from slurm_migbatch.node.deadline import Deadline, TooLate
    from slurm_migbatch.node.executor import Executor
    from slurm_migbatch.node.hookenv import HookEnv, HookEnvError
    from slurm_migbatch.node.journal import JournalError
    from slurm_migbatch.node.liveness import LivenessError
    from slurm_migbatch.node.paths import PathsError

    os.environ.clear()
    os.environ.update({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"})
    try:
        env = HookEnv.read(hook, environ)
        inside = inside_job(env.job, sluid)
        if inside:
            return exits.CONTEXT, inside
        config = load(etc, env.node)
        try:
            executor = Executor(config)
            code, line = executor.run(env)
        except (JournalError, TooLate, DriverError, OSError) as error:  # the last three while a journal is rebuilt
            return without_journal(config, env, str(error))
        # Without the agent, leftovers of a missing Epilog are only found here.
        with suppress(LivenessError, JournalError, DriverError, TooLate, OSError):
            executor.run_repairer.orphans(Deadline(SLURM_QUERY_S))
    except HookEnvError as error:
        return exits.CONTEXT, str(error)
    except (ConfError, PathsError) as error:
        return exits.INSTALLATION, str(error)
    return code, f"{line} ({reason})" if line else ""


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
