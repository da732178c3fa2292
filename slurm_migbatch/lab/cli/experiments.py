"""The experiments of `migbatch bench`: migbatchd's decisions on public data, compared with other rules."""

from __future__ import annotations

import os

import click

from slurm_migbatch.cli.common import print_table
from slurm_migbatch.lab.cli.common import (
    Result,
    WrongVariant,
    cells,
    draws_option,
    experiment,
    print_lending,
    print_notes,
    with_interval,
)

processes_option = click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    default=lambda: os.cpu_count() or 1,
    show_default="one per processor",
    help="Simulations at once.",
)


def _lending_wrong(result: Result) -> None:
    print_notes(result)
    for entry in result["results"]:
        click.echo(f"\n{entry['load']} ({_decided(result)}), means over {entry['seeds']} seeds")
        lines = [
            (
                *(name, f"{row['jct_s']:.0f} s", with_interval(row["over_half"], 3)),
                *cells("{over_half_worst:.3f}|{restarts:.2f}|{delay_p95_s:.2f} s", row),
                f"{row['delay_p95_s'] - row['half_delay_p95_s']:+.2f} s",
                f"{row['reclaimed']:.0f}",
            )
            for name, row in entry["rows"].items()
        ]
        columns = ("mean JCT", "over half (95 %)", "worst seed", "restarts", "delay p95", "beyond half", "called back")
        print_table(("wrong", *columns), lines)


@experiment(
    "slurm_migbatch.lab.experiments.lending:measure",
    draws_option("Workloads and requests.", least=1),
    processes_option,
    wrong=WrongVariant(
        "slurm_migbatch.lab.experiments.lendwrong:measure",
        _lending_wrong,
        "Only with wrong forecasts, speeds, restart times and time limits.",
    ),
)
def lending(result: Result) -> None:
    """Lend inference's idle slices to training jobs, compared with no lending, other rules and a bound (simulated)."""
    print_notes(result)
    for entry in result["results"]:
        click.echo(
            f"\n{entry['load']} ({_decided(entry)}): {entry['ways']['ours']['requests']:.0f} requests of "
            f"{entry['apps']} applications, means over {entry['seeds']} seeds"
        )
        print_lending(entry)
        bound = entry["bound"]
        click.echo(
            f"no schedule is below {bound['jct_ratio']:.3f} of half; a whole GPU for each job at once would be "
            f"{bound['alone_ratio']:.3f}"
        )


def _fragmentation_wrong(result: Result) -> None:
    print_notes(result)
    for title, population in result["populations"].items():
        click.echo(f"\n{title} ({_decided(population)}), means of {result['seeds']} draws")
        waits, accepted = [], []
        for load in population["loads"]:
            for name, row in load["rows"].items():
                over = [with_interval(values, 3) for values in row["over_first_fit"].values()]
                if load["queued"]:
                    own = cells("{wait_s:.0f} s|{jct_s:.0f} s|{restarts:.2f}", row)
                    waits.append((f"{load['load']:g}", name, *own, *over, f"{row['worst']:.3f}"))
                else:
                    taken = cells("{jobs:.1%}|{slices:.1%}", row)
                    accepted.append((f"{load['load']:g}", name, *taken, *over, f"{row['worst']:.3f}"))
        columns = ("wait over first fit", "JCT", "worst draw's wait")
        print_table(("load", "wrong", "mean wait", "mean JCT", "restarts", *columns), waits)
        columns = ("jobs over first fit", "slices", "worst draw's slices")
        print_table(("load", "wrong", "jobs accepted", "slices accepted", *columns), accepted)


@experiment(
    "slurm_migbatch.lab.experiments.fragmentation:measure",
    draws_option("Draws of the arrivals."),
    processes_option,
    wrong=WrongVariant(
        "slurm_migbatch.lab.experiments.fragwrong:measure",
        _fragmentation_wrong,
        "Only with wrong time limits and wrong learned run times.",
    ),
)
def fragmentation(result: Result) -> None:
    """Waits and accepted slices by migbatchd's planner on the simulated Slurm: pods of the openb trace on 16 GPUs."""
    print_notes(result)
    for title, population in result["populations"].items():
        click.echo(f"\n{title} ({_decided(population)}): {population['jobs']} pods, means of {result['seeds']} draws")
        waits: list[tuple[str, ...]] = []
        accepted: list[tuple[str, ...]] = []
        waited = (
            "{wait_s:.0f} s|{wait_p95_s:.0f} s|{wait_max_s:.0f} s|{wait_whole_s:.0f} s|{jct_s:.0f} s|{restarts:.2f}"
        )
        for load in population["loads"]:
            table, form = (waits, waited) if load["queued"] else (accepted, "{jobs:.1%}|{slices:.1%}")
            for way, row in load["ways"].items():
                over = (with_interval(values, 3) for values in row["over_first_fit"].values())
                table.append((f"{load['load']:g}", way, *cells(form, row), *over))
        columns = ("mean wait", "p95", "longest", "of whole GPUs", "mean JCT", "restarts")
        print_table(("load", "way", *columns, "wait over first fit", "JCT"), waits)
        print_table(("load", "way", "jobs accepted", "slices accepted", "jobs over first fit", "slices"), accepted)


@experiment("slurm_migbatch.lab.experiments.dispatch:measure", draws_option("Streams of arrivals."))
def dispatch(result: Result) -> None:
    """Completion times of mig:auto jobs on 8 GPUs: migbatchd on the simulated Slurm, compared with the best static
    layouts.
    """
    print_notes(result)
    for entry in result["results"]:
        click.echo(f"\nload {entry['load']:g} ({_decided(entry)}), means of {result['seeds']} streams")
        for cut, name in entry["cuts"].items():
            click.echo(f"{cut}: {name}")
        lines = [
            (
                *(name, *cells("{jct_s:.0f} s|{p95_s:.0f} s", row)),
                *(with_interval(row["over_equal"], 3), with_interval(row["over_static"], 3)),
            )
            for name, row in entry["ways"].items()
        ]
        print_table(("way", "mean JCT", "p95", "over best equal slices", "over best static cut"), lines)


@experiment("slurm_migbatch.lab.experiments.sharing:measure", draws_option("Draws of jobs."), processes_option)
def sharing(result: Result) -> None:
    """Completion times when two training jobs may share a slice: by migbatchd's decision, always and never."""
    from slurm_migbatch.lab.experiments.sharing import BASES, ORDERS, WAYS

    click.echo(_decided(result))
    print_notes(result)
    for order in ORDERS:
        names = [f"{order}, {way}" for way in WAYS]
        lines = [
            (
                cell["cell"],
                *(f"{cell['ways'][name]['jct_s']:.0f}" for name in names),
                *(with_interval(cell["over"][f"{order}, pairs over {base}"], 3) for base in BASES),
                f"{cell['ways'][f'{order}, pairs']['late']:.1f}",
            )
            for cell in result["cells"]
        ]
        print_table((f"{order}: mean JCT", *WAYS, "pairs over alone", "pairs over FFS", "past their limit"), lines)


@experiment("slurm_migbatch.lab.experiments.pipelines:measure", draws_option("Streams of arrivals."), plots=False)
def pipelines(result: Result) -> None:
    """Deadlines met by pipelines of jobs, and their slices: migbatchd's split, compared with simple ones."""
    from slurm_migbatch.lab.experiments.pipelines import TIGHTNESS

    print_notes(result)
    for entry in result["results"]:
        click.echo(f"\n{entry['scenario']} ({_decided(entry)}), means of {result['seeds']} streams")
        lines = [
            (
                *(way, *cells("{kept:.1%}|{slice_s:.0f}|{late_p95_s:.0f} s", row)),
                with_interval(row["over_cheaper"], 3),
                *("{kept:.1%}, {slice_s:.0f}".format_map(row[name]) for name in TIGHTNESS if row[name]),
            )
            for way, row in entry["ways"].items()
        ]
        over = f"slices over {entry['cheaper']}"
        print_table(("way", "kept", "slice-seconds", "late, p95", over, *TIGHTNESS), lines)


def _decided(result: Result) -> str:
    return f"{result['decides']}, configuration {result['configuration']}"


COMMANDS = (fragmentation, dispatch, pipelines, sharing, lending)
