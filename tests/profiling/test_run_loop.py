"""The loop over the points, with measuring replaced by a model of a device's memory."""

from dataclasses import replace

import pytest

from slurm_migbatch.profiling.cells import MeasurementCell, product
from slurm_migbatch.profiling.device import Device
from slurm_migbatch.profiling.measure import DidNotFit, PointFailed, Ran
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.runner import ProfiledModel, first, run
from slurm_migbatch.profiling.table import read_folder, save
from slurm_migbatch.profiling.timing import Summary

SLICE = Device("NVIDIA H100 80GB HBM3", "MIG-1", "2g.20gb", 2, 2, 32, 20096, "560.35")
SUBJECT = ProfiledModel(SLICE, "bert-large", "encoder", source="test")


class Bench:
    """Something to measure: fits up to `room` items times processes; `breaks_at` is a batch that fails otherwise."""

    def __init__(self, memory=10**9, breaks_at=None):
        self.memory, self.breaks_at, self.tried = memory, breaks_at, []

    def __call__(self, cell):
        self.tried.append(cell)
        if cell.batch == self.breaks_at:
            raise PointFailed(f"{cell}: broken")
        if cell.batch * (cell.input_size or 1) * cell.procs > self.memory:
            return DidNotFit("out of memory")
        mean = 0.01 + 0.001 * cell.batch
        return Ran(
            cell.procs * cell.batch / mean, Summary(20, mean, mean, None), 100.0 * cell.batch, 3e8, None, "torch"
        )


class Saved(list):
    """The rows of each save."""

    def __call__(self, rows):
        self.append(list(rows))


def go(cells, bench, rule=first, earlier=(), saved=None, most=None):
    return run(SUBJECT, cells, rule, bench, earlier, Saved() if saved is None else saved, lambda *_: None, most)


def test_the_grid_is_measured_in_ascending_order_and_saved_after_each_point():
    cells, bench, saved = product([1, 2, 4], [None], [1, 2]), Bench(), Saved()
    found = go(cells, bench, saved=saved)
    assert bench.tried == list(cells)
    assert [len(rows) for rows in saved] == [1, 2, 3, 4, 5, 6]
    assert saved[-1] == found.rows and found.unfit == ()


def test_rows_hold_the_facts_of_the_device_and_the_point():
    found = go([MeasurementCell(4, 128, 2)], Bench())
    (row,) = found.rows
    assert row == Measurement(
        gpu="NVIDIA H100 80GB HBM3",
        model="bert-large",
        family="encoder",
        profile="2g.20gb",
        compute_slices=2,
        memory_slices=2,
        sm_count=32,
        batch=4,
        input_size=128,
        procs=2,
        throughput_per_s=571.429,
        latency_s=0.014,
        memory_mib=400.0,
        params=3e8,
        source="test torch driver 560.35",
    )


def test_nothing_larger_is_tried_after_running_out_of_memory():
    cells, bench = product([1, 2, 4, 8, 16], [10, 20], [1]), Bench(memory=45)
    found = go(cells, bench)
    assert [(c.batch, c.input_size) for c in bench.tried] == [
        (1, 10),
        (2, 10),
        (4, 10),
        (8, 10),
        (1, 20),
        (2, 20),
        (4, 20),
    ]
    unfit = [row for row in found.rows if not row.ran]
    assert [(row.batch, row.input_size) for row in unfit] == [(8, 10), (4, 20)]
    assert all(row.latency_s is row.throughput_per_s is row.memory_mib is None for row in unfit)
    assert {(c.batch, c.input_size) for c in found.unfit} == {(16, 10), (8, 20), (16, 20)}


def test_other_failure_ends_the_run_and_keeps_the_saved_rows():
    saved = Saved()
    with pytest.raises(PointFailed, match="broken"):
        go(product([1, 2, 4], [None], [1]), Bench(breaks_at=4), saved=saved)
    assert [row.batch for row in saved[-1]] == [1, 2]


def test_resumed_run_continues_where_the_last_one_stopped():
    cells = product([1, 2, 4, 8], [None], [1])
    begun = go(cells, Bench(memory=4), most=2)
    bench, saved = Bench(memory=4), Saved()
    second = go(cells, bench, earlier=begun.rows, saved=saved)
    assert [cell.batch for cell in bench.tried] == [4, 8]
    assert [row.batch for row in saved[-1]] == [1, 2, 4, 8]
    assert set(second.outcomes) == {MeasurementCell(4), MeasurementCell(8)}
    third = Bench()
    go(product([8, 16], [None], [1]), third, earlier=second.rows)
    assert third.tried == []  # 8 was seen not to fit, so 16 does not either


@pytest.mark.parametrize("other", [{"model": "vit"}, {"profile": "1g.10gb"}, {"kind": "train"}, {"gpu": "cpu"}])
def test_rows_of_other_models_and_devices_are_kept_and_do_not_count(other):
    foreign = replace(go([MeasurementCell(1)], Bench()).rows[0], **other)
    bench, saved = Bench(), Saved()
    found = go([MeasurementCell(1)], bench, earlier=[foreign], saved=saved)
    assert bench.tried == [MeasurementCell(1)]
    assert saved[-1] == [foreign, *found.rows]


def test_rule_chooses_the_points_and_when_to_stop():
    def outermost(done, remaining):
        return None if len(done) == 3 else max(remaining, key=lambda cell: cell.batch)

    bench = Bench(memory=8)
    found = go(product([1, 2, 4, 8, 16], [None], [1]), bench, outermost)
    assert [cell.batch for cell in bench.tried] == [16, 8, 4]
    assert found.unfit == ()  # 1 and 2 were not ruled out, only not chosen


def test_rule_receives_rows_of_the_same_model_on_other_slices():
    other = replace(go([MeasurementCell(1)], Bench()).rows[0], profile="1g.10gb")
    received = []

    def listen(done, remaining):
        received.append([(row.profile, row.batch) for row in done])
        return remaining[0]

    go([MeasurementCell(1), MeasurementCell(2)], Bench(), listen, earlier=[other, replace(other, model="vit")])
    assert received == [[("1g.10gb", 1)], [("1g.10gb", 1), ("2g.20gb", 1)]]


def test_user_supplied_facts_override_those_of_the_program():
    subject = replace(SUBJECT, params=1e6, flops_per_item=2e9)
    row = subject.row(MeasurementCell(1), Bench()(MeasurementCell(1)))
    assert (row.params, row.flops_per_item) == (1e6, 2e9)


def test_a_saved_table_reads_back(tmp_path):
    rows = go(product([1, 2, 4, 8], [16], [1]), Bench(memory=64)).rows
    save(tmp_path / "t.csv", rows)
    save(tmp_path / "t.csv", rows)
    assert read_folder(tmp_path / "t.csv") == rows
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]


def test_failed_write_leaves_the_old_table(tmp_path):
    rows = go([MeasurementCell(1)], Bench()).rows
    save(tmp_path / "t.csv", rows)
    with pytest.raises(AttributeError):
        save(tmp_path / "t.csv", [*rows, None])
    assert read_folder(tmp_path / "t.csv") == rows
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]
