"""Lua scripts for slurmctld and the user commands, rendered for this site."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_migbatch.cli.common import default_partition
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.config import Config
from slurm_migbatch.daemon.facts import policy_of
from slurm_migbatch.install.hosts import slurm_conf
from slurm_migbatch.submit import shim
from slurm_migbatch.submit.service import reserved
from slurm_migbatch.workload import catalog as catalogs
from slurm_migbatch.workload.catalog import CatalogError, SiteCatalog


def lua(config: Config, name: str, *, module: bool = False) -> str:
    """Render one of the Lua shims with the last known site; `module`: for a site with its own script."""
    submit = config.submit
    try:
        catalog = catalogs.load(Path(submit.catalog))
    except FileNotFoundError:
        catalog = SiteCatalog()
    except CatalogError as error:
        raise Failure(f"{error}; start migbatchd, it rewrites the file") from None
    return shim.render(
        name,
        socket=str(reserved(Path(submit.socket))) if name == shim.JOB_SUBMIT else submit.socket,
        table=submit.table,
        catalog=catalog,
        policy=policy_of(config),
        deadline_ms=submit.deadline_ms,
        default_partition=default_partition(config) if name == shim.CLI_FILTER else "",
        cluster=_cluster(config) if name == shim.JOB_SUBMIT else "",
        module=module,
    )


def _cluster(config: Config) -> str:
    """Return the ClusterName of this host's slurm.conf; empty if there is none."""
    conf = slurm_conf(config.cluster.slurm_conf, os.environ.get("SLURM_CONF", ""))
    return conf.cluster if conf else ""
