"""Represent the geometry of one GPU model: profiles and placements as NVML reports them, and the layouts they allow.

There is no table of GPUs here. A layout is legal if

- every slot is a placement that the driver lists for its profile, and no two overlap (memory slices);
- the compute slices of all slots together are no more than the full profile's;
- no profile has more slots than its `max_instances`;
- the media engines (decoders, encoders, JPEG, OFA) of all slots together are no more than the GPU has. That number is
  the largest product over the profiles, `max(engines x max_instances)`: at least the full profile's own count, and
  more if a driver reports shared engines;
- next to a `+me.all` slot there are only `-me` slots (nvml.h states it for NVML_GPU_INSTANCE_PROFILE_*_ALL_ME).

Each rule is an upper bound: a legal layout remains legal when a slot is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from slurm_migbatch.mig._frozen import Frozen
from slurm_migbatch.mig.layout import Layout, LayoutError, Slot
from slurm_migbatch.mig.placement import Placement
from slurm_migbatch.mig.profile import Profile, memory_names

_ENGINES = ("decoders", "encoders", "jpegs", "ofas")
_COUNTS = (
    "profile_id",
    "compute_slices",
    "memory_slices",
    "memory_mib",
    "sm_count",
    "copy_engines",
    "decoders",
    "encoders",
    "jpegs",
    "ofas",
    "max_instances",
)
WIRE_VERSION = 1
MOST_SLICES = 64
"""Largest number of slices of a GPU, and of a profile's instances and places, that is read; today's have up to 12."""


class GeometryError(ValueError):
    """Values that are not a GPU geometry."""


class UnknownProfile(KeyError):
    """The GPU does not have the profile; the message lists those it has."""

    def __init__(self, profile: Profile, geometry: Geometry) -> None:
        super().__init__(profile)
        names = ", ".join(info.profile.name for info in geometry.profiles) or "none"
        near = geometry.closest(profile)
        hint = f"; the closest is {near}" if near is not None else ""
        self.message = f"{geometry.name} has no profile {profile}{hint}. Its profiles: {names}"

    def __str__(self) -> str:
        return self.message


class ProfileInfo(NamedTuple):
    """NVML's description of one profile on one GPU model.

    `profile_id` is the device's own id (19, 14, 9 ... on an A100), not NVML's enum, and differs between models.
    `memory_slices` is the size of its placements, in the GPU's placement units. `memory_mib` is usable memory.
    """

    profile: Profile
    profile_id: int
    compute_slices: int
    memory_slices: int
    memory_mib: int
    sm_count: int
    copy_engines: int
    decoders: int
    encoders: int
    jpegs: int
    ofas: int
    max_instances: int
    placements: tuple[Placement, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """One slot for each placement."""
        return tuple([Slot(self.profile, placement) for placement in self.placements])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form; placements as `[start, size]`."""
        row: dict[str, Any] = {"profile": self.profile.name}
        for key in _COUNTS:
            row[key] = getattr(self, key)
        row["placements"] = [[p.start, p.size] for p in self.placements]
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> ProfileInfo:
        """Read `to_dict`'s form; raises GeometryError."""
        try:
            counts = {key: row[key] for key in _COUNTS}
            placements = tuple(Placement(start, size) for start, size in row["placements"])
            profile = Profile.parse(row["profile"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GeometryError(f"cannot parse the description of a profile: {error!r}") from None
        for number in [*counts.values(), *(n for p in placements for n in p)]:
            if type(number) is not int or not 0 <= number < 1 << 31:
                raise GeometryError(f"{profile}: {number!r} is not a count")
        if not (placements and counts["memory_slices"] and counts["compute_slices"]):
            raise GeometryError(f"{profile} takes no part of the GPU")
        if max(counts[key] for key in ("memory_slices", "compute_slices", "max_instances")) > MOST_SLICES:
            raise GeometryError(f"{profile}: no GPU has more than {MOST_SLICES} slices")
        return cls(profile=profile, placements=placements, **counts)


class Geometry(Frozen):
    """The profiles of one GPU model, ordered from the largest to the smallest, with the rules that combine them."""

    __slots__ = (
        "_admitted",
        "_by_profile",
        "_checked",
        "_engine_totals",
        "_hash",
        "_slots",
        "memory_slices",
        "name",
        "profiles",
    )

    name: str
    profiles: tuple[ProfileInfo, ...]
    memory_slices: int  # placement units of the whole GPU
    _by_profile: dict[Profile, ProfileInfo]
    _slots: frozenset[Slot]
    _engine_totals: tuple[int, ...]
    _admitted: dict[tuple[Profile, ...], str]
    _checked: dict[Layout, str]
    _hash: int

    def __init__(self, name: str, profiles: Iterable[ProfileInfo]) -> None:
        """Set up a geometry; raises GeometryError if a profile is given twice or there is none."""
        ordered = tuple(sorted(profiles, key=_largest_first))
        by_profile = {info.profile: info for info in ordered}
        if not ordered:
            raise GeometryError(f"{name} reports no MIG profile")
        if len(by_profile) != len(ordered):
            raise GeometryError(f"{name} reports a profile twice")
        self._init(
            name=name,
            profiles=ordered,
            memory_slices=max((p.end for info in ordered for p in info.placements), default=0),
            _by_profile=by_profile,
            _slots=frozenset(slot for info in ordered for slot in info.slots),
            _engine_totals=tuple(max(getattr(i, e) * i.max_instances for i in ordered) for e in _ENGINES),
            _admitted={},
            _checked={},
            _hash=hash((name, ordered)),
        )

    # -- facts -------------------------------------------------------------------------------------------------

    def info(self, profile: Profile) -> ProfileInfo:
        """Return the facts of one profile; raises UnknownProfile (a KeyError) that lists the existing ones."""
        info = self._by_profile.get(profile)
        if info is None:
            raise UnknownProfile(profile, self)
        return info

    def __contains__(self, profile: object) -> bool:
        return profile in self._by_profile

    @property
    def full(self) -> ProfileInfo:
        """Profile of the whole GPU (the plain one, if several take all of it)."""
        return self.profiles[0]

    @property
    def compute_slices(self) -> int:
        """Compute slices of the whole GPU."""
        return self.full.compute_slices

    @property
    def max_slots(self) -> int:
        """The most slots that a layout can have."""
        return max(info.max_instances for info in self.profiles)

    @property
    def slots(self) -> frozenset[Slot]:
        """Every profile at every placement the driver lists for it."""
        return self._slots

    @property
    def other_names(self) -> Mapping[Profile, Profile]:
        """The profile that is meant by each other name of the same memory, as AutoDetect and other drivers write it.

        If several are, the one with the nearest nominal memory.
        """
        names: dict[Profile, Profile] = {}
        for info in self.profiles:
            own = info.profile
            for memory_gb in memory_names(own, info.memory_mib):
                name = Profile(own.compute, memory_gb, own.suffix)
                best = names.get(name, own)
                names[name] = min(best, own, key=lambda meant: abs(meant.memory_gb - name.memory_gb))
        return {name: own for name, own in names.items() if name not in self._by_profile}

    def closest(self, profile: Profile) -> Profile | None:
        """Return the profile to suggest for one that does not exist (None if it does).

        Names change with driver versions (3g.39gb, 3g.40gb), so the same compute slices and suffix with the nearest
        memory come first if it is off by less than a tenth; else the smallest profile at least as large in both
        respects, the same suffix preferred; else the largest.
        """
        if profile in self._by_profile:
            return None
        names = [info.profile for info in self.profiles]
        alike = [p for p in names if p.compute == profile.compute and p.suffix == profile.suffix]
        near = min(alike, key=lambda p: abs(p.memory_gb - profile.memory_gb), default=None)
        if near is not None and abs(near.memory_gb - profile.memory_gb) * 10 <= max(profile.memory_gb, 10):
            return near
        enough = [p for p in names if p.compute >= profile.compute and p.memory_gb >= profile.memory_gb]
        if enough:
            return min(enough, key=lambda p: (p.suffix != profile.suffix, p.suffix != "", p))
        return self.full.profile

    # -- legality ----------------------------------------------------------------------------------------------

    def fits(self, layout: Layout, slot: Slot) -> bool:
        """Return whether `slot` may be added to `layout`, which must be legal on this GPU."""
        if slot not in self._slots or layout.mask & slot.placement.mask:
            return False
        return self.admits((*layout.profiles, slot.profile))

    def why_not(self, layout: Layout, slot: Slot) -> str:
        """Return why `slot` may not be added to `layout`, as a sentence; empty if it may."""
        if slot.profile not in self._by_profile:
            return str(UnknownProfile(slot.profile, self))
        if slot not in self._slots:
            places = ", ".join(str(p) for p in self.info(slot.profile).placements)
            return f"{slot.profile} cannot be placed at {slot.placement} on {self.name}, only at {places}"
        if layout.mask & slot.placement.mask:
            other = next(s for s in layout.slots if s.placement.overlaps(slot.placement))
            return f"{slot} overlaps {other}"
        return self.why_not_together((*layout.profiles, slot.profile))

    def check(self, layout: Layout) -> None:
        """Raise LayoutError, with the reason, if the layout is not legal on this GPU."""
        reason = self._checked.get(layout)
        if reason is None:
            reason = self._first_fault(layout)
            if len(self._checked) < 4096:
                self._checked[layout] = reason
        if reason:
            raise LayoutError(reason)

    def _first_fault(self, layout: Layout) -> str:
        so_far = Layout()
        for slot in layout.slots:
            reason = self.why_not(so_far, slot)
            if reason:
                return reason
            so_far = so_far.add(slot)
        return ""

    def admits(self, profiles: Iterable[Profile]) -> bool:
        """Return whether the count limits allow these profiles on the GPU together (regardless of placements)."""
        return not self.why_not_together(profiles)

    def why_not_together(self, profiles: Iterable[Profile]) -> str:
        """Return the count limit that these profiles exceed together, as a sentence; empty if none."""
        key = tuple(sorted(profiles))
        reason = self._admitted.get(key)
        if reason is None:
            reason = self._broken_limit(key)
            if len(self._admitted) < 4096:
                self._admitted[key] = reason
        return reason

    def _broken_limit(self, profiles: tuple[Profile, ...]) -> str:
        infos = [self.info(profile) for profile in profiles]
        compute = sum(info.compute_slices for info in infos)
        if compute > self.compute_slices:
            return f"{self.name} has {self.compute_slices} compute slices; {_names(profiles)} take {compute}"
        for info in infos:
            count = profiles.count(info.profile)
            if count > info.max_instances:
                return f"{self.name} holds at most {info.max_instances} of {info.profile}, not {count}"
        for engine, total in zip(_ENGINES, self._engine_totals, strict=True):
            taken = sum(getattr(info, engine) for info in infos)
            if taken > total:
                return f"{self.name} has {total} {engine}; {_names(profiles)} take {taken}"
        all_engines = next((p for p in profiles if p.suffix == "+me.all"), None)
        if all_engines is not None:
            rest = list(profiles)
            rest.remove(all_engines)
            other = next((p for p in rest if p.suffix != "-me"), None)
            if other is not None:
                return f"{all_engines} takes all media engines, so only -me profiles fit with it, not {other}"
        return ""

    # -- as a value --------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"version": WIRE_VERSION, "name": self.name, "profiles": [i.to_dict() for i in self.profiles]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Geometry:
        """Read `to_dict`'s form; raises GeometryError. Equal geometries are one object, which makes planning faster."""
        if not isinstance(data, Mapping) or data.get("version") != WIRE_VERSION:
            raise GeometryError("a geometry of an unknown version: node and controller must run the same release")
        name, rows = data.get("name"), data.get("profiles")
        if not isinstance(name, str) or not isinstance(rows, list):
            raise GeometryError("a geometry needs a name and a list of profiles")
        return _interned(cls(name, [ProfileInfo.from_dict(row) for row in rows]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Geometry):
            return NotImplemented
        return self is other or (
            self._hash == other._hash and self.name == other.name and self.profiles == other.profiles
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Geometry], tuple[str, tuple[ProfileInfo, ...]]]:
        return (Geometry, (self.name, self.profiles))

    def __repr__(self) -> str:
        return f"Geometry({self.name!r}, {len(self.profiles)} profiles)"


@lru_cache(maxsize=256)
def _interned(geometry: Geometry) -> Geometry:
    return geometry


def _largest_first(info: ProfileInfo) -> tuple[int, int, bool, Profile]:
    return (-info.memory_slices, -info.compute_slices, info.profile.suffix != "", info.profile)


def _names(profiles: tuple[Profile, ...]) -> str:
    return " + ".join(p.name for p in profiles)
