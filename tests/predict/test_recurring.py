"""What a recurring job is given by its own runs."""

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
ROOM = {name: offer.memory_mib for name, offer in OFFERS.items()}


def runs(*told, profile="1g.10gb", ended=DONE, engine=""):
    """Runs of (peak GiB) or (profile, peak GiB, ended), the newest last."""
    made = []
    for number, each in enumerate(told):
        where, gib, how = each if isinstance(each, tuple) else (profile, each, ended)
        made.append(PastRun(number, where, how, None if gib is None else gib * 1024, engine=engine))
    return made


def chosen(past, policy=POLICY, allowed=PARTITION.plain):
    need = need_of(past, OFFERS, policy.runs)
    return None if need is None else pick(RecurringJob("train.sh", tuple(past)), need, allowed, policy)


def test_too_few_runs_say_nothing():
    assert chosen([]) is None
    assert chosen(runs(7, 7)) is None
    assert chosen(runs(7, 7, None)) is None  # of one nothing was seen
    assert chosen(runs(7, 7, ("1g.10gb", 7, FAILED))) is None
    assert chosen(runs(7, 7, ("1g.10gb", 7, CUT))) is None


def test_enough_runs_choose_the_smallest_slice_that_holds_them():
    offer, reason, text = chosen(runs(7, 7.1, 7))
    assert (offer.profile.gres_type, reason) == ("1g.10gb", "runs")
    assert "your last 3 runs of train.sh used at most 7.1 GiB" in text
    assert chosen(runs(12, 12.1, 12, profile="7g.80gb"))[0].profile.gres_type == "1g.20gb"
    assert chosen(runs(30, 31, 30, profile="7g.80gb"))[0].profile.gres_type == "3g.40gb"


def test_a_need_that_grows_is_followed_before_it_hits_the_edge():
    past = runs(6, 6, 6)
    assert chosen(past)[0].profile.gres_type == "1g.10gb"
    assert chosen(runs(6, 6, 6, 8.9))[0].memory_mib > ROOM["1g.10gb"]


@pytest.mark.parametrize("count", [2, 3, 5, 8, 9, 15, 20])
def test_the_bound_holds_as_often_as_it_says(count):
    """Peaks that vary by a tenth: the next one stays below in at least nine cases of ten."""
    kept, draws = 0, random.Random(7)
    for _ in range(2000):
        *seen, new = (math.exp(draws.gauss(math.log(5000), 0.1)) for _ in range(count + 1))
        kept += new <= bound(list(seen))
    assert kept >= 0.88 * 2000  # four standard deviations of the count below nine tenths


def test_a_full_slice_moves_the_next_one_up_at_once():
    offer, reason, text = chosen(runs(7, 7, 7, ("1g.10gb", 9.5, FAILED)))
    assert (offer.profile.gres_type, reason) == ("1g.20gb", "runs_full")
    assert "a run of train.sh filled its slice of 9.75 GiB" in text
    assert chosen(runs(7, 7, 7, ("1g.10gb", 3, FAILED)))[0].profile.gres_type == "1g.10gb"  # whatever it died of
    assert chosen(runs(7, 7, 7, ("1g.10gb", 3, OUT_OF_MEMORY)))[0].profile.gres_type == "1g.20gb"  # its own word
    assert chosen(runs(7, 7, 7, ("1g.10gb", None, OUT_OF_MEMORY)))[0].profile.gres_type == "1g.20gb"


def test_a_first_run_that_ran_out_is_followed_by_one_that_shows_the_need():
    past = runs(("1g.10gb", 9.5, FAILED))
    offer, reason, _ = chosen(past)
    assert (offer.profile.gres_type, reason) == ("7g.80gb", "runs_unknown")
    past = [*past, PastRun(1, "7g.80gb", DONE, 14 * 1024)]
    assert chosen(past)[0].profile.gres_type == "3g.40gb"  # one run bears little
    past = [*past, PastRun(2, "3g.40gb", DONE, 14 * 1024)]
    assert chosen(past)[0].profile.gres_type == "1g.20gb"
    assert chosen(runs(("1g.10gb", 3, FAILED))) is None


def test_it_stays_up_after_that_though_later_runs_use_less():
    past = runs(7, 7, 7, ("1g.10gb", 9.6, FAILED), *[("1g.20gb", 8, DONE)] * 10)
    assert chosen(past)[0].profile.gres_type == "1g.20gb"


def test_a_job_never_fails_twice_in_a_row_whatever_it_needs():
    """It grows by up to a third from one run to the next, from anything."""
    draws = random.Random(11)
    for _ in range(200):
        past, failed_before, need_gib = [], False, draws.uniform(2, 40)
        for number in range(40):
            need_gib = min(need_gib * draws.choice((1, 1, 1.02, 1.35)), 75)
            found = chosen(past)
            offer = PARTITION.plain[0] if found is None else found[0]
            room = offer.memory_mib / 1024
            died = need_gib > room
            assert not (died and failed_before), (past[-1], offer, need_gib)
            peak = min(need_gib, room * 0.97) * 1024
            past.append(PastRun(number, offer.profile.gres_type, FAILED if died else DONE, peak))
            failed_before = died


def test_what_fits_nowhere_gets_the_largest_and_is_told():
    offer, reason, text = chosen(runs(("7g.80gb", 78, FAILED)))
    assert (offer.profile.gres_type, reason) == ("7g.80gb", "runs_short")
    assert "mem=" in text


def test_limits_hold_before_histories():
    small = [offer for offer in PARTITION.plain if offer.memory_mib <= ROOM["1g.20gb"]]
    offer, reason, _ = chosen(runs(30, 30, 30, profile="7g.80gb"), allowed=small)
    assert (offer.memory_mib, reason) == (ROOM["1g.20gb"], "runs_short")


def test_only_the_newest_runs_count():
    assert chosen(runs(*[30] * 5, *[5] * WINDOW, profile="7g.80gb"))[0].profile.gres_type == "1g.10gb"


def used(profile, sm, dram, count=3):
    return [PastRun(number, profile, DONE, 5 * 1024, sm, dram) for number in range(count)]


def test_no_slice_on_which_what_was_busy_does_not_fit():
    assert chosen(used("3g.40gb", 0.2, 0.2))[0].profile.gres_type == "1g.10gb"
    offer, _, text = chosen(used("3g.40gb", 0.6, 0.1))
    assert offer.compute_slices == 2
    assert "on 1g.10gb they would take longer" in text
    assert chosen(used("3g.40gb", 0.1, 0.9))[0].memory_mib >= ROOM["3g.40gb"] * 0.8
    assert chosen(used("3g.40gb", 1.0, 1.0))[0].profile.gres_type == "3g.40gb"
    assert chosen(used("3g.40gb", 0.6, 0.1), RunsPolicy(3, 5.0))[0].profile.gres_type == "1g.10gb"


def test_a_busy_small_slice_is_no_reason_for_a_larger_one():
    assert chosen(used("1g.10gb", 1.0, 1.0))[0].profile.gres_type == "1g.10gb"
    assert chosen([*used("1g.10gb", 1.0, 1.0), *used("3g.40gb", 1.0, 1.0)])[0].profile.gres_type == "1g.10gb"


# -- use is not need ------------------------------------------------------------------------------------------------


def share(profile, of=0.9, ended=DONE, number=0, engine=""):
    return PastRun(number, profile, ended, of * ROOM[profile], engine=engine)


def test_a_run_on_3g_and_one_on_7g_leave_the_choice_where_it_was():
    for engine in ("vllm", ""):
        before = [share("3g.40gb", number=n, engine=engine) for n in range(3)]
        if engine:
            assert chosen(before)[0].profile.gres_type == "3g.40gb"
        after = [*before, share("3g.40gb", number=3, engine=engine), share("7g.80gb", number=4, engine=engine)]
        offer, reason, text = chosen(after)
        assert (offer.profile.gres_type, reason) == ("3g.40gb", "runs_kept")
        assert "allocates a fixed share" in text and "unknown" in text


def test_a_fixed_share_is_not_taken_for_a_full_slice():
    past = [share("3g.40gb", number=n, engine="vllm") for n in range(3)]
    assert chosen([*past, share("3g.40gb", ended=FAILED, number=3, engine="vllm")])[0].profile.gres_type == "3g.40gb"
    told = share("3g.40gb", ended=OUT_OF_MEMORY, number=3, engine="vllm")
    assert chosen([*past, told, told])[0].memory_mib > ROOM["3g.40gb"]


def test_what_takes_a_share_and_never_completed_is_unknown():
    assert need_of([share("3g.40gb", ended=CUT, number=n, engine="vllm") for n in range(5)], OFFERS, 3) is None


def test_shares_tell_only_over_slices_of_different_sizes():
    assert fixed_share([(10, 9), (20, 18)])
    assert fixed_share([(10, 7.5), (40, 30.2), (80, 60)])
    assert not fixed_share([(10, 9), (10, 9)])
    assert not fixed_share([(10, 9), (12, 10.8)])
    assert not fixed_share([(10, 7), (20, 7)])
    assert not fixed_share([(10, 2), (20, 4)])  # it has room everywhere
    assert not fixed_share([])
