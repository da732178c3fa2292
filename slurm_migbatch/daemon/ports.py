"""What the service needs from other rooms, as it uses it."""

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
        """Return the names or addresses by which Slurm knows each node's host."""

    def requeue_ended(self, job_id: int, *, update: Callable[[JobRow], Mapping[str, str]]) -> None:
        """Put a batch job or a task of an array, by its own id, that has ended back into the queue, changed."""

    def standing(self, user: str) -> Standing:
        """Return what slurmdbd says of a user."""


class ServiceStore(Protocol):
    """The record (slurm_migbatch.store)."""

    def ingest(
        self, node: str, journal: str, boot_id: str, events: Sequence[Mapping[str, Any]], claim: NodeReceipt
    ) -> Receipt:
        """Keep a node's events; returns how far they are stored, and whether all that it holds is known."""

    def record_decisions(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the submit filter decided."""

    def upsert_jobs(self, rows: Sequence[Mapping[str, Any]], *, live: Collection[int] | None = None) -> None:
        """Keep jobs as Slurm shows them; those of ours that are not `live` have left its list."""

    def inventory(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return GPUs by node."""

    def instance_events(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return events about instances by node since its last boot."""

    def last_offers(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counts that each node was given last."""

    def leases(self, active: bool = True) -> Sequence[Any]:
        """Return slices that are held."""

    def record_supply(self, node: str, ts: float, version: int, counts: Mapping[str, int], why: str) -> None:
        """Keep the counts that Slurm was given for a node."""

    def newest_lesson(self) -> int:
        """Return the number of the newest ended run that can be learned from."""

    def recurring_runs(self, since: int, limit: int) -> Sequence[RecurringRun]:
        """Return ended runs after that number that the submit filter can know again."""

    def learnable(self) -> tuple[int, float]:
        """Return the number of the newest lesson, and the moment of the newest import of measurements."""

    def save_loans(self, loans: Sequence[Mapping[str, Any]], actions: Sequence[Mapping[str, Any]] = ()) -> None:
        """Keep loans as they are now, and what was done to jobs."""

    def loans(
        self, jobs: Collection[int] = (), *, active: bool = False, since: float | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Return loans by their decision."""

    def actions(self, jobs: Collection[int] = (), limit: int = 1000) -> Sequence[Mapping[str, Any]]:
        """Return what was done to jobs."""

    def uses(self, since: float) -> Sequence[tuple[str, float, float | None]]:
        """Profile, beginning and end of what jobs other than loans held."""

    def freed(self, since: float) -> Mapping[str, float]:
        """Return when a job other than a loan last gave a slice back, by GPU."""

    def job_progress(self, jobs: Collection[int]) -> Sequence[RunProgressRow]:
        """Return the runs of these jobs by their latest reports."""

    def decision(self, id: str) -> Mapping[str, Any] | None:
        """Return one decision of the submit filter in full."""

    def array_runs(self, arrays: Collection[int]) -> Mapping[int, Sequence[TaskRunRow]]:
        """Return how the tasks of these arrays went that have started."""

    def past_work(self, since: float) -> Sequence[PastRuns]:
        """Return what slices were used for since that moment (unix seconds), loans left out."""

    def prune(self, before: float, lessons: int, place: PruneCursor | None = None) -> Removed:
        """Remove some of what ended before that moment (unix seconds), and say where to go on."""

    def close(self) -> None:
        """Let go of the database."""
