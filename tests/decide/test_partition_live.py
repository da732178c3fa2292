"""The best profiles to offer free space as, by history and queue."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.decide.paris_elsa.assignment import WorkClass
from slurm_migbatch.decide.paris_elsa.partition import Cut, flow, partition, ways
from slurm_migbatch.decide.paris_elsa.preference import MOST_TYPES, Class, preference
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.planning import is_searchable, plan_free
from slurm_migbatch.mig.profile import Profile
from tests.support.dispatch_site import A30, H100, P

KINDS = ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.6gb", "2g.12gb", "4g.24gb")


def filled(order: tuple[Profile, ...]) -> Counter[str]:
    return Counter({p.name: n for p, n in plan_free(H100, EMPTY, order * 7).counts().items()})


def test_one_kind_of_work_fills_gpus_with_its_slices() -> None:
    assert filled(preference({H100: 4}, [Class(10, 60, P("1g.10gb"))])) == {"1g.10gb": 7}
    assert filled(preference({H100: 4}, [Class(10, 60, P("3g.40gb"))])) == {"3g.40gb": 2}


def test_preference_for_mixed_work_follows_the_load_not_the_number_of_jobs() -> None:
    many_short = [Class(100, 1, P("1g.10gb")), Class(10, 100, P("3g.40gb"))]
    assert filled(preference({H100: 4}, many_short))["3g.40gb"] >= 1
    few_long = [Class(100, 100, P("1g.10gb")), Class(1, 100, P("3g.40gb"))]
    assert filled(preference({H100: 4}, few_long))["1g.10gb"] >= 4


def test_preference_has_only_profiles_that_the_gpu_models_have() -> None:
    work = [Class(5, 10, P("1g.6gb")), Class(5, 10, P("2g.20gb"))]
    assert {p.name for p in preference({A30: 2}, work)} == {"1g.6gb"}
    assert {p.name for p in preference({A30: 2, H100: 2}, work)} == {"1g.6gb", "2g.20gb"}


def test_gpu_with_a_profile_without_placement_does_not_affect_other_gpus() -> None:
    """Root of a node may report such a GPU."""
    infos = [info._replace(compute_slices=8) if info.profile == P("1g.10gb") else info for info in H100.profiles]
    odd, work = Geometry("odd", infos), [Class(10, 60, P("1g.10gb"))]
    assert preference({odd: 1, H100: 4}, work) == preference({H100: 4}, work) != ()
    assert preference({odd: 1}, work) == ()


def test_there_is_no_preference_without_gpus_or_work() -> None:
    assert preference({}, [Class(1, 1, P("1g.10gb"))]) == ()
    assert preference({H100: 2}, []) == preference({H100: 0}, [Class(1, 1, P("1g.10gb"))]) == ()
    assert preference({H100: 2}, [Class(0, 1, P("1g.10gb")), Class(1, 0, P("1g.10gb"))]) == ()


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(
        st.builds(Class, st.floats(0.01, 1e4), st.floats(0.01, 1e6), st.sampled_from([P(kind) for kind in KINDS])),
        max_size=8,
    )
)
def test_preference_has_only_requested_profiles_and_one_for_each_gpu_model(classes: list[Class]) -> None:
    order = preference({H100: 2, A30: 1}, classes)
    assert set(order) <= {work_class.profile for work_class in classes}
    for gpu in (H100, A30):
        asked = {work_class.profile for work_class in classes if work_class.profile in gpu}
        assert bool(asked) == bool([p for p in order if p in gpu])


def crowded(places: int) -> Geometry:
    """A GPU that does not exist but that a node may report: six profiles of one slice, at the same places."""
    whole = H100.full._replace(profile=P("64g.999gb"), compute_slices=64, memory_slices=places, max_instances=1)
    few = [
        whole._replace(
            profile=P(f"{k}g.{10 * k}gb"),
            compute_slices=k,
            memory_slices=1,
            max_instances=64,
            decoders=0,
            jpegs=0,
            ofas=0,
            placements=tuple(Placement(start, 1) for start in range(places)),
        )
        for k in range(1, 7)
    ]
    return Geometry(f"crowded{places}", [*few, whole._replace(placements=(Placement(0, places),))])


def works_on(geometry: Geometry) -> list[Class]:
    kinds = [info.profile for info in geometry.profiles if info.memory_slices == 1]
    return [Class(10.0 + kind.compute, 100.0 * kind.compute**2, kind) for kind in kinds]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of GPUs whose partitionings are searched."""
    names: list[str] = []

    def search(geometry: Geometry, *given: Any, **more: Any) -> Cut:
        names.append(geometry.name)
        return partition(geometry, *given, **more)

    monkeypatch.setattr("slurm_migbatch.decide.paris_elsa.preference.partition", search)
    return names


@pytest.mark.parametrize("places", [4, 6])
def test_gpu_with_too_many_partitionings_is_offered_by_load_without_search(searched: list[str], places: int) -> None:
    """A broken node may report one; the search would take as long as it is allowed."""
    odd = crowded(places)
    assert is_searchable(odd), "so the node's report is accepted"
    order = preference({odd: 8}, works_on(odd))
    assert not searched
    assert order[0] == P("6g.60gb") and {p.compute for p in order} >= {3, 4, 5, 6}


def test_only_the_gpu_models_with_the_most_gpus_are_searched(searched: list[str]) -> None:
    """One node may report up to 16."""
    odd = {named(A30, f"odd{n}"): 4 for n in range(16)}
    work = [Class(10, 60, P("1g.6gb")), Class(10, 60, P("2g.12gb")), Class(10, 60, P("3g.40gb"))]
    order = preference({**odd, H100: 8}, work)
    assert len(searched) == MOST_TYPES and H100.name in searched
    assert preference({H100: 8}, work) == tuple(p for p in order if p in H100)


def test_integer_program_stops_at_its_node_limit() -> None:
    odd = crowded(4)
    works = [WorkClass(c.count, 2 * c.seconds, (c.seconds,) * 6, n) for n, c in enumerate(works_on(odd))]
    possible = ways(odd, sorted(c.profile for c in works_on(odd)))
    found = flow(works, possible, 8, whole=True, node_limit=1)
    assert sum(found.ways) <= 8 and found.rate <= flow(works, possible, 8, whole=False).rate * (1 + 1e-6)


def named(geometry: Geometry, name: str) -> Geometry:
    return Geometry(name, geometry.profiles)
