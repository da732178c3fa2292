"""Represent the rows of the journal (`journal.py`): slices and runs."""

from __future__ import annotations

import time
from typing import NamedTuple

from slurm_migbatch.mig.driver import Instance
from slurm_migbatch.mig.layout import Slot

IN_FLIGHT = ("intent", "evict")
OCCUPYING = ("intent", "evict", "held", "idle", "zombie", "foreign")


class JournalSlice(NamedTuple):
    """One row of `slices`. `uid` of an idle row is its last user; `cap_gi` and `cap_ci` are capability minors.

    `beside` is the id of the first holder's row if this is a second holder's; `shared`: this holder has shared the
    slice at some time.
    """

    gpu: str
    slot: Slot
    state: str
    gi: int | None = None
    ci: int | None = None
    mig_uuid: str | None = None
    cap_gi: int | None = None
    cap_ci: int | None = None
    job: int | None = None
    restart: int | None = None
    ordinal: int | None = None
    uid: int | None = None
    warm: bool = False
    owner: str = ""
    since: float = 0.0
    reason: str = ""
    beside: int | None = None
    shared: bool = False
    id: int | None = None

    @property
    def place(self) -> dict[str, object]:
        """The fields that identify the slice in events."""
        return {
            "gpu": self.gpu,
            "profile": self.slot.profile.name,
            "start": self.slot.placement.start,
            "size": self.slot.placement.size,
            "gi": self.gi,
        }

    @property
    def event_fields(self) -> dict[str, object]:
        """The slice in `start` and `stop` events."""
        return {**self.place, "ci": self.ci, "mig_uuid": self.mig_uuid}

    def freed(self, state: str, reason: str = "") -> JournalSlice:
        """Return the same slot and instance in another state, without a holder; the last user is kept."""
        return self._replace(
            state=state,
            reason=reason,
            job=None,
            restart=None,
            ordinal=None,
            owner="",
            warm=False,
            shared=False,
            since=time.time(),
        )

    def on(self, instance: Instance, minors: tuple[int | None, int | None] = (None, None)) -> JournalSlice:
        """Return the row with the ids of the instance in its slot, and its capability minors if known."""
        gi, ci = minors
        return self._replace(gi=instance.gi_id, ci=instance.ci_id, mig_uuid=instance.mig_uuid, cap_gi=gi, cap_ci=ci)

    def __str__(self) -> str:
        return f"{self.slot} on {self.gpu}"


class JournalRun(NamedTuple):
    """One row of `runs`. `marker` is the grant as `mig/grant.py` writes it, empty for a run that never had one; for a
    job with `cuda=index` it begins as the comment does (`cudaform.kept`).
    """

    job: int
    restart: int
    uid: int
    user: str
    account: str
    partition: str
    marker: str
    state: str
    owner: str = ""
    since: float = 0.0
    exit_code: int | None = None

    @property
    def decision(self) -> str:
        """The submit filter's decision that the grant names, if it names one."""
        return self.marker.rstrip("]").partition("#")[2]

    def __str__(self) -> str:
        return f"job {self.job} run {self.restart}"
