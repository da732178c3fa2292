"""`migbatch bench`: what migbatch costs on this machine, and what its policies do on public data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, Failure, print_table, tell_stage
from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.cli.common import (
    data_option,
    json_option,
    plot_option,
    print_bars,
    print_notes,
    write_plots,
)
from slurm_migbatch.lab.cli.experiments import COMMANDS
from slurm_migbatch.lab.cli.live import live, rounds
from slurm_migbatch.lab.cli.studies import study


@click.group(context_settings=HELP)
def bench() -> None:
    """Measure what migbatch costs on this machine, and what its policies do on public data.

    Costs are ratios within one run, so that other machines can be compared. The exit code is 0 where it could be
    measured, whether or not the bars are met.
    """


for _experiment in (*COMMANDS, study, live, rounds):
    bench.add_command(_experiment)


@bench.command()
@click.option("--rounds", type=click.IntRange(10, 100_000), default=300, show_default=True, help="Jobs per series.")
@json_option
def hooks(rounds: int, as_json: bool) -> None:
    """Prolog, TaskProlog and Epilog against the start of Python (as root)."""
    from slurm_migbatch.lab.bench.hooks import HOOKS, measure

    result = measure(rounds)
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, series in (("with the agent", result["agent"]), ("in the hook's own process", result["in_process"])):
        start = series["times"]["python"]
        click.echo(f"{name}: python3 -I -S -c pass takes {start['median_ms']:.1f} ms (p99 {start['p99_ms']:.1f})")
        for hook in HOOKS:
            times, ratios = series["times"][hook], series["ratios"][hook]
            click.echo(
                f"  {hook:<12} {times['median_ms']:6.1f} ms = {ratios['median']:.2f} x, "
                f"p99 {times['p99_ms']:6.1f} ms = {ratios['p99']:.2f} x"
            )
    print_bars(result)


@bench.command()
@click.option("--submissions", type=click.IntRange(50, 100_000), default=1000, show_default=True, help="On each side.")
@json_option
def submit(submissions: int, as_json: bool) -> None:
    """Sbatch with and without the filter, its service and its table (as root, on two private clusters)."""
    from slurm_migbatch.lab.bench.submit import measure

    result = measure(submissions, progress=tell_stage)
    if as_json:
        click.echo(json.dumps(result))
        return
    sbatch, service, table = result["sbatch"], result["service"], result["table"]
    low, high = sbatch["block_ratio_interval_95"]
    click.echo(
        f"sbatch on Slurm {result['slurm']}: {sbatch['with']['median_ms']:.1f} ms with, "
        f"{sbatch['without']['median_ms']:.1f} ms without the filter; ratio {sbatch['ratio']:.3f} "
        f"(95 % interval of the blocks' mean {low:.3f} to {high:.3f}, {sbatch['submissions']} submissions each)"
    )
    advised = result["sbatch_with_cli_filter"]
    click.echo(f"with cli_filter too: {advised['with']['median_ms']:.1f} ms, ratio {advised['ratio']:.3f}")
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
    print_bars(result)


@bench.command()
@click.option("--data", required=True, metavar="DIR", type=click.Path(exists=True, path_type=Path), help="With Philly.")
@click.option("--scale", "scales", type=click.IntRange(1, 64), multiple=True, help="Copies (default 1, 2, 4 and 8).")
@click.option("--lending", is_flag=True, help="Under the full lending policy too (minutes; needs Pollux's data).")
@json_option
def simulator(data: Path, scales: tuple[int, ...], lending: bool, as_json: bool) -> None:
    """How fast the simulator is: the Philly trace on 550 GPUs, and how its time grows with both."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.bench.simulator import measure

    try:
        result = measure(data, scales or (1, 2, 4, 8), say=tell_stage, lending=lending)
    except NotMeasurable as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"reading {result['jobs']} jobs: {result['read_s']:.2f} s")
    for run in result["runs"]:
        click.echo(f"  {run['jobs']:>8} jobs on {run['gpus']:>5} GPUs: {_timed(run)}")
    if lent := result.get("lending"):
        print_notes(lent)
        for run in (lent["whole"], *lent["growth"]):
            click.echo(
                f"  lending, {run['days']:g} days: {run['jobs']:>6} jobs and {run['sessions']:>6} of inference on "
                f"{run['gpus']:>5} GPUs, {run['trained_on']:.0f} of them held by training: {_timed(run)}"
            )
        if lent["exponent"] is not None:
            click.echo(f"  lending: the time grows with an exponent of {lent['exponent']:.2f}")
    print_bars(result)


def _timed(run: dict[str, Any]) -> str:
    return (
        f"{run['cpu_s']:7.2f} s ({1e6 * run['cpu_s'] / run['jobs']:.1f} us a job; {run['wall_s']:.2f} s by the clock)"
    )


@bench.command()
@click.option("--nodes", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Nodes.")
@click.option("--gpus", type=click.IntRange(1, 16), default=8, show_default=True, help="GPUs of each.")
@click.option("--pending", type=click.IntRange(0, 10**6), default=10_000, show_default=True, help="Jobs that wait.")
@json_option
def scale(nodes: int, gpus: int, pending: int, as_json: bool) -> None:
    """A round of the supply loop on a large site: plan and advertise, with Slurm answering at once."""
    from slurm_migbatch.lab.bench.scale import measure

    result = measure(nodes=nodes, gpus=gpus, pending=pending)
    if as_json:
        click.echo(json.dumps(result))
        return
    for number, timings in enumerate(result["rounds"], 1):
        parts = ", ".join(f"{part} {timings[part]:.3f} s" for part in ("observe", "plan", "advertise"))
        click.echo(f"  round {number}: {timings['total_s']:.3f} s ({parts}), {timings['updates']:.0f} nodes updated")
    print_bars(result)


@bench.command()
@click.option("--runs", type=click.IntRange(min=1000), default=1_000_000, show_default=True, help="In the store.")
@json_option
def reports(runs: int, as_json: bool) -> None:
    """The whole of migacct, and a page of `migbatch report`, on a store with a year of runs."""
    from slurm_migbatch.lab.bench.reports import measure

    result = measure(runs)
    if as_json:
        click.echo(json.dumps(result))
        return
    for query in (*result["queries"], result["page"]):
        starts = f"{query['starts']:.1f} starts of the interpreter"
        click.echo(f"  {query['name']:<40} {query['median_s']:.2f} s, {query['lines']} lines, {starts}")
    print_bars(result)


@bench.command()
@click.option("--rounds", type=click.IntRange(5, 10_000), default=50, show_default=True, help="Looks at each slice.")
@json_option
def sampling(rounds: int, as_json: bool) -> None:
    """The agent's look at running jobs: memory and activity of each slice."""
    from slurm_migbatch.lab.bench.sampling import measure

    result = measure(rounds)
    if as_json:
        click.echo(json.dumps(result))
        return
    for name in ("memory", "activity"):
        click.echo(
            f"  {name} of a slice: median {result[name]['median_ms']:.3f} ms, p99 {result[name]['p99_ms']:.3f} ms"
        )
    click.echo(f"  at most {result['most_core_share']:.0%} of a core, however slow the driver is")
    print_bars(result)


@bench.command()
@click.option("--runs", type=click.IntRange(min=100), default=10_000, show_default=True, help="Finished runs.")
@click.option("--models", type=click.IntRange(100, 100_000), default=1000, show_default=True, help="Known models.")
@json_option
def learn(runs: int, models: int, as_json: bool) -> None:
    """A refit of the predictor on many runs, and predictions where many models are known."""
    from slurm_migbatch.lab.bench.learn import measure

    result = measure(runs, models, progress=tell_stage)
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, refit in result["refit"].items():
        click.echo(
            f"refit, {name}: {refit['own_s']:.1f} s of its own, {refit['wall_s']:.1f} s by the clock, "
            f"{refit['rows']} rows, {refit['outcome']}"
        )
    found = result["prediction"]
    click.echo(
        f"prediction of a cell that is new, {found['known']} models known: median {found['own']['median_ms']:.2f} ms, "
        f"p99 {found['own']['p99_ms']:.2f} ms (by the clock {found['wall']['median_ms']:.2f} and "
        f"{found['wall']['p99_ms']:.2f}); reading the model takes {found['loading_s']:.1f} s"
    )
    print_bars(result)


@bench.command("all")
@data_option
@click.option("--seeds", type=click.IntRange(2, 1000), help="Draws of whatever is drawn; default: of each its own.")
@click.option("--quick", is_flag=True, help="Two draws of each, and the simulator without the lending policy: minutes.")
@plot_option
@json_option
def every(data: Path, seeds: int | None, quick: bool, plot: Path | None, as_json: bool) -> None:
    """All experiments, the simulator's speed and the supply loop's: one table of bars, and the papers' headlines.

    Takes about forty minutes on two processors of its own, --quick ten. Ends with 0 where all could be
    measured, with 1 where not.
    """
    from slurm_migbatch.lab.experiments.every import measure

    result = measure(data, seeds, quick=quick, say=tell_stage)
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
    click.echo("\nwhat decides, and the digest of its configuration:")
    for row in result["experiments"]:
        for decider in row["decides"]:
            click.echo(f"  {row['name']}: {decider}")
    click.echo("\nheadlines of the papers, on their kind of workload:")
    for row in result["experiments"]:
        if row["error"]:
            verdict = f"FAILED: {row['error']}"
        elif row["headline"] is None:
            verdict = "no paper has a figure of this"
        else:
            verdict = Headline(**row["headline"]).line()
        click.echo(f"  {row['name']}{' (study)' if row['study'] else ''}: {verdict}")
    draws = ", ".join(f"{row['name']} {row['seeds']}" for row in result["experiments"] if row["seeds"] is not None)
    click.echo(f"\ndraws: {draws}; {result['seconds'] / 60:.1f} minutes in all")
