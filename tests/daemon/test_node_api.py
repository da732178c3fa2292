"""The node API over a real socket: who is authenticated, what is accepted, and what nodes receive."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import threading

import pytest

from slurm_migbatch.config import loads
from slurm_migbatch.daemon import messages, query_supervisor
from slurm_migbatch.daemon.audit import Auditor
from slurm_migbatch.daemon.gate import Refused
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.daemon.scraping import Scraping
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.node.auth import AuthError
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.slurm.client import JobRow, NodeRow
from tests.support.daemon_fakes import FakeSigner, Node, gpu, inventory, state
from tests.support.daemon_running import Running
from tests.support.waiting import eventually

TOKEN = b"0123456789abcdef" * 4
INVENTORY = {"seq": 1, "ts": 1.0, "kind": "inventory", "gpus": [{"uuid": "GPU-1"}]}


def test_events_that_are_sent_twice_are_recorded_once(node, store):
    assert node.events(INVENTORY, {"seq": 2, "ts": 2.0, "kind": "boot", "boot_id": "b"}) == (200, {"acked": 2})
    assert node.events(INVENTORY, {"seq": 2, "ts": 2.0, "kind": "boot", "boot_id": "b"}) == (200, {"acked": 2})
    assert len(store.events) == 2


def test_events_after_a_gap_are_not_acknowledged(node):
    late = {"seq": 3, "ts": 1.0, "kind": "fault", "what": "x"}
    assert node.events(INVENTORY, late) == (200, {"acked": 1})
    assert node.events({"seq": 2, "ts": 1.0, "kind": "fault", "what": "y"}) == (200, {"acked": 3})


def test_answer_to_events_has_the_fields_that_the_node_reads(node):
    """`node/controller_sync.py` sends all that it holds if `told` is false; without the field it never would."""
    message = {"node": "n1", "journal": "ab", "boot_id": "b", "events": [INVENTORY]}
    status, answer = node.send("/node/v1/events", json.dumps(message).encode())
    assert (status, answer) == (200, {"acked": 1, "database": "d1", "told": False})


def test_a_wrong_signature_is_refused_before_the_body_is_read_as_json(running, store, caplog):
    status, answer = Node(running.port, FakeSigner(key=b"other")).send("/node/v1/events", b"not json")
    assert (status, answer) == (401, {"error": "wrong signature"})
    assert store.events == {} and "compare Auth" in caplog.text


def test_replays_are_refused(node, store):
    body = json.dumps({"node": "n1", "journal": "ab", "boot_id": "b", "events": [INVENTORY]}).encode()
    credential = node.credential("/node/v1/events", body)
    assert node.send("/node/v1/events", body, credential=credential)[0] == 200
    assert node.send("/node/v1/events", body, credential=credential) == (401, {"error": "replayed credential"})


def test_credential_is_valid_for_its_own_path_only(node):
    body = json.dumps({"node": "n1", "have": 7, "wait": 0}).encode()
    credential = node.credential("/node/v1/plan", body)
    assert node.send("/node/v1/events", body, credential=credential)[0] == 401


def test_ordinary_users_are_refused(running):
    assert Node(running.port, FakeSigner(uid=1000)).plan() == (401, {"error": "uid 1000 may not speak for a node"})


def test_request_without_a_credential_is_refused(running):
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    connection.request("POST", "/node/v1/plan", b"{}")
    assert connection.getresponse().status == 401
    connection.close()


FAULT = {"level": "FAIL", "subject": "Prolog", "text": "is missing", "advice": "install it"}


def test_findings_of_a_node_are_shown_to_root_only(node, running, config):
    status, answer = node.send("/node/v1/findings", {"node": "n1", "sent": 1.0, "findings": [FAULT]})
    assert status == 200 and answer["now"] > 1.0
    answer = json.loads(QuerySite(config).daemon("/v1/findings"))
    (found,) = answer["nodes"].items()
    assert 0 <= answer["age"] < 300
    assert found[0] == "n1" and found[1]["findings"] == [FAULT] and found[1]["ahead"] < -1e6
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    connection.request("GET", "/v1/findings")
    assert connection.getresponse().status == 403
    connection.close()


def test_plans_are_shown_to_root_on_this_host_only(running, config):
    running.service.node_plans.publish("n1", {"GPU-a": [("1g.10gb", 0, 1)]})
    assert json.loads(QuerySite(config).daemon("/v1/plans"))["plans"]["n1"] == {"GPU-a": [["1g.10gb", 0, 1]]}
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    connection.request("GET", "/v1/plans")
    assert connection.getresponse().status == 403
    connection.close()


def test_malformed_findings_of_a_node_are_refused(node):
    for findings in ([FAULT] * 65, [{**FAULT, "level": "ok"}], [{**FAULT, "text": "x" * 501}], [1], None):
        assert node.send("/node/v1/findings", {"node": "n1", "sent": 1.0, "findings": findings})[0] == 400
    assert Node(node.port, FakeSigner(key=b"other")).send("/node/v1/findings", {})[0] == 401


def test_large_bodies_are_refused(node, store):
    status, answer = node.send("/node/v1/events", b" " * 20_000)
    assert status == 413
    assert "16384 bytes" in answer["error"]


def test_long_request_for_a_plan_is_refused(node):
    """They are read in the event loop, where all other requests wait meanwhile."""
    message = {"node": "n1", "have": 0, "wait": 0, "more": [{}] * 2000}
    status, answer = node.send("/node/v1/plan", message)
    assert (status, answer["error"].partition(",")[2]) == (400, " at most 4096 are accepted")
    assert node.plan()[0] == 200


def test_messages_are_read_in_their_own_threads(node, monkeypatch):
    """Not in the event loop, nor in the threads in which rounds are made."""
    readers = []

    def noted(read):
        return lambda *given: readers.append(threading.current_thread().name) or read(*given)

    for name in ("read_findings", "read_events"):
        monkeypatch.setattr(messages, name, noted(getattr(messages, name)))
    assert node.send("/node/v1/findings", {"node": "n1", "sent": 1.0, "findings": [FAULT]})[0] == 200
    assert node.events(INVENTORY)[0] == 200
    assert [name.rpartition("_")[0] for name in readers] == ["node-read"] * 2


def test_bodies_of_unknown_length_are_refused(running):
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    try:
        connection.request(
            "POST",
            "/node/v1/plan",
            (b"x" * 4096 for _ in range(64)),
            {"Authorization": "MigBatch t c", "X-Migbatch-Node": "n1", "X-Migbatch-Digest": "0" * 64},
            encode_chunked=True,
        )
        status = connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        status = 411
    finally:
        connection.close()
    assert status == 411


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"{",
        b"[" * 5000,
        {"node": "../etc", "journal": "ab", "boot_id": "b", "events": []},
        {"node": "n1", "journal": "; drop", "boot_id": "b", "events": []},
        {"node": "n1", "journal": "ab", "boot_id": "b", "events": [1]},
        {"node": "n1", "journal": "ab", "boot_id": "b", "events": [{"seq": 0, "kind": "boot"}]},
        {"node": "n1", "journal": "ab", "boot_id": "b", "events": [{"seq": 1}]},
        {"node": "n1", "journal": "ab", "boot_id": "b", "events": [{"seq": n, "kind": "x"} for n in range(1, 502)]},
        {"node": "n1", "journal": "ab", "boot_id": "b"},
    ],
)
def test_malformed_messages_are_refused_with_an_error(node, store, body):
    status, answer = node.send("/node/v1/events", body)
    assert status == 400
    assert answer["error"]
    assert store.events == {}


@pytest.mark.parametrize("body", [{"have": -1}, {"have": True}, {"have": "1"}, {"wait": "x"}, {"wait": -1}])
def test_malformed_requests_for_a_plan_are_refused(node, body):
    assert node.send("/node/v1/plan", {"node": "n1", **body})[0] == 400


def test_events_that_cannot_be_recorded_are_answered_with_422(node, store, caplog):
    status, answer = node.events({"seq": 1, "ts": 1.0, "kind": "poison"})
    assert status == 422
    assert "means nothing" in answer["error"]
    assert "means nothing" in caplog.text and "compare Auth" not in caplog.text


def test_other_paths_and_methods_are_refused(node):
    assert node.send("/", {})[0] == 404
    assert node.send("/node/v1/plan", b"", method="GET")[0] == 405


def test_plans_are_pulled_acknowledged_and_pushed(running, node):
    node_plans = running.service.node_plans
    assert node.plan() == (200, {"version": 0})
    first = node_plans.publish("n1", {"GPU-1": [("1g.10gb", 0, 1)]})
    status, plan = node.plan()
    assert (status, plan) == (200, {"version": first, "gpus": {"GPU-1": [["1g.10gb", 0, 1]]}})
    assert node_plans.acked("n1") == 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        poll = pool.submit(node.plan, first, 25)
        assert node_plans.wait_acked("n1", first, 120)
        second = node_plans.publish("n1", {"GPU-1": []})
        assert poll.result(120)[1]["version"] == second
    assert node_plans.silence("n1") < 120


def test_long_polls_end_when_the_service_stops(config, slurm, store, signer):
    from slurm_migbatch.daemon.service import Service
    from tests.support.daemon_running import Running

    with concurrent.futures.ThreadPoolExecutor() as pool:
        with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
            poll = pool.submit(Node(running.port, FakeSigner()).plan, 0, 25)
            eventually(lambda: running.service.node_plans.acked("n1") == 0 and running.service.node_plans.nodes())
        assert poll.result(120) == (200, {"version": 0})
    assert store.closed


def test_a_node_that_polls_again_while_the_service_stops_gets_no_error(config, slurm, store, signer):
    """As agents do once they are answered. What the service ends first may take a while: the submit service does."""

    async def retention():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)

    def poll(node):
        with contextlib.suppress(OSError):  # the service has stopped
            while True:
                statuses.append(node.plan(0, 25)[0])

    statuses = []
    service = Service(config, client=slurm, open_store=lambda: store, signer=signer)
    service.retention.run = retention
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with Running(service) as running:
            polling = pool.submit(poll, Node(running.port, FakeSigner()))
            eventually(service.node_plans.nodes)
        polling.result(120)
    assert set(statuses) == {200}


def test_events_sent_while_the_database_is_locked_are_not_lost(running, node, store):
    store.locked = True
    waiting = threading.Thread(target=node.events, args=(INVENTORY,))
    waiting.start()
    eventually(lambda: not running.service.health()["ok"])
    store.locked = False
    waiting.join(120)
    assert list(store.events) == [("n1", "ab12", 1)]
    eventually(lambda: running.service.health()["ok"])


def test_many_messages_of_one_node_do_not_delay_those_of_others(running, node, store, signer):
    """Each of its messages may take seconds, and the database takes one after the other."""
    store.locked = True
    other = Node(running.port, signer, "n2")
    sent = [{"seq": seq, "ts": 1.0, "kind": "fault", "what": "x"} for seq in range(1, 7)]
    with concurrent.futures.ThreadPoolExecutor(len(sent) + 1) as pool:
        many = [pool.submit(node.events, event) for event in sent]
        eventually(lambda: not running.service.health()["ok"])
        eventually(lambda: len(running.service.api.connections) >= len(sent))
        other_message = pool.submit(other.events, INVENTORY)
        eventually(lambda: "n2" in running.service.node_plans.nodes())
        store.locked = False
        assert other_message.result()[0] == 200 and {future.result()[0] for future in many} == {200}
    assert [name for name, _, _ in store.events].index("n2") <= 1


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_host_that_a_client_names_changes_no_path(running):
    """Releases of starlette before 1.8 make a URL of it: with it, the metrics grew with every name."""
    for host in ("a/1/", "a?x="):
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
        connection.request("POST", "/node/v1/events", b"{}", {"Host": host})
        assert connection.getresponse().status == 401
        connection.close()
    counted = [line for line in get(running.port, "/metrics")[1].splitlines() if "_node_requests_total{" in line]
    assert counted == ['migbatch_node_requests_total{path="/node/v1/events",status="401"} 2.0']


def test_health_and_metrics_follow_slurm_and_nodes(running, node, slurm):
    eventually(lambda: running.service.health()["ok"])
    checks = '{"slurm":"ok","database":"ok","supply":"ok","submit":"ok","dispatch":"ok"}'
    assert get(running.port, "/healthz") == (200, f'{{"ok":true,"checks":{checks}}}')
    node.events(INVENTORY)
    slurm.queue[5] = JobRow(5, state="PENDING", tasks=3)
    eventually(lambda: 'migbatch_jobs{state="PENDING"} 3' in get(running.port, "/metrics")[1])
    text = get(running.port, "/metrics")[1]
    assert 'migbatch_node_events_total{kind="inventory"} 1.0\n' in text
    assert 'migbatch_node_requests_total{path="/node/v1/events",status="200"} 1.0\n' in text
    slurm.away = True
    eventually(lambda: get(running.port, "/healthz")[0] == 503)
    assert json.loads(get(running.port, "/healthz")[1])["checks"]["slurm"] == "failing", "states only"
    slurm.away = False
    eventually(lambda: get(running.port, "/healthz")[0] == 200)


def test_health_shows_that_no_user_queries_are_answered(config, slurm, store, signer, monkeypatch, tmp_path):
    """Where its port is taken or munge is missing, the process of the query service ends again and again."""
    (tmp_path / "query_program.py").write_text("print('{\"serving\": 1}', flush=True)\ninput()\ninput()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(query_supervisor, "_PROGRAM", "no_such_program")
    site = dataclasses.replace(config, query=dataclasses.replace(config.query, enabled=True))
    with Running(Service(site, client=slurm, open_store=lambda: store, signer=signer)) as running:
        eventually(lambda: running.service.health()["checks"]["query"] == "failing")
        eventually(lambda: 'migbatch_healthy{part="query"} 0.0' in get(running.port, "/metrics")[1])
        monkeypatch.setattr(query_supervisor, "_PROGRAM", "query_program")
        eventually(lambda: running.service.health()["checks"]["query"] == "ok")


def test_queue_is_recorded_in_the_database_when_it_changes(running, slurm, store):
    slurm.queue[7] = JobRow(7, user="ann", state="PENDING")
    eventually(lambda: store.jobs.get(7, {}).get("state") == "PENDING")
    store.locked = True
    slurm.queue[7] = JobRow(7, user="ann", state="RUNNING")
    eventually(lambda: running.service.writer.fault.open)
    slurm.queue[7] = JobRow(7, user="ann", state="COMPLETING")
    store.locked = False
    eventually(lambda: store.jobs[7]["state"] == "COMPLETING")
    del slurm.queue[7]
    eventually(lambda: store.jobs[7]["state"] == "GONE")


def test_end_state_of_a_job_that_left_the_queue_is_queried(running, slurm, store):
    slurm.queue[7] = JobRow(7, user="ann", state="RUNNING")
    eventually(lambda: 7 in store.jobs)
    slurm.cancel(7)
    eventually(lambda: store.jobs[7]["state"] == "CANCELLED")
    assert store.jobs[7]["exit_code"] == "0:15"
    assert store.jobs[7]["user"] == "ann"


def start(job, *slices, seq=2, restart=0):
    """`slices` as (profile, start, size)."""
    held = [{"gpu": "GPU-0", "profile": p, "start": at, "size": size} for p, at, size in slices]
    return {"seq": seq, "ts": 1.0, "kind": "start", "job": job, "restart": restart, "slices": held}


def test_end_state_of_a_job_never_seen_in_the_queue_is_queried(running, node, slurm, store):
    """It was shorter than the interval between two polls; only its node reports it, and cannot know of the scancel."""
    slurm.ends[9] = {"job_id": 9, "state": "CANCELLED", "exit_code": "0:15", "restarts": 0}
    run = start(9, ("1g.10gb", 0, 1))
    node.events(inventory(gpu(0)), run, {**run, "seq": 3, "kind": "stop", "exit_code": 0})
    eventually(lambda: store.jobs.get(9, {}).get("state") == "CANCELLED")


def test_a_job_that_holds_more_than_slurm_allocated_is_cancelled(running, node, slurm, caplog):
    slurm.queue[1] = JobRow(1, state="RUNNING", nodes=("n1",), gres="gres/mig:1g.10gb:1")
    slurm.queue[2] = JobRow(2, state="RUNNING", nodes=("n1",), gres="gres:mig:1g.10gb:2")
    node.events(
        state(gpu(0)),
        start(1, ("3g.40gb", 0, 4)),
        start(2, ("1g.10gb", 4, 1), ("1g.10gb", 5, 1), seq=3),
    )
    eventually(lambda: slurm.cancelled)
    assert slurm.cancelled == ["1"]
    ((job, fields),) = slurm.updates
    assert job == "1"
    assert "1 x 3g.40gb on n1" in fields["AdminComment"]
    assert "job 1 holds 1 x 3g.40gb" in caplog.text


def test_only_the_array_task_that_holds_too_much_is_cancelled(running, node, slurm):
    """The task that started last has the array's own id, which means all of its tasks to Slurm's commands."""
    task = JobRow(1, array_job=1, array_task="3", state="RUNNING", nodes=("n1",), gres="gres/mig:1g.10gb:1")
    slurm.queue[1] = task
    node.events(state(gpu(0)), start(1, ("3g.40gb", 0, 4)))
    eventually(lambda: slurm.cancelled)
    assert slurm.cancelled == ["1_3"] and [job for job, _ in slurm.updates] == ["1_3"]


def test_single_poll_that_disagrees_cancels_no_job():
    view = LiveView()
    view.load({"n1": [gpu(0)]}, ())
    view.apply("n1", [start(1, ("1g.10gb", 0, 1))])
    odd = [JobRow(1, state="RUNNING", nodes=("n1",), gres="")]
    good = [JobRow(1, state="RUNNING", nodes=("n1",), gres="gres:mig:1g.10gb:1")]
    auditor = Auditor()
    for rows in (odd, good, odd, [], odd):
        assert auditor.check(view.facts(), rows) == []
    assert [e.job for e in auditor.check(view.facts(), odd)] == [1]
    assert auditor.check(view.facts(), odd) == []


def test_no_job_is_cancelled_when_slurm_shows_the_slices_of_none(caplog):
    """A later release may write the GRES of jobs in an unknown form."""
    view = LiveView()
    view.load({"n1": [gpu(0)]}, ())
    view.apply("n1", [start(1, ("1g.10gb", 0, 1))])
    odd = [JobRow(1, state="RUNNING", nodes=("n1",), gres="gres/mig/1g.10gb=1")]
    in_use = [NodeRow("n1", frozenset({"MIXED"}), {"1g.10gb": 7}, {"1g.10gb": 1})]
    auditor = Auditor()
    for _ in range(4):
        assert auditor.check(view.facts(), odd, in_use) == []
    assert caplog.text.count("squeue shows no slices of jobs") == 1
    others = [*odd, JobRow(2, state="RUNNING", nodes=("n1",), gres="gres/mig:1g.10gb:1")]
    assert [auditor.check(view.facts(), others, in_use) for _ in range(2)][1][0].job == 1
    unused = [NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7}, {"1g.10gb": 0, "none": 1})]
    auditor = Auditor()
    assert [auditor.check(view.facts(), odd, unused) for _ in range(2)][1][0].job == 1


@pytest.mark.parametrize(
    ("token", "address", "given", "status"),
    [
        (b"", None, "", 0),
        (b"", "127.0.0.1", "", 0),
        (b"", "::1", "", 0),
        (b"", "::ffff:127.0.0.1", "", 0),  # with [node_api] listen = "::"
        (b"", "::ffff:10.0.0.7", "", 403),
        (b"", "10.0.0.7", "", 403),
        (b"", "10.0.0.7", "Bearer ", 403),
        (b"", "", "", 403),
        (TOKEN, "127.0.0.1", "", 0),
        (TOKEN, "10.0.0.7", "", 401),
        (TOKEN, "10.0.0.7", "Bearer " + "x" * 64, 401),
        (TOKEN, "10.0.0.7", "Basic " + TOKEN.decode(), 401),
        (TOKEN, "10.0.0.7", "Bearer " + TOKEN.decode(), 0),
        (TOKEN, "10.0.0.7", "Bearer \u00e9", 401),
    ],
)
def test_metrics_are_served_to_this_host_and_with_the_token(token, address, given, status):
    headers = {"authorization": given} if given else {}
    try:
        Scraping(token).check(address, headers)
    except Refused as refused:
        assert refused.status == status
    else:
        assert status == 0


def test_token_file_must_be_long_enough_and_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "token"
    config = loads(f"[node_api]\nmetrics_token_file = '{path}'\n")
    with pytest.raises(AuthError, match="cannot be opened"):
        Scraping.of(config)
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o640)
    with pytest.raises(AuthError, match="by its owner only"):
        Scraping.of(config)
    path.chmod(0o600)
    assert Scraping.of(config) == Scraping(TOKEN)
    path.write_bytes(b"short\n")
    with pytest.raises(AuthError, match="shorter"):
        Scraping.of(config)
