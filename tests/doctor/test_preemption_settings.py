"""What the doctor says about `preempt` of [moves]."""

from __future__ import annotations

import pytest

from slurm_migbatch.doctor.preemption import check_preemption

PARTITIONS = """PartitionName=gpu PriorityTier=10 PreemptMode=OFF Nodes=n1
PartitionName=train PriorityTier={tier} PreemptMode={mode} Nodes=n1
"""
QOS = "high|low|cluster|00:00:00|\nlow||{mode}|00:00:00|\n"


def said(kind: str, partitions: str = "", qos: str = "") -> tuple[str, str]:
    outputs = {"config": f"PreemptMode = REQUEUE\nPreemptType = {kind}\n", "partition": partitions, "qos": qos}
    (found,) = check_preemption(lambda command: next(text for name, text in outputs.items() if name in command))
    assert found.advice or found.level == "ok"
    return found.level, found.text


@pytest.mark.parametrize(("tier", "mode"), [(1, "OFF"), (1, "GANG,SUSPEND"), (10, "REQUEUE")])
def test_partitions_that_preempt_no_jobs(tier: int, mode: str) -> None:
    level, text = said("preempt/partition_prio", PARTITIONS.format(tier=tier, mode=mode))
    assert (level, "no partition or QOS" in text) == ("warn", True)


def test_qos_that_preempt_no_jobs_or_cannot_be_read() -> None:
    assert said("preempt/qos", qos=QOS.format(mode="suspend"))[0] == "warn"
    assert said("preempt/qos", qos="normal||cluster|00:00:00|\n")[0] == "warn"
    assert "cannot be read" in said("preempt/qos")[1]


def test_preemption_that_is_off_or_in_order() -> None:
    assert "Slurm has no preemption" in said("preempt/none")[1]
    good = [
        said("preempt/partition_prio", PARTITIONS.format(tier=1, mode="REQUEUE")),
        said("preempt/qos", qos=QOS.format(mode="cancel")),
        said("preempt/qos", qos=QOS.format(mode="cluster")),
    ]
    assert [level for level, _ in good] == ["ok"] * 3
