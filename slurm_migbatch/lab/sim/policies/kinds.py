"""Define the baselines for configuration files."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_migbatch.config.keys import between, key, one_of, profiles
from slurm_migbatch.lab.sim import gpus
from slurm_migbatch.lab.sim.cluster import PlaceError, SimulatedCluster
from slurm_migbatch.lab.sim.policies.ffs import SjfFfs
from slurm_migbatch.lab.sim.policies.halves import Halves
from slurm_migbatch.lab.sim.policies.queued import Easy, Fifo, Sjf
from slurm_migbatch.lab.sim.policies.sliced import Slices, Static
from slurm_migbatch.lab.sim.policies.tiresias import Tiresias
from slurm_migbatch.lab.sim.policy import Policy
from slurm_migbatch.lab.sim.registry import NoParams, simulated
from slurm_migbatch.lab.traces.mignames import nearest
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout
from slurm_migbatch.mig.planning import choose
from slurm_migbatch.mig.profile import Profile


@dataclass(frozen=True)
class EasyParams:
    """EASY backfilling."""

    depth: int = key(100, "Number of pending jobs considered after the first.", between(1, 10**6))


@dataclass(frozen=True)
class TiresiasParams:
    """Least attained service."""

    first_limit_s: float = key(3600.0, "GPU-seconds after which a job leaves the first queue.", between(1, 1e9))
    second_limit_s: float = key(36000.0, "GPU-seconds after which it leaves the second one.", between(1, 1e9))


@dataclass(frozen=True)
class SlicesParams:
    """A slice for each job."""

    order: str = key("fifo", "Order: first come (fifo) or shortest (sjf) first.", one_of("fifo", "sjf"))
    rule: str = key("best", "Which GPU: the first with room, or the one with the least left.", one_of("first", "best"))
    block: bool = key(False, "Whether a job that does not fit blocks those behind it.")


@dataclass(frozen=True)
class StaticParams:
    """Partitions that never change."""

    layout: tuple[str, ...] = key(
        (),
        "Profiles that each GPU is divided into; empty: 3g.40gb, 2g.20gb and 1g.10gb, on models without these the "
        "nearest ones, as many as fit.",
        profiles,
    )


@dataclass(frozen=True)
class HalvesParams:
    """Training and inference apart."""

    train: str = key("easy", "Policy for training on the first nodes.", one_of("fifo", "sjf", "easy", "tiresias"))
    share: float = key(0.5, "Share of the nodes that are for training.", between(0.01, 0.99))


FIFO = simulated("first come, first served, on whole GPUs", NoParams, lambda params, cluster: Fifo())
SJF = simulated("shortest job first, on whole GPUs", NoParams, lambda params, cluster: Sjf())
SJF_FFS = simulated("shortest first, sharing the first GPU that holds one job", NoParams, lambda p, cluster: SjfFfs())
EASY = simulated("EASY backfilling, on whole GPUs", EasyParams, lambda params, cluster: Easy(depth=params.depth))
TIRESIAS = simulated(
    "least attained service in three queues, preemptive, on whole GPUs",
    TiresiasParams,
    lambda params, cluster: Tiresias(limits=(params.first_limit_s, params.second_limit_s)),
)
SLICES = simulated(
    "the slice that each job requests, created where it fits",
    SlicesParams,
    lambda params, cluster: Slices(order=params.order, rule=params.rule, block=params.block),
)


def _static(params: StaticParams, cluster: SimulatedCluster) -> Policy:
    geometry, layout = cluster.gpus[0].geometry, EMPTY
    names = [Profile.parse(name) for name in params.layout] or _usual(geometry)
    for profile in sorted(names, reverse=True):
        slot = choose(geometry, layout, profile)
        if slot is not None:
            layout = layout.add(slot)
        elif params.layout:
            raise PlaceError(f"{geometry.name} cannot be divided into {', '.join(params.layout)}")
    return Static(Layout(layout.slots))


def _usual(geometry: Geometry) -> list[Profile]:
    """Return three profiles of different sizes, or the nearest ones that the GPU has."""
    names = [Profile.parse(name) for name in ("3g.40gb", "2g.20gb", "1g.10gb")]
    reference = [gpus.geometry("a100-80gb")]
    return [found for profile in names if (found := nearest(geometry, profile, reference)) is not None]


def _halves(params: HalvesParams, cluster: SimulatedCluster) -> Policy:
    nodes = len(cluster.nodes)
    split = round(nodes * params.share)
    if not 0 < split < nodes:
        raise PlaceError(f"{nodes} nodes cannot be divided into {params.share:g} and the rest: give it more nodes")
    kinds = {"fifo": Fifo, "sjf": Sjf, "easy": Easy, "tiresias": Tiresias}
    return Halves(kinds[params.train](range(split)), Fifo(range(split, nodes)))


STATIC = simulated("the same partition of every GPU, which never changes", StaticParams, _static)
HALVES = simulated("training on some nodes, inference on the others, no lending", HalvesParams, _halves)
