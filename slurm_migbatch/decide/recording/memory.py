"""Write and read the state between decisions (`DecisionMemory`) as plain data.

Only state that later rounds depend on is kept. Settings (`RetypeHistory.hold_s`) come from the memory that the state is
loaded into, so that a recording can be replayed with other settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, get_type_hints

from slurm_migbatch.decide.core import DecisionMemory
from slurm_migbatch.decide.dispatch.arrays import Bounds
from slurm_migbatch.decide.dispatch.instances import LoadHistory
from slurm_migbatch.decide.dispatch.retype import RetypeHistory
from slurm_migbatch.decide.dispatch.shares import ServedTime
from slurm_migbatch.decide.dispatch.stage import DispatchMemory
from slurm_migbatch.decide.lending.elastic_jobs import ElasticJobs
from slurm_migbatch.decide.lending.forecast import Expectation, LevelGaps, Part
from slurm_migbatch.decide.lending.idleness import Idleness
from slurm_migbatch.decide.lending.ledger import Ledger
from slurm_migbatch.decide.lending.pair_slowdowns import PairKey, PairSlowdowns, RateKey, Stretch
from slurm_migbatch.decide.lending.pairs import Pair
from slurm_migbatch.decide.lending.run_lengths import LengthHistory
from slurm_migbatch.decide.lending.shared_runs import SharedRuns
from slurm_migbatch.decide.lending.slice_sharing import SliceSharing
from slurm_migbatch.decide.lending.stage import LendingMemory, Refusals
from slurm_migbatch.decide.lending.training_speed import SpeedReport
from slurm_migbatch.decide.recording.codec import Codec, CodecError, Json
from slurm_migbatch.decide.snapshot import Report, Run
from slurm_migbatch.decide.supply.moves import MoveMemory
from slurm_migbatch.decide.supply.stage import SupplyMemory
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.workload.loans import LoanHints

State = dict[str, Any]
"""State of an object, by attribute; objects with state of their own are states again."""


def _fields(kind: type, *derived: str) -> Mapping[str, Any]:
    """Return the fields of a dataclass with their types, except `derived`: settings and derived values."""
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in derived}


#: stored attributes of each class, with their types; a class that is itself a key here is stored in the same way
REMEMBERED: Final[Mapping[type, Mapping[str, Any]]] = {
    DecisionMemory: {"supply": SupplyMemory, "dispatch": DispatchMemory, "lending": LendingMemory},
    SupplyMemory: _fields(SupplyMemory, "planner", "queue", "nodes", "demands", "offers"),
    MoveMemory: _fields(MoveMemory),
    DispatchMemory: _fields(DispatchMemory, "left", "nothing_fits"),
    RetypeHistory: _fields(RetypeHistory, "hold_s"),
    Bounds: _fields(Bounds),
    ServedTime: _fields(ServedTime),
    LoadHistory: _fields(LoadHistory),
    LendingMemory: {
        "ledger": Ledger,
        "elastic_jobs": ElasticJobs,
        "expected": Expectation,
        "idle": Idleness,
        "refusals": Refusals,
        "slice_sharing": SliceSharing,
        "short_of_cpus": dict[int, float],
        "loaded": bool,
        "asked": set[int],
    },
    Ledger: _fields(Ledger),
    ElasticJobs: {
        "_version": str | None,
        "_reports": dict[Run, Report],
        "_heard": dict[int, dict[int, SpeedReport]],
        "_geometries": tuple[Geometry, ...],
        "_usual": dict[LoanHints, dict[Profile, float]],
        "_predicted": dict[tuple[LoanHints, str], dict[Profile, float]],
    },
    Expectation: {"_gaps": dict[Profile, LevelGaps], "_level": Counter[Profile], "_most": int},
    LevelGaps: {"_parts": dict[int, Part], "_since": list[float], "_begin": float | None, "_level": int},
    Idleness: _fields(Idleness),
    Refusals: _fields(Refusals),
    SliceSharing: {
        "_pairs": dict[int, tuple[Pair, float]],
        "_rest": dict[tuple[int, int], float],
        "_beside": dict[Run, Run],
        "_located": set[Run],
        "shared": set[Run],
        "runs": SharedRuns,
    },
    SharedRuns: {
        "slowdowns": PairSlowdowns,
        "lengths": LengthHistory,
        "_worked": dict[int, float],
        "_limits": dict[int, tuple[int, float | None]],
        "_reported": dict[Run, float],
        "_now": float | None,
    },
    PairSlowdowns: {
        "_slowdowns": dict[PairKey, float],
        "_alone": dict[Run, float],
        "_usually": dict[RateKey, float],
        "_activity": dict[RateKey, float],
        "_stretches": dict[Run, Stretch],
        "_runs": dict[tuple[Run, Run], float],
    },
    LengthHistory: _fields(LengthHistory, "weight"),
}


def take(remembered: Any) -> State:
    """Return the state of a DecisionMemory, or of a part; later changes of it do not affect the state.

    It must be fast, because a round waits for it.
    """
    if isinstance(remembered, LevelGaps):
        return _taken_gaps(remembered)
    return {name: _copied(getattr(remembered, name)) for name in REMEMBERED[type(remembered)]}


def _copied(value: Any) -> Any:
    if type(value) in REMEMBERED:
        return take(value)
    if isinstance(value, dict):
        copy = value.copy()
        if any(isinstance(item, (dict, list, set)) or type(item) in REMEMBERED for item in copy.values()):
            copy.update({key: _copied(item) for key, item in copy.items()})
        return copy
    return value.copy() if isinstance(value, (set, list)) else value


def _taken_gaps(gaps: LevelGaps) -> State:
    """Return the state of the gaps; only the newest part of a day still changes, so only it is copied."""
    state = {name: getattr(gaps, name) for name in REMEMBERED[LevelGaps]}
    state["_since"] = state["_since"].copy()
    parts = state["_parts"] = dict(state["_parts"])
    if parts:
        newest = max(parts)
        parts[newest] = parts[newest].copy()
    return state


def encode(state: State, codec: Codec, kind: type = DecisionMemory) -> Json:
    """Return a state in a form for `json.dumps`."""
    return {name: _encoded_part(state[name], hint, codec) for name, hint in REMEMBERED[kind].items()}


def _encoded_part(value: Any, hint: Any, codec: Codec) -> Json:
    if hint in REMEMBERED:
        return encode(value, codec, hint)
    if hint == dict[Profile, LevelGaps]:
        return [[profile.name, encode(gaps, codec, LevelGaps)] for profile, gaps in value.items()]
    return codec.encode(value, hint)


def restore(data: Json, remembered: Any, codec: Codec) -> None:
    """Load the result of `encode` into a new DecisionMemory, or a part.

    Raises:
        CodecError: it is invalid.
    """
    if not isinstance(data, dict):
        raise CodecError("the memory is missing")
    for name, hint in REMEMBERED[type(remembered)].items():
        if name not in data:
            continue
        if hint in REMEMBERED:
            restore(data[name], getattr(remembered, name), codec)
        elif hint == dict[Profile, LevelGaps]:
            setattr(remembered, name, _restored_gaps(data[name], remembered, codec))
        else:
            setattr(remembered, name, codec.decode(data[name], hint))


def _restored_gaps(data: Json, expected: Expectation, codec: Codec) -> dict[Profile, LevelGaps]:
    by_profile = {}
    for name, row in codec.decode(data, list[tuple[str, Any]]):
        gaps = by_profile[codec.decode(name, Profile)] = expected.gaps()
        restore(row, gaps, codec)
    return by_profile
