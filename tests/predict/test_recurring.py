"""The slice that a recurring job is given, based on its own runs."""

import math
import random

import pytest

from slurm_migbatch.predict.recurring import (
    CUT,
    DONE,
    FAILED,
    OUT_OF_MEMORY,
    WINDOW,
    PastRun,
    RecurringJob,
    RunsPolicy,
    bound,
    fixed_share,
    need_of,
    pick,
)
from tests.support.gpu_kinds import SITE

PARTITION = SITE.view(("gpu",))
OFFERS = PARTITION.offers
POLICY = RunsPolicy(3, 1.1)
MEMORY_MIB = {name: offer.memory_mib for name, offer in OFFERS.items()}


def runs(*peaks, profile="1g.10gb", ended=DONE, engine=""):
    """Runs of (peak GiB) or (profile, peak GiB, ended), the newest last."""
    made = []
    for number, run in enumerate(peaks):
        where, gib, how = run if isinstance(run, tuple) else (profile, run, ended)
        made.append(PastRun(number, where, how, None if gib is None else gib * 1024, engine=engine))
    return made


def chosen(past, policy=POLICY, allowed=PARTITION.plain):
    need = need_of(past, OFFERS, policy.runs)
    return None if need is None else pick(RecurringJob("train.sh", tuple(past)), need, allowed, policy)


def test_too_few_runs_give_no_choice():
    assert chosen([]) is None
    assert chosen(runs(7, 7)) is None
    assert chosen(runs(7, 7, None)) is None  # no peak is known for one of them
    assert chosen(runs(7, 7, ("1g.10gb", 7, FAILED))) is None
    assert chosen(runs(7, 7, ("1g.10gb", 7, CUT))) is None


def test_enough_runs_choose_the_smallest_slice_that_holds_them():
    offer, reason, text = chosen(runs(7, 7.1, 7))
    assert (offer.profile.gres_type, reason) == ("1g.10gb", "runs")
    assert "your last 3 runs of train.sh used at most 7.1 GiB" in text
    assert chosen(runs(12, 12.1, 12, profile="7g.80gb"))[0].profile.gres_type == "1g.20gb"
    assert chosen(runs(30, 31, 30, profile="7g.80gb"))[0].profile.gres_type == "3g.40gb"


def test_growing_memory_need_moves_the_job_up_before_its_slice_is_full():
    past = runs(6, 6, 6)
    assert chosen(past)[0].profile.gres_type == "1g.10gb"
    assert chosen(runs(6, 6, 6, 8.9))[0].memory_mib > MEMORY_MIB["1g.10gb"]


@pytest.mark.parametrize("count", [2, 3, 5, 8, 9, 15, 20])
def test_memory_bound_holds_in_nine_of_ten_cases(count):
    """Peaks that vary by a tenth: the next peak is below the bound in at least nine of ten cases."""
    kept, draws = 0, random.Random(7)
    for _ in range(2000):
        *seen, new = (math.exp(draws.gauss(math.log(5000), 0.1)) for _ in range(count + 1))
        kept += new <= bound(list(seen))
    assert kept >= 0.88 * 2000  # four standard deviations of the count below nine tenths


def test_run_that_filled_its_slice_moves_the_next_run_to_a_larger_slice():
    offer, reason, text = chosen(runs(7, 7, 7, ("1g.10gb", 9.5, FAILED)))
    assert (offer.profile.gres_type, reason) == ("1g.20gb", "runs_full")
    assert "a run of train.sh filled its slice of 9.75 GiB" in text
    assert chosen(runs(7, 7, 7, ("1g.10gb", 3, FAILED)))[0].profile.gres_type == "1g.10gb"  # any other failure
    assert chosen(runs(7, 7, 7, ("1g.10gb", 3, OUT_OF_MEMORY)))[0].profile.gres_type == "1g.20gb"  # as reported
    assert chosen(runs(7, 7, 7, ("1g.10gb", None, OUT_OF_MEMORY)))[0].profile.gres_type == "1g.20gb"


def test_first_run_out_of_memory_is_followed_by_a_run_on_a_whole_gpu():
    past = runs(("1g.10gb", 9.5, FAILED))
    offer, reason, _ = chosen(past)
    assert (offer.profile.gres_type, reason) == ("7g.80gb", "runs_unknown")
    past = [*past, PastRun(1, "7g.80gb", DONE, 14 * 1024)]
    assert chosen(past)[0].profile.gres_type == "3g.40gb"  # a single run gives a wide margin
    past = [*past, PastRun(2, "3g.40gb", DONE, 14 * 1024)]
    assert chosen(past)[0].profile.gres_type == "1g.20gb"
    assert chosen(runs(("1g.10gb", 3, FAILED))) is None


def test_job_keeps_the_larger_slice_though_later_runs_use_less():
    past = runs(7, 7, 7, ("1g.10gb", 9.6, FAILED), *[("1g.20gb", 8, DONE)] * 10)
    assert chosen(past)[0].profile.gres_type == "1g.20gb"


def test_job_never_runs_out_of_memory_twice_in_a_row():
    """The need grows by up to a third from one run to the next, from any start."""
    draws = random.Random(11)
    for _ in range(200):
        past, failed_before, need_gib = [], False, draws.uniform(2, 40)
        for number in range(40):
            need_gib = min(need_gib * draws.choice((1, 1, 1.02, 1.35)), 75)
            found = chosen(past)
            offer = PARTITION.plain[0] if found is None else found[0]
            memory_gib = offer.memory_mib / 1024
            died = need_gib > memory_gib
            assert not (died and failed_before), (past[-1], offer, need_gib)
            peak = min(need_gib, memory_gib * 0.97) * 1024
            past.append(PastRun(number, offer.profile.gres_type, FAILED if died else DONE, peak))
            failed_before = died


def test_job_that_fits_on_no_slice_gets_the_largest_and_a_message():
    offer, reason, text = chosen(runs(("7g.80gb", 78, FAILED)))
    assert (offer.profile.gres_type, reason) == ("7g.80gb", "runs_short")
    assert "mem=" in text


def test_profile_limits_override_the_run_history():
    small = [offer for offer in PARTITION.plain if offer.memory_mib <= MEMORY_MIB["1g.20gb"]]
    offer, reason, _ = chosen(runs(30, 30, 30, profile="7g.80gb"), allowed=small)
    assert (offer.memory_mib, reason) == (MEMORY_MIB["1g.20gb"], "runs_short")


def test_only_the_newest_runs_are_considered():
    assert chosen(runs(*[30] * 5, *[5] * WINDOW, profile="7g.80gb"))[0].profile.gres_type == "1g.10gb"


def used(profile, sm, dram, count=3):
    return [PastRun(number, profile, DONE, 5 * 1024, sm, dram) for number in range(count)]


def test_slice_too_small_for_the_measured_utilization_is_not_chosen():
    assert chosen(used("3g.40gb", 0.2, 0.2))[0].profile.gres_type == "1g.10gb"
    offer, _, text = chosen(used("3g.40gb", 0.6, 0.1))
    assert offer.compute_slices == 2
    assert "on 1g.10gb they would take longer" in text
    assert chosen(used("3g.40gb", 0.1, 0.9))[0].memory_mib >= MEMORY_MIB["3g.40gb"] * 0.8
    assert chosen(used("3g.40gb", 1.0, 1.0))[0].profile.gres_type == "3g.40gb"
    assert chosen(used("3g.40gb", 0.6, 0.1), RunsPolicy(3, 5.0))[0].profile.gres_type == "1g.10gb"


def test_full_utilization_of_a_small_slice_does_not_select_a_larger_one():
    assert chosen(used("1g.10gb", 1.0, 1.0))[0].profile.gres_type == "1g.10gb"
    assert chosen([*used("1g.10gb", 1.0, 1.0), *used("3g.40gb", 1.0, 1.0)])[0].profile.gres_type == "1g.10gb"


# -- use is not need ------------------------------------------------------------------------------------------------


def share(profile, of=0.9, ended=DONE, number=0, engine=""):
    return PastRun(number, profile, ended, of * MEMORY_MIB[profile], engine=engine)


def test_fixed_memory_share_on_3g_and_7g_keeps_the_choice():
    for engine in ("vllm", ""):
        before = [share("3g.40gb", number=n, engine=engine) for n in range(3)]
        if engine:
            assert chosen(before)[0].profile.gres_type == "3g.40gb"
        after = [*before, share("3g.40gb", number=3, engine=engine), share("7g.80gb", number=4, engine=engine)]
        offer, reason, text = chosen(after)
        assert (offer.profile.gres_type, reason) == ("3g.40gb", "runs_kept")
        assert "allocates a fixed share" in text and "unknown" in text


def test_fixed_memory_share_is_not_taken_for_a_full_slice():
    past = [share("3g.40gb", number=n, engine="vllm") for n in range(3)]
    assert chosen([*past, share("3g.40gb", ended=FAILED, number=3, engine="vllm")])[0].profile.gres_type == "3g.40gb"
    reported = share("3g.40gb", ended=OUT_OF_MEMORY, number=3, engine="vllm")
    assert chosen([*past, reported, reported])[0].memory_mib > MEMORY_MIB["3g.40gb"]


def test_need_is_unknown_when_fixed_share_runs_never_completed():
    assert need_of([share("3g.40gb", ended=CUT, number=n, engine="vllm") for n in range(5)], OFFERS, 3) is None


def test_fixed_share_is_detected_only_across_slices_of_different_sizes():
    assert fixed_share([(10, 9), (20, 18)])
    assert fixed_share([(10, 7.5), (40, 30.2), (80, 60)])
    assert not fixed_share([(10, 9), (10, 9)])
    assert not fixed_share([(10, 9), (12, 10.8)])
    assert not fixed_share([(10, 7), (20, 7)])
    assert not fixed_share([(10, 2), (20, 4)])  # it did not fill any of the slices
    assert not fixed_share([])
