"""Represent a MIG profile: compute slices, GB, and suffix.

Names follow the MIG user guide: `3g.40gb` is three compute slices and nominally 40 GB. Suffixes: `+me` has at least one
media engine, `+me.all` has all of them, `-me` has none, `+gfx` also offers the graphics interfaces. GRES types in Slurm
cannot hold a `+`, so there it is written as a dot: `1g.10gb.me`, `1g.24gb.me.all`, `1g.24gb.gfx`; `-me` stays.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

SUFFIXES = ("+me.all", "+me", "-me", "+gfx", "")
"""The longer of two that begin alike comes first."""
SUFFIX_FORM = "|".join(re.escape(suffix).replace(r"\+", "[.+]") for suffix in SUFFIXES)
"""Pattern of a suffix in either spelling."""

_NAME = re.compile(rf"(?:mig )?([1-9][0-9]?)g\.(0|[1-9][0-9]{{0,3}})gb({SUFFIX_FORM})")
_SHORT = re.compile(r"[0-9]{1,4}g(?:b)?")
_MIB_PER_GB = 1024
_TOLERANCE = 0.03  # largest difference of two names of the same memory, as a share of the driver's
_COMPUTE_PART = re.compile(r"[0-9]{1,2}c\.(.{1,32})")


class ProfileError(ValueError):
    """A text that is not a profile; the message says how one is written."""


class Profile(NamedTuple):
    """One profile name as a value, ordered by compute slices, then memory, then suffix.

    `compute` is in compute slices, `memory_gb` the nominal GB of the name (0 on integrated GPUs), `suffix` one of
    `SUFFIXES`. Its `Geometry` decides whether a GPU has the profile.
    """

    compute: int
    memory_gb: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Parse the NVML spelling (`1g.10gb+me`), nvidia-smi's (`MIG 1g.10gb+me`) or the GRES one (`1g.10gb.me`).

        Raises ProfileError with a sentence that says what to write instead.
        """
        match = _NAME.fullmatch(text.strip().lower())
        if match is None:
            raise ProfileError(_advice(text))
        suffix = match[3]
        return cls(int(match[1]), int(match[2]), "+" + suffix[1:] if suffix.startswith(".") else suffix)

    @property
    def name(self) -> str:
        """The NVML spelling, `1g.10gb+me`."""
        return _name(self)

    @property
    def gres_type(self) -> str:
        """The spelling for a GRES type, `1g.10gb.me`."""
        return _gres_type(self)

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=1024)
def _name(profile: Profile) -> str:
    return f"{profile.compute}g.{profile.memory_gb}gb{profile.suffix}"


@lru_cache(maxsize=1024)
def _gres_type(profile: Profile) -> str:
    return _name(profile).replace("+", ".")


def memory_names(profile: Profile, memory_mib: int) -> range:
    """Return the numbers of GB by which this profile's memory is named: its own, and those of AutoDetect.

    AutoDetect of slurmd names a slice by its usable memory in GiB, `3g.39gb` where the driver says `3g.40gb`; drivers
    differ by as much between their versions.
    """
    nominal = profile.memory_gb
    margin = int(_TOLERANCE * nominal)
    low, high = memory_mib // _MIB_PER_GB, -(-memory_mib // _MIB_PER_GB)
    if nominal == 0:  # integrated GPUs, whose profiles all have this name
        return range(1)
    return range(min(nominal - margin, low), max(nominal + margin, high) + 1)


def _advice(text: str) -> str:
    shown = text.strip()
    shown = ascii(shown if len(shown) <= 40 else shown[:40] + "...")
    low = text.strip().lower()
    if _SHORT.fullmatch(low):
        return (
            f"{shown} is an incomplete profile: write compute slices and memory, for example 1g.10gb or 3g.40gb "
            "(a bare number with a g is read by Slurm as a count)"
        )
    part = _COMPUTE_PART.fullmatch(low)
    if part is not None and _NAME.fullmatch(part[1]):
        return f"{shown} is a part of a GPU instance; request the whole instance: {part[1]}"
    return (
        f"{shown} is not a MIG profile: write <compute slices>g.<memory>gb, for example 1g.10gb, 3g.40gb or 1g.10gb+me"
    )
