"""The agent's watcher of running jobs: memory in use, progress reports, energy and activity."""

import errno
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurm_migbatch.mig.driver import DriverError, DriverMissing, NotMig
from slurm_migbatch.mig.nvml.gpm import LEAST_S
from slurm_migbatch.mig.nvml.gpu import NvmlGpu
from slurm_migbatch.node import peaks, progress, step_slices, tmpfs
from slurm_migbatch.node.inotify import MOST_READS, WriteWatch
from slurm_migbatch.node.peaks import RunPeak
from slurm_migbatch.node.watch import BURST, BURST_REFILL_S, READ_EVERY_S, Watcher
from slurm_migbatch.testbed.proc import wait_until
from tests.support.node_processes import agent_process, run_hook, watching
from tests.support.nodes import ALICE
from tests.support.progress_files import path, write

PID = 2**22 + 7
"""Above any pid: the simulated driver keeps such a process until it is ended."""


class WatchRounds:
    """A watcher whose rounds a test runs itself, each `seconds` after the previous one."""

    def __init__(self, node):
        self.node = node
        self.watcher = Watcher(node.config, node.executor.gpus)
        self.now = 1e9

    def __call__(self, seconds=15.0):
        self.now += seconds
        self.watcher.run_round(self.node.journal, self.node.executor.paths, self.now)


@pytest.fixture
def watch(node):
    return WatchRounds(node)


def memory(node, job, mib, pid=PID):
    for row in node.slices("held"):
        if row.job == job:
            node.machine.start_process(row.mig_uuid, pid, memory_mib=mib)


def stops(node):
    return {(event["job"], event["restart"]): event["memory_mib"] for event in node.events("stop")}


def test_stop_event_has_the_peak_memory_of_the_run(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    for mib in (300, 5000, 800):
        memory(node, 1, mib)
        watch()
        node.machine.end_process(PID)
    node.epilog(1)
    assert stops(node) == {(1, 0): 5000}


def test_peak_memory_of_a_warm_slice_starts_from_zero(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 5000)
    watch()
    node.machine.end_process(PID)
    node.epilog(1)
    node.prolog(2, "[mig:1g.10gb:1]")
    assert node.events("start")[-1]["warm"]
    memory(node, 2, 700)
    watch()
    node.machine.end_process(PID)
    node.epilog(2)
    assert stops(node) == {(1, 0): 5000, (2, 0): 700}


def test_peak_memory_of_several_slices_is_that_of_the_fullest(node, watch):
    node.prolog(1, "[mig:1g.10gb:2]")
    for number, row in enumerate(node.slices("held")):
        node.machine.start_process(row.mig_uuid, PID + number, memory_mib=1000 + number)
    watch()
    for number in range(2):
        node.machine.end_process(PID + number)
    node.epilog(1)
    assert stops(node) == {(1, 0): 1001}


def test_job_that_never_used_its_slice_has_no_peak_memory(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    watch()
    node.epilog(1)
    assert stops(node) == {(1, 0): None}


def test_run_sampled_for_less_than_half_its_time_has_no_peak_memory():
    peak = RunPeak(0.0, {}).with_sample({"MIG-a": 300}, 15.0)
    assert peak.maximum_mib(30.0) == 300
    assert peak.maximum_mib(31.0) is None
    assert RunPeak(900.0, {}).maximum_mib(10.0) is None


def test_epilog_without_the_agent_reports_the_peak_memory_it_sampled(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 4000)
    watch()
    node.machine.end_process(PID)
    node.forget_executor()
    node.epilog(1)
    assert stops(node) == {(1, 0): 4000}
    status = os.stat(node.root / "run" / "peaks")
    assert (status.st_uid, status.st_mode & 0o777) == (0, 0o600)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "runs": {"x": 1}}', "\xff" * 9])
def test_damaged_peaks_file_is_ignored(node, text):
    (node.root / "run").mkdir(exist_ok=True)
    node.prolog(1, "[mig:1g.10gb:1]")
    (node.root / "run" / "peaks").write_text(text)
    assert peaks.load(node.executor.paths.run) == {}
    node.epilog(1)
    assert stops(node) == {(1, 0): None}


def test_full_run_directory_loses_no_peaks_and_no_progress_reports(node, watch, caplog, monkeypatch):
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 4000)
    write(node, "items=5 seconds=1\n")

    def full(*_names):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("slurm_migbatch.node.paths.fresh", full)
        watch()
        watch()
    assert [event["items"] for event in node.events("progress")] == [5]
    assert len([r for r in caplog.records if "cannot be stored" in r.getMessage()]) == 1
    assert not (node.root / "run" / ".peaks").exists()
    node.machine.end_process(PID)
    watch()
    node.epilog(1)
    assert stops(node) == {(1, 0): 4000}


def test_no_driver_calls_are_made_when_no_job_runs(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    node.epilog(1)
    watch()
    node.machine.calls(reset=True)
    watch()
    assert not node.machine.calls()


def test_round_makes_few_driver_calls_for_each_slice(new_node, monkeypatch):
    monkeypatch.setattr("slurm_migbatch.mig.nvml.gpm.LEAST_S", 0.0)  # every round measures, even on a fast machine
    node = new_node(gpus=("h100-80gb",) * 2)
    for job in range(1, 15):
        node.prolog(job, "[mig:1g.10gb:1]")
        memory(node, job, 100, PID + job)
    watch = WatchRounds(node)
    watch()
    node.machine.calls(reset=True)
    watch()
    assert sum(node.machine.calls().values()) <= 9 * 14


def test_failing_driver_does_not_stop_progress_reports(node, watch, caplog):
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 5000)
    write(node, "items=5 seconds=1\n")
    node.machine.fail("nvmlDeviceGetMemoryInfo", times=2)
    watch()
    watch()
    assert len([r for r in caplog.records if "memory in use" in r.getMessage()]) == 1
    assert [event["items"] for event in node.events("progress")] == [5]
    watch()
    assert peaks.load(node.executor.paths.run)[1, 0].mib


def test_progress_events_are_rate_limited_except_when_done(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    watch()
    write(node, "items=10 seconds=1\n")
    watch()
    watch()
    write(node, "items=20 seconds=2\n")
    watch()
    assert [event["items"] for event in node.events("progress")] == [10]
    watch(node.config.progress_every)
    write(node, "items=30 seconds=3 done=1\n")
    watch()
    assert [(event["items"], event["final"]) for event in node.events("progress")] == [
        (10, False), (20, False), (30, False),
    ]  # fmt: skip


def test_checkpoint_is_reported_at_once(node, watch):
    """A reclaim of the slice waits for the checkpoint; other reports are less urgent."""
    start = node.prolog(1, "[mig:1g.10gb:1]") and node.slices("held")[0].since
    write(node, "steps=10 restored=10\n")
    watch()
    write(node, f"items=20 seconds=2 steps=20 checkpoint={start + 1} ckpt_s=0.5\n")
    watch(1.0)
    write(node, "items=30 seconds=3 steps=30\n")
    watch(1.0)
    write(node, f"items=40 seconds=4 steps=40 checkpoint={start + 2}\n")
    watch(1.0)
    reported = [(e.get("steps"), e.get("checkpoint"), e.get("restored")) for e in node.events("progress")]
    assert reported == [(10, None, 10), (20, start + 1, 10), (40, start + 2, 10)]
    assert {event.get("ckpt_s") for event in node.events("progress")} == {None, 0.5}


def test_frequent_checkpoint_reports_are_rate_limited(node, watch):
    start = node.prolog(1, "[mig:1g.10gb:1]") and node.slices("held")[0].since
    for number in range(200):
        write(node, f"steps={number} checkpoint={start + number / 1000}\n")
        watch(1.0)
    assert BURST < len(node.events("progress")) <= BURST + 200 / BURST_REFILL_S + 200 / node.config.progress_every + 1
    watch(BURST_REFILL_S)
    write(node, f"steps=200 checkpoint={start + 0.9}\n")
    watch(1.0)
    assert node.events("progress")[-1]["steps"] == 200


@pytest.fixture
def steps(node):
    """The path of the file of a job's steps, and a process that is their task."""
    node.prolog(1, "[mig:1g.10gb:2]")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as task:
        yield f"{path(node)}{step_slices.SUFFIX}", str(task.pid)
        task.communicate()


SLICES = [["MIG-0", "1g.10gb", "9728", "GPU-0"], ["MIG-1", "1g.10gb", "9728", "GPU-0"]]


def fill(steps, text):
    """Append a text to the file of steps; it is append-only."""
    with open(steps[0], "a") as shared:
        shared.write(text)


def chosen(steps, step):
    """Return the slice of a step that requests one."""
    file, task = steps
    return step_slices.of_step(file, step, task, SLICES, lambda: [("", 1)])[0][0]


def test_steps_of_a_job_have_different_slices_after_any_number_of_steps(watch, steps):
    """As in an array of programs that a job script starts, `srun --exact -n1 --gres=mig:1 ... &` for each."""
    file = Path(steps[0])
    assert [chosen(steps, 0), chosen(steps, 1)] == ["MIG-0", "MIG-1"]
    rows, ended = file.read_text(), "".join(f"{step} {PID} 1 0\n" for step in range(65))
    for _ in range(3):
        while os.stat(file).st_size < 0.9 * step_slices.MAX_BYTES:
            fill(steps, f"\n{rows}{ended}")
        watch()
        assert os.stat(file).st_size < 0.1 * step_slices.MAX_BYTES
        assert os.stat(file).st_blocks * 512 == step_slices.MAX_BYTES, "its space is reserved"
        with pytest.raises(PermissionError):
            os.truncate(file, 0)
    assert chosen(steps, 0) == "MIG-0", "its lines remain, so that it does not ask again"
    step_slices.of_step(str(file), 0, str(PID), SLICES, lambda: pytest.fail("the step is not known"))


def test_file_of_steps_remains_while_a_task_reads_it(watch, steps):
    file = Path(steps[0])
    fill(steps, "\n" * (step_slices.MAX_BYTES - 4096))
    code = "import os, sys; f = open(sys.argv[1], 'a'); f.seek(0); os.lockf(f.fileno(), os.F_LOCK, 1)"
    line = [sys.executable, "-c", f"{code}; print(flush=True); input()", str(file)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        watch()
        assert file.stat().st_size == step_slices.MAX_BYTES - 4096
        holder.communicate(b"\n")
    watch()
    assert file.stat().st_size == 0


@pytest.mark.parametrize("text", ["a" * (step_slices.MAX_BYTES - 1), "1 2 3 4\n" * (step_slices.MAX_BYTES // 8)])
def test_file_of_steps_with_anything_else_in_it_is_emptied(watch, steps, text):
    fill(steps, text)
    watch()
    assert Path(steps[0]).stat().st_size == 0
    assert [chosen(steps, 0), chosen(steps, 1)] == ["MIG-0", "MIG-1"]


def test_read_written_reads_only_the_runs_that_wrote(node, watch):
    for job in (1, 2):
        node.prolog(job, "[mig:1g.10gb:1]")
        write(node, f"items={job} seconds=1\n", job)

    def glance(written):
        watch.now += 1
        watch.watcher.read_written(node.journal, node.executor.paths, written, watch.now)
        return [event["job"] for event in node.events("progress")]

    node.machine.calls(reset=True)
    assert glance(set()) == []
    assert glance({(2, 0), (3, 0), (2, 7)}) == [2]
    assert glance(None) == [2, 1]
    assert not node.machine.calls()


def test_large_progress_file_is_emptied_and_its_report_kept(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    write(node, "items=5 seconds=1\n" * 10000)
    assert path(node).stat().st_size > progress.MAX_BYTES
    watch()
    assert path(node).stat().st_size == 0
    assert [event["items"] for event in node.events("progress")] == [5]
    node.epilog(1)
    assert len(node.events("progress")) == 1


def test_watcher_reports_nothing_of_a_run_that_is_being_released(node, watch, monkeypatch):
    """The Epilog begins after the watcher has read the journal: the Epilog's report must remain the last."""
    node.prolog(1, "[mig:1g.10gb:1]")
    write(node, "items=5 seconds=1\n")
    read = progress.read

    def slow(*arguments):
        monkeypatch.setattr(progress, "read", read)
        found = read(*arguments)
        write(node, "items=6 seconds=1\n")
        node.epilog(1)
        return found

    monkeypatch.setattr(progress, "read", slow)
    watch()
    assert [(event["items"], event["final"]) for event in node.events("progress")] == [(6, True)]


def test_problem_with_a_users_progress_file_is_logged_once(node, watch, caplog):
    node.prolog(1, "[mig:1g.10gb:1]")
    with open(path(node), "rb") as file:
        tmpfs.set_append_only(file.fileno(), False)
    os.link(path(node), path(node).with_name("second name"))
    watch()
    watch()
    assert len([r for r in caplog.records if "is not the one created" in r.getMessage()]) == 1


def test_agent_reports_progress_and_peak_memory(new_node):
    node = new_node(SampleEvery=0.05, ProgressEvery=0.05)
    with agent_process(node) as agent:
        assert run_hook(node, "prolog", 1, "[mig:2g.20gb:1]", uid=ALICE)[0] == 0
        memory(node, 1, 6000)
        write(node, "items=5 seconds=1\n")
        wait_until(lambda: node.events("progress"), 60.0, "the first report")
        wait_until(lambda: peaks.load(node.executor.paths.run), 60.0, "the first sample")
        node.machine.end_process(PID)
        write(node, "items=9 seconds=2\n")
        assert run_hook(node, "epilog", 1)[0] == 0
        agent.stop()
    assert [event["items"] for event in node.events("progress")][-1] == 9
    assert stops(node)[1, 0] in (6000, None)  # None if this machine was too busy to sample half of the time


def test_inotify_reports_which_runs_wrote(tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    notice = WriteWatch(handle)
    wake, woken = os.pipe()
    try:
        assert not notice.wait(0.0, wake)
        for name in ("17.0", "18.3", "notes", "17.0x"):
            (tmp_path / name).write_text("items=1\n")
        assert notice.wait(60.0, wake)
        assert notice.written() == {(17, 0), (18, 3)}
        assert notice.written() == set()
        (tmp_path / "17.0").unlink()
        assert not notice.wait(0.0, wake)
        with open(tmp_path / "1.0", "a") as first, open(tmp_path / "2.0", "a") as second:
            for _ in range(int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())):
                for file in (first, second):  # alternately, or the kernel merges the events
                    file.write("x")
                    file.flush()
        assert notice.written() is None  # more events than the kernel queues
        os.write(woken, b"x")
        assert not notice.wait(60.0, wake)
    finally:
        notice.close()
        for number in (handle, wake, woken):
            os.close(number)


def test_inotify_is_not_read_for_as_long_as_a_job_writes(tmp_path, monkeypatch):
    """Several writers add events faster than they are read; all other jobs would wait."""
    event = struct.pack("iIII16s", 1, 2, 0, 16, b"17.0")
    reads = []
    handle = os.open(tmp_path, os.O_RDONLY)
    watch = WriteWatch(handle)
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda number, size: reads.append(number) or event * (size // len(event)))
        assert watch.written() is None  # the files of all jobs are read
    assert len(reads) == MOST_READS
    watch.close()
    os.close(handle)


def test_agent_notices_a_checkpoint_long_before_its_next_round(new_node):
    node = new_node(SampleEvery=600, ProgressEvery=600)
    with agent_process(node) as agent:
        assert run_hook(node, "prolog", 1, "[mig:2g.20gb:1]", uid=ALICE)[0] == 0
        # the agent may not be listening yet
        wait_until(lambda: write(node, "steps=1\n") or node.events("progress"), 60.0, "the first report")
        write(node, f"steps=2 checkpoint={time.time():.3f}\n")
        wait_until(lambda: len(node.events("progress")) > 1, 60.0, "the checkpoint")
        agent.stop()
    assert [event["steps"] for event in node.events("progress")] == [1, 2]


def looking(node, monkeypatch, work):
    """Return the names of the methods that the watcher's thread called during `work`."""
    calls = []
    for name in ("run_round", "read_written"):
        before = getattr(Watcher, name)
        monkeypatch.setattr(Watcher, name, lambda *a, n=name, b=before: (b(*a), calls.append(n))[0])
    with watching(node):
        wait_until(lambda: write(node, "steps=1\n") or calls, 60.0, "the first word")
        work(calls)
    return calls


@pytest.mark.slow
def test_watcher_does_nothing_while_no_job_reports(new_node, monkeypatch):
    node = new_node(SampleEvery=600)
    node.prolog(1, "[mig:1g.10gb:1]")

    def work(calls):
        def quiet():  # False while the last write is still being read
            calls.clear()
            path(node).read_text()
            time.sleep(2 * READ_EVERY_S)
            return not calls

        wait_until(quiet, 60.0, "a time without a look")

    assert looking(node, monkeypatch, work) == []


def test_watcher_polls_when_inotify_is_unavailable(new_node, monkeypatch, caplog):
    def none(*_):
        raise OSError(24, "inotify_init1: Too many open files")

    monkeypatch.setattr("slurm_migbatch.node.watch.WriteWatch", none)
    node = new_node(SampleEvery=0.05, ProgressEvery=0)
    node.prolog(1, "[mig:1g.10gb:1]")

    def work(calls):
        write(node, "steps=5\n")
        wait_until(lambda: node.events("progress")[-1:] and node.events("progress")[-1]["steps"] == 5, 60.0, "it")

    assert set(looking(node, monkeypatch, work)) == {"run_round"}
    assert "only every 0.05 s: " in caplog.text


def test_unexpected_error_does_not_end_the_watcher(new_node, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("flags")

    monkeypatch.setattr("slurm_migbatch.node.open_devices.OpenDeviceScan.scan", broken)
    node = new_node(SampleEvery=0.05, ProgressEvery=0)
    node.prolog(1, "[mig:1g.10gb:1]")

    def work(calls):
        write(node, "steps=5\n")
        wait_until(lambda: node.events("progress")[-1:] and node.events("progress")[-1]["steps"] == 5, 60.0, "it")

    looking(node, monkeypatch, work)
    assert "running jobs cannot be looked at: KeyError('flags')" in caplog.text


def test_watcher_is_off_when_sample_every_is_zero(new_node):
    node = new_node(SampleEvery=0)
    assert Watcher(node.config, node.executor.gpus).thread(threading.Event(), -1) is None


# -- energy ------------------------------------------------------------------------------------------------------------


def test_energy_is_reported_only_for_whole_gpus(new_node, monkeypatch):
    node = new_node(gpus=("h100-80gb",) * 3)
    node.prolog(1, "[mig:7g.80gb:1]")
    node.prolog(2, "[mig:3g.40gb:1]")
    node.prolog(3, "[mig:4g.40gb:1]")
    watch = WatchRounds(node)
    monkeypatch.setattr(NvmlGpu, "energy_j", lambda _gpu: 350.0 * watch.now)
    for _ in range(3):
        watch()
    found = peaks.load(node.executor.paths.run)
    assert {run: peak.energy for run, peak in found.items()} == {(1, 0): (30.0, 10500.0), (2, 0): (), (3, 0): ()}
    for job in (1, 2, 3):
        node.epilog(job)
    energies = {event["job"]: event.get("energy_j") for event in node.events("stop")}
    assert isinstance(energies[1], int)
    assert (energies[2], energies[3]) == (None, None)


def test_energy_sums_all_gpus_of_a_run_and_excludes_earlier_runs(new_node, monkeypatch):
    node = new_node(gpus=("h100-80gb",) * 2)
    watch = WatchRounds(node)
    monkeypatch.setattr(NvmlGpu, "energy_j", lambda gpu: (100.0 + 100.0 * gpu.index) * watch.now)
    for job in (1, 2):
        node.prolog(job, "[mig:7g.80gb:2]")
        watch()
        watch(20.0)
        assert peaks.load(node.executor.paths.run)[job, 0].energy == (40.0, 6000.0)
        node.epilog(job)


def test_energy_counter_that_restarts_is_skipped(new_node, monkeypatch):
    node = new_node(gpus=("h100-80gb",))
    node.prolog(1, "[mig:7g.80gb:1]")
    watch, counted = WatchRounds(node), iter([9000.0, 9500.0, 10.0, 310.0])
    monkeypatch.setattr(NvmlGpu, "energy_j", lambda _gpu: next(counted))
    for _ in range(4):
        watch()
    assert peaks.load(node.executor.paths.run)[1, 0].energy == (30.0, 800.0)


@pytest.mark.parametrize(("kind", "asked"), [(NotMig, 1), (DriverMissing, 1), (DriverError, 3)])
def test_gpu_without_an_energy_counter_is_not_asked_again(new_node, monkeypatch, kind, asked):
    def refuse(gpu):
        calls.append(gpu.uuid)
        raise kind(3, "its energy: no")

    node, calls = new_node(gpus=("h100-80gb",)), []
    node.prolog(1, "[mig:7g.80gb:1]")
    monkeypatch.setattr(NvmlGpu, "energy_j", refuse)
    watch = WatchRounds(node)
    for _ in range(3):
        watch()
    node.epilog(1)
    assert len(calls) == asked
    assert "energy_j" not in node.events("stop")[-1]


def test_driver_energy_counter_does_not_decrease(new_node):
    node = new_node(gpus=("h100-80gb",))
    (gpu,) = node.executor.gpus.listed()
    before = gpu.energy_j()
    assert 0 < before <= gpu.energy_j()


def test_energy_of_a_run_is_extrapolated_from_mean_power():
    peak = RunPeak(0.0, {}).with_energy(10.0, 3000.0).with_energy(10.0, 4000.0)
    assert peak.energy_j(40.0) == 14000.0
    assert peak.energy_j(41.0) is None
    assert RunPeak(90.0, {}).energy_j(1.0) is None


# -- activity of slices ------------------------------------------------------------------------------------------------


def apart():
    """Wait: NVML requires samples to be a tenth of a second apart."""
    time.sleep(LEAST_S + 0.02)


def activities(node):
    return {event["job"]: event.get("activity") for event in node.events("stop")}


def test_stop_event_has_the_activity_of_the_slice(node, watch):
    """Each run has its own figures; activity before the slice was held, or on other slices, does not count."""
    for job, profile in ((1, "1g.10gb"), (2, "3g.40gb")):
        node.prolog(job, f"[mig:{profile}:1]")
        memory(node, job, 1000, PID + job)
    of = {row.job: row.mig_uuid for row in node.slices("held")}
    node.machine.set_load(of[1], sm=80, tensor=30, dram=60)
    node.machine.set_load(of[2], sm=10, dram=5)
    for _ in range(3):
        watch()
        apart()
    for job in (1, 2):
        node.epilog(job)
        node.machine.end_process(PID + job)
    by_job = activities(node)
    assert by_job[1]["seconds"] > 2 * LEAST_S
    assert [by_job[1][name] for name in ("sm", "tensor", "dram")] == pytest.approx([0.8, 0.3, 0.6], abs=0.02)
    assert [by_job[2][name] for name in ("sm", "tensor", "dram")] == pytest.approx([0.1, 0.0, 0.05], abs=0.02)


def test_progress_event_has_the_sm_activity_of_a_run_that_has_its_slice_alone(node, watch):
    """Two jobs on a slice cannot be told apart."""
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 1000)
    (row,) = node.slices("held")
    node.machine.set_load(row.mig_uuid, sm=80)
    write(node, "items=5 seconds=1\n")
    watch()
    apart()
    write(node, "items=10 seconds=2\n")
    watch(node.config.progress_every)
    apart()
    with node.journal.write():
        node.journal.put(row._replace(shared=True))
    write(node, "items=15 seconds=3\n")
    watch(node.config.progress_every)
    assert [event.get("sm") for event in node.events("progress")] == [None, pytest.approx(0.8, abs=0.02), None]


def test_activity_is_a_time_average_and_survives_an_agent_restart(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 1000)
    (row,) = node.slices("held")
    node.machine.set_load(row.mig_uuid, sm=100)
    for _ in range(2):
        watch()
        apart()
    again = WatchRounds(node)
    again.watcher._peaks = peaks.load(node.executor.paths.run)
    node.machine.set_load(row.mig_uuid, sm=0)
    for _ in range(4):
        again()
        apart()
    node.epilog(1)
    assert 0.1 < activities(node)[1]["sm"] < 0.6


def test_activity_of_a_warm_slice_excludes_the_earlier_run(node, watch):
    """No round takes place between the two runs on one slice."""
    for job, sm in ((1, 100), (2, 0)):
        node.prolog(job, "[mig:1g.10gb:1]")
        (row,) = node.slices("held")
        node.machine.set_load(row.mig_uuid, sm=sm)
        memory(node, job, 1000)
        for _ in range(2):
            watch()
            apart()
        node.machine.end_process(PID)
        node.epilog(job)
    assert activities(node)[2]["sm"] == 0


def test_round_during_the_release_of_a_run_keeps_its_peak_memory(node, watch):
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 3000)
    watch()
    node.machine.end_process(PID)
    (run,) = node.journal.runs("state='running'")
    with node.journal.write():
        node.journal.put_run(run._replace(state="ending"))
    watch()
    node.epilog(1)
    assert stops(node) == {(1, 0): 3000}


def test_gpu_without_gpm_is_asked_only_once(new_node):
    """Before Hopper there is no GPM; memory is sampled nevertheless."""
    node = new_node(gpus=["a100-80gb"])
    watch = WatchRounds(node)
    node.prolog(1, "[mig:1g.10gb:1]")
    memory(node, 1, 700)
    for _ in range(3):
        watch()
        apart()
    asked = sum(count for name, count in node.machine.calls().items() if "GpmMigSampleGet" in name)
    node.epilog(1)
    assert asked == 1
    assert stops(node) == {(1, 0): 700}
    assert activities(node) == {1: None}
