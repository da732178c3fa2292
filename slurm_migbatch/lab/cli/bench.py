"""`migbatch bench`: measure migbatch's cost on this machine, and its policies on public data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, Group, print_table, steps
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.cli.common import (
    Result,
    cells,
    data_option,
    json_option,
    measurement,
    number_option,
    plot_option,
    write_plots,
)
from slurm_migbatch.lab.cli.experiments import COMMANDS
from slurm_migbatch.lab.cli.live import live, nodes, rounds
from slurm_migbatch.lab.cli.studies import study

_SIDES = {
    "with": "with the filter",
    "asking": "with one answer",
    "empty": "with empty scripts",
    "without": "without",
}


@click.group(cls=Group, context_settings=HELP)
def bench() -> None:
    """Measure migbatch's cost on this machine, and its policies on public data.

    Costs are ratios within one run, so that other machines can be compared. The exit code is 0 if the measurement was
    possible, whether or not the targets are met.
    """


@measurement(
    "slurm_migbatch.lab.bench.hooks:measure",
    number_option("--rounds", 10, 100_000, 300, "Jobs per series."),
)
def hooks(result: Result) -> None:
    """Time Prolog, TaskProlog and Epilog relative to the start of Python (as root)."""
    for name, series in (("with the agent", result["agent"]), ("in the hook's own process", result["in_process"])):
        start = series["times"]["python"]
        click.echo(f"{name}: python3 -I -S -c pass takes {start['median_ms']:.1f} ms (p99 {start['p99_ms']:.1f})")
        for hook, ratios in series["ratios"].items():
            times = series["times"][hook]
            click.echo(
                f"  {hook:<12} {times['median_ms']:6.1f} ms = {ratios['median']:.2f} x, "
                f"p99 {times['p99_ms']:6.1f} ms = {ratios['p99']:.2f} x"
            )


def _print_sbatch(name: str, kind: dict[str, Any]) -> None:
    click.echo(f"  {name}, {kind['with']['n']} submissions each:")
    overs = {"with": "filter_over_none", "asking": "asking_over_none", "empty": "empty_over_none"}
    for side in _SIDES:
        over = overs.get(side)
        times = kind[side]
        text = f"{times['median_ms']:6.1f} ms, {times['slurmctld_us']:5d} us of them in slurmctld"
        if over:
            found = kind[over]
            low, high = found["interval_95"]
            text += (
                f"; ratio {found['ratio']:.3f} (95 % interval of the blocks' mean {low:.3f} to {high:.3f}; "
                f"of total times {found['total']:.3f}; of the fastest tenth {found['undisturbed']:.3f})"
            )
        click.echo(f"    {_SIDES[side]:<20} {text}")
    own = kind["filter_over_empty"]
    click.echo(
        f"    the filter over empty scripts: ratio {own['ratio']:.3f} (of the fastest tenth {own['undisturbed']:.3f})"
    )


@measurement(
    "slurm_migbatch.lab.bench.submit:measure",
    number_option("--submissions", 50, 100_000, 1000, "On each side."),
)
def submit(result: Result) -> None:
    """Time sbatch with and without the filter, its service and its table (as root, on four private clusters)."""
    service, table, crowd = result["service"], result["table"], result["crowd"]
    click.echo(f"sbatch on Slurm {result['slurm']}")
    for name, kind in result["sbatch"].items():
        _print_sbatch(name, kind)
    for name, kind in result["sbatch_with_cli_filter"].items():
        _print_sbatch(f"{name}, with cli_filter too", kind)
    click.echo(
        f"{crowd['users']} users at once: {crowd['submissions']} submissions in {crowd['seconds']:.0f} s, "
        f"{crowd['sbatch']['median_ms']:.1f} ms each (p99 {crowd['sbatch']['p99_ms']:.1f}); "
        f"{crowd['by_table']} decided by the compiled table"
    )
    click.echo(f"service: {service['median_ms']:.2f} ms, p99 {service['p99_ms']:.2f} ms for one request")
    click.echo(
        f"table: {table['lookup_us']['median']:.1f} us for a look-up, "
        f"{table['whole_answer_us']['median']:.1f} us for a whole answer"
    )
    many = result["many_models"]
    click.echo(
        f"with {many['models']} models: {many['decision']['median_ms']:.2f} ms, p99 {many['decision']['p99_ms']:.2f} "
        f"ms for one decision; table of {many['buckets']} buckets compiled in {many['compile_s']:.1f} s, "
        f"{many['table']['table_bytes'] / 1e6:.1f} MB, opened in {many['table']['open_ms']:.2f} ms, "
        f"{many['table']['lookup_us']['median']:.1f} us for a look-up"
    )


@measurement(
    "slurm_migbatch.lab.bench.simulator:measure",
    click.option(
        "--data", required=True, metavar="DIR", type=click.Path(exists=True, path_type=Path), help="With Philly."
    ),
    click.option(
        "--scale",
        "scales",
        type=click.IntRange(1, 64),
        multiple=True,
        help="Numbers of copies (default 1, 2, 4 and 8).",
    ),
)
def simulator(result: Result) -> None:
    """Time the simulator: the Philly trace on 550 GPUs, and how its time grows with both."""
    click.echo(f"reading {result['jobs']} jobs: {result['read_s']:.2f} s")
    for run in result["runs"]:
        click.echo(
            f"  {run['jobs']:>8} jobs on {run['gpus']:>5} GPUs: {run['cpu_s']:7.2f} s "
            f"({1e6 * run['cpu_s'] / run['jobs']:.1f} us a job; {run['wall_s']:.2f} s elapsed)"
        )


@measurement(
    "slurm_migbatch.lab.bench.scale:measure",
    click.option(
        "--nodes",
        type=click.IntRange(1, 100_000),
        multiple=True,
        help="Nodes of a site; repeatable. Default: 125, 250, 500, 1000 and 12500.",
    ),
    number_option("--gpus", 1, 16, 8, "GPUs per node."),
    click.option("--pending", type=click.IntRange(0, 10**6), help="Pending jobs. Default: 10 per node."),
    number_option("--rounds", 1, 1000, 30, "Later rounds."),
)
def scale(result: Result) -> None:
    """Time rounds of migbatchd on large, busy sites, with Slurm and nodes answering at once."""
    click.echo(f"decided by {result['decides']}, configuration {result['configuration']}; seconds of processor time")
    lines = [
        (
            *(*cells("{gpus}|{running}|{pending}|{first_s:.2f}", site), f"{max(site['rush_s'], default=0.0):.2f}"),
            *cells("{later_s:.3f}|{p99_s:.3f}|{dispatch_s:.3f}|{recording_s:.3f}|{peak_mib:.0f}", site),
        )
        for site in result["sites"]
    ]
    heads = ("GPUs", "running", "pending", "first", "rush", "later", "p99", "dispatch", "recording", "peak MiB")
    print_table(heads, lines)
    for site in result["sites"]:
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in site["parts"].items())
        click.echo(f"  {site['gpus']} GPUs, later: {parts}; {site['changes']:.1f} nodes updated")
        click.echo(
            f"  {site['gpus']} GPUs, before a round: reading the queue {site['first_reading_s']:.2f} first, "
            f"{site['reading_s']:.3f} later, checks of all jobs {site['checks_s']:.3f}"
        )
    if result["exponent"] is not None:
        click.echo(f"  the time of later rounds grows with an exponent of {result['exponent']:.2f}")


@measurement(
    "slurm_migbatch.lab.bench.reports:measure",
    number_option("--runs", 1000, None, 1_000_000, "Number of runs in the store."),
    number_option("--repeats", 1, 100, 5, "Runs of each command."),
)
def reports(result: Result) -> None:
    """Time migacct, `migbatch usage`, waste, top and report on a store with a year of runs."""
    for query in (*result["queries"], *(result[name] for name in ("usage", "waste", "top", "page"))):
        starts = f"{query['starts']:.1f} starts of the interpreter ({1000 * result['start_s']:.0f} ms)"
        click.echo(f"  {query['name']:<40} {query['median_s']:.2f} s, {query['lines']} lines, {starts}")
    if result["drawn_s"] is None:
        click.echo("  there is no Chromium here: the page was generated but not drawn")
    else:
        click.echo(f"  the page drawn by Chromium: {result['drawn_s']:.2f} s")


@measurement(
    "slurm_migbatch.lab.bench.sampling:measure",
    number_option("--rounds", 5, 10_000, 50, "Samples of each slice."),
)
def sampling(result: Result) -> None:
    """Time the agent's sampling of running jobs: memory and activity of each slice."""
    for name in ("memory", "activity"):
        click.echo(
            f"  {name} of a slice: median {result[name]['median_ms']:.3f} ms, p99 {result[name]['p99_ms']:.3f} ms"
        )
    click.echo(f"  at most {result['most_core_share']:.0%} of a core, however slow the driver is")


@measurement(
    "slurm_migbatch.lab.bench.learn:measure",
    number_option("--runs", 100, None, 10_000, "Finished runs."),
    number_option("--models", 100, 100_000, 1000, "Known models."),
)
def learn(result: Result) -> None:
    """Time a refit of the predictor on many runs, and predictions with many known models."""
    for name, refit in result["refit"].items():
        click.echo(
            f"refit, {name}: {refit['own_s']:.1f} s of processor time, {refit['wall_s']:.1f} s elapsed, "
            f"{refit['rows']} rows, {refit['outcome']}"
        )
    prediction = result["prediction"]
    click.echo(
        f"prediction of a new cell, {prediction['known']} models known: "
        f"median {prediction['own']['median_ms']:.2f} ms, p99 {prediction['own']['p99_ms']:.2f} ms "
        f"(elapsed {prediction['wall']['median_ms']:.2f} and "
        f"{prediction['wall']['p99_ms']:.2f}); reading the model takes {prediction['loading_s']:.1f} s"
    )


@bench.command("all")
@data_option
@click.option("--seeds", type=click.IntRange(2, 1000), help="Number of random draws; default: that of each experiment.")
@click.option("--quick", is_flag=True, help="Two draws of each, no larger clusters, few submissions.")
@click.option(
    "--studies",
    is_flag=True,
    help="Also the studies of papers' ideas, which migbatchd does not use and have no targets.",
)
@click.option(
    "--wrong", is_flag=True, help="Also lending and fragmentation with wrong predictions, two draws of each by default."
)
@plot_option
@json_option
def every(
    data: Path, seeds: int | None, quick: bool, studies: bool, wrong: bool, plot: Path | None, as_json: bool
) -> None:
    """Run all experiments, and measure the speed of simulator, supply and submission (as root, with Slurm).

    Prints one table of targets, and the papers' claims. The last line says how long it took. The exit code is 0 if all
    could be measured, else 1.
    """
    from slurm_migbatch.lab.experiments.every import Extra, measure

    requested: dict[Extra, bool] = {"studies": studies, "wrong": wrong}
    also = [extra for extra, wanted in requested.items() if wanted]
    with steps() as progress:
        result = measure(data, seeds, quick=quick, also=also, progress=progress)
    if plot is not None:
        for row in result["experiments"]:
            if not row["error"]:
                write_plots(row["name"], row["result"], plot)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print_all(result)
    if result["failed"]:
        raise Failure(f"could not be measured: {', '.join(result['failed'])}")


def _print_all(result: dict[str, Any]) -> None:
    from slurm_migbatch.lab.experiments.headlines import Headline

    lines: list[tuple[str, ...]] = []
    for row in result["experiments"]:
        bars = [Bar.from_dict(bar) for bar in row["result"].get("bars", ())]
        for number, bar in enumerate(bars):
            first = (row["name"], f"{row['seconds']:.0f}") if number == 0 else ("", "")
            verdict = "ok" if bar.ok else "MISSED"
            lines.append((first[0], bar.name, f"{bar.value:.4g}", f"{bar.sign} {bar.target:g}", verdict, first[1]))
        if row["study"] and not row["error"]:
            lines.append((row["name"], "a study: migbatchd does not run it", "", "", "-", f"{row['seconds']:.0f}"))
        if row["error"]:
            lines.append((row["name"], "could not be measured", "", "", "FAILED", f"{row['seconds']:.0f}"))
    print_table(("EXPERIMENT", "BAR", "VALUE", "TARGET", "OK", "SECONDS"), lines)
    click.echo("\ndecision function, and the digest of its configuration:")
    for row in result["experiments"]:
        for decider in row["decides"]:
            click.echo(f"  {row['name']}: {decider}")
    click.echo("\nmain claims of the papers, on their kind of workload:")
    for row in result["experiments"]:
        if row["error"]:
            verdict = f"FAILED: {row['error']}"
        elif row["headline"] is None:
            verdict = "no paper has a figure for this"
        else:
            verdict = Headline(**row["headline"]).line()
        click.echo(f"  {row['name']}{' (study)' if row['study'] else ''}: {verdict}")
    draws = ", ".join(f"{row['name']} {row['seeds']}" for row in result["experiments"] if row["seeds"] is not None)
    click.echo(f"\ndraws: {draws}; {result['seconds'] / 60:.1f} minutes in all")


for _command in (*COMMANDS, study, live, nodes, rounds, hooks, submit, simulator, scale, reports, sampling, learn):
    bench.add_command(_command)
