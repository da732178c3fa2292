"""Reasons of loans as other users see them: without figures from the lengths, models and speeds of training jobs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slurm_migbatch.decide.lending.pairs import Host, Sharer, SharingRules, pairs, partings
from slurm_migbatch.decide.lending.reasons import without_estimates
from slurm_migbatch.decide.lending.round import LACKING
from slurm_migbatch.mig.profile import Profile

P2 = Profile.parse("2g.20gb")
SPEEDS = {job: {P2: 0.5} for job in range(1, 9)}


def sharer(job: int, left_s: float) -> Sharer:
    return Sharer(job, 7, "bert", left_s, None, 5000.0)


def host(job: int, left_s: float) -> Host:
    return Host(sharer(job, left_s), P2, 20_000.0)


@pytest.mark.parametrize(
    ("slowdown", "guests", "figure"),
    [(1.1, 1, "s sooner on average"), (1.6, 3, "its user's 3 pending jobs end sooner")],
)
def test_reason_of_a_pair_keeps_the_job_and_the_slice_only(slowdown: float, guests: int, figure: str) -> None:
    waiting = [sharer(job, 100.0) for job in range(2, 2 + guests)]
    (pair, *_) = pairs([host(1, 100.0 if guests > 1 else 5000.0)], waiting, SPEEDS, SharingRules(slowdown=slowdown))
    assert figure in pair.why and "slowed down" in pair.why
    for before, after in (("", ""), ("it is about to start ", ""), ("released for 5 s (", ")")):
        assert without_estimates(before + pair.why + after) == f"{before}beside job 1 on its 2g.20gb{after}"


def test_reason_for_ending_a_pair_says_no_slowdowns() -> None:
    running = [replace(host(1, 5000.0), guest=sharer(2, 5000.0))]
    (pair,) = partings(running, SPEEDS, SharingRules(), lambda job, beside: 3.0, 60.0)
    assert "3.00 times" in pair.why
    assert not re.search(r"\d\.\d|times", without_estimates(pair.why)) and "job 1" in without_estimates(pair.why)


def test_other_reasons_are_not_changed() -> None:
    for why in (*LACKING.values(), "inference job 9 needs 2 x 1g.10gb", "2g.20gb is idle, and it is 7 times: so"):
        assert without_estimates(why) == why
