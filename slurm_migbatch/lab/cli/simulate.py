"""`migbatch simulate`: simulate migbatchd, or another policy, on a cluster and a trace."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_migbatch.cli.common import print_table
from slurm_migbatch.lab.cli.common import writable_file

if TYPE_CHECKING:
    from slurm_migbatch.lab.sim.play import ScenarioData
    from slurm_migbatch.lab.sim.result import SimulationResult
    from slurm_migbatch.lab.sim.scenario import Scenario

_out: Any = {"metavar": "FILE", "type": click.Path(dir_okay=False, path_type=Path), "callback": writable_file}
_FIGURES: Sequence[tuple[str, tuple[str, ...], str]] = (
    ("jobs", ("all", "jobs"), "count"),
    ("done", ("all", "done"), "count"),
    ("mean JCT", ("all", "jct_s", "mean"), "time"),
    ("median JCT", ("all", "jct_s", "p50"), "time"),
    ("p95 JCT", ("all", "jct_s", "p95"), "time"),
    ("p99 JCT", ("all", "jct_s", "p99"), "time"),
    ("mean wait", ("all", "queue_s", "mean"), "time"),
    ("median wait", ("all", "queue_s", "p50"), "time"),
    ("p95 wait", ("all", "queue_s", "p95"), "time"),
    ("mean wait of training", ("train", "queue_s", "mean"), "time"),
    ("mean wait of inference", ("infer", "queue_s", "mean"), "time"),
    ("mean JCT of training", ("train", "jct_s", "mean"), "time"),
    ("mean start delay of inference", ("infer", "delay_s", "mean"), "time"),
    ("p95 start delay of inference", ("infer", "delay_s", "p95"), "time"),
    ("inference late", ("infer", "slo", "share"), "share"),
    ("makespan", ("makespan_s",), "time"),
    ("compute slices held", ("held",), "share"),
    ("of them busy", ("busy_of_held",), "share"),
    ("fragmentation", ("fragmentation",), "share"),
    ("instances created or destroyed", ("reconfigurations",), "count"),
    ("restarts per job", ("all", "restarts", "mean"), "number"),
    ("lost work", ("all", "lost_s"), "time"),
    ("pending jobs re-typed", ("actions", "retype"), "count"),
    ("slices lent to training", ("actions", "release"), "count"),
    ("fairness over users (Jain)", ("all", "jain"), "number"),
)
_COMPARED = frozenset({"jct_s", "queue_s", "delay_s", "jain"})
"""Figures that depend on which jobs have ended: several policies are compared on the jobs that ended under all."""


@click.command()
@click.argument("scenario", required=False, metavar="SCENARIO", type=click.Path(path_type=Path))
@click.option("--example", is_flag=True, help="Print a scenario with every key and stop.")
@click.option("--policies", is_flag=True, help="List the policies with their parameters and stop.")
@click.option(
    "--policy",
    "names",
    multiple=True,
    metavar="NAME",
    help="Run this policy instead of the scenario's own; repeat it to compare several. The scenario's parameters "
    "apply if its own is among them.",
)
@click.option(
    "--config",
    "config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The migbatch.toml for policy migbatch, instead of the scenario's.",
)
@click.option("--json", "as_json", is_flag=True, help="All figures as one JSON object.")
@click.option("--html", **_out, help="Write a report with plots (of the first seed).")
@click.option("--log", **_out, help="Write every event of the first seed as JSON lines.")
def simulate(
    scenario: Path | None,
    example: bool,
    policies: bool,
    names: tuple[str, ...],
    config: Path | None,
    as_json: bool,
    html: Path | None,
    log: Path | None,
) -> None:
    """Replay a trace on a simulated cluster under policies, and print the results.

    SCENARIO is a TOML file: GPUs, trace, speeds of jobs on slices, policy. By default
    migbatch decides: the jobs go to a simulated Slurm, and migbatchd's decision runs with a site's migbatch.toml.
    Traces may be a site's own history (`sacct -P`) or public ones. With several seeds the figures are means with their
    95 % intervals. Times and fairness of several policies are those of the jobs that ended under all of them.
    """
    from slurm_migbatch.lab.sim import scenario as scenarios

    if example:
        click.echo(scenarios.describe(), nl=False)
        return
    if policies:
        _list()
        return
    if scenario is None:
        raise click.UsageError("Missing argument 'SCENARIO'; 'migbatch simulate --example' prints an example")
    loaded = scenarios.load(scenario)
    chosen = [_with_policy(loaded, name, config) for name in dict.fromkeys(names or (loaded.policy,))]
    if config is not None and not any(hasattr(variant.params, "config") for variant in chosen):
        raise click.UsageError("--config is for policy migbatch, which is not run")
    if log is not None and len(chosen) > 1:
        raise click.UsageError("--log writes the events of one policy: name one --policy")
    _simulate(chosen, as_json, html, log)


def _list() -> None:
    from slurm_migbatch.lab.sim import registry

    rows = [
        (name, kind.about, ", ".join(field.name for field in dataclasses.fields(kind.params)))
        for name in registry.POLICIES
        for kind in (registry.find(name),)
    ]
    print_table(("POLICY", "DESCRIPTION", "PARAMETERS"), rows)


def _with_policy(scenario: Scenario, name: str, config: Path | None) -> Scenario:
    from slurm_migbatch.config.reader import unknown_name
    from slurm_migbatch.lab.sim import registry

    if name not in registry.POLICIES:
        raise click.UsageError(unknown_name("policy", name, registry.POLICIES))
    chosen = scenario.with_policy(name)
    if config is not None and hasattr(chosen.params, "config"):
        chosen = dataclasses.replace(chosen, params=dataclasses.replace(chosen.params, config=str(config)))
    return chosen


@dataclass(frozen=True)
class _PolicyFigures:
    """A policy's figures.

    Attributes:
        settings: the decision function and its configuration, if it is to be shown.
        first: the first seed's result; `compared`: the ids of its jobs that ended under every policy.
        merged: figures over all seeds; `by_seed`: of each seed.
        notices: notes for the user.
        cpu_s: processor seconds for each job, in all seeds together.
    """

    policy: str
    settings: Mapping[str, str]
    first: SimulationResult
    compared: Collection[int]
    merged: Mapping[str, Any]
    by_seed: Sequence[Mapping[str, Any]]
    notices: Sequence[str]
    cpu_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        fields = {"policy": self.policy, **self.settings, "notices": list(self.notices)}
        return {**fields, "figures": self.merged, "each": self.by_seed}


def _simulate(chosen: Sequence[Scenario], as_json: bool, html: Path | None, log: Path | None) -> None:
    from slurm_migbatch.lab.sim.log import write
    from slurm_migbatch.lab.sim.metrics import of_workload
    from slurm_migbatch.lab.sim.play import ScenarioData

    scenario = chosen[0]
    workload = ScenarioData(scenario)
    outcomes = _outcomes(chosen, workload, wanted=html is not None or log is not None)
    if log is not None:
        with log.open("w", encoding="utf-8") as file:
            write(outcomes[0].first.events, file)
    arriving = of_workload(workload.trace.jobs, scenario.geometry)
    trace_notices = [*workload.trace.notices, *_unlike(chosen, workload), *_apart(outcomes)]
    if html is not None:
        html.write_text(_page(scenario, [_load(arriving, scenario), *trace_notices], outcomes), encoding="utf-8")
    if as_json:
        head = {"trace": scenario.workload.trace, "workload": arriving, "seeds": list(scenario.seeds())}
        click.echo(
            json.dumps({**head, "notices": trace_notices, "policies": [outcome.to_dict() for outcome in outcomes]})
        )
        return
    click.echo(_load(arriving, scenario))
    for note in _notes(trace_notices, outcomes):
        click.echo(f"note: {note}")
    for outcome in outcomes:
        if outcome.settings:
            click.echo(_decider(outcome))
    print_table((f"on {scenario.workload.trace}", *(outcome.policy for outcome in outcomes)), _rows(outcomes))
    costs = ", ".join(f"{outcome.policy} {outcome.cpu_s:.2g} s" for outcome in outcomes)
    click.echo(f"processor time for each simulated job: {costs}")


def _load(arriving: Mapping[str, Any], scenario: Scenario) -> str:
    """Tell what arrives: a trace whose times were in another unit, or that is too large for the GPUs, shows here."""
    part, needed = scenario.cluster, arriving["gpus"]
    copies = f", each {scenario.workload.copies} times," if scenario.workload.copies > 1 else ""
    text = f"{arriving['jobs']} jobs{copies} arrive within {_shown(arriving['span_s'], 'time')}, "
    text += f"half of them are shorter than {_shown(arriving['work_s'], 'time')}"
    if needed is not None:
        needed *= scenario.workload.copies
        shown = f"{needed:.0f}" if needed >= 100 else f"{needed:.3g}"
        text += f"; on average they need {shown} of {part.nodes * part.gpus} GPUs in this time"
    if arriving["without_limit"]:
        text += f"; {arriving['without_limit']} have no time limit: their lengths stand for it, so backfill knows these"
    return text


def _unlike(chosen: Sequence[Scenario], workload: ScenarioData) -> Iterator[str]:
    """Tell where jobs of several GPUs are not placed by the same rule, and which do not get the GPUs they request."""
    whole = sum(job.profile is None for job in workload.trace.jobs)
    if whole and any(scenario.policy == "static" for scenario in chosen):
        yield (
            f"static: {whole} jobs request whole GPUs and get slices of its partition, on which they are slower; "
            "policy.layout sets another partition"
        )
    from slurm_migbatch.lab.sim.registry import ON_SLURM

    others = [scenario.policy for scenario in chosen if scenario.policy not in ON_SLURM]
    on_slurm = [scenario.policy for scenario in chosen if scenario.policy in ON_SLURM]
    gangs = sum(job.gpus > 1 for job in workload.trace.jobs)
    if gangs and others and on_slurm and chosen[0].cluster.nodes > 1:
        start = "start" if len(on_slurm) > 1 else "starts"
        yield (
            f"{gangs} jobs have several GPUs or slices: {' and '.join(on_slurm)} {start} them on one node or in equal "
            f"numbers on several, as Slurm does; {', '.join(others)} on any nodes, so they may start sooner there"
        )


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show progress and remaining time on stderr.

    Yields a function to call with the number of finished and of all parts; None if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = max(total, 1)
            bar.update(done - bar.pos)

        yield show


class _Playing:
    """Plays a policy, seed after seed."""

    def __init__(self, scenario: Scenario, workload: ScenarioData, *, wanted: bool) -> None:
        """`wanted`: the events of the first seed are."""
        from slurm_migbatch.lab.sim import registry

        self._scenario, self._workload, self._wanted = scenario, workload, wanted
        self._settings = registry.find(scenario.policy).settings(scenario.params)
        self._first: SimulationResult | None = None
        self._compared: Collection[int] = ()
        self._figures: list[dict[str, Any]] = []
        self._cpu_s = 0.0

    def play(self, seed: int) -> SimulationResult:
        """Return the result for a seed."""
        from slurm_migbatch.lab.sim.play import play

        began = time.process_time()
        log = self._wanted and self._first is None
        with progress_bar(f"{self._scenario.policy}, seed {seed}") as progress:
            result = play(self._scenario, self._workload, seed, log=log, progress=progress)
        self._cpu_s += time.process_time() - began
        return result

    def add(self, result: SimulationResult, compared: Collection[int], *, several: bool) -> None:
        """Add the figures of a seed, and of the jobs to compare if there are several policies."""
        from slurm_migbatch.lab.sim.metrics import summarise

        self._figures.append(summarise(result, compared if several else None))
        if self._first is None:
            self._first, self._compared = result, compared

    def figures(self) -> _PolicyFigures:
        """Return the figures over all seeds."""
        from slurm_migbatch.lab.sim.metrics import over_seeds

        figures, first = self._figures, self._first
        assert first is not None
        notices = [*first.notices, *_unfinished(figures[0], first.without_run)]
        cpu_s = self._cpu_s / max(1, sum(figure["all"]["jobs"] for figure in figures))
        merged = over_seeds(figures)
        return _PolicyFigures(
            self._scenario.policy, self._settings, first, self._compared, merged, figures, notices, cpu_s
        )


def _outcomes(chosen: Sequence[Scenario], workload: ScenarioData, *, wanted: bool) -> list[_PolicyFigures]:
    playing = [_Playing(variant, workload, wanted=wanted) for variant in chosen]
    for seed in chosen[0].seeds():
        results = [policy.play(seed) for policy in playing]
        ended = [{run.job.id for run in result.runs if run.ended is not None} for result in results]
        compared = frozenset.intersection(*map(frozenset, ended))
        for policy, result in zip(playing, results, strict=True):
            policy.add(result, compared, several=len(playing) > 1)
    return [policy.figures() for policy in playing]


def _apart(outcomes: Sequence[_PolicyFigures]) -> Iterator[str]:
    """Tell on how many jobs policies are compared if some ended under one of them only."""
    done = [outcome.by_seed[0]["all"]["done"] for outcome in outcomes]
    same = len(outcomes[0].compared)
    if max(done) > same:
        others = ", ".join(f"{outcome.policy} {count - same}" for outcome, count in zip(outcomes, done, strict=True))
        yield (
            f"completion times, waits, start delays and fairness are those of the {same} jobs that ended under every "
            f"policy; the others that ended: {others}; makespan and use of the GPUs include them"
        )


def _unfinished(figures: Mapping[str, Any], without_run: int) -> Iterator[str]:
    """Tell how many jobs have not ended; notices of the policy have told of `without_run` of them."""
    unfinished = figures["all"]["jobs"] - figures["all"]["done"]
    if not unfinished:
        return
    why = "they exceed the cluster's capacity, or the time was over"
    if without_run:
        why = f"{without_run} of them were refused or did not fit, as told before"
        if unfinished > without_run:
            why += "; the others exceed the cluster's capacity, or the time was over"
    yield f"{unfinished} jobs had not ended at the end: {why}"


def _notes(trace: Iterable[str], outcomes: Sequence[_PolicyFigures]) -> list[str]:
    return [*trace, *(f"{outcome.policy}: {note}" for outcome in outcomes for note in outcome.notices)]


def _decider(outcome: _PolicyFigures) -> str:
    """Return the decision function in one line."""
    settings = outcome.settings
    return (
        f"{outcome.policy}: {settings['decides']} with configuration {settings['configuration']} ({settings['file']})"
    )


def _rows(outcomes: Sequence[_PolicyFigures]) -> Iterator[tuple[str, ...]]:
    both = {"train", "infer"} <= outcomes[0].merged.keys()
    for name, path, unit in _FIGURES:
        if path[0] != "all" and path[1:2] == ("queue_s",) and not both:
            continue  # it would repeat those of all jobs
        cells = [_cell(outcome.merged, path, unit) for outcome in outcomes]
        if any(cells):
            yield name, *(cell or "-" for cell in cells)


def _cell(merged: Mapping[str, Any], path: Sequence[str], unit: str) -> str:
    value: Any = merged if _COMPARED.isdisjoint(path) else merged.get("compared", merged)
    for word in path:
        value = value.get(word) if isinstance(value, Mapping) else None
    if value is None:
        return ""
    text = _shown(value["mean"], unit)
    if value["low"] is not None and value["high"] > value["low"]:
        text += f"  ({_shown(value['low'], unit)} to {_shown(value['high'], unit)})"
    return text


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    if unit == "count":
        return f"{value:.0f}"
    if unit == "number":
        return f"{value:.2f}"
    for seconds, word in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * seconds:
            return f"{value / seconds:.1f} {word}"
    return f"{value:.3g} s"


def _page(scenario: Scenario, trace: Sequence[str], outcomes: Sequence[_PolicyFigures]) -> str:
    from slurm_migbatch.lab.sim import plots, registry
    from slurm_migbatch.lab.sim.cluster import SimulatedCluster
    from slurm_migbatch.lab.sim.page import page
    from slurm_migbatch.lab.sim.spans import levels, spans

    times: dict[str, list[float]] = {}
    for outcome in outcomes:
        which = "" if len(outcomes) == 1 else f" ({outcome.policy})"
        runs = [run for run in outcome.first.runs if len(outcomes) == 1 or run.job.id in outcome.compared]
        times[f"completion{which}"] = [run.ended - run.job.arrival for run in runs if run.ended is not None]
        times[f"wait{which}"] = [run.started - run.job.arrival for run in runs if run.started is not None]
    part = scenario.cluster
    cluster = SimulatedCluster.of(scenario.geometry, part.nodes * part.gpus, part.gpus)
    drawn = [plots.cdf(times, "Jobs that took at most this long")]
    for outcome in outcomes:
        which, result = "" if len(outcomes) == 1 else f": {outcome.policy}", outcome.first
        drawn.append(
            plots.use(levels(result.events, result.begin, result.end, result.slices), f"Use of the cluster{which}")
        )
        drawn.append(plots.timeline(spans(result.events, result.end), cluster, f"Layouts of the first GPUs{which}"))
    abouts = "; ".join(f"{outcome.policy}: {registry.find(outcome.policy).about}" for outcome in outcomes)
    return page(
        f"{', '.join(outcome.policy for outcome in outcomes)} on {scenario.workload.trace}",
        f"{part.nodes} nodes with {part.gpus} x {part.gpu}. {abouts}. {scenario.run.seeds} seeds.",
        ("figure", *(outcome.policy for outcome in outcomes)),
        list(_rows(outcomes)),
        drawn,
        scenario.path.read_text(encoding="utf-8"),
        [*_notes(trace, outcomes), *(_decider(outcome) for outcome in outcomes if outcome.settings)],
    )
