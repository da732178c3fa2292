"""Sending events and receiving plans: with a controller that checks requests, and with one that answers falsely."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slurm_migbatch.daemon import messages
from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.node import auth, exits, gpu_faults, plan
from slurm_migbatch.node.controller_client import ControllerClient, ControllerError
from slurm_migbatch.node.controller_sync import ControllerSync
from slurm_migbatch.node.deadline import Deadline
from slurm_migbatch.node.journal import NAME, Corrupt, JournalError
from slurm_migbatch.node.state import state
from slurm_migbatch.testbed.proc import wait_until
from tests.support.nodes import BOB


class Controller:
    """A controller in a thread. `answers` maps a path to a function from message to (status, message)."""

    def __init__(self, signer):
        self.signer, self.reply_signer = signer, signer
        self.seen = []
        self.answers = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                scheme, kind, credential = self.headers["Authorization"].split(" ")
                assert (scheme, kind) == ("MigBatch", outer.signer.scheme)
                node, digest = self.headers[auth.NODE_HEADER], self.headers[auth.DIGEST_HEADER]
                assert digest == auth.digest_of(body)
                outer.signer.verify(credential, auth.request_payload("POST", self.path, node, digest), node)
                message = json.loads(body)
                outer.seen.append((self.path, message))
                status, answer = outer.answers[self.path](message)
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header(
                    auth.SIGNATURE_HEADER, outer.reply_signer.sign(auth.response_payload(credential, text), node)
                )
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("a" * 64)
    path.chmod(0o600)
    return path


@pytest.fixture
def controller(token):
    controller = Controller(auth.TokenSigner(str(token)))
    yield controller
    controller.close()


@pytest.fixture
def served(new_node, controller, token):
    """A node that has a controller, and its ControllerSync."""
    node = new_node(Controller=controller.url, Auth="token", TokenFile=token, PlanWait=0)
    controller_sync = ControllerSync(node.config, node.executor.gpus, threading.Event())
    return node, controller_sync


def test_events_are_deleted_only_after_the_controller_acknowledges_them(served, controller):
    node, controller_sync = served
    node.prolog(1, "[mig:1g.10gb:1]")
    sent = node.events()
    controller.answers["/node/v1/events"] = lambda message: (500, {"error": "later"})
    with pytest.raises(ControllerError, match="500"):
        controller_sync.ship(node.journal)
    assert node.events() == sent
    controller.answers["/node/v1/events"] = lambda message: (200, {"acked": sent[0]["seq"]})
    assert controller_sync.ship(node.journal)
    assert node.events() == sent[1:]
    controller.answers["/node/v1/events"] = lambda message: (200, {"acked": message["events"][-1]["seq"]})
    assert controller_sync.ship(node.journal) and not controller_sync.ship(node.journal)
    message = controller.seen[-1][1]
    assert message["node"] == "n1" and message["journal"] == node.journal.identity
    assert message["boot_id"] == node.machine.dump()["boot_id"] and message["events"] == sent[1:]
    node.epilog(1)
    assert node.events()[0]["seq"] > sent[-1]["seq"], "numbers are never used again"


def test_a_plan_is_acknowledged_only_once_it_is_on_disk(served, controller):
    node, controller_sync = served
    gpu = node.executor.gpus.listed()[0].uuid
    wire = {"version": 7, "gpus": {gpu: [["1g.10gb", 0, 1]]}}
    controller.answers["/node/v1/plan"] = lambda message: (200, wire if message["have"] < 7 else {"version": 7})
    assert controller_sync.pull(0) == 7
    assert plan.load(node.config.state_dir).version == 7
    assert controller_sync.pull(7) == 7
    assert [message["have"] for _, message in controller.seen] == [0, 7]


def test_plan_that_was_deleted_is_not_acknowledged_again(served, controller):
    node, controller_sync = served
    controller.answers["/node/v1/plan"] = lambda message: (200, {"version": 7, "gpus": {}})
    controller_sync._plans()
    (node.root / "state" / plan.NAME).unlink()
    controller_sync._plans()
    assert [message["have"] for _, message in controller.seen] == [0, 0]
    assert plan.load(node.config.state_dir).version == 7


@pytest.mark.parametrize("answer", [b"[]", b"{}", b"nonsense", b'{"version": "x", "gpus": {}}'])
def test_malformed_plan_is_rejected(served, controller, answer):
    node, controller_sync = served
    node.prolog(1, "[mig:1g.10gb:1]")
    controller.answers["/node/v1/plan"] = lambda message: (200, answer)
    with pytest.raises((ControllerError, ValueError)):
        controller_sync.pull(0)
    assert plan.load(node.config.state_dir).version == 0


def test_plan_with_a_wrong_signature_is_rejected(served, controller, tmp_path):
    controller_sync = served[1]
    other = tmp_path / "other"
    other.write_text("b" * 64)
    other.chmod(0o600)
    controller.reply_signer = auth.TokenSigner(str(other))
    controller.answers["/node/v1/plan"] = lambda message: (200, {"version": 9, "gpus": {}})
    with pytest.raises(ControllerError, match="does not come from the controller"):
        controller_sync.pull(0)


def test_unreachable_controller_raises_controller_error(token):
    link = ControllerClient(["http://127.0.0.1:9"], auth.TokenSigner(str(token)), "n1", timeout=1.0)
    with pytest.raises(ControllerError, match=r"127\.0\.0\.1"):
        link.post("/node/v1/events", {})


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 500 no\r\nContent-Length: 30\r\n\r\nbad\n\x1b]0;x\x07 node n2: all is well",
        b"\x1b[2J\x0cHTTP is not spoken here\r\n\r\n",
    ],
    ids=["refusal", "no status"],
)
def test_reply_of_an_unknown_server_is_reported_as_one_printable_line(token, raw):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def answer():
            link, _ = server.accept()
            with link:
                link.recv(65536)
                link.sendall(raw)

        stranger = threading.Thread(target=answer)
        stranger.start()
        with pytest.raises(ControllerError) as refused:
            ControllerClient([url], auth.TokenSigner(str(token)), "n1", timeout=5).post("/node/v1/events", {})
        stranger.join()
    assert str(refused.value).isprintable()


def test_inventory_is_reported_once(served, controller):
    node, controller_sync = served
    node.prolog(1, "[mig:1g.10gb:1]")
    controller_sync._inventory(node.journal)
    controller_sync._inventory(node.journal)
    (event,) = node.events("inventory")
    (gpu,) = event["gpus"]
    assert gpu["mig"] is True and gpu["geometry"]["profiles"] and gpu["uuid"].startswith("GPU-")


def test_sync_threads_ship_events_and_stop_on_request(served, controller):
    node, _ = served
    node.prolog(1, "[mig:1g.10gb:1]")
    got = threading.Event()

    def events(message):
        got.set()
        return 200, {"acked": message["events"][-1]["seq"]}

    controller.answers["/node/v1/events"] = events
    controller.answers["/node/v1/plan"] = lambda message: (200, {"version": message["have"]})
    stopping = threading.Event()
    controller_sync = ControllerSync(node.config, node.executor.gpus, stopping)
    threads = controller_sync.threads()
    for thread in threads:
        thread.start()
    assert got.wait(120)
    stopping.set()
    controller_sync.stop()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_threads_that_start_at_the_same_time_share_one_client(served, monkeypatch):
    """`stop` interrupts the requests of that client; a request for a plan waits up to half a minute."""
    _, controller_sync = served

    def slowly(*arguments, **options):
        time.sleep(0.2)
        return auth.make_signer(*arguments, **options)

    monkeypatch.setattr("slurm_migbatch.node.controller_sync.make_signer", slowly)
    found = []
    threads = [threading.Thread(target=lambda: found.append(controller_sync._controller())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_unexpected_error_does_not_end_the_findings_thread(served, caplog):
    """The node's own checks read many places; a failure of one must not keep the others from being reported."""
    (node, _), found = served, []

    def checks(_gpus):
        found.append(1)
        raise KeyError("odd")

    stopping = threading.Event()
    sync = ControllerSync(node.config, node.executor.gpus, stopping, checks)
    thread = next(thread for thread in sync.threads() if thread.name == "findings")
    thread.start()
    wait_until(lambda: len(found) > 1, 60.0, "the second attempt")
    stopping.set()
    thread.join()
    assert "findings: KeyError('odd'); will be tried again" in caplog.text


def test_gpu_without_a_geometry_does_not_invalidate_the_inventory(new_node, monkeypatch):
    """The controller refuses a GPU in MIG mode without a geometry, and with it the whole message of the node."""
    node = new_node(gpus=["h100-80gb", "h100-80gb"])
    gpus, real = node.executor.gpus, node.executor.gpus.geometry
    bad, good = gpus.listed()

    def geometry(gpu):
        if gpu is bad:
            raise DriverError(999, "unknown error")
        return real(gpu)

    monkeypatch.setattr(gpus, "geometry", geometry)
    sync = ControllerSync(node.config, gpus, threading.Event())
    sync._inventory(node.journal)
    body = {"node": "n1", "journal": "ab", "boot_id": "cd", "events": node.events("inventory")}
    (event,) = messages.read_events("n1", json.dumps(body).encode()).events
    assert event.kind == "inventory", event.fields
    assert [(gpu["uuid"], gpu.get("mig")) for gpu in event.fields["gpus"]] == [(bad.uuid, None), (good.uuid, True)]
    assert "unknown error" in event.fields["gpus"][0]["problem"]


def test_inventory_is_reported_again_after_a_drain(served, controller):
    """The controller offers nothing on a drained node, even after Slurm has resumed it, until a new inventory."""
    node, controller_sync = served
    answers(controller, "d1", True)
    controller_sync._inventory(node.journal)
    for drain, inventories in ((False, 0), (True, 1)):
        with node.journal.write():
            node.journal.event("fault", {"gpu": None, "what": "x", "action": "drain", "drain": drain})
        assert controller_sync.ship(node.journal)
        controller_sync._inventory(node.journal)
        assert len(node.events("inventory")) == inventories


def test_withdrawn_gpu_is_reported_right_after_its_fault(served, controller):
    """Until then the controller offers its slices."""
    node, controller_sync = served
    answers(controller, "d1", True)
    controller_sync._events()
    (gpu, *_) = node.executor.gpus.listed()
    assert gpu_faults.count(node.executor.paths, gpu.uuid, "it hangs", 1, Deadline(1.0)) is not None
    with node.journal.write():
        node.journal.event("fault", {"gpu": gpu.uuid, "what": "it hangs", "action": "requeue", "drain": False})
    controller_sync._events()
    controller_sync._events()
    sent = [event for _, message in controller.seen for event in message["events"] if event["kind"] == "inventory"]
    assert [event["gpus"][0].get("mig") for event in sent] == [True, None]
    assert "it hangs" in sent[-1]["gpus"][0]["problem"]


def test_large_events_are_sent_in_several_messages(served, controller):
    """An agent that restarts often while the controller is unavailable spools its inventory each time."""
    node, controller_sync = served
    answers(controller, "d1", True)
    with node.journal.write():
        for _ in range(400):
            node.journal.event("inventory", {"gpus": [{"uuid": "GPU-1", "problem": "x" * 4000}] * 8})
    spooled = [event["seq"] for event in node.events()]
    while controller_sync.ship(node.journal):
        pass
    messages = [message for _, message in controller.seen]
    assert [event["seq"] for message in messages for event in message["events"]] == spooled
    assert max(len(json.dumps(message)) for message in messages) < 1 << 20
    with node.journal.write():
        node.journal.event("state", {"runs": ["x" * 4000] * 500})
    assert controller_sync.ship(node.journal), "one that is larger is sent alone"


def answers(controller, database, told, acked=None):
    """Set how the controller answers events from now on."""
    controller.answers["/node/v1/events"] = lambda message: (
        200,
        {
            "acked": acked
            if acked is not None
            else max((e["seq"] for e in message["events"]), default=message["acked"]),
            "database": database,
            "told": told,
        },
    )


def test_node_reports_its_database_and_last_acknowledged_event(served, controller):
    node, controller_sync = served
    node.prolog(1, "[mig:1g.10gb:1]")
    last = node.events()[-1]["seq"]
    answers(controller, "d1", True)
    assert controller_sync.ship(node.journal)
    assert not controller_sync.ship(node.journal), "nothing to send, and nothing sent"
    assert not controller_sync.ship(node.journal, hello=True)
    first, second = (message for _, message in controller.seen)
    assert (first["database"], first["acked"]) == ("", 0)
    assert (second["database"], second["acked"], second["events"]) == ("d1", last, [])


def test_node_sends_its_full_state_once_to_a_new_database(served, controller):
    """The database was lost with all the events of this node, and they are no longer in the spool."""
    node, controller_sync = served
    node.prolog(1, "[mig:1g.10gb:1]")
    node.prolog(2, "[mig:2g.20gb:1]")
    node.epilog(2)
    answers(controller, "d1", True)
    while controller_sync.ship(node.journal):
        pass
    recorded = node.journal.recorded[1]
    answers(controller, "d2", False, acked=0)
    controller_sync.ship(node.journal, hello=True)
    assert node.journal.recorded == ("d2", 0)
    (state,) = node.events()
    assert state["kind"] == "state" and state["seq"] > recorded
    (run,) = state["runs"]
    (held,) = [row for row in node.journal.slices() if row.state == "held"]
    assert (run["job"], run["restart"], run["slices"]) == (1, 0, [held.event_fields])
    assert run["since"] == pytest.approx(held.since, abs=0.01)
    assert [(place["profile"], place["size"]) for place in state["idle"]] == [("2g.20gb", 2)]
    assert state["gpus"][0]["geometry"]["profiles"]
    node.prolog(3, "[mig:1g.10gb:1]")
    controller_sync._state_due = 0.0
    assert controller_sync.ship(node.journal)
    assert [event["kind"] for event in node.events() if event["kind"] == "state"] == ["state"], "one waits already"
    assert controller.seen[-1][1]["events"][0]["seq"] == state["seq"]
    answers(controller, "d2", True)
    assert controller_sync.ship(node.journal)
    assert node.events() == [] and node.journal.recorded == ("d2", controller.seen[-1][1]["events"][-1]["seq"])


def test_no_state_is_sent_from_a_new_journal_before_it_is_filled(served, controller):
    """The controller would take the slices of running jobs for free."""
    node, controller_sync = served
    node.prolog(1, "[mig:1g.10gb:1]")
    controller.answers["/node/v1/events"] = lambda message: (
        200,
        {"acked": message["acked"], "database": "d1", "told": message["database"] == "d1"},
    )
    for path in (node.root / "state").glob("journal.db*"):
        path.unlink()
    for _ in range(2):
        with contextlib.suppress(JournalError):
            controller_sync._events()
    assert node.epilog(404)[0] == exits.OK
    for _ in range(3):
        controller_sync._events()
    states = [event for _, message in controller.seen for event in message["events"] if event["kind"] == "state"]
    assert [[run["job"] for run in state["runs"]] for state in states[:1]] == [[1]]


def test_spool_that_cannot_be_read_is_replaced_while_the_agent_runs(served, controller):
    """No hook may read the damaged page: a node whose events do not arrive gets no jobs."""
    node, controller_sync = served
    node.prolog(1, "[mig:1g.10gb:1]")
    with node.journal.write():
        for number in range(500):
            node.journal.event("fault", {"gpu": None, "what": "x" * 200, "number": number})
    node.journal.close()
    path = node.root / "state" / NAME
    with path.open("r+b") as file:
        file.seek(file.read().index(b'"number":100}') // 4096 * 4096)
        file.write(b"garbage!" * 512)
    answers(controller, "d1", True, acked=0)
    with pytest.raises(Corrupt):
        controller_sync._events()
    controller_sync._events()
    kinds = [event["kind"] for _, message in controller.seen for event in message["events"]]
    assert "fault" in kinds and list(path.parent.glob("*.damaged-*"))
    assert node.epilog(1) == (exits.OK, "job 1 run 0: released")


def test_repeated_requests_for_the_full_state_are_rate_limited(served, controller):
    node, controller_sync = served
    answers(controller, "d1", False)
    for _ in range(5):
        controller_sync.ship(node.journal, hello=True)
    assert sum(e["kind"] == "state" for _, message in controller.seen for e in message["events"]) <= 1


def test_node_reports_its_database_after_the_controller_was_unavailable(served, controller, monkeypatch):
    """At once: it is not due otherwise."""
    monkeypatch.setattr("slurm_migbatch.node.controller_sync.HELLO_EVERY_S", 1e9)
    node, _ = served
    node.prolog(1, "[mig:1g.10gb:1]")
    stopping, refused, hello_received = threading.Event(), threading.Event(), threading.Event()
    controller_sync = ControllerSync(node.config, node.executor.gpus, stopping)
    controller_sync._hello_due = float("inf")

    def unavailable(message):
        refused.set()
        return 500, {}

    def hello(message):
        if refused.is_set() and not message["events"]:
            hello_received.set()
        return 200, {
            "acked": max((e["seq"] for e in message["events"]), default=message["acked"]),
            "database": "d1",
            "told": True,
        }

    controller.answers["/node/v1/events"] = hello
    controller.answers["/node/v1/plan"] = unavailable
    threads = controller_sync.threads()
    for thread in threads:
        thread.start()
    assert refused.wait(120)
    controller.answers["/node/v1/plan"] = lambda message: (200, {"version": message["have"]})
    assert hello_received.wait(120)
    stopping.set()
    controller_sync.stop()
    for thread in threads:
        thread.join(120)


def test_client_tries_the_next_controller_when_one_is_down_or_on_standby(token, controller):
    second, moves = Controller(controller.signer), []
    try:
        controller.answers["/x"] = lambda message: (503, {"error": "this migbatchd is on standby"})
        second.answers["/x"] = lambda message: (200, {})
        urls = ["http://127.0.0.1:9", controller.url, second.url]
        link = ControllerClient(urls, controller.signer, "n1", timeout=5.0, moved=lambda: moves.append(1))
        link.post("/x", {})
        link.post("/x", {})
        assert (len(controller.seen), len(second.seen), len(moves)) == (1, 2, 1), "it stays with the one that answered"
        second.answers["/x"] = controller.answers["/x"]
        with pytest.raises(ControllerError, match=r"is on standby.*127\.0\.0\.1: .*refused.*is on standby"):
            link.post("/x", {})
        second.answers["/x"] = lambda message: (401, {"error": "not you"})
        with pytest.raises(ControllerError, match="401") as refused:
            link.post("/x", {})
        assert "is on standby" not in str(refused.value), "a refusal is an answer"
    finally:
        second.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "repeated"),
    [
        (b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 ok\r\nContent-Length: 2\r\n\r\n{}", b""),
        (b"", b"HTTP/1.1 100 wait\r\n\r\n"),
        (b"HTTP/1.1 200 o", b"k"),
        (b"HTTP/1.1 200 ok\r\nConnection: close\r\n\r\n", b" "),
    ],
    ids=["refusal", "no signature", "never an answer", "slow head", "slow body"],
)
def test_stranger_at_the_port_of_one_controller_does_not_keep_the_node_from_the_next(controller, head, repeated):
    """While migbatchd is down there, any user of that host may listen at its port."""
    controller.answers["/x"] = lambda message: (200, {"done": 1})
    answered, gave_up = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def stranger():
            link, _ = server.accept()
            with link, contextlib.suppress(OSError):
                link.recv(65536)
                link.sendall(head)
                for _ in range(300 if repeated else 0):
                    link.sendall(repeated)
                    if answered.wait(0.1):
                        return
                gave_up.extend(repeated)

        thread = threading.Thread(target=stranger)
        thread.start()
        urls = [f"http://127.0.0.1:{server.getsockname()[1]}", controller.url]
        body = ControllerClient(urls, controller.signer, "n1", timeout=3.0).post("/x", {})
        answered.set()
        thread.join()
    assert json.loads(body) == {"done": 1}
    assert gave_up == [], "until the stranger has ended"


def test_event_of_a_slice_with_many_processes_stays_within_limits(node):
    """The user controls the number of processes; a refused event would stop the controller's plans for the node."""
    node.prolog(1, "[mig:7g.80gb:1]")
    (row,) = node.slices("held")
    node.epilog(1)
    for number in range(500):
        node.machine.start_process(row.mig_uuid, 2**22 + number)
    assert "requeued" in node.prolog(2, "[mig:1g.10gb:1]", uid=BOB)[1]
    whole = {"kind": "state", "ts": 1.0, "seq": 1000, **state([], node.slices(), {})}
    body = {"node": "n1", "journal": "ab12", "boot_id": "b1", "events": [*node.events(), whole]}
    assert messages.read_events("n1", json.dumps(body).encode()).refused == ()
    assert "and 492 others" in node.slices("zombie")[0].reason
