"""Slowdowns of pairs from the reports of both: rates alone and together, and the value assumed for other pairs."""

import math

import pytest

from slurm_migbatch.decide.lending.loan import JobView
from slurm_migbatch.decide.lending.pair_slowdowns import (
    SWITCHING,
    PairSlowdowns,
    RateKey,
    Reported,
    costs_s,
    time_sliced,
    together_rate,
)
from slurm_migbatch.decide.lending.pairs import SharingRules
from slurm_migbatch.decide.lending.shared_runs import SharedRuns
from slurm_migbatch.decide.snapshot import Report
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow
from slurm_migbatch.workload.loans import LoanHints

BERT, GPT = RateKey(7, "bert 32", "2g.20gb"), RateKey(7, "gpt 8", "2g.20gb")


def reported(kind, items, at):
    return Reported(kind, kind.hints.split()[0], items, at)


def pair(slowdowns, host_rate, guest_rate, at=1000.0):
    """The host reports while alone, then both while they share the slice: 100 s each."""
    host, guest = (1, 0), (2, 0)
    for second in (0.0, 100.0):
        slowdowns.add_report(host, reported(BERT, 10 * second, at + second))
    for second in (0.0, 100.0):
        slowdowns.add_report(host, reported(BERT, 1000 + host_rate * second, at + 200 + second), guest, "gpt")
        slowdowns.add_report(guest, reported(GPT, guest_rate * second, at + 200 + second), host, "bert")


def test_slowdown_is_known_for_a_host_that_ran_alone_but_not_for_its_guest():
    slowdowns = PairSlowdowns({}, 1.5)
    pair(slowdowns, 8.0, 4.0)
    assert slowdowns.known == {("bert", "gpt", "2g.20gb"): pytest.approx(1.25)}
    assert slowdowns.measured((1, 0), (2, 0)) == pytest.approx(1.25)
    assert slowdowns.measured((2, 0), (1, 0)) is None


def test_guest_slowdown_is_relative_to_other_runs_of_its_kind_alone():
    slowdowns = PairSlowdowns({}, 1.5)
    for second in (0.0, 100.0):
        slowdowns.add_report((9, 0), reported(GPT, 6 * second, second))
    pair(slowdowns, 8.0, 4.0)
    assert slowdowns.known["gpt", "bert", "2g.20gb"] == pytest.approx(1.5)


def test_table_of_slowdowns_takes_precedence_over_measured_ones():
    slowdowns = PairSlowdowns({("bert", "gpt", ""): 1.1}, 1.5)
    pair(slowdowns, 5.0, 5.0)
    assert slowdowns.known == {("bert", "gpt", ""): 1.1}
    assert slowdowns.measured((1, 0), (2, 0)) == pytest.approx(2.0), "reports of this pair count nevertheless"


def test_no_rate_from_a_short_interval_or_across_a_change_of_partner():
    slowdowns = PairSlowdowns({}, 1.5)
    for second in (0.0, 100.0):
        slowdowns.add_report((1, 0), reported(BERT, 10 * second, second))
    slowdowns.add_report((1, 0), reported(BERT, 1000.0, 200.0), (2, 0), "gpt")
    slowdowns.add_report((1, 0), reported(BERT, 1100.0, 230.0), (2, 0), "gpt")
    assert not slowdowns.known
    slowdowns.add_report((1, 0), reported(BERT, 1200.0, 300.0), (3, 0), "gpt")
    slowdowns.add_report((1, 0), reported(BERT, 1300.0, 400.0), (3, 0), "gpt")
    assert slowdowns.known == {("bert", "gpt", "2g.20gb"): pytest.approx(10.0)}
    assert slowdowns.measured((1, 0), (2, 0)) is None
    slowdowns.forget([(2, 0)])
    assert slowdowns.measured((1, 0), (3, 0)) is None and slowdowns.known, "applications are kept, runs are not"


def test_time_before_a_change_of_partner_is_in_no_rate_although_rounds_are_more_frequent_than_reports():
    """Alone 10 items/s, beside another 5, which starts at 150 s and ends at 510 s; a report every 120 s."""
    host, guest, profile = (1, 0), (2, 0), Profile.parse("2g.20gb")
    views = {
        job: JobView(JobRow(job, uid=7, state="RUNNING", start=0.0), LoanHints(slice=profile, model=model))
        for job, model in ((1, "bert"), (2, "gpt"))
    }
    runs, alone_rates = SharedRuns(SharingRules()), set()
    for now in range(10, 1200, 10):
        last = now - now % 120
        shared_s = min(max(last - 150, 0), 360)
        reports = {host: Report(items=10.0 * last - 5.0 * shared_s, at=float(last))}
        shares = 150 <= now < 510
        beside = {host: guest, guest: host} if shares else {}
        runs.update(float(now), views, dict.fromkeys((host, *beside), profile), beside, reports)
        assert runs.slowdowns.measured(host, guest) in (None, pytest.approx(2.0))
        assert (runs.slowdowns.measured(host, guest) is not None) == (360 <= now < 510)
        alone_rates.update(runs.slowdowns._alone.values())
    assert alone_rates and all(rate == pytest.approx(10.0) for rate in alone_rates)


def test_untried_pair_is_assumed_at_the_lower_part_of_measured_slowdowns():
    alike, different = PairSlowdowns({}, 1.5), PairSlowdowns({}, 1.5)
    assert alike.assumed == {}
    for number in range(40):
        alike._slowdowns[f"a{number}", "b", "2g.20gb"] = 1.1
        different._slowdowns[f"a{number}", "b", "2g.20gb"] = (1.0, 16.0)[number % 2]
    assert alike.assumed == {"2g.20gb": pytest.approx(1.1, abs=0.05)}
    assert 1.0 <= different.assumed["2g.20gb"] < 2.5, "most pairs are bad, and good ones are still tried"


def test_activity_is_learned_from_runs_that_are_alone_on_their_slice():
    slowdowns = PairSlowdowns({}, 1.5)
    for second in (0.0, 100.0):
        slowdowns.add_report((1, 0), reported(BERT, 10 * second, second)._replace(activity=0.9))
        slowdowns.add_report((2, 0), reported(GPT, 10 * second, second)._replace(activity=0.3), (3, 0), "bert")
    assert slowdowns.activity(7, "bert 32") == {"2g.20gb": 0.9}
    assert slowdowns.activity(7, "gpt 8") == {"2g.20gb": 0.9}, "unknown, so as the user's other jobs"
    assert slowdowns.activity(8, "bert 32") == {}, "jobs of another user"
    for second in (200.0, 300.0):
        slowdowns.add_report((2, 0), reported(GPT, 10 * second, second)._replace(activity=0.3))
    assert slowdowns.activity(7, "gpt 8") == {"2g.20gb": 0.3}
    assert slowdowns.activity(7, "vgg 1") == {"2g.20gb": pytest.approx(0.6)}


@pytest.mark.parametrize("own", [0.1, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("other", [0.1, 0.2, 0.7, 1.0])
def test_each_job_is_slowed_down_while_the_other_one_needs_the_sms(own, other):
    slow_own, slow_other = time_sliced(own, other)
    needs_own, needs_other = (slow_other - 1) / (SWITCHING * other), (slow_own - 1) / (SWITCHING * own)
    busy_own, busy_other = own * (1 + SWITCHING * needs_other), other * (1 + SWITCHING * needs_own)
    assert needs_own == pytest.approx(busy_own / (1 - own + busy_own))
    assert needs_other == pytest.approx(busy_other / (1 - other + busy_other))
    assert time_sliced(other, own) == (slow_other, slow_own)


def test_time_sliced_limits():
    assert time_sliced(0.0, 1.0) == (1.0, 1.0)
    assert time_sliced(1.0, 1.0) == (pytest.approx(2.4), pytest.approx(2.4))
    assert time_sliced(2.0, -1.0) == time_sliced(1.0, 0.0)
    assert together_rate(*time_sliced(0.3, 0.3)) > 1.6 > 1.0 > together_rate(*time_sliced(0.95, 0.95))


@pytest.mark.parametrize(
    ("slow", "rate"), [((1.0, 1.0), 2.0), ((2.0, 2.0), 1.0), ((4.0, 4.0), 0.5), ((1.0, 100.0), 1.01)]
)
def test_combined_rate_and_sign_of_the_cost_of_a_pair(slow, rate):
    assert together_rate(*slow) == pytest.approx(rate)
    assert math.copysign(1, costs_s(100.0, 1000.0, *slow)) == (1 if rate < 1 else -1) or rate == 1


def test_cost_of_a_bad_pair_counts_until_the_first_job_has_ended():
    assert costs_s(100.0, 1000.0, 4.0, 4.0) == pytest.approx(400.0 * 0.5)
