"""Send the few requests of hooks to Slurm, all rare: requeue a job, drain the node, look up a job.

Commands get an argument list, their own environment and a time limit; no shell. The hot path never calls them.
"""

# Hooks do not use pathlib: importing it takes longer than a warm start.
# ruff: noqa: PTH120

from __future__ import annotations

import os
import re
import subprocess

from slurm_migbatch.mig.grant import Grant, GrantError, parse_comment
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.node import effects
from slurm_migbatch.node.config import NodeConfig

# not padded; squeue prints all tasks of an array
_NAMES = "JobID:0 ,ArrayJobID:0 ,ArrayTaskID:0 ,HetJobID:0"
_GRES = "JobID:0 ,RestartCnt:0 ,tres-per-node:0"
#: 24.11.5, 23.11.4-Ubuntu, 26.11.0-0rc1, 26.11-rc1
_RELEASE = re.compile(r" (\d{2})\.(\d{1,2})(?!\d)")
LAST_WITH_COLON = (23, 2)
"""Last release in which GRES have the prefix `gres:`; it is `gres/` in later ones."""
_COUNT = re.compile(r"[0-9]{1,6}")
_RESTARTS = re.compile(r"[0-9]{1,10}")
_REASON = re.compile(r"[^A-Za-z0-9 _.,:;@/()-]")


class ScontrolError(RuntimeError):
    """scontrol could not be run, failed or took too long. `stderr`: its error output if it failed, else empty."""

    def __init__(self, text: str, stderr: str = "") -> None:
        super().__init__(text)
        self.stderr = stderr


def requeue(config: NodeConfig, job: int, timeout: float) -> None:
    """Requeue a batch job, unless its user has cancelled it meanwhile. Raises ScontrolError."""
    name = _name(config, job, timeout)
    effects.point("scontrol requeue")
    _run(config, ["requeue", "incomplete", name], timeout)


def _name(config: NodeConfig, job: int, timeout: float) -> str:
    """Query slurmctld for the id by which scontrol addresses only this job. Raises ScontrolError.

    The array task that started last has the array's own id, by which scontrol addresses all of its tasks, including
    ended ones. A component of a heterogeneous job is requeued with all others, by the first one's id.
    """
    array, task, leader = _own_row(config, job, _NAMES, timeout)
    if array == str(job) and task.isdigit():
        return f"{array}_{task}"
    return leader if leader.isdigit() and int(leader) else str(job)


def drain(config: NodeConfig, reason: str, timeout: float) -> None:
    """Drain this node with a reason for its administrators. Raises ScontrolError."""
    effects.point("scontrol drain")
    text = _REASON.sub("_", f"migbatch: {reason}")[:200]
    _run(config, ["update", f"NodeName={config.node}", "State=DRAIN", f"Reason={text}"], timeout)


def granted(config: NodeConfig, job: int, restart: int | None, timeout: float) -> Grant | None:
    """Query slurmctld for the job's GRES per node, in this run. Raises ScontrolError.

    A job that is requeued while its Prolog runs waits again, and its user may change its GRES for the next run.
    """
    restarts, gres = _own_row(config, job, _GRES, timeout)
    if not _RESTARTS.fullmatch(restarts) or (restart is not None and int(restarts) > restart):
        raise ScontrolError(f"the job has been requeued (it has {restarts[:20]!a} restarts)")
    return None if gres == "N/A" else grant_of(gres, _prefix(config, timeout))


def _prefix(config: NodeConfig, timeout: float) -> str:
    """Return the prefix of GRES in the Slurm release of the node. Raises ScontrolError."""
    text = query(config, "squeue", ["--version"], timeout)
    release = _RELEASE.search(text)
    if release is None:
        raise ScontrolError(f"squeue --version answered {text[:80]!a}, which is not a Slurm release")
    return "gres:" if (int(release[1]), int(release[2])) <= LAST_WITH_COLON else "gres/"


def _own_row(config: NodeConfig, job: int, columns: str, timeout: float) -> list[str]:
    """Query squeue for columns of a job, its id first; return those after it. Raises ScontrolError.

    squeue shows all tasks of an array. A user may write blanks and line ends into a GRES, and so lines that look like
    rows (`gpu:a b\n17 mig:7g.80gb:1:0`, from Slurm 23.11 on). So the id must begin exactly one line, and that must have
    as many words as there are columns.
    """
    arguments = ["--noheader", "--all", "--local", "--states=all", f"--jobs={job}", f"--Format={columns}"]
    rows = (line.split() for line in query(config, "squeue", arguments, timeout).splitlines())
    own_rows = [row for row in rows if row[:1] == [str(job)]]
    if len(own_rows) != 1 or len(own_rows[0]) != columns.count(",") + 1:
        raise ScontrolError(f"squeue's answer about job {job} is not one row that can be read")
    return own_rows[0][1:]


def grant_of(gres: str, prefix: str) -> Grant | None:
    """Parse the grant in a GRES string, `gres/mig:1g.10gb:2,gres/gpu:1`. Raises ScontrolError.

    An entry without the prefix of the release is there because an update wrote it; Slurm has allocated nothing for it.
    """
    counts: dict[Profile, int] = {}
    for part in gres.split("(")[0].split(","):
        rest = part.removeprefix("gres:").removeprefix("gres/")
        parts = rest.replace("=", ":").split(":")  # Slurm keeps and reads mig:1g.10gb=2, too
        if parts[0] != "mig" or parts[1:2] == ["none"]:
            continue
        if part != prefix + rest:
            raise ScontrolError(f"Slurm does not read {part[:80]!a} in the job's GRES")
        if len(parts) not in (2, 3) or not _COUNT.fullmatch((parts[2:] or ["1"])[0]):
            raise ScontrolError(f"the job's GRES {gres[:80]!a} has no profile")
        try:
            profile = Profile.parse(parts[1])
        except ProfileError as error:
            raise ScontrolError(str(error)) from None
        counts[profile] = counts.get(profile, 0) + int(parts[2] if parts[2:] else 1)
    try:
        return parse_comment(Grant(counts.items()).marker) if counts else None
    except GrantError as error:
        raise ScontrolError(str(error)) from None


def query(config: NodeConfig, program: str, arguments: list[str], timeout: float) -> str:
    """Run one of Slurm's commands (`squeue`, ...), in scontrol's directory; return its output. Raises ScontrolError."""
    # limit a federation to this cluster, even if slurm.conf has fed_display
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "SQUEUE_LOCAL": "1", "SCONTROL_LOCAL": "1"}
    if config.slurm_conf:
        environ["SLURM_CONF"] = config.slurm_conf
    path = f"{os.path.dirname(config.scontrol)}/{program}" if program != "scontrol" else config.scontrol
    try:
        result = subprocess.run(
            [path, *arguments],
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.1, min(timeout, config.scontrol_timeout)),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ScontrolError(f"{path} {arguments[0]}: {error}") from error
    if result.returncode:
        stderr = result.stderr.decode("utf-8", "replace").strip()[:200]
        raise ScontrolError(f"{path} {arguments[0]} failed ({result.returncode}): {stderr}", stderr)
    return result.stdout.decode("utf-8", "replace")


def _run(config: NodeConfig, arguments: list[str], timeout: float) -> str:
    return query(config, "scontrol", arguments, timeout)
