"""GRMU's rules: baskets, defragmentation and consolidation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.lab.papers.grmu import Grmu
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.mig.layout import EMPTY
from slurm_migbatch.mig.profile import Profile

A100 = geometry("a100-80gb")
ONE, TWO, THREE, WHOLE = (Profile.parse(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"))


def placed(grmu: Grmu, *profiles: Profile) -> list[Callable[[], None]]:
    found = [grmu.place(profile) for profile in profiles]
    assert None not in found
    return [give_back for give_back in found if give_back is not None]


def test_each_basket_keeps_to_its_quota() -> None:
    grmu = Grmu(A100, 3, 1)
    first, *_ = placed(grmu, WHOLE, THREE, THREE, THREE, THREE)
    assert grmu.place(WHOLE) is None
    first()
    assert grmu.place(THREE) is None
    placed(grmu, WHOLE)
    assert Grmu(A100, 1, 0).place(WHOLE) is None
    assert Grmu(A100, 1, 1).place(ONE) is None


def test_slices_are_defragmented_for_a_profile_that_fits_on_no_gpu() -> None:
    grmu = Grmu(A100, 1, 0)
    give_back = placed(grmu, *(ONE for _ in range(7)))
    for number in (0, 2, 3, 4, 6):
        give_back[number]()
    placed(grmu, THREE, TWO)
    (layout,) = grmu.layouts()
    assert Counter(layout.profiles) == Counter([ONE, ONE, THREE, TWO])


def test_two_gpus_are_consolidated_to_free_a_whole_gpu() -> None:
    grmu = Grmu(A100, 2, 1)
    placed(grmu, THREE)
    grmu.quota = 0
    give_back = placed(grmu, THREE, THREE)
    give_back[0]()
    grmu.quota = 1
    placed(grmu, WHOLE)
    assert sorted(Counter(layout.profiles).total() for layout in grmu.layouts()) == [1, 2]


PROFILES = st.sampled_from([info.profile for info in A100.profiles if not info.profile.suffix])


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.tuples(PROFILES, st.integers(0, 30)), max_size=40))
def test_layouts_stay_valid_and_within_quota_for_any_jobs(
    count: int, quota: int, jobs: list[tuple[Profile, int]]
) -> None:
    grmu = Grmu(A100, count, min(quota, count))
    running: list[tuple[int, Profile, Callable[[], None]]] = []
    for now, (profile, length) in enumerate(jobs):
        for entry in [entry for entry in running if entry[0] <= now]:
            running.remove(entry)
            entry[2]()
        give_back = grmu.place(profile)
        if give_back is not None:
            running.append((now + length, profile, give_back))
        layouts = grmu.layouts()
        assert sum((Counter(layout.profiles) for layout in layouts), Counter()) == Counter(p for _, p, _ in running)
        for layout in layouts:
            assert A100.admits(layout.profiles)
            assert all(slot.placement in A100.info(slot.profile).placements for slot in layout.slots)
        assert sum(WHOLE in layout.profiles for layout in layouts) <= grmu.quota
    for *_, give_back in running:
        give_back()
    assert grmu.layouts() == [EMPTY] * count
