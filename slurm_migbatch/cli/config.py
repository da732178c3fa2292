"""`migbatch config`: check the configuration, and print files for hosts other than Slurm's."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

import click

from slurm_migbatch import monitoring
from slurm_migbatch.cli.common import HELP, Group, config_option
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.config import Config
from slurm_migbatch.config import render as render_config
from slurm_migbatch.values import atomicfile

MOST_COMPUTE: Final = 7
"""Compute slices of the largest profile of any GPU so far; a site's own are in its catalog."""
_MONITORING: Final = {"prometheus": monitoring.RULES, "grafana": monitoring.DASHBOARD}


@click.group(cls=Group, context_settings=HELP)
def config() -> None:
    """Check the configuration; print it, and files for monitoring."""


@config.command()
@config_option
def check(config: Config) -> None:
    """Check migbatch.toml; errors name their lines."""
    if not config.path:
        raise Failure("no configuration file; `migbatch config render migbatch` prints one to start from")
    click.echo(f"{config.path}: ok")
    if warning := _useless_default(config):
        click.echo(f"migbatch: warning: {warning}", err=True)


def _useless_default(config: Config) -> str:
    """Return why the default profile has no effect; "" if it has, or if nothing is known about it."""
    from slurm_migbatch.config.reader import lines_of, text_in
    from slurm_migbatch.mig.profile import Profile
    from slurm_migbatch.workload.catalog import CatalogError, load

    if not config.submit.default_profile:
        return ""
    wanted = Profile.parse(config.submit.default_profile)
    try:
        kinds = load(Path(config.submit.catalog)).kinds.values()
        offered = {info.profile.gres_type: info.profile for kind in kinds for info in kind.geometry.profiles}
    except (OSError, CatalogError):
        offered = {}
    if wanted.gres_type in offered or (not offered and wanted.compute <= MOST_COMPUTE):
        return ""
    line = dict(lines_of(text_in(config.path))).get(("submit", "default_profile"), 0)
    setting = f"submit.default_profile = {wanted}"
    if not offered:
        return f"{config.path}:{line}: no known GPU has {setting}: write one that `nvidia-smi mig -lgip` lists"
    known = ", ".join(str(profile) for profile in sorted(offered.values()))
    return f"{config.path}:{line}: no GPU of this site has {setting}: write one of {known}"


@config.command()
@click.argument("what", type=click.Choice(("migbatch", *_MONITORING)))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there instead of stdout.")
@click.option("--force", is_flag=True, help="Replace an existing file; it keeps its owner and mode.")
def render(what: str, output: Path | None, *, force: bool) -> None:
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
        _save(output, text, force=force)


def _save(path: Path, text: str, *, force: bool) -> None:
    """Write a new file, or with `force` replace one, so that it is always either the old or the new one."""
    try:
        present = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise Failure(f"{path} is a link to a file that does not exist: choose another name") from None
        atomicfile.write(path, text.encode(), 0o644)
        return
    if not stat.S_ISREG(present.st_mode):  # /dev/stdout, a pipe
        path.write_text(text, encoding="utf-8")
    elif path.read_bytes() != text.encode():
        if not force:
            raise Failure(f"{path} already exists and is not overwritten: choose another name, or add --force")
        owner = (present.st_uid, present.st_gid)
        atomicfile.write(path.resolve(), text.encode(), stat.S_IMODE(present.st_mode), owner)
