"""`migbatch bench live`, `rounds` and `nodes`: measurements on a real Slurm on a test bed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.common import print_table
from slurm_migbatch.lab.cli.common import Result, cells, json_option, measured, measurement, number_option, print_result

_root_option = click.option(
    "--slurm-root", default="", metavar="DIR", help="Run the Slurm of this debootstrapped Debian."
)


@click.command()
@click.option("--seed", default=1, show_default=True, help="Of the wave.")
@click.option("--moves", is_flag=True, help="Moves of training jobs for larger slices, instead of lending.")
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With Alibaba's openb trace, for --moves.",
)
@_root_option
@json_option
def live(seed: int, moves: bool, data: Path | None, slurm_root: str, as_json: bool) -> None:
    """Inference with a day pattern and continuous training on a test bed, with lending and without (as root).

    The day is compressed to six minutes, so this takes about twenty minutes. Two nodes of four simulated H100s
    under a real Slurm; the simulator's figures for the same wave are printed for comparison.

    With --moves: jobs of the population of `bench fragmentation` at load 0.9, with moves of training jobs for larger
    slices and without, and the simulator's prediction of 20 such days. Takes about 16 minutes. A Slurm up to 23.02
    delays moved jobs by two minutes, which is not compressed.
    """
    if moves and data is None:
        raise click.UsageError("--moves needs --data DIR, with Alibaba's openb trace")
    if data is not None and not moves:
        raise click.UsageError("--data is for --moves")
    values = {"seed": seed, "slurm_root": slurm_root, **({"data": data} if moves else {})}
    module = "livemoves" if moves else "live"
    result = measured(f"slurm_migbatch.lab.bench.{module}:measure", values)
    print_result(result, as_json, _print_moves if moves else _print_lending)


def _print_decider(result: Mapping[str, Any]) -> None:
    changed = ", ".join(
        f"[{section}] {key}={value}" for section, keys in result["changed"].items() for key, value in keys.items()
    )
    click.echo(f"{result['decides']} with the configuration {result['configuration']}: as shipped, but {changed}")


def _print_lending(result: Mapping[str, Any]) -> None:
    click.echo(
        f"{result['requests']} inference and {result['trainings']} training jobs, a day of {result['day_s']:g} s"
    )
    _print_decider(result)
    form = (
        "{jct_s:.1f}|{predicted[jct_s]:.1f}|{jct_p95_s:.1f}|{mean_delay_s:.1f}|{predicted[mean_delay_s]:.1f}|{p95_s:.1f}|"
        "{predicted[p95_s]:.1f}|{restarts:.2f}|{predicted[restarts]:.2f}|{restarts_max}|{rpcs}"
    )
    print_table(
        (
            *("WAY", "JCT_S", "PREDICTED", "P95_S", "DELAY_S", "PREDICTED", "DELAY_P95_S", "PREDICTED"),
            *("RESTARTS", "PREDICTED", "MOST", "RPCS"),
        ),
        [(name, *cells(form, way)) for name, way in result["ways"].items()],
    )


def _print_moves(result: Mapping[str, Any]) -> None:
    click.echo(
        f"{result['jobs']} jobs, {result['trainings']} of them trainings that may be moved, submitted in "
        f"{result['day_s']:.0f} s to {result['nodes']} nodes of {result['gpus']} GPUs at load {result['load']:g} "
        f"(times of the trace over {result['compression']:g}); Slurm {result['slurm'][0]}.{result['slurm'][1]:02}; "
        f"the first {result['warm']} jobs are not counted"
    )
    _print_decider(result)
    print_table(
        (
            *("WAY", "WAIT_S", "PREDICTED", "WAIT_P95_S", "PREDICTED", "JCT_S", "PREDICTED"),
            *("MOVES", "RESTARTS", "PREDICTED", "AWAY_S", "MOST", "RPCS"),
        ),
        [
            *(_moves_row(name, way) for name, way in result["ways"].items()),
            *(_computed_row(name, way) for name, way in result["computed"].items()),
        ],
    )
    ratio, low, high = result["wait_over_still"]
    click.echo(
        f"mean wait with moves relative to no moves: {ratio:.2f} "
        f"(95 % interval by blocks of jobs {low:.2f} to {high:.2f})"
    )
    scatter = result["scatter"]
    for name, what in (("wait_s", "mean wait"), ("jct_s", "mean completion time")):
        mean, low, high, least, most = scatter[name]
        click.echo(
            f"predicted for {scatter['draws']} such days: {what} with moves over that without {mean:.2f} "
            f"({low:.2f} to {high:.2f}), from {least:.2f} to {most:.2f}"
        )


def _moves_row(name: str, way: Mapping[str, Any]) -> list[str]:
    predicted = way["predicted"]
    seconds = [f"{of[key]:.1f}" for key in ("wait_s", "wait_p95_s", "jct_s") for of in (way, predicted)]
    away = ["-" if way[key] is None else f"{way[key]:.1f}" for key in ("away_s", "away_max_s")]
    return [name, *seconds, *cells("{moves}|{restarts}|{predicted[restarts]}", way), *away, str(way["rpcs"])]


def _computed_row(name: str, way: Mapping[str, float]) -> list[str]:
    seconds = [cell for key in ("wait_s", "wait_p95_s", "jct_s") for cell in (f"{way[key]:.1f}", "-")]
    return [name, *seconds, *["-"] * 6]


@measurement(
    "slurm_migbatch.lab.bench.rounds:measure",
    number_option("--pending", 1, 10_000, 1000, "Jobs that wait."),
    _root_option,
)
def rounds(result: Result) -> None:
    """Time decisions on loans with a full queue, and count slurmctld's work for them (as root).

    About 500 idle slices under a real Slurm on a test bed; sdiag's counts of slurmctld's calls before and after.
    """
    click.echo(f"{result['pending']} training jobs before {result['slots']} slots")
    for name, phase in result["phases"].items():
        decisions = phase["lending"]
        click.echo(
            f"{name}: {decisions['rounds']:.0f} decisions of {decisions['mean_s']:.3f} s on average in "
            f"{phase['seconds']:g} s, {phase['running']} loans run"
        )
        print_table(
            ("RPC", "BEFORE", "AFTER", "CALLS"),
            [
                (rpc, str(phase["sdiag_before"].get(rpc, 0)), str(after), str(phase["rpcs"].get(rpc, 0)))
                for rpc, after in phase["sdiag_after"].items()
            ],
        )


@measurement(
    "slurm_migbatch.lab.bench.manynodes:measure",
    number_option("--nodes", 1, 1000, 256, "Nodes of the test bed."),
    number_option("--gpus", 1, 16, 8, "Simulated H100s per node."),
    number_option("--jobs", 1, 100_000, 512, "Jobs of one second each."),
    _root_option,
)
def nodes(result: Result) -> None:
    """Count slurmctld's work for migbatchd on a site of many nodes, all of them on this machine (as root)."""
    from slurm_migbatch.lab.bench.manynodes import UPDATE

    site = f"{result['nodes']} nodes of {result['gpus']} GPUs"
    click.echo(f"{site}: all of them offered slices {result['start_s']:.0f} s after the start")
    for name, phase in result["phases"].items():
        what = "without jobs" if name == "rest" else f"{result['jobs']} jobs"
        updates = phase["rpcs"].get(UPDATE, [0])[0]
        click.echo(
            f"{what}, {phase['seconds']:.0f} s: {phase['changes']} changed offers of nodes in {updates} requests; "
            f"{phase['rounds']} rounds of supply, {phase['round_s']:.3f} s on average"
        )
        rows = [(name, str(count), f"{seconds:.3f}") for name, (count, seconds) in phase["rpcs"].items()]
        print_table(("RPC", "CALLS", "SLURMCTLD_S"), rows)
    for way, update in result["updates"].items():
        click.echo(
            f"an update of all nodes, {way}: {update['rpcs']} requests, {update['seconds']:.2f} s, of which slurmctld "
            f"{update['rpc_s']:.3f} s"
        )
