"""Convert the administrator's configuration to the settings of decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from slurm_migbatch.config import Config, DispatchConfig, LendingConfig
from slurm_migbatch.config.hours import Hours
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.decide.dispatch.stage import DispatchSettings
from slurm_migbatch.decide.lending.allocation import Hysteresis
from slurm_migbatch.decide.lending.model import LendingRules
from slurm_migbatch.decide.lending.stage import LendingSettings
from slurm_migbatch.decide.supply.moves import MoveRules
from slurm_migbatch.decide.supply.stage import SupplySettings
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.profiling import pairs
from slurm_migbatch.profiling.csvfile import TableError

log = logging.getLogger(__name__)


def settings_of(config: Config) -> Settings:
    """Return the settings of the controller's decisions."""
    preference = tuple(Profile.parse(name) for name in config.supply.preference)
    moves = config.moves
    rules = MoveRules(moves.after_s, moves.gain_s, moves.rest_s, moves.grace_s) if moves.enabled else None
    supply = SupplySettings(preference=preference, lending=frozenset(config.lending.partitions), moves=rules)
    return Settings(
        supply if config.supply.enabled else None,
        dispatch_settings(config.dispatch) if config.dispatch.enabled else None,
        lending_settings(config.lending) if config.lending.enabled else None,
    )


def dispatch_settings(config: DispatchConfig) -> DispatchSettings:
    """Return the settings of dispatch."""
    return DispatchSettings(config.every_s, config.hold_s, config.arrays, config.dry_run)


def lending_settings(config: LendingConfig) -> LendingSettings:
    """Return the settings of lending. Measured slowdowns of pairs are read from a file; a warning if that fails."""
    rules = LendingRules(
        hysteresis=Hysteresis(
            first_s=config.settle_s, loan_s=config.payback_s, idle_s=config.min_idle_s, rest_s=config.rest_s
        ),
        grace_s=config.grace_s,
        start_s=config.start_s,
        protect_s=min(60.0, config.payback_s / 10),
        starting_s=min(60.0, config.grace_s),
        reclaim=config.reclaim,
        most_releases=config.most_releases,
        max_restarts=config.max_restarts,
        quota=dict(config.quota),
    )
    return LendingSettings(
        partitions=tuple(config.partitions),
        training_only=frozenset(config.training_only),
        rules=rules,
        horizon_s=config.horizon_s,
        sure=config.sure,
        forecast_days=config.forecast_days,
        day_s=config.day_s,
        restart_s=config.restart_s,
        checkpoint_s=config.checkpoint_s,
        share=config.share,
        pair_slowdowns=_measured(config.pairs),
        dry_run=config.dry_run,
    )


def blackout_of(config: LendingConfig) -> Callable[[float], bool]:
    """Return whether lending is disabled at a time (unix seconds), by this host's time of day."""
    blackout = tuple(Hours.parse(text) for text in config.blackout)
    return lambda now: any(hours.covers(datetime.fromtimestamp(now)) for hours in blackout)


def _measured(path: str) -> pairs.Pairs:
    if not path:
        return {}
    try:
        return pairs.read(Path(path))
    except (OSError, TableError) as error:
        log.warning("cannot use [lending] pairs, the default slowdown is assumed for every pair: %s", error)
        return {}
