"""How many generated examples a test runs, by Hypothesis profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import HealthCheck, settings

T = TypeVar("T")

#: profile: the most examples of one test. `some` is `make test`, `all` is `make test-all`, `few` is `make test-fast`.
PROFILES = {"few": 50, "some": 300, "all": 1_000_000}
#: number of examples of a test that does not set one
USUAL = 100


def register(repeatable: bool) -> None:
    """Register the profiles and load `some`; `--hypothesis-profile` chooses another.

    No example has a deadline: a slow machine is not a failure.

    Args:
        repeatable: whether every run is to see the same examples.
    """
    for name, max_examples in PROFILES.items():
        settings.register_profile(
            name,
            max_examples=min(USUAL, max_examples),
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=repeatable,
        )
    settings.load_profile("some")


def examples(full: int) -> int:
    """Return how many of `full` examples a test runs under the loaded profile; all under an unknown profile."""
    name = settings.get_current_profile_name().partition("-")[0]  # options of the command line add to the name
    return min(full, PROFILES.get(name, full))


def thinned(cases: Sequence[T], first: int) -> Sequence[T]:
    """Return every third case, from index `first` modulo 3, under `few` and `some`; all cases otherwise.

    A test that runs three times, with a different `first` each time, thus covers every case.
    """
    return cases[first % 3 :: 3] if settings.get_current_profile_name().startswith(("few", "some")) else cases
