"""Two clusters on one slurmdbd, each with its own slurmctld and its own migbatchd; their nodes have the same names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from slurm_migbatch.testbed.cluster import Cluster
from slurm_migbatch.testbed.database import ACCOUNT
from slurm_migbatch.testbed.running_cluster import write_private
from tests.support.waiting import eventually

#: commands show all clusters of a federation by default
OPTIONS = {"FederationParameters": "fed_display"}


class SecondCluster(Cluster):
    """A test bed with the munge key and the slurmdbd of another one."""

    def __init__(self, first: Cluster, name: str, **spec: Any) -> None:
        super().__init__(name=name, users=first.spec.users, slurm_root=first.spec.slurm_root, **spec)
        self._first = first
        accounting = {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "127.0.0.1",
            "AccountingStoragePort": str(first.ports["slurmdbd"]),
            "AccountingStoragePass": str(self.munge_socket),
        }
        self.spec = replace(self.spec, options={**self.spec.options, **accounting})

    def _prepare(self) -> None:
        super()._prepare()
        write_private(self.directory / "munge/key", (self._first.directory / "munge/key").read_bytes())


@contextmanager
def two_clusters(slurm_root: str) -> Iterator[tuple[Cluster, Cluster]]:
    """Run the clusters `one` and `two`, one node each; slurmdbd knows the address of both slurmctld."""
    spec: dict[str, Any] = {"nodes": 1, "gpus": 1, "migbatch": "all", "options": OPTIONS}
    with Cluster(name="one", dbd=True, users=1, slurm_root=slurm_root, **spec) as first:
        first.run(["sacctmgr", "-i", "add", "cluster", "two"])
        first.run(["sacctmgr", "-i", "add", "account", ACCOUNT, "Cluster=two"])
        first.run(["sacctmgr", "-i", "add", "user", first.users[0].name, f"Account={ACCOUNT}", "Cluster=two"])
        with SecondCluster(first, "two", **spec) as second:
            eventually(lambda: registered(first) == {"one", "two"})
            yield first, second


def registered(bed: Cluster) -> set[str]:
    """Return the clusters whose slurmctld's address slurmdbd knows."""
    rows = bed.run(["sacctmgr", "-n", "-P", "list", "cluster", "format=cluster,controlport"]).stdout.splitlines()
    return {name for name, port in (row.split("|") for row in rows) if port not in ("", "0")}
