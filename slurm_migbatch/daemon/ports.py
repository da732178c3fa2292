"""Interfaces of the service to other packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from slurm_migbatch.daemon.ended import Standing
from slurm_migbatch.slurm.client import JobRow, SlurmClient
from slurm_migbatch.store.progress import RunProgressRow
from slurm_migbatch.store.receipt import NodeReceipt, Receipt
from slurm_migbatch.store.recurring import RecurringRun
from slurm_migbatch.store.retention import PruneCursor, Removed
from slurm_migbatch.store.work import PastRuns, TaskRunRow


class Slurm(SlurmClient, Protocol):
    """The client of slurm_migbatch.slurm, and how jobs ended."""

    def ended(self, job_ids: Collection[int]) -> list[dict[str, Any]]:
        """Return rows about those of `job_ids` that slurmctld still remembers as ended."""

    def settings(self) -> dict[str, str]:
        """Return slurmctld's configuration, keys in lower case."""

    def node_addresses(self) -> Mapping[str, frozenset[str]]:
        """Return the names or addresses of each node's host in Slurm."""

    def requeue_ended(self, job_id: int, *, update: Callable[[JobRow], Mapping[str, str]]) -> None:
        """Requeue an ended batch job or array task, by its own id, with an update."""

    def standing(self, user: str) -> Standing:
        """Return a user's entry in slurmdbd."""


class ServiceStore(Protocol):
    """The record (slurm_migbatch.store)."""

    def ingest(
        self, node: str, journal: str, boot_id: str, events: Sequence[Mapping[str, Any]], claim: NodeReceipt
    ) -> Receipt:
        """Store a node's events; returns how far they are stored, and whether its whole state is known."""

    def record_decisions(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Store decisions of the submit filter."""

    def upsert_jobs(self, rows: Sequence[Mapping[str, Any]], *, live: Collection[int] | None = None) -> None:
        """Store jobs as Slurm shows them; those of ours that are not `live` have left its list."""

    def inventory(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return GPUs by node."""

    def instance_events(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return events about instances by node since its last boot."""

    def last_offers(self) -> Mapping[str, Mapping[str, int]]:
        """Return the last counts of each node."""

    def leases(self, active: bool = True) -> Sequence[Any]:
        """Return slices that are held."""

    def record_supply(self, node: str, ts: float, version: int, counts: Mapping[str, int], why: str) -> None:
        """Store the counts that Slurm was given for a node."""

    def newest_lesson(self) -> int:
        """Return the number of the newest ended run usable for learning."""

    def recurring_runs(self, since: int, limit: int) -> Sequence[RecurringRun]:
        """Return ended runs after that number that the submit filter can recognize."""

    def learnable(self) -> tuple[int, float]:
        """Return the number of the newest lesson, and the time of the newest import of measurements."""

    def save_loans(self, loans: Sequence[Mapping[str, Any]], actions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Store the current loans, and actions on jobs."""

    def loans(
        self, jobs: Collection[int] = (), *, active: bool = False, since: float | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Return loans by decision time."""

    def actions(self, jobs: Collection[int] = (), limit: int = 1000) -> Sequence[Mapping[str, Any]]:
        """Return actions on jobs."""

    def uses(self, since: float) -> Sequence[tuple[str, float, float | None]]:
        """Profile, start and end of what jobs other than loans held."""

    def freed(self, since: float) -> Mapping[str, float]:
        """Return when a job other than a loan last released a slice, by GPU."""

    def job_progress(self, jobs: Collection[int]) -> Sequence[RunProgressRow]:
        """Return the runs of these jobs by their latest reports."""

    def decision(self, id: str) -> Mapping[str, Any] | None:
        """Return one complete decision of the submit filter."""

    def array_runs(self, arrays: Collection[int]) -> Mapping[int, Sequence[TaskRunRow]]:
        """Return the started tasks of these arrays."""

    def past_work(self, since: float) -> Sequence[PastRuns]:
        """Return the use of slices since that time (unix seconds), without loans."""

    def prune(self, before: float, lessons: int, place: PruneCursor | None = None) -> Removed:
        """Remove some of what ended before that time (unix seconds), and return where to continue."""

    def close(self) -> None:
        """Close the database."""
