"""`migbatch db`: back up, restore and check the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import click

from slurm_migbatch.cli.common import HELP, Group, config_option, show_stage
from slurm_migbatch.cli.ending import EXIT_FAILED, Failure
from slurm_migbatch.config import Config

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=Group, context_settings=HELP)
def db() -> None:
    """Back up, restore, check and upgrade the record ([store] url of migbatch.toml)."""


@db.command()
@click.argument("file", type=_FILE)
@config_option
def backup(config: Config, file: Path) -> None:
    """Back up the whole record to FILE, while migbatchd runs.

    FILE must not exist; it is readable by its owner only, and appears once it is complete: an SQLite database, whatever
    kind of database the record is in.
    """
    from slurm_migbatch.store.backup import back_up
    from slurm_migbatch.store.history import HISTORY

    show_stage("copying the record and verifying the copy")
    made = back_up(config.store.url, file, HISTORY)
    click.echo(f"{made.path}: {made.size / 1024:.0f} KiB, schema {made.schema!r}")


@db.command()
@click.argument("file", type=_FILE)
@click.option("--replace", is_flag=True, help="Replace a non-empty database; on a server its content is lost.")
@config_option
def restore(config: Config, file: Path, replace: bool) -> None:
    """Replace the record by the backup FILE while migbatchd is stopped.

    A backup can be restored to any kind of database. Nodes report what they hold again once migbatchd runs.
    """
    from slurm_migbatch.store.history import HISTORY
    from slurm_migbatch.store.restore import restore as put_back

    if not file.exists():
        raise Failure(f"no such backup: {file}")
    with _stopped(config):
        show_stage("verifying the backup and replacing the record")
        done = put_back(file, config.store.url, HISTORY, replace=replace)
    click.echo(f"restored {file}, schema {done.schema!r}; start migbatchd, and nodes will report what they hold")
    if done.before is not None:
        click.echo(f"the previous database is {done.before}")


@db.command()
@click.argument("file", type=_FILE, required=False)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Findings as one JSON object, for monitoring.")
@click.option("-q", "--quiet", is_flag=True, help="Only problems.")
@click.pass_context
def check(ctx: click.Context, config: Config, file: Path | None, as_json: bool, quiet: bool) -> None:
    """Check the record, or the backup FILE; nothing is changed.

    \b
    Exit code  0  no problems
               1  problems found (FAIL)
    --json     {"version": 1, "findings": [{"level", "subject", "text", "advice"}]}, level: ok, warn, FAIL
    """
    from slurm_migbatch.cli.doctor import print_findings
    from slurm_migbatch.doctor.record import check_record
    from slurm_migbatch.node.findings import FAIL
    from slurm_migbatch.store.engines import file_url

    store = config.store
    url = store.url if file is None else file_url(file)
    show_stage(f"checking {'the record' if file is None else file}")
    findings = list(check_record(url, store.keep_s, live=file is None))
    if as_json:
        click.echo(json.dumps({"version": 1, "findings": [found._asdict() for found in findings]}))
    else:
        print_findings(findings, quiet)
    if any(found.level == FAIL for found in findings):
        ctx.exit(EXIT_FAILED)


@db.command()
@click.option("--no-backup", is_flag=True, help="SQLite: do not copy the file first; make your own backup.")
@config_option
def upgrade(config: Config, no_backup: bool) -> None:
    """Migrate the record to this release's schema, as migbatchd does at its start; migbatchd must be stopped."""
    from slurm_migbatch.store.db import open_store
    from slurm_migbatch.store.engines import sqlite_file
    from slurm_migbatch.store.history import HISTORY
    from slurm_migbatch.store.ownership import acting_as_owner

    file = sqlite_file(config.store.url)
    with _stopped(config), acting_as_owner(file.parent) if file is not None else nullcontext():
        open_store(config.store.url, backup=not no_backup).close()
    click.echo(f"schema {HISTORY[-1].name!r}")


@contextmanager
def _stopped(config: Config) -> Iterator[None]:
    """Prevent migbatchd of this host from running."""
    from slurm_migbatch.daemon.lock import InstanceLock

    lock = InstanceLock(Path(config.daemon.run_dir))
    new = [path for path in (lock.path, lock.path.parent) if not path.exists()]
    try:
        lock.acquire()
    except OSError as error:
        raise Failure(f"{lock.path}: {error.strerror}; run this as migbatchd's user or as root") from None
    try:
        yield
    finally:
        # migbatchd running as another user could not use a file created by root; nobody waits while it is locked
        if lock.path in new:
            lock.path.unlink()
        lock.release()
        if lock.path.parent in new:
            with suppress(OSError):
                lock.path.parent.rmdir()
