"""What finished runs teach, and whom the site does not believe."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict.check import misses
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.runs import (
    ABSURD,
    MOST_CELLS,
    MOST_OWN,
    SILENT_S,
    Observation,
    observations_of,
    rows_of,
    select_learnable,
    share_out,
)
from slurm_migbatch.predict.samples import RUNS, SILENT
from slurm_migbatch.predict.state import Learned
from slurm_migbatch.predict.training import learn
from tests.support.gpu_kinds import H100

NAME = "NVIDIA H100 80GB HBM3"
KNOWLEDGE = ModelKnowledge()
GEOMETRIES = {NAME: H100.geometry}


@dataclass(frozen=True)
class Run:
    """A run of bert-large on one slice that told its latency; what the physical prior expects of 7g is 9 ms."""

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

    again: int | None = None

    @property
    def run(self) -> int:
        return self.again or self.number


def told(*runs: Run) -> list[Observation]:
    return observations_of(runs, GEOMETRIES, KNOWLEDGE)


def only(*runs: Run) -> Observation:
    (found,) = told(*runs)
    return found


def seconds(runs: Sequence[Run]) -> dict[tuple[str, int], float]:
    heard = select_learnable(told(*runs), KNOWLEDGE)
    rows = rows_of(heard.used)
    return {(row.profile, row.batch): row.seconds for row in rows if row.seconds is not None}


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
def test_what_says_nothing_is_passed_over(run: Run) -> None:
    assert told(run) == []


def test_a_job_that_waits_for_its_input_tells_its_latency() -> None:
    """An inference service with little to do: 10 requests a second, though it could do 400."""
    row = only(Run(throughput_per_s=10.0)).row
    assert (row.seconds, row.throughput_per_s) == (0.02, None)
    assert only(Run(throughput_per_s=380.0)).row.throughput_per_s == 380.0
    assert only(Run(throughput_per_s=100.0, latency_s=None)).row.seconds == pytest.approx(0.08)


def test_a_service_that_told_no_latency_tells_nothing_of_speed() -> None:
    assert told(Run(role="serve", latency_s=None, throughput_per_s=10.0)) == []
    assert only(Run(role="serve", throughput_per_s=10.0)).row.seconds == 0.02
    assert only(Run(role="serve")).row.kind == "infer"


def test_silent_runs_count_where_they_were_long_and_nobody_told() -> None:
    silent = Run(latency_s=None, items_hint=100_000, elapsed_s=1000.0)
    row = only(silent).row
    assert (row.throughput_per_s, row.source) == (100.0, SILENT)
    assert told(Run(latency_s=None, items_hint=100_000, elapsed_s=SILENT_S - 1)) == []
    assert told(Run(latency_s=None, items_hint=100_000, elapsed_s=1000.0, state="TIMEOUT")) == []
    (only_row,) = rows_of(told(silent, Run(2)))
    assert (only_row.source, only_row.seconds) == (RUNS, pytest.approx(0.02))


def test_silent_runs_are_believed_less() -> None:
    def predicted(source: str) -> float:
        (row,) = rows_of(told(Run(latency_s=None, items_hint=20_000, elapsed_s=1000.0)))
        row = row if source == SILENT else only(Run(latency_s=row.seconds)).row
        learned = learn([row], KNOWLEDGE)
        return misses(learned, [row], KNOWLEDGE)["time"].error

    assert predicted(RUNS) < 0.5 * predicted(SILENT)


def test_a_later_word_about_a_run_replaces_an_earlier_one() -> None:
    assert [each.row.latency_s for each in told(Run(1), Run(2, latency_s=0.04, again=1))] == [0.04]


def test_the_median_of_many_runs_counts() -> None:
    runs = [Run(n, latency_s=0.02) for n in range(9)] + [Run(n, latency_s=0.09) for n in range(9, 12)]
    assert seconds(runs) == {("7g.80gb", 8): pytest.approx(0.02)}


@pytest.mark.parametrize("lie", [1e-9, 1e-3 / 16, 16.0, 1e6])
@pytest.mark.parametrize("cell", [8, 32])
def test_one_users_absurd_report_moves_nothing(lie: float, cell: int) -> None:
    """Among others who use the model, in a cell of theirs or in one of his own, however often he says it."""
    honest = [Run(n, user, latency_s=0.02) for n, user in enumerate(("ann", "bob", "cat"))]
    lies = [Run(100 + n, "eve", batch=cell, latency_s=0.02 * lie) for n in range(50)]
    heard = select_learnable(told(*honest, *lies), KNOWLEDGE)
    assert {each.user for each in heard.used} == {"ann", "bob", "cat"}
    (left_out,) = heard.left_out
    assert (left_out.user, left_out.count, left_out.figure) == ("eve", 50, "time")
    assert seconds([*honest, *lies]) == {("7g.80gb", 8): pytest.approx(0.02)}


def test_of_two_the_one_nearer_to_physics_is_heard() -> None:
    assert seconds([Run(1, "ann"), *(Run(n, "eve", latency_s=0.4) for n in range(2, 9))]) == {
        ("7g.80gb", 8): pytest.approx(0.02)
    }


def test_alone_one_is_heard_up_to_what_cannot_be() -> None:
    assert seconds([Run(1, latency_s=0.4)]) == {("7g.80gb", 8): pytest.approx(0.4)}
    heard = select_learnable(told(Run(1), Run(2, latency_s=0.009 * ABSURD * 3)), KNOWLEDGE)
    assert len(heard.used) == 1 and heard.left_out[0].why == "physics"


def test_users_who_agree_are_heard_against_physics() -> None:
    runs = [Run(n, user, latency_s=0.3 * (1 + 0.1 * n)) for n, user in enumerate(("ann", "bob", "cat"))]
    assert seconds(runs) == {("7g.80gb", 8): pytest.approx(0.33)}


def test_each_user_counts_once() -> None:
    runs = [Run(n, "ann", latency_s=0.03) for n in range(100)]
    runs += [Run(100, "bob", latency_s=0.02), Run(101, "cat", latency_s=0.021)]
    assert seconds(runs) == {("7g.80gb", 8): pytest.approx(0.021)}


@given(st.permutations(range(12)), st.integers(0, 2**31))
def test_the_order_in_which_runs_are_told_changes_nothing(order: list[int], seed: int) -> None:
    rng = random.Random(seed)
    runs = [
        Run(n, rng.choice("abc"), batch=rng.choice([1, 8]), latency_s=0.02 * rng.uniform(0.5, 2)) for n in range(12)
    ]
    assert seconds([runs[n] for n in order]) == seconds(runs)


def test_what_an_engine_took_is_no_memory_that_is_needed() -> None:
    """JAX holds three quarters of whatever slice it has; its speed is learned all the same."""
    row = only(Run(memory_mib=60_000.0, engine="jax")).row
    assert (row.memory_mib, row.latency_s) == (None, 0.02)
    assert told(Run(memory_mib=60_000.0, engine="jax", latency_s=None)) == []
    assert told(Run(profile="1g.10gb", memory_mib=9900.0, engine="jax", state="FAILED")) == []


def test_memory_that_was_enough_is_what_is_needed() -> None:
    """A framework that takes three quarters of any slice: the smallest slice on which it ran is nearest to the need."""
    runs = [Run(1, profile="7g.80gb", memory_mib=60_000.0), Run(2, profile="1g.10gb", memory_mib=7_500.0)]
    found = {row.profile: row.memory_mib for row in rows_of(told(*runs))}
    assert found == {"7g.80gb": None, "1g.10gb": pytest.approx(7_500.0)}


def test_a_run_that_failed_with_its_slice_full_says_that_it_needs_more() -> None:
    failed = Run(1, state="FAILED", profile="1g.10gb", memory_mib=9_800.0)
    (row,) = rows_of(told(failed))
    assert (row.memory_mib, row.ran) == (pytest.approx(9_800.0), False)
    more = [row.memory_mib for row in rows_of(told(failed, Run(2, profile="1g.20gb", memory_mib=15_000.0)))]
    assert more == [pytest.approx(15_000.0)]


def test_one_users_small_peak_is_not_what_the_others_need() -> None:
    """A job that did little under the name of a model, on a small slice, and those that use the model in earnest."""
    small = [Run(n, "eve", profile="1g.10gb", memory_mib=7_500.0) for n in range(20)]
    honest = [Run(20, "ann", profile="3g.40gb", memory_mib=30_000.0)]
    assert peaks(*small, *honest) == {"3g.40gb": pytest.approx(30_000.0)}
    honest.append(Run(21, "bob", profile="3g.40gb", memory_mib=28_000.0))
    assert peaks(*small, *honest) == {"3g.40gb": pytest.approx(28_000.0)}
    failed = Run(22, "cat", state="FAILED", profile="1g.10gb", memory_mib=9_800.0)
    assert peaks(*small, failed) == {"1g.10gb": pytest.approx(9_800.0)}


def peaks(*runs: Run) -> dict[str, float]:
    heard = select_learnable(told(*runs), KNOWLEDGE)
    return {row.profile: row.memory_mib for row in rows_of(heard.used) if row.memory_mib is not None}


def test_models_with_very_many_cells_are_learned_from_those_used_most() -> None:
    runs = [Run(n, batch=1 + n % 200) for n in range(300)]
    assert len(rows_of(told(*runs))) == MOST_CELLS


def test_after_a_few_runs_predictions_are_near_what_was_told() -> None:
    runs = [
        Run(n, user, profile=profile, batch=batch, latency_s=0.05 * math.sqrt(batch), memory_mib=3000.0 + 10 * batch)
        for n, (user, profile, batch) in enumerate(
            (user, profile, batch) for user in "ab" for profile in ("7g.80gb", "3g.40gb") for batch in (8, 32)
        )
    ]
    heard = select_learnable(told(*runs), KNOWLEDGE)
    rows = rows_of(heard.used)
    before, after = misses(Learned(), rows, KNOWLEDGE), misses(learn(rows, KNOWLEDGE), rows, KNOWLEDGE)
    assert after["time"].error < 0.25 * before["time"].error
    assert after["memory"].error < 0.1


def test_what_an_engine_fills_is_not_learned_as_need() -> None:
    """A serving engine takes its share of any slice; a model of batches takes what it needs."""
    assert told(Run(model="meta-llama/Llama-3.1-8B-Instruct", memory_mib=18_000.0)) == []
    assert told(Run(model="gpt2-xl", memory_mib=9_000.0)) == []
    assert only(Run(model="resnet50", unit="px", input=224)).row.model == "resnet50"
    assert only(Run(model="bert-large")).row.model == "bert-large"


def test_one_user_takes_the_place_of_others_only_up_to_his_part() -> None:
    """Whoever runs most of the newest jobs, or invents the most names, displaces nobody."""
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
