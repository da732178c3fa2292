"""`migbatch node clear`: destroys idle instances and keeps those that jobs hold."""

from slurm_migbatch.node import owner
from slurm_migbatch.node.deadline import Deadline


def clear(node, **how):
    with owner.working() as who:
        return node.executor.repairer.clear(Deadline(30), who, **how)


def test_clear_destroys_idle_instances_and_keeps_held_ones(node):
    node.prolog(1, "[mig:1g.10gb:2]")
    node.prolog(2, "[mig:3g.40gb:1]")
    node.epilog(1)
    assert len(clear(node, dry=True)) == 2 and len(node.instances()) == 3
    assert len(clear(node)) == 2
    node.check()
    assert [row.state for row in node.slices()] == ["held"] and len(node.instances()) == 1
    assert len(node.events("destroy")) == 2
    assert clear(node) == []


def test_clear_marks_a_busy_instance_as_zombie(node):
    node.prolog(1, "[mig:1g.10gb:1]")
    (row,) = node.slices("held")
    node.epilog(1)
    node.machine.start_process(row.mig_uuid, 4242)
    clear(node)
    node.check()
    assert [row.state for row in node.slices()] == ["zombie"]
