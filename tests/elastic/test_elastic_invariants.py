"""The invariants on every slice and through every interruption (see the package's docstring)."""

import itertools
import tempfile
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch import elastic
from slurm_migbatch.elastic import micro_batches
from slurm_migbatch.elastic.sampler import Sampler
from slurm_migbatch.elastic.slices import MIB, Slice, largest
from tests.support.examples import examples

QUICK = elastic.Care(every_s=1e9)


def trainer(directory="/nowhere", **values):
    return elastic.Trainer(directory, **{"environ": {}, "care": QUICK, **values})


def step_of(run, number):
    run.done = number
    return run._step()


batches = st.integers(1, 300)
mosts = st.integers(1, 400)
data_sets = st.one_of(st.none(), st.integers(1, 500))


# -- batch and gradient


@given(batches, data_sets, mosts, st.booleans(), st.integers(0, 2000))
def test_micro_batches_add_up_to_the_step(batch, items, most, pinned, number):
    if pinned:
        run = trainer(effective_batch=batch, items=items, fits=max(most, 1), micro=min(most, batch))
    else:
        run = trainer(effective_batch=batch, items=items, fits=most)
    step = step_of(run, number)
    parts = list(step)
    assert [index for part in parts for index in part.indices] == list(run.sampler.indices(number))
    assert all(1 <= len(part) <= most for part in parts)
    assert len(parts) == len(step)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert step.size == run.sampler.position_of(number).size
    if items is None:
        assert step.size == batch
    if not pinned:
        assert len(parts) == -(-step.size // most)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(batches, mosts, st.booleans(), st.data())
def test_weighted_micro_batch_means_equal_the_batch_mean(batch, most, pinned, data):
    """Also when the last micro-batch is short, where equal weights would be wrong."""
    values = data.draw(st.lists(st.floats(-1e3, 1e3), min_size=batch, max_size=batch))
    sizes = micro_batches.fixed(batch, most) if pinned else micro_batches.even(batch, most)
    step = elastic.Step(0, 0, 0, 0, range(batch), sizes)
    found = sum(part.weight * (sum(values[i] for i in part.indices) / len(part)) for part in step)
    assert found == pytest.approx(sum(values) / batch, abs=1e-9 * 1e3)
    assert sum(part.weight for part in step) == pytest.approx(1.0)
    assert [part.weight * step.size for part in step] == pytest.approx([len(part) for part in step])


def test_equal_weights_give_a_wrong_mean_for_uneven_micro_batches():
    step = elastic.Step(0, 0, 0, 0, range(5), micro_batches.fixed(5, 4))
    values = [0.0, 0.0, 0.0, 0.0, 10.0]
    means = [sum(values[i] for i in part.indices) / len(part) for part in step]
    assert sum(part.weight * mean for part, mean in zip(step, means, strict=True)) == 2.0
    assert sum(means) / 2 == 5.0


# -- order


@given(st.integers(1, 400), st.integers(1, 90), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_every_item_is_used_once_per_epoch(items, batch, seed, epoch, shuffle):
    sampler = Sampler(items, batch, seed=seed, shuffle=shuffle)
    many = sampler.steps_per_epoch
    taken = [sampler.indices(step) for step in range(epoch * many, (epoch + 1) * many)]
    assert sorted(itertools.chain(*taken)) == list(range(items))
    assert [len(part) for part in taken[:-1]] == [batch] * (many - 1)
    assert {sampler.position_of(step).epoch for step in range(epoch * many, (epoch + 1) * many)} == {epoch}


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 3), st.permutations(range(12)))
def test_items_of_a_step_depend_only_on_its_number(items, batch, seed, asked):
    """Whatever was requested before, from whichever object."""
    sampler = Sampler(items, batch, seed=seed)
    straight = [list(sampler.indices(step)) for step in range(12)]
    other = Sampler(items, batch, seed=seed)
    assert {step: list(other.indices(step)) for step in asked} == dict(enumerate(straight))
    assert [sampler.draw(step) for step in asked] == [other.draw(step) for step in asked]


def test_order_differs_between_epochs_and_seeds():
    sampler = Sampler(1000, 1000, seed=1)
    assert list(sampler.indices(0)) != list(sampler.indices(1))
    assert list(sampler.indices(0)) != list(Sampler(1000, 1000, seed=2).indices(0))
    assert sampler.draw(0) != sampler.draw(1) != Sampler(1000, 1000, seed=2).draw(1)


def test_order_is_the_same_in_every_release():
    """Training that began with another release continues with the same data."""
    assert list(Sampler(10, 10, seed=5).indices(3)) == [8, 3, 9, 1, 5, 6, 2, 0, 4, 7]
    assert Sampler(10, 10, seed=5).draw(3) == 1010823500719264698


@given(st.integers(1, 300), st.integers(1, 300))
def test_drop_last_leaves_only_full_batches(items, batch):
    if items < batch:
        with pytest.raises(elastic.ElasticError, match="never fill"):
            Sampler(items, batch, drop_last=True)
        return
    sampler = Sampler(items, batch, drop_last=True)
    assert {sampler.position_of(step).size for step in range(3 * sampler.steps_per_epoch)} == {batch}


# -- a whole training, exactly


class Interrupted(Exception):
    """The end of a run at the beginning of a step."""


def live(directory, ends, *, batch, items, total):
    """Train through interruptions: `ends` are (steps until the end, largest micro-batch, whether it can save)."""
    prime = 2**61 - 1
    seen = []
    for length, most, saves in [*ends, (total + 1, batch, True)]:
        run = trainer(directory, effective_batch=batch, items=items, fits=most, seed=3)
        with suppress(Interrupted), run:
            model = run.restore() or {"weight": 1, "steps": 0}
            assert model["steps"] == run.done
            left = length
            for step in run.steps(total, save=lambda model=model: dict(model)):
                if not left:
                    if saves:
                        run._checkpoint(lambda model=model: dict(model))
                    raise Interrupted
                added = sum(sum(pow(i + 2, model["weight"] % 7 + 1, prime) for i in part.indices) for part in step)
                model["weight"] = (model["weight"] * 31 + added * (step.number + 1) + step.seed) % prime
                model["steps"] += 1
                seen.append(step.number)
                left -= 1
    assert run.done == total
    return model, seen


@settings(max_examples=examples(60))
@given(
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 120)),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 50), st.booleans()), max_size=5),
)
def test_interrupted_and_resized_training_ends_in_the_same_state(batch, items, total, ends):
    """Exactly equal, in arithmetic that does not round; and only unsaved steps are repeated."""
    with tempfile.TemporaryDirectory() as straight_directory, tempfile.TemporaryDirectory() as resumed_directory:
        expected, straight = live(straight_directory, [], batch=batch, items=items, total=total)
        found, seen = live(resumed_directory, ends, batch=batch, items=items, total=total)
    assert straight == list(range(total))
    assert found == expected
    assert sorted(set(seen)) == list(range(total))
    if all(saves for _, _, saves in ends):
        assert seen == list(range(total))


# -- the slice


@given(st.floats(1e3, 1e9), st.floats(0, 2e10), st.floats(0, 0.9), st.integers(1, 200_000), st.integers(1, 5000))
def test_micro_batch_is_the_largest_that_fits_in_memory(per_item, besides, headroom, mib, batch):
    memory = elastic.Memory(per_item, besides, headroom)
    mig_slice = Slice("1g.10gb", mib)
    usable = mib * MIB * (1 - headroom)
    if besides + per_item > usable * (1 + 1e-9):
        with pytest.raises(elastic.ElasticError, match=r"not even one item fits on slice 1g.10gb"):
            largest(memory, mig_slice, batch)
    elif besides + per_item < usable * (1 - 1e-9):
        most = largest(memory, mig_slice, batch)
        assert 1 <= most <= batch
        assert besides + most * per_item <= usable * (1 + 1e-9)
        assert most == batch or besides + (most + 1) * per_item >= usable * (1 - 1e-9)


def test_slice_is_read_from_the_task_prolog_variables():
    variables = {"MIGBATCH_PROFILE": "1g.10gb+me,1g.10gb", "MIGBATCH_MEMORY_MIB": "9856", "MIGBATCH_BATCH": "64"}
    assert Slice.of(variables) == ("1g.10gb.me", 9856)
    assert Slice.of({}) == ("", None)


def test_micro_batch_is_read_from_a_table_by_profile():
    table = {"1g.10gb": 8, "3g.40gb": 32}
    assert largest(table, Slice("3g.40gb", 40192), 256) == 32
    assert largest(table, Slice("3g.40gb", 40192), 20) == 20
    assert largest(table, Slice(), 256) == 256
    with pytest.raises(elastic.ElasticError, match=r"no entry for 2g.20gb, only for 1g.10gb, 3g.40gb"):
        largest(table, Slice("2g.20gb", 20096), 256)


def test_micro_batch_is_computed_by_a_function_of_the_slice():
    assert largest(lambda mig_slice: mig_slice.memory_mib // 100, Slice("1g.10gb", 1000), 256) == 10
    assert largest(None, Slice("1g.10gb", 1000), 256) == 256


def test_fixed_micro_batch_must_fit():
    with pytest.raises(elastic.ElasticError, match="micro-batches of 16 items do not fit"):
        trainer(effective_batch=64, items=100, fits=8, micro=16)


@pytest.mark.parametrize(
    "wrong",
    [{"effective_batch": 0}, {"effective_batch": 4, "items": 0}, {"effective_batch": 4, "fits": 0},
     {"effective_batch": 4, "care": elastic.Care(keep=0)}],
)  # fmt: skip
def test_invalid_batch_settings_are_refused(wrong):
    with pytest.raises(elastic.ElasticError):
        trainer(**wrong)
