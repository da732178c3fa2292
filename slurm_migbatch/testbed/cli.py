"""`migbatch testbed`: a private Slurm cluster with simulated GPUs, for trying and testing."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import click

from slurm_migbatch.cli.common import HELP, Group
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.testbed import pyslurmroot, registry
from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.debian import UBUNTU, UBUNTU_KEYRING, make_root

_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Directory of the test bed [default: below /run, /var/tmp or /tmp].",
)


@click.group(cls=Group, context_settings=HELP)
def testbed() -> None:
    """Start and stop a private Slurm cluster with simulated GPUs (as root).

    \b
    migbatch testbed up --nodes 2 --gpus 2 --gpu-type h100-80gb
    eval "$(migbatch testbed env)"
    migbatch testbed exec --user mbalice -- sbatch --gres=mig:auto --wrap 'echo $CUDA_VISIBLE_DEVICES'
    migbatch testbed down
    """
    if os.geteuid() != 0:
        raise Failure("the test bed starts Slurm's daemons and makes users, which needs root; run it with sudo")


@testbed.command()
@click.option("--nodes", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--gpus", type=click.IntRange(1, 16), default=2, show_default=True, help="Simulated GPUs per node.")
@click.option("--gpu-type", default="h100-80gb", show_default=True, help="Their model.")
@click.option("--users", type=click.IntRange(0, 8), default=3, show_default=True, help="Ordinary users to submit as.")
@click.option("--dbd", is_flag=True, help="With slurmdbd and MariaDB (accounts, sacct).")
@click.option("--plain", is_flag=True, help="Slurm alone: no hooks, no submit filter, no migbatchd.")
@click.option("--latency", default="0", show_default=True, help="Seconds per driver call, or 'real'.")
@click.option(
    "--slurm-root", default="", metavar="DIR", help="Run the Slurm of this debootstrapped Debian (see `testbed root`)."
)
@_directory
def up(directory: Path | None, plain: bool, latency: str, **options: Any) -> None:
    """Start a cluster with migbatch on it; it stays until `down`."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    cluster = Cluster(
        directory or _default(),
        migbatch="" if plain else "all",
        latency=latency if latency == "real" else float(latency),
        **options,
    )
    with registry.interrupted_once():
        cluster.up()
        try:
            cluster.keep()
        except BaseException:
            cluster.down()
            raise
    click.echo(f"up after {time.monotonic() - began:.1f} s in {cluster.directory}")
    click.echo(f'now: eval "$(migbatch testbed env{_option(directory)})"')


@testbed.command()
@_directory
@click.option("--all", "everything", is_flag=True, help="Every test bed of this machine, also those of running tests.")
def down(directory: Path | None, everything: bool) -> None:
    """Stop a cluster and remove its files and users; also remove what is left of killed ones."""
    with registry.uninterrupted(), registry.locked():
        removed = registry.sweep()
        target = None if everything else registry.find((directory or _default()).absolute())
        for record in registry.records() if everything else [target] if target else []:
            registry.destroy(record)
            removed.append(record)
    for record in removed:
        click.echo(f"removed {record.directory}")
    if not removed:
        click.echo("nothing to remove")


@testbed.command()
def status() -> None:
    """Show the test beds of this machine and their processes."""
    records = registry.records()
    if not records:
        click.echo("no test bed")
    for record in records:
        owner = "stale" if record.stale else f"owner {record.owner[0]}" if record.owner else "kept"
        click.echo(f"{record.directory} ({owner}), users {' '.join(record.users) or '-'}")
        if record.stale or not (Path(record.directory) / "etc/testbed.json").exists():
            continue
        cluster = Cluster.attach(record.directory)
        for daemon in cluster.daemons.all():
            click.echo(f"  {daemon.name:<16} {f'pid {daemon.pid}' if daemon.id.alive else 'ended'}")
        for node, state in cluster.node_states().items():
            click.echo(f"  node {node:<11} {state}")


@testbed.command()
@_directory
def env(directory: Path | None) -> None:
    """Print shell commands that point Slurm's commands at the cluster."""
    cluster = Cluster.attach(directory or _default())
    click.echo(f"export SLURM_CONF={shlex.quote(str(cluster.slurm_conf))}")
    if cluster.spec.migbatch:
        click.echo(f"export MIGBATCH_CONFIG={shlex.quote(str(cluster.product.config))}")
    click.echo(f'export PATH={shlex.quote(str(cluster.bin))}:"$PATH"')


@testbed.command("exec", context_settings={"ignore_unknown_options": True})
@_directory
@click.option("--user", default=None, help="A test user (mbalice, mbbob, mbcarol) [default: root].")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(directory: Path | None, user: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND in the cluster, as root or as a test user in the user's home directory."""
    cluster = Cluster.attach(directory or _default())
    argv = cluster.command(command, user)
    if user:
        os.chdir(cluster.home(user))
    os.execvpe(argv[0], argv, cluster.client_env(user))  # noqa: S606 - no shell, nothing to quote


@testbed.command()
@click.argument("suite", metavar="SUITE")
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--mirror", default=None, help="The archive [default: Debian: of apt's sources; Ubuntu: debootstrap's].")
def root(suite: str, target: Path, mirror: str | None) -> None:
    """Install a Debian or Ubuntu SUITE with Slurm into DIR, for --slurm-root.

    Debian's trixie has Slurm 24.11, forky 26.05; Ubuntu's noble 23.11, resolute 25.11. Signatures of Ubuntu's packages
    are checked where its archive keyring is installed.
    """
    if suite in UBUNTU and not UBUNTU_KEYRING.exists():
        click.echo(f"{suite}: nobody checks whose packages these are, as {UBUNTU_KEYRING} is missing", err=True)
    make_root(suite, target.absolute(), mirror)
    click.echo(f"{target}: ready; migbatch testbed up --slurm-root {target}")


@testbed.command()
@click.argument("root", metavar="DIR", type=click.Path(path_type=Path, exists=True))
def pyslurm(root: Path) -> None:
    """Build pyslurm in DIR, which `testbed root resolute DIR` has made, for the Slurm there."""
    pyslurmroot.build(root.absolute())
    click.echo(f"{root}: pyslurm {pyslurmroot.VERSION} is in it; pytest --slurm-root={root} -m pyslurm")


def _default() -> Path:
    return registry.new_directory("-0")


def _option(directory: Path | None) -> str:
    return f" --dir {shlex.quote(str(directory))}" if directory else ""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
