"""`migbatch doctor`: check an installation and say what to do."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Literal, get_args

import click

from slurm_migbatch.cli.common import HELP
from slurm_migbatch.cli.ending import EXIT_FAILED, EXIT_USAGE
from slurm_migbatch.doctor.programs import unreadable_file
from slurm_migbatch.mig.text import printable
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding

Role = Literal["controller", "node", "login"]
_ROLES = click.Choice(get_args(Role))
_CONFIG = "/etc/migbatch/migbatch.toml"
_LOGIN = "/etc/migbatch/login.conf"


@click.command(context_settings=HELP)
@click.option("--role", "given", multiple=True, type=_ROLES, help="Role of this host [default: detected].")
@click.option("--nodes", "everywhere", is_flag=True, help="controller: include the findings of each node.")
@click.option("--leaving", is_flag=True, help="controller: list the jobs that prevent removing mig from slurm.conf.")
@click.option("-c", "--config", metavar="FILE", help=f"controller: migbatch.toml [env MIGBATCH_CONFIG; {_CONFIG}].")
@click.option("--etc", default="/etc/migbatch", show_default=True, metavar="DIR", help="node: directory of node.conf.")
@click.option(
    "--hooks", default="/etc/migbatch/hooks", show_default=True, metavar="DIR", help="node: directory of the hooks."
)
@click.option(
    "--node", "name", default="", metavar="NAME", help="node: node name in Slurm (default: this host's in slurm.conf)."
)
@click.option("--login-conf", default="", metavar="FILE", help=f"login: [env MIGBATCH_LOGIN_CONF; {_LOGIN}]")
@click.option("--slurm-conf", default="", metavar="FILE", help="node, login: [env SLURM_CONF; else where Slurm looks]")
@click.option("--json", "as_json", is_flag=True, help="Findings as one JSON object, for monitoring.")
@click.option("-q", "--quiet", is_flag=True, help="Only problems.")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    given: tuple[Role, ...],
    *,
    everywhere: bool,
    leaving: bool,
    as_json: bool,
    quiet: bool,
    **options: str | None,
) -> None:
    """Check this host and say what to do; nothing is changed.

    It checks the roles of this host: controller (migbatch.toml), node (node.conf), login node. Run it as root for all
    checks. A node's agent runs the same checks once a minute and reports to migbatchd; --nodes shows them on the
    controller.

    \b
    Exit code  0  no problems
               1  problems found (FAIL)
               2  wrong usage, or no problems found but some checks could not run (unknown)
    --json     {"version": 1, "roles": [...], "findings": [{"level", "subject", "text", "advice"}]}
               level: ok, warn, FAIL, unknown
    """
    path = options["config"] or os.environ.get("MIGBATCH_CONFIG", "") or _CONFIG
    chosen = list(given) or roles(path, f"{options['etc']}/node.conf", _LOGIN)
    if everywhere or leaving:
        if given and "controller" not in given:
            raise click.UsageError("--nodes and --leaving are for the controller")
        chosen = ["controller"]
    findings: list[Finding] = []
    for role in chosen:
        try:
            findings += _examine(role, path, options, everywhere, leaving)
        except PermissionError as error:
            findings.append(unreadable_file(error))
    if as_json:
        shown = [found._asdict() for found in findings]
        click.echo(json.dumps({"version": 1, "roles": chosen, "findings": shown}))
    else:
        print_findings(findings, quiet)
    levels = {found.level for found in findings}
    if FAIL in levels or UNKNOWN in levels:
        ctx.exit(EXIT_FAILED if FAIL in levels else EXIT_USAGE)


def roles(config: str, node_conf: str, login_conf: str) -> list[Role]:
    """Return the roles of this host by its files: migbatch.toml, node.conf and login.conf.

    A host with none of the three is a controller where the packages of that extra are installed, else a login node:
    `--role login` writes nothing on most.
    """
    files: dict[Role, str] = {"controller": config, "node": node_conf, "login": login_conf}
    found = [role for role, path in files.items() if os.path.exists(path)]  # noqa: PTH110 - as other commands do
    return found or ["controller" if find_spec("sqlalchemy") else "login"]


def _examine(
    role: Role, path: str, options: dict[str, str | None], everywhere: bool, leaving: bool
) -> Iterator[Finding]:
    """Yield the findings of one role; its modules are imported here, because hosts have different packages."""
    if role == "node":
        from slurm_migbatch.doctor.node import NodePlaces, examine

        words = {key: options[key] or "" for key in ("etc", "hooks", "slurm_conf", "name")}
        yield from examine(NodePlaces(**words))
    elif role == "login":
        from slurm_migbatch.doctor.login import examine as examine_login

        yield from examine_login(options["slurm_conf"] or "", options["login_conf"] or "")
    else:
        yield from _controller(path, explicit=options["config"] is not None, everywhere=everywhere, leaving=leaving)


def _controller(path: str, *, explicit: bool, everywhere: bool, leaving: bool) -> Iterator[Finding]:
    from slurm_migbatch.cli.ending import Failure
    from slurm_migbatch.cli.scripts import lua
    from slurm_migbatch.config import Config, load
    from slurm_migbatch.doctor import controller
    from slurm_migbatch.doctor.lua import RenderingError

    present = explicit or path != _CONFIG or os.path.exists(path)  # noqa: PTH110 - as other commands do
    config = load(path) if present else Config()

    def rendering(name: str, module: bool) -> str:
        try:
            return lua(config, name, module=module)
        except Failure as error:
            raise RenderingError(str(error)) from None

    yield from controller.leaving(config) if leaving else controller.examine(config, rendering, everywhere=everywhere)


def print_findings(findings: Sequence[Finding], quiet: bool) -> None:
    """Print findings, each with its advice, and their number; `quiet`: only problems.

    They may contain foreign text: names of processes, hosts and files.
    """
    for found in findings:
        if found.level == OK and quiet:
            continue
        click.echo(printable(f"{found.level:<7} {found.subject}: {found.text}"))
        if found.advice:
            click.echo(printable(f"        -> {found.advice}"))
    count = Counter(found.level for found in findings)
    unmade = f", {count[UNKNOWN]} could not run" if count[UNKNOWN] else ""
    click.echo(f"{len(findings)} checks, {count[FAIL]} failed, {count[WARN]} warnings{unmade}")
