"""The command `migbatch`: a group that imports a subcommand only when it is called."""

from __future__ import annotations

import click

from slurm_migbatch.cli.common import HELP, LazyGroup, run
from slurm_migbatch.cli.ending import leave

_HERE = "slurm_migbatch.cli"
_LAB = "slurm_migbatch.lab.cli"
COMMANDS = {
    "bench": (f"{_LAB}.bench:bench", "Measure migbatch's cost on this machine, and its policies on public data."),
    "config": (f"{_HERE}.config:config", "Check the configuration; print it, and files for monitoring."),
    "db": (f"{_HERE}.db:db", "Back up, restore, check and upgrade the record of jobs."),
    "doctor": (f"{_HERE}.doctor:doctor", "Check this installation and say what to do."),
    "eval": (f"{_LAB}.eval:eval_", "Evaluate the predictor on measured tables."),
    "explain": (f"{_HERE}.explain:explain", "Show how a request would be rewritten, without submitting."),
    "install": (f"{_HERE}.install:install", "Install migbatch on a host of the cluster, or show the changes."),
    "loans": (f"{_HERE}.loans:loans", "Show slices on loan to training jobs, and jobs that wait for one."),
    "model": (f"{_HERE}.model:model", "Show the learned predictor; refit, roll back."),
    "node": (f"{_HERE}.node:node", "Manage a compute node: agent, init, reconcile, status."),
    "nodes": (f"{_HERE}.nodes:nodes", "Show nodes, GPUs, layouts and slices."),
    "profile": (f"{_HERE}.profile:profile", "Measure models, and manage the measurements."),
    "progress": (f"{_HERE}.progress:progress", "Report the progress of a job from inside it."),
    "replay": (f"{_HERE}.replay:replay", "Repeat recorded decisions, and show differences."),
    "report": (f"{_HERE}.report:report", "Draw usage, layouts, waits, predictions and loans as one HTML page."),
    "show": (f"{_HERE}.job:show", "Show one job: requested, bucket, allocated, predicted, measured, reasons."),
    "simulate": (f"{_LAB}.simulate:simulate", "Replay a trace under a policy on a simulated cluster."),
    "testbed": ("slurm_migbatch.testbed.cli:testbed", "Start and stop a private Slurm cluster with simulated GPUs."),
    "top": (f"{_HERE}.top:top", "Watch GPUs, slices, the queue and loans in the terminal."),
    "usage": (f"{_HERE}.usage:usage", "Show the GPU-hours held by each account and user, and their idle share."),
    "waste": (f"{_HERE}.waste:waste", "Show what jobs held but did not use, and what to request next time."),
    "why": (f"{_HERE}.job:why", "Show why a job waits and when it can start."),
}


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"migbatch {version('slurm-migbatch')}")
        ctx.exit()


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings=HELP)
@click.option(
    "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
def cli() -> None:
    """Dynamic NVIDIA MIG for Slurm: each job gets the slice it needs.

    The record of past jobs is read with `migacct`.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted; the help of a command lists others.
    docs/operate.md lists all.
    """


def main() -> None:
    """Run the command."""
    leave(run(cli, "migbatch"))
