"""Filter each sbatch of a simulated site by `submit.rewrite`, as migbatchd's submit service does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.daemon import catalog as catalogs
from slurm_migbatch.lab.slurm.record import MemoryRecord
from slurm_migbatch.lab.slurm.run import SlurmSimulation, Submission
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.workload.catalog import SiteCatalog

FIRST_UID: Final = 10_000
"""Minimum uid of users of a simulation: lower ones may be trusted users, who are not filtered."""


def catalog_of(simulation: SlurmSimulation, config: Config) -> SiteCatalog:
    """Return the catalog that migbatchd would build of the simulated nodes."""
    geometries = {name: list(gpus.values()) for name, gpus in simulation.nodes.gpus.items()}
    rows = [simulation.slurm.node_row(machine) for machine in simulation.slurm.machines.values()]
    return catalogs.build(geometries, rows, config)


class SubmitFilter:
    """Filter submissions; every decision is recorded under an id of its own.

    Args:
        chooser: chooses the slice of `mig:auto`.
        clock: returns unix seconds.
        spelled: returns GRES in the form that this release of Slurm passes to its filters.
    """

    def __init__(
        self,
        catalog: SiteCatalog,
        chooser: Chooser,
        record: MemoryRecord,
        config: Config,
        clock: Callable[[], float],
        spelled: Callable[[str], str],
    ) -> None:
        self._catalog, self._chooser, self._record = catalog, chooser, record
        self._policy = SubmitPolicy(hints_in_extra=config.submit.allow_extra)
        self._clock, self._spelled = clock, spelled
        self._numbers = itertools.count(1)

    def __call__(self, submission: Submission) -> Submission:
        """Return the submission as Slurm gets it. Raises SlurmError with the message that its user would get."""
        nodes = submission.fields.get("num_nodes", 1)
        request = JobRequest(
            uid=submission.fields.get("uid", FIRST_UID),
            user=submission.fields.get("user", ""),
            partition=submission.partition,
            tres_per_node=self._spelled(submission.gres),
            comment=submission.fields.get("comment") or None,
            min_nodes=nodes,
            max_nodes=nodes,
            batch=1,
        )
        decision_id = f"{next(self._numbers):08d}"
        answer = rewrite(request, self._catalog, self._chooser, self._policy, decision_id=decision_id, ts=self._clock())
        if isinstance(answer, Refuse):
            raise SlurmError(answer.sentence)
        if not isinstance(answer, Accept):
            return submission
        if answer.decision is not None:
            self._record.decided(answer.decision)
        gres = answer.changes.get("tres_per_node", submission.gres)
        fields = {**submission.fields, "comment": answer.changes.get("comment", submission.fields.get("comment", ""))}
        return replace(submission, gres=gres, fields=fields)
