"""What a change to a loan is worth, and when one may be made."""

import pytest

from slurm_migbatch.decide.lending.allocation import Hysteresis, paid_worth


def test_worth_falls_with_the_cost_of_a_restart():
    assert paid_worth(4.0, 2.0, restart_s=30, stay_s=60) == pytest.approx(1.0)
    assert paid_worth(4.0, 2.0, restart_s=90, stay_s=60) == 0.0
    assert paid_worth(4.0, 2.0, restart_s=0, stay_s=0) == 0.0


def test_time_before_a_job_may_be_changed_grows_with_its_restarts():
    hysteresis = Hysteresis(first_s=600, growth=2, most_s=5000)
    assert not hysteresis.may_change(599, 0, 0)
    assert hysteresis.may_change(600, 0, 0)
    assert not hysteresis.may_change(4799, 0, 3)
    assert hysteresis.may_change(4800, 0, 3)
    assert hysteresis.may_change(5000, 0, 10**6)


def test_slice_is_lent_only_after_its_idle_time_and_its_rest():
    hysteresis = Hysteresis(idle_s=120, rest_s=600)
    assert not hysteresis.may_lend(119, 0, None)
    assert hysteresis.may_lend(120, 0, None)
    assert not hysteresis.may_lend(700, 500, 200)
    assert hysteresis.may_lend(800, 500, 200)
