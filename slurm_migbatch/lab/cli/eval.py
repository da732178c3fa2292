"""`migbatch eval`: score the predictor on held-out models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, Group, NumberRange, print_table
from slurm_migbatch.lab.cli.common import Result, cells, measurement, number_option, print_notes
from slurm_migbatch.values.figures import plural

_folder = click.Path(exists=True, path_type=Path)
data_option = click.option("--data", required=True, metavar="DIR", type=_folder, help="Directory of tables to score.")
leave_option = click.option(
    "--leave",
    type=click.Choice(["model", "family", "laboratory"]),
    default="model",
    show_default=True,
    help="What is held out.",
)


@click.group("eval", cls=Group, context_settings=HELP)
def eval_() -> None:
    """Score the predictor on measured tables, compared with simple rules that have the same data.

    Tables are common ones (`migbatch profile export`), or the directory of a laboratory that `migbatch profile import`
    knows. The exit code is 0 if the measurement was possible, whether or not the targets are met.
    """


@measurement(
    "slurm_migbatch.lab.evaluate.predictor:measure",
    data_option,
    click.option(
        "--train", metavar="DIR", type=_folder, help="Learn from these tables, instead of from the other models."
    ),
    number_option("--points", 0, 3, 3, "Largest number of profiled points."),
    click.option(
        "--level", type=NumberRange(0.1, 0.98), default=0.9, show_default=True, help="Confidence of the margin."
    ),
    leave_option,
    click.option("--quick", is_flag=True, help="Skip the rules that must be trained."),
    click.option("--blind", is_flag=True, help="Ignore public specifications of models."),
)
def predictor(result: Result) -> None:
    """Error, interval coverage and quality of choice for each model, held out of the training in turn."""
    print_notes(result)
    click.echo(f"rule for choosing points: {result['rule']}")
    for kind, figures in result["kinds"].items():
        for figure, label in (("time", "throughput"), ("memory", "memory")):
            if figures[figure]:
                click.echo(f"\n{kind}: error of {label} in %, and coverage of intervals")
                _print_errors(figures[figure])
                _print_listed(figures[figure])
        if figures["time"]:
            click.echo(f"\n{kind}: mean error of throughput in % by model")
            _print_models(figures["time"])
        if figures["rules"]:
            click.echo(f"\n{kind}: simple rules, and the predictor on cells held out from both")
            _print_rules(figures["rules"])
        if figures["choice"] and kind == "infer":
            click.echo(f"\n{kind}: slice and batch with the most throughput per slice under a latency limit")
            _print_choices(figures["choice"])
        if figures["relative"]:
            click.echo(f"\n{kind}: speed of a slice relative to the largest, mean absolute error")
            lines = [
                (row["method"], _k(row["k"]), *cells("{mae:.3f}|{mae_mean_of_models:.3f}|{points}", row))
                for row in figures["relative"]
            ]
            print_table(("method", "k", "pooled", "mean of models", "cells"), lines)
    click.echo()


@measurement(
    "slurm_migbatch.lab.evaluate.profiling:measure",
    data_option,
    click.option(
        "--level", type=NumberRange(0.1, 0.98), default=0.8, show_default=True, help="Confidence of the margin."
    ),
    leave_option,
)
def profiling(result: Result) -> None:
    """Cost of measuring fewer points: slices and exceeded limits of scenarios by the share of cells measured.

    Scenarios are ParvaGPU's if its SLO files are below DIR, else synthetic ones from each model's largest slice.
    """
    print_notes(result)
    lines = [
        (
            *cells("{measured}|{cells_share:.1%}|{way}|{slices:.0f}|{best:.0f}", total),
            "-" if total["extra"] is None else f"{total['extra']:+.1%}",
            *cells("{broken} of {services}|{short}", total),
        )
        for total in result["totals"]
    ]
    header = ("measured", "cells", "chosen by", "slices", "least", "extra", "limit broken", "short")
    print_table(header, lines)


@measurement("slurm_migbatch.lab.evaluate.batches:measure", data_option)
def batch(result: Result) -> None:
    """Share of a GPU and limits kept by the slice and batch of jobs with slo and without batch, compared with simple
    rules.
    """
    form = "{points}|{way}|{cases}|{share:.3f}|{kept:.1%}|{items_per_share:.3f}"
    lines = [cells(form, row) for row in result["rows"]]
    print_table(("points", "chosen by", "cases", "share of a GPU", "limits kept", "items/s per share over best"), lines)
    for row in result["no_choice"]:
        models = ", ".join(row["models"])
        click.echo(f"no choice with {row['points']} points: {plural(row['cases'], 'case')} of {models}")


@measurement("slurm_migbatch.lab.evaluate.services:evaluate", data_option)
def services(result: Result) -> None:
    """GPUs for services with rates and latency limits by three measured points per model, on ParvaGPU's scenarios.

    Points of the grid, or those that `migbatch profile run --points 3 --slo TIME` measures; also with predictions
    wrong by x0.5 to x2.
    """
    print_notes(result)
    names = result["scenarios"]
    print_table(
        ("GPUs", *names, "total"),
        [(row["name"], *(f"{gpus:g}" for gpus in row["gpus"]), str(row["total"])) for row in result["rows"]],
    )
    for title, ways in (("points", result["placed"]), ("predictions wrong", (*result["wrong"], *result["trusted"]))):
        click.echo()
        lines = [
            (
                *(way["name"] if number == 0 else "", str(number)),
                *map(str, at["gpus"]),
                *cells("{total}|{points:.1f}|{broken}|{short}", at),
            )
            for way in ways
            for number, at in enumerate(way["rounds"])
        ]
        print_table((title, "round", *names, "total", "measured", "limits broken", "rates short"), lines)
    click.echo("\nsynthetic services")
    form = "{half}|{name}|{round}|{off}|{measured}|{total}|{points:.1f}|{broken} of {services}|{short}"
    lines = [
        cells(form, {**way, **at, "round": number}) for way in result["made"] for number, at in enumerate(way["rounds"])
    ]
    header = ("models", "points", "round", "MIG off", "all measured", "GPUs", "measured")
    print_table((*header, "limits broken", "rates short"), lines)
    click.echo()


@measurement("slurm_migbatch.lab.evaluate.llm:measure", data_option)
def llm(result: Result) -> None:
    """Time to the first token and of each further one of language models, each held out of the fit in turn.

    Tables are common ones with rows of kind serve, on a GPU or a slice of one, as `migbatch profile run --server`
    writes them, or have the columns of aiconfigurator's silicon_sample.csv, for one whole GPU. Rows that cannot be
    scored (an unknown GPU or model, several GPUs) are skipped and counted. A plain roofline is printed for comparison.
    """
    print_notes(result)
    click.echo(f"{result['points']} points of {', '.join(result['models'])}; the fit on all of them:")
    click.echo("  " + " ".join(f"{name}={value}" for name, value in result["fit"].items()))
    click.echo("mean error in % of held-out models")
    lines = [
        (*name.split("/"), *cells("{mape:.1f}|{median:.1f}", score), *(f"{v:.1f}" for v in score["per_model"].values()))
        for name, score in result["scores"].items()
    ]
    print_table(("method", "figure", "mean", "median", *result["models"]), lines)
    for place, errors in result["places"].items():
        click.echo(f"on {place} ({errors['points']} points): ttft {errors['ttft']:.1f}, tpot {errors['tpot']:.1f}")
    for figure, levels in result["coverage"].items():
        shares = ", ".join(
            f"{level} held {interval['share']:.1%} (x{interval['width']:.2f})" for level, interval in levels.items()
        )
        click.echo(f"intervals of {figure}: {shares}")
    click.echo("mean error in % if a site has measured servers itself (wrong: its times are wrong by a factor)")
    learned = [(name, f"{of['ttft']:.1f}", f"{of['tpot']:.1f}") for name, of in result["learned"].items()]
    print_table(("measured", "ttft", "tpot"), learned)
    memory = result["memory"]
    click.echo(f"memory of Llama-3.1-8B: {memory['weights_gib']} GiB weights, {memory['runtime_gib']} GiB runtime")


@measurement("slurm_migbatch.lab.evaluate.torch:measure", data_option)
def torch(result: Result) -> None:
    """Time and memory of language models in PyTorch without an engine, each network held out of the fit in turn.

    Tables are common ones, as `migbatch profile run` writes them: of kind infer a pass over a batch, of kind train a
    step, on a GPU or a slice of one. The data sheet's rates without launches are printed for comparison.
    """
    counts = ", ".join(f"{count} of {kind}" for kind, count in result["points"].items())
    click.echo(f"{len(result['networks'])} networks, points: {counts}")
    for kind, values in result["fit"].items():
        fitted = " ".join(f"{name}={value:g} ({result['shipped'][kind][name]:g})" for name, value in values.items())
        click.echo(f"fit on all of {kind} (as shipped): {fitted}")
    click.echo("mean and median error in %")
    lines = [
        (*name.split("/"), f"{score['mean']:.1f}", f"{score['median']:.1f}") for name, score in result["scores"].items()
    ]
    print_table(("kind", "figure", "computed", "mean", "median"), lines)
    click.echo("mean error in % by network")
    ends = ("seconds/held out", "memory/as shipped")
    shown = {name: score for name, score in result["scores"].items() if name.endswith(ends)}
    rows = [
        (network, *(f"{score['per_network'].get(network, '-')}" for score in shown.values()))
        for network in result["networks"]
    ]
    print_table(("network", *(" ".join(name.split("/")[:2]) for name in shown)), rows)
    for name, levels in result["coverage"].items():
        shares = ", ".join(f"{level} held {share:.1%}" for level, share in levels.items())
        click.echo(f"intervals of {name.replace('/', ': ')}: {shares}")


@measurement("slurm_migbatch.lab.evaluate.pairs:measure", data_option)
def pairs(result: Result) -> None:
    """Slowdowns of two training jobs on one slice, from the SM activity of each alone.

    Tables name two jobs, the SMs that they shared, the SM activity of each alone and its slowdown next to the other.
    What is expected for one number of SMs is also shown with its only constant fitted on the others (held out).
    """
    switching = result["switching"]
    click.echo(f"{len(result['jobs'])} jobs; constant as shipped {switching['shipped']}, fitted {switching['fitted']}")
    click.echo("medians of pairs in time slices: work of both per time, relative to one alone (below 1: a loss)")
    lines = [
        (row["size"], str(row["pairs"]), *(f"{row[key]:.2f}" for key in ("activity", "slowdown", "work", "losing")))
        for row in result["sizes"]
    ]
    print_table(("shared", "pairs", "SM activity", "slowdown", "work", "share of losses"), lines)
    click.echo("mean error in % of the expected slowdown, and of the expected work")
    ways = tuple(result["sizes"][0]["errors"])
    errors = [
        (row["size"], *(f"{row['errors'][way]:.1f}, {row['work_errors'][way]:.1f}" for way in ways))
        for row in result["sizes"]
    ]
    print_table(("shared", *ways), errors)
    for row in result["sharing"]:
        medians = ", ".join(f"{way} {work:.2f}" for way, work in row["work"].items())
        click.echo(f"median work of {row['pairs']} pairs on {row['size']}: {medians}")


def _print_errors(series: list[dict[str, Any]]) -> None:
    levels = [cover["level"] for cover in series[0]["coverage"]]
    header = ["k", "mean", "median", "p90", "cells", "models", "all procs"]
    header += [f"{level:.0%} held" for level in levels] + [f"{level:.0%} width" for level in levels]
    lines = []
    for row in series:
        line = [
            *cells("{k}|{mape:.1f}|{median:.1f}|{p90:.1f}|{points}|{models}", row),
            f"{row.get('all_procs', row)['mape']:.1f}",
        ]
        line += [f"{cover['mean']:.1%}" for cover in row["coverage"]]
        line += [f"x{cover['width_factor']:.2f}" for cover in row["coverage"]]
        lines.append(line)
    print_table(header, lines)


def _print_listed(series: list[dict[str, Any]]) -> None:
    """Print models with public specifications separately from those without, if the table has both."""
    if not all(series[0][name].get("models") for name in ("listed", "unlisted")):
        return
    levels = [cover["level"] for cover in series[0]["coverage"]]
    header = ["k", "public facts", "mean", "median", "cells", "models", *(f"{level:.0%} held" for level in levels)]
    header += [f"{level:.0%} width" for level in levels]
    lines = []
    for name, label in (("listed", "known"), ("unlisted", "unknown")):
        for row in series:
            if not (scores := row[name]).get("models"):
                continue
            line = [str(row["k"]), label, *cells("{mape:.1f}|{median:.1f}|{points}|{models}", scores)]
            line += [f"{cover['mean']:.1%}" for cover in scores["coverage"]]
            lines.append(line + [f"x{cover['width_factor']:.2f}" for cover in scores["coverage"]])
    print_table(header, lines)


def _print_models(series: list[dict[str, Any]]) -> None:
    header = ["", *(f"k={row['k']}" for row in series)]
    lines = []
    for label, group in (("", "per_model"), ("all ", "per_family")):
        for name in series[0][group]:
            lines.append([label + name, *(f"{row[group][name]:.1f}" if name in row[group] else "-" for row in series)])
    print_table(header, lines)


def _print_rules(rules: list[dict[str, Any]]) -> None:
    lines = []
    for row in rules:
        same = row["same_points"]
        line = [row["method"], _k(row["k"]), *cells("{mape:.1f}|{median:.1f}|{points}", row)]
        if same:
            line += cells("{points}|{rule:.1f}|{predictor:.1f} (k={predictor_k})", same)
        lines.append(line + [""] * (8 - len(line)))
    print_table(("rule", "k", "mean", "median", "cells", "both", "rule", "predictor"), lines)


def _print_choices(choices: list[dict[str, Any]]) -> None:
    lines = [
        (
            *(row["method"], _k(row["k"]), "middle" if row["level"] is None else f"{row['level']:.0%}"),
            *cells("{broken:.1%}|{quality:.3f}|{not_offered:.1%}|{cases}", row),
        )
        for row in choices
    ]
    print_table(("method", "k", "margin", "broken", "of the best", "no choice", "cases"), lines)


def _k(points: int) -> str:
    return "curve" if points < 0 else str(points)


for _command in (predictor, profiling, batch, services, llm, torch, pairs):
    eval_.add_command(_command)
