"""Who may report for a node, and who may see a job: over TCP by key and address, on the Unix socket by user."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.daemon.addresses import NodeAddresses, is_local, resolved
from slurm_migbatch.daemon.controller import Controller
from slurm_migbatch.daemon.ended import HistoryClient, Standing
from slurm_migbatch.daemon.log import RateLimitedLog
from slurm_migbatch.daemon.privacy import Privacy
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.node.auth import TokenSigner
from slurm_migbatch.slurm.client import JobRow, SlurmError
from slurm_migbatch.slurm.settings import controller_hosts
from slurm_migbatch.store.db import open_store
from tests.support.daemon_fakes import FakeSigner, FakeSlurm, Node, gpu, inventory, state
from tests.support.daemon_running import Running, pending
from tests.support.directories import open_to_users
from tests.support.waiting import eventually


class MungeLike(FakeSigner):
    """Does not name the host, as munge gives no name that could be relied on."""

    scheme = "munge"


@pytest.fixture
def make(config: Any, slurm: FakeSlurm, tmp_path: Path) -> Callable[..., Service]:
    def service(signer: Any = None, **node_api: Any) -> Service:
        changed = dataclasses.replace(config, node_api=dataclasses.replace(config.node_api, **node_api))
        url = f"sqlite:///{tmp_path}/migbatch.db"
        return Service(changed, client=slurm, open_store=lambda: open_store(url), signer=signer or FakeSigner())

    return service


# -- for which node ----------------------------------------------------------------------------------------------


def test_message_may_only_report_on_the_node_that_signed_it(running: Running, store: Any) -> None:
    """Without this check, root on n2 emptied the inventory of n1."""
    other = Node(running.port, FakeSigner(), "n2")
    body = {"node": "n1", "journal": "ab12", "boot_id": "b1", "events": [inventory()]}
    status, answer = other.send("/node/v1/events", body)
    assert (status, answer) == (400, {"error": "node n2 reports about node n1; a node may only report about itself"})
    assert other.send("/node/v1/plan", {"node": "n1", "have": 0})[0] == 400
    assert store.events == {}


def test_header_that_names_another_node_than_was_signed_is_refused(running: Running) -> None:
    other = Node(running.port, FakeSigner(), "n2")
    body = json.dumps({"node": "n1", "have": 0}).encode()
    assert other.send("/node/v1/plan", body, headers={"X-Migbatch-Node": "n1"})[0] == 401


def test_the_body_must_be_the_one_whose_digest_was_signed(running: Running) -> None:
    node = Node(running.port, FakeSigner())
    signed = b'{"node": "n1", "have": 1, "wait": 0}'
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
    connection.request("POST", "/node/v1/plan", signed.replace(b"1", b"2"), node.headers("/node/v1/plan", signed))
    answer = connection.getresponse()
    assert (answer.status, b"does not match the signature" in answer.read()) == (401, True)
    connection.close()


def test_with_munge_a_node_is_accepted_from_its_own_address_only(make: Callable[..., Service]) -> None:
    """Slurm has n1 at 127.0.0.1 and n2 at 127.0.0.2; root on either has munge's key."""
    with Running(make(MungeLike())) as running:
        assert Node(running.port, MungeLike(), "n1").events(state(gpu(0)))[0] == 200
        assert Node(running.port, MungeLike(), "n2", "127.0.0.2").events(state(gpu(0)))[0] == 200
        status, answer = Node(running.port, MungeLike(), "n1", "127.0.0.2").events(inventory(seq=2))
        assert status == 403
        assert "n1 connects from 127.0.0.2, but its address in Slurm is 127.0.0.1" in answer["error"]
        assert Node(running.port, MungeLike(), "n9").plan()[0] == 403
        # any user of this host may send this header, and many proxies pass it on
        forwarded = {"X-Forwarded-For": "192.0.2.3"}
        status, answer = Node(running.port, MungeLike(), "n3").events(inventory(), headers=forwarded)
        assert status == 403 and "n3 connects from 127.0.0.1" in answer["error"]
        assert len(running.service.rounds.view.facts()["n1"].gpus) == 1
    with Running(make(MungeLike(), check_addresses=False)) as running:
        assert Node(running.port, MungeLike(), "n1", "127.0.0.2").plan()[0] == 200


@pytest.mark.parametrize(("listen", "host"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "::1")])
def test_clients_of_a_proxy_on_this_host_do_not_count_as_this_host(
    make: Callable[..., Service], listen: str, host: str
) -> None:
    """On the address for every interface, a connection from 127.0.0.1 comes from ::ffff:127.0.0.1."""

    def status(**headers: str) -> int:
        link = http.client.HTTPConnection(host, running.port, timeout=120)
        link.request("GET", "/metrics", headers=headers)
        answer = link.getresponse()
        answer.read()
        link.close()
        return answer.status

    with Running(make(listen=listen)) as running:
        assert status() == 200
        assert status(**{"X-Forwarded-For": "192.0.2.3"}) == 403
        assert status(**{"X-Forwarded-For": "127.0.0.1, 192.0.2.3"}) == 403


def test_known_addresses_of_nodes_are_kept_while_slurm_does_not_answer() -> None:
    answers: list[Any] = [{"n1": {"127.0.0.1"}}]

    def ask() -> Any:
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    now = [0.0]

    async def scenario() -> None:
        places = NodeAddresses(ask, clock=lambda: now[0])
        assert await places.wrong("n1", "127.0.0.1") == ""
        assert await places.wrong("n1", "::ffff:127.0.0.1") == ""
        answers[0] = SlurmError("away")
        now[0] = 100.0
        assert await places.wrong("n1", "127.0.0.1") == ""
        assert "n1 connects from 10.1.2.3" in await places.wrong("n1", "10.1.2.3")
        assert "cannot get the address of n2" in await places.wrong("n2", "10.1.2.3")
        answers[0] = {"n1": {"127.0.0.1"}, "n2": {"10.1.2.3"}}
        assert await places.wrong("n2", "10.1.2.3") != "", "Slurm is not queried for every unknown caller"
        now[0] = 200.0
        assert await places.wrong("n2", "10.1.2.3") == ""

    asyncio.run(scenario())


def test_known_addresses_of_nodes_are_kept_while_names_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """One unknown client, while DNS did not answer, made known nodes unknown."""
    names, now = {"host1": frozenset({"10.0.0.1"}), "host2": frozenset({"10.0.0.2"})}, [0.0]
    monkeypatch.setattr("slurm_migbatch.daemon.addresses.resolved", lambda host: names.get(host, frozenset()))

    async def scenario() -> None:
        places = NodeAddresses(lambda: {"n1": {"host1"}, "n2": {"host2"}}, clock=lambda: now[0])
        assert await places.wrong("n1", "10.0.0.1") == ""
        now[0], found = 100.0, names.pop("host1")
        names["host2"] = frozenset({"10.0.0.22"})
        assert await places.wrong("n9", "10.0.0.9") != ""
        assert await places.wrong("n1", "10.0.0.1") == ""
        assert await places.wrong("n2", "10.0.0.22") == ""
        assert await places.wrong("n2", "10.0.0.2") != ""
        now[0], names["host1"] = 200.0, frozenset({"10.0.0.11"})
        assert await places.wrong("n1", "10.0.0.11") == ""
        assert await places.wrong("n1", *found) != ""

    asyncio.run(scenario())


def test_slow_name_resolution_delays_only_its_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def slow(host: str) -> frozenset[str]:
        if host == "host1":
            assert answered.wait(20)
        return frozenset({host.replace("host", "10.0.0.")})

    monkeypatch.setattr("slurm_migbatch.daemon.addresses.resolved", slow)

    async def scenario() -> None:
        places = NodeAddresses(lambda: {"n1": {"host1"}, "n2": {"host2"}})
        first, again = (asyncio.create_task(places.wrong("n1", "10.0.0.1")) for _ in range(2))
        assert await places.wrong("n2", "10.0.0.2") == ""
        assert not first.done()
        again.cancel()
        answered.set()
        assert await first == ""

    asyncio.run(scenario())


def test_node_that_was_removed_from_slurm_is_not_accepted() -> None:
    nodes, now = {"n1": {"10.0.0.1"}, "n2": {"10.0.0.2"}}, [0.0]

    async def scenario() -> None:
        places = NodeAddresses(lambda: dict(nodes), clock=lambda: now[0])
        assert await places.wrong("n1", "10.0.0.1") == ""
        now[0] = 100.0
        del nodes["n1"]
        assert await places.wrong("n2", "10.0.0.2") == ""
        assert "Slurm has no node n1" in await places.wrong("n1", "10.0.0.1")

    asyncio.run(scenario())


def test_key_of_one_node_is_not_accepted_for_another(make: Callable[..., Service], tmp_path: Path) -> None:
    secret, own = tmp_path / "token", tmp_path / "own"
    secret.write_text("s" * 64)
    secret.chmod(0o600)
    run = [sys.executable, "-m", "slurm_migbatch.cli", "node", "key", "n2", "--secret", str(secret)]
    own.write_text(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    own.chmod(0o600)
    controller, key = TokenSigner(str(secret)), TokenSigner(str(own))
    with Running(make(controller)) as running:
        assert Node(running.port, key, "n2").plan() == (200, {"version": 0})
        assert Node(running.port, TokenSigner(str(secret)), "n1").plan()[0] == 200, "as before, with the secret itself"
        body = b'{"node": "n1", "have": 0}'
        liar = Node(running.port, key, "n2")
        for name in ("n1", "n2"):
            assert liar.send("/node/v1/plan", body, headers={"X-Migbatch-Node": name})[0] in (400, 401)


def test_plan_version_that_was_never_published_is_not_acknowledged(running: Running) -> None:
    """`have` of 2^62 made the next plan's version one that the node refuses."""
    node, node_plans = Node(running.port, FakeSigner()), running.service.node_plans
    version = node_plans.publish("n1", {"GPU-1": [("1g.10gb", 0, 1)]})
    for have in (2**62 - 1, 2**53):
        assert node.plan(have)[0] == 400
    assert node.plan(2**53 - 1) == (200, {"version": version, "gpus": {"GPU-1": [["1g.10gb", 0, 1]]}})
    assert node_plans.current("n1").version == version
    assert node_plans.acked("n1") == 0


def test_requests_in_progress_are_limited_for_each_node(running: Running) -> None:
    node = Node(running.port, FakeSigner())
    waiting = []
    for _ in range(8):
        raw = b'{"node": "n1", "have": 0, "wait": 20}'
        link = http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)
        link.request("POST", "/node/v1/plan", raw, node.headers("/node/v1/plan", raw))
        waiting.append(link)
    eventually(lambda: node.plan()[0] == 429)
    assert Node(running.port, FakeSigner(), "n2").plan()[0] == 200
    for link in waiting:
        link.close()
    running.service.node_plans.publish("n1", {"GPU-1": [("1g.10gb", 0, 1)]})  # it answers those that wait
    eventually(lambda: node.plan()[0] == 200)


# -- who may see jobs --------------------------------------------------------------------------------------------


ASK = """
import http.client, os, socket, sys
os.setuid(int(sys.argv[2]))
link = http.client.HTTPConnection("localhost")
link.sock = socket.socket(socket.AF_UNIX)
link.sock.connect(sys.argv[1])
link.request("GET", sys.argv[3])
answer = link.getresponse()
print(answer.status, answer.read().decode())
"""


def asked(config: Any, uid: int, path: str) -> str:
    open_to_users(Path(config.daemon.run_dir))
    argv = [sys.executable, "-c", ASK, config.daemon.api_socket, str(uid), path]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def test_private_jobs_are_shown_only_to_users_who_may_see_them(
    make: Callable[..., Service], slurm: FakeSlurm, config: Any
) -> None:
    slurm.queue[2] = pending(2, "gres/mig:7g.80gb:1")
    slurm.private = "jobs,usage"
    with Running(make()) as running:
        eventually(lambda: running.service.rounds.controller.decision)
        hidden = asked(config, 1001, "/v1/why/2")
        assert hidden == asked(config, 1001, "/v1/why/99").replace("99", "2"), "as if there were no such job"
        assert "does not list job 2" in hidden
        for uid in (0, 1000):
            assert "does not list" not in asked(config, uid, "/v1/why/2")
        assert "403" in tcp(running.port, "/v1/why/2"), "callers over the network learn nothing about jobs"
        for odd in ("9" * 5000, "9" * 11, "x", "-1", "%D9%A3"):
            assert "403" in tcp(running.port, f"/v1/why/{odd}") and "number" in asked(config, 0, f"/v1/why/{odd}")
        assert "403" in tcp(running.port, "/v1/waiting")
    slurm.private = ""
    with Running(make()) as running:
        eventually(lambda: running.service.rounds.controller.decision)
        assert "does not list" not in asked(config, 1001, "/v1/why/2"), "without PrivateData every user may query"


def test_user_with_a_number_above_two_billion_sees_own_private_jobs(
    make: Callable[..., Service], slurm: FakeSlurm, config: Any
) -> None:
    slurm.queue[2] = dataclasses.replace(pending(2, "gres/mig:7g.80gb:1"), uid=3 * 10**9)
    slurm.private = "jobs,usage"
    with Running(make()) as running:
        eventually(lambda: running.service.rounds.controller.decision)
        assert "does not list" not in asked(config, 3 * 10**9, "/v1/why/2")


TIED = "migbatch: model=resnet-50 items=600 pipeline=merger-with-acme deadline=9h [mig:1g.6gb:1#abc12345]"
SHARING = "beside job 4 on its 1g.6gb: both end 321 s sooner on average than one after the other"


def test_reasons_from_a_users_hints_are_shown_to_no_other_user(
    make: Callable[..., Service], slurm: FakeSlurm, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.queue[2] = pending(2, "gres/mig:1g.6gb:1", comment=TIED, num_nodes=2, time_limit_s=5000, submit=time.time())
    slurm.queue[3] = pending(3, "gres/mig:loan:1")
    lent = {3: f"it is about to start {SHARING} (slowed down 1.20 and 1.40 times)"}
    monkeypatch.setattr(Controller, "waiting_for_loans", lambda self: lent)
    with Running(make()):
        eventually(lambda: "merger-with-acme" in asked(config, 0, "/v1/why/2"))
        for uid in (0, 1000):
            assert "1:23:20 at most" in reply(config, uid, "/v1/why/2")["in_full"], "the owner sees it"
            waiting = reply(config, uid, "/v1/waiting")
            assert "1.40 times" in waiting["in_full"]["3"]
            assert waiting["waiting"]["3"] == "it is about to start beside job 4 on its 1g.6gb", "as shown to others"
            why = reply(config, uid, "/v1/why/2")["why"]
            assert why and "merger" not in why, "it is shown to everyone"
        assert reply(config, 1001, "/v1/why/2") == {"why": why, "in_full": ""}
        assert reply(config, 1001, "/v1/waiting") == {"waiting": waiting["waiting"], "in_full": {}}


def reply(config: Any, uid: int, path: str) -> Any:
    status, _, text = asked(config, uid, path).partition(" ")
    assert status == "200"
    return json.loads(text)


def tcp(port: int, path: str) -> str:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    link.request("GET", path)
    answer = link.getresponse()
    text = f"{answer.status} {answer.read().decode()}"
    link.close()
    return text


class Site:
    def __init__(self, **settings: str) -> None:
        self.answer: Any = settings
        self.known: dict[str, Standing] = {}
        self.asked = 0

    def settings(self) -> dict[str, str]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return dict(self.answer)

    def standing(self, user: str) -> Standing:
        self.asked += 1
        return self.known.get(user, Standing())


ROWS = [JobRow(1, uid=1000, account="a"), JobRow(2, uid=1001, account="b")]


def visible(site: Site, uid: int) -> list[int]:
    guard = Privacy(site, {0, 64030})
    return [row.job_id for row in asyncio.run(guard.visible(uid, ROWS))]


def test_private_jobs_are_visible_to_owner_coordinator_and_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    private = {"privatedata": "accounts,jobs", "accountingstoragetype": "accounting_storage/slurmdbd"}
    names = {1000: "ann", 1002: "coordinator", 1003: "operator", 1004: "nobody"}
    monkeypatch.setattr("pwd.getpwuid", lambda uid: type("", (), {"pw_name": names[uid]}))
    site = Site(**private)
    site.known = {"coordinator": Standing(accounts=frozenset({"b"})), "operator": Standing(operator=True)}
    assert [visible(site, uid) for uid in (0, 64030, 1003)] == [[1, 2]] * 3
    assert visible(site, 1000) == [1]
    assert visible(site, 1002) == [2]
    assert visible(site, 1004) == visible(site, 4711) == []
    assert visible(Site(privatedata="usage"), 1004) == [1, 2]
    alone = Site(privatedata="jobs", accountingstoragetype="")
    assert (visible(alone, 1003), alone.asked) == ([], 0), "without slurmdbd there is no query"
    away = Site()
    away.answer = SlurmError("away")
    assert visible(away, 1000) == [1], "if Slurm does not answer, jobs are private"


@pytest.mark.parametrize("user", ["ann", "ann@example.org", "DOM\\ann", "ann+x", "pc$", "_x.y-z"])
def test_standing_is_queried_for_user_names_of_directory_services(tmp_path: Path, user: str) -> None:
    sacctmgr = tmp_path / "sacctmgr"
    sacctmgr.write_text("#!/bin/sh\nprintf '%s|Operator|chem,bio\\n' \"$5\"\n")
    sacctmgr.chmod(0o755)
    client = HistoryClient(tmp_path)
    assert client.standing(user) == Standing(True, frozenset({"chem", "bio"}))
    for other in ("-i", "a,b", "format=x", "a b", ""):
        assert client.standing(other) == Standing()


def test_host_name_of_a_node_is_no_row_of_another_node(tmp_path: Path) -> None:
    """slurmd reports the name of a node's host, in the cloud also to Slurm's configuration."""
    sinfo = tmp_path / "sinfo"
    rows = ("n1 10.0.0.1 h1\nn2 10.0.0.1 h1", "n2 10.0.0.2 h2", "n2 10.0.0.2 h2")
    shown = "".join(f'printf "%s\\n" "${{5%\\%N*}}{row}"\n' for row in rows)
    sinfo.write_text(f"#!/bin/sh\n{shown}")
    sinfo.chmod(0o755)
    assert HistoryClient(tmp_path).node_addresses() == {"n2": {"10.0.0.2", "h2"}}


# -- where it listens --------------------------------------------------------------------------------------------


def test_migbatchd_listens_on_slurmctld_address_and_loopback_by_default(
    make: Callable[..., Service], slurm: FakeSlurm
) -> None:
    mine = next((place for place in resolved(socket.gethostname()) if is_local(place)), "127.0.0.1")
    settings = {"slurmctldhost[0]": f"ctl({mine})", "slurmctldhost[1]": "backup(192.0.2.7)", "slurmctldaddr": ""}
    slurm.settings = lambda: settings
    with Running(make(listen="")) as running:
        eventually(lambda: mine in running.service.api.addresses)
        assert {place for place in running.service.api.addresses if not place.startswith("/")} == {"127.0.0.1", mine}
        assert "ok" in tcp(running.port, "/healthz")
        with pytest.raises(OSError), socket.create_connection(("127.0.0.3", running.port), 1):
            pass


def test_controller_hosts_are_read_from_the_slurm_configuration() -> None:
    text = {
        "slurmctldhost[0]": "ctl1(10.0.0.1)",
        "slurmctldhost[1]": "ctl2",
        "slurmctldaddr": "vip",
        "slurmctldport": "1",
    }
    assert controller_hosts(text) == ("10.0.0.1", "ctl2", "vip")
    assert controller_hosts({"slurmctldhost[0]": ""}) == ()
    assert resolved("no.such.host.invalid") == frozenset()
    assert not is_local("192.0.2.7")


# -- the log -----------------------------------------------------------------------------------------------------


def test_warnings_about_unknown_clients_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    now = [0.0]
    limited_log = RateLimitedLog(logging.getLogger("slurm_migbatch.test"), most=10, clock=lambda: now[0])
    for number in range(1000):
        limited_log.warning(f"10.0.0.{number % 250}", f"refused {number} in other words")
    assert len(caplog.records) == 10
    now[0] = 61.0
    limited_log.warning("10.0.0.1", "once more")
    assert caplog.records[-1].getMessage() == "once more (990 similar warnings suppressed)"


def test_every_user_may_query_the_api_socket(running: Running, config: Any) -> None:
    assert os.stat(config.daemon.api_socket).st_mode & 0o777 == 0o666
    assert '"waiting":{}' in asked(config, 1000, "/v1/waiting")
    assert "404" in asked(config, 1000, "/v1/other")
