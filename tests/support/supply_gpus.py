"""Geometries, short spellings and generated layouts for the supply tests."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from slurm_migbatch.mig.geometry import Geometry, ProfileInfo
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile


def _info(name: str, number: int, compute: int, memory: int, limit: int, starts: range, ofas: int = 0) -> ProfileInfo:
    return ProfileInfo(
        profile=Profile.parse(name),
        profile_id=number,
        compute_slices=compute,
        memory_slices=memory,
        memory_mib=memory * 10000,
        sm_count=compute * 16,
        copy_engines=compute,
        decoders=compute,
        encoders=0,
        jpegs=compute,
        ofas=ofas,
        max_instances=limit,
        placements=tuple(Placement(start, memory) for start in starts),
    )


H100 = Geometry(
    "NVIDIA H100 80GB HBM3",
    [
        _info("1g.10gb", 19, 1, 1, 7, range(7)),
        _info("1g.10gb+me", 20, 1, 1, 1, range(7), ofas=1),
        _info("1g.20gb", 15, 1, 2, 4, range(0, 8, 2)),
        _info("2g.20gb", 14, 2, 2, 3, range(0, 6, 2)),
        _info("3g.40gb", 9, 3, 4, 2, range(0, 8, 4)),
        _info("4g.40gb", 5, 4, 4, 1, range(1)),
        _info("7g.80gb", 0, 7, 8, 1, range(1), ofas=1),
    ],
)

A30 = Geometry(
    "NVIDIA A30",
    [
        _info("1g.6gb", 14, 1, 1, 4, range(4)),
        _info("1g.6gb+me", 21, 1, 1, 1, range(4), ofas=1),
        _info("2g.12gb", 5, 2, 2, 2, range(0, 4, 2)),
        _info("4g.24gb", 0, 4, 4, 1, range(1), ofas=1),
    ],
)

P = Profile.parse


def slot(text: str) -> Slot:
    """Parse a slot such as `2g.20gb@4` on an H100 or A30."""
    name, _, start = text.partition("@")
    profile = P(name)
    geometry = H100 if profile in H100 else A30
    return Slot(profile, Placement(int(start), geometry.info(profile).memory_slices))


def layout(text: str = "") -> Layout:
    """Parse a layout such as `2g.20gb@4 1g.10gb@0`."""
    return Layout(slot(word) for word in text.split())


@cache
def up_to(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most)


@st.composite
def layouts(draw: st.DrawFn, start: Layout = EMPTY, most: int = 5) -> Layout:
    """Generate slots that an H100 with the slots of `start` can have in addition."""
    found = start
    for _ in range(draw(up_to(0, most))):
        fits = [s for s in sorted(H100.slots) if H100.fits(found, s)]
        if not fits:
            break
        found = found.add(fits[draw(up_to(0, len(fits) - 1))])
    return found.minus(start)
