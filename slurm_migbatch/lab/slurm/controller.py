"""Run migbatchd's submit filter and its rounds on a simulation, with the migbatch.toml of a site.

The record is in memory (`record.MemoryRecord`); the caller passes data of the time before the simulation.
"""

from __future__ import annotations

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller
from slurm_migbatch.daemon.facts import SitePredictions
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.settings import blackout_of, settings_of
from slurm_migbatch.decide.snapshot import LendingPast, Predictions
from slurm_migbatch.lab.slurm.filter import SubmitFilter, catalog_of
from slurm_migbatch.lab.slurm.record import MemoryRecord
from slurm_migbatch.lab.slurm.run import ControllerInput, RoundTiming, SlurmSimulation
from slurm_migbatch.predict.selection import Chooser


class ServiceController:
    """A `run.Controller` that runs the rounds of `daemon.controller.Controller`.

    Args:
        config: the configuration; None: the defaults.
        predictions: the predictor; None: that of `chooser`, and without a chooser there are no predictions.
        chooser: chooses slices for `mig:auto`; the simulation's submissions then go through the submit filter. None:
            they are already in the filter's output form.
        past: the record's data of previous days; None: there are none.
    """

    def __init__(
        self,
        simulation: SlurmSimulation,
        config: Config | None = None,
        predictions: Predictions | None = None,
        chooser: Chooser | None = None,
        past: LendingPast | None = None,
    ) -> None:
        config = config or Config()
        slurm, nodes = simulation.slurm, simulation.nodes
        self.record = MemoryRecord(slurm)
        if chooser is not None:
            catalog = catalog_of(simulation, config)
            clock = simulation.clock.time
            simulation.submit_filter = SubmitFilter(catalog, chooser, self.record, config, clock, slurm.spelled)
            predictions = predictions or SitePredictions(chooser, catalog)
        advertiser = Advertiser(slurm, nodes, config.supply.ack_wait_s)
        self.observer = Observer(
            nodes.view,
            nodes,
            advertiser.total,
            silence_s=config.supply.node_silence_s,
            predictions=predictions,
            blackout=blackout_of(config.lending),
        )
        self.observer.backfill_window_s = slurm.backfill_window_s()
        self.observer.remember(past or LendingPast())
        settings = settings_of(config)
        self.controller = Controller(settings, slurm, self.observer, advertiser, self.record, simulation.clock)

    def __call__(self, observation: ControllerInput) -> bool:
        """Run one round; return whether another should follow soon. Raises the error of a failed stage."""
        for node, events in observation.events:
            self.record.ingested(events)
            self.observer.ingested(node, events, observation.now)
        report = self.controller.round(observation.jobs, observation.nodes)
        for error in report.failed.values():
            raise error
        return report.again


def pace_of(config: Config) -> RoundTiming:
    """Return the times of migbatchd's rounds, which do not depend on events."""
    return RoundTiming(every_s=config.cluster.poll_s, idle_s=config.cluster.poll_s)
