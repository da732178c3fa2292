"""Find a job's grant: in its comment, or in slurmctld's record.

slurmctld is queried for root's jobs, which no submit filter marks, and for jobs that were changed while they waited.
"""

from __future__ import annotations

from slurm_migbatch.mig.grant import Grant, GrantError, parse_comment
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.hookenv import HookEnv


def find(config: NodeConfig, env: HookEnv, deadline: Deadline) -> Grant | None:
    """Find the grant of a Prolog's job; None for a job without slices. Raises GrantError."""
    grant = parse_comment(env.comment)
    if grant is not None and grant.changed:
        return _confirmed(config, env, grant, deadline)
    if grant is None and env.uid == 0:
        from slurm_migbatch.node import scontrol

        try:
            return scontrol.granted(config, env.job, env.restart, deadline.remaining)
        except scontrol.ScontrolError:
            return None  # a job of root that gets no slice is root's own concern; it must not stop the node
    return grant


def _confirmed(config: NodeConfig, env: HookEnv, grant: Grant, deadline: Deadline) -> Grant | None:
    """Return what slurmctld allocated to a job that was changed, None for no slices. Raises GrantError."""
    from slurm_migbatch.node import scontrol

    try:
        allocated = scontrol.granted(config, env.job, env.restart, deadline.remaining)
    except scontrol.ScontrolError as error:
        raise GrantError(f"the job was updated, and its current slices cannot be determined: {error}") from None
    return None if allocated is None else Grant(allocated.parts, grant.decision)
