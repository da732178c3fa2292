"""A controller for the simulated Slurm, nodes and clock of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller, RoundReport
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.decide.supply.stage import SupplySettings
from slurm_migbatch.lab.bench.largesite import NoRecord
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.client import JobRow, NodeRow


class KeptSupply(NoRecord):
    """A record that passes each change of a node's offer to a callback."""

    def __init__(self, keep: Callable[[str, dict[str, int], str], object]) -> None:
        self._keep = keep

    def supply(self, node: str, at: float, version: int, counts: Mapping[str, int], why: str) -> None:
        self._keep(node, dict(counts), why)


class SupplyController(Controller):
    """A controller that decides on supply only; the test sets the pairs of jobs that share a slice."""

    def __init__(
        self,
        slurm: Any,
        nodes: Any,
        clock: Any,
        settings: SupplySettings,
        keep: Callable[[str, dict[str, int], str], object] = lambda node, counts, why: None,
        silence_s: float = 90.0,
    ) -> None:
        self.advertiser = Advertiser(slurm, nodes)
        observer = Observer(nodes.view, nodes, self.advertiser.total, silence_s=silence_s)
        super().__init__(Settings(settings), slurm, observer, self.advertiser, KeptSupply(keep), clock)

    def round(self, jobs: Sequence[JobRow] | None = None, rows: Sequence[NodeRow] | None = None) -> RoundReport:
        """Run a round on these lists, or on new ones: nodes first, so that the jobs in their counts are listed."""
        rows = self._slurm.nodes() if rows is None else rows
        return super().round(self._slurm.jobs() if jobs is None else jobs, rows)

    def prefer(self, order: Sequence[Profile]) -> None:
        """Set the profiles preferred by the history of requests."""
        self.observer.preference = tuple(order)

    def share(self, pairs: Mapping[int, int]) -> None:
        """Set the jobs that share slices: guest -> host."""
        self.memory.supply.pairs = dict(pairs)

    @property
    def shared(self) -> Mapping[int, str]:
        """The pairs that the last round has put into a plan."""
        supply = self.decision.supply if self.decision is not None else None
        return {} if supply is None else supply.shared
