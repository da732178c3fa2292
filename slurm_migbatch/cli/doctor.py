"""`migbatch doctor`: checks an installation and says what to do."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version

import click
from sqlalchemy import select

from slurm_migbatch.cli import checks, lendingchecks
from slurm_migbatch.cli.checks import BAD, GOOD, ODD, Finding
from slurm_migbatch.cli.common import EXIT_FAILED, config_option, open_record, slurm_client
from slurm_migbatch.cli.releases import SiteTraits, check_release, untyped_gres
from slurm_migbatch.config import Config
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.versions import parse_release
from slurm_migbatch.store.errors import StoreError
from slurm_migbatch.store.models import Node


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="Findings as one JSON object.")
@click.option("--leaving", is_flag=True, help="Only whether mig may be taken out of slurm.conf: which jobs need it.")
@click.option("-q", "--quiet", is_flag=True, help="Only what is not in order.")
@click.pass_context
def doctor(ctx: click.Context, config: Config, as_json: bool, leaving: bool, quiet: bool) -> None:
    """Check this installation and say what to do.

    Run it on the controller host, as root for a complete picture. Nothing is changed. The exit code is 1 where
    something must be corrected.
    """
    findings = list(_leaving(config) if leaving else examine(config))
    if as_json:
        click.echo(json.dumps({"version": 1, "findings": [asdict(f) for f in findings]}))
    else:
        for finding in findings:
            if finding.level == GOOD and quiet:
                continue
            click.echo(f"{finding.level:<5} {finding.subject}: {finding.text}")
            if finding.advice:
                click.echo(f"      -> {finding.advice}")
        wrong = sum(f.level == BAD for f in findings)
        click.echo(f"{len(findings)} checks, {wrong} to correct, {sum(f.level == ODD for f in findings)} to look at")
    if any(f.level == BAD for f in findings):
        ctx.exit(EXIT_FAILED)


def examine(config: Config) -> Iterator[Finding]:
    """Yield all findings, from the ground up."""
    yield from _packages()
    if not config.path:
        yield Finding(ODD, "migbatch.toml", "there is none, defaults are used", "migbatch config render migbatch")
    yield from checks.check_paths(config, _uid(config.cluster.slurm_user))
    yield from _slurm(config)
    yield from checks.check_service(config)


def needed() -> Iterator[str]:
    """Yield the packages that the extra `controller` brings, as this installation's own metadata names them."""
    for line in requires("slurm-migbatch") or ():
        found = re.match(r"[\w.-]+", line)
        if found and 'extra == "controller"' in line and "python_version" not in line:
            yield found[0]


def _packages() -> Iterator[Finding]:
    text = f"Python {sys.version.split()[0]}, slurm-migbatch {version('slurm-migbatch')}"
    yield Finding(GOOD, "installation", text)
    for package in needed():
        try:
            yield Finding(GOOD, package, version(package))
        except PackageNotFoundError:
            yield Finding(BAD, package, "is not installed", "pip install 'slurm-migbatch[controller]'")


def _slurm(config: Config) -> Iterator[Finding]:
    client = slurm_client(config)
    try:
        number = client.version()
        rows = client.nodes()
    except SlurmError as error:
        yield _no_slurm(error)
        return
    yield Finding(GOOD, "Slurm", f"{number[0]}.{number[1]:02d}, {len(rows)} nodes")
    conf = checks.parse_slurm_config(_scontrol(config, "show", "config"))
    yield from _release(config, conf)
    yield from checks.check_slurm_conf(conf)
    yield from checks.check_lua(conf.get("slurm_conf", ""))
    try:
        with open_record(config) as store:
            inventory = store.inventory()
            held = store.leases()
            with store.reading() as connection:
                seen = {row.node: row.seen for row in connection.execute(select(Node.node, Node.seen))}
    except StoreError as error:
        yield Finding(BAD, "database", str(error), "start migbatchd once; it makes the database")
        inventory, seen, held = {}, {}, []
    else:
        yield Finding(GOOD, "database", f"{len(inventory)} nodes have reported")
    yield from checks.check_nodes(rows, inventory, seen, time.time(), config)
    try:
        yield from checks.check_orphans(held, client.jobs(), time.time())
    except SlurmError as error:
        yield Finding(BAD, "Slurm's queue", str(error), "see what squeue says")
    if config.lending.enabled:
        partitions = lendingchecks.parse_partitions(_scontrol(config, "-o", "show", "partition"))
        yield from lendingchecks.check_lending(config, conf, rows, partitions, number)


def _release(config: Config, conf: Mapping[str, str]) -> Iterator[Finding]:
    release_text = conf.get("slurm_version")  # slurmctld's own; the commands may be of another
    try:
        release = parse_release(f"slurm {release_text}" if release_text else _scontrol(config, "version"))
    except SlurmError as error:
        yield Finding(ODD, "Slurm release", str(error), "check that `scontrol show config` works here")
        return
    yield from check_release(release, SiteTraits(conf, untyped_gres(conf.get("slurm_conf", ""))))


def _leaving(config: Config) -> Iterator[Finding]:
    try:
        jobs = slurm_client(config).jobs()
    except SlurmError as error:
        yield _no_slurm(error)
        return
    yield from checks.check_leaving(jobs)


def _no_slurm(error: SlurmError) -> Finding:
    return Finding(BAD, "Slurm", str(error), "check [cluster] slurm_bin and slurm_conf, and that slurmctld runs")


def _scontrol(config: Config, *arguments: str) -> str:
    program = f"{config.cluster.slurm_bin}/scontrol" if config.cluster.slurm_bin else "scontrol"
    env = {**os.environ, **({"SLURM_CONF": config.cluster.slurm_conf} if config.cluster.slurm_conf else {})}
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30, env=env, check=False)
    return done.stdout


def _uid(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return 0
