"""Learn from a table of measurements: fit every model, pool them, calibrate on held-out models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.calibration import MOST_POINTS, Calibration, Score, calibrate, unmeasured
from slurm_migbatch.predict.cells import Array, Cells
from slurm_migbatch.predict.fewshot import adapt
from slurm_migbatch.predict.known import NOTHING, ModelKnowledge
from slurm_migbatch.predict.llm import served, trained
from slurm_migbatch.predict.outliers import contradicted, unconfirmed
from slurm_migbatch.predict.points import next_point
from slurm_migbatch.predict.population import Population, Unit, pool
from slurm_migbatch.predict.samples import ALONE, MEMORY_NOISE, OF_RUNS, RUNS, SHORT, SITE, Sample, samples_of
from slurm_migbatch.predict.state import KINDS, SURFACES, Fitted, Learned, Tried
from slurm_migbatch.predict.surface import MISFIT, Belief, Surface, single_noise
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.values.grouping import grouped

ENOUGH: Final = 6
"""Minimum points of a model whose fit is pooled."""
LOCAL: Final = (f"|{SITE}", f"|{RUNS}")
"""Suffixes of the stacks that this site measured itself."""
SURPRISE: Final = 4.0
"""Excess of a fit's squared distance (in standard deviations) over its points that counts as a contradiction."""
DOUBT: Final = 6.0
"""-2 ln of the prior odds that specifications are wrong."""
HOST: Final = ("host",)
"""Parameters outside the device."""
CONSTANT: Final = 0.005
"""Standard deviation of logarithms below which times of many batches and slices are not measurements: no timer is that
steady, even if the host limits the speed everywhere.
"""
FEWEST: Final = 8
FREE: Final = 4.0
"""Least number of points from which their noise is estimated, and of those beyond the ones that determine parameters.
"""
ROUNDS: Final = 3
"""Most fits of a model: with the usual noise, and with what the points show after each."""
CHANCE: Final = 2.0
"""Standard deviations by which the squared distance of points from the curve exceeds the usual one only by chance."""
FOLDS: Final = 40
"""Calibration holds models out in at most so many groups: each model by itself while there are no more models."""
LEFT_OUT: Final = 200
"""Models that calibration scores; an even choice if there are more."""


def learn(rows: Iterable[Measurement], knowledge: ModelKnowledge) -> Learned:
    """Learn from a table; rows that did not run and missing figures are ignored."""
    rows = list(rows)
    every = samples_of(rows, knowledge)
    samples = [_without_contradicted(sample) for sample in every]
    populations: dict[tuple[str, str], Population] = {}
    calibrations: dict[tuple[str, str], Calibration] = {}
    fitted: dict[tuple[str, str, str], Fitted] = {}
    for kind in KINDS:
        of_kind = [sample for sample in samples if sample.kind == kind]
        for figure in SURFACES:
            units = units_of(figure, of_kind)
            if units:
                populations[figure, kind] = pool(SURFACES[figure], kind, [unit for unit, _ in units])
                calibrations[figure, kind] = calibrate(scores_of(figure, kind, units), unmeasured(figure, kind))
        for key, group in grouped(of_kind, lambda sample: sample.key).items():
            fitted[key] = _fit(group, populations, kind)
    unknown = {s.model: s.known for s in samples if s.model not in knowledge.facts}
    language = _of_language_models(rows)
    slices: dict[str, Any] = {"short": _short(every), "held": _held(samples)}
    return Learned(1, 0.0, len(rows), populations, calibrations, fitted, unknown, **language, **slices)


def settle(learned: Learned, rows: Iterable[Measurement], knowledge: ModelKnowledge) -> Learned:
    """Update the belief about each model by `rows`, with the previously learned population.

    It costs a fraction of `learn`, and differs little if `rows` are a few more than those learned from.
    """
    rows = list(rows)
    every = samples_of(rows, knowledge)
    samples = [_without_contradicted(sample) for sample in every]
    fitted = {
        key: _fit(group, learned.populations, key[1])
        for key, group in grouped(samples, lambda sample: sample.key).items()
    }
    unknown = {s.model: s.known for s in samples if s.model not in knowledge.facts}
    language = _of_language_models(rows)
    slices: dict[str, Any] = {"short": _short(every), "held": _held(samples)}
    return replace(learned, rows=len(rows), fitted=fitted, known=unknown, **language, **slices)


def ignored(rows: Iterable[Measurement], knowledge: ModelKnowledge) -> list[tuple[str, Measurement]]:
    """Return the points that the others of their sample contradict, with the figure; they are not learned from."""
    found = []
    for sample in samples_of(rows, knowledge):
        for figure, of_figure in (("time", sample.rows), ("memory", sample.memory_rows)):
            found += [(figure, of_figure[i]) for i in _contradicted(figure, sample)]
    return found


def _without_contradicted(sample: Sample) -> Sample:
    """Return a sample without the points that its others contradict."""
    wrong = {figure: _contradicted(figure, sample) for figure in SURFACES}
    if not any(wrong.values()):
        return sample
    time = [i for i in range(len(sample.rows)) if i not in wrong["time"]]
    memory = [i for i in range(len(sample.memory_rows)) if i not in wrong["memory"]]
    return replace(
        sample,
        rows=tuple(sample.rows[i] for i in time),
        cells=sample.cells.take(time),
        logs=sample.logs[time],
        noise=sample.noise[time],
        memory_rows=tuple(sample.memory_rows[i] for i in memory),
        memory_cells=sample.memory_cells.take(memory),
        memory_logs=sample.memory_logs[memory],
    )


def _contradicted(figure: str, sample: Sample) -> list[int]:
    """Return the indices of such points among all of the figure."""
    surface = SURFACES[figure]
    prior = pool(surface, sample.kind, ()).prior(sample.model, sample.known, sample.gpu)
    cells, logs, noise = observed(figure, sample)
    wrong = contradicted(surface, prior, cells, logs, noise)
    if figure == "memory":
        return [_enough(sample)[i] for i in wrong]
    alone = [i for i, row in enumerate(sample.rows) if row.source == ALONE]
    return sorted({*wrong, *unconfirmed(surface, prior, cells, logs, noise, alone)})


def _of_language_models(rows: Sequence[Measurement]) -> dict[str, Any]:
    return {"served": tuple(served.points_of(rows)), "trained": tuple(trained.points_of(rows))}


def _short(samples: Iterable[Sample]) -> dict[tuple[str, str, str], tuple[Tried, ...]]:
    """Return the work that ran out of memory, by the samples that count for a model, unless as much or more work was
    measured with less.
    """
    found: dict[tuple[str, str, str], tuple[Tried, ...]] = {}
    for key, group in grouped(samples, lambda sample: sample.key).items():
        stack, usual = max(group, key=_standing).stack, group[0].known.reference
        counted = [sample for sample in group if sample.stack == stack or sample.stack.endswith(f"|{RUNS}")]
        rows = [row for sample in counted for row in (*sample.rows, *sample.memory_rows)]
        short = [row for row in rows if row.source == SHORT] + [row for sample in counted for row in sample.failed]
        exceeded = {
            Tried(row.batch, row.input_size or usual, row.profile): None
            for row in short
            if not any(_refutes(other, row, usual) for other in rows)
        }
        if exceeded:
            found[key] = tuple(exceeded)
    return found


def _held(samples: Iterable[Sample]) -> dict[tuple[str, str, str], tuple[Tried, ...]]:
    """Return the most work that ran on slices of each profile, by the table that counts for a model.

    What jobs report does not count, because one wrong report would shrink the slices of all; nor do texts of unknown
    length.
    """
    found: dict[tuple[str, str, str], tuple[Tried, ...]] = {}
    for key, group in grouped(samples, lambda sample: sample.key).items():
        main = max(group, key=_standing)
        usual = main.known.reference if main.known.unit == "px" else 0
        rows = [row for row in main.rows if row.source not in OF_RUNS]
        work = {Tried(row.batch, row.input_size or usual, row.profile) for row in rows}
        most = [
            tried
            for tried in sorted(work, reverse=True)
            if tried.input and not any(_includes(other, tried) for other in work if other != tried)
        ]
        if most:
            found[key] = tuple(most)
    return found


def _includes(other: Tried, tried: Tried) -> bool:
    return other.profile == tried.profile and other.batch >= tried.batch and other.input >= tried.input


def _refutes(other: Measurement, short: Measurement, usual: int) -> bool:
    """Return whether a row did at least the work of one that ran out of memory, with less memory or on as small a
    slice.
    """
    if other.source == SHORT or other.batch < short.batch or (other.input_size or usual) < (short.input_size or usual):
        return False
    if short.memory_mib is not None:
        return (other.memory_mib or math.inf) < short.memory_mib
    return _memory_gb(other) <= _memory_gb(short)


def _memory_gb(row: Measurement) -> float:
    return Profile.parse(row.profile).memory_gb if row.profile else math.inf


def observed(figure: str, sample: Sample) -> tuple[Cells, Array, Array]:
    """Return the points, logarithms and noise of one figure of a sample, without memory that was too little: it says
    nothing on how much more is needed.
    """
    if figure == "time":
        return sample.cells, sample.logs, sample.noise
    enough = _enough(sample)
    logs = sample.memory_logs[enough]
    return sample.memory_cells.take(enough), logs, np.full(len(logs), MEMORY_NOISE)


def _enough(sample: Sample) -> list[int]:
    return [i for i, row in enumerate(sample.memory_rows) if row.source != SHORT]


def units_of(figure: str, samples: Sequence[Sample]) -> list[tuple[Unit, Sample]]:
    """Return the samples with enough points, with parameters fitted under the physical prior alone."""
    surface = SURFACES[figure]
    units = []
    for sample in samples:
        cells, logs, noise = observed(figure, sample)
        if len(cells) < ENOUGH or (figure == "time" and float(np.std(logs)) < CONSTANT):
            continue
        prior = pool(surface, sample.kind, ()).prior(sample.model, sample.known, sample.gpu)
        fit = adapt(surface, prior, cells, logs, noise)
        misfit = float(np.sqrt(np.mean((logs - surface.curve(fit.mean, cells)) ** 2)))
        unit = Unit(
            sample.model, sample.known, sample.gpu, sample.stack, fit.mean, fit.covariance.diagonal(), misfit
        )  # fmt: skip
        units.append((unit, sample))
    return units


def scores_of(figure: str, kind: str, units: Sequence[tuple[Unit, Sample]]) -> list[Score]:
    """Return the scores of models that are held out in turn, after each number of points chosen by the rule."""
    surface = SURFACES[figure]
    models = [unit.model for unit, _ in units]
    names = sorted(set(models))
    if len(names) == 1:
        return _scores_of(figure, pool(surface, kind, ()), [sample for _, sample in units])
    from sklearn.model_selection import GroupKFold  # slow to import, and not needed to answer requests

    scored = {names[i] for i in np.linspace(0, len(names) - 1, min(LEFT_OUT, len(names))).astype(int)}
    scores: list[Score] = []
    for others, held_out in GroupKFold(min(FOLDS, len(names))).split(models, groups=models):
        population = pool(surface, kind, [units[i][0] for i in others])
        scores += _scores_of(figure, population, [units[i][1] for i in held_out if models[i] in scored])
    return sorted(scores, key=lambda score: score.model)


def _scores_of(figure: str, population: Population, samples: Iterable[Sample]) -> list[Score]:
    surface, scores = SURFACES[figure], list[Score]()
    for sample in samples:
        prior = population.prior(sample.model, sample.known, sample.gpu, sample.stack)
        for points, done, belief, cells, logs in steps(figure, sample, prior):
            scores.extend(_scores(sample.model, surface, points, done, belief, cells, logs))
    return scores


def steps(
    figure: str, sample: Sample, prior: Belief, most: int = MOST_POINTS
) -> Iterable[tuple[int, list[int], Belief, Cells, Array]]:
    """Return a new model's belief after 0, 1, ... `most` points chosen by the rule, with the indices of the points."""
    surface = SURFACES[figure]
    cells, logs, noise = observed(figure, sample)
    done: list[int] = []
    belief = prior
    for points in range(most + 1):
        yield points, list(done), belief, cells, logs
        remaining = [i for i in range(len(cells)) if i not in done]
        chosen = next_point(surface, belief, cells, done, remaining)
        if points == most or chosen is None:
            return
        done.append(chosen)
        belief = adapt(surface, prior, cells.take(done), logs[done], noise[done])


def _scores(
    model: str, surface: Surface, points: int, done: Sequence[int], belief: Belief, cells: Cells, logs: Array
) -> Iterable[Score]:
    value, deviation, pace = belief.predict_paced(surface, cells)
    distance = np.abs(logs - value) / deviation
    for i in range(len(cells)):
        if i not in done:
            yield Score(model, points, int(pace[i]), float(distance[i]))


def _fit(samples: Sequence[Sample], populations: Mapping[tuple[str, str], Population], kind: str) -> Fitted:
    """Return the belief about a model on a GPU: of each figure by the site's measurements if any, else by the largest
    sample of those in the widest precision.

    Other laboratories' figures of the same model contribute through the population's prior.
    """
    main = max(samples, key=_standing)
    runs = next((sample for sample in samples if sample.stack.endswith(f"|{RUNS}")), None)
    inputs = tuple(sorted({row.input_size for sample in samples for row in sample.rows if row.input_size}))
    beliefs = {}
    for figure, surface in SURFACES.items():
        # one table may have the speeds of a model, and another one its memory
        sample = max((sample for sample in samples if len(observed(figure, sample)[0])), key=_standing, default=main)
        cells, logs, noise = observed(figure, sample)
        if runs is not None and runs is not sample:
            from_runs = observed(figure, runs)
            cells, logs = cells.join(from_runs[0]), np.append(logs, from_runs[1])
            noise = np.append(noise, from_runs[2])
        if len(cells):
            population = populations.get((figure, kind)) or pool(surface, kind, ())
            prior = population.prior(sample.model, sample.known, sample.gpu, sample.stack)
            chance = CHANCE
            for _ in range(ROUNDS):
                beliefs[figure] = _believed(surface, population, sample, cells, logs, noise)
                excess = _excess(prior, beliefs[figure], chance)
                if excess <= 1.0:
                    break
                chance = 0.0
                noise = np.sqrt(MISFIT**2 + (excess * single_noise(noise)) ** 2)
    return Fitted(main.model, kind, main.gpu.name, main.stack, len(main.rows), inputs, beliefs)


def _excess(prior: Belief, belief: Belief, chance: float) -> float:
    """Return the noise of the measured points relative to the assumed one; 1 if they are few, or their distance from
    the curve may be chance, or nearby points have the same: then the curve is wrong there, not the points.
    """
    determined = len(prior.mean) - float(np.trace(np.linalg.solve(prior.covariance, belief.covariance)))
    free = len(belief.offsets) - determined
    if free < FREE or len(belief.offsets) < FEWEST:
        return 1.0
    if belief.surprise <= free + chance * math.sqrt(2.0 * free):
        return 1.0
    # as the variance of Student's t, because the estimate is uncertain
    excess = math.sqrt(belief.surprise / (free - 2.0))
    noisy = belief.evidence(misfit=1.0, noise=excess) > belief.evidence(misfit=excess, noise=1.0)
    return excess if noisy else 1.0


def _standing(sample: Sample) -> tuple[bool, float, int, str]:
    """Return what makes a sample count more than others of its model and GPU."""
    local = sample.stack.endswith(LOCAL)
    return local, 0.0 if local else sample.bits, len(sample.rows), sample.stack


def _believed(
    surface: Surface, population: Population, sample: Sample, cells: Cells, logs: Array, noise: Array
) -> Belief:
    """Return the posterior; if measurements contradict the prior, with a prior that trusts the specifications less.

    Specifications may be wrong by any factor. If they were kept, the parameter with the widest prior would absorb the
    contradiction. The device's work is doubted first, and the host's only if that is not sufficient: if it was
    the host, the next runs, on other slices, show it; from the opposite mistake (no slice is any faster) nothing more
    would be learned. The evidence (Laplace's approximation) selects one of the three, and each
    doubt must improve it by DOUBT.
    """
    prior = population.prior(sample.model, sample.known, sample.gpu, sample.stack)
    extra = np.maximum(surface.spread(NOTHING) ** 2 - surface.spread(sample.known.doubts(population.kind)) ** 2, 0.0)
    device = np.where([name in HOST for name in surface.names], 0.0, extra)
    candidates: list[tuple[float, int, Belief]] = []
    for doubts, spread in enumerate((np.zeros_like(extra), device, extra)):
        wider = Belief(prior.mean, prior.covariance + np.diag(spread))
        belief = adapt(surface, wider, cells, logs, noise)
        cost = _cost(surface, wider, belief, cells, logs, noise)
        evidence = cost + _volume(wider) - _volume(belief) + DOUBT * doubts
        candidates.append((evidence, doubts, belief))
        if cost < len(cells) + SURPRISE:
            break
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def _cost(surface: Surface, prior: Belief, belief: Belief, cells: Cells, logs: Array, noise: Array) -> float:
    """Return the squared distance, in standard deviations, of a fit from its prior and from the measurements."""
    from_prior = belief.mean - prior.mean
    missed = (surface.curve(belief.mean, cells) - logs) / noise
    return float(from_prior @ np.linalg.solve(prior.covariance, from_prior) + missed @ missed)


def _volume(belief: Belief) -> float:
    return float(np.linalg.slogdet(belief.covariance)[1])
