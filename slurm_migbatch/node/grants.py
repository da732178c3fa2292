"""Find a job's grant: the controller's plan, else its comment, else (root's jobs) slurmctld's record."""

from __future__ import annotations

from slurm_migbatch.mig.grant import Grant, parse_comment
from slurm_migbatch.node import plan
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.hookenv import HookEnv


def find(config: NodeConfig, env: HookEnv, deadline: Deadline) -> Grant | None:
    """Find the grant of a Prolog's job; None for a job without slices. Raises GrantError."""
    planned_grant = plan.load(config.state_dir).jobs.get(env.job)
    if planned_grant is not None:
        return planned_grant
    grant = parse_comment(env.comment)
    if grant is None and env.uid == 0:
        from slurm_migbatch.node import scontrol

        try:
            return scontrol.granted(config, env.job, deadline.remaining)
        except scontrol.ScontrolError:
            return None  # root's own job without a slice is root's to notice; it must not stop the node
    return grant
