"""Check the settings of Slurm that `preempt` of [moves] requires."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from slurm_migbatch.node.findings import OK, WARN, Finding
from slurm_migbatch.slurm import preemption


def check_preemption(run: Callable[[tuple[str, ...]], str]) -> Iterator[Finding]:
    """Check that the site's rules let some jobs be preempted; `run` returns a command's output, empty if it failed."""
    config, partitions, qos = map(run, preemption.COMMANDS)
    rules = preemption.parse(config, partitions, qos)
    if not rules.kind:
        text, advice = "has no effect: Slurm has no preemption", "set PreemptType in slurm.conf, or preempt = false"
        yield Finding(WARN, "[moves] preempt", text, advice)
    elif preemption.by_qos(config) and not qos:
        text, advice = "has no effect: the QOS cannot be read", "check `sacctmgr show qos` as the user of migbatchd"
        yield Finding(WARN, "[moves] preempt", text, advice)
    elif not rules.any_preempted:
        text = "has no effect: no partition or QOS has jobs that others may requeue or cancel"
        advice = "set PreemptMode and PriorityTier of partitions, or Preempt and PreemptMode of QOS (sacctmgr)"
        yield Finding(WARN, "[moves] preempt", text, advice)
    else:
        yield Finding(OK, "[moves] preempt", f"jobs are preempted by the rules of {rules.kind}")
