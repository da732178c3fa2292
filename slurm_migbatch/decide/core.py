"""Decide all actions on the cluster: one pure step from a snapshot and a memory to actions.

The stages run in order on one snapshot. Supply plans what every node offers; dispatch changes pending jobs that the
plan has no place for; lending gives slices that inference does not need to training jobs, and reclaims them. If
dispatch changes the queue, lending waits for the next snapshot, which shows the changes.

`decide` updates `memory` from the snapshot and returns it in its decision: callers keep what is returned. After
applying the actions `settle` gets the results, before the next `decide`.

A stage that raises decides nothing. Supply decides whatever happens to the others: offers must not depend on loans. The
others need its plan, and decide nothing if it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_migbatch.decide.dispatch.retype import RetypeHistory
from slurm_migbatch.decide.dispatch.stage import (
    DispatchDecision,
    DispatchMemory,
    DispatchOutcome,
    DispatchSettings,
    needed_arrays,
    plan_dispatch,
    settle_dispatch,
)
from slurm_migbatch.decide.lending.loan import Loan
from slurm_migbatch.decide.lending.stage import (
    LendingDecision,
    LendingMemory,
    LendingSettings,
    OrderOutcome,
    ends_of,
    needed_progress,
    note_reports,
    plan_lending,
    settle_lending,
)
from slurm_migbatch.decide.snapshot import ClusterSnapshot, Questions
from slurm_migbatch.decide.supply.stage import SupplyDecision, SupplyMemory, SupplySettings, plan_supply

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings of each stage; None: that stage does not decide."""

    supply: SupplySettings | None = field(default_factory=SupplySettings)
    dispatch: DispatchSettings | None = None
    lending: LendingSettings | None = None


class DecisionMemory:
    """State of all stages between decisions."""

    def __init__(self, settings: Settings) -> None:
        self.supply = SupplyMemory()
        self.dispatch = DispatchMemory(RetypeHistory((settings.dispatch or DispatchSettings()).hold_s))
        self.lending = LendingMemory(settings.lending or LendingSettings())


@dataclass(frozen=True)
class Decision:
    """Decisions of one step, by stage; None: that stage did not decide.

    Attributes:
        questions: queries to the record before the next step.
        failed: the exception of each stage that failed.
        seconds: duration of each stage.
    """

    memory: DecisionMemory
    supply: SupplyDecision | None = None
    dispatch: DispatchDecision | None = None
    lending: LendingDecision | None = None
    questions: Questions = field(default_factory=Questions)
    failed: Mapping[str, Exception] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Outcomes:
    """Results of the actions of a decision.

    Attributes:
        unsaved: loans that the decision changed and that could not be recorded.
    """

    dispatch: Sequence[DispatchOutcome] = ()
    lending: Sequence[OrderOutcome] = ()
    unsaved: Sequence[Loan] = ()


@dataclass(frozen=True)
class Settled:
    """What to record of results: confirmed changes of jobs, and the current loans."""

    dispatch: tuple[DispatchOutcome, ...] = ()
    loans: tuple[Loan, ...] = ()


def needed(snapshot: ClusterSnapshot, memory: DecisionMemory, settings: Settings) -> Questions:
    """Return the queries to the record before this snapshot is decided on."""
    progress, arrays = frozenset[int](), frozenset[int]()
    if settings.lending is not None and memory.lending.loaded:
        progress = needed_progress(snapshot, memory.lending, settings.lending)
    if settings.dispatch is not None:
        memory.supply.queue.update(snapshot.jobs)
        arrays = needed_arrays(snapshot, memory.supply.queue, memory.dispatch, settings.dispatch)
    return Questions(progress, arrays, arrays - memory.dispatch.replayed)


def decide(
    snapshot: ClusterSnapshot, memory: DecisionMemory, settings: Settings, clock: Callable[[], float] = lambda: 0.0
) -> Decision:
    """Decide what to do now. `clock` (seconds) only measures the duration of the stages."""
    failed: dict[str, Exception] = {}
    seconds: dict[str, float] = {}

    def stage(name: str, work: Callable[[], T]) -> T | None:
        begun = clock()
        try:
            return work()
        except Exception as error:
            failed[name] = error
            return None
        finally:
            seconds[name] = clock() - begun

    supply, dispatch, lending = None, None, None
    if (supply_settings := settings.supply) is not None:
        ending = ends_of(memory.lending.ledger, settings.lending, snapshot.now)
        supply = stage("supply", lambda: plan_supply(snapshot, memory.supply, supply_settings, ending))
    if (dispatch_settings := settings.dispatch) is not None and "supply" not in failed:
        queue = memory.supply.queue
        dispatch = stage("dispatch", lambda: plan_dispatch(snapshot, queue, supply, memory.dispatch, dispatch_settings))
    if (lending_settings := settings.lending) is not None:
        if supply is None or (dispatch and dispatch_settings is not None and not dispatch_settings.dry_run):
            note_reports(snapshot, memory.lending)
        else:
            planned = supply
            lending = stage("lending", lambda: plan_lending(snapshot, planned, memory.lending, lending_settings))
            memory.supply.pairs = {} if lending_settings.dry_run else memory.lending.slice_sharing.wanted
    questions = Questions(decisions=dispatch.unknown if dispatch is not None else ())
    return Decision(memory, supply, dispatch, lending, questions, failed, seconds)


def settle(outcomes: Outcomes, memory: DecisionMemory) -> Settled:
    """Process the results of the last decision's actions."""
    dispatch = settle_dispatch(outcomes.dispatch, memory.dispatch)
    memory.lending.ledger.mark_unsaved(outcomes.unsaved)
    return Settled(dispatch, settle_lending(outcomes.lending, memory.lending))
