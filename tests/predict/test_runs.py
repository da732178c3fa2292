"""What is learned from finished runs, and which users' reports are left out."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict.cells import Cells, GpuSpec
from slurm_migbatch.predict.check import misses
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.runs import (
    ABSURD,
    MOST_CELLS,
    MOST_OWN,
    SILENT_S,
    Observation,
    observations_of,
    peaks_of,
    rows_of,
    select_learnable,
    share_out,
)
from slurm_migbatch.predict.samples import RUNS, SILENT
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.state import Learned, Tried
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.buckets import Bucket
from slurm_migbatch.workload.catalog import Partition
from slurm_migbatch.workload.hints import parse
from slurm_migbatch.workload.refusal import Refusal
from tests.support.gpu_kinds import H100, P

NAME = "NVIDIA H100 80GB HBM3"
KNOWLEDGE = ModelKnowledge()
GEOMETRIES = {NAME: H100.geometry}


@dataclass(frozen=True)
class Run:
    """A run of bert-large on one slice that reported its latency; the physical prior for 7g is 9 ms."""

    number: int = 1
    user: str | None = "ann"
    state: str = "COMPLETED"
    model: str | None = "bert-large"
    role: str | None = "infer"
    batch: int | None = 8
    input: int | None = 128
    unit: str = "tok"
    items_hint: int | None = None
    profile: str | None = "7g.80gb"
    gpu: str | None = NAME
    slices: int = 1
    elapsed_s: float = 60.0
    throughput_per_s: float | None = None
    latency_s: float | None = 0.02
    latency_p99_s: float | None = None
    memory_mib: float | None = None
    items: float | None = None
    engine: str = ""
    oom: bool = False

    again: int | None = None

    @property
    def run(self) -> int:
        return self.again or self.number


def observed(*runs: Run) -> list[Observation]:
    return observations_of(runs, GEOMETRIES, KNOWLEDGE)


def only(*runs: Run) -> Observation:
    (found,) = observed(*runs)
    return found


def seconds(runs: Sequence[Run]) -> dict[tuple[str, int], float]:
    selected = select_learnable(observed(*runs), KNOWLEDGE)
    rows = rows_of(selected.used)
    return {(row.profile, row.batch): row.seconds for row in rows if row.seconds is not None}


@pytest.mark.parametrize(
    ("model", "stated", "size"),
    [
        ("convnext_base.fb_in22k_ft_in1k_384", None, 384),
        ("convnext_base.fb_in22k_ft_in1k_384", 288, 288),
        ("timm/convnext_base.fb_in22k_ft_in1k", None, None),
        ("resnet50.a1_in1k_160", None, None),
        ("bert-large.ft_384", None, None),
        ("google/vit-base-patch16-384", None, 384),
        ("regnety_320", None, None),
    ],
)
def test_run_counts_with_the_images_that_the_tag_of_its_model_states(
    model: str, stated: int | None, size: int | None
) -> None:
    assert only(Run(model=model, input=stated, unit="px" if stated else "")).row.input_size == size
    row = Measurement("h100-80gb", model, latency_s=0.1, input_size=stated)
    known = KNOWLEDGE.of(model)
    work = Cells.of_rows([row], GpuSpec.of_rows([row]), known).work[0]
    assert work == pytest.approx(known.work(size or known.reference))


def test_a_run_becomes_a_row_under_the_sites_name_of_the_gpu() -> None:
    row = only(Run(model="bert_large", memory_mib=4000.0, latency_p99_s=0.03)).row
    assert (row.gpu, row.model, row.profile, row.sm_count) == ("h100-80gb", "bert-large", "7g.80gb", 132)
    assert (row.latency_s, row.latency_p99_s, row.memory_mib, row.source) == (0.02, 0.03, 4000.0, RUNS)


@pytest.mark.parametrize(
    "run",
    [
        Run(model=None),
        Run(batch=None),
        Run(gpu=None),
        Run(gpu="NVIDIA Unheard Of"),
        Run(profile=None),
        Run(profile="2g.99gb"),
        Run(slices=2),
        Run(role="dream"),
        Run(unit="px"),
        Run(latency_s=None),
        Run(state="FAILED"),
        Run(state="FAILED", memory_mib=1000.0),
    ],
)
def test_run_without_usable_data_is_ignored(run: Run) -> None:
    assert observed(run) == []


def test_latency_is_used_when_the_job_waits_for_its_input() -> None:
    """An inference service with little to do: 10 requests a second, though it could do 400."""
    row = only(Run(throughput_per_s=10.0)).row
    assert (row.seconds, row.throughput_per_s) == (0.02, None)
    assert only(Run(throughput_per_s=380.0)).row.throughput_per_s == 380.0
    assert only(Run(throughput_per_s=100.0, latency_s=None)).row.seconds == pytest.approx(0.08)


def test_service_without_reported_latency_gives_no_speed() -> None:
    assert observed(Run(role="serve", latency_s=None, throughput_per_s=10.0)) == []
    assert only(Run(role="serve", throughput_per_s=10.0)).row.seconds == 0.02
    assert only(Run(role="serve")).row.kind == "infer"


def test_long_silent_runs_are_used_only_without_reported_ones() -> None:
    silent = Run(latency_s=None, items_hint=100_000, elapsed_s=1000.0)
    row = only(silent).row
    assert (row.throughput_per_s, row.source) == (100.0, SILENT)
    assert observed(Run(latency_s=None, items_hint=100_000, elapsed_s=SILENT_S - 1)) == []
    assert observed(Run(latency_s=None, items_hint=100_000, elapsed_s=1000.0, state="TIMEOUT")) == []
    (only_row,) = rows_of(observed(silent, Run(2)))
    assert (only_row.source, only_row.seconds) == (RUNS, pytest.approx(0.02))


def test_silent_runs_have_less_weight_than_reported_ones() -> None:
    def predicted(source: str) -> float:
        (row,) = rows_of(observed(Run(latency_s=None, items_hint=20_000, elapsed_s=1000.0)))
        row = row if source == SILENT else only(Run(latency_s=row.seconds)).row
        learned = learn([row], KNOWLEDGE)
        return misses(learned, [row], KNOWLEDGE)["time"].error

    assert predicted(RUNS) < 0.5 * predicted(SILENT)


def test_later_report_of_a_run_replaces_the_earlier_one() -> None:
    assert [observation.row.latency_s for observation in observed(Run(1), Run(2, latency_s=0.04, again=1))] == [0.04]


def test_median_of_many_runs_is_used() -> None:
    runs = [Run(n, latency_s=0.02) for n in range(9)] + [Run(n, latency_s=0.09) for n in range(9, 12)]
    assert seconds(runs) == {("7g.80gb", 8): pytest.approx(0.02)}


@pytest.mark.parametrize("factor", [1e-9, 1e-3 / 16, 16.0, 1e6])
@pytest.mark.parametrize("cell", [8, 32])
def test_absurd_reports_of_one_user_are_left_out(factor: float, cell: int) -> None:
    """Among other users of the model, in their cell or in a cell of that user alone, however often it is reported."""
    honest = [Run(n, user, latency_s=0.02) for n, user in enumerate(("ann", "bob", "cat"))]
    lies = [Run(100 + n, "eve", batch=cell, latency_s=0.02 * factor) for n in range(50)]
    selected = select_learnable(observed(*honest, *lies), KNOWLEDGE)
    assert {run.user for run in selected.used} == {"ann", "bob", "cat"}
    (left_out,) = selected.left_out
    assert (left_out.user, left_out.count, left_out.figure) == ("eve", 50, "time")
    assert seconds([*honest, *lies]) == {("7g.80gb", 8): pytest.approx(0.02)}


def test_of_two_disagreeing_users_the_one_nearer_to_the_prior_is_used() -> None:
    assert seconds([Run(1, "ann"), *(Run(n, "eve", latency_s=0.4) for n in range(2, 9))]) == {
        ("7g.80gb", 8): pytest.approx(0.02)
    }


def test_single_user_is_used_unless_the_report_is_impossible() -> None:
    assert seconds([Run(1, latency_s=0.4)]) == {("7g.80gb", 8): pytest.approx(0.4)}
    selected = select_learnable(observed(Run(1), Run(2, latency_s=0.009 * ABSURD * 3)), KNOWLEDGE)
    assert len(selected.used) == 1 and len(selected.left_out) == 1


def test_agreeing_users_override_the_prior() -> None:
    runs = [Run(n, user, latency_s=0.3 * (1 + 0.1 * n)) for n, user in enumerate(("ann", "bob", "cat"))]
    assert seconds(runs) == {("7g.80gb", 8): pytest.approx(0.33)}


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("batches", [(64,), (64, 128)])
def test_one_user_beyond_the_batches_of_others_does_not_bend_their_curve(
    factor: float, batches: tuple[int, ...]
) -> None:
    def latency(batch: int) -> float:
        return 1.5 * max(0.009, 0.00125 * (batch + 3))

    def predicted(runs: Sequence[Run]) -> list[list[float]]:
        rows = rows_of(select_learnable(observed(*runs), KNOWLEDGE).used)
        predictor = LearnedPredictor(learn(rows, KNOWLEDGE))
        cells = (Bucket("bert-large", "infer", batch, 128, "tok") for batch in (8, 16, 64))
        return [predictor.figures(cell, H100)[P("7g.80gb")].latency_s.to_list() for cell in cells]

    honest = [
        Run(10 * n + batch, user, batch=batch, latency_s=(1 + 0.05 * n) * latency(batch))
        for n, user in enumerate(("ann", "bob", "cat"))
        for batch in (1, 2, 4, 8)
    ]
    eve = [
        Run(1000 * n + batch, "eve", batch=batch, latency_s=factor * latency(batch))
        for n in range(1, 6)
        for batch in batches
    ]
    for (low, mid, high), (_, usual, _) in zip(predicted([*honest, *eve]), predicted(honest), strict=True):
        assert mid == pytest.approx(usual, rel=0.1) and low < usual < high
    if factor == 1.0:
        ends = [predicted(runs)[2] for runs in ([*honest, *eve], honest)]
        assert ends[0][2] / ends[0][0] < ends[1][2] / ends[1][0], "what fits is learned"


def test_each_user_counts_once() -> None:
    runs = [Run(n, "ann", latency_s=0.03) for n in range(100)]
    runs += [Run(100, "bob", latency_s=0.02), Run(101, "cat", latency_s=0.021)]
    assert seconds(runs) == {("7g.80gb", 8): pytest.approx(0.021)}


@given(st.permutations(range(12)), st.integers(0, 2**31))
def test_order_of_runs_does_not_change_the_rows(order: list[int], seed: int) -> None:
    rng = random.Random(seed)
    runs = [
        Run(n, rng.choice("abc"), batch=rng.choice([1, 8]), latency_s=0.02 * rng.uniform(0.5, 2)) for n in range(12)
    ]
    assert seconds([runs[n] for n in order]) == seconds(runs)


def test_memory_reserved_by_the_framework_is_not_used_as_need() -> None:
    """JAX allocates three quarters of any slice; the speed is still learned."""
    row = only(Run(memory_mib=60_000.0, engine="jax")).row
    assert (row.memory_mib, row.latency_s) == (None, 0.02)
    assert observed(Run(memory_mib=60_000.0, engine="jax", latency_s=None)) == []
    assert observed(Run(profile="1g.10gb", memory_mib=9900.0, engine="jax", state="FAILED")) == []


def test_need_is_the_peak_on_the_smallest_slice_that_completed() -> None:
    """A framework takes three quarters of any slice: its peak on the smallest slice is nearest to the need."""
    runs = [Run(1, profile="7g.80gb", memory_mib=60_000.0), Run(2, profile="1g.10gb", memory_mib=7_500.0)]
    found = {row.profile: row.memory_mib for row in rows_of(observed(*runs))}
    assert found == {"7g.80gb": None, "1g.10gb": pytest.approx(7_500.0)}


def test_failed_run_with_a_full_slice_is_a_lower_bound_of_the_need() -> None:
    failed = Run(1, state="FAILED", profile="1g.10gb", memory_mib=9_800.0)
    (row,) = rows_of(observed(failed))
    assert (row.memory_mib, row.ran) == (pytest.approx(9_800.0), False)
    more = [row.memory_mib for row in rows_of(observed(failed, Run(2, profile="1g.20gb", memory_mib=15_000.0)))]
    assert more == [pytest.approx(15_000.0)]


def peaked(batch: int, peak: float, profile: str, state: str = "COMPLETED", **more: object) -> Run:
    return Run(batch=batch, memory_mib=peak, profile=profile, state=state, latency_s=None, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize(
    ("model", "role", "size", "unit"),
    [
        ("resnet50", "infer", 224, "px"),
        ("resnet50", "train", 224, "px"),
        ("bert-large", "infer", 128, "tok"),
        ("bert-large", "train", 128, "tok"),  # computed from its architecture
        ("our-net", "train", 224, "px"),
    ],
)
def test_slice_on_which_runs_ran_out_of_memory_is_not_granted_again(
    reported: bool, model: str, role: str, size: int, unit: str
) -> None:
    """Although smaller batches completed with little memory, from which less is expected."""
    common = {"model": model, "role": role, "input": size, "unit": unit}
    peak = 5_000.0 if reported else 9_700.0
    runs = [
        *(peaked(batch, 2000.0 + 20 * batch, "3g.40gb", **common) for batch in (8, 16, 32) for _ in range(5)),
        *(peaked(64, peak, "1g.10gb", "FAILED", oom=reported, **common) for _ in range(2)),
    ]
    runs = [replace(run, number=number) for number, run in enumerate(runs)]
    learned = learn(rows_of(select_learnable(observed(*runs), KNOWLEDGE).used), KNOWLEDGE)
    chooser, words = Chooser(LearnedPredictor(learned)), f"migbatch: model={model} input={size}{unit} role={role}"
    for batch in (64, 70):
        choice = chooser.choose(parse(f"{words} batch={batch}"), Partition("gpu", (H100,)))
        assert choice.offer.memory_mib > 9984 and choice.figures and choice.figures.need_mib > 9984
    chosen = chooser.choose(parse(f"{words} batch=8"), Partition("gpu", (H100,)))
    assert chosen.offer.memory_mib == 9984 or role == "train"


@pytest.mark.parametrize(
    ("model", "role", "batch", "size", "unit"),
    [
        ("resnet50", "train", 128, 224, "px"),
        ("swin-b", "train", 64, 224, "px"),
        ("bert-large", "infer", 256, 512, "tok"),
    ],
)
def test_run_that_ran_out_on_a_far_too_small_slice_does_not_lower_the_need(
    model: str, role: str, batch: int, size: int, unit: str
) -> None:
    """A user who requested a slice by its name: its memory is less than is needed, by any factor."""
    cell = Bucket(model, role, batch, size, unit)
    common = {"model": model, "role": role, "input": size, "unit": unit}
    runs = [peaked(batch, 9_700.0, "1g.10gb", "FAILED", number=n, user=user, **common) for n, user in enumerate("ab")]
    learned = learn(rows_of(select_learnable(observed(*runs), KNOWLEDGE).used), KNOWLEDGE)
    before, after = (LearnedPredictor(state).figures(cell, H100)[P("7g.80gb")] for state in (Learned(), learned))
    assert after.need_mib == before.need_mib > 10_240
    assert misses(learned, rows_of(observed(*runs)), KNOWLEDGE) == {}


def test_one_user_who_ran_out_of_far_too_much_memory_does_not_change_the_slices_of_others() -> None:
    """A report costs nothing: otherwise one of a single image on a whole GPU would give all others whole GPUs."""
    cell = Bucket("resnet50", "infer", 1, 224, "px")
    common = {"model": "resnet50", "input": 224, "unit": "px", "oom": True}
    eve = peaked(1, 500.0, "7g.80gb", "FAILED", user="eve", **common)

    def need(*runs: Run) -> int:
        learned = learn(rows_of(select_learnable(observed(*runs), KNOWLEDGE).used), KNOWLEDGE)
        return LearnedPredictor(learned).figures(cell, H100)[P("7g.80gb")].need_mib

    assert need(eve) == need() < 9984
    assert need(eve, replace(eve, number=2, user="bob")) > 81152


def test_no_batch_or_number_of_processes_is_advised_that_ran_out_of_memory() -> None:
    cell = Bucket("bert-base", "infer", 1, 128, "tok")
    short = {("bert-base", "infer", "h100-80gb"): (Tried(1, 128, "1g.20gb"),)}
    before, after = LearnedPredictor(), LearnedPredictor(Learned(short=short))
    copies = [predictor.advice(cell, H100, P("3g.40gb")) for predictor in (before, after)]
    assert copies[0] and copies[1] and copies[0].copies > copies[1].copies >= 1
    for batch in (0, 1):
        assert before.advice(replace(cell, batch=batch), H100, P("1g.20gb"))
        assert after.advice(replace(cell, batch=batch), H100, P("1g.20gb")) is None


def test_work_that_completed_with_less_memory_refutes_a_run_that_ran_out() -> None:
    failed = [peaked(64, 9_700.0, "1g.10gb", "FAILED", number=n) for n in (1, 2)]
    assert learn(rows_of(observed(*failed)), KNOWLEDGE).short
    for batch, state in ((64, "COMPLETED"), (128, "COMPLETED")):
        done = peaked(batch, 6_000.0, "1g.10gb", state, number=3)
        assert not learn(rows_of(observed(*failed, done)), KNOWLEDGE).short
    fewer = peaked(32, 6_000.0, "1g.10gb", number=3)
    assert learn(rows_of(observed(*failed, fewer)), KNOWLEDGE).short


def test_peak_that_sampling_missed_on_a_larger_slice_does_not_count() -> None:
    failed, done = peaked(64, 9_700.0, "1g.10gb", "FAILED"), peaked(64, 6_000.0, "3g.40gb", number=2)
    assert peaks(failed, done) == {"1g.10gb": pytest.approx(9_700.0)}
    assert peaks(failed, replace(done, profile="1g.10gb")) == {"1g.10gb": pytest.approx(6_000.0)}


def test_small_peaks_of_one_user_do_not_lower_the_need_of_others() -> None:
    """A job that did little with a model on a small slice, and jobs that put the usual load on the same model."""
    small = [Run(n, "eve", profile="1g.10gb", memory_mib=7_500.0) for n in range(20)]
    honest = [Run(20, "ann", profile="3g.40gb", memory_mib=30_000.0)]
    assert peaks(*small, *honest) == {"3g.40gb": pytest.approx(30_000.0)}
    honest.append(Run(21, "bob", profile="3g.40gb", memory_mib=28_000.0))
    assert peaks(*small, *honest) == {"3g.40gb": pytest.approx(28_000.0)}
    failed = Run(22, "cat", state="FAILED", profile="1g.10gb", memory_mib=9_800.0)
    assert peaks(*small, failed) == {"1g.10gb": pytest.approx(9_800.0)}


def learned_from(*runs: Run) -> LearnedPredictor:
    used = select_learnable(observed(*runs), KNOWLEDGE).used
    learned = replace(learn(rows_of(used), KNOWLEDGE), peaks=peaks_of(used, 0.9))
    return LearnedPredictor(learned)


def of_net(n: int, batch: int, peak: float, profile: str = "1g.20gb", **more: object) -> Run:
    """A run of a model without public specifications."""
    return peaked(batch, peak, profile, number=n, **{"model": "our-net", "input": None, "unit": "px", **more})


def need_of_net(predictor: LearnedPredictor, batch: int) -> int:
    grid = predictor.grids()["our-net"]
    cell = Bucket("our-net", "infer", batch, grid.default_input, grid.unit)
    return predictor.figures(cell, H100)[P("7g.80gb")].need_mib


def honest_runs(each: int = 10) -> list[Run]:
    """Runs of two users with seven batches, which need 9,000 MiB and 20 MiB for each item."""
    batches = (1, 2, 4, 8, 16, 32, 64)
    works = [(batch, user) for batch in batches for user in "ab" for _ in range(each // 2)]
    return [of_net(n, batch, 9000.0 + 20 * batch + n % 5, user=user) for n, (batch, user) in enumerate(works)]


def test_runs_under_a_wrong_name_or_batch_do_not_enlarge_the_slices_of_others() -> None:
    wrong = [
        of_net(200 + n, batch, peak, user="eve", profile="7g.80gb", input=size)
        for n, (batch, peak, size) in enumerate(
            [(8, 60000.0, 512), (16, 41000.0, 256), (128, 9500.0, None), (256, 2000.0, None)]
        )
    ]
    predictor = learned_from(*honest_runs(), *wrong)
    for batch in (1, 4, 16, 64):
        assert 9000 + 20 * batch <= need_of_net(predictor, batch) <= 1.1 * (9000 + 20 * batch)


@pytest.mark.parametrize("runs_of_eve", [1, 60])
def test_runs_with_inputs_of_another_unit_do_not_have_the_requests_of_others_refused(runs_of_eve: int) -> None:
    """What a model takes is known from its runs only; one user's were under the wrong name, and of another kind."""
    others = [of_net(n, 2 ** (n % 6), 9000.0, user="ab"[n % 2], role="train", input=224) for n in range(24)]
    eve = [of_net(100 + n, 1 + n, 3000.0, user="eve", role="infer", input=512, unit="tok") for n in range(runs_of_eve)]
    for runs in ((*others, *eve), (*eve, *others)):
        chooser = Chooser(learned_from(*runs))
        bucket = chooser.bucket(parse("migbatch: model=our-net role=train batch=8 input=224px"))
        assert bucket and bucket.input == 224


def test_input_of_a_model_whose_runs_state_none_is_not_refused_in_either_unit() -> None:
    """Runs without input= do not say whether the model takes images or texts."""
    runs = [of_net(n, 2 ** (n % 6), 9000.0 + 20 * 2 ** (n % 6), user="ab"[n % 2], unit="") for n in range(24)]
    partition, words = Partition("gpu", (H100,)), "migbatch: model=our-net batch=8"

    def need(words: str, *more: Run) -> int:
        choice = Chooser(learned_from(*runs, *more)).choose(parse(words), partition)
        assert choice.figures
        return choice.figures.need_mib

    assert need(f"{words} input=512tok") == need(words)
    assert need(f"{words} input=512px") > need(words)
    stated = [of_net(50 + n, 8, 9000.0, input=512, unit="tok") for n in range(2)]
    with pytest.raises(Refusal, match="takes its input in tok"):
        need(f"{words} input=512px", *stated)


def test_memory_that_differs_between_runs_of_the_same_work_is_granted_as_most_of_them_took() -> None:
    runs = [of_net(n, 8, 6000.0 + 400 * (n % 20), user="ab"[n % 2]) for n in range(40)]
    nine_of_ten = sorted(run.memory_mib or 0.0 for run in runs)[35]
    assert nine_of_ten <= need_of_net(learned_from(*runs), 8) <= 1.1 * nine_of_ten


@pytest.mark.parametrize("runs_of_eve", [1, 50])
def test_runs_of_one_user_that_took_far_more_do_not_enlarge_the_slices_of_others(runs_of_eve: int) -> None:
    """Two other users ran less work or as much, and more."""
    eve = [of_net(200 + n, 8, 40000.0, "7g.80gb", user="eve") for n in range(runs_of_eve)]
    for each in (4, 20):
        before, after = learned_from(*honest_runs(each)), learned_from(*honest_runs(each), *eve)
        for batch in (8, 64):
            assert need_of_net(after, batch) <= 1.1 * need_of_net(before, batch)


@pytest.mark.parametrize("runs_of_eve", [1, 50])
def test_runs_of_one_user_that_took_far_more_for_less_work_do_not_enlarge_the_slices_of_several(
    runs_of_eve: int,
) -> None:
    honest = [of_net(n, 16 if n % 2 else 64, 9500.0 + n % 5, user="abcd"[n % 8 // 2]) for n in range(80)]
    eve = [of_net(200 + n, 32, 40000.0, "7g.80gb", user="eve") for n in range(runs_of_eve)]
    assert need_of_net(learned_from(*honest, *eve), 64) <= 1.1 * need_of_net(learned_from(*honest), 64)


@pytest.mark.parametrize("count", [8, 9])
def test_few_runs_say_little_of_the_most_that_the_next_may_take(count: int) -> None:
    used = observed(*(of_net(n, 8, 6000.0) for n in range(count)))
    assert len(peaks_of(used, 0.9)) == (count == 9)
    assert not peaks_of(used, 0.95)


def test_many_small_runs_with_a_large_batch_do_not_lower_the_need_of_others() -> None:
    """Of the others few ran, and one of them ran out of memory."""
    eve = [of_net(n, 512, 900.0, "1g.10gb", user="eve") for n in range(50)]
    others = [of_net(60 + n, 64, 30000.0, "3g.40gb", user=user) for n, user in enumerate("abc")]
    short = [of_net(70 + n, 64, 19500.0, "1g.20gb", state="FAILED", user="d") for n in range(6)]
    assert need_of_net(learned_from(*eve, *others), 64) >= 30000
    assert not peaks_of(observed(*eve, *short), 0.9)


def peaks(*runs: Run) -> dict[str, float]:
    selected = select_learnable(observed(*runs), KNOWLEDGE)
    return {row.profile: row.memory_mib for row in rows_of(selected.used) if row.memory_mib is not None}


def test_number_of_cells_learned_for_a_model_is_bounded() -> None:
    runs = [Run(n, batch=1 + n % 200) for n in range(300)]
    assert len(rows_of(observed(*runs))) == MOST_CELLS


def test_predictions_are_near_the_reports_after_a_few_runs() -> None:
    runs = [
        Run(n, user, profile=profile, batch=batch, latency_s=0.05 * math.sqrt(batch), memory_mib=3000.0 + 10 * batch)
        for n, (user, profile, batch) in enumerate(
            (user, profile, batch) for user in "ab" for profile in ("7g.80gb", "3g.40gb") for batch in (8, 32)
        )
    ]
    selected = select_learnable(observed(*runs), KNOWLEDGE)
    rows = rows_of(selected.used)
    before, after = misses(Learned(), rows, KNOWLEDGE), misses(learn(rows, KNOWLEDGE), rows, KNOWLEDGE)
    assert after["time"].error < 0.25 * before["time"].error
    assert after["memory"].error < 0.1


def test_memory_filled_by_a_serving_engine_is_not_learned_as_need() -> None:
    """A serving engine fills its share of any slice; a batch model allocates what it needs."""
    assert observed(Run(model="meta-llama/Llama-3.1-8B-Instruct", memory_mib=18_000.0)) == []
    assert observed(Run(model="gpt2-xl", memory_mib=9_000.0)) == []
    assert only(Run(model="resnet50", unit="px", input=224)).row.model == "resnet50"
    assert only(Run(model="bert-large")).row.model == "bert-large"


@pytest.mark.parametrize(
    ("model", "unit", "input_size", "peak"),
    [
        ("stable-diffusion-xl", "px", 1024, 9_000.0),
        ("black-forest-labs/FLUX.1-dev", "px", 1024, 34_000.0),
        ("segformer-b3", "px", 1024, 2_500.0),
        ("wav2vec2-large", "", None, 2_200.0),
        ("esm2-t33-650m", "tok", 128, 4_000.0),
        ("acme-13b", "tok", 512, 28_000.0),
        ("stable-diffusion-xl", "px", 1024, 300.0),
    ],
)
def test_runs_of_a_model_whose_need_is_computed_do_not_lower_that_of_larger_batches(
    model: str, unit: str, input_size: int | None, peak: float
) -> None:
    """Of one image at a time, or of a program that left the GPU idle, with the same name of the model."""
    runs = [Run(n, model=model, batch=1, unit=unit, input=input_size, latency_s=None, memory_mib=peak) for n in (1, 2)]
    rows = rows_of(select_learnable(observed(*runs), KNOWLEDGE).used)
    partition = Partition("gpu", (H100,))

    def answer(learned: Learned, hints: str) -> str:
        chooser = Chooser(LearnedPredictor(learned))
        try:
            return chooser.choose(parse(f"migbatch: model={model} {hints}"), partition).text
        except Refusal as refusal:
            return str(refusal)

    for hints in ("batch=8", "batch=8 role=train"):
        assert answer(learn(rows, KNOWLEDGE), hints) == answer(Learned(), hints)


@pytest.mark.parametrize(("role", "least"), [("train", 5_000.0), ("infer", 1_500.0)])
def test_one_user_whose_programs_left_the_gpu_idle_does_not_lower_the_need_of_others(role: str, least: float) -> None:
    """Twenty jobs that name a model and used 300 MiB, as a program on the CPU does; then a second user's, too."""

    def need(*runs: Run) -> float:
        rows = rows_of(select_learnable(observed(*runs), KNOWLEDGE).used)
        cell = Bucket("resnet50", role, 96, 224, "px")
        return LearnedPredictor(learn(rows, KNOWLEDGE)).figures(cell, H100)[P("7g.80gb")].need_mib

    idle = [
        Run(n, "eve", model="resnet50", role=role, batch=96, input=224, unit="px", latency_s=None, memory_mib=300.0)
        for n in range(1, 21)
    ]
    assert need(*idle) == need() > least
    assert need(*idle, *(replace(run, number=run.number + 30, user="bob") for run in idle)) < least / 3


def test_one_user_cannot_displace_the_runs_of_others_beyond_a_share() -> None:
    """A user with most of the newest jobs, or with the most invented model names, displaces nobody."""
    public = ModelKnowledge().facts

    def runs(user: str, first: int, count: int, model: str = "resnet50") -> list[Observation]:
        row = only(Run()).row
        return [Observation(n, n, user, replace(row, model=model.format(n))) for n in range(first, first + count)]

    alone = runs("ann", 0, 60)
    assert share_out(alone, 40, public) == alone[-40:]
    crowded = [*runs("ann", 0, 20), *runs("bob", 20, 20), *runs("mallory", 40, 400)]
    kept = Counter(observation.user for observation in share_out(crowded, 40, public))
    assert kept == {"ann": 10, "bob": 10, "mallory": 20}
    invented = [*runs("ann", 0, 20), *runs("mallory", 20, 400, "m{}")]
    kept_models = {observation.row.model for observation in share_out(invented, 400, public)}
    assert kept_models == {"resnet50", *(f"m{n}" for n in range(420 - MOST_OWN, 420))}
