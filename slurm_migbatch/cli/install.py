"""`migbatch install`: show, apply and undo the changes that a host needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from slurm_migbatch.cli.common import HELP
from slurm_migbatch.cli.ending import EXIT_FAILED, Failure
from slurm_migbatch.install import files, hosts
from slurm_migbatch.install.files import FileChange, InstallRecord
from slurm_migbatch.install.hosts import HostPlan, Places
from slurm_migbatch.install.leftovers import leftovers
from slurm_migbatch.install.slurmconf import INCLUDED
from slurm_migbatch.node.install import check_plain, compile_imports

_CONFIG = "/etc/migbatch/migbatch.toml"
_RECORD = "/var/lib/migbatch/install"


def _url(_context: click.Context, _option: click.Parameter, value: str) -> str:
    """Return the value of --store; for `-` what standard input has, asked for without an echo if it is a terminal."""
    if value != "-":
        return value
    asked = sys.stdin.isatty()
    url: str = click.prompt("Database URL", hide_input=True, err=True) if asked else sys.stdin.readline()
    if not (url := url.strip()):
        raise click.BadParameter("standard input has no URL")
    return url


@click.command(context_settings=HELP)
@click.option("--role", required=True, type=click.Choice(("controller", "node", "login")), help="Role of this host.")
@click.option("--apply/--dry-run", "apply", help="Apply the changes; without it only show them.")
@click.option("--edit", is_flag=True, help="Change the lines shown in the site's own files too.")
@click.option("--uninstall", is_flag=True, help="Undo what was changed on this host.")
@click.option("--full", is_flag=True, help="Show long new files in full.")
@click.option("-c", "--config", default="", metavar="FILE", help=f"migbatch.toml [env MIGBATCH_CONFIG; {_CONFIG}].")
@click.option("--slurm-conf", default="", metavar="FILE", help="[env SLURM_CONF; else where Slurm looks]")
@click.option("--prefix", default=sys.prefix, metavar="DIR", show_default="this one", help="The virtual environment.")
@click.option("--hooks", default="/etc/migbatch/hooks", show_default=True, metavar="DIR", help="For hooks on nodes.")
@click.option("--etc", default="/etc/migbatch", show_default=True, metavar="DIR", help="Directory of node.conf.")
@click.option("--systemd", default="/etc/systemd/system", show_default=True, metavar="DIR", help="For units.")
@click.option("--record", default=_RECORD, show_default=True, metavar="DIR", help="For backups and digests.")
@click.option("--user", default="", help="controller: user of migbatchd, root or SlurmUser [unchanged; at first root].")
@click.option(
    "--store",
    default="",
    metavar="URL",
    callback=_url,
    help="controller: database URL for a new migbatch.toml; two controllers share one. `-` reads it from standard "
    "input: every user of the host can read the arguments of commands, and with them a password.",
)
@click.option(
    "--cli-filter/--no-cli-filter",
    default=None,
    help="controller: enable cli_filter.lua, which srun and salloc need for mig:auto and --gpus. srun, salloc and "
    "sbatch fail on hosts without the file.",
)
@click.option("--slurm-down", is_flag=True, help="controller --uninstall: slurmctld is down; do not query it.")
@click.option("--controller", default="", metavar="URL", help="node: URL of migbatchd [http://SlurmctldHost:6830].")
@click.option("--python", default="", help="node: interpreter of the hooks [that of --prefix].")
@click.option(
    "--task-python", default="", help="node: interpreter of TaskProlog, if users cannot run that of the hooks."
)
@click.pass_context
def install(
    ctx: click.Context,
    /,
    role: str,
    *,
    apply: bool,
    edit: bool,
    uninstall: bool,
    full: bool,
    cli_filter: bool | None,
    **options: str,
) -> None:
    """Install migbatch on a host of a Slurm cluster, or show what that would change.

    Without --apply nothing is changed: changes are shown as a diff, and lines of the site's own files to change with
    file and line. --edit includes these in the diff. The exit code is 1 if changes are needed, 0 if not. Every file is
    backed up; --uninstall restores it.
    """
    if os.geteuid() != 0:
        raise Failure("this changes files of root: run it as root")
    record = InstallRecord(Path(options["record"]))
    if uninstall:
        _may_leave(role, options, record)
        changes = files.leaving(record)
        plan = HostPlan(problems=list(_still_needed(options, changes)))
        if plan.problems:
            changes = []
    else:
        plan = _plan(role, options, record, edit=edit, cli_filter=cli_filter)
        changes = files.differing(plan.wanted, record)
    _show(plan, changes, full)
    undone = [*plan.lines, *plan.problems, *_conflicts(changes)]
    if apply:
        if plan.python:
            compile_imports(plan.python)
        files.apply(changes, record)
        if role == "controller":
            _wake(changes)
        _print_next_steps(plan, changes, uninstall, role)
    if undone or (not apply and any(not change.conflict for change in changes)):
        ctx.exit(EXIT_FAILED)


def _plan(
    role: str, options: dict[str, str], record: InstallRecord, *, edit: bool, cli_filter: bool | None
) -> HostPlan:
    given = options["slurm_conf"] or os.environ.get("SLURM_CONF", "")
    conf = hosts.slurm_conf(_absolute(given), "")
    if conf is None and given:
        raise Failure(f"{given} does not exist; correct --slurm-conf or SLURM_CONF")
    if conf is None and role == "login":
        note = "no slurm.conf in Slurm's default location; use --slurm-conf unless this host is configless"
        return HostPlan(notes=[note])
    if conf is None:
        raise Failure("no slurm.conf in Slurm's default location; use --slurm-conf")
    names = {name: Path(options[name]) for name in ("prefix", "hooks", "etc", "systemd")}
    places = Places(**names)
    for place in (places.prefix, places.hooks, places.etc):
        check_plain(place)
    if role == "node":
        words = {name: options[name] for name in ("controller", "python", "task_python")}
        return hosts.node(places, conf, edit=edit, release=hosts.slurm_release(conf), **words)
    if role == "login":
        return hosts.login(conf)
    from slurm_migbatch.cli.installcontroller import Choices, controller

    choices = Choices(_config_path(options), options["user"], options["store"], cli_filter, edit)
    return controller(places, conf, choices, record)


def _config_path(options: dict[str, str]) -> str:
    return _absolute(options["config"] or os.environ.get("MIGBATCH_CONFIG", "") or _CONFIG)


def _absolute(path: str) -> str:
    """Return the absolute path: services, Slurm and the record of the installation name it. Empty remains empty."""
    return str(Path.cwd() / path) if path else ""


def _may_leave(role: str, options: dict[str, str], record: InstallRecord) -> None:
    """Refuse to remove mig from slurm.conf while jobs request it; a host of both roles has one record of both."""
    both = any(Path(path).name == INCLUDED for path in record.entries)
    if (role != "controller" and not both) or options["slurm_down"]:
        return
    from slurm_migbatch.cli.common import slurm_client
    from slurm_migbatch.config import Config, load
    from slurm_migbatch.doctor.leaving import check_leaving
    from slurm_migbatch.node.findings import FAIL
    from slurm_migbatch.slurm.client import SlurmError

    path = _config_path(options)
    try:
        jobs = slurm_client(load(path) if Path(path).exists() else Config()).jobs()
    except SlurmError as error:
        raise Failure(
            f"cannot list the jobs that need slices: {error}; if slurmctld is stopped, add --slurm-down"
        ) from None
    found = [finding for finding in check_leaving(jobs) if finding.level == FAIL]
    if found:
        raise Failure("; ".join(f"{finding.text}: {finding.advice}" for finding in found))


def _still_needed(options: dict[str, str], changes: Sequence[FileChange]) -> Iterator[str]:
    """Yield the lines of Slurm's files that prevent the removal: they name what is removed and are not restored."""
    if any(change.conflict and change.kind == "site" for change in changes):
        return  # nothing is removed until these are resolved
    own_file = next((change.path for change in changes if Path(change.path).name == INCLUDED), "")
    given = _absolute(options["slurm_conf"]) or (str(Path(own_file).with_name("slurm.conf")) if own_file else "")
    conf = hosts.slurm_conf(given, os.environ.get("SLURM_CONF", ""))
    if conf is not None:
        yield from leftovers(conf.main, changes)


def _show(plan: HostPlan, changes: Sequence[FileChange], full: bool) -> None:
    for line in files.diff(changes, full=full):
        click.echo(line)
    for title, lines in (
        ("must be changed by hand or with --edit:", plan.lines),
        ("must be resolved first:", [*plan.problems, *_conflicts(changes)]),
        ("to know:", [*plan.notes, *(change.conflict for change in changes if change.conflict and _is_kept(change))]),
    ):
        if lines:
            click.echo(title)
        for line in lines:
            click.echo(f"  {line}")
    if not (changes or plan.lines or plan.problems):
        click.echo("nothing to do")


def _conflicts(changes: Sequence[FileChange]) -> list[str]:
    """Return why changes cannot be made; settings changed by the site are kept."""
    return [change.conflict for change in changes if change.conflict and not _is_kept(change)]


def _is_kept(change: FileChange) -> bool:
    return change.kind == "once" and change.back


def _wake(changes: Sequence[FileChange]) -> None:
    """Make slurmctld reload scripts that load a changed file of migbatch."""
    from slurm_migbatch.cli.installcontroller import scripts_to_reload

    for path in scripts_to_reload({change.path for change in changes if not change.conflict}):
        os.utime(path)


def _print_next_steps(plan: HostPlan, changes: Sequence[FileChange], uninstall: bool, role: str) -> None:
    made = sum(not change.conflict for change in changes)
    click.echo(f"{made} files and directories changed")
    if not made:
        return
    if uninstall and role == "controller":
        click.echo("next: restart slurmctld, and slurmd on every node; systemctl disable --now migbatchd")
    elif uninstall and role == "node":
        click.echo(
            "next: systemctl disable --now migbatch-node; /var/lib/migbatch holds the journal and may be removed; GPUs "
            "stay in MIG mode (nvidia-smi -mig 0)"
        )
    for line in plan.next:
        click.echo(f"next: {line}")
