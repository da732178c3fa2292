"""`migbatch simulate`: what a policy would do to a cluster, on a trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_migbatch.cli.common import print_table

if TYPE_CHECKING:
    from slurm_migbatch.lab.sim.engine import Result
    from slurm_migbatch.lab.sim.scenario import Scenario

_out = click.Path(dir_okay=False, path_type=Path)
_FIGURES: Sequence[tuple[str, tuple[str, ...], str]] = (
    ("jobs", ("all", "jobs"), "count"),
    ("done", ("all", "done"), "count"),
    ("mean JCT", ("all", "jct_s", "mean"), "time"),
    ("median JCT", ("all", "jct_s", "p50"), "time"),
    ("p95 JCT", ("all", "jct_s", "p95"), "time"),
    ("p99 JCT", ("all", "jct_s", "p99"), "time"),
    ("mean wait", ("all", "queue_s", "mean"), "time"),
    ("p95 wait", ("all", "queue_s", "p95"), "time"),
    ("mean JCT of training", ("train", "jct_s", "mean"), "time"),
    ("mean start delay of inference", ("infer", "delay_s", "mean"), "time"),
    ("p95 start delay of inference", ("infer", "delay_s", "p95"), "time"),
    ("inference late", ("infer", "slo", "share"), "share"),
    ("makespan", ("makespan_s",), "time"),
    ("compute slices held", ("held",), "share"),
    ("of them busy", ("busy_of_held",), "share"),
    ("fragmentation", ("fragmentation",), "share"),
    ("instances made or removed", ("reconfigurations",), "count"),
    ("restarts per job", ("all", "restarts", "mean"), "number"),
    ("lost work", ("all", "lost_s"), "time"),
    ("fairness over users (Jain)", ("all", "jain"), "number"),
)


@click.command()
@click.argument("config", required=False, metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--example", is_flag=True, help="Print a configuration with every key and stop.")
@click.option("--policies", is_flag=True, help="List the policies and stop.")
@click.option("--json", "as_json", is_flag=True, help="All figures as one JSON object.")
@click.option("--html", metavar="FILE", type=_out, help="Write a report with plots (of the first seed).")
@click.option("--log", metavar="FILE", type=_out, help="Write every event of the first seed as JSON lines.")
def simulate(
    config: Path | None, example: bool, policies: bool, as_json: bool, html: Path | None, log: Path | None
) -> None:
    """Replay a trace on a cluster that does not exist, under a policy, and say how it went.

    CONFIG is a TOML file: which GPUs, which trace, how fast jobs are on slices, who decides. Traces may be a site's own
    history (`sacct -P`) or public ones. With several seeds the figures are means with their 95 % intervals.
    """
    from slurm_migbatch.lab.sim import registry, scenario

    if example:
        click.echo(scenario.describe(), nl=False)
        return
    if policies:
        print_table(("POLICY", "WHAT IT DOES"), [(name, registry.find(name).about) for name in registry.POLICIES])
        return
    if config is None:
        raise click.UsageError("Missing argument 'CONFIG'; 'migbatch simulate --example' prints one to begin with")
    _simulate(scenario.load(config), as_json, html, log)


def _simulate(scenario: Scenario, as_json: bool, html: Path | None, log: Path | None) -> None:
    from slurm_migbatch.lab.sim.log import write
    from slurm_migbatch.lab.sim.metrics import over_seeds, summarise
    from slurm_migbatch.lab.sim.play import Workload, play

    workload = Workload(scenario)
    figures: list[dict[str, Any]] = []
    first: Result | None = None
    for seed in scenario.seeds():
        wanted = first is None and (html is not None or log is not None)
        with _progress(f"seed {seed}") as progress:
            result = play(scenario, workload, seed, log=wanted, progress=progress)
        figures.append(summarise(result))
        first = first or result
    assert first is not None
    merged = over_seeds(figures)
    notices = [*workload.trace.notices, *_unfinished(figures[0])]
    if log is not None:
        with log.open("w", encoding="utf-8") as file:
            write(first.events, file)
    if html is not None:
        html.write_text(_page(scenario, first, merged, notices), encoding="utf-8")
    if as_json:
        seeds = list(scenario.seeds())
        head = {"policy": scenario.policy, "trace": scenario.workload.trace, "seeds": seeds, "notices": notices}
        click.echo(json.dumps({**head, "figures": merged, "each": figures}))
        return
    for note in notices:
        click.echo(f"note: {note}")
    print_table(("", f"{scenario.policy} on {scenario.workload.trace}"), _rows(merged))


def _unfinished(figures: Mapping[str, Any]) -> Iterator[str]:
    left = figures["all"]["jobs"] - figures["all"]["done"]
    if left:
        yield f"{left} jobs were not done at the end: they ask for more than there is, or the time was up"


def _rows(merged: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, path, unit in _FIGURES:
        value: Any = merged
        for word in path:
            value = value.get(word) if isinstance(value, Mapping) else None
        if value is not None:
            text = _shown(value["mean"], unit)
            if value["low"] is not None and value["high"] > value["low"]:
                text += f"  ({_shown(value['low'], unit)} to {_shown(value['high'], unit)})"
            yield name, text


def _shown(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    if unit == "count":
        return f"{value:.0f}"
    if unit == "number":
        return f"{value:.3f}"
    for seconds, word in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * seconds:
            return f"{value / seconds:.1f} {word}"
    return f"{value:.3g} s"


def _page(scenario: Scenario, first: Result, merged: Mapping[str, Any], notices: Sequence[str]) -> str:
    from slurm_migbatch.lab.sim import plots, registry
    from slurm_migbatch.lab.sim.cluster import Cluster
    from slurm_migbatch.lab.sim.page import page
    from slurm_migbatch.lab.sim.spans import levels, spans

    times = {"completion": [run.ended - run.job.arrival for run in first.runs if run.ended is not None]}
    times["wait"] = [run.started - run.job.arrival for run in first.runs if run.started is not None]
    part = scenario.cluster
    cluster = Cluster.of(scenario.geometry, part.nodes * part.gpus, part.gpus)
    drawn = [
        plots.cdf(times, "Jobs that took at most so long"),
        plots.use(levels(first.events, first.begin, first.end, first.slices), "Use of the cluster"),
        plots.timeline(spans(first.events, first.end), cluster, "Layouts of the first GPUs"),
    ]
    return page(
        f"{scenario.policy} on {scenario.workload.trace}",
        f"{part.nodes} nodes with {part.gpus} x {part.gpu}; policy: {registry.find(scenario.policy).about}; "
        f"{scenario.run.seeds} seeds.",
        ("figure", "value"),
        list(_rows(merged)),
        drawn,
        scenario.path.read_text(encoding="utf-8"),
        notices,
    )


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr where somebody looks at it."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = max(total, 1)
            bar.update(done - bar.pos)

        yield show
