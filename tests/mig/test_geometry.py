import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.geometry import Geometry, GeometryError, ProfileInfo, UnknownProfile
from slurm_migbatch.mig.layout import EMPTY, Layout, LayoutError, Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile
from tests.support.layouts import layouts


def layout_of(*slots: str) -> Layout:
    """`layout_of("2g.20gb@0:2", ...)`."""
    made = []
    for slot in slots:
        profile, _, place = slot.partition("@")
        made.append(Slot(Profile.parse(profile), Placement(*map(int, place.split(":")))))
    return Layout(made)


def legal(geometry: Geometry, layout: Layout) -> bool:
    try:
        geometry.check(layout)
    except LayoutError:
        return False
    return True


def test_every_subset_of_a_legal_layout_is_legal(geometry):
    for layout in layouts(geometry):
        for slot in layout:
            smaller = layout.remove(slot)
            assert legal(geometry, smaller)
            assert geometry.fits(smaller, slot)


def test_fits_check_and_why_not_agree(geometry):
    some = list(layouts(geometry))[::7]
    for layout in some:
        for slot in geometry.slots:
            fits = geometry.fits(layout, slot)
            assert fits == (geometry.why_not(layout, slot) == "")
            if layout.free_of(slot.placement):
                assert fits == legal(geometry, layout.add(slot))
            else:
                assert not fits


def test_profiles_are_ordered_and_consistent(geometry):
    assert geometry.full is geometry.profiles[0]
    assert geometry.full.profile.suffix == ""
    assert geometry.full.placements == (Placement(0, geometry.memory_slices),)
    for info in geometry.profiles:
        assert geometry.info(info.profile) is info
        assert info.profile in geometry
        assert info.compute_slices == info.profile.compute
        assert {p.size for p in info.placements} == {info.memory_slices}
        assert all(p.end <= geometry.memory_slices for p in info.placements)
        assert info.compute_slices <= geometry.compute_slices
        # as many as the driver says can exist together
        most = max(layout.counts()[info.profile] for layout in layouts(geometry))
        assert most == info.max_instances


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        ("a100-40gb", ["4g.20gb@0:4", "3g.20gb@4:4"]),
        ("a100-40gb", ["3g.20gb@0:4", "3g.20gb@4:4"]),
        ("a100-40gb", [f"1g.5gb@{i}:1" for i in range(7)]),
        ("a100-40gb", ["1g.5gb+me@0:1"] + [f"1g.5gb@{i}:1" for i in range(1, 7)]),
        ("h100-80gb", [f"1g.20gb@{i}:2" for i in (0, 2, 4, 6)]),
        ("h100-80gb", ["2g.20gb@0:2", "2g.20gb@2:2", "2g.20gb@4:2", "1g.10gb@6:1"]),
        ("a30", ["2g.12gb+me@0:2", "1g.6gb@2:1", "1g.6gb@3:1"]),
        ("rtx-pro-6000", ["1g.24gb+me.all@0:3", "1g.24gb-me@3:3", "2g.48gb-me@6:6"]),
        ("rtx-pro-6000", ["1g.24gb+gfx@0:3", "1g.24gb@3:3", "2g.48gb+gfx@6:6"]),
    ],
)
def test_layouts_known_from_real_gpus_are_legal(geometries, kind, together):
    geometries[kind].check(layout_of(*together))


@pytest.mark.parametrize(
    ("kind", "held", "slot", "reason"),
    [
        ("a100-40gb", ["3g.20gb@0:4", "3g.20gb@4:4"], "1g.5gb@0:1", "overlaps"),
        ("a100-40gb", ["4g.20gb@0:4", "2g.10gb@4:2", "1g.5gb@6:1"], "1g.5gb@7:1", "only at 0:1"),
        ("a100-40gb", ["4g.20gb@0:4"], "4g.20gb@4:4", "only at 0:4"),
        ("a100-40gb", ["1g.5gb+me@0:1"], "1g.5gb+me@1:1", "at most 1 of"),
        ("a100-40gb", ["4g.20gb@0:4", "2g.10gb@4:2"], "1g.10gb@6:2", ""),
        ("h100-80gb", ["4g.40gb@0:4", "1g.20gb@4:2"], "2g.20gb@6:2", "only at 0:2, 2:2, 4:2"),
        ("h100-80gb", ["2g.20gb@0:2", "2g.20gb@2:2", "1g.10gb@4:1", "1g.10gb@5:1"], "1g.10gb@6:1", ""),
        ("a30", ["1g.6gb+me@0:1"], "2g.12gb+me@2:2", "take 2"),
        ("rtx-pro-6000", ["1g.24gb+me.all@0:3"], "1g.24gb@3:3", "take 5"),
        ("rtx-pro-6000", ["1g.24gb+me.all@0:3"], "1g.24gb+gfx@3:3", "take 5"),
        ("rtx-pro-6000", ["4g.96gb@0:12"], "1g.24gb-me@3:3", "overlaps"),
        ("a100-40gb", [], "1g.6gb@0:1", "Its profiles: 7g.40gb"),
    ],
)
def test_refusal_reason_names_the_limit(geometries, kind, held, slot, reason):
    geometry, layout = geometries[kind], layout_of(*held)
    geometry.check(layout)
    (wanted,) = layout_of(slot)
    why = geometry.why_not(layout, wanted)
    assert reason in why if reason else why == ""
    assert geometry.fits(layout, wanted) == (why == "")


def synthetic(name, *rows):
    infos = []
    for i, (profile, size, starts, limit, engines) in enumerate(rows):
        parsed = Profile.parse(profile)
        infos.append(
            ProfileInfo(
                parsed,
                i,
                parsed.compute,
                size,
                1000 * size,
                10,
                1,
                *engines,
                limit,
                tuple(Placement(s, size) for s in starts),
            )
        )
    return Geometry(name, infos)


def test_shared_media_engines_do_not_limit_the_layout():
    """For some GPUs, guides list one decoder for each profile, the full one included; seven 1g still fit."""
    geometry = synthetic(
        "shared",
        ("1g.10gb", 1, range(7), 7, (1, 0, 1, 0)),
        ("3g.40gb", 4, (0, 4), 2, (1, 0, 1, 0)),
        ("7g.80gb", 8, (0,), 1, (1, 0, 1, 1)),
    )
    geometry.check(layout_of(*[f"1g.10gb@{i}:1" for i in range(7)]))


def test_me_all_profile_is_legal_only_with_profiles_without_engines():
    geometry = synthetic(
        "uncounted",
        ("1g.10gb", 1, range(4), 4, (0, 0, 0, 0)),
        ("1g.10gb-me", 1, range(4), 4, (0, 0, 0, 0)),
        ("1g.10gb+me.all", 1, range(4), 1, (0, 0, 0, 0)),
        ("4g.40gb", 4, (0,), 1, (0, 0, 0, 0)),
    )
    everything = layout_of("1g.10gb+me.all@0:1")
    assert geometry.fits(everything, Slot.of("1g.10gb-me", 1, 1))
    assert "only -me" in geometry.why_not(everything, Slot.of("1g.10gb", 1, 1))
    assert not geometry.fits(layout_of("1g.10gb@1:1"), Slot.of("1g.10gb+me.all", 0, 1))


def test_unknown_profile_error_lists_profiles_and_the_closest(geometries):
    geometry = geometries["a100-80gb"]
    with pytest.raises(UnknownProfile) as raised:
        geometry.info(Profile.parse("3g.39gb"))
    assert "the closest is 3g.40gb" in str(raised.value)
    assert "7g.80gb, 4g.40gb, 3g.40gb, 2g.20gb, 1g.20gb, 1g.10gb, 1g.10gb+me" in str(raised.value)
    assert isinstance(raised.value, KeyError)


@pytest.mark.parametrize(
    ("kind", "written", "meant"),
    [
        ("a100-80gb", "3g.39gb", "3g.40gb"),
        ("a100-80gb", "7g.79gb", "7g.80gb"),
        ("a100-80gb", "1g.9gb+me", "1g.10gb+me"),
        ("a100-40gb", "1g.4gb", "1g.5gb"),
        ("h200", "1g.17gb", "1g.18gb"),
        ("a100-80gb", "3g.40gb", None),
        ("a100-80gb", "3g.30gb", None),
        ("h200", "1g.15gb", None),
        ("a100-80gb", "5g.40gb", None),
    ],
)
def test_autodetects_name_of_a_slice_means_the_drivers(geometries, kind, written, meant):
    own = geometries[kind].other_names.get(Profile.parse(written))
    assert (own.name if own else None) == meant


@pytest.mark.parametrize(
    ("kind", "asked", "suggested"),
    [
        ("a100-80gb", "3g.39gb", "3g.40gb"),
        ("a100-80gb", "7g.79gb", "7g.80gb"),
        ("a100-80gb", "1g.5gb", "1g.10gb"),
        ("a100-80gb", "1g.5gb+me", "1g.10gb+me"),
        ("a100-80gb", "2g.10gb", "2g.20gb"),
        ("a100-80gb", "2g.30gb", "3g.40gb"),
        ("a100-80gb", "7g.141gb", "7g.80gb"),
        ("h200", "1g.20gb", "1g.18gb"),
        ("rtx-pro-6000", "1g.23gb+me.all", "1g.24gb+me.all"),
        ("a100-80gb", "3g.40gb", None),
    ],
)
def test_closest_profile_is_suggested(geometries, kind, asked, suggested):
    near = geometries[kind].closest(Profile.parse(asked))
    assert (near.name if near else None) == suggested


@given(st.builds(Profile, st.integers(1, 9), st.integers(0, 300), st.sampled_from(["", "+me", "-me"])))
def test_suggested_profile_exists_on_the_gpu(geometry, profile):
    near = geometry.closest(profile)
    assert (near is None) == (profile in geometry)
    assert near is None or near in geometry


def test_geometry_round_trips_through_json_and_pickle(geometry):
    again = Geometry.from_dict(json.loads(json.dumps(geometry.to_dict())))
    assert again == geometry and hash(again) == hash(geometry)
    assert Geometry.from_dict(geometry.to_dict()) is Geometry.from_dict(again.to_dict())
    assert pickle.loads(pickle.dumps(geometry)) == geometry
    assert set(layouts(again)) == set(layouts(geometry))


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(version=2),
        lambda d: d.update(name=None),
        lambda d: d.update(profiles=[]),
        lambda d: d.update(profiles={}),
        lambda d: d["profiles"].append(d["profiles"][0]),
        lambda d: d["profiles"][0].update(profile="7g"),
        lambda d: d["profiles"][0].update(sm_count="many"),
        lambda d: d["profiles"][0].update(sm_count=-1),
        lambda d: d["profiles"][0].update(max_instances=True),
        lambda d: d["profiles"][0].update(placements=[[0]]),
        lambda d: d["profiles"][0].update(placements=[[0, "8"]]),
        lambda d: d["profiles"][0].pop("ofas"),
        lambda d: d["profiles"].append(None),
    ],
)
def test_damaged_geometries_are_refused(geometries, damage):
    data = json.loads(json.dumps(geometries["a30"].to_dict()))
    damage(data)
    with pytest.raises(GeometryError):
        Geometry.from_dict(data)


def test_geometry_is_an_immutable_value(geometries):
    with pytest.raises(AttributeError):
        geometries["a30"].name = "x"
    assert geometries["a30"] != geometries["h200"]
    assert EMPTY not in (geometries["a30"],)
