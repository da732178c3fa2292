"""Keep the catalog, predictor and policy that requests are answered from up to date, in memory and on disk.

The catalog file is used by `migbatch explain`, rendering, and the first seconds after a start; the compiled table is
used by slurmctld when the service does not answer. Both are rewritten when, and only when, their content changes.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from slurm_migbatch.config import Config, ModelConfig
from slurm_migbatch.daemon import catalog as catalogs
from slurm_migbatch.daemon.log import FaultReporter
from slurm_migbatch.daemon.poll import SlurmView
from slurm_migbatch.decide.snapshot import WeighedProfile
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures
from slurm_migbatch.predict.facts import BUILT_IN, ModelFacts
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.recurring import RunsPolicy
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.serving import rates_at_limit
from slurm_migbatch.predict.statefile import ModelDirectory
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.slurm.users import uid_of
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.table import TableCompiler, write_table
from slurm_migbatch.values import atomicfile
from slurm_migbatch.workload.catalog import CatalogError, Partition, SiteCatalog, load
from slurm_migbatch.workload.hints import SERVE, Hints
from slurm_migbatch.workload.loans import LoanHints
from slurm_migbatch.workload.refusal import Refusal

log = logging.getLogger(__name__)

CLOSEST_S: Final = 1.0
"""Minimum seconds between two catalogs: the process that answers submissions begins anew with each, and one node may
describe its GPUs differently again and again.
"""
_MISSED_S: Final = 600.0
"""Seconds for which a node missing from Slurm's list still counts as part of the site."""


def known_models(config: Config) -> list[ModelFacts]:
    """Return the specifications of the built-in models and of the site's own."""
    keys = [field.name for field in fields(ModelConfig)]
    own = [
        # requests are matched without the leading organisation (predict.requests.canonical)
        ModelFacts(name=name.rsplit("/", 1)[-1].replace("_", "-"), **{key: getattr(facts, key) for key in keys})
        for name, facts in config.models.items()
    ]
    return [*BUILT_IN, *own]


def models_of(config: Config) -> ModelDirectory:
    """Return the directory of learned models, and the users whose files are trusted there."""
    return ModelDirectory(Path(config.learning.models), slurm_uids(config))


def chooser_of(config: Config) -> Chooser:
    """Return the chooser over the built-in models and the site's own, with the latest learned model.

    Errors in files of learned models are logged; older ones are used then, or the physical prior.
    """
    current = models_of(config).current()
    for trouble in current.troubles:
        log.error("ignoring a learned model: %s", trouble)
    learned = current.saved.learned
    if current.troubles:
        log.error("predictions use %s", f"version {learned.version}" if learned.version else "physics alone")
    return Chooser(LearnedPredictor(learned, known_models(config), confidence=config.learning.confidence))


def policy_of(config: Config) -> SubmitPolicy:
    """Return the site's choices for the rewrite; updates of jobs by root and SlurmUser are not restricted."""
    recurring = config.recurring
    runs = RunsPolicy(recurring.runs if recurring.enabled else 0, recurring.slowdown)
    return SubmitPolicy(slurm_uids(config), config.submit.allow_extra, runs, recurring.advise, config.submit.describe)


def slurm_uids(config: Config) -> frozenset[int]:
    """Return the uids of root, SlurmUser and this process."""
    # a SlurmUser that does not exist on this host makes no queries on it
    return frozenset({0, os.geteuid(), *uid_of(config.cluster.slurm_user)})


class SitePredictions:
    """Predictions for the GPUs of a catalog: `decide.snapshot.Predictions`."""

    def __init__(self, chooser: Chooser, catalog: SiteCatalog) -> None:
        self._chooser = chooser
        self.catalog = catalog
        #: number of changes of the predictor and of the catalog; answers of one version do not change
        self._changes = 0

    @property
    def version(self) -> str:
        """Identify the predictor and the catalog: the version changes with either."""
        return str(self._changes)

    def training_speeds(self, hints: LoanHints, partition: str) -> dict[Profile, float]:
        """Return speeds of a training job relative to the whole GPU, on each slice that is predicted to hold it.

        Nothing if its model is unknown.
        """
        known = {name: getattr(hints, name) for name in ("model", "batch", "input", "input_unit", "llm")}
        training, view = Hints(**known, role="train"), self._view(partition)
        try:
            workload, bucket = self._chooser.workload(training), self._chooser.bucket(training)
        except Refusal:
            return {}
        figures: Mapping[str, Figures]
        if view is not None and workload is not None:
            figures = self._chooser.token_figures(workload, None, view)
        elif view is not None and bucket is not None:
            figures = self._chooser.figures(bucket, view)
        else:
            return {}
        rates = {
            offer.profile: figure.throughput_per_s.mid
            for offer in view.plain
            if (figure := figures.get(offer.profile.gres_type)) is not None
            and offer.memory_mib >= (hints.mem_mib or figure.need_mib)
        }
        fastest = max((figure.throughput_per_s.mid for figure in figures.values()), default=0.0)
        return {profile: rate / fastest for profile, rate in rates.items()} if fastest > 0 else {}

    def candidates(self, hints: Hints, partition: str) -> tuple[Profile, Sequence[WeighedProfile]] | None:
        """Return the profile that a job with these hints would get now, and all candidates.

        None if it would be refused.
        """
        view = self._view(partition)
        try:
            choice = None if view is None else self._chooser.choose(hints, view)
        except Refusal:
            return None
        if choice is None:
            return None
        listed = [
            WeighedProfile(c.profile, c.offer.memory_mib, None if c.figures is None else c.figures.rate / 1000, c.ok)
            for c in choice.candidates
        ]
        return choice.offer.profile, listed

    def rates(self, hints: Hints, partition: str) -> dict[Profile, float]:
        """Return the conservative items per second of one slice of each profile; nothing if the model is unknown.

        For a service, they are the rates within its latency limit (`predict.serving`).
        """
        view = self._view(partition)
        try:
            if view is None:
                return {}
            if hints.role == SERVE:
                return rates_at_limit(self._chooser, hints, view)
            bucket = self._chooser.stated_bucket(hints, view)
        except Refusal:
            return {}
        if bucket is None:
            return {}
        figures = self._chooser.figures(bucket, view)
        return {
            offer.profile: figure.rate / 1000
            for offer in view.plain
            if (figure := figures.get(offer.profile.gres_type)) is not None
        }

    def _view(self, partition: str) -> Partition | None:
        names = [name for name in partition.split(",") if name in self.catalog]
        return self.catalog.view(names) if names else None


class SiteFacts(SitePredictions):
    """The current catalog. `follow` updates it; `changed` is called with a new catalog.

    Attributes:
        unwritten: whether catalog or table may differ from the files, see `write`.
        ended: the service has ended, and the next one writes the files; a table that is being compiled is dropped.
    """

    def __init__(self, config: Config, chooser: Chooser, changed: Callable[[SiteCatalog], None]) -> None:
        super().__init__(chooser, SiteCatalog())
        self._config, self._changed = config, changed
        self._built_from: tuple[object, ...] = ()  # GPUs and partitions of the last catalog
        self._built_at = -CLOSEST_S
        self._rows: dict[str, tuple[NodeRow, float]] = {}  # with the time when each was last in Slurm's list
        self.unwritten = self.ended = False
        self._compiler = TableCompiler(chooser)
        advice = "slurmctld keeps the old one; check the directory and its permissions"
        self._fault = FaultReporter("cannot write the compiled table for slurmctld", advice, log)
        self.catalog = self._remembered()

    def _remembered(self) -> SiteCatalog:
        path = Path(self._config.submit.catalog)
        try:
            catalog = load(path)
        except FileNotFoundError:
            return SiteCatalog()
        except (OSError, CatalogError) as error:
            log.warning("%s is not used: %s", path, error)
            return SiteCatalog()
        log.info("starting with the saved catalog", extra={"partitions": catalog.names})
        self.unwritten = True  # the predictor may have changed, and with it the table
        return catalog

    def use(self, chooser: Chooser) -> None:
        """Compile the table with another predictor from now on."""
        self._chooser, self.unwritten = chooser, True
        self._compiler = TableCompiler(chooser)
        self._changes += 1

    def follow(self, geometries: Mapping[str, Sequence[Geometry]], snapshot: SlurmView) -> None:
        """Build the catalog again if GPUs (`LiveView.geometries`), partitions or features of nodes have changed."""
        now = time.monotonic()
        self._rows |= {row.name: (row, now) for row in snapshot.nodes}
        # a node missing from the list may be one that cannot be parsed now: requests for it are not refused
        self._rows = {
            name: (row, last_seen) for name, (row, last_seen) in self._rows.items() if now - last_seen < _MISSED_S
        }
        partitions = {name: (row.partitions, row.features, row.other_gres) for name, (row, _) in self._rows.items()}
        source = geometries, partitions, snapshot.gpu_defaults, snapshot.hidden
        if not geometries or source == self._built_from or now - self._built_at < CLOSEST_S:
            return
        self._built_from, self._built_at = source, now
        rows = [row for row, _ in self._rows.values()]
        catalog = catalogs.build(geometries, rows, self._config, snapshot.gpu_defaults, snapshot.hidden)
        if not catalog.partitions and self.catalog.partitions:
            log.warning("no partition has MIG GPUs any more; keeping the previous catalog")
            return
        if catalog != self.catalog:
            self.catalog = catalog
            self.unwritten = True
            self._changes += 1
            log.info(
                "the site's GPUs or partitions have changed",
                extra={"partitions": catalog.names, "gpus": ",".join(catalog.kinds)},
            )
            self._changed(catalog)

    def write(self) -> None:
        """Write catalog and table if they differ from the files. Run it in a worker thread: compiling takes a while."""
        if not self.unwritten:
            return
        self.unwritten = False
        catalog, compiler = self.catalog, self._compiler
        try:
            for path in (self._config.submit.catalog, self._config.submit.table):
                Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            file, text = Path(self._config.submit.catalog), json.dumps(catalog.to_dict())
            if not (self.ended or _holds(file, text)):
                atomicfile.write(file, text.encode(), 0o644)
            table, text = Path(self._config.submit.table), compiler.text(catalog)
            if not (self.ended or _holds(table, text)):
                write_table(table, text)
                log.info("compiled table written", extra={"path": table, "bytes": len(text)})
        except OSError as error:
            self.unwritten = True
            self._fault.failed(error)
            return
        except BaseException:
            self.unwritten = True
            raise
        self._fault.succeeded()


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
