"""SIGKILL at every system call of Prolog, Epilog, reconcile and agent, from the first instruction on.

After each kill the next hook runs, or the agent's next round. Then journal, driver and Slurm agree: the jobs that run
according to Slurm have their slices, no other job has any, no change is unfinished. A job of another user runs all the
time. Of the kills that left every file of the node unchanged (most of Python's start), only one is checked.

`pytest` runs a sample (--kills-every, --kills-first); `make kills` runs them all and prints their number.
"""

import os
import signal
import sys
import time
from collections import Counter

import pytest

from slurm_migbatch.node import client, ending, exits, liveness
from slurm_migbatch.node.deadline import Deadline
from tests.support.kills import Attached, Template, Traced, calls, program, threads_by_age
from tests.support.node_processes import agent_process, run_hook
from tests.support.nodes import BOB

MARKER = "[mig:3g.40gb:1,1g.10gb:1]"
RECONCILE = """
import sys
from slurm_migbatch.node import liveness
from slurm_migbatch.node.config import load
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.executor import Executor
liveness.SETTLED_S = liveness.PAUSE_S = 0.0
Executor(load(sys.argv[1], sys.argv[2])).reconcile(Deadline(30))
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(liveness, "SETTLED_S", 0.0)
    monkeypatch.setattr(liveness, "PAUSE_S", 0.0)


@pytest.fixture
def every(request):
    return slice(request.config.getoption("--kills-first"), None, request.config.getoption("--kills-every"))


@pytest.fixture
def site(many_nodes):
    """A node on which job 9 of another user runs, and where idle instances block the slices of job 1."""
    node = many_nodes(CheckOpenFiles="no", SampleEvery=0, AgentWait=60)
    node.slurm_says("9 0 RUNNING n1", "50 0 RUNNING n1", "1 0 RUNNING n1")
    node.prolog(9, "[mig:1g.10gb:1]", uid=BOB)
    node.prolog(8, "[mig:2g.20gb:3]")
    node.epilog(8)
    return node


def hook(node, name, job=1):
    values = node.environ(name, job, MARKER if name == "prolog" else "")
    return Traced(node, {k.decode(): v.decode() for k, v in values.items()}, program(node, name))


def state(node, job=1):
    (found,) = [run.state for run in node.journal.runs("job=?", (job,))] or ["nothing"]
    return found


def next_hook(node):
    """What a hook without the agent does (`fallback.run`)."""
    code, line = node.prolog(50, "[mig:1g.10gb:1]")
    assert code == exits.OK and "requeued" not in line, line
    node.executor.run_repairer.orphans(Deadline(30))


def settled(node, *jobs):
    """Check the end state: these jobs hold slices and no others do."""
    assert {row.job for row in node.slices("held")} == set(jobs)
    assert not list(ending.listed(node.executor.paths.run))
    node.check()


def report(capsys, what, killed, missed, found):
    with capsys.disabled():
        states = ", ".join(f"{name} {count}" for name, count in sorted(found.items()))
        print(f"\n{what}: killed {killed} times ({missed} calls not reached); its run was then: {states}")


def killed_everywhere(node, make, every, capsys, what, *, after):
    """Kill `make()` at every selected call; `after` is what Slurm then says about job 1."""
    make()
    template = Template(node)
    found, killed, missed, untouched = Counter(), 0, 0, 0
    everything = make().count()
    assert len(everything) > 500
    for call in everything[every]:
        template.restore()
        if not make().kill(call):
            missed += 1
            continue
        killed += 1
        if template.untouched:
            untouched += 1
            if untouched > 1:
                continue
        node.slurm_says(after)
        found[state(node)] += 1
        next_hook(node)
        settled(node, 9, 50)
    found["untouched"] = untouched
    report(capsys, what, killed, missed, found)
    assert killed > 10 * missed


@pytest.mark.slow
def test_node_recovers_from_a_killed_prolog(site, every, capsys):
    killed_everywhere(site, lambda: hook(site, "prolog"), every, capsys, "Prolog without agent", after="1 1 PENDING")


@pytest.mark.slow
def test_node_recovers_from_a_killed_epilog(site, every, capsys):
    site.prolog(1, MARKER)
    after = "1 0 COMPLETED n1"
    killed_everywhere(site, lambda: hook(site, "epilog"), every, capsys, "Epilog without agent", after=after)


@pytest.mark.slow
def test_node_recovers_from_a_killed_reconcile(site, every, capsys):
    """What the agent does every ReconcileEvery seconds, run as a separate process."""
    site.prolog(1, MARKER)
    site.slurm_says("1 0 COMPLETED n1")
    line = [sys.executable, "-c", RECONCILE, str(site.etc), site.name]

    def make():
        return Traced(site, dict(os.environ), *line)

    killed_everywhere(site, make, every, capsys, "reconcile", after="1 0 COMPLETED n1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_agent_recovers_from_a_killed_client(site, every, capsys, name):
    """The agent continues: it completes what it has begun, and ends the runs that Slurm has ended."""
    site.configure(ReconcileEvery=0.3)
    socket = f"{site.config.run_dir}/{client.SOCKET}"
    found, killed, missed, job = Counter(), 0, 0, 100

    def begin():
        nonlocal job
        job += 1
        site.slurm_says(f"{job} 0 RUNNING n1")
        if name == "epilog":
            assert client.ask(socket, "prolog", site.environ("prolog", job, MARKER), 60.0)[0] == exits.OK
        return hook(site, name, job)

    def end():
        site.slurm_says(f"{job} 1 PENDING")
        limit = time.monotonic() + 60
        while not at_rest(site) and time.monotonic() < limit:
            time.sleep(0.02)
        settled(site, 9)

    with agent_process(site):
        everything = begin().count()
        end()
        assert len(everything) > 200
        for call in everything[every]:
            if begin().kill(call):
                killed += 1
                found[state(site, job)] += 1
            else:
                missed += 1
            end()
    report(capsys, f"{name} with agent", killed, missed, found)
    assert killed > 10 * missed


def at_rest(node):
    """Only job 9 is left. The caller polls: being right once is enough."""
    return (
        {row.job for row in node.slices() if row.state not in ("idle", "evict")} == {9}
        and not node.journal.runs("state IN ('starting','ending','running') AND job<>9")
        and not list(ending.listed(node.executor.paths.run))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_hook_does_the_work_when_the_agent_that_serves_it_is_killed(site, every, capsys, name):
    """The agent is killed at each of its calls; then the hook does the work itself."""
    if name == "epilog":
        site.prolog(1, MARKER)
    site.configure(ReconcileEvery=600)
    template = Template(site)

    def serve(attach):
        template.restore()
        with agent_process(site, workers=1) as child:
            traced = attach(child.pid)
            try:
                code, line = run_hook(site, name, 1, MARKER if name == "prolog" else "")
                assert code == exits.OK and "requeued" not in line, line
            finally:
                traced.end()
        dead = os.WIFSIGNALED(child.status) and os.WTERMSIG(child.status) == signal.SIGKILL
        site.slurm_says("1 0 COMPLETED n1" if name == "epilog" else "1 0 RUNNING n1")
        next_hook(site)
        settled(site, *((9, 50) if name == "epilog" else (9, 50, 1)))
        return dead

    log = site.root.with_name("agent.log")
    assert not serve(lambda pid: Attached.counting(pid, log))
    everything = threads_by_age(log, calls(log))
    assert len(everything) > 50
    results = Counter(serve(lambda pid, call=call: Attached.killing(pid, call)) for call in everything[every])
    report(capsys, f"agent that serves {name}", results[True], results[False], Counter())
    assert results[True] > 3 * results[False]
