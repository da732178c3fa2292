"""`migbatch config`: check the configuration, and print files for hosts other than Slurm's."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from slurm_migbatch import monitoring
from slurm_migbatch.cli.common import HELP, config_option
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.config import Config
from slurm_migbatch.config import render as render_config

_MONITORING: Final = {"prometheus": monitoring.RULES, "grafana": monitoring.DASHBOARD}


@click.group(context_settings=HELP)
def config() -> None:
    """Check the configuration; print it, and files for monitoring."""


@config.command()
@config_option
def check(config: Config) -> None:
    """Check migbatch.toml; errors name their lines."""
    if not config.path:
        raise Failure("no configuration file; `migbatch config render migbatch` prints one to start from")
    click.echo(f"{config.path}: ok")


@config.command()
@click.argument("what", type=click.Choice(("migbatch", *_MONITORING)))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there instead of stdout.")
def render(what: str, output: Path | None) -> None:
    """Print a file. For files of Slurm and systemd see `migbatch install --full` and its --apply.

    \b
    migbatch      /etc/migbatch/migbatch.toml, with every key explained
    prometheus    alert rules, for rule_files in prometheus.yml
    grafana       a dashboard to import
    """
    text = monitoring.text(_MONITORING[what]) if what in _MONITORING else render_config()
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        output.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        output.write_text(text)
