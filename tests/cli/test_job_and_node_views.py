"""show, why and nodes with a real record; Slurm's commands are small scripts that print what Slurm printed."""

import json
import re
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.installcontroller import cut_by_mig
from slurm_migbatch.cli.main import cli
from slurm_migbatch.config import Config, load, loads
from slurm_migbatch.doctor.lending import check_lending, parse_partitions
from slurm_migbatch.doctor.nodes import check_nodes
from slurm_migbatch.doctor.settings import check_slurm_conf
from slurm_migbatch.install.reported import describe as describe_site
from slurm_migbatch.query.nodes import GpuView, OccupiedSlot, bar, free_counts, troubles, view
from slurm_migbatch.query.questions import WhyQuestion
from slurm_migbatch.query.reply import Unanswerable
from slurm_migbatch.query.show import job_id
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.query.why import answer, describe, find, tasks_at_once
from slurm_migbatch.site import render as render_site
from slurm_migbatch.slurm.client import UNREAD, JobRow, NodeRow
from slurm_migbatch.slurm.rights import Rights
from slurm_migbatch.slurm.settings import parse_settings
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.queries import LeaseRow
from slurm_migbatch.store.runquery import JobId
from tests.support.daemon_fakes import GEOMETRY

GPU = {"uuid": "GPU-a", "minor": 0, "index": 0, "name": GEOMETRY["name"], "mig": True, "geometry": GEOMETRY}
DECISION = {
    "id": "7fq3k",
    "ts": 5.0,
    "uid": 1000,
    "user": "ann",
    "partition": "gpu",
    "asked": "--gres=mig:auto --comment='migbatch: model=bert-large'",
    "hints": {},
    "bucket": "bert-large/infer/b8/128tok",
    "candidates": [
        {"profile": "1g.10gb", "ok": False, "why": "too slow", "latency_ms": 90.0},
        {
            "profile": "3g.40gb",
            "ok": True,
            "why": "",
            "latency_ms": 30.0,
            "throughput_per_s": 266.0,
            "memory_mib": 2048.0,
        },
    ],
    "chosen": "mig:3g.40gb:1",
    "message": "migbatch: 3g.40gb for mig:auto: the smallest that does it",
    "source": "service",
}


@pytest.fixture
def record(tmp_path):
    """A record with a finished job 7, a running job 8 and a zombie."""
    config = tmp_path / "m.toml"
    url = f"sqlite:///{tmp_path}/db"
    config.write_text(f"[store]\nurl = '{url}'\n[cluster]\nslurm_bin = '{tmp_path}'\n[node_api]\nport = 9\n")
    now = time.time()
    with open_store(url) as store:
        store.record_decisions([DECISION])
        held = {"gpu": "GPU-a", "profile": "3g.40gb", "start": 0, "size": 4, "gi": 1, "ci": 0, "mig_uuid": "MIG-1"}
        run = {"restart": 0, "uid": 1000, "user": "ann", "decision": "7fq3k", "warm": True, "elapsed_ms": 4.2}
        events = [
            {"kind": "inventory", "gpus": [GPU]},
            {"kind": "start", "job": 7, **run, "slices": [held]},
            {"kind": "stop", "job": 7, "restart": 0, "exit_code": 0, "slices": [held]},
            {"kind": "start", "job": 8, **run, "decision": "", "slices": [held]},
            {
                "kind": "zombie",
                "gpu": "GPU-a",
                "profile": "1g.10gb",
                "start": 4,
                "size": 1,
                "gi": 5,
                "reason": "in use",
            },
            {"kind": "fault", "gpu": "GPU-a", "what": "fell off the bus", "action": "drained n1", "drain": True},
        ]
        store.ingest("n1", "ab", "b1", [{"seq": n, "ts": now + n, **e} for n, e in enumerate(events, 1)])
    return config


def migbatch(record, *arguments):
    result = CliRunner().invoke(cli, [*arguments, "-c", str(record)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def pairs(text):
    return dict(line.split(":", 1) for line in text.splitlines() if not line.startswith(" "))


def test_show_prints_request_prediction_and_allocation_of_a_job(record):
    values = {key: value.strip() for key, value in pairs(migbatch(record, "show", "7")).items()}
    assert values["Job"] == "7"
    assert values["Requested"] == "--gres=mig:auto --comment='migbatch: model=bert-large'"
    assert values["Bucket"] == "bert-large/infer/b8/128tok"
    assert values["Allocated"] == "3g.40gb, warm (from an earlier job) in 4 ms"
    assert values["Predicted"] == "30 ms per batch, 266 items/s, 2 GiB"
    assert values["Measured"] == "nothing"
    assert values["Why"] == "3g.40gb for mig:auto: the smallest that does it"
    assert values["Candidates"].startswith("1g.10gb")


def test_show_fails_for_an_unknown_job_and_prints_json(record):
    with pytest.raises(Exception, match="job 99_3 is not in the record"):
        migbatch(record, "show", "99_3")
    data = json.loads(migbatch(record, "show", "7", "--json"))
    assert data["version"] == 1
    assert data["runs"][0]["decided"]["chosen"] == "mig:3g.40gb:1"
    assert data["runs"][0]["slices"][0]["mig_uuid"] == "MIG-1"


def test_show_finds_tasks_that_have_not_started(record):
    with open_store(f"sqlite:///{record.parent}/db") as store:
        array = {"job_id": 30, "array_job": 30, "user": "ann", "state": "PENDING", "submit": time.time()}
        store.upsert_jobs([{**array, "array_task": "4-8:2%2"}])
    assert pairs(migbatch(record, "show", "30"))["Job"].strip() == "30_[4-8:2%2]"
    assert pairs(migbatch(record, "show", "30_6"))["Job"].strip() == "30_[4-8:2%2]"
    for missing in ("30_5", "30_10", "7_6"):
        with pytest.raises(Exception, match=f"job {missing} is not in the record"):
            migbatch(record, "show", missing)


def test_show_finds_tasks_that_were_cancelled_before_they_started(record):
    with open_store(f"sqlite:///{record.parent}/db") as store:
        array = {"job_id": 30, "array_job": 30, "array_task": "1,3%1", "user": "ann", "submit": time.time()}
        store.upsert_jobs([{**array, "state": "PENDING"}])
        store.upsert_jobs([{**array, "state": "CANCELLED", "end": time.time()}])
    shown = pairs(migbatch(record, "show", "30_3"))
    assert (shown["Job"].strip(), shown["State"].strip()) == ("30_[1,3%1]", "CANCELLED")
    with pytest.raises(Exception, match="job 30_2 is not in the record"):
        migbatch(record, "show", "30_2")


def test_show_finds_a_task_behind_the_end_of_a_list_that_was_cut(record):
    with open_store(f"sqlite:///{record.parent}/db") as store:
        array = {"job_id": 30, "array_job": 30, "user": "ann", "state": "PENDING", "submit": time.time()}
        store.upsert_jobs([{**array, "array_task": ",".join(map(str, range(1001, 1999, 2))) + "%4"}])
    for task in ("1003", "1997"):
        assert pairs(migbatch(record, "show", f"30_{task}"))["Job"].strip().endswith(",...]")
    with pytest.raises(Exception, match="job 30_1002 is not in the record"):
        migbatch(record, "show", "30_1002")


def test_show_names_a_reason_of_a_requeued_run_only_if_it_was_a_misfit(record):
    """The reason for which it waited before its start is not why it was requeued."""
    url = record.read_text().split("'")[1]
    job = {"job_id": 9, "restarts": 0, "state": "PENDING", "submit": 1.0, "reason": "Priority"}
    again = {"job_id": 9, "restarts": 1, "state": "PENDING", "submit": 9.0, "reason": "BeginTime"}
    with open_store(url) as store:
        store.upsert_jobs([job])
        store.upsert_jobs([{**job, "state": "RUNNING", "start": 2.0, "reason": "None"}])
        store.upsert_jobs([again])
    states = re.findall(r"^State: +(.*)", migbatch(record, "show", "9", "-D"), re.MULTILINE)
    assert states == ["REQUEUED", "PENDING: BeginTime"]
    with open_store(url) as store:
        event = {"kind": "misfit", "job": 9, "restart": 1, "reason": "no slot"}
        store.ingest("n1", "ab", "b1", [{"seq": 7, "ts": time.time(), **event}])
    assert "REQUEUED: misfit on n1: no slot" in migbatch(record, "show", "9")


def test_show_says_why_migbatchd_ended_a_run(record):
    url = record.read_text().split("'")[1]
    job = {"job_id": 9, "restarts": 0, "state": "RUNNING", "submit": 1.0, "start": 2.0}
    act = {"ts": 5.0, "job_id": 9, "restart": 0, "kind": "preempt", "before": "RUNNING", "dry_run": False}
    why = "job 12, which may preempt it, needs a slice of another profile in its place"
    with open_store(url) as store:
        store.upsert_jobs([job])
        store.save_loans([], [{**act, "after": "TERM", "why": why}])
    assert "Ended by" not in migbatch(record, "show", "9")
    with open_store(url) as store:
        store.upsert_jobs([{**job, "restarts": 1, "state": "PENDING", "start": None, "reason": "BeginTime"}])
        store.save_loans([], [{**act, "after": "PENDING", "why": why}])
    first, second = migbatch(record, "show", "9", "-D").split("\n\n")
    assert pairs(first)["Ended by"].strip() == f"migbatchd, preempted: {why}"
    assert "Ended by" not in second


def test_control_characters_in_job_names_are_not_printed(record):
    with open_store(f"sqlite:///{record.parent}/db") as store:
        store.upsert_jobs([{"job_id": 7, "name": "evil\x1b[2J\nName: good", "user": "ann", "state": "RUNNING"}])
    shown = migbatch(record, "show", "7")
    assert "\x1b" not in shown
    assert "\nName: good" not in shown


def test_nodes_command_works_without_slurm(record):
    shown = migbatch(record, "nodes")
    assert "|3g.40gb 8              |!1g  |.....|.....|.....|" in shown
    assert "mixed" in shown
    reasons = migbatch(record, "nodes", "-R", "--noheader")
    assert "fell off the bus; drained n1 (drained)" in reasons
    assert "1g.10gb at 4:1 is a zombie: in use" in reasons
    data = json.loads(migbatch(record, "nodes", "--json"))
    assert data["nodes"][0]["gpus"][0]["held"][0] == {
        "profile": "3g.40gb", "start": 0, "size": 4, "job": 8, "jobid": "8",
    }  # fmt: skip
    with pytest.raises(Exception, match="no MIG node named n7"):
        migbatch(record, "nodes", "-n", "n[1,7]")


def test_nodes_command_shows_why_a_gpu_has_no_slices(record):
    """Of a GPU that is lost, MIG seems to be off."""
    lost = "GPU 0 (GPU-1): looking it up: the GPU fell off the bus; it needs a reset or a reboot (NVML code 15)"
    off = "GPU 1 (GPU-2): its profiles: not supported: MIG is off or not available on this GPU (NVML code 3)"
    own = {"name": "H100", "mig": False}
    gpus = [
        {**own, "uuid": f"GPU-{n}", "index": n - 1, "minor": n - 1, "problem": why} for n, why in ((1, lost), (2, off))
    ]
    with open_store(load(record).store.url) as store:
        store.ingest("n2", "cd", "b1", [{"seq": 1, "ts": time.time(), "kind": "inventory", "gpus": gpus}])
    shown = migbatch(record, "nodes", "-n", "n2", "--noheader").splitlines()
    assert "  the GPU fell off the bus  " in shown[0] and "  MIG is off or not available on this GPU" in shown[1]
    reasons = migbatch(record, "nodes", "-n", "n2", "-R", "--noheader")
    assert lost in reasons and off in reasons


def test_nodes_command_shows_jobs_on_a_gpu_that_its_node_does_not_use(record):
    held = {"gpu": "GPU-a", "profile": "3g.40gb", "start": 4, "size": 4, "gi": 1, "ci": 0, "mig_uuid": "MIG-1"}
    start = {"kind": "start", "job": 70, "restart": 0, "uid": 1000, "warm": False, "elapsed_ms": 9.5, "slices": [held]}
    unused = {"uuid": "GPU-a", "index": 0, "problem": "GPU-a: the driver failed; it is not used until 10:40"}
    events = [{"kind": "inventory", "gpus": [GPU]}, start, {"kind": "inventory", "gpus": [unused]}]
    with open_store(load(record).store.url) as store:
        store.ingest("n2", "cd", "b1", [{"seq": n, "ts": time.time(), **e} for n, e in enumerate(events, 1)])
        inventory = store.inventory()
    assert cut_by_mig(inventory, {"n2"}).keys() == {"n2"}, "slurm.conf counts the slices of a GPU with a fault"
    (shown,) = migbatch(record, "nodes", "-n", "n2", "--noheader").splitlines()
    assert "|xxxxx|xxxxx|xxxxx|xxxxx|3g.40gb 70             |  fault  " in shown
    assert "not used until 10:40" in migbatch(record, "nodes", "-n", "n2", "-R", "--noheader")
    page = migbatch(record, "top", "-b", "-n", "1")
    assert re.search(r"n2 +0 \|xxx+\|xxx+\|xxx+\|xxx+\|=3g.40gb 70=", page), page
    with open_store(load(record).store.url) as store:
        store.ingest("n2", "cd", "b1", [{**start, "seq": 4, "ts": time.time(), "kind": "stop", "exit_code": 0}])
    (shown,) = migbatch(record, "nodes", "-n", "n2", "--noheader").splitlines()
    assert "  the driver failed  " in shown and "  fault  " in shown


def test_types_that_are_not_slices_are_not_counted_as_free():
    """Slurm counts `guest` beside the profiles where two training jobs share a slice."""
    counts = {"1g.10gb": 2, "3g.40gb": 1, "guest": 1, "loan": 1, "none": 2}
    assert free_counts(NodeRow("n1", frozenset({"MIXED"}), counts, {"3g.40gb": 1})) == {"1g.10gb": 2}


@pytest.mark.parametrize(
    ("states", "offered"),
    [({"MIXED"}, {"1g.10gb": 3}), ({"MIXED", "DRAIN"}, {}), ({"DOWN"}, {}), ({"IDLE", "POWERED_DOWN"}, {"1g.10gb": 3})],
)
def test_nodes_command_shows_what_slurm_can_allocate_now(record, states, offered):
    row = NodeRow("n1", frozenset(states), {"1g.10gb": 3, "none": 4})
    with open_store(load(record).store.url, readonly=True) as store:
        (node,) = view(store, [row], (), ())
    assert node.offered == offered


class Listing(list):
    """A list that counts how often it is read."""

    read = 0

    def __iter__(self):
        self.read += 1
        return super().__iter__()


def test_work_for_many_nodes_grows_with_their_number_alone(tmp_path):
    rows = Listing(NodeRow(f"n{number}", frozenset({"IDLE"}), {"1g.10gb": 7}) for number in range(20))
    leases = Listing(LeaseRow(row.name, "GPU-a", "1g.10gb", 0, 1, 7, 0, 1.0) for row in rows)
    gpu = {"uuid": "GPU-a", "index": 0, "mig": True, "name": "x", "geometry": None}
    with open_store(f"sqlite:///{tmp_path}/migbatch.db") as store:
        for row in rows:
            store.ingest(row.name, "a1", "b1", [{"seq": 1, "ts": 1.0, "kind": "inventory", "gpus": [gpu]}])
        rows.read = leases.read = 0
        views = view(store, rows, leases, {7})
    assert [len(gpu.held) for node in views for gpu in node.gpus] == [1] * 20
    list(check_nodes(rows, None, {}, 1010.0, Config()))
    assert (leases.read, rows.read < 10) == (1, True)


def test_gpu_bar_shows_occupied_slots():
    assert bar(GpuView(0, "g", "x", 0, ())) == "MIG is off"
    assert bar(GpuView(0, "g", "x", 2, ())) == "|.....|.....|"
    assert bar(GpuView(0, "g", "x", 2, (OccupiedSlot("1g.10gb", 1, 1, 123456),))) == "|.....|1g 1+|"
    assert bar(GpuView(0, "g", "x", 2, (OccupiedSlot("1g.10gb", 1, 1, 12345),))) == "|.....|12345|"
    assert bar(GpuView(0, "g", "x", 2, (OccupiedSlot("1g.10gb", 0, 1),))) == "|!1g  |.....|"
    assert bar(GpuView(0, "g", "x", 2, (OccupiedSlot("9g.9gb", 1, 5, 1),))) == "|.....|.....|"
    assert GpuView(0, "g", "x", 2, (OccupiedSlot("2g", 0, 2, 1),)).state == "full"


def test_slice_that_two_jobs_share_is_occupied_once():
    gpu = GpuView(0, "g", "x", 4, (OccupiedSlot("2g.20gb", 0, 2, 7), OccupiedSlot("2g.20gb", 0, 2, 8)))
    assert gpu.state == "mixed"
    assert bar(gpu) == "|2g.20gb 7+8|.....|.....|"


def test_nodes_command_names_array_tasks_as_slurm_does(record):
    with open_store(load(record).store.url) as store:
        store.upsert_jobs([{"job_id": 8, "state": "RUNNING", "array_job": 5, "array_task": "3"}])
    assert "3g.40gb 5_3" in migbatch(record, "nodes")
    (held, *_) = json.loads(migbatch(record, "nodes", "--json"))["nodes"][0]["gpus"][0]["held"]
    assert (held["job"], held["jobid"]) == (8, "5_3")


def queue_row(job, **more):
    return JobRow(job, user="ann", partition="gpu", gres="gres/mig:3g.40gb:1", **more)


def test_why_combines_queue_record_and_supply():
    nodes = [
        NodeRow("n1", frozenset({"IDLE"}), {"3g.40gb": 2, "none": 1}, {"3g.40gb": 1}, ("gpu",)),
        NodeRow("n2", frozenset({"IDLE", "DRAIN"}), {"3g.40gb": 2}, {}, ("gpu",)),
    ]
    row = queue_row(5, reason="Priority", priority=10)
    lines = dict(describe(row, [row, queue_row(4, priority=20)], nodes, DECISION, "reserved: somewhere"))
    assert lines["Needs"] == "1 x 3g.40gb"
    assert lines["Slurm"] == "Priority; 1 pending jobs have a higher priority"
    assert lines["Offered"] == "3g.40gb: 1 on n1"
    assert lines["Supply"] == "reserved: somewhere"
    nowhere = dict(describe(row, [row], nodes[1:], None, ""))
    assert nowhere["Offered"] == "3g.40gb: not offered at the moment"
    array = queue_row(30, array_job=30, array_task="4-9%5", tasks=6)
    for listed, name in (
        (row, "5 of ann in gpu"),
        (array, "30_[4-9%5] of ann in gpu, 6 tasks"),
        (queue_row(33, array_job=30, array_task="3"), "30_3 of ann in gpu"),
    ):
        assert dict(describe(listed, [listed], None, None, ""))["Job"] == name


LOAN_COMMENT = "migbatch: model=bert-large role=train [mig:loan:1#loan7fq3k]"


class PlayedSite(QuerySite):
    """A site with a training job in the queue that waits for a loan."""

    def slurm(self):
        row = JobRow(5, user="ann", partition="train", gres="gres/mig:loan:1", comment=LOAN_COMMENT, reason="Resources")
        methods = {"jobs": lambda _: [row], "nodes": lambda _: []}
        return type("Played", (), methods)()

    def daemon(self, path):
        assert path == "/v1/why/5"
        return json.dumps({"why": "slices that are idle are kept for inference", "in_full": ""}).encode()


@pytest.mark.parametrize("partitions", [("train",), ()], ids=["lending", "not lending"])
def test_why_shows_the_loan_decision_and_wait_reason_of_a_training_job(record, partitions):
    config = load(str(record))
    with open_store(config.store.url) as store:
        message = "migbatch: waits for an idle slice, 1g.10gb to 7g.80gb"
        store.record_decisions([{**DECISION, "id": "loan7fq3k", "message": message, "candidates": []}])
    lending = replace(config.lending, enabled=True, partitions=partitions)
    site = PlayedSite(replace(config, lending=lending), quiet=True)
    values = pairs("\n".join(answer(WhyQuestion(job="5"), Rights(0, everything=True), site).lines))
    values = {key: value.strip() for key, value in values.items()}
    assert values["Requested"] == DECISION["asked"] and values["Bucket"] == DECISION["bucket"]
    assert values["Decision"] == "waits for an idle slice, 1g.10gb to 7g.80gb"
    assert values["Needs"] == "a loan of a slice"
    assert values["Lending"] == "slices that are idle are kept for inference"
    assert "Supply" not in values and "Expected" not in values


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "without in_full"])
@pytest.mark.parametrize(("uid", "sees"), [(1001, True), (0, True), (1002, False)])
def test_why_shows_a_pipeline_to_its_user_and_operators_only(record, complete, uid, sees):
    tied = "pipeline merger-with-acme: 2 unfinished jobs are predicted to take 1:25:00 at most"
    row = JobRow(5, uid=1001, user="ann", partition="gpu", gres="gres/mig:3g.40gb:1", reason="Dependency")
    reply = {"why": "reserved on n1", "in_full": f"reserved on n1; {tied}"}
    if not complete:
        reply = {"why": f"reserved on n1; {tied}"}

    class Site(QuerySite):
        def slurm(self):
            return type("Played", (), {"jobs": lambda _: [row], "nodes": lambda _: []})()

        def daemon(self, path):
            return json.dumps(reply).encode()

    rights = Rights(uid, everything=uid == 0, private=frozenset())
    shown = "\n".join(answer(WhyQuestion(job="5"), rights, Site(load(str(record)), quiet=True)).lines)
    assert (tied in shown) is ("merger" in shown) is (complete and sees)
    assert ("reserved on n1" in shown) is complete
    assert ("no answer from migbatchd" in shown) is not complete


def test_why_shows_the_throttle_of_an_elastic_array():
    hints = "migbatch: model=x role=serve rate=90 [mig:3g.40gb:1#abc]"
    row = queue_row(30, array_job=30, array_task="4-9%5", tasks=6, throttle=5, comment=hints)
    done = {"kind": "throttle", "after": "5", "dry_run": False, "outcome": None, "why": "90 items/s: 5 at once"}
    assert tasks_at_once(row, [done]) == "5: 90 items/s: 5 at once"
    assert tasks_at_once(replace(row, tasks=1, throttle=None), [done]).startswith("5: ")
    for other in ({**done, "outcome": "refused"}, {**done, "dry_run": True}, {**done, "after": "7"}):
        assert tasks_at_once(row, [other]) == "5, set by its user"
    failed = {**done, "after": "9"}
    assert tasks_at_once(row, [done, failed, {**failed, "outcome": "timed out"}]) == "5: 90 items/s: 5 at once"
    assert "no limit" in tasks_at_once(replace(row, throttle=None), [])
    assert tasks_at_once(replace(row, comment=""), [done]) == tasks_at_once(row, None) == ""
    assert dict(describe(row, [row], None, None, "", at_once="5: so"))["At once"] == "5: so"
    assert "At once" not in dict(describe(row, [row], None, None, ""))


def test_why_does_not_call_a_job_started_whose_row_cannot_be_read(record):
    class OddSite(QuerySite):
        def slurm(self):
            row = JobRow(5, state=UNREAD, reason="its state 'ODD' is unknown")
            return type("Played", (), {"jobs": lambda _: [row], "nodes": lambda _: []})()

    with pytest.raises(Unanswerable) as refused:
        answer(WhyQuestion("5"), Rights(0, everything=True), OddSite(load(record)))
    sentence = str(refused.value)
    assert sentence == "Slurm's row of job 5 cannot be parsed (its state 'ODD' is unknown), so it is left alone"
    with pytest.raises(Unanswerable) as refused:
        answer(WhyQuestion("5"), Rights(1000, private=frozenset()), OddSite(load(record)))
    assert str(refused.value) == "Slurm's row of job 5 cannot be parsed, so it is left alone"


def test_why_refers_only_to_jobs_that_are_in_the_record(record):
    class EmptySite(QuerySite):
        def slurm(self):
            return type("Played", (), {"jobs": lambda _: [], "nodes": lambda _: []})()

    def refusal(job, rights=None, config=None):
        with pytest.raises(Unanswerable) as refused:
            answer(WhyQuestion(job), rights or Rights(0, everything=True), EmptySite(config or load(record)))
        return str(refused.value)

    assert refusal("7") == "Slurm does not list job 7; `migbatch show 7` shows its result"
    assert "job 999 is not in the record" in refusal("999")
    assert "job 7 is not in the record" in refusal("7", Rights(1001, private=frozenset({"jobs"})))
    absent = loads(f"[store]\nurl = 'sqlite:///{record.parent}/absent/db'\n")
    assert refusal("999", config=absent) == "Slurm does not list job 999; `migbatch show 999` shows its result"


def test_faults_that_drained_a_node_stay_among_many_lesser_ones():
    def fault(what, drain=False):
        return {"kind": "fault", "gpu": None, "what": what, "action": "", "drain": drain}

    lost, lesser = fault("a GPU is lost", True), [fault(f"process {number}") for number in range(9)]
    assert troubles({"n1": [lost, *lesser]})[1]["n1"] == [
        "a GPU is lost (drained)", "process 6", "process 7", "process 8"
    ]  # fmt: skip
    again = [fault("cannot destroy"), fault("no answer"), *[fault("cannot destroy")] * 5]
    assert troubles({"n1": again})[1]["n1"] == ["no answer", "cannot destroy"]


def test_why_finds_array_tasks_and_het_job_components():
    waiting = queue_row(30, array_job=30, array_task="4-9", tasks=6)
    task = queue_row(31, array_job=30, array_task="3", state="RUNNING")
    part = queue_row(41, het_job=40)
    queue = [task, waiting, part]
    assert find(queue, JobId(30)) is waiting
    assert find(queue, JobId(30, "3")) is task
    assert find(queue, JobId(30, "7")) is waiting
    assert find(queue, JobId(30, "10")) is None
    last = queue_row(30, array_job=30, array_task="9%1")
    assert find([last], JobId(30, "9")) is last
    for printed in ("30_[4-9]", "30_[4,7-9%2]", "30_[4-9:5%1]", "30_[4,6,1...%2]"):
        assert find(queue, job_id(printed)) is waiting
    assert job_id("40+1") == JobId(40, None, 1)
    assert find(queue, JobId(40, None, 1)) is part
    assert find(queue, JobId(99)) is None


def test_why_finds_the_component_with_slices_of_a_heterogeneous_job():
    first, part = JobRow(40, user="ann", het_job=40), queue_row(41, het_job=40)
    assert find([first, part], JobId(40)) is part
    assert find([first, part], JobId(40, None, 0)) is first
    loan = JobRow(51, user="ann", het_job=50, gres="gres/mig:loan:1")
    assert find([JobRow(50, user="ann", het_job=50), loan], JobId(50)) is loan
    started = replace(part, state="RUNNING")
    assert find([started, first], JobId(40)) is first


def test_doctor_checks_slurms_configuration():
    good = {
        "grestypes": "gpu,mig",
        "jobsubmitplugins": "lua",
        "prolog[0]": "/etc/migbatch/hooks/prolog",
        "epilog": "/etc/migbatch/hooks/epilog",
        "taskprolog": "/etc/migbatch/hooks/task_prolog",
        "prologflags": "Alloc,DeferBatch",
        "prologepilogtimeout": "65534",
    }
    assert {f.level for f in check_slurm_conf(good)} == {"ok"}
    assert {f.level for f in check_slurm_conf({**good, "proctracktype": "proctrack/cgroup"})} == {"ok"}
    (left,) = [f for f in check_slurm_conf({**good, "proctracktype": "proctrack/linuxproc"}) if f.level != "ok"]
    assert left.level == "warn" and left.subject == "ProctrackType" and "outlives the job" in left.text and left.advice
    bad = check_slurm_conf({"grestypes": "gpu", "prologepilogtimeout": "10 sec"})
    wrong = {f.subject for f in bad if f.level == "FAIL"}
    assert wrong == {
        "GresTypes", "JobSubmitPlugins", "Prolog", "Epilog", "TaskProlog", "PrologFlags", "PrologEpilogTimeout"
    }  # fmt: skip
    separate = {key: value for key, value in good.items() if key != "prologepilogtimeout"}
    assert {f.level for f in check_slurm_conf({**separate, "prologtimeout": "65534", "epilogtimeout": "60 sec"})} == {
        "ok"
    }
    for short in ({**separate, "prologtimeout": "60 sec", "epilogtimeout": "20 sec"}, {**good, "epilogtimeout": "20"}):
        assert [f.subject for f in check_slurm_conf(short) if f.level == "FAIL"] == ["EpilogTimeout"]
    text = "Configuration data as of 2026\nPrologFlags             = Alloc\nGresTypes = (null)\nSLURM_CONF = /x\n"
    assert parse_settings(text) == {"prologflags": "Alloc", "grestypes": "", "slurm_conf": "/x"}


def test_doctor_checks_nodes():
    idle, down = frozenset({"IDLE"}), frozenset({"DOWN"})
    catalog = NodeRow("no-mig-slice-free", down, {"1g.10gb": 14, "none": 0}, {}, ("gpu",))
    rows = [
        NodeRow("n1", idle, {"1g.10gb": 7}, {}, ("gpu",)),
        NodeRow(
            "n2", frozenset({"IDLE", "DRAIN", "INVAL"}), {"2g.20gb": 7}, {}, ("gpu", "big"), "gres/mig count changed"
        ),
        catalog,
    ]
    found = list(check_nodes(rows, {"n1": []}, {"n1": 1000.0}, 1010.0, Config()))
    texts = {(f.level, f.subject): f.text for f in found}
    assert ("ok", "n1") in texts
    assert "refuses its registration: gres/mig count changed" in next(f.text for f in found if f.subject == "n2")
    assert "has reported no GPUs" in texts["FAIL", "n2"] or any("reported no GPUs" in f.text for f in found)
    assert any("does not list 2g.20gb" in f.text for f in found)
    assert any("not in partition big" in f.text for f in found)
    assert all(f.advice for f in found if f.level != "ok")
    assert "n[1-2] or the catalog node lacks the feature mig_node_<name>" in texts["warn", "node features"]


def test_doctor_finds_profiles_that_slurm_cannot_tell_apart():
    def profile_findings(partition):
        nodes = [
            NodeRow("a100", frozenset({"IDLE"}), {"4g.20gb": 1, "1g.5gb": 3}, {}, ("gpu",)),
            NodeRow("b200", frozenset({"IDLE"}), {"1g.23gb": 7, "7g.180gb": 0}, {}, (partition,)),
        ]
        return [f.text for f in check_nodes(nodes, {}, {}, 0.0, Config()) if f.subject == "profiles"]

    assert profile_findings("new") == []
    assert profile_findings("gpu") == [
        "Slurm takes 1g.23gb and 4g.20gb in partition gpu for the same: it compares a sum of their bytes"
    ]


def test_doctor_checks_node_features():
    def feature_level(own, listed):
        node = NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7}, {}, ("gpu",), features=frozenset(own))
        catalog = NodeRow("no-mig-slice-free", frozenset({"DOWN"}), {}, features=frozenset(listed))
        found = check_nodes([node, catalog], {}, {}, 0.0, Config())
        return next(f.level for f in found if f.subject == "node features")

    assert feature_level({"mig_node_n1", "x"}, {"mig_node_n1"}) == "ok"
    assert feature_level({"mig_node_n1"}, set()) == feature_level(set(), {"mig_node_n1"}) == "warn"


SHOWN = (
    "PartitionName=gpu AllowGroups=ALL Nodes=no-mig-slice-free,n1 PriorityTier=10 PreemptMode=OFF State=UP\n"
    "PartitionName=train AllowGroups=ALL Nodes=no-mig-slice-free,n1 PriorityTier=1 PreemptMode=REQUEUE State=UP\n"
)
LENDS = loads('[lending]\nenabled = true\npartitions = ["train"]\n')


def checked_lending(shown=SHOWN, conf=None, catalog=None, node=None, version=(24, 11), config=LENDS):
    catalog = {"1g.10gb": 14, "none": 0, "loan": 2, "guest": 1} if catalog is None else catalog
    rows = [
        NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7, **(node or {})}, {}, ("gpu", "train")),
        NodeRow("no-mig-slice-free", frozenset({"DOWN"}), catalog, {}, ("gpu", "train")),
    ]
    conf = {
        "jobrequeue": "1", "preempttype": "preempt/partition_prio", "preemptexempttime": "00:30:00"
    } | (conf or {})  # fmt: skip
    return list(check_lending(config, conf, rows, parse_partitions(shown), version))


def lending_said(*arguments, **more):
    found = checked_lending(*arguments, **more)
    assert all(f.advice for f in found if f.level != "ok")
    return [(f.level, f.text) for f in found if f.level != "ok"]


def test_doctor_checks_lending():
    assert lending_said() == []
    (requeue,) = lending_said(conf={"jobrequeue": "0"})
    assert requeue[0] == "FAIL" and "JobRequeue" in requeue[1]
    assert lending_said(conf={"maxpreemptrequeue": "0"}) == []
    (bounded,) = lending_said(conf={"maxpreemptrequeue": "100"})
    assert bounded[0] == "warn" and "MaxPreemptRequeue is 100: Slurm holds a training job" in bounded[1]
    (catalog,) = lending_said(catalog={"1g.10gb": 14})
    assert catalog[0] == "FAIL" and "mig:loan:2, mig:guest:1" in catalog[1]
    (preempt,) = lending_said(conf={"preempttype": "preempt/none"})
    assert preempt[0] == "warn" and "migbatchd is down" in preempt[1]
    (mode,) = lending_said(shown=SHOWN.replace("PreemptMode=REQUEUE", "PreemptMode=OFF"))
    assert mode == preempt
    qos, off = {"preempttype": "preempt/qos"}, SHOWN.replace("PreemptMode=REQUEUE", "PreemptMode=OFF")
    assert lending_said(shown=off, conf=qos) == [preempt]
    assert "QOS" in next(f.advice for f in checked_lending(off, qos) if f.level == "warn")
    contained = {"jobcontainertype": "job_container/tmpfs"}
    assert lending_said(conf=contained) == []
    *_, container = lending_said(conf=contained, node={"loan": 1}, version=(22, 5))
    assert container[0] == "warn" and "job_container/tmpfs: on this release" in container[1]
    (exempt,) = lending_said(conf={"preemptexempttime": "00:00:00"})
    assert exempt[0] == "warn" and "PreemptExemptTime is 0" in exempt[1]
    (tier,) = lending_said(shown=SHOWN.replace("PriorityTier=10", "PriorityTier=1"))
    assert tier[0] == "warn" and "PriorityTier" in tier[1]
    (missing,) = lending_said(shown=SHOWN.splitlines()[0])
    assert missing[0] == "FAIL" and "no such partition" in missing[1]


def test_doctor_requires_the_loan_gres_on_nodes_of_slurm_22_05():
    old = lending_said(version=(22, 5))
    assert [level for level, _ in old] == ["warn", "FAIL"] and "n1: Slurm 22.05 needs mig:loan:1" in old[1][1]
    assert [level for level, _ in lending_said(version=(22, 5), node={"loan": 1})] == ["warn"]


def test_slurm_conf_of_a_site_that_lends():
    gpus = cut_by_mig({"n1": [GPU]}, {"n1"})
    for version, spare in (((24, 11), 0), ((22, 5), 1)):
        site = describe_site(gpus, version, "no-mig-slice-free", ("train",))
        assert site.nodes[0].counts.get("loan", 0) == spare
        text = render_site("slurm.conf.j2", site=site)
        assert "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n" in text
        assert "NodeName=no-mig-slice-free Name=mig Type=loan Count=2 " in render_site("gres.conf.j2", site=site)
        assert ("NodeName=n1 Name=mig Type=loan" in render_site("gres.conf.j2", site=site)) == bool(spare)
    site = describe_site(gpus, (22, 5), "no-mig-slice-free")
    assert "Preempt" not in render_site("slurm.conf.j2", site=site) and "loan" not in site.nodes[0].counts
    assert "mig:loan:2,mig:guest:1" in render_site("slurm.conf.j2", site=site)  # ready for when lending is enabled


def test_slurm_conf_is_built_from_what_nodes_report():
    inventory = {"n1": [GPU], "n2": [GPU], "n3": [{**GPU, "mig": False}], "n4": [GPU]}
    site = describe_site(cut_by_mig(inventory, {"n1", "n2", "n3"}), (24, 11), "no-mig-slice-free")
    (line,) = site.nodes
    assert line.names == "n[1-2]"
    assert line.counts == {"7g.80gb": 0, "3g.40gb": 0, "2g.20gb": 0, "1g.10gb": 7, "none": 0}
    most = {"7g.80gb": 1, "3g.40gb": 2, "2g.20gb": 3, "1g.10gb": 7}
    assert site.catalog.counts == {**most, "none": 0, "loan": 2, "guest": 1}
