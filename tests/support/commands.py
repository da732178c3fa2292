"""migbatch's commands on a test cluster, without a program for each: a program mostly imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from click.testing import CliRunner

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.testbed.cluster import Cluster


@dataclass(frozen=True)
class Said:
    """What a command has left: its exit code, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def said(words: tuple[str, ...], env: Mapping[str, str]) -> Said:
    """Run `migbatch WORDS` in this process with further variables of the environment."""
    with CliRunner().isolation(env=env) as streams:
        code = run(cli, "migbatch", words)
        out, err = (stream.getvalue().decode() for stream in streams[:2])
    return Said(code, out, err)


def said_on(bed: Cluster, *words: str) -> Said:
    """Run `migbatch WORDS` as root on the controller of a cluster."""
    return said(words, bed.client_env(inside=False))


def migbatch(bed: Cluster, *words: str) -> str:
    """Return what `migbatch WORDS` writes there; it must not fail. `bed.product.migbatch` starts the program."""
    done = said_on(bed, *words)
    assert done.returncode == 0, f"migbatch {' '.join(words)}: exit {done.returncode}: {done.stderr}"
    return done.stdout
