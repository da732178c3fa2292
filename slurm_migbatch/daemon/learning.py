"""Look for new runs, have a child process refit the predictor, and apply the result.

The work is done by `daemon.refit` in a separate process: learning computes for seconds to minutes, and neither the
event loop nor submissions may wait for it. Here only the index of the models is checked, once a second, so that a
version created or rolled back by `migbatch model` takes effect immediately too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.children import ONE_THREAD, Child
from slurm_migbatch.daemon.facts import known_models, models_of
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.metrics import Metrics
from slurm_migbatch.daemon.refit import news
from slurm_migbatch.daemon.tasks import with_timeout
from slurm_migbatch.daemon.writer import Overloaded, StoreWriter
from slurm_migbatch.predict.state import StateError
from slurm_migbatch.store.recurring import Learnable, learnable

log = logging.getLogger(__name__)

_CHECK_S: Final = 1.0
_MOST_SHOWN: Final = 50
"""Number of models whose drift is a metric: those with the largest."""
_ENOUGH: Final = 5
"""Minimum runs of a model to show its drift."""


class RefitFailed(RuntimeError):
    """The child did not finish; the message says why."""


class Learning:
    """Refits in the background, and calls `changed` with each new current version."""

    def __init__(self, config: Config, writer: StoreWriter, metrics: Metrics, changed: Callable[[int], None]) -> None:
        self._config, self._writer, self._changed = config, writer, changed
        self._directory = models_of(config)
        self._facts = known_models(config)
        self._current: int | None = None
        self._done: tuple[Learnable, int] | None = None
        self._asked = 0.0
        self._watch: Mapping[str, Any] = {}
        advice = "predictions are unchanged; see 'migbatch model show', or run 'migbatch model refit'"
        self._fault = FaultReporter("cannot learn from finished runs", advice, log, first=30.0, longest=3600.0)
        self._broken = FaultReporter(
            "predicted limits hold too rarely",
            "'migbatch model show' lists the models that drift; the next refit includes new runs",
            log,
        )
        self._refits = metrics.counter("migbatch_model_refits_total", "Refits of the predictor, by outcome.", "outcome")
        gauge = metrics.gauge
        gauge("migbatch_model_version", "Version of the learned model in use; 0: physics.", lambda: self._current or 0)
        kept = "Share of runs since the last refit that met the predicted limit."
        gauge("migbatch_model_kept_share", kept, lambda: self._kept("share"), "figure")
        reported = "Runs since the last refit that reported the figure."
        gauge("migbatch_model_kept_runs", reported, lambda: self._kept("runs"), "figure")
        gauge(
            "migbatch_model_drift",
            "Median of measured over predicted since the last refit, by model.",
            self._drift,
            "figure",
            "model",
        )

    async def run(self) -> None:
        """Check forever."""
        wait = 0.0
        while True:
            self._check_index()
            if self._config.learning.enabled and time.monotonic() >= self._asked + wait:
                try:
                    await self._learn()
                except (RefitFailed, StateError, OSError, Overloaded) as error:
                    self._refits.labels("failed").inc()
                    wait = max(self._fault.failed(error), self._config.learning.every_s)
                else:
                    self._fault.succeeded()
                    wait = self._config.learning.every_s
                self._asked = time.monotonic()
                self._check_index()
            await asyncio.sleep(min(_CHECK_S, self._config.learning.every_s))

    def _check_index(self) -> None:
        try:
            index = self._directory.index()
        except StateError as error:
            self._fault.failed(error)
            return
        if index.current == self._current:
            return
        before, self._current = self._current, index.current
        if before is None:  # common start of all components of the service
            return
        log.info("predictions use another model", extra={"version": index.current, "before": before})
        self._changed(index.current)

    async def _learn(self) -> None:
        reach = await self._writer.answer(lambda store: store.read(learnable), "learnable")
        index = self._directory.index()
        state = reach, index.current
        if state == self._done or not news(index, reach, self._facts):
            return
        refitted = await self._refit()
        self._done = state
        self._watch = refitted["watch"]
        self._report_coverage()
        result = refitted["refit"]
        if result is None:
            return
        self._refits.labels(result["outcome"]).inc()
        fields = {name: result[name] for name in ("reason", "runs", "measured", "seconds", "version") if name in result}
        if result["outcome"] == "taken":
            log.info("predictor refitted", extra=fields)
        else:
            log.warning("predictor not refitted: %s", result["why"], extra=fields)

    def _report_coverage(self) -> None:
        broken = {name: coverage for name, coverage in self._watch["kept"].items() if coverage["broken"]}
        if not broken:
            self._broken.succeeded()
            return
        promised = f"{self._config.learning.confidence:.0%}"
        parts = (
            f"{name}: {coverage['share']:.0%} of {coverage['runs']} runs" for name, coverage in sorted(broken.items())
        )
        self._broken.failed(f"{', '.join(parts)}, confidence level {promised} (version {self._watch['version']})")

    async def _refit(self) -> dict[str, Any]:
        """Run a child process; it ends with this process.

        Raises:
            RefitFailed: it took too long, or ended without a result.
        """
        child = await Child.start("the refit process", "slurm_migbatch.daemon.refit", ONE_THREAD)
        try:
            child.configure(self._config)
            return await with_timeout(_answer(child), self._config.learning.limit_s)
        except asyncio.TimeoutError:
            raise RefitFailed(
                f"refit took longer than [learning] limit_s = {self._config.learning.limit_s:g}"
            ) from None
        finally:
            await asyncio.shield(child.end())

    def _kept(self, part: str) -> Mapping[str, float]:
        return {name: coverage[part] for name, coverage in self._watch.get("kept", {}).items()}

    def _drift(self) -> Mapping[tuple[str, str], float]:
        ratios = [
            (float(drift["ratio"]), (figure, name))
            for name, figures in self._watch.get("models", {}).items()
            for figure, drift in figures.items()
            if drift["runs"] >= _ENOUGH
        ]
        ratios.sort(key=lambda pair: -max(pair[0], 1.0 / max(pair[0], 1e-9)))
        return {labels: ratio for ratio, labels in ratios[:_MOST_SHOWN]}


async def _answer(child: Child) -> dict[str, Any]:
    async for message in child.messages():
        return message
    raise RefitFailed(f"the refit process exited with {await child.process.wait()}; see its output above")
