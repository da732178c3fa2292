"""The command `migbatch`: a group that imports a subcommand only when it is called."""

from __future__ import annotations

import click

from slurm_migbatch.cli.common import HELP, LazyGroup, run
from slurm_migbatch.cli.ending import leave

_HERE = "slurm_migbatch.cli"
_LAB = "slurm_migbatch.lab.cli"
COMMANDS = {
    "bench": (f"{_LAB}.bench:bench", "Measure what the filter and the hooks cost on this machine."),
    "config": (f"{_HERE}.config:config", "Check the configuration and render what Slurm needs."),
    "db": (f"{_HERE}.db:db", "Back up, restore, check and upgrade the record of jobs."),
    "doctor": (f"{_HERE}.doctor:doctor", "Check this installation and say what to do."),
    "eval": (f"{_LAB}.eval:eval_", "Score the predictor on measured tables."),
    "explain": (f"{_HERE}.explain:explain", "Show what a request would become, without submitting."),
    "install": (f"{_HERE}.install:install", "Install migbatch on a host of the cluster, or show what that changes."),
    "loans": (f"{_HERE}.loans:loans", "Show slices on loan to training jobs, and who waits for one."),
    "model": (f"{_HERE}.model:model", "Show what the predictor has learned; refit, roll back."),
    "node": (f"{_HERE}.node:node", "Everything that runs on a compute node: agent, init, reconcile, status."),
    "nodes": (f"{_HERE}.nodes:nodes", "Show nodes, GPUs, layouts and slices."),
    "profile": (f"{_HERE}.profile:profile", "Measure models, and keep what was measured."),
    "progress": (f"{_HERE}.progress:progress", "Say, inside a job, what it has achieved so far."),
    "replay": (f"{_HERE}.replay:replay", "Decide again on recorded rounds, and show what is decided otherwise."),
    "report": (f"{_HERE}.report:report", "Draw use, layouts, waits, predictions and loans as one HTML page."),
    "show": (f"{_HERE}.show:show", "Show one job: asked, bucket, got, predicted, measured, why."),
    "simulate": (f"{_LAB}.simulate:simulate", "Replay a trace under a policy on a simulated cluster."),
    "testbed": ("slurm_migbatch.testbed.cli:testbed", "Start and stop a private Slurm cluster with simulated GPUs."),
    "top": (f"{_HERE}.top:top", "Watch GPUs, slices, the queue and loans in the terminal."),
    "usage": (f"{_HERE}.usage:usage", "Show how many GPU-hours were held, by whom, and how much of it idle."),
    "waste": (f"{_HERE}.waste:waste", "Show what jobs held and did not use, and what to ask for next time."),
    "why": (f"{_HERE}.why:why", "Say why a job waits and what it would take."),
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

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted; a command that has others names them in its help.
    docs/operate.md lists all.
    """


def main() -> None:
    """Run the command."""
    leave(run(cli, "migbatch"))
