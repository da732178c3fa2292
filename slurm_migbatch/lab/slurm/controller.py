"""migbatchd's controller on a simulation: what is decided is what the service decides with the same migbatch.toml.

There is no database: nothing was lent before the simulation began, and what is to be recorded is not.
"""

from __future__ import annotations

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.advertiser import Advertiser
from slurm_migbatch.daemon.controller import Controller, NoRecord
from slurm_migbatch.daemon.observer import Observer
from slurm_migbatch.daemon.rounds import blackout_of, settings_of
from slurm_migbatch.decide.snapshot import LendingPast, Predictions
from slurm_migbatch.lab.slurm.run import Look, Pace, Simulation


class ServiceController:
    """A `run.Controller` that runs the rounds of `daemon.controller.Controller`.

    Args:
        simulation: what it controls.
        config: the configuration; None: the defaults.
        predictions: the predictor; None: nothing is predicted.
    """

    def __init__(
        self, simulation: Simulation, config: Config | None = None, predictions: Predictions | None = None
    ) -> None:
        config = config or Config()
        slurm, nodes = simulation.slurm, simulation.nodes
        advertiser = Advertiser(slurm, nodes, config.supply.ack_wait_s)
        self._observer = Observer(
            nodes,
            nodes,
            advertiser.total,
            silence_s=config.supply.node_silence_s,
            predictions=predictions,
            blackout=blackout_of(config.lending),
        )
        self._observer.remember(LendingPast())
        settings = settings_of(config)
        self.controller = Controller(settings, slurm, self._observer, advertiser, NoRecord(), simulation.clock)

    def __call__(self, look: Look) -> bool:
        """Run one round; tells whether another should follow soon. Raises what a stage raised that could not decide."""
        for event in look.events:
            if event["kind"] == "misfit":
                self._observer.send_back(event["job"])
        self._observer.ingested(look.events, look.now)
        report = self.controller.round(look.jobs, look.nodes)
        for error in report.failed.values():
            raise error
        return report.again


def pace_of(config: Config) -> Pace:
    """Return when the service runs rounds, which does not depend on whether anything happens."""
    return Pace(every_s=config.cluster.poll_s, idle_s=config.cluster.poll_s)
