"""Read a simulation from a TOML file: cluster, workload, speeds, costs, policy, seeds. See `describe` for every key.

Errors name file and line, like those of migbatch.toml.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slurm_migbatch.config.keys import Check, between, key, one_of, required
from slurm_migbatch.config.reader import ConfigError, Problem, lines_of, parse, read_section, text_in, unknown_name
from slurm_migbatch.lab.sim import gpus, registry
from slurm_migbatch.lab.traces import joblog
from slurm_migbatch.mig.geometry import Geometry

TRACES: Final = (
    "joblog",
    "jobtable",
    "philly",
    "openb",
    "muri",
    "pollux",
    "mixed",
    "sacct",
)

_TRES: Final = re.compile(r"([0-9]{1,10})=([a-z]+/[A-Za-z0-9_.:+-]+)", re.ASCII)


def _of_seconds(low: float = 0.0) -> Check:
    return between(low, 1e12)


def _column_names(names: tuple[str, ...]) -> str | None:
    parted = [name.rpartition("=") for name in names]
    if all(old.strip() and new.strip() in joblog.COLUMNS for old, _, new in parted):
        return None
    return f'must be such as "gpus=gpu_num": a column of the file, and {", ".join(joblog.COLUMNS)}'


def _tres_names(names: tuple[str, ...]) -> str | None:
    return None if all(map(_TRES.fullmatch, names)) else "must be numbers with names, such as 1001=gres/gpu"


@dataclass(frozen=True)
class ClusterPart:
    """The GPUs."""

    gpu: str = key(
        "a100-80gb",
        f"GPU model: {', '.join(gpus.models())}. MIG profiles of others (H100 NVL, GH200, H20) are not known here.",
        one_of(*gpus.models()),
    )
    nodes: int = key(1, "Nodes.", between(1, 100_000))
    gpus: int = key(8, "GPUs of each node.", between(1, 64))
    mig: bool = key(True, "Whether the GPUs have MIG on.")
    neighbours: float = key(
        0.019, "Mean slowdown of a job by busy slices on the same GPU (A30: 0.084).", between(0.0, 0.5)
    )
    neighbours_worst: float = key(0.07, "The same at worst (A30: 0.12).", between(0.0, 1.0))


@dataclass(frozen=True)
class WorkloadPart:
    """What arrives."""

    trace: str = required(
        "Format of the trace, for a site's own history sacct (`sacct -P`, `sacct --json`, jobcomp/filetxt): "
        f"{', '.join(TRACES)}.",
        one_of(*TRACES),
    )
    path: str = required("The trace file; relative to this file.")
    profiles: str = key(
        "", "Directory of measured profiles (traces/bert/...): required for pollux, optional for mixed."
    )
    begin_s: float = key(0.0, "Where to begin in the trace; if it has Unix times, after its first job.", _of_seconds())
    end_s: float = key(1e12, "Where to end.", _of_seconds())
    limit: int = key(10**9, "Maximum number of jobs.", between(1, 10**9))
    load: float = key(1.0, "Factor by which arrivals are faster.", between(1e-3, 1e3))
    copies: int = key(1, "Number of copies of the jobs; each copy slightly later.", between(1, 1000))
    infer: tuple[str, ...] = key(
        (),
        "What is inference: partitions of an sacct export or a jobtable; job types, virtual clusters, organizations of "
        "a joblog.",
    )
    tres: tuple[str, ...] = key(
        (), "Names of a jobtable's TRES, such as 1001=gres/gpu; empty: all of the site's are GPUs.", _tres_names
    )
    columns: tuple[str, ...] = key(
        (),
        "Columns of a joblog that have other names, such as gpus=gpu_num: the file's name, and the one under which it "
        "is read.",
        _column_names,
    )
    slices: str = key(
        "keep",
        "Slices of another GPU model: keep, so that policies refuse them, or nearest, the smallest of this model with "
        "as large a share of compute and memory.",
        one_of("keep", "nearest"),
    )
    models: str = key(
        "keep",
        "Models of the jobs: keep the trace's, or draw one from the speeds for each job.",
        one_of("keep", "draw"),
    )
    slo_s: float = key(0.0, "Seconds within which inference jobs must end; 0: no limit.", _of_seconds())
    start_slo_s: float = key(0.0, "Seconds within which they must start; 0: no limit.", _of_seconds())

    @property
    def renamed_columns(self) -> dict[str, str]:
        """Return `columns` as names by the file's names."""
        return {old.strip(): new.strip() for old, _, new in (text.rpartition("=") for text in self.columns)}

    @property
    def named_tres(self) -> dict[int, str] | None:
        """Return `tres` as names by number; None without any."""
        return {int(number): name for number, _, name in (text.partition("=") for text in self.tres)} or None


@dataclass(frozen=True)
class SpeedsPart:
    """How fast jobs are on slices."""

    kind: str = key(
        "linear",
        "whole: the same on every slice; linear: by compute slices; table: measured; predictor: predicted.",
        one_of("whole", "linear", "table", "predictor"),
    )
    path: str = key("", "Table or directory of measurements (table), or of the predictor's training data (predictor).")
    exponent: float = key(
        1.0,
        "linear: speed is the share of the requested compute slices to this power, at most 1.",
        between(0.0, 2.0),
    )
    shared: float = key(2.0, "Slowdown of two jobs on one slice.", between(1.0, 100.0))
    pairs: str = key(
        "", "Table app1,app2,slowdown1,slowdown2 of known pairs on one slice; lines with a profile are not used."
    )


@dataclass(frozen=True)
class CostsPart:
    """What training and inference pay beside their work, in seconds."""

    train_start_s: float = key(0.0, "Training: from its first slice to its first progress.", _of_seconds())
    train_restart_s: float = key(30.0, "Training: the same after an interruption or a move.", _of_seconds())
    train_checkpoint_s: float = key(0.0, "Training: time to save its work before it is stopped.", _of_seconds())
    infer_start_s: float = key(0.0, "Inference: from its first slice to its first answer.", _of_seconds())
    infer_restart_s: float = key(0.0, "Inference: the same after an interruption.", _of_seconds())


@dataclass(frozen=True)
class RunPart:
    """Repetitions and limits."""

    seeds: int = key(1, "Number of runs, with different seeds.", between(1, 1000))
    first_seed: int = key(0, "The first seed.", between(0, 2**31))
    until_s: float = key(1e12, "Stop at this time, with any number of jobs left.", _of_seconds(1.0))


@dataclass(frozen=True)
class Scenario:
    """A whole file, validated."""

    path: Path
    cluster: ClusterPart
    workload: WorkloadPart
    speeds: SpeedsPart
    costs: CostsPart
    run: RunPart
    policy: str
    params: Any

    @property
    def geometry(self) -> Geometry:
        """The geometry of the GPUs."""
        return gpus.geometry(self.cluster.gpu) if self.cluster.mig else gpus.whole(self.cluster.gpu)

    def near(self, path: str) -> Path:
        """Return a path as the file means it."""
        return self.path.parent / path

    def with_policy(self, policy: str) -> Scenario:
        """Return the scenario under another policy with default parameters; unchanged if it is its own policy."""
        if policy == self.policy:
            return self
        return dataclasses.replace(self, policy=policy, params=registry.find(policy).params())

    def seeds(self) -> range:
        """Return all seeds."""
        return range(self.run.first_seed, self.run.first_seed + self.run.seeds)


PARTS: Final[Mapping[str, type[Any]]] = {
    "cluster": ClusterPart,
    "workload": WorkloadPart,
    "speeds": SpeedsPart,
    "costs": CostsPart,
    "run": RunPart,
}


def load(path: Path) -> Scenario:
    """Read and check a file; raises ConfigError with all errors, by line."""
    data, where = _parse(path)
    problems: list[Problem] = []
    parts: dict[str, Any] = {}
    for name, value in data.items():
        line = where.get((name,), 0)
        if name not in PARTS and name != "policy":
            problems.append(Problem(line, unknown_name("section", name, [*PARTS, "policy"])))
        elif not isinstance(value, dict):
            problems.append(Problem(line, f"{name} must be a section, [{name}]"))
    for name, part in PARTS.items():
        value = data.get(name, {})
        if isinstance(value, dict):
            parts[name] = read_section((name,), part, value, where, problems)
    policy, params = _policy(data.get("policy", {}), where, problems)
    params = _with_config_path(path, params)
    if problems:
        raise ConfigError(str(path), problems)
    scenario = Scenario(path=path, policy=policy, params=params, **parts)
    if wrong := list(_apart(scenario, where)):
        raise ConfigError(str(path), wrong)
    return scenario


def _parse(path: Path) -> tuple[dict[str, Any], Mapping[tuple[str, ...], int]]:
    text = text_in(path)
    return parse(text, str(path)), dict(lines_of(text))


def _policy(values: object, where: Mapping[tuple[str, ...], int], problems: list[Problem]) -> tuple[str, Any]:
    """Read name and parameters; errors are added to the problems."""
    if not isinstance(values, dict):
        return "", None  # reported above
    line = where.get(("policy",), 0)
    name = values.get("name", registry.DEFAULT)
    if not isinstance(name, str) or name not in registry.POLICIES:
        problems.append(
            Problem(where.get(("policy", "name"), line), unknown_name("policy", str(name), registry.POLICIES))
        )
        return "", None
    rest = {key: value for key, value in values.items() if key != "name"}
    return name, read_section(("policy",), registry.find(name).params, rest, where, problems)


def _with_config_path(path: Path, params: Any) -> Any:
    """Resolve a configuration that parameters name beside the file that names it."""
    config = getattr(params, "config", "")
    return dataclasses.replace(params, config=str(path.parent / config)) if config else params


def _apart(scenario: Scenario, where: Mapping[tuple[str, ...], int]) -> Iterator[Problem]:
    """Yield errors between keys that are valid individually."""

    def at(*keys: str) -> int:
        return where.get(keys, where.get(keys[:1], 0))

    workload, speeds = scenario.workload, scenario.speeds
    if workload.trace == "pollux" and not workload.profiles:
        yield Problem(at("workload", "trace"), "pollux workloads name no durations: workload.profiles is needed")
    if speeds.kind in ("table", "predictor") and not speeds.path:
        yield Problem(at("speeds", "kind"), f"speeds of kind {speeds.kind!r} need speeds.path")
    if workload.models == "draw" and speeds.kind not in ("table", "predictor"):
        yield Problem(at("workload", "models"), "models can only be drawn from a table or from the predictor")
    if 0 < scenario.cluster.neighbours >= scenario.cluster.neighbours_worst:
        yield Problem(at("cluster", "neighbours"), "cluster.neighbours must be below neighbours_worst")
    for section, name, path in (
        ("workload", "path", workload.path),
        ("workload", "profiles", workload.profiles),
        ("speeds", "path", speeds.path),
        ("speeds", "pairs", speeds.pairs),
    ):
        if path and not scenario.near(path).exists():
            yield Problem(at(section, name), f"{section}.{name}: {scenario.near(path)} does not exist")
    if workload.begin_s >= workload.end_s:
        yield Problem(at("workload", "begin_s"), "workload.begin_s must be before end_s")


def describe() -> str:
    """Return an example file with every key, its meaning and its default."""
    out = []
    for name, part in PARTS.items():
        out += [f"# {(part.__doc__ or '').strip()}", f"[{name}]"]
        out += _keys(part)
        out.append("")
    kind = registry.find(registry.DEFAULT)
    others = [name for name in registry.POLICIES if name != registry.DEFAULT]
    out += [
        f"# Who decides. {registry.DEFAULT}: {kind.about}.",
        f"# Baselines and policies of papers: {', '.join(others)}.",
        "# Their parameters differ from these (see: migbatch simulate --policies).",
        "[policy]",
        f'#name = "{registry.DEFAULT}"',
        *_keys(kind.params),
    ]
    return "\n".join([*out, ""])


def _keys(part: type[Any]) -> Iterator[str]:
    for field in dataclasses.fields(part):
        yield f"# {field.metadata['doc']}"
        default = "..." if field.default is dataclasses.MISSING else field.default
        shown = json.dumps(list(default) if isinstance(default, tuple) else default)
        yield f"{'' if field.default is dataclasses.MISSING else '#'}{field.name} = {shown}"
