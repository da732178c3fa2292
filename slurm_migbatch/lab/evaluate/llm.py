"""Score the figures of language models: efficiencies fitted on all models but one, scored on that one.

`servers` reads the tables. For comparison: a plain roofline with the same specifications, the data sheet's rates, no
fit, no waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, Final

import numpy as np
from scipy.optimize import least_squares

from slurm_migbatch.lab.bars import Bar
from slurm_migbatch.lab.evaluate.servers import ServerPoint, scan_servers
from slurm_migbatch.lab.progress import Progress, silent
from slurm_migbatch.predict.cells import Array
from slurm_migbatch.predict.llm import names
from slurm_migbatch.predict.llm.memory import MIB, need_of, weights_mib
from slurm_migbatch.predict.llm.served import ServedMeasurements, ServedPoint, load_of
from slurm_migbatch.predict.llm.speed import SPAN, Efficiencies, Pace, arithmetic_spread, pace_of, prefill_s, step_s
from slurm_migbatch.predict.llm.workload import Serving, Workload
from slurm_migbatch.predict.samples import SITE

PRIOR: Final[Mapping[str, tuple[float, float]]] = {
    "compute": (0.7, 0.1),
    "narrow": (1.4, 0.1),
    "bandwidth": (0.8, 0.1),
    "layer_us": (30.0, 0.5),
    "first": (3.0, 0.3),
    "each": (0.08, 0.5),
}
"""Prior efficiencies, and the standard deviation of their logarithms: seven tenths of the dense rate
in large matrix products, 1.4 times that with 8 bits (vLLM's documentation says up to 1.6, users of Megatron 1.35), four
fifths of the bandwidth (a copy's), some ten launches of 3 microseconds a layer, and an unpublished wait.
"""
TURN: Final = (Efficiencies().turn, 1.5)
"""The same for the share of the time between two ends that the next request waits for its turn. Values from none to
all of it were seen; it belongs to a series of measurements (how its generator and its engine interact), so
each series has its own in the fit, and predictions use the median.
"""
NOISE: Final = {"ttft": 0.3, "tpot": 0.1}
"""Standard deviations of logarithms of a point around its curve."""
UNSEEN: Final = 0.1
"""Standard deviation of logarithms of a model outside the fit, like that of the efficiencies before any
measurement.
"""
TARGETS: Final = {"ttft": 30.0, "tpot": 15.0}
MEMORY_TARGET: Final = 8.0
LEVELS: Final = {0.8: SPAN, 0.9: 1.6449}
SOME: Final = (1, 3)
"""Points of each series that a site has measured."""
FACTORS: Final = (1.0, 3.0, 10.0)
"""Factor by which a table's times are wrong."""
ANCHOR: Final = ("meta-llama/Llama-3.1-8B", 14.96, 0.8)
"""vLLM's report of a model in bf16: GiB of weights, GiB besides weights and cache."""


def pace(point: ServerPoint, eff: Efficiencies) -> Pace:
    """Return the prediction of a point."""
    return pace_of(point.workload, need_of(point.workload, int(point.machine.mib)), point.machine, eff)


def roofline(point: ServerPoint) -> tuple[float, float]:
    """Return a plain roofline's times to the first and of each further token: the data sheet's rates, no waiting."""
    serving, ideal = point.workload.serving, Efficiencies(1.0, 2.0, 1.0, 0.0, 1.0, 0.0)
    assert serving is not None
    architecture, weight_precision = point.workload.architecture, point.workload.precision
    first = prefill_s(architecture, weight_precision, float(serving.input), point.machine, ideal)
    length = serving.input + serving.output / 2
    return first, step_s(point.workload, serving.concurrency, length, point.machine, ideal)


def fit(points: Sequence[ServerPoint]) -> Efficiencies:
    """Return the efficiencies that fit these points best, each model counting equally, regularised to the prior.

    The turn is fitted too, one for each series (a model by an engine), and left out of the result.
    """
    keys = list(PRIOR)
    series = sorted({_series(point) for point in points})
    priors = [*(PRIOR[key] for key in keys), *(TURN for _ in series)]
    centre = np.log([middle for middle, _ in priors])
    spread = np.array([deviation for _, deviation in priors])
    share = {model: 1.0 / math.sqrt(sum(p.model == model for p in points)) for model in {p.model for p in points}}
    strength = math.sqrt(len(points) / len(share))

    def residuals_of(theta: Array) -> Array:
        eff = _of(keys, theta)
        turns = dict(zip(series, np.exp(theta[len(keys) :]).tolist(), strict=True))
        residuals = [(theta - centre) / spread]
        for point in points:
            computed = pace(point, replace(eff, turn=turns[_series(point)]))
            weight = share[point.model] * strength
            ratios = (math.log(computed.ttft / point.ttft), math.log(computed.tpot / point.tpot))
            residuals.append(weight * np.array(ratios) / np.array([NOISE["ttft"], NOISE["tpot"]]))
        return np.concatenate(residuals)

    best = least_squares(residuals_of, centre, loss="soft_l1")
    eff = _of(keys, best.x)
    ttft, tpot = _residuals(points, eff)
    return replace(eff, spread_ttft=_spread(ttft), spread_tpot=_spread(tpot))


def _of(keys: Sequence[str], theta: Array) -> Efficiencies:
    return Efficiencies(**dict(zip(keys, np.exp(theta[: len(keys)]).tolist(), strict=True)))


def _series(point: ServerPoint) -> str:
    assert point.workload.serving is not None
    return f"{point.model}/{point.workload.precision.name}/{point.workload.serving.engine}"


def _residuals(points: Sequence[ServerPoint], eff: Efficiencies) -> tuple[list[float], list[float]]:
    paces = [(point, pace(point, eff)) for point in points]
    return (
        [math.log(point.ttft / computed.ttft) for point, computed in paces],
        [math.log(point.tpot / computed.tpot) for point, computed in paces],
    )


def _spread(residuals: Sequence[float]) -> float:
    """Return a standard deviation that is robust against outliers: from the mean absolute one, as for a normal
    distribution.
    """
    return math.hypot(1.2533 * fmean(abs(residual) for residual in residuals), UNSEEN)


def served(point: ServerPoint, eff: Efficiencies, factor: float = 1.0) -> ServedPoint:
    """Return a point as a site would have measured it, or a table whose times are wrong by a factor."""
    computed, serving = pace(point, eff), point.workload.serving
    assert serving is not None
    ratios = (math.log(factor * point.ttft / computed.ttft), math.log(factor * point.tpot / computed.tpot))
    return ServedPoint(
        point.gpu, serving.engine, point.model, point.workload.precision.name, SITE,
        load_of(point.workload, point.share), ratios, arithmetic_spread(point.workload, point.machine, eff),
    )  # fmt: skip


def learned(points: Sequence[ServerPoint]) -> dict[str, Any]:
    """Return errors of each held-out model with measurements of the site: other models, some points of each of
    its own series (the rest is scored), and the same with times that are wrong by factors of three and ten.
    """
    errors: dict[str, dict[str, dict[str, list[float]]]] = {}
    for model in sorted({point.model for point in points}):
        of_model = [point for point in points if point.model == model]
        others = [point for point in points if point.model != model]
        eff = fit(others) if others else Efficiencies()
        for name, (measured, scored) in _stores(of_model, others).items():
            for factor in FACTORS:
                measurements = [served(point, eff, factor) for point in measured]
                store = ServedMeasurements([point for point in measurements if point.trust > 0])
                error_label = f", times {factor:g} wrong" if factor != 1.0 else ""
                for figure, of_figure in _errors(store, scored, eff).items():
                    by_model = errors.setdefault(f"{name}{error_label}", {}).setdefault(figure, {})
                    by_model.setdefault(model, []).extend(of_figure)
    return {
        name: {
            figure: round(fmean(e for of_figure in models.values() for e in of_figure), 2)
            for figure, models in by_figure.items()
        }
        for name, by_figure in errors.items()
    }


def _stores(
    of_model: Sequence[ServerPoint], others: Sequence[ServerPoint]
) -> dict[str, tuple[Sequence[ServerPoint], Sequence[ServerPoint]]]:
    """Return possible measurements of a site, and the points that are scored then, by name."""
    stores: dict[str, tuple[Sequence[ServerPoint], Sequence[ServerPoint]]] = {
        "nothing": ((), of_model),
        "other models": (others, of_model),
    }
    for count in SOME:
        chosen: list[ServerPoint] = []
        for series in sorted({(point.gpu, _series(point)) for point in of_model}):
            series_points = sorted(
                (p for p in of_model if (p.gpu, _series(p)) == series), key=lambda p: load_of(p.workload, p.share)
            )
            if len(series_points) > count:  # from the middle, and from both ends
                chosen += [
                    series_points[i]
                    for i in sorted({round((len(series_points) - 1) * (n + 1) / (count + 1)) for n in range(count)})
                ]
        rest = [point for point in of_model if all(point is not other for other in chosen)]
        stores[f"{count} of each series"] = (chosen, rest)
        stores[f"nothing, on the rest of {count}"] = ((), rest)
    return stores


def _errors(store: ServedMeasurements, scored: Sequence[ServerPoint], eff: Efficiencies) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for point in scored:
        computed, correction = pace(point, eff), store.at(served(point, eff))
        errors["ttft"].append(100.0 * abs(computed.ttft * math.exp(correction.ttft) / point.ttft - 1.0))
        errors["tpot"].append(100.0 * abs(computed.tpot * math.exp(correction.tpot) / point.tpot - 1.0))
    return errors


def measure(data: Path, progress: Progress = silent) -> dict[str, Any]:
    """Evaluate the tables of a directory. Raises TraceError, TableError."""
    tables = scan_servers(data)
    progress(f"{len(tables.points)} points", 0)
    return {"data": str(data), "notes": list(tables.notices), **evaluate(tables.points)}


def evaluate(points: Sequence[ServerPoint]) -> dict[str, Any]:
    """Return errors of each held-out model, compared with a plain roofline's, and the fit on all."""
    models = sorted({point.model for point in points})
    by_model = {model: [point for point in points if point.model == model] for model in models}
    rows = []
    outside: dict[str, list[tuple[float, float, float]]] = {"ttft": [], "tpot": []}
    for model in models:
        others = [point for point in points if point.model != model]
        eff = fit(others) if others else Efficiencies()
        for point in by_model[model]:
            computed, plain = pace(point, eff), roofline(point)
            rows.append((model, point, (computed.ttft, computed.tpot), plain))
            spread_ttft, spread_tpot = arithmetic_spread(point.workload, point.machine, eff)
            outside["ttft"].append((point.ttft, computed.ttft, spread_ttft))
            outside["tpot"].append((point.tpot, computed.tpot, spread_tpot))
    whole = fit(points)
    scores = {
        f"{method}/{figure}": _scores(rows, 2 + number, place, figure)
        for number, method in enumerate(("ours", "roofline"))
        for place, figure in enumerate(("ttft", "tpot"))
    }
    memory = _memory()
    bars = [Bar(f"{figure} MAPE (%), each model held out", scores[f"ours/{figure}"]["mape"], TARGETS[figure])
            for figure in ("ttft", "tpot")]  # fmt: skip
    bars.append(Bar("memory compared with vLLM's report: error (%)", memory["error"], MEMORY_TARGET))
    return {
        "points": len(points),
        "models": models,
        "scores": scores,
        "places": _places(rows),
        "coverage": {figure: _coverage(predictions) for figure, predictions in outside.items()},
        "left_out_spread": {
            figure: round(pstdev([math.log(real / mid) for real, mid, _ in predictions]), 4)
            for figure, predictions in outside.items()
        },
        "memory": memory,
        "learned": learned(points),
        "fit": {efficiency.name: round(getattr(whole, efficiency.name), 4) for efficiency in fields(whole)},
        "bars": [bar.to_dict() for bar in bars],
    }


def _scores(rows: Sequence[Any], method: int, place: int, figure: str) -> dict[str, Any]:
    errors: dict[str, list[float]] = {}
    for row in rows:
        real = getattr(row[1], figure)
        errors.setdefault(row[0], []).append(100.0 * abs(row[method][place] / real - 1.0))
    pooled = [error for of_model in errors.values() for error in of_model]
    return {
        "mape": round(fmean(pooled), 2),
        "median": round(median(pooled), 2),
        "per_model": {model: round(fmean(of_model), 2) for model, of_model in errors.items()},
    }


def _places(rows: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return our mean errors in % on whole GPUs and on slices."""
    places: dict[str, dict[str, Any]] = {}
    for place, sliced in (("whole GPUs", False), ("slices", True)):
        own = [(point, ours) for _, point, ours, _ in rows if point.machine.sliced == sliced]
        if own:
            places[place] = {
                "points": len(own),
                **{
                    figure: round(
                        fmean(100.0 * abs(ours[index] / getattr(point, figure) - 1.0) for point, ours in own), 2
                    )
                    for index, figure in enumerate(("ttft", "tpot"))
                },
            }
    return places


def _coverage(predictions: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    coverage = {}
    for level, span in LEVELS.items():
        inside = [abs(math.log(real / mid)) <= span * spread for real, mid, spread in predictions]
        coverage[f"{level:.0%}"] = {
            "share": round(fmean(inside), 3),
            "width": round(math.exp(span * median(spread for _, _, spread in predictions)), 2),
        }
    return coverage


def _memory() -> dict[str, float]:
    """Return the difference of weights and runtime from an engine's report of a known model."""
    name, weights, runtime = ANCHOR
    resolved = names.resolve(name)
    assert resolved is not None
    serving = Serving(8192, 8, 1024, 256, 16.0, "vllm", 0.9)
    need = need_of(Workload(resolved, serving, None), 20096)
    parts_mib = weights_mib(resolved.architecture, resolved.precision), need.activations + need.runtime
    reported_mib = (weights + runtime) * 1024
    return {
        "weights_gib": round(parts_mib[0] * MIB / 2**30, 3),
        "runtime_gib": round(parts_mib[1] / 1024, 3),
        "error": round(100.0 * abs(sum(parts_mib) / reported_mib - 1.0), 2),
    }
