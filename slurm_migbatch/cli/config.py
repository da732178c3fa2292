"""`migbatch config`: checks the configuration and renders what Slurm and systemd need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from slurm_migbatch import site
from slurm_migbatch.cli import siteconf
from slurm_migbatch.cli.common import HELP, Failure, config_option, default_partition
from slurm_migbatch.config import DEFAULT_PATH, Config
from slurm_migbatch.config import render as render_config
from slurm_migbatch.daemon.facts import policy_of
from slurm_migbatch.node.install import DEFAULT_CONF, DEFAULT_ETC, DEFAULT_PYTHON
from slurm_migbatch.submit import shim
from slurm_migbatch.submit.service import reserved
from slurm_migbatch.workload import catalog as catalogs
from slurm_migbatch.workload.catalog import CatalogError, SiteCatalog


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
@click.option("--hooks", default="/etc/migbatch/hooks", show_default=True, metavar="DIR", help="Hooks on the nodes.")
@click.option("--user", default="root", show_default=True, help="User of migbatchd (systemd): root or SlurmUser.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there instead of stdout.")
def render(what: str, config: Config, hooks: str, user: str, output: Path | None) -> None:
    """Print a configuration file, filled in for this site.

    \b
    migbatch      /etc/migbatch/migbatch.toml, with every key explained
    node          /etc/migbatch/node.conf
    systemd       migbatchd.service
    node_systemd  migbatch-node.service, for the nodes
    slurm         what to include in slurm.conf (nodes must have reported)
    gres          gres.conf (nodes must have reported)
    job_submit    job_submit.lua, beside slurm.conf
    cli_filter    cli_filter.lua, beside slurm.conf (for srun and salloc)
    """
    makers: dict[str, Callable[[], str]] = {
        "migbatch": render_config,
        "node": lambda: DEFAULT_CONF,
        "systemd": lambda: site.render(
            "migbatchd.service.j2",
            program=Path(sys.executable).with_name("migbatchd"),
            config=config.path or DEFAULT_PATH,
            user=user,
        ),
        "node_systemd": lambda: site.render(
            "migbatch-node.service.j2", program=Path(DEFAULT_PYTHON).with_name("migbatch"), etc=DEFAULT_ETC
        ),
        "slurm": lambda: site.render("slurm.conf.j2", site=siteconf.read(config, hooks)),
        "gres": lambda: site.render("gres.conf.j2", site=siteconf.read(config, hooks)),
        "job_submit": lambda: lua(config, shim.JOB_SUBMIT),
        "cli_filter": lambda: lua(config, shim.CLI_FILTER),
    }
    text = makers[what]()
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        output.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        output.write_text(text)


def lua(config: Config, name: str) -> str:
    """Render one of the Lua shims with the site as last known."""
    submit = config.submit
    try:
        catalog = catalogs.load(Path(submit.catalog))
    except FileNotFoundError:
        catalog = SiteCatalog()
    except CatalogError as error:
        raise Failure(f"{error}; start migbatchd, it writes the file anew") from None
    return shim.render(
        name,
        socket=str(reserved(Path(submit.socket))) if name == shim.JOB_SUBMIT else submit.socket,
        table=submit.table,
        catalog=catalog,
        policy=policy_of(config),
        deadline_ms=submit.deadline_ms,
        default_partition=default_partition(config) if name == shim.CLI_FILTER else "",
    )
