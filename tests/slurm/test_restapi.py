"""Handling of answers that slurmrestd should not give, and of tokens and addresses that cannot be used."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.slurm import restrows
from slurm_migbatch.slurm.client import OTHERS, WHOLE, JobRow, NodeRow, SlurmError, SlurmRefused
from slurm_migbatch.slurm.restaddress import RestAddress
from slurm_migbatch.slurm.slurmrestd import SlurmrestdClient
from tests.support.rest_server import PARTITIONS, Answers, RestHandler, RestServer

NUMBER = {"set": True, "infinite": False, "number": 1}
NONE = {"set": False, "infinite": False, "number": 0}
JOB = {
    "job_id": 7,
    "job_state": ["PENDING"],
    "array_job_id": NONE,
    "array_task_id": NONE,
    "array_task_string": "",
    "het_job_id": NONE,
    "user_id": 1000,
    "user_name": "ann",
    "account": "",
    "partition": "gpu",
    "name": "wrap",
    "state_reason": "Resources",
    "state_description": "",
    "priority": NUMBER,
    "submit_time": NUMBER,
    "eligible_time": NUMBER,
    "start_time": NONE,
    "end_time": NONE,
    "time_limit": {"set": False, "infinite": True, "number": 0},
    "time_minimum": NONE,
    "nodes": "",
    "node_count": NUMBER,
    "required_nodes": "",
    "tres_per_node": "gres/mig:1g.10gb:1",
    "comment": "",
    "restart_cnt": 0,
    "features": "",
    "cpus": NUMBER,
    "resv_name": "",
    "group_id": 1001,
    "qos": "normal",
    "wckey": "",
    "dependency": "",
    "shared": [],
}
NODE = {
    "name": "n1",
    "state": ["IDLE", "RESERVED"],
    "gres": "gpu:h100:4(S:0-1),mig:1g.10gb:7",
    "gres_used": "gpu:h100:0,mig:1g.10gb:1",
    "partitions": ["gpu"],
    "reason": "",
    "active_features": ["a"],
    "cpus": 64,
    "alloc_cpus": 1,
}
#: values that a later release may put in place of today's form
GONE = object()
SHAPES = (GONE, None, "", "x", "RUNNING", 7, 1.5, True, [], ["x"], [["x"]], {}, NONE, NUMBER, {**NUMBER, "number": "x"})


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answers], tuple[SlurmrestdClient, RestServer]]]:
    with RestServer(str(tmp_path / "socket"), RestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        token = tmp_path / "token"
        token.write_text("SLURM_JWT=a.b.c\n")
        token.chmod(0o600)

        def start(answers: Answers, timeout: float = 20.0) -> tuple[SlurmrestdClient, RestServer]:
            server.answers = {"ping/": (200, {"errors": []}), "partitions/": (200, PARTITIONS), **answers}
            server.headers = []
            where = f"unix:{tmp_path}/socket"
            client = SlurmrestdClient(tmp_path, timeout=timeout, address=where, token_file=str(token), user="slurm")
            return client, server

        yield start
        server.shutdown()
        thread.join()


def error(number: int, words: str) -> dict[str, Any]:
    return {"errors": [{"error_number": number, "error": words, "description": "it failed"}], "jobs": []}


Serve = Callable[..., tuple[SlurmrestdClient, RestServer]]


def test_a_bounded_number_of_dependencies_is_kept(serve: Serve) -> None:
    depends = ",".join(f"afterok:{job}(unfulfilled)" for job in range(1001, 13_001))
    client, _ = serve({"jobs/": (200, {"jobs": [{**JOB, "dependency": depends}]})})
    (row,) = client.jobs()
    assert row.after == (OTHERS, *range(1001, 1065))


def test_the_token_and_its_user_are_sent(serve: Serve) -> None:
    client, server = serve({"jobs/": (200, {"jobs": [JOB]})})
    (row,) = client.jobs()
    assert (row.job_id, row.user, row.state, row.time_limit_s) == (7, "ann", "PENDING", None)
    assert {(h["X-SLURM-USER-NAME"], h["X-SLURM-USER-TOKEN"]) for h in server.headers} == {("slurm", "a.b.c")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, "Authentication failure"), "replace it by one of slurm"),
        ((511, {"errors": []}), "replace it by one of slurm"),  # as 26.05 answers
        ((200, "<html>"), "invalid JSON"),
        ((200, {"errors": []}), "without a list of jobs"),
        ((200, {"jobs": [{"job_state": ["RUNNING"]}]}), "a job without an id"),
        ((500, error(1800, "Unable to contact slurm controller")), "Unable to contact slurm controller"),
        ((500, error(1001, "Authentication error")), "Authentication error"),
        ((404, "Unable to find requested URL"), "does not support GET"),
        ((500, {"jobs": []}), "with 500"),
    ],
)
def test_answer_without_a_job_list_is_an_error_and_not_an_empty_queue(
    serve: Serve, answer: tuple[int, Any], message: str
) -> None:
    client, _ = serve({"jobs/": answer})
    with pytest.raises(SlurmError, match=message):
        client.jobs()


def test_default_partition_is_found_despite_another_with_invalid_flags(serve: Serve) -> None:
    odd, default = {"name": "odd", "flags": 3}, {"name": "gpu", "flags": ["DEFAULT"]}
    client, _ = serve({"partitions/": (200, {"partitions": [odd, default]})})
    assert client.default_partition() == "gpu"


def test_malformed_job_record_is_still_listed_as_unread(serve: Serve) -> None:
    array = {**JOB, "job_id": 8, "array_job_id": NUMBER, "array_task_string": "1,3,5,..."}
    client, _ = serve({"jobs/": (200, {"jobs": [JOB, {"job_id": 9, "job_state": ["RUNNING"]}, array]})})
    rows = {row.job_id: row for row in client.jobs()}
    assert {job: row.unread for job, row in rows.items()} == {7: False, 8: True, 9: True}
    assert "SLURM_BITSTR_LEN=0" in rows[8].reason


def test_ended_jobs_are_left_out_and_completing_jobs_are_not() -> None:
    states = (["COMPLETED"], ["CANCELLED", "COMPLETING"], ["PENDING", "REQUEUED"], ["NODE_FAIL"], ["RUNNING"])
    jobs = [{**JOB, "job_id": number, "job_state": state} for number, state in enumerate(states)]
    found = restrows.jobs({"jobs": jobs}, 0.0, reserved=False)
    assert {row.job_id: row.state for row in found} == {1: "COMPLETING", 2: "REQUEUED", 4: "RUNNING"}


def test_job_in_a_state_of_a_later_release_is_unread() -> None:
    states = (["THAWING"], ["THAWING", "FROZEN"], "RUNNING", ["FROZEN", "RUNNING"], ["COMPLETED", "FROZEN"])
    jobs = [{**JOB, "job_id": number, "job_state": state} for number, state in enumerate(states)]
    found = {row.job_id: row for row in restrows.jobs({"jobs": jobs}, 0.0, reserved=False)}
    assert {job: row.unread for job, row in found.items()} == {0: True, 1: True, 2: True, 3: False}
    assert "THAWING" in found[0].reason
    assert found[3].active


def changed(record: dict[str, Any], shapes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (record | shapes).items() if value is not GONE}


def sound(row: JobRow | NodeRow, texts: tuple[str, ...], numbers: tuple[str, ...], lists: tuple[str, ...]) -> bool:
    """Whether the fields that migbatch uses as texts, numbers and lists of texts have these types."""
    return (
        all(isinstance(getattr(row, name), str) for name in texts)
        and all(type(getattr(row, name)) is int for name in numbers)
        and all(isinstance(part, str) and len(part) > 0 for name in lists for part in getattr(row, name))
    )


def test_null_text_is_read_as_empty() -> None:
    (row,) = restrows.jobs({"jobs": [{**JOB, "account": None, "wckey": None}]}, 0.0, reserved=False)
    assert (row.account, row.wckey, row.unread) == ("", "", False)


def test_memory_of_jobs_and_nodes_is_parsed() -> None:
    def size(number: int) -> dict[str, Any]:
        return {"set": True, "infinite": False, "number": number}

    asked = [(size(3072), NONE), (NONE, size(3333)), (size(0), NONE), (NONE, NONE)]
    jobs = [{**JOB, "memory_per_node": node, "memory_per_cpu": cpu} for node, cpu in asked]
    rows = restrows.jobs({"jobs": jobs}, 0.0, reserved=False)
    assert [(row.memory_per_node, row.memory_per_cpu) for row in rows] == [(3072, 0), (0, 3333), (WHOLE, 0), (0, 0)]
    sizes = {"real_memory": 500_000, "specialized_memory": 20_000, "alloc_memory": 460_800}
    (node,) = restrows.nodes({"nodes": [{**NODE, **sizes}]}, pytest.fail)
    assert (node.memory, node.memory_used) == (480_000, 460_800)


def test_owner_of_nodes_is_parsed() -> None:
    for more, owner in (({}, ""), ({"owner": ""}, ""), ({"owner": "ann"}, "ann")):
        (node,) = restrows.nodes({"nodes": [{**NODE, **more}]}, pytest.fail)
        assert node.owner == owner


def test_exclusive_jobs_are_those_that_share_nothing() -> None:
    shared = [["none"], [], ["oversubscribe"], ["user"], ["mcs"], ["topo"]]
    rows = restrows.jobs({"jobs": [{**JOB, "shared": flags} for flags in shared]}, 9.0, reserved=False)
    assert [row.exclusive for row in rows] == [True, False, False, False, False, False]
    without = {name: value for name, value in JOB.items() if name != "shared"}
    (row,) = restrows.jobs({"jobs": [without]}, 9.0, reserved=False)
    assert not (row.exclusive or row.unread), "a release may not state it"


@pytest.mark.parametrize("offered", [True, False])
def test_exclusive_jobs_are_seen_where_only_an_earlier_version_states_it(serve: Serve, offered: bool) -> None:
    earlier = (200, {"jobs": [{**JOB, "shared": ["none"]}]}) if offered else (404, "Unable to find requested URL")
    client, _ = serve({"v0.0.44/jobs/": earlier, "v0.0.45/jobs/": (200, {"jobs": [JOB]})})
    for _ in range(2):
        assert [row.exclusive for row in client.jobs()] == [offered]


def test_the_least_time_of_pending_jobs_is_read_while_a_reservation_is_coming() -> None:
    half = {**JOB, "time_minimum": {**NUMBER, "number": 30}}
    jobs = {"jobs": [JOB, {**half, "job_id": 8}, {**half, "job_id": 9, "job_state": ["RUNNING"]}]}
    rows = restrows.jobs(jobs, 0.0, reserved=False, coming=True)
    assert [row.time_min_s for row in rows] == [None, 1800, None]
    assert {row.time_min_s for row in restrows.jobs(jobs, 0.0, reserved=False)} == {None}


def test_cpus_reserved_for_the_system_are_not_those_of_jobs() -> None:
    nodes = [{**NODE, "effective_cpus": 60, "alloc_cpus": 60}, {**NODE, "name": "n2"}]
    rows = restrows.nodes({"nodes": nodes}, {}.__setitem__)
    assert [(row.cpus, row.cpus_free) for row in rows] == [(60, 0), (64, 63)]


JOB_TEXTS = ("user", "account", "partition", "name", "state", "reason", "requested_nodes", "gres", "comment")
JOB_TEXTS += ("features", "reservation", "qos", "wckey")


@given(st.dictionaries(st.sampled_from(sorted(JOB)), st.sampled_from(SHAPES), min_size=1, max_size=3))
def test_malformed_job_does_not_affect_other_jobs(shapes: dict[str, Any]) -> None:
    odd = {**changed(JOB, shapes), "job_id": 8}
    rows = restrows.jobs({"jobs": [JOB, odd, {**JOB, "job_id": 9}]}, 0.0, reserved=True, coming=True)
    assert [row.job_id for row in rows] == [7, 8, 9]
    assert rows[0].pending and rows[2].pending
    assert rows[1].unread or sound(rows[1], JOB_TEXTS, ("uid", "priority", "restarts", "cpus", "tasks"), ("nodes",))


NUMBERS = sorted(name for name in JOB if isinstance(JOB[name], (int, dict)) and name != "job_id")


def test_number_of_a_job_may_be_plain_or_state_that_it_is_set() -> None:
    """A later version of the API may change the form of any number, as the earlier ones did."""
    for name in NUMBERS:
        task = {**JOB, "array_job_id": 3, "array_task_id": 4} if name.startswith("array") else JOB
        forms = [{**task, name: 5}, {**task, name: {"set": True, "infinite": False, "number": 5}}]
        plain, stated = restrows.jobs({"jobs": forms}, 9.0, reserved=True, coming=True)
        assert plain == stated and not plain.unread, (name, plain, stated)


@pytest.mark.parametrize(
    "odd", [["x", 7], {"number": 5}, {**NUMBER, "number": "5"}, float("inf"), {**NUMBER, "number": 2**64}]
)
def test_job_in_an_unknown_form_is_unread_and_names_the_field(odd: Any) -> None:
    for name in sorted(set(JOB) - {"job_id"}):
        (row,) = restrows.jobs({"jobs": [{**JOB, name: odd}]}, 9.0, reserved=True, coming=True)
        assert row.unread and name in row.reason, (name, row)


@given(st.dictionaries(st.sampled_from(sorted(NODE)), st.sampled_from(SHAPES), min_size=1, max_size=3))
def test_malformed_node_does_not_affect_other_nodes(shapes: dict[str, Any]) -> None:
    unreadable: dict[str, str] = {}
    nodes = [{**NODE, "name": "n0"}, changed(NODE, shapes), {**NODE, "name": "n2"}]
    rows = {row.name: row for row in restrows.nodes({"nodes": nodes}, unreadable.__setitem__)}
    assert len(rows) + len(unreadable) == 3
    assert rows["n0"].used == rows["n2"].used == {"1g.10gb": 1}
    lists = ("partitions", "states", "features")
    assert all(sound(row, ("name", "reason", "other_gres"), ("cpus", "cpus_used"), lists) for row in rows.values())
    assert all(row.states <= {"IDLE", "RESERVED", "x"} for row in rows.values())


def test_malformed_partition_is_logged_and_does_not_affect_others(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    better = {"name": "best", "priority": {"tier": 5, "job_factor": 1}}
    answers = {"partitions": [{"name": "gpu", "priority": None}, better]}
    jobs = [{**JOB, "job_id": 8}, {**JOB, "partition": "best"}]
    client, _ = serve({"partitions/": (200, answers), "jobs/": (200, {"jobs": jobs})})
    assert [row.job_id for row in client.jobs()] == [row.job_id for row in client.jobs()] == [7, 8]
    assert [record.getMessage().count("partition gpu: TypeError") for record in caplog.records] == [1]


def test_malformed_reservation_is_logged_and_does_not_affect_others(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    sound = {"name": "a", "node_list": "n1", "start_time": 1, "end_time": 2**40, "tres": "cpu=64", "flags": []}
    listed = [{"name": "odd"}, sound]
    client, _ = serve({"nodes/": (200, {"nodes": [NODE]}), "reservations/": (200, {"reservations": listed})})
    (row,) = client.nodes()
    assert client.nodes() == [row] and row.reservations == {"a"} and row.set_aside
    assert [record.getMessage().count("reservation odd: KeyError") for record in caplog.records] == [1]


@pytest.mark.parametrize("end", [0, NONE, {"set": False, "infinite": True, "number": 0}])
def test_reservation_without_an_end_is_not_over(end: Any) -> None:
    listed = [{"name": "a", "node_list": "n1", "start_time": 1, "end_time": end, "tres": "cpu=64", "flags": ["MAINT"]}]
    (row,) = restrows.reservations({"reservations": listed}, 1e9, lambda name, why: None)
    assert (row.name, row.nodes, row.start) == ("a", {"n1"}, 0.0)


def test_reservation_with_flags_in_another_form_is_unread() -> None:
    """A magnetic one is open to other jobs, one with unknown flags may be, and is not taken for closed."""
    odd = {"name": "a", "node_list": "n1", "start_time": 1, "end_time": 2**40, "tres": "cpu=64", "flags": "MAGNETIC"}
    unread: dict[str, str] = {}
    assert restrows.reservations({"reservations": [odd]}, 1e9, unread.__setitem__) == []
    assert "flags" in unread["a"]


def test_non_utf8_bytes_of_a_user_are_kept(serve: Serve) -> None:
    text = json.dumps({"jobs": [{**JOB, "comment": "?"}]}).replace("?", "\udcff\t")
    client, _ = serve({"jobs/": (200, text)})
    assert client.jobs()[0].comment == "\udcff\t"


def test_refusal_is_distinguished_from_an_unreachable_slurmctld(serve: Serve) -> None:
    client, _ = serve({"job/7": (422, error(2073, "Job is no longer pending execution"))})
    with pytest.raises(SlurmRefused) as caught:
        client.update_jobs({"7": {"Comment": "x"}})
    assert caught.value.refused == {"7": "Job is no longer pending execution"}
    client, _ = serve({"job/7": (500, error(1800, "Unable to contact slurm controller"))})
    with pytest.raises(SlurmError) as nobody:
        client.update_jobs({"7": {"Comment": "x"}})
    assert not isinstance(nobody.value, SlurmRefused)


def test_silent_or_unreachable_slurmrestd_is_an_error(serve: Serve, tmp_path: Path) -> None:
    client, _ = serve({"jobs/": (200, lambda: time.sleep(1.0) or {"jobs": []})}, timeout=0.2)
    with pytest.raises(SlurmError, match="did not answer within"):
        client.jobs()
    away = SlurmrestdClient(tmp_path, address=f"unix:{tmp_path}/nowhere", user="slurm")
    assert "cannot be reached" in away.probe()


def test_api_version_is_determined_again_after_slurmrestd_changed(serve: Serve) -> None:
    client, server = serve({"jobs/": (200, {"jobs": [JOB]})})
    client.jobs()
    server.answers["partitions/"] = (404, "Unable to find requested URL")
    with pytest.raises(SlurmError, match="does not support GET"):
        client.jobs()
    server.answers["partitions/"] = (200, PARTITIONS)
    before = len(server.headers)
    assert len(client.jobs()) == 1
    assert len(server.headers) - before == 3, "the version is found out again, once"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [("a.b.c", 0o644, "readable by no other"), ("", 0o600, "has no token"), ("a b\nX-Evil: 1", 0o600, "no token")],
)
def test_token_that_is_invalid_or_readable_by_others_is_not_sent(
    serve: Serve, tmp_path: Path, text: str, mode: int, message: str
) -> None:
    client, server = serve({})
    (tmp_path / "token").write_text(text)
    (tmp_path / "token").chmod(mode)
    with pytest.raises(SlurmError, match=message):
        client.jobs()
    assert server.headers == []


@pytest.mark.parametrize(
    "text", ["", "unix:relative", "ftp://host:1", "http://host", "http://host:70000", "http://a/b:1"]
)
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        RestAddress.parse(text)


def test_jobs_are_listed_over_http() -> None:
    class Server(socketserver.ThreadingTCPServer):
        answers: Answers = {
            "ping/": (200, {"errors": []}),
            "partitions/": (200, PARTITIONS),
            "jobs/": (200, {"jobs": [JOB]}),
        }
        headers: list[dict[str, str]] = []

    with Server(("127.0.0.1", 0), RestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        client = SlurmrestdClient(address=f"http://127.0.0.1:{server.server_address[1]}", user="slurm")
        assert [row.job_id for row in client.jobs()] == [7]
        server.shutdown()


def test_addresses_are_parsed() -> None:
    assert RestAddress.parse("unix:/run/a b").path == "/run/a b"
    assert RestAddress.parse("http://[::1]:6820/") == RestAddress("", "http", "::1", 6820)
    assert RestAddress.parse("https://host.example:443") == RestAddress("", "https", "host.example", 443)
