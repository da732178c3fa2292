"""Points measured in separate processes: what they report, and every way in which they may end."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from slurm_migbatch.profiling.cells import MeasurementCell
from slurm_migbatch.profiling.device import Device
from slurm_migbatch.profiling.measure import DidNotFit, PointFailed, Program, Ran, measure
from slurm_migbatch.profiling.target import Python, parse_command
from slurm_migbatch.profiling.timing import Effort

TWO, CPU = MeasurementCell(2), Device()
BRIEF = Effort(warmup=1, warmup_seconds=0.1, repeats=3, min_seconds=0, max_seconds=10)

TARGETS = """
    import os, signal, sys, time

    def sums(batch, size):
        data = list(range(size))
        return lambda: [sum(data) for _ in range(batch)]

    def full(batch):
        raise MemoryError("no room for the weights")

    def full_later(batch):
        def step():
            raise RuntimeError("CUDA error: out of memory")
        return step

    def killed(batch):
        os.kill(os.getpid(), signal.SIGKILL)

    def fallen(batch):
        print("about to fall", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGSEGV)

    def no_memory_for_cpp(batch):
        sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)

    def wrong(batch):
        def step():
            raise ValueError("bad shape")
        return step

    def leaves(batch):
        sys.exit("usage: no")

    def hangs(batch):
        time.sleep(600)

    def talks(batch):
        def step():
            print('{"event": "oom", "text": "a print is not an event"}')
            sys.stdout.flush()
        return step

    def reads(batch):
        assert sys.stdin.read() == ""
        return lambda: None

    def synchronised(batch):
        def step():
            pass
        def sync():
            time.sleep(0.01)
        step.sync = sync
        step.params = 12
        step.flops_per_item = 3.5
        return step

    def surroundings(batch):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert "slurm_migbatch.cli" not in sys.modules and not os.environ.get("PYTHONPATH")
        return lambda: None

    def starts_another(batch):
        if os.fork() == 0:
            time.sleep(600)
        with open(os.environ["PIDS"], "w") as file:
            file.write(str(os.getpid()))
        return lambda: None

    def differs(batch):
        # of several processes, one works three times as long as the others
        turn = os.open(os.environ["TURN"], os.O_CREAT | os.O_RDWR)
        slow = not os.read(turn, 1)
        os.write(turn, b"x")
        return lambda: time.sleep(0.03 if slow else 0.01)
"""


@pytest.fixture
def targets(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    file = tmp_path / "targets.py"
    file.write_text(textwrap.dedent(TARGETS))
    return str(file)


def go(target, cell=TWO, device=CPU, effort=BRIEF, **program):
    return measure(Program(target, sys.executable, effort, **program), device, None, cell)


def failure(target, **more):
    with pytest.raises(PointFailed) as failed:
        go(target, **more)
    return str(failed.value)


def test_factory_in_a_python_file_is_measured(targets):
    ran = go(Python(targets, "sums"), MeasurementCell(4, 1000))
    assert ran.summary.count >= 3
    assert ran.throughput == pytest.approx(4 / ran.summary.mean)
    assert ran.memory_mib > 1  # the process itself, on a CPU
    assert ran.summary.p99 is None and ran.params is None


def test_module_is_imported_from_the_working_directory(targets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(go(Python("targets", "sums"), MeasurementCell(1, 10)), Ran)


def test_p99_is_reported_from_100_batches_on(targets):
    effort = Effort(warmup=1, warmup_seconds=0.1, repeats=150, min_seconds=0)
    assert go(Python(targets, "sums"), MeasurementCell(1, 10), effort=effort).summary.p99 is not None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("full", "no room for the weights"),
        ("full_later", "out of memory"),
        ("killed", "SIGKILL"),
        ("no_memory_for_cpp", "bad_alloc"),
    ],
)
def test_running_out_of_memory_is_a_result(targets, name, text):
    outcome = go(Python(targets, name))
    assert isinstance(outcome, DidNotFit)
    assert text in outcome.text


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("wrong", ["batch 2: ValueError: bad shape", "targets.py", "raise ValueError"]),
        ("fallen", ["SIGSEGV", "about to fall"]),
        ("leaves", ["usage: no"]),
        ("nothing_there", ["targets.py has no 'nothing_there'"]),
        ("sums", ["takes (batch, size)", "give --inputs"]),
        ("os", ["is not callable"]),
    ],
)
def test_other_failure_quotes_the_program_output(targets, name, texts):
    message = failure(Python(targets, name))
    assert [text for text in texts if text not in message] == [], message
    assert "slurm_migbatch/profiling" not in message


def test_hanging_point_is_ended_by_the_timeout(targets):
    assert "--timeout" in failure(Python(targets, "hangs"), timeout=1.0)


def test_output_of_the_target_is_not_read_as_events(targets):
    assert isinstance(go(Python(targets, "talks")), Ran)


def test_target_gets_an_empty_stdin(targets):
    assert isinstance(go(Python(targets, "reads")), Ran)


def test_attributes_of_the_callable_are_used(targets):
    ran = go(Python(targets, "synchronised"))
    assert ran.summary.mean >= 0.01
    assert (ran.params, ran.flops_per_item) == (12, 3.5)


def test_child_sees_only_its_device_and_not_our_packages(targets, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert isinstance(go(Python(targets, "surroundings")), Ran)


def test_processes_started_by_a_point_are_killed(targets, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "pid"))
    assert isinstance(go(Python(targets, "starts_another")), Ran)
    session = int((tmp_path / "pid").read_text())
    for _ in range(500):
        if not alive_in(session):
            break
        time.sleep(0.02)
    assert not alive_in(session)


def alive_in(group):
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            state, _, pgrp = stat.rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                return True
    return False


def test_concurrent_processes_run_together_and_their_throughput_adds_up(targets, tmp_path, monkeypatch):
    monkeypatch.setenv("TURN", str(tmp_path / "turn"))
    ran = go(Python(targets, "differs"), MeasurementCell(1, None, 3))
    # the fast ones continue until the slow one has its three batches
    assert ran.summary.count > 9
    alone = 1 / ran.summary.mean
    assert ran.throughput > 1.5 * alone


def test_point_does_not_fit_if_one_of_its_processes_runs_out_of_memory(targets):
    assert isinstance(go(Python(targets, "full"), MeasurementCell(1, None, 3)), DidNotFit)


# -- commands ------------------------------------------------------------------------------------------------------

COMMAND = """
    import os, signal, sys
    batch, size, repeats = (int(word) for word in sys.argv[1:])
    print("loading the model")
    if batch == 5:
        print("migbatch: oom")
        sys.exit()
    if batch == 6:
        print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr)
        sys.exit(1)
    if batch == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if batch == 8:
        print("no such file: weights.pt", file=sys.stderr)
        sys.exit(3)
    if batch == 9:
        print("migbatch: seconds=fast", flush=True)
        import time; time.sleep(600)
    if batch == 10:
        sys.exit()
    if batch == 11:
        print(f"migbatch: items={batch * 10} seconds=5 memory_mib=321 params=77")
        sys.exit()
    for number in range(repeats):
        print(f"migbatch: seconds={size / 1000}")
"""


@pytest.fixture
def command(tmp_path):
    file = tmp_path / "prog.py"
    file.write_text(textwrap.dedent(COMMAND))
    return parse_command(f"{sys.executable} {file} {{batch}} {{input}} {{repeats}}", inputs=True)


def test_command_reports_the_time_of_each_batch(command):
    ran = go(command, MeasurementCell(4, 500))
    assert (ran.summary.count, ran.summary.mean, ran.throughput) == (3, 0.5, 8.0)
    assert ran.memory_mib > 1


def test_command_reports_the_time_of_many_batches_together(command):
    ran = go(command, MeasurementCell(11, 500))
    assert (ran.summary.count, ran.summary.mean, ran.throughput) == (1, 0.5, 22.0)
    assert (ran.memory_mib, ran.params) == (321, 77)


def test_several_commands_are_run_concurrently(command):
    ran = go(command, MeasurementCell(4, 500, 2))
    assert (ran.summary.count, ran.throughput) == (6, 16.0)


@pytest.mark.parametrize(("batch", "text"), [(5, "reported by the command"), (6, "CUDA out of memory"), (7, "SIGKILL")])
def test_command_that_runs_out_of_memory_is_a_result(command, batch, text):
    outcome = go(command, MeasurementCell(batch, 500))
    assert isinstance(outcome, DidNotFit) and text in outcome.text


@pytest.mark.parametrize(
    ("batch", "texts"),
    [
        (8, ["exit status 3", "no such file: weights.pt", "loading the model"]),
        (9, ["seconds=fast", "write 'migbatch: items=<number> seconds=<number>'"]),
        (10, ["wrote no line 'migbatch: items=<number> seconds=<number>'"]),
    ],
)
def test_output_of_a_failed_command_is_quoted(command, batch, texts):
    message = failure(command, cell=MeasurementCell(batch, 500))
    assert [text for text in texts if text not in message] == [], message


def test_missing_command_is_reported(tmp_path):
    assert "cannot be started" in failure((str(tmp_path / "nothing"), "{batch}"))


# -- frameworks ----------------------------------------------------------------------------------------------------

TORCH = {
    "torch/__init__.py": """
        from torch import cuda, nn
        __version__ = "2.6.0"
        class version: cuda = "12.4"
        class OutOfMemoryError(RuntimeError): pass
    """,
    "torch/cuda.py": """
        import time
        waited = 0
        def is_available(): return True
        def is_initialized(): return True
        def synchronize(): time.sleep(0.005)
        def current_device(): return 0
        def get_device_properties(_):
            class about: name = "NVIDIA H200"; multi_processor_count = 132
            return about
        def max_memory_reserved(): return 3 << 30
    """,
    "torch/nn.py": """
        class Weight:
            def __init__(self, n): self.n = n
            def numel(self): return self.n
        class Module:
            def __init__(self, *sizes): self.weights = [Weight(n) for n in sizes]
            def parameters(self): return self.weights
            def __call__(self, batch): return batch
    """,
    "torch/utils/__init__.py": "",
    "torch/utils/flop_counter.py": """
        class FlopCounterMode:
            def __init__(self, display=True): assert not display
            def __enter__(self): return self
            def __exit__(self, *_): pass
            def get_total_flops(self): return 8000
    """,
    "jax.py": """
        __version__ = "0.5"
        def block_until_ready(result):
            import time
            time.sleep(result)
    """,
    "on_torch.py": """
        import torch
        def closure(batch):
            model = torch.nn.Module(10, 20)
            return lambda: model(batch)
        def itself(batch):
            class Bench(torch.nn.Module):
                def __call__(self): pass
            return Bench(5)
        def wrapped(batch):
            import functools
            model = torch.nn.Module(11)
            inner = lambda: model(batch)
            @functools.wraps(inner)
            def outer(): return inner()
            return outer
        def named(batch):
            teacher, student = torch.nn.Module(1000), torch.nn.Module(7)
            def step(): return teacher(student(batch))
            step.model = student
            return step
        def full(batch):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    """,
    "on_jax.py": """
        import jax
        def make(batch): return lambda: 0.01
    """,
}


@pytest.fixture
def frameworks(tmp_path):
    """Stand-ins for torch and jax with the few names that are used."""
    for name, text in TORCH.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return tmp_path


def test_torch_is_synchronized_and_queried_for_facts(frameworks):
    ran = go(
        Python(str(frameworks / "on_torch.py"), "closure"), MeasurementCell(4), Device("GPU", "0"), count_flops=True
    )
    assert ran.summary.mean >= 0.005
    assert (ran.software, ran.sm_count, ran.memory_mib) == ("torch 2.6.0 cuda 12.4", 132, 3072)
    assert (ran.params, ran.flops_per_item) == (30, 2000)


@pytest.mark.parametrize(("name", "params"), [("itself", 5), ("named", 7), ("wrapped", 11)])
def test_parameters_are_counted_for_the_model_that_is_run(frameworks, name, params):
    ran = go(Python(str(frameworks / "on_torch.py"), name), device=Device("GPU", "0"))
    assert (ran.params, ran.flops_per_item) == (params, None)


def test_torch_out_of_memory_is_a_result(frameworks):
    outcome = go(Python(str(frameworks / "on_torch.py"), "full"), device=Device("GPU", "0"))
    assert outcome == DidNotFit("torch.OutOfMemoryError: Tried to allocate 2.00 GiB", "torch 2.6.0 cuda 12.4")


def test_jax_results_are_awaited(frameworks):
    ran = go(Python(str(frameworks / "on_jax.py"), "make"))
    assert ran.summary.mean >= 0.01 and ran.software == "jax 0.5"


def test_run_that_used_no_gpu_memory_is_refused_on_a_gpu(frameworks):
    message = failure(Python(str(frameworks / "on_jax.py"), "make"), device=Device("NVIDIA H200", "GPU-1"))
    assert "used no memory of NVIDIA H200" in message and "--device cpu" in message


def test_child_processes_end_when_the_caller_is_killed(targets, tmp_path):
    """A run that is killed by Slurm leaves no process on the GPU."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["PIDS"] = str(tmp_path / "pid")
        os.dup2(write, 1)
        code = (
            f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
            "from slurm_migbatch.profiling import measure as m\n"
            "from slurm_migbatch.profiling.cells import MeasurementCell\n"
            "from slurm_migbatch.profiling.device import Device\n"
            "from slurm_migbatch.profiling.target import Python\n"
            "class Child(m._Child):\n"
            "    def __init__(self, *args):\n"
            "        super().__init__(*args); print(self.pid, flush=True)\n"
            "m._Child = Child\n"
            f"program = m.Program(Python({targets!r}, 'hangs'), sys.executable)\n"
            "m.measure(program, Device(), None, MeasurementCell(1))\n"
        )
        os.execv(sys.executable, [sys.executable, "-c", code])
    os.close(write)
    with os.fdopen(read) as lines:
        child = int(lines.readline())
        assert alive_in(child)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for _ in range(500):
        if not alive_in(child):
            break
        time.sleep(0.02)
    assert not alive_in(child)
