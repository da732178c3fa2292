"""`migbatch bench study`: ideas from papers on public data. migbatchd does not use the rules compared here."""

from __future__ import annotations

from functools import partial

import click

from slurm_migbatch.cli.common import HELP, Group, print_table
from slurm_migbatch.lab.cli.common import Result, cells, draws_option, experiment, print_lending, print_notes

_study = partial(experiment, plots=False)


@click.group(cls=Group, context_settings=HELP)
def study() -> None:
    """Study ideas from papers on public data.

    migbatchd does not use the rules compared here, so there are no targets; the other commands measure migbatchd.
    """


def _print_study(result: Result) -> None:
    click.echo("study of a paper's idea: migbatchd uses none of these rules, including those called ours")
    print_notes(result)


@_study("slurm_migbatch.lab.studies.instances:measure")
def instances(result: Result) -> None:
    """Study of ElasticBatch: GPUs for services with rates and latency limits, on ParvaGPU's scenarios."""
    _print_study(result)
    names = result["scenarios"]
    print_table(
        ("GPUs", *names, "total"),
        [(row["name"], *(f"{count:g}" for count in row["gpus"]), str(row["total"])) for row in result["rows"]],
    )


@_study("slurm_migbatch.lab.studies.placement:measure", draws_option("Draws of the arrivals."))
def placement(result: Result) -> None:
    """Study: accepted jobs by placement rule: pods of the openb trace on 100 GPUs."""
    _print_study(result)
    classes = ("latency sensitive", "best effort")
    for title, population in result["populations"].items():
        click.echo(f"\n{title}: {population['pods']} pods, mean and 95 % interval of {result['seeds']} draws")
        lines = [
            (
                *(f"{load['load']:g}", *cells("{rule}|{accepted[0]:.1%}", row)),
                *("{:+.1%} ({:+.1%} to {:+.1%})".format(*row[key]) for key in ("gain_jobs", "gain_slices")),
                f"{row['busy'][0]:.1%}",
                *(f"{row['by_class'][name]:.1%}" if name in row["by_class"] else "-" for name in classes),
            )
            for load in population["loads"]
            for row in load["rules"]
        ]
        gains = ("jobs against first fit", "slices against first fit")
        print_table(("load", "rule", "accepted", *gains, "busy", *classes), lines)


@_study("slurm_migbatch.lab.studies.pariselsa:measure", draws_option("Streams of arrivals."))
def paris_elsa(result: Result) -> None:
    """Study of PARIS and ELSA: work of one model that 8 partitioned GPUs complete in time, by layout and dispatch."""
    _print_study(result)
    for entry in result["results"]:
        click.echo(f"\nbatches of variance {entry['variance']:g}: items per second, means of {result['seeds']} streams")
        names = list(entry["models"][0]["rates"])
        lines = [
            (
                row["model"],
                *(f"{row['rates'][name]:.0f}" for name in names),
                f"{row['bound']:.0f}",
                "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"]),
                f"{row['best_homogeneous']['cut']}, {row['best_homogeneous']['served']}",
            )
            for row in entry["models"]
        ]
        print_table(("model", *names, "bound", "ours over best homogeneous", "which is"), lines)


@_study("slurm_migbatch.lab.studies.dstack:measure", draws_option("Mixes of each number of models.", "--mixes"))
def dstack(result: Result) -> None:
    """Study of D-STACK: work that one GPU does under deadlines, relative to a GPU that could be divided arbitrarily."""
    _print_study(result)
    for entry in result["results"]:
        click.echo(f"\nbatches {entry['batches']}: load under all deadlines over the ideal's, means over mixes")
        lines = [
            (
                name,
                *(f"{size['load'][name][0]:.3f}" for size in entry["sizes"].values()),
                "{:.3f} ({:.3f} to {:.3f})".format(*load),
                *(
                    f"{entry['all']['filled'][name][figure]:.3f}" if name in entry["all"]["filled"] else ""
                    for figure in ("utilisation", "busy", "jain")
                ),
            )
            for name, load in entry["all"]["load"].items()
        ]
        sizes = [f"{size} models" for size in entry["sizes"]]
        print_table(("scheduler", *sizes, "all", "utilisation", "busy", "Jain"), lines)


@_study("slurm_migbatch.lab.studies.deepboot:measure", draws_option("Workloads and requests.", least=1))
def deepboot(result: Result) -> None:
    """Study of DeepBoot: training on several whole GPUs that inference leaves, relative to training's own half."""
    _print_study(result)
    for entry in result["results"]:
        click.echo(
            f"\n{entry['load']}: {entry['requests']} requests of {entry['apps']} applications, means over "
            f"{entry['seeds']} seeds"
        )
        print_lending(entry)


for _command in (instances, placement, paris_elsa, dstack, deepboot):
    study.add_command(_command)
