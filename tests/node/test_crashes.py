"""SIGKILL before each side effect of Prolog and Epilog, and inside each driver call: nothing is ever lost.

The side effects are counted in a first run, so new ones are covered without a change of the tests.
"""

import os
import signal

import pytest

from slurm_migbatch.node import exits
from slurm_migbatch.node.executor import Executor
from tests.support.examples import thinned
from tests.support.nodes import BOB, GUEST, in_child, publish


def effects_of(node, scene):
    work = scene(node)
    node.forget_executor()
    node.machine.calls(reset=True)
    status, count = in_child(work)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == exits.OK
    return count


def hook_in_child(node, hook, job, marker="", **values):
    """The hook as its own process would run it: a new executor, ended without cleaning up."""

    def work():
        return Executor(node.config).run(node.env(hook, job, marker, **values))[0]

    return work


def cold(node):
    return hook_in_child(node, "prolog", 1, "[mig:2g.20gb:1,1g.10gb:1]")


def warm(node):
    node.prolog(9, "[mig:2g.20gb:1,1g.10gb:1]")
    node.epilog(9)
    return hook_in_child(node, "prolog", 1, "[mig:2g.20gb:1,1g.10gb:1]")


def evicting(node):
    node.prolog(9, "[mig:2g.20gb:2]")
    node.epilog(9)
    return hook_in_child(node, "prolog", 1, "[mig:7g.80gb:1]")


def replacing(node):
    """The same slot is destroyed and created again, because slices are never reused."""
    node.configure(WarmReuse="never")
    node.forget_executor()
    node.prolog(9, "[mig:7g.80gb:1]")
    node.epilog(9)
    return hook_in_child(node, "prolog", 1, "[mig:7g.80gb:1]", uid=BOB)


def ending(node):
    node.prolog(1, "[mig:2g.20gb:1,1g.10gb:1]")
    return hook_in_child(node, "epilog", 1)


def misfit(node):
    node.prolog(9, "[mig:7g.80gb:1]")
    return hook_in_child(node, "prolog", 1, "[mig:1g.10gb:1]")


def rebooted(node):
    node.prolog(9, "[mig:2g.20gb:1]")
    node.forget_executor()
    node.machine.reboot()
    node.machine.dump()
    from slurm_migbatch.mig.nvml import NvmlDriver

    driver = NvmlDriver(str(node.machine.library))
    for gpu in driver.gpus():
        gpu.set_mig_mode(True)
    driver.close()
    return hook_in_child(node, "prolog", 1, "[mig:1g.10gb:1]")


def joining(node):
    node.prolog(9, "[mig:2g.20gb:1]")
    publish(node)
    return hook_in_child(node, "prolog", 1, GUEST)


def joining_alone(node):
    """The host has ended, and its instance has since been replaced by one of another profile."""
    node.prolog(9, "[mig:2g.20gb:1]")
    publish(node)
    node.epilog(9)
    node.prolog(8, "[mig:7g.80gb:1]")
    node.epilog(8)
    return hook_in_child(node, "prolog", 1, GUEST)


def shared(node):
    assert node.prolog(1, GUEST)[0] == exits.OK
    assert {row.job for row in node.slices("held")} == {1, 9}


def guest_ending(node):
    joining(node)
    shared(node)
    return hook_in_child(node, "epilog", 1)


def host_ending(node):
    joining(node)
    shared(node)
    return hook_in_child(node, "epilog", 9)


def last_ending(node):
    host_ending(node)
    node.epilog(9)
    return hook_in_child(node, "epilog", 1)


def guest_misfit(node):
    """The host belongs to another user."""
    node.prolog(9, "[mig:7g.80gb:1]")
    publish(node)
    return hook_in_child(node, "prolog", 1, GUEST, uid=BOB)


SCENES = [cold, warm, evicting, replacing, ending, misfit, rebooted]
SCENES += [joining, joining_alone, guest_ending, host_ending, last_ending, guest_misfit]


def next_hook(node):
    """Prolog of another user's job with another profile, then the Epilogs of the interrupted job and of all others."""
    code, line = node.prolog(50, "[mig:1g.10gb:1]", uid=BOB)
    assert code == exits.OK, line
    node.check()
    for job in (1, 9, 50):
        assert node.epilog(job)[0] == exits.OK
    node.check()
    assert not node.slices("held")


def reconcile(node):
    node.reconcile()
    node.check()
    assert node.reconcile() == [], "a second reconcile found more to do"
    for job in (1, 9):
        assert node.epilog(job)[0] == exits.OK
    node.check()
    assert not node.slices("held")


def same_again(node):
    """Slurm runs the same hook once more."""
    marker = "[mig:2g.20gb:1,1g.10gb:1]"
    if node.scene in (cold, warm):
        code, line = node.prolog(1, marker)
        assert code == exits.OK, line
        assert len([row for row in node.slices("held") if row.job == 1]) == 2
    if node.scene in (joining, joining_alone):
        code, line = node.prolog(1, GUEST)
        assert code == exits.OK, line
        assert [row.slot.profile.name for row in node.slices("held") if row.job == 1] == ["2g.20gb"]
        node.check()
    node.epilog(1)
    node.epilog(1)
    node.epilog(9)
    node.check()
    assert not node.slices("held")


AFTER = [next_hook, reconcile, same_again]


@pytest.mark.slow
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("scene", SCENES)
def test_node_recovers_from_a_kill_before_any_side_effect(many_nodes, scene, after):
    count = effects_of(many_nodes(name="count"), scene)
    assert count > 3
    for k in thinned(range(1, count + 1), AFTER.index(after)):
        node = many_nodes(name=f"k{k}")
        node.scene = scene
        work = scene(node)
        node.forget_executor()
        status, _ = in_child(work, kill_at=k)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        after(node)
        node.close()


DRIVER_CALLS = [
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
]


MOMENTS = ["before", "during", "after"]


@pytest.mark.slow
@pytest.mark.parametrize("after", [next_hook, reconcile])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("scene", [cold, evicting, replacing, joining_alone])
def test_node_recovers_from_a_kill_inside_a_driver_call(many_nodes, scene, moment, after):
    counted = many_nodes(name="count")
    effects_of(counted, scene)
    calls = counted.machine.calls()
    changing = [(name, nth) for name in DRIVER_CALLS for nth in range(1, calls[name] + 1)]
    assert changing
    for name, nth in thinned(changing, MOMENTS.index(moment) + AFTER.index(after)):
        node = many_nodes(name=f"{name}{nth}")
        work = scene(node)
        node.forget_executor()
        node.machine.fail(name, nth=nth, kill=True, moment=moment)
        status, _ = in_child(work)
        assert os.WIFSIGNALED(status), name
        node.machine.reset_faults()
        after(node)
        node.close()
