"""`migbatch node`: commands for administrators and systemd on a compute node."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from slurm_migbatch.cli.common import HELP, Group, config_option, print_table
from slurm_migbatch.cli.ending import Failure

if TYPE_CHECKING:
    from slurm_migbatch.config import Config
    from slurm_migbatch.node.config import NodeConfig
    from slurm_migbatch.node.executor import Executor

DEFAULT_ETC = "/etc/migbatch"
etc_option = click.option(
    "--etc", default=DEFAULT_ETC, show_default=True, metavar="DIR", help="Directory with node.conf."
)
node_option = click.option(
    "--node", "name", default="", metavar="NAME", help="Node name in Slurm (default: this host's in slurm.conf)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group, context_settings=HELP)
def node() -> None:
    """Manage a compute node."""


@node.command()
@etc_option
@node_option
@click.option("--reset", is_flag=True, help="Reset GPUs that need it for MIG (Ampere) and have no processes.")
@json_option
def init(etc: str, name: str, reset: bool, as_json: bool) -> None:
    """Prepare the node after boot: MIG mode, leftovers, capability devices. Run before slurmd starts.

    Fails if no GPU can be used; each one that cannot is a PROBLEM.
    """
    from slurm_migbatch.node.boot import prepare

    config = _config(etc, name)
    with _executor(config) as executor:
        steps = prepare(config, executor, reset=reset)
        usable = bool(executor.gpus.managed())
    if as_json:
        click.echo(json.dumps([step._asdict() for step in steps], indent=2))
    else:
        _lines(("" if step.ok else "PROBLEM: ") + step.text for step in steps)
    if not usable and not all(step.ok for step in steps):
        raise Failure(f"node {config.node} is not ready for jobs")


@node.command()
@etc_option
@node_option
@click.option("--dry-run", is_flag=True, help="Dry run: only show what would be done.")
@json_option
def reconcile(etc: str, name: str, dry_run: bool, as_json: bool) -> None:
    """Reconcile the journal, the GPUs and Slurm.

    Interrupted changes are undone, ended runs are released, existing instances are adopted, missing ones are noted.
    """
    from slurm_migbatch.node.deadline import Deadline

    config = _config(etc, name)
    with _executor(config) as executor:
        done, unknown = executor.reconcile(Deadline(config.hook_deadline), dry=dry_run)
    if as_json:
        found = {"node": config.node, "dry_run": dry_run, "changes": done, "unknown": unknown}
        click.echo(json.dumps(found, indent=2))
    else:
        _lines(done or ["nothing to do"])
    if unknown:
        raise Failure(f"ended runs cannot be determined: {unknown}")


@node.command()
@etc_option
@node_option
@click.option("--dry-run", is_flag=True, help="Dry run: only show what would be done.")
@json_option
def clear(etc: str, name: str, dry_run: bool, as_json: bool) -> None:
    """Destroy the idle instances that are kept warm for next jobs, for example before maintenance.

    Running jobs keep theirs. To keep new jobs away meanwhile, drain the node in Slurm first.
    """
    from slurm_migbatch.node import owner
    from slurm_migbatch.node.deadline import Deadline

    config = _config(etc, name)
    with owner.working() as owner_id, _executor(config) as executor:
        done = executor.repairer.clear(Deadline(config.hook_deadline), owner_id, dry=dry_run)
    if as_json:
        click.echo(json.dumps({"node": config.node, "dry_run": dry_run, "changes": done}, indent=2))
    else:
        _lines(done or ["no idle slices"])


@node.command()
@etc_option
@node_option
@json_option
def status(etc: str, name: str, as_json: bool) -> None:
    """Show the GPUs, the slices and their holders, the agent and unsent events."""
    from slurm_migbatch.node.status import status as collect

    config = _config(etc, name)
    with _executor(config) as executor:
        found = collect(config, executor)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    agent = "running" if found["agent"] else "not running (hooks work without it)"
    click.echo(f"node {found['node']}: agent {agent}, {found['spool']} unsent events, plan {found['plan']}")
    if found["driver"] != "ok":
        click.echo(f"driver: {found['driver']}")
    if found["journal_faults"]:
        click.echo(f"PROBLEM: the last {found['journal_faults']} hooks could not write the journal: is its disk full?")
    _lines(f"PROBLEM: {gpu['problem']}" for gpu in found["gpus"] if "problem" in gpu)
    _lines(f"PROBLEM: {line}; run: migbatch node reconcile" for line in found["over"])
    if found["unknown"]:
        click.echo(f"ended runs cannot be determined: {found['unknown']}")
    rows = []
    for gpu in found["gpus"]:
        head = str(gpu["index"])
        if "problem" in gpu:
            rows.append((head, "-", "-", "not used", "-", "-", gpu["uuid"]))
        elif not gpu["mig"]:
            rows.append((head, "-", "-", "MIG after reset" if gpu["mig_pending"] else "MIG off", "-", "-", gpu["uuid"]))
        elif not gpu["slices"]:
            rows.append((head, "-", "-", "empty", "-", "-", gpu["uuid"]))
        rows += [(head, *_row(entry)) for entry in gpu["slices"]]
    print_table(("GPU", "PLACE", "PROFILE", "STATE", "JOB", "UID", "DEVICE"), rows)


def _row(entry: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    held = entry["state"] in ("held", "intent", "lost")
    return (
        f"{entry['start']}:{entry['size']}",
        entry["profile"],
        entry["state"],
        str(entry["job"]) if entry["job"] is not None else "-",
        str(entry["uid"]) if held else "-",
        f"{entry['mig_uuid'] or '-'}{'  ' + entry['reason'] if entry.get('reason') else ''}",
    )


@node.command()
@etc_option
@node_option
@click.option("-v", "--verbose", is_flag=True, help="Log every hook.")
def agent(etc: str, name: str, verbose: bool) -> None:
    """Serve the hooks, send events to the controller and fetch its plan. Runs until SIGTERM."""
    from slurm_migbatch.doctor.node import NodePlaces, examine_quietly
    from slurm_migbatch.node.agent import Agent

    config = _config(etc, name)
    os.umask(0o077)
    os.chdir("/")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr
    )
    places = NodePlaces(etc, name=name)
    service = Agent(config, checks=lambda gpus: examine_quietly(places, config, gpus))
    service.stop_on(signal.SIGTERM, signal.SIGINT)
    service.run()


@node.command()
@click.argument("name", metavar="NODE")
@click.option("--secret", metavar="FILE", help="The shared secret [default: [node_api] token_file of migbatch.toml].")
@config_option
def key(name: str, secret: str | None, config: Config) -> None:
    """Print the content of NODE's TokenFile (Auth=token): its own key, with which it can act as no other node.

    Run this on the controller. With keys no node needs the shared secret.
    """
    from slurm_migbatch.node.auth import TokenSigner

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise Failure(f"{name!r} is not a node name")
    secret = secret or config.node_api.token_file
    # the secret is migbatchd's, which may run as SlurmUser
    owner = os.stat(secret).st_uid if os.path.exists(secret) else None  # noqa: PTH110, PTH116
    click.echo(TokenSigner(secret, owner).key_line(name))


def _root() -> None:
    if os.geteuid() != 0:
        raise Failure("run it as root: it needs GPUs and files that are for root only")


def _config(etc: str, name: str) -> NodeConfig:
    from slurm_migbatch.node.own_name import load_own

    _root()
    return load_own(etc, name)


@contextmanager
def _executor(config: NodeConfig) -> Iterator[Executor]:
    from slurm_migbatch.node.executor import Executor

    os.umask(0o077)
    executor = Executor(config)
    try:
        yield executor
    finally:
        executor.close()
        executor.gpus.reset()


def _lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)
