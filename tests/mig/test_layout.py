import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.layout import EMPTY, Layout, LayoutError, Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile
from tests.support.layouts import layouts


@st.composite
def compatible(draw, count=2):
    """Layouts that are subsets of one layout, so that their union exists; placements need not be those of any GPU."""
    edges = sorted(draw(st.sets(st.integers(0, 12), min_size=2, max_size=8)))
    profiles = st.builds(Profile, st.integers(1, 3), st.sampled_from([10, 20]), st.sampled_from(["", "+me"]))
    slots = [Slot(draw(profiles), Placement(a, b - a)) for a, b in pairwise(edges)]
    return [Layout(draw(st.lists(st.sampled_from(slots)))) for _ in range(count)]


@given(compatible(3))
def test_union_of_layouts_is_the_set_union(abc):
    a, b, c = abc
    assert a.union(b) == b.union(a)
    assert a.union(b).union(c) == a.union(b.union(c))
    assert a.union(a) == a == a.union(EMPTY)
    assert set(a.union(b).slots) == set(a.slots) | set(b.slots)


@given(compatible(2))
def test_difference_of_layouts_is_the_set_difference(ab):
    a, b = ab
    assert a.union(b).minus(b) == a.minus(b)
    assert a.minus(a) == EMPTY
    assert (a.union(b) == b) == (a.minus(b) == EMPTY) == (set(a.slots) <= set(b.slots))
    assert set(a.minus(b).slots) == set(a.slots) - set(b.slots)


@given(compatible(2), st.integers(0, 2**12 - 1))
def test_partial_layouts_equal_layouts_built_from_their_slots(ab, mask):
    a, b = ab
    for part in (a.minus(b), a.clear_of(mask)):
        again = Layout(part.slots)
        assert (part, hash(part), part.mask) == (again, hash(again), again.mask)
    assert set(a.clear_of(mask).slots) == {slot for slot in a.slots if not slot.placement.mask & mask}


@given(compatible(1))
def test_slots_are_added_and_removed_one_by_one(drawn):
    layout = EMPTY
    for slot in drawn[0].slots:
        assert layout.free_of(slot.placement)
        grown = layout.add(slot)
        assert slot in grown
        assert grown.remove(slot) == layout
        assert grown.add(slot) is grown
        layout = grown
    assert layout == drawn[0]
    assert sum(layout.counts().values()) == len(layout) == len(layout.profiles)


@given(compatible(1), st.randoms())
def test_equality_and_hash_do_not_depend_on_the_order(drawn, random):
    slots = list(drawn[0].slots)
    random.shuffle(slots)
    again = Layout([*slots, *slots[:2]])
    assert again == drawn[0] and hash(again) == hash(drawn[0])
    assert list(again) == sorted(again)


@given(compatible(1))
def test_layout_round_trips_through_pickle(drawn):
    assert pickle.loads(pickle.dumps(drawn[0])) == drawn[0]


def test_overlapping_slots_are_refused_by_name():
    one, two = Slot.of("2g.20gb", 0, 2), Slot.of("1g.10gb", 1, 1)
    with pytest.raises(
        LayoutError, match=r"1g\.10gb@1:1 and 2g\.20gb@0:2 overlap|2g\.20gb@0:2 and 1g\.10gb@1:1 overlap"
    ):
        Layout([one, two])
    with pytest.raises(LayoutError):
        Layout([one]).add(two)
    with pytest.raises(LayoutError):
        Layout([one]).union(Layout([two]))
    with pytest.raises(LayoutError, match="is not in the layout"):
        Layout([one]).remove(two)


def test_layout_is_an_immutable_value():
    with pytest.raises(AttributeError):
        EMPTY.slots = ()
    assert str(EMPTY) == "(empty)"
    assert str(Layout([Slot.of("2g.20gb", 4, 2), Slot.of("3g.40gb", 0, 4)])) == "3g.40gb@0:4 2g.20gb@4:2"


placements = st.builds(Placement, st.integers(0, 11), st.integers(1, 12))


@given(placements, placements)
def test_placements_overlap_when_their_slice_sets_intersect(a, b):
    sa, sb = set(range(a.start, a.end)), set(range(b.start, b.end))
    assert a.overlaps(b) == b.overlaps(a) == bool(sa & sb) == bool(a.mask & b.mask)
    assert str(a) == f"{a.start}:{a.size}"


def test_every_layout_of_every_gpu_is_legal_and_listed_once(geometry):
    listed = list(layouts(geometry))
    assert listed[0] == EMPTY
    assert len(set(listed)) == len(listed)
    for layout in listed:
        geometry.check(layout)
        assert len(layout) <= geometry.max_slots
    assert max(len(layout) for layout in listed) == geometry.max_slots
    assert {slot for layout in listed for slot in layout} == set(geometry.slots)
