"""The program `migbatchd`, also as `python -m slurm_migbatch.cli.migbatchd`."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import click

from slurm_migbatch.cli.common import HELP, run
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.config import DEFAULT_PATH


@click.command(context_settings=HELP)
@click.option(
    "-c",
    "--config",
    "path",
    envvar="MIGBATCH_CONFIG",
    default=DEFAULT_PATH,
    show_default=True,
    metavar="FILE",
    help="Configuration file.",
)
def migbatchd(path: str) -> None:
    """The migbatch service of the controller host.

    Runs in the foreground and logs to stderr. SIGTERM ends it, SIGHUP reads the configuration again.
    """
    from slurm_migbatch.config import load
    from slurm_migbatch.daemon import log as logs
    from slurm_migbatch.daemon.garbage import uncollected
    from slurm_migbatch.daemon.lock import InstanceLock

    with uncollected():  # modules are no garbage, and each of the collections would go through all of them
        from slurm_migbatch.daemon.main import serve

    config = load(path)
    logs.setup(config.daemon.log_level)
    os.umask(0o022)
    # a submission must not wait for a computing thread: the interpreter's default of 5 ms would be its p99
    sys.setswitchinterval(0.0005)
    lock = InstanceLock(Path(config.daemon.run_dir))
    try:
        lock.acquire()
    except OSError as error:
        advice = "run migbatchd as root or as SlurmUser; `migbatch install --role controller` names files of others"
        if error.errno == errno.ENOSPC:
            advice = f"free space in {lock.path.parent}"
        raise Failure(f"{lock.path}: {error.strerror}; {advice}") from None
    try:
        asyncio.run(serve(config, path))
    finally:
        lock.release()


def main() -> None:
    """Run the command."""
    sys.exit(run(migbatchd, "migbatchd"))


if __name__ == "__main__":
    main()
