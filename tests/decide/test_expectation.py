"""Expected demand of inference: all profiles together need less than the sum of each one alone."""

from slurm_migbatch.decide.lending.forecast import MOST_PROFILES, Expectation
from slurm_migbatch.mig.profile import Profile

ONE, THREE = Profile.parse("1g.10gb"), Profile.parse("3g.40gb")
HOUR = 3600.0


def alternating(end: float) -> list[tuple[str, float, float | None]]:
    """Three 1g in the first half of every 100 s, one 3g in the second."""
    uses: list[tuple[str, float, float | None]] = []
    at = 0.0
    while at < end:
        uses += [("1g.10gb", at, at + 50.0)] * 3 + [("3g.40gb", at + 50.0, at + 100.0)]
        at += 100.0
    return uses


def test_every_profile_has_a_reserve_of_its_own() -> None:
    expected = Expectation()
    expected.learn(alternating(HOUR), HOUR)
    expected.update({}, {}, HOUR, gpus=4)
    assert expected.reserve(HOUR + 10, 60, 0.5) == {THREE: 1}, "no 1g was idle for as long as now"
    expected.update({ONE: frozenset({(1, 0), (2, 0), (3, 0)})}, {}, HOUR + 10, gpus=4)
    expected.update({THREE: frozenset({(4, 0)})}, {}, HOUR + 50, gpus=4)
    expected.update({}, {}, HOUR + 60, gpus=4)
    assert expected.reserve(HOUR + 61, 60, 0.5) == {ONE: 3, THREE: 1}


def test_profiles_invented_by_a_node_do_not_displace_other_reserves() -> None:
    invented = [(f"9g.{number}gb", 0.0, 10.0) for number in range(1, 9 * MOST_PROFILES)]
    honest, expected = Expectation(), Expectation()
    honest.learn(alternating(HOUR), HOUR)
    expected.learn([*invented, *alternating(HOUR)], HOUR)
    for expectation in (honest, expected):
        expectation.update({}, {}, HOUR, gpus=4)
    assert expected.reserve(HOUR + 10, 60, 0.5) == honest.reserve(HOUR + 10, 60, 0.5) != {}
    assert len(expected._gaps) == MOST_PROFILES


def test_reserve_grows_with_the_required_confidence() -> None:
    expected = Expectation()
    expected.learn([("1g.10gb", at, at + 20.0) for at in range(0, 3600, 300)], HOUR)
    expected.update({ONE: frozenset({(1, 0)})}, {}, HOUR, gpus=4)
    expected.update({}, {}, HOUR + 20, gpus=4)
    assert expected.reserve(HOUR + 60, 60, 0.5) == {}
    assert expected.reserve(HOUR + 60, 60, 0.95) == {ONE: 1}


def test_slices_in_use_or_demanded_by_pending_jobs_are_not_reserved_again() -> None:
    expected = Expectation()
    expected.learn([("1g.10gb", at, at + 20.0) for at in range(0, 3600, 300)], HOUR)
    expected.update({ONE: frozenset({(1, 0)})}, {}, HOUR, gpus=4)
    assert expected.reserve(HOUR + 60, 60, 0.95) == {}
    expected.update({}, {ONE: 1}, HOUR + 61, gpus=4)
    assert expected.reserve(HOUR + 120, 60, 0.95) == {}


def test_recorded_uses_without_profile_or_end_add_no_reserve() -> None:
    expected = Expectation()
    expected.learn([("gpu", 0.0, 5.0), ("1g.10gb", 10.0, None), ("1g.10gb", 50.0, 20.0)], 100.0)
    expected.update({ONE: frozenset({(1, 0)})}, {}, 100.0, gpus=4)
    assert expected.reserve(200.0, 60, 0.5) == {}


def test_tasks_beyond_the_slices_of_all_gpus_are_not_counted() -> None:
    expected = Expectation()
    expected.update({}, {}, HOUR, gpus=4)
    expected.update({}, {ONE: 1 << 60}, HOUR + 10, gpus=4)
    expected.update({}, {ONE: 1 << 60}, HOUR + 15, gpus=3)
    expected.update({}, {}, HOUR + 20, gpus=3)
    reserve = expected.reserve(HOUR + 21, 60, 0.5)
    assert 4 * 7 <= reserve[ONE] < 100
