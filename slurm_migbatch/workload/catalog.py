"""Define a site's catalog: partitions, their GPU types, and the possible profiles of each type.

The daemon builds a catalog from the inventory that nodes report; `migbatch explain` and the compiled table use the
same catalog. Performance figures are those of the whole GPU; the share of a slice is computed from its geometry (SM
count and memory slices), never from the number before the g in its name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.mig.geometry import Geometry, GeometryError, ProfileInfo
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.gpu_defaults import NO_DEFAULTS, GpuDefaults
from slurm_migbatch.values.remembering import remembered
from slurm_migbatch.workload.holding import GpuLayouts, Need, can_hold, layouts_of

WIRE_VERSION = 1
NODE_FEATURE: Final = "mig_node_"
"""Prefix of the feature of one node; the node name follows. A job that names nodes requests such features instead,
which the catalog nodes have too, so that it pends for profiles that its nodes do not offer at the moment.
"""

_MOST_NEEDS: Final = 4096
"""Answers of `SiteCatalog.able` that are remembered."""


class CatalogError(ValueError):
    """Values that do not form a catalog; the message says which."""


@dataclass(frozen=True)
class GpuKind:
    """One GPU type.

    `name` is the site's short name (`h100-80gb`), `types` the other names that users write in `--gres=gpu:<type>`.
    `tflops` is the dense 16-bit matrix rate and `bandwidth_gbs` the memory bandwidth of the whole GPU, `sm_count` its
    SMs outside MIG (0 if unknown: then the full profile's).
    """

    name: str
    geometry: Geometry
    tflops: float
    bandwidth_gbs: float
    sm_count: int = 0
    types: tuple[str, ...] = ()

    @property
    def full(self) -> ProfileInfo:
        """The profile that takes the whole GPU."""
        return self.geometry.full

    @property
    def gpu_layouts(self) -> GpuLayouts:
        """The slices that one of these GPUs can hold at once."""
        return layouts_of(self.geometry)

    @cached_property
    def slice_names(self) -> Mapping[str, str]:
        """The GRES type of the profile that each other name of a slice means, `3g.40gb` for AutoDetect's `3g.39gb`."""
        return {name.gres_type: own.gres_type for name, own in self.geometry.other_names.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "name": self.name,
            "geometry": self.geometry.to_dict(),
            "tflops": self.tflops,
            "bandwidth_gbs": self.bandwidth_gbs,
            "sm_count": self.sm_count,
            "types": list(self.types),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GpuKind:
        """Read `to_dict`'s form; raises CatalogError."""
        try:
            return cls(
                str(data["name"]),
                Geometry.from_dict(data["geometry"]),
                float(data["tflops"]),
                float(data["bandwidth_gbs"]),
                int(data.get("sm_count", 0)),
                tuple(str(name) for name in data.get("types", ())),
            )
        except (KeyError, TypeError, ValueError, GeometryError) as error:
            raise CatalogError(f"a GPU kind of the catalog cannot be parsed: {error!r}") from None


@dataclass(frozen=True)
class ProfileOffer:
    """One profile available to jobs of a partition, over all GPU types there that have it.

    If types differ (1g.10gb exists on A100 40GB and H100 80GB), `memory_mib` is the minimum and the slices are the
    maximum.
    """

    profile: Profile
    compute_slices: int
    memory_slices: int
    memory_mib: int

    @property
    def order(self) -> tuple[int, int, str]:
        """The sort key from cheapest to most expensive: fewest compute slices, then least memory, then by name."""
        return (self.compute_slices, self.memory_mib, self.profile.gres_type)


@dataclass(frozen=True)
class Partition:
    """The profiles available to jobs of one partition (or of several that a job names).

    `kinds`: its GPU types, that of most GPUs first.
    `default` is the profile for jobs without hints: the site's choice, else the cheapest plain one. `lends`: training
    jobs without an explicit profile wait here for idle slices. `gpu_defaults`: CPUs and memory that jobs get for each
    GPU without requesting them. `others`: the types of GPUs that Slurm counts on its nodes without MIG, "" for none.
    `hidden`: it is not suggested to users.
    """

    name: str
    kinds: tuple[GpuKind, ...]
    chosen_default: Profile | None = None
    lends: bool = False
    gpu_defaults: GpuDefaults = NO_DEFAULTS
    others: frozenset[str] = frozenset()
    hidden: bool = False

    @cached_property
    def offers(self) -> Mapping[str, ProfileOffer]:
        """Every profile by its GRES type, cheapest first."""
        merged: dict[str, ProfileOffer] = {}
        for kind in self.kinds:
            for info in kind.geometry.profiles:
                own = ProfileOffer(info.profile, info.compute_slices, info.memory_slices, info.memory_mib)
                earlier = merged.get(info.profile.gres_type, own)
                merged[info.profile.gres_type] = ProfileOffer(
                    info.profile,
                    max(earlier.compute_slices, own.compute_slices),
                    max(earlier.memory_slices, own.memory_slices),
                    min(earlier.memory_mib, own.memory_mib),
                )
        return {offer.profile.gres_type: offer for offer in sorted(merged.values(), key=lambda o: o.order)}

    @cached_property
    def plain(self) -> tuple[ProfileOffer, ...]:
        """The profiles that `mig:auto` chooses from: those without a suffix, cheapest first."""
        return tuple(offer for offer in self.offers.values() if not offer.profile.suffix)

    @cached_property
    def default(self) -> ProfileOffer:
        """The profile for jobs without useful hints."""
        if self.chosen_default is not None and self.chosen_default.gres_type in self.offers:
            return self.offers[self.chosen_default.gres_type]
        return self.plain[0] if self.plain else next(iter(self.offers.values()))

    @cached_property
    def profile_list(self) -> str:
        """The profiles as text for a message, cheapest first."""
        return ", ".join(self.offers)

    def defaults_of(self, offer: ProfileOffer) -> GpuDefaults:
        """Return what a job gets for a slice without requesting it: the share of a GPU's default by compute slices, at
        least one CPU; 0: no default.
        """
        kinds = [kind.full.compute_slices for kind in self.kinds if offer.profile in kind.geometry]
        of_gpu, whole = self.gpu_defaults, max(kinds)
        cpus = max(of_gpu.cpus * offer.compute_slices // whole, 1) if of_gpu.cpus else 0
        return GpuDefaults(cpus, of_gpu.memory_mib * offer.compute_slices // whole)

    def kind_of(self, gpu_type: str | None) -> GpuKind | None:
        """Return the GPU type that `gpu:<type>` means in this partition; without a type the partition's first."""
        if gpu_type is None:
            return self.kinds[0]
        return next((kind for kind in self.kinds if gpu_type in (kind.name, *kind.types)), None)

    def slice_of(self, gpu_type: str) -> str | None:
        """Return the GRES type of the profile that a GPU type of static MIG names, `a100_3g.39gb`; None if none.

        The profiles' own names come before those that AutoDetect gives them.
        """
        name = gres.profile_in(gpu_type)
        if name is None or name in self.offers:
            return name
        return next((kind.slice_names[name] for kind in self.kinds if name in kind.slice_names), None)


@dataclass(frozen=True)
class MigNode:
    """One node with MIG GPUs.

    Attributes:
        gpus: the type of each of its GPUs, sorted.
        partitions: those of the catalog that it is in.
        features: its active features in Slurm.
        named: whether it and every catalog node have the feature of its name (`NODE_FEATURE`).
    """

    name: str
    gpus: tuple[str, ...]
    partitions: frozenset[str]
    features: frozenset[str] = frozenset()
    named: bool = False

    @property
    def feature(self) -> str:
        """The feature that only it and the catalog nodes have."""
        return NODE_FEATURE + self.name


@dataclass(frozen=True)
class SiteCatalog:
    """All MIG partitions of the site, by name, and the nodes in them; no nodes: they are unknown.

    `stem` is the common prefix of the names of catalog nodes, `catalog_nodes` their number; 0: it is unknown.
    """

    partitions: Mapping[str, Partition] = field(default_factory=dict)
    nodes: Mapping[str, MigNode] = field(default_factory=dict)
    stem: str = ""
    catalog_nodes: int = 0
    _able: dict[tuple[tuple[str, ...], Need], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, partition in self.partitions.items():
            if name != partition.name or not partition.kinds:
                raise CatalogError(f"partition {name} has no GPU kinds or another name ({partition.name})")

    def __contains__(self, name: object) -> bool:
        return name in self.partitions

    @property
    def names(self) -> str:
        """The partitions as text for a message."""
        return ", ".join(self.partitions)

    @property
    def suggested(self) -> str:
        """The partitions for a message to users: those that are not hidden, if there are any."""
        return ", ".join([part.name for part in self.partitions.values() if not part.hidden]) or self.names

    @property
    def kinds(self) -> dict[str, GpuKind]:
        """All GPU types of the site by name."""
        return {kind.name: kind for part in self.partitions.values() for kind in part.kinds}

    def view(self, names: Sequence[str], only: Collection[str] | None = None) -> Partition:
        """Merge the partitions `names` (all must have MIG) into one: all their types, the defaults of the first.

        The result lends if all of them do. `only`: the types to include.
        """
        parts = [self.partitions[name] for name in names]
        kinds = {kind.name: kind for part in parts for kind in part.kinds}
        if only is not None and len(only) < len(kinds):
            kinds = {name: kind for name, kind in kinds.items() if name in only}
        elif len(parts) == 1:
            return parts[0]
        lends = all(part.lends for part in parts)
        others = frozenset[str]().union(*(part.others for part in parts))
        first = parts[0]
        return Partition(
            ",".join(names), tuple(kinds.values()), first.default.profile, lends, first.gpu_defaults, others
        )

    def able(self, names: Collection[str], need: Need) -> int:
        """Return how many nodes of the partitions `names` could hold these slices at once, if they were empty."""
        key = tuple(names), need
        return remembered(self._able, _MOST_NEEDS, key, lambda: self.able_of(self.nodes.values(), names, need))

    def able_of(self, nodes: Iterable[MigNode], names: Collection[str], need: Need) -> int:
        """Return how many of `nodes` are in the partitions `names` and could hold these slices at once, if empty."""
        shapes = Counter(node.gpus for node in nodes if not node.partitions.isdisjoint(names))
        kinds = self.kinds
        return sum(
            count for gpus, count in shapes.items() if can_hold([kinds[name].gpu_layouts for name in gpus], dict(need))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "version": WIRE_VERSION,
            "kinds": [kind.to_dict() for kind in self.kinds.values()],
            "partitions": [
                {
                    "name": part.name,
                    "kinds": [kind.name for kind in part.kinds],
                    "default": None if part.chosen_default is None else part.chosen_default.name,
                    "lends": part.lends,
                    "gpu_defaults": [part.gpu_defaults.cpus, part.gpu_defaults.memory_mib],
                    "others": sorted(part.others),
                    "hidden": part.hidden,
                }
                for part in self.partitions.values()
            ],
            "nodes": [
                {
                    "name": node.name,
                    "gpus": list(node.gpus),
                    "partitions": sorted(node.partitions),
                    "features": sorted(node.features),
                    "named": node.named,
                }
                for node in self.nodes.values()
            ],
            "stem": self.stem,
            "catalog_nodes": self.catalog_nodes,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SiteCatalog:
        """Read `to_dict`'s form; raises CatalogError."""
        if not isinstance(data, Mapping) or data.get("version") != WIRE_VERSION:
            raise CatalogError(f"not a catalog of version {WIRE_VERSION}: recreate it with this release")
        try:
            kinds = {row["name"]: GpuKind.from_dict(row) for row in data["kinds"]}
            partitions = {}
            for row in data["partitions"]:
                default = row.get("default")
                partitions[row["name"]] = Partition(
                    row["name"],
                    tuple(kinds[name] for name in row["kinds"]),
                    None if default is None else Profile.parse(default),
                    row.get("lends") is True,
                    GpuDefaults(*map(int, row.get("gpu_defaults", ()))),
                    frozenset(map(str, row.get("others", ()))),
                    row.get("hidden") is True,
                )
            nodes = {
                row["name"]: MigNode(
                    str(row["name"]),
                    tuple(kinds[name].name for name in row["gpus"]),
                    frozenset(map(str, row["partitions"])),
                    frozenset(map(str, row["features"])),
                    row["named"] is True,
                )
                for row in data.get("nodes", ())
            }
            stem, catalog_nodes = str(data.get("stem", "")), int(data.get("catalog_nodes", 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CatalogError(f"the catalog cannot be parsed: {error!r}") from None
        return cls(partitions, nodes, stem, catalog_nodes)


def load(path: Path) -> SiteCatalog:
    """Read a catalog from a JSON file; raises CatalogError or OSError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CatalogError(f"{path} is not JSON: {error}") from None
    return SiteCatalog.from_dict(data)
