"""`migbatch nodes`: show nodes, GPUs, layouts and offers, in the style of sinfo."""

from __future__ import annotations

import click

from slurm_migbatch.cli.asking import ask_and_print, asker
from slurm_migbatch.cli.common import source_option
from slurm_migbatch.cli.top import delay_option
from slurm_migbatch.query.questions import NodesQuestion


@click.command()
@source_option
@click.option("-n", "--nodes", "names", metavar="LIST", help="Only these nodes, such as gpu[1-4].")
@click.option("-R", "--reasons", is_flag=True, help="Only problems: faults, zombies and Slurm's reasons.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option("--noheader", is_flag=True, help="No header line.")
@click.option("-w", "--watch", is_flag=True, help="Refresh continuously, like `migbatch top` with GPUs only.")
@delay_option
def nodes(
    config: str | None, names: str | None, reasons: bool, as_json: bool, noheader: bool, watch: bool, delay: float
) -> int:
    """Show nodes, GPUs, layouts and slices.

    A bar shows a GPU's memory: profile and job of each held slice, zombies as !profile, dots for free space,
    x on a GPU that its node does not use (--reasons says why).
    OFFERED is what Slurm can still allocate on the node.
    """
    from slurm_migbatch.slurm.nodelist import NodeListError, expand

    try:
        expand(names or "")
    except NodeListError as error:
        raise click.BadParameter(str(error), param_hint="--nodes") from None
    if watch:
        if reasons or as_json or noheader:
            raise click.UsageError("--watch cannot be combined with --reasons, --json or --noheader")
        from slurm_migbatch.cli.live import run
        from slurm_migbatch.report.pagestate import GPUS, PageState

        run(asker(config), PageState(panes=(GPUS,), interval=delay), names, count=None, plain=False)
        return 0
    return ask_and_print(NodesQuestion(names, reasons, as_json, not noheader), config)
