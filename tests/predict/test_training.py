"""Learning from measurements: measurements of some models improve the first guess for others, and set its
uncertainty."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.predict import training
from slurm_migbatch.predict.calibration import LEVELS, Calibration, Score, calibrate, unmeasured
from slurm_migbatch.predict.candidate import Interval
from slurm_migbatch.predict.cells import Cells, GpuSpec
from slurm_migbatch.predict.knee import GROWTH, batch_edges, input_edges, knee
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.llm.choice import figures_by_profile
from slurm_migbatch.predict.llm.workload import workload_of
from slurm_migbatch.predict.points import next_point
from slurm_migbatch.predict.population import pool
from slurm_migbatch.predict.samples import RUNS, SITE, samples_of
from slurm_migbatch.predict.state import Learned, StateError
from slurm_migbatch.predict.surface import TIME
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import Partition
from slurm_migbatch.workload.hints import parse
from tests.support.examples import examples
from tests.support.gpu_kinds import H100, P
from tests.support.laboratory import A100, MODELS, known, measure, table, truth

KNOWLEDGE = ModelKnowledge()


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return table()


@pytest.fixture(scope="module")
def learned(rows: list[Measurement]) -> Learned:
    return replace(learn(rows, KNOWLEDGE), version=3, created=1e9)


def test_measurements_of_other_models_improve_the_first_guess() -> None:
    """The laboratory's items cost three times what the prior says: the models that it measured show this for a model
    that it did not measure."""
    slow = table(shift=1.1)
    before, after = [], []
    for name in MODELS[:4]:
        others = learn([row for row in slow if row.model != name], KNOWLEDGE)
        found = [row for row in slow if row.model == name]
        cells = Cells.of_rows(found, A100, known(name))
        for state, errors in ((Learned(), before), (others, after)):
            prior = state.population("time", "infer").prior(name, known(name), A100, "a100-80gb|lab")
            value, _ = prior.predict(TIME, cells)
            errors.append(float(np.abs(value - np.log([row.seconds or 0.0 for row in found])).mean()))
    assert np.mean(after) < 0.6 * np.mean(before)


def test_measured_model_has_narrow_intervals(learned: Learned) -> None:
    predictor, blank = LearnedPredictor(learned), LearnedPredictor()
    assert (predictor.version, blank.version) == ("learned-3", "prior")
    cell = Bucket("resnet50", "infer", 32, 224, "px")
    kind = replace(H100, name="a100-80gb", tflops=312, bandwidth_gbs=2039, sm_count=108)
    sure, unsure = predictor.figures(cell, kind)[P("2g.20gb")], blank.figures(cell, kind)[P("2g.20gb")]
    assert sure.latency_s.high / sure.latency_s.low < 1.5 < unsure.latency_s.high / unsure.latency_s.low
    assert sure.memory_mib.high / sure.memory_mib.low < unsure.memory_mib.high / unsure.memory_mib.low


@pytest.mark.parametrize("narrow", ["tf32", "fp16", "int8", "mixed"])
@pytest.mark.parametrize("source", ["lab", "lab, in other products"])
def test_curve_of_a_model_in_several_precisions_is_that_of_the_widest(narrow: str, source: str) -> None:
    name, batches = "bert-large", (1, 8, 32)
    wide = [replace(row, precision="fp32") for row in measure(name, truth(name, 0, 1.0), batches=batches)]
    fast = measure(name, truth(name, 0, -0.5), batches=(*batches, 64), source=source)
    cells = Cells.of_rows(wide, A100, known(name))

    def seconds(found: list[Measurement]) -> np.ndarray:
        belief, points, _ = learn(found, KNOWLEDGE).belief("time", name, "infer", known(name), A100)
        assert points
        return np.exp(belief.predict(TIME, cells)[0])

    both = [*wide, *(replace(row, precision=narrow) for row in fast)]
    assert seconds(both) == pytest.approx(seconds(wide), rel=0.05)
    failed = [replace(row, latency_s=None, throughput_per_s=None, memory_mib=None) for row in wide]
    assert seconds([*failed, *both[len(wide) :]]) == pytest.approx(seconds(both[len(wide) :]), rel=0.05)


def test_higher_confidence_widens_the_interval(learned: Learned) -> None:
    cell = Bucket("resnet50", "infer", 32, 224, "px")
    low, high = (LearnedPredictor(learned, confidence=c).figures(cell, H100)[P("2g.20gb")] for c in (0.7, 0.95))
    assert low.latency_s.high < high.latency_s.high


@pytest.mark.parametrize(
    "cell", [Bucket("bert-large", "train", 32, 512, "tok"), Bucket("gpt2", "train", 4, 512, "tok")]
)
def test_confidence_applies_to_computed_training_too(cell: Bucket) -> None:
    figures = [LearnedPredictor(confidence=c).figures(cell, H100)[P("2g.20gb")] for c in (0.5, 0.7, 0.9, 0.99)]
    for intervals in ([f.latency_s for f in figures], [f.memory_mib for f in figures]):
        assert len({interval.mid for interval in intervals}) == 1
        widths = [interval.high - interval.low for interval in intervals]
        assert 0 < widths[0] < widths[1] < widths[2] < widths[3]


def test_confidence_applies_to_served_language_models_too() -> None:
    serving = workload_of(parse("migbatch: model=llama-3.1-8b engine=vllm"))
    assert serving is not None
    partition = Partition("gpu", (H100,))
    low, usual, high = (
        figures_by_profile(serving, partition, None, LearnedPredictor(confidence=c))["3g.40gb"]
        for c in (0.7, 0.9, 0.95)
    )
    assert usual == figures_by_profile(serving, partition, None, LearnedPredictor())["3g.40gb"]
    assert low.tpot_s.high < usual.tpot_s.high < high.tpot_s.high
    assert low.tokens_s.low > usual.tokens_s.low > high.tokens_s.low
    assert low.slice_mib == usual.slice_mib == high.slice_mib


def test_prior_for_another_gpu_starts_from_measurements_of_this_one(rows: list[Measurement]) -> None:
    """A model measured as much slower than the prior is expected to be slow on a GPU where it was not measured."""
    slow = truth("vgg16", 0, 0.4)
    slow[1] += 1.0
    changed = [row for row in rows if row.model != "vgg16"] + measure("vgg16", slow)
    other_gpu = GpuSpec("h100-80gb", A100.facts._replace(tflops=989, bandwidth_gbs=3350), 80)
    item = TIME.names.index("item")

    def guess(found: list[Measurement]) -> float:
        population = learn(found, KNOWLEDGE).population("time", "infer")
        return float(population.prior("vgg16", known("vgg16"), other_gpu).mean[item])

    assert guess(changed) - guess(rows) > 0.5


def test_rows_of_failed_measurements_teach_only_that_their_slices_are_too_small(rows: list[Measurement]) -> None:
    failed = [replace(row, latency_s=None, throughput_per_s=None, memory_mib=None, batch=512) for row in rows[:30]]
    without_failed, with_failed = learn(rows, KNOWLEDGE), learn([*rows, *failed], KNOWLEDGE)
    assert replace(with_failed, rows=without_failed.rows, short={}).to_dict() == without_failed.to_dict()
    tried = {(model, exceeded.profile) for (model, _, _), found in with_failed.short.items() for exceeded in found}
    assert tried and tried <= {(row.model, row.profile) for row in failed}
    # what was in use when memory ran out was not enough
    in_use = [replace(row, memory_mib=3000.0) for row in failed]
    assert learn([*rows, *in_use], KNOWLEDGE).to_dict() == with_failed.to_dict()


def test_slice_on_which_a_measured_point_did_not_fit_is_not_granted_for_it() -> None:
    """As in MIGPerf's table: the curve through the points that fitted stays below the memory of that slice."""
    fitted = [
        Measurement("h100-80gb", "resnet50", "cnn", "train", "7g.80gb", 7, 8, 132, batch, 224, latency_s=0.01 * batch,
                    memory_mib=1500.0 + 60 * batch)
        for batch in (8, 16, 32, 64)
    ]  # fmt: skip
    tried = replace(fitted[-1], profile="1g.10gb", compute_slices=1, memory_slices=1, sm_count=16, latency_s=None,
                    memory_mib=None)  # fmt: skip

    def need(batch: int, *more: Measurement) -> int:
        predictor = LearnedPredictor(learn([*fitted, *more], KNOWLEDGE))
        return predictor.figures(Bucket("resnet50", "train", batch, 224, "px"), H100)[P("7g.80gb")].need_mib

    assert need(64) < 9984 < need(64, tried)
    assert need(96, tried) > 9984 and need(32, tried) == need(32)
    ran = replace(tried, batch=96, latency_s=2.0)
    assert need(64, tried, ran) < 9984
    several = replace(tried, procs=2)
    assert need(64, several) < 9984


def test_slice_on_which_a_point_was_measured_holds_no_more_work_than_that() -> None:
    """Of a model of which nothing is known the memory is uncertain by a factor, however well its speed is known."""
    net = Measurement("h100-80gb", "net", "cnn", "train", "1g.10gb", 1, 1, 16, 64, 224, latency_s=0.3)
    whole = replace(net, profile="7g.80gb", compute_slices=7, memory_slices=8, sm_count=132, latency_s=0.05)

    def need(rows: Sequence[Measurement], batch: int = 64, size: int = 224, unit: str = "px") -> int:
        predictor = LearnedPredictor(learn(rows, KNOWLEDGE))
        return predictor.figures(Bucket("net", "train", batch, size, unit), H100)[P("7g.80gb")].need_mib

    assert need([whole, replace(whole, batch=32)]) > 20_096
    for batch, size in ((64, 224), (1, 224), (64, 112)):
        assert need([whole, net], batch, size) <= 9984
    for batch, size in ((128, 224), (64, 448)):
        assert need([whole, net], batch, size) > 9984
    assert need([replace(whole, batch=512)], 512) <= 81152
    assert need([replace(whole, batch=512, profile="2g.20gb", compute_slices=2)], 512) <= 20_096
    # jobs' reports, and texts that may be shorter than usual, show nothing
    assert need([whole, replace(net, source=RUNS)]) > 9984
    texts = [replace(row, family="encoder", input_size=None) for row in (whole, net)]
    assert need(texts, 64, 128, "tok") > 9984
    assert need([replace(row, input_size=128) for row in texts], 64, 128, "tok") <= 9984


def test_batch_that_did_not_fit_on_a_whole_gpu_fits_on_none_of_its_slices() -> None:
    whole = Measurement("h100-80gb", "resnet50", "cnn", "train", batch=64, input_size=224, latency_s=0.3)
    tried = replace(whole, batch=128, latency_s=None)

    def need(batch: int, *rows: Measurement) -> int:
        predictor = LearnedPredictor(learn(rows, KNOWLEDGE))
        return predictor.figures(Bucket("resnet50", "train", batch, 224, "px"), H100)[P("7g.80gb")].need_mib

    assert need(128, whole) < 81152 < need(128, whole, tried)
    assert need(64, whole, tried) == need(64, whole)
    assert need(128, tried, replace(whole, batch=128)) < 81152
    assert need(128, tried, replace(whole, batch=128, profile="3g.40gb")) < 81152


def of_memory(points: Sequence[Measurement], speeds: Sequence[Measurement]) -> Interval:
    """Return the memory predicted for a batch of 8 on a whole GPU from a table of memory and one of speeds."""
    weighed = [replace(row, gpu="h100-80gb", source="weighed", memory_mib=3 * (row.memory_mib or 0)) for row in points]
    timed = [replace(row, gpu="h100-80gb", source="timed", memory_mib=None) for row in speeds]
    predictor = LearnedPredictor(learn([*weighed, *timed], KNOWLEDGE))
    return predictor.figures(Bucket("resnet50", "infer", 8, 224, "px"), H100)[P("7g.80gb")].memory_mib


def test_memory_of_a_model_follows_from_the_table_that_has_it(rows: list[Measurement]) -> None:
    """Another table has more points, but only of its speed."""
    own = [row for row in rows if row.model == "resnet50"]
    whole = [row for row in own if row.profile == "7g.80gb" and row.batch <= 8]
    assert of_memory(whole, own).mid == pytest.approx(3 * (whole[-1].memory_mib or 0), rel=0.1)


def test_memory_measured_at_one_point_is_no_surer_for_many_points_of_speed(rows: list[Measurement]) -> None:
    own = [row for row in rows if row.model == "resnet50"]
    assert of_memory(own[:1], own) == of_memory(own[:1], ())


def test_learning_from_no_rows_gives_the_prior() -> None:
    assert learn([], KNOWLEDGE).populations == {}
    one_point = measure("vgg16", truth("vgg16", 0), batches=(8,))[:1]
    assert LearnedPredictor(learn(one_point, KNOWLEDGE)).figures(Bucket("vgg16", "infer", 8, 224, "px"), H100)


def test_model_without_built_in_facts_is_learned_from_its_rows(rows: list[Measurement]) -> None:
    mine = [replace(row, model="our-net", params=2e7, flops_per_item=5e9) for row in rows if row.model == "resnet50"]
    predictor = LearnedPredictor(learn([*rows, *mine], KNOWLEDGE))
    assert predictor.grids()["our-net"].unit == "px" and 224 in predictor.grids()["our-net"].inputs
    assert predictor.figures(Bucket("our-net", "infer", 8, 224, "px"), H100)


@pytest.mark.parametrize("others", [False, True])
def test_model_without_specifications_keeps_its_memory_on_another_gpu(rows: list[Measurement], others: bool) -> None:
    """What is wrong in the specifications that are assumed for it is wrong on every GPU."""
    known_by = {"model": "our-net", "params": None, "flops_per_item": None}
    own = [row for row in rows if row.model == "resnet50" and row.batch >= 8]
    mine = [replace(row, **known_by, memory_mib=3 * (row.memory_mib or 0)) for row in own]
    measured = {row.batch: row.memory_mib or 0 for row in mine}
    predictor = LearnedPredictor(learn([*mine, *(rows if others else ())], KNOWLEDGE))
    for batch, mib in measured.items():
        memory = predictor.figures(Bucket("our-net", "infer", batch, 224, "px"), H100)[P("7g.80gb")].memory_mib
        assert memory.mid == pytest.approx(mib, rel=0.4)
        assert memory.low < mib < memory.high


# -- as a value -------------------------------------------------------------------------------------------------------


def test_learned_state_round_trips_through_json(learned: Learned) -> None:
    text = json.dumps(learned.to_dict())
    again = Learned.from_dict(json.loads(text))
    assert again.to_dict() == learned.to_dict()
    cell = Bucket("bert-base", "infer", 16, 128, "tok")
    assert LearnedPredictor(again).figures(cell, H100) == LearnedPredictor(learned).figures(cell, H100)


def distort(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        distort(("format",), 99),
        distort(("fitted",), None),
        distort(("fitted", 0, "kind"), "serve"),
        distort(("fitted", 0, "inputs"), [0]),
        distort(("fitted", 0, "beliefs", "time", "mean"), [1.0]),
        distort(("fitted", 0, "beliefs", "time", "mean", 0), float("nan")),
        distort(("fitted", 0, "beliefs"), {"speed": {}}),
        distort(("populations", "time/infer", "covariance", 0, 0), -1.0),
        distort(("populations", "time/infer", "levels"), "fast"),
        distort(("populations", "time/infer", "levels", "", 1, 0), -1.0),
        distort(("populations",), {"time/serve": {}}),
        distort(("calibrations", "time/infer", "1*"), [1.0]),
        distort(("calibrations", "time/infer", "1*", 0), float("inf")),
        distort(("rows",), "many"),
    ],
)
def test_corrupted_states_are_refused(learned: Learned, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(json.dumps(learned.to_dict()))
    change(data)
    with pytest.raises(StateError):
        Learned.from_dict(data)
    with pytest.raises(StateError):
        Learned.from_dict([])


# -- which points, which edges, how wide ------------------------------------------------------------------------------


def test_first_points_follow_the_fixed_rule_then_expected_information() -> None:
    """Largest slice at batch 4; middle slice at 32; smallest slice at 8; then the points with the most information."""
    found = measure("resnet50", truth("resnet50", 0), procs=(1, 2))
    cells = Cells.of_rows(found, A100, known("resnet50"))
    belief = pool(TIME, "infer", ()).prior("resnet50", known("resnet50"), A100)
    done: list[int] = []
    for _ in range(6):
        left = [i for i in range(len(found)) if i not in done]
        chosen = next_point(TIME, belief, cells, done, left)
        assert chosen is not None and chosen not in done
        done.append(chosen)
    assert [(found[i].profile, found[i].batch, found[i].procs) for i in done[:3]] == [
        ("7g.80gb", 4, 1),
        ("3g.40gb", 32, 1),
        ("1g.10gb", 8, 1),
    ]
    assert next_point(TIME, belief, cells, done, []) is None
    # a point that does not fit is left out and the nearest one takes its place
    left = [i for i in range(len(found)) if i != done[2]]
    instead = next_point(TIME, belief, cells, done[:2], left)
    assert instead is not None and (found[instead].profile, found[instead].batch) == ("1g.10gb", 4)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=5), st.floats(1e-4, 1e-1), st.integers(2, 300))
@settings(max_examples=examples(60), deadline=None)
def test_rounding_up_to_a_batch_edge_costs_no_more_than_the_stated_growth(
    items: list[float], host: float, largest: int
) -> None:
    batches = np.arange(1, largest + 1, dtype=float)
    seconds = np.column_stack([np.maximum(host, item * batches) for item in items])
    edges = batch_edges(seconds)
    assert edges[0] == 1 and edges[-1] == largest and list(edges) == sorted(set(edges))
    for lower, upper in pairwise(edges):
        assert upper == lower + 1 or (seconds[upper - 1] <= GROWTH * seconds[lower - 1] * (1 + 1e-9)).all()
    for column in seconds.T:
        assert knee(range(1, largest + 1), column) in edges
    assert {2**i for i in range(9) if 2**i <= largest} <= set(edges)


def test_input_edges_include_the_measured_sizes() -> None:
    edges = input_edges(known("resnet50").work, {224, 299}, 1024)
    assert {224, 299, 1024} <= set(edges) and list(edges) == sorted(set(edges))


@given(st.integers(4, 40), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_calibration_holds_for_left_out_models(models: int, seed: int) -> None:
    """Factors grow with the level; for left-out models, similar or not, levels hold to within a few models."""
    draw = np.random.default_rng(seed)

    def scores(model: str) -> list[Score]:
        return [Score(model, 1, 0, value) for value in draw.exponential(draw.exponential(1.0) + 0.1, 20).tolist()]

    calibration = calibrate([score for model in range(models) for score in scores(str(model))])
    factors = calibration.factors["1*"]
    assert list(factors) == sorted(factors) and calibration.factors["1a"] == factors
    held = np.mean([[score.value <= factors[LEVELS.index(0.8)] for score in scores("new")] for _ in range(200)])
    assert 0.8 - 1.5 / np.sqrt(models) <= held
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


@pytest.mark.parametrize("folds", [4, 100])
def test_calibration_scores_every_model_without_its_own_measurements(
    rows: list[Measurement], folds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more models than folds too: several are then held out together."""
    monkeypatch.setattr(training, "FOLDS", folds)
    units = training.units_of("time", [s for s in samples_of(rows, KNOWLEDGE) if s.kind == "infer"])
    models = {unit.model for unit, _ in units}
    assert len(models) > 4
    first, sample = units[0]
    slower = replace(first, theta=first.theta + 0.5), sample
    scores, with_other = (training.scores_of("time", "infer", [unit, *units[1:]]) for unit in (units[0], slower))
    assert {score.model for score in scores if score.points == 0} == models
    own, others = (lambda score: score.model == first.model), (lambda score: score.model != first.model)
    assert list(filter(own, scores)) == list(filter(own, with_other))
    assert list(filter(others, scores)) != list(filter(others, with_other))


def test_first_memory_of_a_public_image_model_in_training_is_surer_than_that_of_others() -> None:
    pace = np.zeros(1, dtype=np.intp)
    calibration = unmeasured("memory", "train")
    for level in LEVELS:
        image, other = (calibration.factor(level, 0, pace, stranger=True, close=public)[0] for public in (True, False))
        assert 1.2 * _normal_multiple(level) <= 1.5 * image < 1.5 * other, level
    for points in (1, 2, 3):
        measured = [calibration.factor(0.8, points, pace, stranger=True, close=public)[0] for public in (True, False)]
        assert measured[0] == measured[1]
    assert Calibration.from_dict(calibration.to_dict()) == calibration


def _normal_multiple(level: float) -> float:
    return NormalDist().inv_cdf(0.5 + level / 2.0)


def test_unmeasured_stacks_and_families_get_the_intervals_of_strangers(learned: Learned) -> None:
    """Measured stacks and families get the table's own intervals, all others the intervals for strangers."""
    population, pace = learned.population("time", "infer"), np.zeros(1, dtype=np.intp)
    assert not population.is_stranger(known("resnet50"), A100, "a100-80gb|lab")
    assert population.is_stranger(known("resnet50"), A100, "a100-80gb|another")
    assert population.is_stranger(known("gpt2"), A100, "a100-80gb|lab")
    assert population.is_stranger(known("resnet50"), A100)
    calibration = learned.calibration("time", "infer")
    own, strange = (calibration.factor(0.9, 0, pace, stranger=stranger)[0] for stranger in (False, True))
    assert strange == unmeasured("time", "infer").factor(0.9, 0, pace)[0] != own


@pytest.mark.parametrize("figure", ["time", "memory"])
@pytest.mark.parametrize("kind", ["infer", "train"])
def test_intervals_of_strangers_grow_with_the_level(figure: str, kind: str) -> None:
    for factors in unmeasured(figure, kind).factors.values():
        assert list(factors) == sorted(factors) and factors[0] > 0


def test_intervals_are_wide_without_left_out_models() -> None:
    wide = Calibration({}).factor(0.9, 0, np.zeros(1, dtype=np.intp))[0]
    assert wide > 2.0
    one = calibrate([Score("one", 0, 1, 0.1), Score("one", 0, 1, 0.1)])
    assert one.factor(0.9, 0, np.zeros(1, dtype=np.intp))[0] == wide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measured", "shift", "least"), [(2, 0.0, 0.7), (2, 0.5, 0.7), (2, 1.5, 0.7), (1, 1.0, 0.6), (1, 1.5, 0.6)]
)
def test_intervals_after_few_models_hold_for_others_however_far_the_stack_is_from_physics(
    measured: int, shift: float, least: float
) -> None:
    networks = [name for name in MODELS if known(name).family == "cnn"]
    held = []
    for seed in range(6):
        tables = {name: measure(name, truth(name, seed, shift), source=SITE) for name in networks}
        predictor = LearnedPredictor(learn([row for name in networks[:measured] for row in tables[name]], KNOWLEDGE))
        for name in networks[2:]:
            cells = Cells.of_rows(tables[name], A100, known(name))
            low, _, high = predictor.interval("time", name, known(name), A100, "infer", cells)  # 80 %
            seconds = np.array([row.latency_s for row in tables[name]])
            held.append(float(np.mean((low <= seconds) & (seconds <= high))))
    assert least <= np.mean(held) <= 0.95
