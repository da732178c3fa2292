import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.naming import computed_profile
from slurm_migbatch.mig.profile import SUFFIXES, Profile, ProfileError

profiles = st.builds(Profile, st.integers(1, 99), st.integers(0, 9999), st.sampled_from(SUFFIXES))


@given(profiles)
def test_both_spellings_name_the_same_profile(profile):
    assert Profile.parse(profile.name) == profile
    assert Profile.parse(profile.gres_type) == profile
    assert Profile.parse(f"MIG {profile.name}") == profile
    assert "+" not in profile.gres_type


@given(st.lists(profiles, unique=True))
def test_distinct_profiles_have_distinct_names_and_gres_types(listed):
    assert len({p.name for p in listed}) == len({p.gres_type for p in listed}) == len(listed)


@given(st.text(max_size=60))
def test_any_text_is_a_profile_or_refused_with_advice(text):
    try:
        profile = Profile.parse(text)
    except ProfileError as error:
        assert "for example" in str(error)
        assert len(str(error)) < 600  # 40 characters of the text, each up to ten long when escaped
        str(error).encode("ascii")
    else:
        assert Profile.parse(profile.name) == profile


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("1g", "read by Slurm as a count"),
        ("10gb", "for example"),
        ("1c.3g.40gb", "request the whole instance: 3g.40gb"),
        ("none", "for example"),
        ("1g.10gb+turbo", "for example"),
        ("0g.10gb", "for example"),
        ("01g.10gb", "for example"),
        ("1g.10gb\n2g.20gb", "for example"),
        ("1g.10gb.me.", "for example"),
        ("\u0661g.10gb", "for example"),
        ("x" * 10_000, "for example"),
    ],
)
def test_refusal_of_a_profile_name_gives_advice(text, word):
    with pytest.raises(ProfileError, match=word):
        Profile.parse(text)


def test_profiles_are_ordered_by_compute_then_memory_then_suffix():
    names = ["1g.10gb", "1g.10gb+me", "1g.10gb-me", "1g.20gb", "2g.20gb", "7g.80gb"]
    assert [p.name for p in sorted(Profile.parse(n) for n in reversed(names))] == names


@pytest.mark.parametrize(
    ("enum", "slices", "memory_mib", "total_mib", "name"),
    [
        (0, 1, 9984, 81559, "1g.10gb"),
        (7, 1, 9984, 81559, "1g.10gb+me"),
        (2, 3, 71168, 143771, "3g.71gb"),  # half a GB rounds up
        (2, 3, 71424, 143771, "3g.71gb"),  # as newer drivers report it
        (9, 1, 33280, 143771, "1g.35gb"),
        (4, 7, 143360, 143771, "7g.141gb"),
        (0, 1, 16384, 143771, "1g.18gb"),
        (0xD, 1, 24192, 97887, "1g.24gb-me"),
        (0x10, 2, 48512, 97887, "2g.48gb+me.all"),
        (0xC, 4, 97408, 97887, "4g.96gb+gfx"),
    ],
)
def test_profile_name_is_computed_as_nvidia_tools_do(enum, slices, memory_mib, total_mib, name):
    assert computed_profile(enum, slices, memory_mib, total_mib << 20).name == name
