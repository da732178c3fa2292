"""Times that the submit service reports about itself."""

from __future__ import annotations

from slurm_migbatch.submit.service import Statistics


def test_quantile_of_handling_times_is_the_least_time_that_covers_the_share() -> None:
    statistics = Statistics()
    assert statistics.quantile(0.5) == 0.0
    for seconds in range(100, 0, -1):
        statistics.note("granted", float(seconds))
    assert [statistics.quantile(share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
