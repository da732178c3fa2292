"""The whole service around a strict queue: from a pending job to an offer that a node knows, with the real store."""

import json
import threading
import time

import pytest

from slurm_migbatch.daemon.controller import RoundReport
from slurm_migbatch.daemon.log import LIMITED_LOG_S
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.mig.layout import Layout
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.runquery import JobId, RunFilter
from tests.support.daemon_fakes import FakeSigner, Node, gpu, inventory, state
from tests.support.daemon_running import Running, pending
from tests.support.waiting import eventually


class Agent:
    """A node that pulls its plan and acknowledges it, until it is closed."""

    def __init__(self, port, name="n1"):
        self.node = Node(port, FakeSigner(), name)
        self.plan = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pull)
        self._thread.start()

    def _pull(self):
        have = 0
        while not self._stop.is_set():
            status, answer = self.node.plan(have, 0.2)
            if status == 200 and "gpus" in answer:
                self.plan, have = answer, answer["version"]

    def close(self):
        self._stop.set()
        self._thread.join(120)

    def slot(self, profile):
        """A slot of the plan with this profile."""
        return next(
            ([g, *s] for g, slots in (self.plan or {"gpus": {}})["gpus"].items() for s in slots if s[0] == profile),
            None,
        )


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/migbatch.db"


@pytest.fixture
def make(config, slurm, signer, url):
    return lambda: Service(config, client=slurm, open_store=lambda: open_store(url), signer=signer)


def node_row(**counts):
    return NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7, "none": 0, **counts}, {}, ("gpu",))


def running_job(job, gres, **more):
    return JobRow(job, uid=1000, user="ann", partition="gpu", state="RUNNING", nodes=("n1",), gres=gres, **more)


def start(job, gpu_uuid, profile, at, size, seq):
    held = [
        {"gpu": gpu_uuid, "profile": profile, "start": at, "size": size, "gi": 1, "ci": 0, "mig_uuid": f"MIG-{job}"}
    ]
    return {
        "seq": seq,
        "ts": 10.0 + seq,
        "kind": "start",
        "job": job,
        "restart": 0,
        "uid": 1000,
        "warm": False,
        "elapsed_ms": 9.5,
        "slices": held,
    }


@pytest.mark.slow
def test_slice_of_a_pending_job_is_offered_and_its_run_is_recorded(make, slurm, url):
    slurm.node_rows["n1"] = node_row()
    with Running(make()) as running:
        agent = Agent(running.port)
        try:
            agent.node.events(state(gpu(0)))
            slurm.queue[1] = pending(1, "gres/mig:3g.40gb:2", submit=5.0)
            eventually(lambda: slurm.node_rows["n1"].gres.get("3g.40gb") == 2)
            # the node had the plan before Slurm had the new counts
            assert sum(slot[0] == "3g.40gb" for slots in agent.plan["gpus"].values() for slot in slots) == 2
            slurm.queue[1] = running_job(1, "gres/mig:3g.40gb:2", submit=5.0, start=11.0)
            uuid, profile, at, size = agent.slot("3g.40gb")
            event = start(1, uuid, profile, at, size, 2)
            event["slices"].append({**event["slices"][0], "start": 4 - at, "mig_uuid": "MIG-1b"})
            assert agent.node.events(event) == (200, {"acked": 2})
            eventually(lambda: len(running.service.rounds.view.facts()["n1"].gpus[0].leases) == 2)
            assert slurm.cancelled == []
            slurm.ends[1] = {"job_id": 1, "state": "COMPLETED", "exit_code": "0:0", "restarts": 0, "end": 20.0}
            del slurm.queue[1]
            stop = {**event, "seq": 3, "kind": "stop", "exit_code": 0}
            agent.node.events(stop)
            with open_store(url, readonly=True) as store:
                run = eventually(
                    lambda: next(
                        (r for r in store.runs(RunFilter(jobs=(JobId(1),))) if r.run["state"] == "COMPLETED"), None
                    )
                )
                assert run.run["profile"] == "3g.40gb:2"
                assert run.run["exit_code"] == 0
                assert store.leases() == []
        finally:
            agent.close()


def test_end_that_slurm_could_not_tell_before_a_restart_is_asked_for_after_it(make, slurm, url):
    slurm.node_rows["n1"] = node_row()
    event = {**start(1, "GPU-0", "1g.10gb", 0, 1, 2), "ts": time.time()}
    slurm.away = True
    with Running(make()) as running:
        Node(running.port, FakeSigner()).events(
            state(gpu(0)), event, {**event, "seq": 3, "kind": "stop", "exit_code": 0}
        )
        eventually(lambda: recorded(url, 1) == ("COMPLETED", 0))
    slurm.away = False
    slurm.ends[1] = {"job_id": 1, "state": "CANCELLED", "exit_code": "0:15", "restarts": 0, "end": event["ts"] + 1}
    with Running(make()):
        eventually(lambda: recorded(url, 1)[0] == "CANCELLED")


@pytest.mark.parametrize(("is_lost", "end"), [(True, "CANCELLED"), (False, "COMPLETED")], ids=["lost", "forgotten"])
def test_job_that_slurmctld_lost_with_its_state_has_not_completed(make, slurm, url, is_lost, end):
    """slurmd kills it without an exit code; one that slurmctld has only forgotten since its end has the node's."""
    slurm.node_rows["n1"] = node_row()
    slurm.queue[1] = running_job(1, "gres/mig:1g.10gb:1", submit=5.0, start=11.0)
    with Running(make()) as running:
        agent = Agent(running.port)
        try:
            event = start(1, "GPU-0", "1g.10gb", 0, 1, 2)
            agent.node.events(state(gpu(0)), event)
            eventually(lambda: recorded(url, 1) == ("RUNNING", None))
            slurm.has_lost_its_state = is_lost
            del slurm.queue[1]
            agent.node.events({**event, "seq": 3, "kind": "stop", "exit_code": 0})
            eventually(lambda: recorded(url, 1) == (end, 0))
            # nothing that comes later changes it
            slurm.queue[2] = pending(2, "gres/mig:1g.10gb:1", submit=15.0)
            eventually(lambda: recorded(url, 2))
            assert recorded(url, 1) == (end, 0)
        finally:
            agent.close()


def recorded(url, job):
    """The state and the exit code of a job's run in the record."""
    with open_store(url, readonly=True) as store:
        runs = store.runs(RunFilter(jobs=(JobId(job),)))
    return (runs[0].run["state"], runs[0].run["exit_code"]) if runs else None


def test_offer_is_sent_again_after_slurm_has_lost_it(make, slurm):
    slurm.node_rows["n1"] = node_row()
    slurm.queue[1] = pending(1, "gres/mig:3g.40gb:2")
    with Running(make()) as running:
        agent = Agent(running.port)
        try:
            agent.node.events(state(gpu(0)))
            eventually(lambda: slurm.node_rows["n1"].gres.get("3g.40gb") == 2)
            version = agent.plan["version"]
            slurm.node_rows["n1"] = node_row()  # scontrol reconfigure
            eventually(lambda: slurm.node_rows["n1"].gres.get("3g.40gb") == 2)
            assert agent.plan["version"] == version
        finally:
            agent.close()


def test_held_slots_stay_held_after_a_restart(make, slurm):
    slurm.node_rows["n1"] = node_row()
    with Running(make()) as running:
        agent = Agent(running.port)
        agent.node.events(state(gpu(0)), start(1, "GPU-0", "3g.40gb", 0, 4, 2))
        agent.node.events(
            {
                "seq": 3,
                "ts": 13.0,
                "kind": "zombie",
                "gpu": "GPU-0",
                "profile": "1g.10gb",
                "start": 4,
                "size": 1,
                "gi": 9,
                "reason": "busy",
            }
        )
        agent.close()
    slurm.queue[1] = running_job(1, "gres/mig:3g.40gb:1")
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"MIXED"}), {"3g.40gb": 1, "none": 6}, {"3g.40gb": 1}, ("gpu",))
    slurm.queue[2] = pending(2, "gres/mig:1g.10gb:2")
    with Running(make()) as running:
        known, agent = agent.node.database, Agent(running.port)
        agent.node.database = known
        agent.node.events()
        try:
            eventually(lambda: slurm.node_rows["n1"].gres.get("1g.10gb", 0) >= 2)
            taken = running.service.rounds.view.facts()["n1"].gpus[0]
            assert [(slot.profile.name, slot.placement.start, run) for slot, run in taken.leases] == [
                ("3g.40gb", 0, (1, 0))
            ]
            assert len(taken.zombies) == 1
            slots = sorted((at, size) for slots in agent.plan["gpus"].values() for _, at, size in slots)
            assert (0, 4) in slots
            assert not any(at <= 4 < at + size and (at, size) != (0, 4) for at, size in slots)
        finally:
            agent.close()


def test_node_that_has_been_resumed_is_used_after_a_restart(make, slurm):
    """The record has the fault for which the node once drained itself; Slurm knows whether it is drained now."""
    slurm.node_rows["n1"] = node_row()
    fault = {"seq": 2, "ts": 9.0, "kind": "fault", "gpu": None, "what": "x", "action": "drain", "drain": True}
    with Running(make()) as running:
        node = Node(running.port, FakeSigner())
        assert node.events(state(gpu(0)), fault)[0] == 200
        assert not running.service.rounds.view.facts()["n1"].healthy
        assert node.events(inventory(gpu(0), seq=3))[0] == 200
        assert running.service.rounds.view.facts()["n1"].healthy
    with Running(make()) as running:
        again = Node(running.port, FakeSigner())
        again.database = node.database
        again.events()
        eventually(lambda: "n1" in running.service.rounds.view.facts())
        assert running.service.rounds.view.facts()["n1"].healthy


def test_gpu_that_did_not_answer_for_a_moment_is_not_treated_as_free(make, slurm):
    slurm.node_rows["n1"] = node_row()
    with Running(make()) as running:
        node = Node(running.port, FakeSigner())
        node.events(state(gpu(0)), start(1, "GPU-0", "3g.40gb", 0, 4, 2))
        (before,) = running.service.rounds.view.facts()["n1"].gpus
        assert before.leases
        node.events(inventory(gpu(0, mig=False, geometry=None, problem="NVML code 999"), seq=3))
        (silent,) = running.service.rounds.view.facts()["n1"].gpus
        assert silent.leases == before.leases
        taken = Layout([*(slot for slot, _ in silent.leases), *silent.zombies])
        assert not any(taken.free_of(slot.placement) for slot in silent.geometry.slots)
        node.events(inventory(gpu(0), seq=4))
        assert "n1" not in running.service.rounds.view.facts(), "until it has sent its whole state"


@pytest.mark.parametrize("found", [True, False], ids=["silent", "lost"])
def test_slices_on_a_gpu_that_its_node_does_not_use_are_known_after_a_restart(make, slurm, found):
    """A node cannot describe such a GPU, or not even find it. Its jobs still have slices that Slurm counts."""
    slurm.node_rows["n1"] = node_row()
    started = start(1, "GPU-1", "3g.40gb", 0, 4, 2)
    silent = [{"uuid": "GPU-1", "minor": 1, "index": 1, "problem": "it is not used until 10:40"}] if found else []
    with Running(make()) as running:
        node = Node(running.port, FakeSigner())
        node.events(state(gpu(0), gpu(1)), started, inventory(gpu(0), *silent, seq=3))
        before = running.service.rounds.view.facts()["n1"]
        assert [len(facts.leases) for facts in before.gpus] == [0, 1]
    with Running(make()) as running:
        again = Node(running.port, FakeSigner())
        again.database = node.database
        again.events()
        facts = eventually(lambda: running.service.rounds.view.facts().get("n1"))
        assert facts == before
        other, taken = facts.gpus
        assert (other.leases, other.zombies) == ((), ())
        assert [(slot.profile.name, run) for slot, run in taken.leases] == [("3g.40gb", (1, 0))]
        used = Layout([*(slot for slot, _ in taken.leases), *taken.zombies])
        assert not any(used.free_of(slot.placement) for slot in taken.geometry.slots)
        again.events({**started, "seq": 4, "kind": "stop", "exit_code": 0})
        (left,) = running.service.rounds.view.facts()["n1"].gpus
        assert left.uuid == "GPU-0"


def test_plan_is_kept_and_one_error_is_logged_while_slurm_is_away(make, slurm, caplog):
    slurm.node_rows["n1"] = node_row()
    with Running(make()) as running:
        agent = Agent(running.port)
        try:
            agent.node.events(state(gpu(0)))
            eventually(lambda: agent.plan)
            before = agent.plan["version"]
            slurm.away = True
            eventually(lambda: running.service.poller.fault.tries > 2)
            assert (
                agent.node.events(
                    {"seq": 2, "ts": 9.0, "kind": "fault", "gpu": None, "what": "x", "action": "none", "drain": False}
                )[0]
                == 200
            )
            assert agent.plan["version"] == before
            slurm.away = False
            eventually(lambda: running.service.health()["ok"])
        finally:
            agent.close()
    messages = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Slurm does not answer: scontrol")]
    assert len(messages) == 1


def test_notes_that_differ_only_in_counts_are_logged_once_per_node(config, slurm, store, signer, caplog):
    rounds = Service(config, client=slurm, open_store=lambda: store, signer=signer).rounds
    for count in range(1, 5):
        for node in ("n1", "n2"):
            rounds._log_report(RoundReport(notes=(f"Slurm counts {count} x 1g.10gb on {node}",)))
    written = [record.getMessage() for record in caplog.records if "Slurm counts" in record.getMessage()]
    assert written == ["Slurm counts 1 x 1g.10gb on n1", "Slurm counts 1 x 1g.10gb on n2"]


def test_unchanged_note_is_logged_once(config, slurm, store, signer, caplog):
    rounds = Service(config, client=slurm, open_store=lambda: store, signer=signer).rounds
    many = tuple(f"n{number} is odd" for number in range(50))
    for _ in range(3):
        rounds._log_report(RoundReport(notes=many))
    rounds._limited_log._begun -= LIMITED_LOG_S
    rounds._log_report(RoundReport(notes=many))
    written = [record.getMessage().partition(" (")[0] for record in caplog.records if "is odd" in record.getMessage()]
    assert sorted(written) == sorted(many), "not all of them in one minute"


def test_why_names_the_gpu_that_is_reserved_for_a_pending_job(make, slurm, config):
    slurm.node_rows["n1"] = node_row()
    slurm.queue[1] = running_job(1, "gres/mig:7g.80gb:1")
    slurm.queue[2] = pending(2, "gres/mig:7g.80gb:1")
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"ALLOCATED"}), {"7g.80gb": 1, "none": 6}, {"7g.80gb": 1}, ("gpu",))
    with Running(make()) as running:
        agent = Agent(running.port)
        try:
            agent.node.events(state(gpu(0)), start(1, "GPU-0", "7g.80gb", 0, 8, 2))

            def why():
                return json.loads(QuerySite(config).daemon("/v1/why/2"))["why"]

            eventually(lambda: why().startswith("reserved: 7g.80gb"))
            assert "GPU-0 on n1" in why()
        finally:
            agent.close()
