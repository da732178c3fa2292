"""Implement GRMU's rules (arXiv 2502.01909): a basket of GPUs for whole-GPU slices, one for all others, and moves.

A reconstruction from the paper's description; there is no public code. Its assumptions favour the rules more than the
paper's: every job may move, inference too, at once and at no cost, and GPUs are consolidated whenever that helps.

- Baskets: a basket without room takes an empty GPU, up to its quota; a GPU that becomes empty belongs to neither.
  Within a basket the first GPU with room is used.
- Defragmentation: if a slice fits on no GPU of its basket, the slices of one GPU are rearranged so that it fits there.
- Consolidation: if a whole GPU is needed and none is empty, the slices of two GPUs are put on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from slurm_migbatch.lab.papers.placement import places
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.layout import EMPTY, Layout, Slot
from slurm_migbatch.mig.planning import plan_free
from slurm_migbatch.mig.profile import Profile

Jobs = dict[int, Slot]
"""The jobs on one GPU, by number, with their slots."""


class Grmu:
    """GPUs on which jobs are placed and moved; at most `quota` of them are in the basket for whole GPUs."""

    def __init__(self, gpu: Geometry, count: int, quota: int) -> None:
        self.gpu, self.quota = gpu, quota
        self._gpus: list[Jobs] = [{} for _ in range(count)]
        self._where: dict[int, int] = {}
        self._placed = 0

    def place(self, profile: Profile) -> Callable[[], None] | None:
        """Place a slice, moving others if that helps; return the function that removes it, None if it does not fit."""
        self._placed += 1
        job = self._placed
        number = self._whole(job, profile) if profile == self.gpu.full.profile else self._part(job, profile)
        if number is None:
            return None
        self._where[job] = number
        return lambda: self._take_back(job)

    def layouts(self) -> list[Layout]:
        """Return the layout of each GPU."""
        return [Layout(jobs.values()) for jobs in self._gpus]

    def _take_back(self, job: int) -> None:
        del self._gpus[self._where.pop(job)][job]

    def _whole(self, job: int, profile: Profile) -> int | None:
        if sum(map(self._is_whole, self._gpus)) >= self.quota:
            return None
        if (number := self._empty()) is None:
            number = self._merged()
        if number is not None:
            self._gpus[number] = {job: places(self.gpu, EMPTY, profile)[0]}
        return number

    def _part(self, job: int, profile: Profile) -> int | None:
        basket = [number for number, jobs in enumerate(self._gpus) if jobs and not self._is_whole(jobs)]
        for number in basket:
            if slots := places(self.gpu, Layout(self._gpus[number].values()), profile):
                self._gpus[number][job] = slots[0]
                return number
        for number in basket:
            profiles = {other: slot.profile for other, slot in self._gpus[number].items()}
            if (jobs := self._laid_out({**profiles, job: profile})) is not None:
                self._gpus[number] = jobs
                return number
        empty = self._empty() if len(basket) < len(self._gpus) - self.quota else None
        if empty is not None:
            self._gpus[empty] = {job: places(self.gpu, EMPTY, profile)[0]}
        return empty

    def _merged(self) -> int | None:
        """Put the slices of two GPUs on one of them; return the other, None if no two fit on one."""
        partial = [number for number, jobs in enumerate(self._gpus) if not self._is_whole(jobs)]
        for kept, emptied in combinations(partial, 2):
            both = {**self._gpus[kept], **self._gpus[emptied]}
            if (jobs := self._laid_out({job: slot.profile for job, slot in both.items()})) is not None:
                self._where.update(dict.fromkeys(self._gpus[emptied], kept))
                self._gpus[kept], self._gpus[emptied] = jobs, {}
                return emptied
        return None

    def _laid_out(self, profiles: Mapping[int, Profile]) -> Jobs | None:
        """Return slots of one GPU for all of these jobs; None if they do not fit."""
        if sum(self.gpu.info(profile).memory_slices for profile in profiles.values()) > self.gpu.memory_slices:
            return None
        layout = plan_free(self.gpu, EMPTY, tuple(profiles.values()))
        if len(layout.slots) < len(profiles):
            return None
        free = list(layout.slots)
        jobs: Jobs = {}
        for job, profile in profiles.items():
            slot = next(slot for slot in free if slot.profile == profile)
            free.remove(slot)
            jobs[job] = slot
        return jobs

    def _is_whole(self, jobs: Jobs) -> bool:
        return any(slot.profile == self.gpu.full.profile for slot in jobs.values())

    def _empty(self) -> int | None:
        return next((number for number, jobs in enumerate(self._gpus) if not jobs), None)
