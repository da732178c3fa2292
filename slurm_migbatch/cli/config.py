"""`migbatch config`: checks the configuration and renders what Slurm and systemd need."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from slurm_migbatch import site
from slurm_migbatch.cli import installcontroller
from slurm_migbatch.cli.common import HELP, Failure, config_option
from slurm_migbatch.cli.scripts import lua
from slurm_migbatch.config import DEFAULT_PATH, Config
from slurm_migbatch.config import render as render_config
from slurm_migbatch.install.hosts import slurm_conf
from slurm_migbatch.install.slurmedit import INCLUDED, INCLUDED_GRES
from slurm_migbatch.node.install import settings, unit
from slurm_migbatch.submit import shim


@click.group(context_settings=HELP)
def config() -> None:
    """Check the configuration and render what Slurm needs."""


@config.command()
@config_option
def check(config: Config) -> None:
    """Check migbatch.toml; errors name their lines."""
    if not config.path:
        raise Failure("there is no configuration file; `migbatch config render migbatch` writes one to start from")
    click.echo(f"{config.path}: ok")


@config.command()
@click.argument(
    "what",
    type=click.Choice(("gres", "slurm", "job_submit", "cli_filter", "systemd", "node_systemd", "migbatch", "node")),
)
@config_option
@click.option("--user", default="root", show_default=True, help="User of migbatchd (systemd): root or SlurmUser.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there instead of stdout.")
def render(what: str, config: Config, user: str, output: Path | None) -> None:
    """Print a configuration file, filled in for this site; `migbatch install` writes them all.

    \b
    migbatch      /etc/migbatch/migbatch.toml, with every key explained
    node          /etc/migbatch/node.conf
    systemd       migbatchd.service
    node_systemd  migbatch-node.service, for the nodes
    slurm         migbatch.conf for slurm.conf, and the lines there that must change (nodes must have reported)
    gres          migbatch-gres.conf for gres.conf (nodes must have reported)
    job_submit    job_submit.lua, beside slurm.conf
    cli_filter    cli_filter.lua, beside slurm.conf (for srun and salloc)
    """
    makers: dict[str, Callable[[], str]] = {
        "migbatch": render_config,
        "node": settings,
        "systemd": lambda: site.render(
            "migbatchd.service.j2",
            program=Path(sys.executable).with_name("migbatchd"),
            config=config.path or DEFAULT_PATH,
            user=user,
        ),
        "node_systemd": unit,
        "slurm": lambda: _slurm(config, INCLUDED),
        "gres": lambda: _slurm(config, INCLUDED_GRES),
        "job_submit": lambda: lua(config, shim.JOB_SUBMIT),
        "cli_filter": lambda: lua(config, shim.CLI_FILTER),
    }
    text = makers[what]()
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        output.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        output.write_text(text)


def _slurm(config: Config, name: str) -> str:
    """Return one of our files beside slurm.conf, with the lines of the site's that must change as comments."""
    conf = slurm_conf(config.cluster.slurm_conf, os.environ.get("SLURM_CONF", ""))
    if conf is None:
        raise Failure("slurm.conf is not found; name it in [cluster] slurm_conf")
    plan = installcontroller.slurm_part(config, conf)
    here = Path(conf.main) if name == INCLUDED else Path(conf.main).with_name("gres.conf")
    lines = [
        f"# {line_edit}\n"
        for line_edit in plan.edits
        if (Path(line_edit.path).name == "gres.conf") == (here.name == "gres.conf")
    ]
    head = [f"# {here} and what it includes must change so:\n"] if lines else []
    return "".join([*head, *lines, installcontroller.rendered(plan)[name]])
