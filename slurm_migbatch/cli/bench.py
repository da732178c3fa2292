"""`migbatch bench`: measures what migbatch costs on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.bench.bars import Bar
from slurm_migbatch.cli.common import HELP, Failure, print_table

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object, its bars under 'bars'.")


@click.group(context_settings=HELP)
def bench() -> None:
    """Measure what the filter and the hooks cost on this machine.

    Everything is a ratio within one run, so that other machines can be compared. The exit code is 0 where it could be
    measured, whether or not the bars are met.
    """


@bench.command()
@click.option("--rounds", type=click.IntRange(10, 100_000), default=300, show_default=True, help="Jobs per series.")
@json_option
def hooks(rounds: int, as_json: bool) -> None:
    """Prolog, TaskProlog and Epilog against the start of Python (as root)."""
    from slurm_migbatch.bench.hooks import HOOKS, measure

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
    from slurm_migbatch.bench.submit import measure

    result = measure(submissions, progress=lambda text: click.echo(f"{text} ...", err=True))
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
@json_option
def simulator(data: Path, scales: tuple[int, ...], as_json: bool) -> None:
    """How fast the simulator is: the Philly trace on 550 GPUs, and how its time grows with both."""
    from slurm_migbatch.bench.simulator import measure

    result = measure(data, scales or (1, 2, 4, 8), say=lambda text: click.echo(f"{text} ...", err=True))
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"reading {result['jobs']} jobs: {result['read_s']:.2f} s")
    for run in result["runs"]:
        click.echo(
            f"  {run['jobs']:>8} jobs on {run['gpus']:>5} GPUs: {run['cpu_s']:7.2f} s "
            f"({1e6 * run['cpu_s'] / run['jobs']:.1f} us a job; {run['wall_s']:.2f} s by the clock)"
        )
    print_bars(result)


@bench.command()
@click.option("--nodes", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Nodes.")
@click.option("--gpus", type=click.IntRange(1, 16), default=8, show_default=True, help="GPUs of each.")
@click.option("--pending", type=click.IntRange(0, 10**6), default=10_000, show_default=True, help="Jobs that wait.")
@json_option
def scale(nodes: int, gpus: int, pending: int, as_json: bool) -> None:
    """A round of the supply loop on a large site: plan and advertise, with Slurm answering at once."""
    from slurm_migbatch.bench.scale import measure

    result = measure(nodes=nodes, gpus=gpus, pending=pending)
    if as_json:
        click.echo(json.dumps(result))
        return
    for number, each in enumerate(result["rounds"], 1):
        parts = ", ".join(f"{part} {each[part]:.3f} s" for part in ("observe", "plan", "advertise"))
        click.echo(f"  round {number}: {each['total_s']:.3f} s ({parts}), {each['updates']:.0f} nodes updated")
    print_bars(result)


@bench.command()
@click.option("--runs", type=click.IntRange(min=1000), default=1_000_000, show_default=True, help="In the store.")
@json_option
def reports(runs: int, as_json: bool) -> None:
    """The whole of migacct, from start to end, on a store with a year of runs."""
    from slurm_migbatch.report.bench import measure

    result = measure(runs)
    if as_json:
        click.echo(json.dumps(result))
        return
    for query in result["queries"]:
        click.echo(f"  {query['name']:<40} {query['median_s']:.2f} s")
    print_bars(result)


@bench.command()
@click.option("--runs", type=click.IntRange(min=100), default=10_000, show_default=True, help="Finished runs.")
@click.option("--models", type=click.IntRange(100, 100_000), default=1000, show_default=True, help="Known models.")
@json_option
def learn(runs: int, models: int, as_json: bool) -> None:
    """A refit of the predictor on many runs, and predictions where many models are known."""
    from slurm_migbatch.bench.learn import measure

    result = measure(runs, models, progress=lambda text: click.echo(f"{text} ...", err=True))
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


_data_option = click.option(
    "--data",
    required=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of public data sets, or the one that is read.",
)


@bench.command()
@_data_option
@json_option
def instances(data: Path, as_json: bool) -> None:
    """GPUs for services with rates and latency limits: ParvaGPU's scenarios, with measured and predicted figures."""
    from slurm_migbatch.bench.instances import NotMeasurable, measure

    try:
        result = measure(data, say=_progress)
    except NotMeasurable as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    _print_notes(result)
    names = result["scenarios"]
    print_table(
        ("GPUs", *names, "total"),
        [(row["name"], *(f"{each:g}" for each in row["gpus"]), str(row["total"])) for row in result["rows"]],
    )
    click.echo(f"\npredicted, counted on at {result['confidence']:g}; settings in use are measured between rounds")
    lines = [
        (
            each["known"] if number == 0 else "",
            str(number),
            *(str(gpus) for gpus in at["gpus"]),
            str(at["total"]),
            str(at["broken"]),
            str(at["short"]),
        )
        for each in (*result["predicted"], *result["measured_share"])
        for number, at in enumerate(each["rounds"])
    ]
    print_table(("known", "round", *names, "total", "limits broken", "rates short"), lines)
    click.echo("\nfirst placement by confidence")
    lines = [
        (
            str(m["points"]),
            f"{m['confidence']:g}",
            str(m["total"]),
            str(m["broken"]),
            str(m["slo_broken"]),
            str(m["short"]),
        )
        for m in result["margins"]
    ]
    print_table(("points", "confidence", "GPUs", "limits broken", "SLOs broken", "rates short"), lines)
    print_bars(result)


@bench.command()
@_data_option
@click.option("--seeds", type=click.IntRange(2, 1000), default=10, show_default=True, help="Draws of the arrivals.")
@json_option
def fragmentation(data: Path, seeds: int, as_json: bool) -> None:
    """Jobs that find a place at once, by the rule that places them: pods of the openb trace on 100 GPUs."""
    from slurm_migbatch.bench.fragmentation import NotMeasurable, measure
    from slurm_migbatch.sim.traces.lines import TraceError

    try:
        result = measure(data, seeds, say=_progress)
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    _print_notes(result)
    classes = ("latency sensitive", "best effort")
    for title, population in result["populations"].items():
        click.echo(f"\n{title}: {population['pods']} pods, mean and 95 % interval of {seeds} draws")
        lines = [
            (
                f"{load['load']:g}",
                row["rule"],
                f"{row['accepted'][0]:.1%}",
                "{:+.1%} ({:+.1%} to {:+.1%})".format(*row["gain_jobs"]),
                "{:+.1%} ({:+.1%} to {:+.1%})".format(*row["gain_slices"]),
                f"{row['busy'][0]:.1%}",
                *(f"{row['by_class'][name]:.1%}" if name in row["by_class"] else "-" for name in classes),
            )
            for load in population["loads"]
            for row in load["rules"]
        ]
        gains = ("jobs against first fit", "slices against first fit")
        print_table(("load", "rule", "accepted", *gains, "busy", *classes), lines)
    print_bars(result)


@bench.command()
@_data_option
@click.option("--seeds", type=click.IntRange(2, 1000), default=10, show_default=True, help="Streams of arrivals.")
@json_option
def dispatch(data: Path, seeds: int, as_json: bool) -> None:
    """Work that 8 GPUs carry in time: cut and served our way, all alike, and as PARIS and ELSA would."""
    from slurm_migbatch.bench.dispatch import NotMeasurable, measure

    try:
        result = measure(data, seeds, say=_progress)
    except NotMeasurable as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    _print_notes(result)
    for found in result["results"]:
        click.echo(f"\nbatches of variance {found['variance']:g}: pieces of work a second, means of {seeds} streams")
        names = list(found["models"][0]["rates"])
        lines = [
            (
                row["model"],
                *(f"{row['rates'][name]:.0f}" for name in names),
                f"{row['bound']:.0f}",
                "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"]),
                f"{row['best_homogeneous']['cut']}, {row['best_homogeneous']['served']}",
            )
            for row in found["models"]
        ]
        print_table(("model", *names, "bound", "ours over best homogeneous", "which is"), lines)
    print_bars(result)


@bench.command()
@_data_option
@click.option("--mixes", type=click.IntRange(2, 1000), default=10, show_default=True, help="Of each number of models.")
@json_option
def dstack(data: Path, mixes: int, as_json: bool) -> None:
    """Work that one GPU does under deadlines, over that of a GPU that could be divided at will."""
    from slurm_migbatch.bench.dispatch import NotMeasurable
    from slurm_migbatch.bench.dstack import measure

    try:
        result = measure(data, mixes, say=_progress)
    except NotMeasurable as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    _print_notes(result)
    for found in result["results"]:
        click.echo(f"\nbatches {found['batches']}: load under all deadlines over the ideal's, means over mixes")
        lines = [
            (
                name,
                *(f"{each['load'][name][0]:.3f}" for each in found["sizes"].values()),
                "{:.3f} ({:.3f} to {:.3f})".format(*load),
                *(
                    f"{found['all']['filled'][name][figure]:.3f}" if name in found["all"]["filled"] else ""
                    for figure in ("utilisation", "busy", "jain")
                ),
            )
            for name, load in found["all"]["load"].items()
        ]
        sizes = [f"{size} models" for size in found["sizes"]]
        print_table(("scheduler", *sizes, "all", "utilisation", "busy", "Jain"), lines)
    print_bars(result)


@bench.command()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Folder.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=10, show_default=True, help="Workloads and requests.")
@json_option
def lending(data: Path, seeds: int, as_json: bool) -> None:
    """Training jobs on idle GPUs of inference, against training on its own half and other ways to lend (simulated)."""
    from slurm_migbatch.bench.lending import NotMeasurable, measure
    from slurm_migbatch.sim.traces.lines import TraceError

    try:
        result = measure(data, seeds, say=_progress)
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    _print_notes(result)
    for found in result["results"]:
        click.echo(f"\n{found['load']}: {found['requests']} requests of {found['apps']} applications, means over seeds")
        print_table(
            ("way", "mean JCT", "over half", "restarts", "most", "delay mean", "p95", "max", "called back"),
            [
                (
                    name,
                    f"{way['jct_s']:.0f} s",
                    f"{way['jct_ratio'][0]:.3f}",
                    f"{way['restarts']:.2f}",
                    f"{way['restarts_max']:.0f}",
                    *(f"{way[key]:.2f} s" for key in ("delay_mean_s", "delay_p95_s", "delay_max_s")),
                    f"{way['reclaimed']:.0f}",
                )
                for name, way in found["ways"].items()
            ],
        )
    print_bars(result)


@bench.command()
@_data_option
@click.option(
    "--seeds", type=click.IntRange(2, 1000), default=10, show_default=True, help="Draws of jobs and slowdowns."
)
@json_option
def sharing(data: Path, seeds: int, as_json: bool) -> None:
    """Completion times where two jobs may share a GPU: share or wait, our way, by the pair, always and never."""
    from slurm_migbatch.bench.sharing import BASELINES, NotMeasurable, measure
    from slurm_migbatch.sim.traces.lines import TraceError

    try:
        result = measure(data, seeds, say=_progress)
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    _print_notes(result)
    names = list(result["cells"][0]["jct_s"])
    lines = [
        (
            cell["jobs"],
            cell["slowdown"],
            str(cell["draws"]),
            *(f"{cell['jct_s'][name]:.0f}" for name in names),
            *(_ratio(*cell["ours_over"][name]) for name in BASELINES),
        )
        for cell in result["cells"]
    ]
    print_table(("jobs", "slowdown", "draws", *names, *(f"over {name}" for name in BASELINES)), lines)
    print_bars(result)


def _ratio(mean: float, low: float | None, high: float | None) -> str:
    return f"{mean:.3f}" if low is None or high is None else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _progress(text: str) -> None:
    click.echo(f"{text} ...", err=True)


def _print_notes(result: dict[str, Any]) -> None:
    for note in result["notes"]:
        click.echo(f"note: {note}")


def print_bars(result: dict[str, Any]) -> None:
    """The bars, for people."""
    for bar in result["bars"]:
        click.echo(Bar.from_dict(bar).line())
