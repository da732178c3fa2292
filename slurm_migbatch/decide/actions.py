"""Actions of a decision, as plain values; the controller and the simulator apply them."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_migbatch.decide.capacity.model import Node, NodePlan
from slurm_migbatch.decide.capacity.sharing import ALONE, NodeGuests


@dataclass(frozen=True)
class Offer:
    """Offer a node's free slots according to its plan. Has no effect if nothing differs.

    Attributes:
        plan: the new plan of the node.
        state: the node as it was when the plan was made.
        sharing: slices of the node that two jobs share, or will share.
        why: the reason for a new plan, for the record.
    """

    plan: NodePlan
    state: Node
    sharing: NodeGuests = ALONE
    why: str = "free space"


@dataclass(frozen=True)
class MoveOrder:
    """Signal a job that is being moved or preempted, for example to write a checkpoint, or end its run.

    Attributes:
        job, restart: its run.
        why: the reason, as a sentence.
        signal: USR1, USR2 or TERM; empty: requeue it, or with `cancel` cancel it.
        preempts: whether it is preempted.
    """

    job: int
    restart: int
    why: str
    signal: str = ""
    cancel: bool = False
    preempts: bool = False
