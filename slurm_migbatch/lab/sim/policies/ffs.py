"""Run jobs by SJF-FFS: shortest first, sharing the first GPUs that hold one job if empty ones do not suffice.

This is the baseline of "wise resource sharing" (Lai et al., arXiv 2407.13088; the authors' code,
scheduler_impl/schedulers.py): the rule of SJF-BSBF without its test whether sharing pays off, with at most two jobs on
a GPU. The public text does not define the order of partners; here it is the order of the GPUs. Memory is assumed to be
sufficient for both jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from slurm_migbatch.lab.sim.cluster import Place, bit_indexes
from slurm_migbatch.lab.sim.engine import Simulation
from slurm_migbatch.lab.sim.placing import whole_gpus
from slurm_migbatch.lab.sim.policies.queued import Sjf
from slurm_migbatch.lab.sim.run import SimulatedRun


class SjfFfs(Sjf):
    """Shortest job first, on empty GPUs and, if these do not suffice, on GPUs with one job."""

    def __init__(self) -> None:
        super().__init__()
        self.single = 0  # GPUs that hold exactly one job, as bits

    def decide(self, sim: Simulation) -> None:
        """Start the jobs that fit, alone or shared, in order."""
        while (head := self.queue.first((self.free(sim) + self.single.bit_count()).__ge__)) is not None:
            need = head[0]
            places = whole_gpus(sim.cluster, need, self.part)
            if places is None:
                places = whole_gpus(sim.cluster, self.free(sim), self.part) or []
                shared = islice(bit_indexes(self.single), need - len(places))
                places += [sim.cluster.gpus[gpu].whole for gpu in shared]
            self.launch(sim, self.queue.pop(need), places)

    def launch(self, sim: Simulation, run: SimulatedRun, places: Sequence[Place]) -> None:
        """Start a job, and update which of its GPUs hold exactly one job."""
        sim.start(run, places)
        run.note = tuple(places)
        self._note_single(sim, places)

    def complete(self, sim: Simulation, run: SimulatedRun) -> None:
        """Update which of the job's GPUs hold exactly one job."""
        assert isinstance(run.note, tuple)
        self._note_single(sim, run.note)

    def _note_single(self, sim: Simulation, places: Sequence[Place]) -> None:
        for place in places:
            bit = 1 << place.gpu
            self.single = self.single | bit if len(sim.cluster.runs(place)) == 1 else self.single & ~bit
