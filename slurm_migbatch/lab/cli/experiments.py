"""The experiments of `migbatch bench`: what the policies do on public data, beside what others would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from slurm_migbatch.cli.common import Failure, print_table
from slurm_migbatch.lab.cli.common import (
    data_option,
    hand_over,
    json_option,
    plot_option,
    print_bars,
    print_notes,
    progress,
)


@click.command()
@data_option
@plot_option
@json_option
def instances(data: Path, plot: Path | None, as_json: bool) -> None:
    """GPUs for services with rates and latency limits: ParvaGPU's scenarios, with measured and predicted figures."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.experiments.instances import measure

    try:
        result = measure(data, say=progress)
    except NotMeasurable as error:
        raise Failure(str(error)) from None
    if hand_over("instances", result, as_json, plot):
        return
    print_notes(result)
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


@click.command()
@data_option
@click.option("--seeds", type=click.IntRange(2, 1000), default=10, show_default=True, help="Draws of the arrivals.")
@plot_option
@json_option
def fragmentation(data: Path, seeds: int, plot: Path | None, as_json: bool) -> None:
    """Jobs that find a place at once, by the rule that places them: pods of the openb trace on 100 GPUs."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.experiments.fragmentation import measure
    from slurm_migbatch.workload.csvlines import TraceError

    try:
        result = measure(data, seeds, say=progress)
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None
    if hand_over("fragmentation", result, as_json, plot):
        return
    print_notes(result)
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


@click.command()
@data_option
@click.option("--seeds", type=click.IntRange(2, 1000), default=10, show_default=True, help="Streams of arrivals.")
@plot_option
@json_option
def dispatch(data: Path, seeds: int, plot: Path | None, as_json: bool) -> None:
    """Work that 8 GPUs carry in time: cut and served our way, all alike, and as PARIS and ELSA would."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.experiments.dispatch import measure

    try:
        result = measure(data, seeds, say=progress)
    except NotMeasurable as error:
        raise Failure(str(error)) from None
    if hand_over("dispatch", result, as_json, plot):
        return
    print_notes(result)
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


@click.command()
@data_option
@click.option("--mixes", type=click.IntRange(2, 1000), default=10, show_default=True, help="Of each number of models.")
@plot_option
@json_option
def dstack(data: Path, mixes: int, plot: Path | None, as_json: bool) -> None:
    """Work that one GPU does under deadlines, over that of a GPU that could be divided at will."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.experiments.dstack import measure

    try:
        result = measure(data, mixes, say=progress)
    except NotMeasurable as error:
        raise Failure(str(error)) from None
    if hand_over("dstack", result, as_json, plot):
        return
    print_notes(result)
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


@click.command()
@data_option
@click.option("--seeds", type=click.IntRange(1, 1000), default=10, show_default=True, help="Workloads and requests.")
@click.option("--study/--no-study", default=True, show_default=True, help="Measure the study on whole GPUs, too.")
@plot_option
@json_option
def lending(data: Path, seeds: int, study: bool, plot: Path | None, as_json: bool) -> None:
    """Training jobs on idle GPUs of inference, against training on its own half and other ways to lend (simulated)."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.experiments.lending import measure
    from slurm_migbatch.workload.csvlines import TraceError

    try:
        result = measure(data, seeds, study=study, say=progress)
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None
    if hand_over("lending", result, as_json, plot):
        return
    print_notes(result)
    for found in result["results"]:
        what = "study" if found.get("study") else f"{found['decides']}, configuration {found['configuration']}"
        requests = f"{found['ways']['ours']['requests']:.0f}" if not found.get("study") else found["requests"]
        click.echo(
            f"\n{found['load']} ({what}): {requests} requests of {found['apps']} applications, "
            f"means over {found['seeds']} seeds"
        )
        print_table(
            (
                "way",
                "mean JCT",
                "over half (95 %)",
                "restarts (95 %)",
                "most",
                "delay mean",
                "p95",
                "max",
                "called back",
            ),
            [
                (
                    name,
                    f"{way['jct_s']:.0f} s",
                    _with_interval(way["jct_ratio"], 3),
                    _with_interval(way["restarts_interval"], 2),
                    f"{way['restarts_max']:.0f}",
                    *(f"{way[key]:.2f} s" for key in ("delay_mean_s", "delay_p95_s", "delay_max_s")),
                    f"{way['reclaimed']:.0f}",
                )
                for name, way in found["ways"].items()
            ],
        )
    print_bars(result)


def _with_interval(values: Sequence[float], digits: int) -> str:
    """Return a mean, with its interval where there are several seeds."""
    text = f"{values[0]:.{digits}f}"
    return text if len(values) < 3 else f"{text} ({values[1]:.{digits}f} to {values[2]:.{digits}f})"


@click.command()
@data_option
@click.option(
    "--seeds", type=click.IntRange(2, 1000), default=10, show_default=True, help="Draws of jobs and slowdowns."
)
@plot_option
@json_option
def sharing(data: Path, seeds: int, plot: Path | None, as_json: bool) -> None:
    """Completion times where two jobs may share a GPU: share or wait, our way, by the pair, always and never."""
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.experiments.sharing import BASELINES, measure
    from slurm_migbatch.workload.csvlines import TraceError

    try:
        result = measure(data, seeds, say=progress)
    except (NotMeasurable, TraceError) as error:
        raise Failure(str(error)) from None
    if hand_over("sharing", result, as_json, plot):
        return
    print_notes(result)
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


COMMANDS = (instances, fragmentation, dispatch, dstack, sharing, lending)
