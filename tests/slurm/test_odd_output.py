"""Output of Slurm's commands in forms that no release has yet: other separators, numbers, words and order of fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.node import scontrol
from slurm_migbatch.node.scontrol import ScontrolError
from slurm_migbatch.slurm import arrays, dependencies, gpu_defaults, gres, nodelist, order, preemption, reservations
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.listing import SQUEUE_FIELDS, parse_jobs
from slurm_migbatch.slurm.settings import controllers, parse_settings

CONFIG = (
    "JobDefaults             = DefMemPerGPU=5\nPreemptMode             = REQUEUE\nPreemptType             = {}\n"
    "PreemptExemptTime       = 00:30:00\nPreemptParameters       = min_exempt_priority=5\n"
    "SlurmctldHost[0]        = a(10.0.0.1)\n"
)
PARTITION = (
    "PartitionName=gpu Default=YES QoS=N/A GraceTime=0 JobDefaults=DefMemPerGPU=1000,DefCpuPerGPU=2 PriorityTier=3 "
    "PreemptMode=REQUEUE State=UP TRES=cpu=1,mem=2,gres/mig=3\n"
)
QOS = "normal|half,low|cluster|00:00:00|\nhalf|low|requeue|00:00:30|00:10:00\n"
BY_PARTITION, BY_QOS = CONFIG.format("preempt/partition_prio"), CONFIG.format("preempt/qos")
RESERVATION = (
    "ReservationName=a StartTime=1796057982 EndTime=1796067982 Duration=01:00:00 Nodes=n[1-2] Flags=MAINT,SPEC_NODES "
    "TRES=cpu=4 Users=root Accounts=(null) State=ACTIVE MaxStartDelay=(null)\n"
)
#: output as today, and what reads it
READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "reservations": (RESERVATION, lambda text: reservations.parse(text, lambda name, why: None, 1.0)),
    "tiers": (PARTITION, order.parse_tiers),
    "defaults of partitions": (PARTITION, lambda text: gpu_defaults.parse(text, BY_PARTITION)),
    "defaults of the cluster": (BY_PARTITION, lambda text: gpu_defaults.parse(PARTITION, text)),
    "settings": (BY_PARTITION, lambda text: controllers(parse_settings(text))),
    "preemption": (BY_PARTITION, lambda text: preemption.parse(text, PARTITION, QOS)),
    "preemption by partition": (PARTITION, lambda text: preemption.parse(BY_PARTITION, text, QOS)),
    "preemption by QOS": (QOS, lambda text: preemption.parse(BY_QOS, PARTITION, text)),
    "dependencies": ("afterok:12(unfulfilled),after:13+5?afterany:14_*", dependencies.jobs_waited_for),
    "tasks": ("7|7|0\n8|7|3\n", arrays.parse_tasks),
    "throttle": ("JobId=7 ArrayTaskThrottle=4 JobName=x", arrays.throttle),
    "gres": ("gpu:h100:8(S:0,2),mig:1g.10gb:14(S:0-1)", lambda text: gres.counts(text, "mig")),
    "gres of a job": ("gres/mig:1g.10gb:2,gres/gpu:1", lambda text: gres.readable_counts(text, "mig")),
    "gres on a node": ("gres/mig:1g.10gb:2,gres/gpu:1", lambda text: scontrol.grant_of(text, "gres/")),
    "nodes": ("n[1-4,07],m3", nodelist.expand),
}
NEW = (
    "é",
    "²",
    "\n",
    "=",
    "|",
    ",",
    ":",
    "%",
    "[",
    ")",
    "-",
    "9" * 30,
    "\udcff",
    " NewKey=3 ",
    "N/A",
    "1K",
    "4294967294",
    "1.5",
)


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, str]:
    """Return the name of a reader, and its output changed in up to three places."""
    name = draw(st.sampled_from(sorted(READERS)))
    text = READERS[name][0]
    for _ in range(draw(st.integers(0, 3))):
        at, dropped = draw(st.integers(0, len(text))), draw(st.integers(0, 6))
        text = text[:at] + draw(st.sampled_from(("", *NEW))) + text[at + dropped :]
    return name, text


@settings(max_examples=800, deadline=None)
@given(changed())
def test_output_is_read_or_refused_in_words(output: tuple[str, str]) -> None:
    name, text = output
    try:
        READERS[name][1](text)
    except (SlurmError, ScontrolError, gres.GresError, nodelist.NodeListError) as error:
        assert str(error)


@pytest.mark.parametrize("field", SQUEUE_FIELDS[1:])
def test_number_beyond_those_of_slurm_in_a_job_hides_no_other_job(field: str) -> None:
    texts = dict.fromkeys(SQUEUE_FIELDS, "1") | {"State": "PENDING", "ArrayTaskID": "N/A", "Dependency": ""}
    listed = [{**texts, "JobID": "7", field: f"3-{10**30}"}, {**texts, "JobID": "8", field: str(10**30)}, texts]
    rows = parse_jobs("".join("|".join(row.values()) + "|\n" for row in listed), "|")
    assert [row.job_id for row in rows] == [7, 8, 1]
