"""The planner compared with plain enumeration of all legal layouts."""

from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo, UnknownProfile
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.planning import capacity, choose, plan_free
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.testbed.simdriver import GPU_MODELS
from tests.support.examples import examples
from tests.support.layouts import layouts


class Enumeration:
    """All legal layouts of a GPU as sets of slots, and figures computed by looking at every one."""

    def __init__(self, geometry):
        self.geometry = geometry
        self.layouts = list(layouts(geometry))
        bit = {slot: 1 << i for i, slot in enumerate(sorted(geometry.slots))}
        self.bits = {layout: sum(bit[slot] for slot in layout) for layout in self.layouts}

    @cache  # noqa: B019  (lives as long as the test run)
    def above(self, layout):
        """Every legal layout that contains this one."""
        own = self.bits[layout]
        return [other for other, bits in self.bits.items() if bits & own == own]

    @cache  # noqa: B019
    def prospects(self, layout):
        """The greatest descending list of (memory, compute) slices over everything that can be added."""
        return max(
            sorted(
                ((s.placement.size, self.geometry.info(s.profile).compute_slices) for s in other.minus(layout)),
                reverse=True,
            )
            for other in self.above(layout)
        )

    def capacity(self, layout, profile):
        return max(other.counts()[profile] for other in self.above(layout)) - layout.counts()[profile]


@cache
def enumeration(geometry):
    return Enumeration(geometry)


def synthetic():
    """Two similar profiles: choosing the one with a decoder leaves no decoder for a smaller slice."""
    rows = [
        ("4g.40gb", 4, (0,), 1),
        ("2g.20gb", 2, (0,), 1),
        ("2g.20gb-me", 2, (0,), 0),
        ("1g.10gb+me", 1, (2,), 1),
        ("1g.10gb-me", 1, (2, 3), 0),
    ]
    infos = []
    for i, (name, size, starts, decoders) in enumerate(rows):
        places = tuple(Placement(start, size) for start in starts)
        compute = Profile.parse(name).compute
        infos.append(ProfileInfo(Profile.parse(name), i, compute, size, 1000, 10, 1, decoders, 0, 0, 0, 1, places))
    return Geometry("synthetic", infos)


@pytest.fixture(scope="session", params=[*GPU_MODELS, "synthetic"])
def geometry(request, geometries):
    return synthetic() if request.param == "synthetic" else geometries[request.param]


def used_and_wishes(data, geometry):
    known = enumeration(geometry)
    used = data.draw(st.sampled_from(known.layouts))
    profiles = sorted(info.profile for info in geometry.profiles)
    wishes = data.draw(st.lists(st.sampled_from(profiles), max_size=10))
    return known, used, wishes


@settings(max_examples=40)
@given(data=st.data())
def test_choose_keeps_the_largest_remaining_capacity(geometry, data):
    known, used, _ = used_and_wishes(data, geometry)
    for info in geometry.profiles:
        possible = [slot for slot in info.slots if geometry.fits(used, slot)]
        slot = choose(geometry, used, info.profile)
        assert (slot is None) == (not possible)
        if slot is not None:
            assert slot in possible
            assert known.prospects(used.add(slot)) == max(known.prospects(used.add(other)) for other in possible)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_plan_free_meets_wishes_in_order_and_keeps_the_largest_capacity(geometry, data):
    known, used, wishes = used_and_wishes(data, geometry)
    counts = [(other, other.minus(used).counts()) for other in known.above(used)]
    met = Counter()
    for wish in wishes:
        more = met + Counter([wish])
        if any(not more - count for _, count in counts):
            met = more
    ways = [other for other, count in counts if count == met]
    keep = data.draw(st.sampled_from(ways) | st.sampled_from(known.layouts))
    plan = plan_free(geometry, used, wishes, keep)
    assert plan.counts() == met
    together = used.union(plan)
    geometry.check(together)
    assert not plan.mask & used.mask
    best = max(known.prospects(other) for other in ways)
    assert known.prospects(together) == best
    kept = [len(set(other.minus(used)) & set(keep)) for other in ways if known.prospects(other) == best]
    assert len(set(plan) & set(keep)) == max(kept)


@settings(max_examples=40)
@given(data=st.data())
def test_plan_is_stable_while_nothing_changes(geometry, data):
    _, used, wishes = used_and_wishes(data, geometry)
    plan = plan_free(geometry, used, wishes)
    assert plan_free(geometry, used, wishes, keep=plan) == plan
    other = Layout([])
    for slot in sorted(geometry.slots, key=lambda s: (s.placement, s.profile)):
        if geometry.fits(used.union(other), slot):
            other = other.add(slot)
    kept = plan_free(geometry, used, sorted(other.profiles), keep=other)
    assert kept.counts() == other.counts()


@settings(max_examples=40)
@given(data=st.data())
def test_no_wish_that_was_passed_over_fits_beside_the_offer(geometry, data):
    """The offer is complete: no wish that was passed over fits beside it."""
    _, used, wishes = used_and_wishes(data, geometry)
    plan = plan_free(geometry, used, wishes)
    left = Counter(wishes) - plan.counts()
    for profile in left:
        assert choose(geometry, used.union(plan), profile) is None


@settings(max_examples=30)
@given(data=st.data())
def test_capacity_is_the_largest_number_that_can_be_added(geometry, data):
    known, used, _ = used_and_wishes(data, geometry)
    for info in geometry.profiles:
        assert capacity(geometry, used, info.profile) == known.capacity(used, info.profile)


@pytest.mark.parametrize(
    ("kind", "used", "profile", "where"),
    [
        ("a100-40gb", [], "1g.5gb", "1g.5gb@6:1"),
        ("a100-40gb", [], "2g.10gb", "2g.10gb@4:2"),
        ("a100-40gb", [], "3g.20gb", "3g.20gb@4:4"),  # 0:4 is the only place for a 4g
        ("a100-40gb", ["1g.5gb@6:1"], "1g.5gb", "1g.5gb@5:1"),
        ("a100-40gb", ["7g.40gb@0:8"], "1g.5gb", None),
        ("rtx-pro-6000", ["1g.24gb@9:3"], "1g.24gb", "1g.24gb@6:3"),
    ],
)
def test_choose_takes_the_expected_placement(geometries, kind, used, profile, where):
    held = Layout(Slot.of(p, *map(int, at.split(":"))) for p, at in (slot.split("@") for slot in used))
    slot = choose(geometries[kind], held, Profile.parse(profile))
    assert (str(slot) if slot else None) == where


def test_wish_that_does_not_fit_does_not_block_the_next(geometries):
    geometry = geometries["h100-80gb"]
    used = Layout([Slot.of("1g.10gb", 6, 1)])
    wishes = [Profile.parse(name) for name in ("7g.80gb", "2g.20gb", "9g.99gb", "4g.40gb", "3g.40gb")]
    assert [p.name for p in plan_free(geometry, used, wishes).profiles] == ["2g.20gb", "4g.40gb"]


def test_long_wish_lists_are_planned_and_results_are_cached(geometries):
    geometry = geometries["h100-80gb"]
    wishes = [Profile.parse("1g.10gb")] * 5000 + [Profile.parse("3g.40gb")] * 5000
    plan = plan_free(geometry, EMPTY, wishes)
    assert plan.counts() == {Profile.parse("1g.10gb"): 7}
    assert plan_free(geometry, Layout(), wishes[1000:]) is plan


def test_unknown_profile_is_an_error_except_as_a_wish(geometries):
    geometry, odd = geometries["a30"], Profile.parse("1g.5gb")
    with pytest.raises(UnknownProfile):
        choose(geometry, EMPTY, odd)
    with pytest.raises(UnknownProfile):
        capacity(geometry, EMPTY, odd)
    with pytest.raises(UnknownProfile):
        plan_free(geometry, Layout([Slot.of("1g.5gb", 0, 1)]), [])
    assert plan_free(geometry, EMPTY, [odd]) == EMPTY
