"""Preemption rules of a site, as scontrol and sacctmgr print them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.slurm.preemption import NO_PREEMPTION, Ending, PreemptionRules, by_qos, parse

NOW = 10_000.0
CONFIG = """Configuration data as of 2026-11-30T07:00:00
PreemptMode             = {mode}
PreemptParameters       = (null)
PreemptType             = {kind}
PreemptExemptTime       = {exempt}
"""
PARTITIONS = """PartitionName=gpu AllowGroups=ALL QoS=N/A GraceTime=0 PriorityTier=10 PreemptMode=OFF State=UP Nodes=n1
PartitionName=low AllowGroups=ALL QoS=N/A GraceTime=0 PriorityTier=1 PreemptMode=REQUEUE State=UP Nodes=n[1-2]
PartitionName=poor AllowGroups=ALL QoS=slow GraceTime=30 PriorityTier=1 PreemptMode=GANG,CANCEL State=UP Nodes=n[1-2]
PartitionName=paused AllowGroups=ALL QoS=N/A GraceTime=0 PriorityTier=1 PreemptMode=GANG,SUSPEND State=UP Nodes=n1
"""
QOS = """normal||cluster|00:00:00|
high|normal,scavenger|cluster|00:00:00|
scavenger||cancel|00:02:00|
slow||requeue|00:00:10|01:00:00
unset||requeue|00:00:00|UNLIMITED
"""


def rules(kind: str, mode: str = "REQUEUE", exempt: str = "00:00:00") -> PreemptionRules:
    return parse(CONFIG.format(kind=kind, mode=mode, exempt=exempt), PARTITIONS, QOS)


def running(partition: str = "low", qos: str = "normal", ran_s: float = 600.0) -> JobRow:
    return JobRow(1, partition=partition, qos=qos, state="RUNNING", start=NOW - ran_s, nodes=("n1",))


def waiting(partition: str = "gpu", qos: str = "normal") -> JobRow:
    return JobRow(2, partition=partition, qos=qos)


def by_partition(job: JobRow, other: JobRow, exempt: str = "00:00:00") -> Ending | None:
    return rules("preempt/partition_prio", exempt=exempt).ending(job, other, NOW)


def test_partitions_preempt_those_of_lower_tiers_in_their_own_way() -> None:
    assert by_partition(running("low"), waiting("gpu")) == Ending(cancel=False)
    assert by_partition(running("poor", ran_s=9000), waiting("gpu")) == Ending(cancel=True, grace_s=30)
    assert by_partition(running("paused"), waiting("gpu")) is None, "its GRES stay in use"
    assert by_partition(running("gpu"), waiting("gpu")) is None
    assert by_partition(running("low"), waiting("poor")) is None, "of the same tier"
    assert by_partition(running("low"), waiting("gpu,gone")) is None
    assert by_partition(running("gone"), waiting("gpu")) is None


def test_a_job_of_several_partitions_has_the_right_of_the_lowest() -> None:
    """Slurm accepts a job of several partitions if its user may use one of them, and keeps the others in its list."""
    for names in ("poor,gpu", "gpu,poor"):
        assert by_partition(running("low"), waiting(names)) is None
        assert not rules("preempt/partition_prio").may_preempt(waiting(names))


def test_qos_preempt_those_that_they_name() -> None:
    site = rules("preempt/qos", mode="REQUEUE")
    assert site.ending(running(qos="normal"), waiting(qos="high"), NOW) == Ending(cancel=False)
    assert site.ending(running(qos="scavenger"), waiting(qos="high"), NOW) == Ending(cancel=True, grace_s=120)
    assert site.ending(running(qos="slow"), waiting(qos="high"), NOW) is None
    assert site.ending(running(qos="normal"), waiting(qos="normal"), NOW) is None
    assert site.ending(running(qos=""), waiting(qos=""), NOW) is None
    gang = rules("preempt/qos", mode="GANG,SUSPEND")
    assert gang.ending(running(qos="normal"), waiting(qos="high"), NOW) is None
    assert site.may_preempt(waiting(qos="high")) and not site.may_preempt(waiting(qos="normal"))


@pytest.mark.parametrize(("qos", "exempt_s"), [("normal", 1800.0), ("slow", 3600.0), ("unset", 1800.0)])
def test_jobs_are_exempt_for_a_while(qos: str, exempt_s: float) -> None:
    for ran_s in (exempt_s - 1, exempt_s):
        found = by_partition(running("low", qos, ran_s), waiting("gpu"), exempt="00:30:00")
        assert (found is not None) == (ran_s >= exempt_s)
    assert by_partition(running("low", ran_s=1), waiting("gpu"), exempt="-1") is not None


def test_jobs_of_high_priority_are_exempt_if_the_site_says_so() -> None:
    config = CONFIG.format(kind="preempt/partition_prio", mode="REQUEUE", exempt="00:00:00")
    site = parse(config.replace("(null)", "youngest_first,min_exempt_priority=5000,reorder_count=2"), PARTITIONS, QOS)
    for priority in (4999, 5000):
        job = replace(running("low"), priority=priority)
        assert (site.ending(job, waiting("gpu"), NOW) is not None) == (priority < 5000)


def test_a_mode_with_priority_requires_a_higher_one() -> None:
    site = rules("preempt/qos", mode="PRIORITY,REQUEUE")
    for priority in (9, 10, 11):
        job, other = replace(running(qos="normal"), priority=10), replace(waiting(qos="high"), priority=priority)
        assert (site.ending(job, other, NOW) is not None) == (priority > 10)


def test_the_qos_of_a_partition_counts_too() -> None:
    assert by_partition(running("poor", ran_s=3599), waiting("gpu")) is None
    assert by_partition(running("poor", ran_s=3600), waiting("gpu")) is not None


@pytest.mark.parametrize("kind", ["(null)", "preempt/none", "", "preempt/unheard_of"])
def test_without_preemption_there_are_no_rules(kind: str) -> None:
    assert rules(kind) == NO_PREEMPTION
    assert NO_PREEMPTION.ending(running(), waiting(), NOW) is None
    assert not NO_PREEMPTION.may_preempt(waiting())


def test_only_preemption_by_qos_needs_accounting() -> None:
    config = CONFIG.format(kind="preempt/qos", mode="REQUEUE", exempt="00:00:00")
    assert by_qos(config) and not by_qos(config.replace("qos", "partition_prio"))
    site = parse(config.replace("qos", "partition_prio"), PARTITIONS, "")
    assert site.ending(running("low"), waiting("gpu"), NOW) == Ending(cancel=False)


@given(st.text(), st.text(), st.text())
def test_other_output_gives_no_right(config: str, partitions: str, qos: str) -> None:
    kinds = ("preempt/qos", "preempt/partition_prio")
    for text in (config, *(CONFIG.format(kind=kind, mode="REQUEUE", exempt="00:00:00") for kind in kinds)):
        assert parse(text, partitions, qos).ending(running(), waiting(qos="high"), NOW) is None
