"""`migbatch bench live`, `rounds` and `nodes`: what runs beside a real Slurm on a test bed."""

from __future__ import annotations

import json
from typing import Any

import click

from slurm_migbatch.cli.common import print_table, steps
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.lab.cli.common import json_option, print_bars


@click.command()
@click.option("--seed", default=1, show_default=True, help="Of the wave.")
@click.option("--slurm-root", default="", metavar="DIR", help="Run the Slurm of this debootstrapped Debian.")
@json_option
def live(seed: int, slurm_root: str, as_json: bool) -> None:
    """Inference that follows a day, and training throughout, on a test bed: with lending and without (as root).

    The day is compressed to six minutes, so this takes about twenty minutes. Two nodes of four simulated H100s
    under a real Slurm; the simulator's figures for the same wave are printed beside.
    """
    from slurm_migbatch.lab.bars import NotMeasurable
    from slurm_migbatch.lab.bench.live import measure
    from slurm_migbatch.testbed.errors import TestbedError

    try:
        with steps() as say:
            result = measure(seed, say=say, slurm_root=slurm_root)
    except (NotMeasurable, TestbedError) as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(
        f"{result['requests']} inference and {result['trainings']} training jobs, a day of {result['day_s']:g} s"
    )
    changed = ", ".join(
        f"[{section}] {key}={value}" for section, keys in result["changed"].items() for key, value in keys.items()
    )
    click.echo(f"{result['decides']} with the configuration {result['configuration']}: as shipped, but {changed}")
    print_table(
        (
            *("WAY", "JCT_S", "PREDICTED", "P95_S", "DELAY_S", "PREDICTED", "DELAY_P95_S", "PREDICTED"),
            *("RESTARTS", "PREDICTED", "MOST", "RPCS"),
        ),
        [_row(name, way) for name, way in result["ways"].items()],
    )
    print_bars(result)


def _row(name: str, way: dict[str, Any]) -> list[str]:
    predicted = way["predicted"]
    seconds = (
        way["jct_s"], predicted["jct_s"], way["jct_p95_s"],
        way["mean_delay_s"], predicted["mean_delay_s"], way["p95_s"], predicted["p95_s"],
    )  # fmt: skip
    return [
        name,
        *(f"{value:.1f}" for value in seconds),
        f"{way['restarts']:.2f}",
        f"{predicted['restarts']:.2f}",
        str(way["restarts_max"]),
        str(way["rpcs"]),
    ]


@click.command()
@click.option("--pending", type=click.IntRange(1, 10_000), default=1000, show_default=True, help="Jobs that wait.")
@click.option("--slurm-root", default="", metavar="DIR", help="Run the Slurm of this debootstrapped Debian.")
@json_option
def rounds(pending: int, slurm_root: str, as_json: bool) -> None:
    """How long a decision on loans takes before a full queue, and what slurmctld does for it (as root).

    About 500 idle slices under a real Slurm on a test bed; sdiag's counts of slurmctld's calls before and after.
    """
    from slurm_migbatch.lab.bench.rounds import measure
    from slurm_migbatch.testbed.errors import TestbedError

    try:
        with steps() as say:
            result = measure(pending, say=say, slurm_root=slurm_root)
    except TestbedError as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
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
    print_bars(result)


@click.command()
@click.option("--nodes", type=click.IntRange(1, 1000), default=256, show_default=True, help="Nodes of the test bed.")
@click.option("--gpus", type=click.IntRange(1, 16), default=8, show_default=True, help="Simulated H100s of each.")
@click.option("--jobs", type=click.IntRange(1, 100_000), default=512, show_default=True, help="Jobs of a second each.")
@click.option("--slurm-root", default="", metavar="DIR", help="Run the Slurm of this debootstrapped Debian.")
@json_option
def nodes(nodes: int, gpus: int, jobs: int, slurm_root: str, as_json: bool) -> None:
    """What slurmctld has to do for migbatchd on a site of many nodes, all of them on this machine (as root)."""
    from slurm_migbatch.lab.bench.manynodes import UPDATE, measure
    from slurm_migbatch.testbed.errors import TestbedError

    try:
        with steps() as say:
            result = measure(nodes, gpus, jobs, say, slurm_root)
    except TestbedError as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{nodes} nodes of {gpus} GPUs: all of them offered slices {result['start_s']:.0f} s after the start")
    for name, phase in result["phases"].items():
        what = "without jobs" if name == "rest" else f"{jobs} jobs"
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
