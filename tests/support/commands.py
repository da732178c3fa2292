"""migbatch's commands on a test cluster, run in this process: a new process would spend most of its time on imports."""

from __future__ import annotations

from subprocess import CompletedProcess

from click.testing import CliRunner

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.testbed.cluster import Cluster


def invoke(bed: Cluster, *words: str) -> CompletedProcess[str]:
    """Run `migbatch WORDS` in this process, as root on the controller of a cluster."""
    with CliRunner().isolation(env=bed.client_env(inside=False)) as streams:
        code = run(cli, "migbatch", words)
        out, err = (stream.getvalue().decode() for stream in streams[:2])
    return CompletedProcess(("migbatch", *words), code, out, err)


def migbatch(bed: Cluster, *words: str) -> str:
    """Return the output of `migbatch WORDS`, which must succeed. `bed.product.migbatch` starts a process instead."""
    done = invoke(bed, *words)
    assert done.returncode == 0, f"migbatch {' '.join(words)}: exit {done.returncode}: {done.stderr}"
    return done.stdout
