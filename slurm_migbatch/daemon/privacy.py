"""Determine who may see jobs of other users: Slurm's PrivateData also applies to migbatch.

With `PrivateData=jobs` Slurm shows a job to its owner, to root, to SlurmUser, to operators and administrators, and to
coordinators of its account. A hidden job is answered like one that does not exist. What a user wrote into a job (its
comment, its name) is shown only to these users, also if jobs are not private.
"""

from __future__ import annotations

import asyncio
import pwd
import time
from collections.abc import Collection

from slurm_migbatch.daemon.ended import HistoryClient, Standing
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.slurm.rights import ALL_PRIVATE, Rights

_SETTINGS_S = 60.0
_RETRY_S = 5.0
_STANDING_S = 60.0
_MOST_USERS = 1000


class Privacy:
    """Answers whether a user may see jobs. What cannot be determined counts as private."""

    def __init__(self, slurm: HistoryClient, trusted: Collection[int]) -> None:
        """Set up. `trusted`: root, SlurmUser and this process's own user."""
        self._slurm, self._trusted = slurm, frozenset(trusted)
        self._private = ALL_PRIVATE
        self._accounting = False
        self._due = 0.0
        self._standings: dict[int, tuple[float, Standing]] = {}
        self._lock = asyncio.Lock()

    async def visible(self, uid: int, rows: Collection[JobRow]) -> list[JobRow]:
        """Return the jobs among `rows` that the user may see."""
        if uid in self._trusted or "jobs" not in await self._private_data():
            return list(rows)
        others = any(row.uid != uid for row in rows)
        return (await self.rights(uid) if others else Rights(uid)).jobs(rows)

    async def in_full(self, uid: int, row: JobRow) -> bool:
        """Return whether the user may see what the job's user wrote into it."""
        return uid == row.uid or (await self.rights(uid)).in_full(row.uid, row.account)

    async def rights(self, uid: int) -> Rights:
        """Return the user's rights."""
        if uid in self._trusted:
            return Rights(uid, everything=True)
        private = await self._private_data()
        standing = await self._standing(uid)
        return Rights(uid, standing.operator, standing.accounts, private)

    async def _private_data(self) -> frozenset[str]:
        async with self._lock:
            if time.monotonic() >= self._due:
                try:
                    settings = await asyncio.to_thread(self._slurm.settings)
                except SlurmError:
                    self._private, self._accounting, self._due = ALL_PRIVATE, False, time.monotonic() + _RETRY_S
                else:
                    private = {name.strip() for name in settings.get("privatedata", "").lower().split(",")}
                    self._private = ALL_PRIVATE if "all" in private else ALL_PRIVATE & private
                    self._accounting = settings.get("accountingstoragetype", "").endswith("slurmdbd")
                    self._due = time.monotonic() + _SETTINGS_S
        return self._private

    async def _standing(self, uid: int) -> Standing:
        if not self._accounting:
            return Standing()
        async with self._lock:
            until, standing = self._standings.get(uid, (0.0, Standing()))
            if time.monotonic() >= until:
                if len(self._standings) >= _MOST_USERS:
                    self._standings.clear()
                standing = await asyncio.to_thread(self._ask, uid)
                self._standings[uid] = time.monotonic() + _STANDING_S, standing
        return standing

    def _ask(self, uid: int) -> Standing:
        try:
            return self._slurm.standing(pwd.getpwuid(uid).pw_name)
        except (KeyError, SlurmError):
            return Standing()
