"""Knees, efficacy and fairness on figures that can be checked by hand."""

import pytest

from slurm_migbatch.lab.papers.rightsize import efficacy, knee, leanest, rightsize, useful
from slurm_migbatch.lab.papers.settings import InstanceSetting
from slurm_migbatch.mig.profile import Profile

ONE, TWO, THREE, WHOLE = (Profile.parse(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"))


def test_knee_is_the_size_beyond_which_larger_slices_gain_too_little():
    assert knee({1: 8.0, 2: 4.0, 3: 2.7, 4: 2.0, 7: 1.2}) == 7
    assert knee({1: 8.0, 2: 4.0, 3: 3.9, 4: 3.85, 7: 3.8}) == 2
    assert knee({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 7: 1.0}) == 1
    assert knee({2: 4.0}) == 2


def test_single_step_without_gain_does_not_end_the_knee_search():
    assert knee({1: 8.0, 2: 7.9, 3: 4.0, 4: 3.9}) == 3


def test_gain_of_a_step_is_divided_by_its_number_of_slices():
    """14 % less time from 4 to 7 slices is less than 5 % for each of the three additional slices."""
    assert knee({4: 1.0, 7: 0.86}) == 4
    assert knee({4: 1.0, 7: 0.84}) == 7


def test_knee_of_no_sizes_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        knee({})


def test_efficacy_matches_a_figure_worked_out_by_hand():
    """8 items in 2 s on half of the GPU: 4 a second / (2 s * 1/2) = 4."""
    assert efficacy(8, 2.0, 0.5) == 4.0


def test_right_size_matches_efficacies_worked_out_by_hand():
    """Efficacies: 1g b1 1/(.01^2/7) = 70000; 1g b4 4/(.03^2/7) = 31111; 2g b4 4/(.014^2 * 2/7) = 71429;
    7g b4 is above the knee of batch 4, which is 2: from there 0.014 to 0.013 gains too little."""
    settings = [
        InstanceSetting(ONE, 1, 1, 0.010),
        InstanceSetting(WHOLE, 1, 1, 0.010),
        InstanceSetting(ONE, 4, 1, 0.030),
        InstanceSetting(TWO, 4, 1, 0.014),
        InstanceSetting(WHOLE, 4, 1, 0.013),
        InstanceSetting(ONE, 4, 3, 0.001),
    ]
    assert rightsize(settings, 0.1, 7) == InstanceSetting(TWO, 4, 1, 0.014)
    assert rightsize(settings, 0.025, 7) == InstanceSetting(ONE, 1, 1, 0.010)
    assert rightsize(settings, 0.01, 7) is None
    assert useful(InstanceSetting(WHOLE, 4, 1, 0.013), settings) == 2
    assert useful(InstanceSetting(ONE, 4, 1, 0.030), settings) == 1


def test_leanest_profile_has_the_highest_throughput_per_compute_slice():
    settings = {
        ONE: InstanceSetting(ONE, 4, 1, 0.5),
        THREE: InstanceSetting(THREE, 4, 1, 0.1),
        TWO: InstanceSetting(TWO, 4, 1, 0.25),
    }
    assert leanest(settings).profile == THREE
    assert leanest({ONE: InstanceSetting(ONE, 4, 1, 0.5), TWO: InstanceSetting(TWO, 4, 1, 0.25)}).profile == ONE
