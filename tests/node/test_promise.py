"""Jobs get the slots that the controller has offered, whatever other hooks do at the same time."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from slurm_migbatch.mig.nvml.gpu import NvmlGpu
from slurm_migbatch.node import effects, exits, owner
from slurm_migbatch.node.deadline import Deadline, locked
from slurm_migbatch.node.executor import Executor
from slurm_migbatch.node.journal import Journal
from tests.support.examples import thinned
from tests.support.node_processes import in_processes, stopping_child
from tests.support.nodes import ALICE, BOB
from tests.support.promises import TWO, publish, uuids


def fill(node, *layouts):
    """Create an idle instance in each slot of these layouts."""
    publish(node, *layouts, version=1)
    grants = [f"[mig:{profile.replace('+', '.')}:1]" for layout in layouts for profile, _, _ in layout]
    for job, grant in enumerate(grants, 900):
        code, line = node.prolog(job, grant)
        assert code == exits.OK and "made" in line, line
    for job in range(900, 900 + len(grants)):
        node.epilog(job)
    assert places(node, "idle") == {tuple(slot) for layout in layouts for slot in layout}


def places(node, state="held"):
    return {(r.slot.profile.name, r.slot.placement.start, r.slot.placement.size) for r in node.slices(state)}


def at(node, job):
    (row,) = [row for row in node.slices("held") if row.job == job]
    return uuids(node).index(row.gpu), str(row.slot)


@contextmanager
def meanwhile(node, moment, work):
    """Let `work(executor)` begin in a thread of its own at the first `moment` of a hook that runs in the block.

    The hook goes on once the thread has claimed places, or has ended; `finish()` returns what `work` returned.
    """
    found = []
    journal = Journal(f"{node.config.state_dir}/journal.db")

    def other():
        executor = Executor(node.config)
        try:
            found.append(work(executor))
        finally:
            executor.close()
            executor.gpus.reset()

    thread = threading.Thread(target=other)

    def hook(name):
        if name == moment and thread.ident is None:
            before = {row.id for row in journal.slices("state='intent'")}
            thread.start()
            while thread.is_alive() and before >= {row.id for row in journal.slices("state='intent'")}:
                time.sleep(0.002)

    def finish():
        assert thread.ident is not None, f"no hook came to {moment!r}"
        thread.join(30)
        return found[0]

    effects.hook = hook
    try:
        yield finish
    finally:
        effects.hook = None
        if thread.ident is not None:
            thread.join(30)
        journal.close()


def test_second_job_gets_its_planned_slot_while_an_instance_is_destroyed(new_node):
    """It once took the whole GPU for full and used a slot offered on another GPU, so that slot's job had none."""
    node = new_node(gpus=TWO)
    fill(node, [["4g.40gb", 0, 4]], [["7g.80gb", 0, 8]])
    publish(node, [["1g.20gb", 0, 2], ["1g.20gb", 2, 2]], [["7g.80gb", 0, 8]])
    marker = "[mig:1g.20gb:1]"
    with meanwhile(node, "driver destroy", lambda other: other.run(node.env("prolog", 2, marker, uid=BOB))) as finish:
        assert node.prolog(1, marker)[0] == exits.OK
        code, line = finish()
    assert code == exits.OK and "made" in line, line
    code, line = node.prolog(3, "[mig:7g.80gb:1]")
    assert code == exits.OK and "warm" in line, line
    assert {at(node, 1), at(node, 2), at(node, 3)} == {(0, "1g.20gb@0:2"), (0, "1g.20gb@2:2"), (1, "7g.80gb@0:8")}
    assert len(node.events("destroy")) == 1 and not node.events("misfit")
    node.check()


def test_second_job_on_the_only_gpu_waits_for_the_destruction(node):
    fill(node, [["7g.80gb", 0, 8]])
    publish(node, [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]])
    marker = "[mig:3g.40gb:1]"
    with meanwhile(node, "driver destroy", lambda other: other.run(node.env("prolog", 2, marker, uid=BOB))) as finish:
        assert node.prolog(1, "[mig:4g.40gb:1]")[0] == exits.OK
        code, line = finish()
    assert code == exits.OK and "made" in line, line
    assert not node.events("misfit") and len(node.events("destroy")) == 1
    node.check()


def test_second_claim_may_reach_the_gpu_first_and_destroy_for_both(node, monkeypatch):
    """Then it destroys the instance that blocks both; the other hook finds it gone and destroys nothing else."""
    fill(node, [["7g.80gb", 0, 8]])
    publish(node, [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]])
    second = []
    # The lock is taken right after the claim's commit: run the second hook whole at that point.
    real = locked

    def interrupted(directory, names, deadline):
        if not second:
            second.append(None)
            executor = Executor(node.config)
            second[0] = executor.run(node.env("prolog", 2, "[mig:3g.40gb:1]", uid=BOB))
            executor.close()
            executor.gpus.reset()
        return real(directory, names, deadline)

    with monkeypatch.context() as patched:
        patched.setattr("slurm_migbatch.node.allocate.locked", interrupted)
        code, line = node.prolog(1, "[mig:4g.40gb:1]")
    assert second[0][0] == exits.OK and "made" in second[0][1], second
    assert code == exits.OK and "made" in line, line
    assert at(node, 1) == (0, "4g.40gb@0:4") and at(node, 2) == (0, "3g.40gb@4:4")
    assert len(node.events("destroy")) == 1
    node.check()


def test_all_claims_on_a_slot_that_cannot_be_cleared_move_to_another_gpu(new_node):
    """All claims that overlap the zombie are void, also that of the second hook, which chooses again."""
    node = new_node(gpus=TWO)
    fill(node, [["7g.80gb", 0, 8]], [])
    publish(node, [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]], [])
    (idle,) = node.slices("idle")
    node.machine.start_process(idle.mig_uuid, 4_000_000)
    marker = "[mig:3g.40gb:1]"
    with meanwhile(node, "driver destroy", lambda other: other.run(node.env("prolog", 2, marker, uid=BOB))) as finish:
        assert node.prolog(1, "[mig:4g.40gb:1]")[0] == exits.OK
        code, line = finish()
    assert code == exits.OK and "made" in line, line
    assert at(node, 1)[0] == 1 and at(node, 2)[0] == 1
    assert places(node, "zombie") == {("7g.80gb", 0, 8)}
    node.check()
    node.machine.end_process(4_000_000)
    node.reconcile()
    node.check()


def test_prolog_can_claim_a_slot_that_an_administrator_is_clearing(node):
    fill(node, [["7g.80gb", 0, 8]])
    publish(node, [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]])
    marker = "[mig:3g.40gb:1]"
    with meanwhile(node, "driver destroy", lambda other: other.run(node.env("prolog", 2, marker, uid=BOB))) as finish:
        with owner.working() as who:
            assert node.executor.repairer.clear(Deadline(30), who)
        code, line = finish()
    assert code == exits.OK and "made" in line, line
    assert len(node.events("destroy")) == 1
    node.check()


def test_second_job_destroys_the_instance_when_the_first_gives_up(node):
    fill(node, [["7g.80gb", 0, 8]])
    publish(node, [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]])
    node.machine.fail("nvmlGpuInstanceDestroy", code=999, nth=1)
    marker = "[mig:3g.40gb:1]"
    with meanwhile(node, "driver destroy", lambda other: other.run(node.env("prolog", 2, marker, uid=BOB))) as finish:
        assert "requeued" in node.prolog(1, "[mig:4g.40gb:1]")[1]
        code, line = finish()
    assert code == exits.OK and "made" in line, line
    assert at(node, 2) == (0, "3g.40gb@4:4")
    node.check()


OLD = [["7g.80gb", 0, 8]], [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]]
NEW = (
    [["1g.10gb", 0, 1], ["1g.10gb", 1, 1], ["1g.20gb", 2, 2], ["3g.40gb", 4, 4]],
    [["2g.20gb", 0, 2], ["2g.20gb", 2, 2], ["1g.20gb", 4, 2], ["1g.10gb", 6, 1]],
)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["any", "same-user", "never"])
def test_parallel_jobs_of_a_new_plan_get_exactly_the_planned_slots(new_node, reuse):
    """Each job in its own process, on GPUs full of idle instances at other placements."""
    # no hook is to be refused because the machine is busy: eight at once wait for one another's writes to the disk
    node = new_node(gpus=TWO, latency=0.003, WarmReuse=reuse, HookDeadline=120)

    def run(job, grant):
        code, line = Executor(node.config).run(node.env("prolog", job, grant, uid=ALICE if job % 2 else BOB))
        print(code, line, flush=True)  # a failure shows which hook did not do what it should
        return code

    fill(node, *OLD)
    for turn, layouts in enumerate((NEW, OLD, NEW)):
        publish(node, *layouts, version=2 + turn)
        grants = [f"[mig:{profile}:1]" for layout in layouts for profile, _, _ in layout]
        first = 100 * turn + 1
        works = [lambda job=job, grant=grant: run(job, grant) for job, grant in enumerate(grants, first)]
        assert in_processes(works) == [0] * len(grants)
        assert not node.events("misfit"), [event["reason"] for event in node.events("misfit")]
        assert places(node) == {tuple(slot) for layout in layouts for slot in layout}
        node.check()
        for job in range(first, first + len(grants)):
            node.epilog(job)
    node.check()


def claiming(node):
    fill(node, [["7g.80gb", 0, 8]])
    publish(node, [["4g.40gb", 0, 4], ["3g.40gb", 4, 4]])


SECONDS = ["[mig:3g.40gb:1]", "[mig:1g.10gb.me:1]", "[mig:7g.80gb:1]"]


@pytest.mark.slow
@pytest.mark.parametrize("second", SECONDS)
def test_waiting_hook_keeps_its_claim_when_the_first_hook_is_killed(many_nodes, second):
    """The first hook stops before its k-th effect, a second one claims what it can, then the first is killed."""
    for k in thinned(range(1, 10_000), SECONDS.index(second)):
        node = many_nodes(name=f"k{k}")
        claiming(node)
        node.forget_executor()
        first, stopped = stopping_child(node, node.env("prolog", 1, "[mig:4g.40gb:1]"), k)
        found = []

        def work(node=node, found=found):
            executor = Executor(node.config)
            found.append(executor.run(node.env("prolog", 2, second, uid=BOB)))
            executor.close()
            executor.gpus.reset()

        thread = threading.Thread(target=work)
        thread.start()
        if stopped:
            # Until it has claimed, or briefly where it cannot (the first hook may have the journal locked).
            journal = Journal(f"{node.config.state_dir}/journal.db")
            until = time.monotonic() + 0.3
            while thread.is_alive() and time.monotonic() < until and not journal.slices("job=2"):
                time.sleep(0.002)
            journal.close()
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
        thread.join(30)
        assert not thread.is_alive()
        code, line = found[0]
        assert code == exits.OK, line
        if second != "[mig:7g.80gb:1]":
            assert "requeued" not in line, (k, line)
        node.reconcile()
        node.check()
        node.epilog(1)
        node.epilog(2)
        node.check()
        assert node.prolog(3, "[mig:7g.80gb:1]")[0] == exits.OK and len(node.slices("held")) == 1
        node.check()
        node.close()
        if not stopped:
            break
    assert k > 5


DELAYED = ["[mig:4g.40gb:1]", "[mig:1g.10gb:2]", "[mig:1g.10gb:1]"]


@pytest.mark.slow
@pytest.mark.parametrize("marker", DELAYED)
def test_tasks_of_a_run_that_was_sent_back_find_no_slices_wherever_the_agent_was_delayed(many_nodes, marker):
    """The agent stops before its k-th effect, the hook's own process gives up, then the agent goes on."""
    for k in thinned(range(1, 10_000), DELAYED.index(marker)):
        node = many_nodes(name=f"k{k}", HookDeadline=0.4)
        given_up = node.root / "given-up"
        env = node.env("prolog", 1, marker)
        node.reconcile()  # makes the directories
        node.forget_executor()
        agent, stopped = stopping_child(node, env, k, given_up.exists)
        if stopped:
            given_up.touch()
            assert node.prolog(1, marker)[0] == exits.OK
            os.kill(agent, signal.SIGCONT)
            os.waitpid(agent, 0)
        node.reconcile()
        given = node.handoff(1)
        assert given is not None and (not given.slices or node.journal.runs("job=1 AND state='running'")), k
        node.epilog(1)
        node.check()
        node.close()
        if not stopped:
            break
    assert k > 5


@pytest.mark.parametrize("hung", ["mig_mode", "create"])
def test_delayed_hook_does_not_requeue_a_job_that_was_already_requeued(new_node, monkeypatch, hung):
    """The driver hangs in the agent; the hook's own process times out and requeues the job, which runs elsewhere by
    the time the driver answers again."""
    node, second = new_node(HookDeadline=0.5), []
    real = getattr(NvmlGpu, hung)

    def late(gpu, *arguments):
        if not second:
            second.append(None)
            executor = Executor(node.config)
            second[0] = executor.run(node.env("prolog", 1, "[mig:1g.10gb:1]"))
            executor.close()
            executor.gpus.reset()
        return real(gpu, *arguments)

    node.reconcile()
    monkeypatch.setattr(NvmlGpu, hung, late)
    code, line = node.prolog(1, "[mig:1g.10gb:1]")
    assert second[0][0] == exits.OK and "requeued" in second[0][1], second
    assert code == exits.OK and "requeued" not in line, line
    assert node.scontrol_calls() == ["requeue incomplete 1"]
    assert not node.handoff(1).slices and not node.slices("held") and len(node.events("misfit")) == 1
    node.check()


def test_driver_reset_by_one_job_does_not_interrupt_another(node, monkeypatch):
    """All hooks in the agent share the driver: an error on one GPU once requeued jobs starting on the others."""
    node.reconcile()
    gpus = node.executor.gpus
    with monkeypatch.context() as patched:
        patched.setattr(effects, "hook", lambda name: gpus.reset() if name == "driver create" else None)
        code, line = node.prolog(1, "[mig:1g.10gb:1]")
    assert code == exits.OK and "made" in line, line
    before = gpus.all()
    gpus.reset()
    assert gpus.all() is not before, "the former handles are not used again"
    node.check()
