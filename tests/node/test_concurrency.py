"""Many hooks in parallel, each in its own process, on two GPUs; and faults in each driver call."""

import random

import pytest

from slurm_migbatch.node import exits
from slurm_migbatch.node.executor import Executor
from tests.support.examples import thinned
from tests.support.node_processes import in_processes
from tests.support.nodes import ALICE, BOB

LATE = "the agent or the next hook completes the release"
MARKERS = ["[mig:1g.10gb:1]", "[mig:2g.20gb:1]", "[mig:3g.40gb:1]", "[mig:1g.10gb:2]", "[mig:4g.40gb:1]"]


def worker(node, jobs, seed):
    """Start and end jobs; the exit code is the number of hooks that failed."""
    draw = random.Random(seed)
    bad = 0
    for job in jobs:
        executor = Executor(node.config)
        code, line = executor.run(node.env("prolog", job, draw.choice(MARKERS), uid=draw.choice([ALICE, BOB])))
        if code != exits.OK or ("made" not in line and "warm" not in line and "no free placement" not in line):
            print(code, line, flush=True)
            bad += 1
        started = "no free placement" not in line
        code, line = executor.run(node.env("epilog", job))
        while code == exits.OK and LATE in line:  # on a busy host it may not get a lock in time
            print(line, flush=True)
            code, line = executor.run(node.env("epilog", job))
        if code != exits.OK or (started and "released" not in line):
            print(code, line, flush=True)
            bad += 1
        executor.close()
        executor.gpus.reset()
    return bad


def test_parallel_hooks_never_use_a_slot_twice(new_node):
    # no hook is to be refused because the machine is busy: six at once wait for one another's writes to the disk
    node = new_node(gpus=["h100-80gb", "h100-80gb"], latency=0.002, HookDeadline=120)
    count = 6
    works = [lambda k=k: worker(node, range(1 + 10 * k, 9 + 10 * k), seed=k) for k in range(count)]
    assert in_processes(works) == [0] * count
    node.check()
    assert not node.slices("held") and not node.slices("zombie")
    starts = {(e["job"], e["restart"]) for e in node.events("start")}
    stops = {(e["job"], e["restart"]) for e in node.events("stop")}
    assert starts == stops and len(starts) > 20
    assert len(starts) + len(node.events("misfit")) == 8 * count
    held = {}
    for event in node.events():
        for held_slice in event.get("slices", ()):
            key = held_slice["gpu"], held_slice["start"]
            if event["kind"] == "start":
                assert key not in held, "a slot was given twice"
                held[key] = event["job"]
            else:
                assert held.pop(key) == event["job"]


def test_parallel_prologs_of_one_job_create_one_set_of_slices(node):
    node.forget_executor()

    def work():
        return Executor(node.config).run(node.env("prolog", 1, "[mig:1g.10gb:1]"))[0]

    assert in_processes([work] * 4) == [0] * 4
    assert len(node.slices("held")) == 1 and len(node.events("start")) == 1
    node.check()


GPUS = ["h100-80gb", "h100-80gb"]
FAULTS = [999, 19, 15]  # unknown, in use, lost


def calls_of(many_nodes, arrange, marker):
    node = many_nodes(name="count", gpus=GPUS)
    arrange(node)
    node.forget_executor()
    node.machine.calls(reset=True)
    node.prolog(1, marker)
    calls = dict(node.machine.calls())
    node.close()
    return calls


def nothing(node):
    node.reconcile()


def full_of_idle(node):
    node.prolog(9, "[mig:3g.40gb:4]")
    node.epilog(9)


@pytest.mark.slow
@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("arrange", [nothing, full_of_idle])
def test_node_recovers_from_a_fault_in_any_driver_call(many_nodes, arrange, code):
    marker = "[mig:2g.20gb:1]"
    times = calls_of(many_nodes, arrange, marker)
    faults = [(call, nth) for call in times for nth in sorted({1, times[call]})]
    for number, (call, nth) in enumerate(thinned(faults, FAULTS.index(code))):
        node = many_nodes(name=f"{number}", gpus=GPUS)
        arrange(node)
        node.forget_executor()
        node.machine.fail(call, code=code, nth=nth)
        got, line = node.prolog(1, marker)
        assert got == exits.OK, (call, nth, line)
        node.machine.reset_faults()
        if "requeued" in line:
            assert node.handoff(1).slices == ()
        else:
            assert len(node.slices("held")) == 1, (call, nth, line)
        node.epilog(1)
        node.reconcile()
        node.check()
        got, line = node.prolog(2, "[mig:7g.80gb:2]", uid=BOB)
        assert got == exits.OK and "requeued" not in line, (call, nth, line)
        node.check()
        node.close()
