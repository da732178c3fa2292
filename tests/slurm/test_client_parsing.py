"""Rows parsed from the recorded output of Slurm's commands, for every recorded release."""

from __future__ import annotations

import dataclasses
import re
import shlex
import stat
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.slurm.cli import CliClient
from slurm_migbatch.slurm.client import WHOLE, JobRow, NodeRow, SlurmError, SlurmRefused, merge_partitions, row_of
from slurm_migbatch.slurm.dialog import line
from slurm_migbatch.slurm.listing import (
    SQUEUE_FIELDS,
    JobReader,
    parse_field,
    parse_jobs,
    parse_nodes,
    sharing_of,
    squeue_command,
)
from slurm_migbatch.slurm.taskexpr import count_tasks, expand_tasks
from slurm_migbatch.slurm.unread import Unread
from slurm_migbatch.slurm.versions import NEWEST, parse_version

ASSETS = Path(__file__).parent / "assets"
MARK, NEXT = "\x1f0123456789abcdef\x1f", "\x1ffedcba9876543210\x1f"
RELEASES = sorted(folder.name for folder in ASSETS.iterdir() if folder.is_dir())


def recorded(release: str, name: str) -> str:
    return (ASSETS / release / f"{name}.txt").read_bytes().decode("utf-8", "surrogateescape")


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def jobs(release: str) -> dict[int, JobRow]:
    sharing = sharing_of(parse_version(recorded(release, "version")))
    return {row.job_id: row for row in merge_partitions(parse_jobs(recorded(release, "jobs"), MARK, sharing))}


@pytest.fixture
def nodes(release: str) -> dict[str, NodeRow]:
    return {row.name: row for row in parse_nodes(recorded(release, "nodes"))}


def test_version_is_parsed_for_every_recorded_release(release: str) -> None:
    assert "{}.{:02d}".format(*parse_version(recorded(release, "version"))) == release


def test_the_newest_release_is_recorded() -> None:
    assert "{}.{:02d}".format(*NEWEST) == RELEASES[-1]


@pytest.mark.parametrize("text", ["", "slurm twenty", "slurm 21.08.8", "slurm-wlm 20.11.4"])
def test_unsupported_or_malformed_versions_are_refused(text: str) -> None:
    with pytest.raises(SlurmError, match=r"not a Slurm release|too old"):
        parse_version(text)


def test_free_text_does_not_break_its_row(jobs: dict[int, JobRow]) -> None:
    assert (jobs[1].name, jobs[1].comment) == ("two\nlines", "a\x1fb\x1e|%\nNodeName=x Gres=y é")
    assert (jobs[1].state, jobs[1].nodes, jobs[1].time_limit_s) == ("RUNNING", ("n1",), 600)
    assert jobs[1].end is not None
    assert jobs[1].start is not None
    assert jobs[1].end - jobs[1].start == 600


def test_requests_of_jobs_are_parsed(jobs: dict[int, JobRow]) -> None:
    assert re.fullmatch(r"gres[:/]mig:7g.80gb:1", jobs[4].gres)
    assert jobs[4].pending
    assert not jobs[4].active
    assert sorted(jobs[4].partition.split(",")) == ["gpu", "train"]
    assert jobs[4].time_limit_s == 86400
    assert jobs[3].num_nodes == 2
    assert jobs[3].nodes == ("n1", "n2")
    assert jobs[10].requested_nodes == "n2"
    assert jobs[11].gres == ""
    assert jobs[2].time_limit_s is None


def test_reasons_begin_times_and_dependencies_are_parsed(jobs: dict[int, JobRow]) -> None:
    assert jobs[5].reason == "BeginTime"
    assert jobs[5].eligible is not None
    assert jobs[5].eligible - jobs[5].submit == pytest.approx(3600, abs=2)
    assert (jobs[6].reason, jobs[6].priority) == ("JobHeldUser", 0)
    assert (jobs[9].reason, jobs[9].eligible, jobs[9].after) == ("Dependency", None, (1,))
    assert not jobs[8].after


def test_exclusive_jobs_are_those_that_squeue_shows_alone_on_their_nodes(jobs: dict[int, JobRow]) -> None:
    """Since 26.05 OverSubscribe is NO for all others, too."""
    assert not any(row.exclusive for row in jobs.values())
    for version, shown in (((22, 5), "OverSubscribe"), ((25, 11), "OverSubscribe"), ((26, 5), "Exclusive")):
        sharing = sharing_of(version)
        assert f",{shown}:0|" in squeue_command("|", sharing=sharing)[-1]
        listed = "".join(squeue_row(n, OverSubscribe=text) for n, text in enumerate(("NO", "NODE", "USER", "OK"), 1))
        rows = parse_jobs(listed, MARK, sharing)
        assert [row.exclusive for row in rows].index(True) == (version == (26, 5)), "the first, or the second"


def test_arrays_and_heterogeneous_jobs_are_parsed(jobs: dict[int, JobRow]) -> None:
    assert (jobs[7].array_job, jobs[7].array_task, jobs[7].tasks, jobs[7].throttle) == (7, "0-400:2%4", 201, 4)
    assert (jobs[8].tasks, jobs[8].throttle) == (7, None)
    assert (jobs[12].het_job, jobs[13].het_job) == (12, 12)
    assert (jobs[12].user, jobs[12].uid) == ("mbbob", 1002)


def test_group_qos_and_wckey_are_parsed(jobs: dict[int, JobRow]) -> None:
    """A cluster without accounting has neither QOS nor wckeys."""
    assert {(row.gid, row.qos, row.wckey) for row in jobs.values() if row.user == "mbbob"} == {(1002, "", "")}


def test_pending_jobs_are_returned_in_slurms_order(release: str) -> None:
    rows = merge_partitions(parse_jobs(recorded(release, "jobs"), MARK))
    in_gpu = [row.job_id for row in rows if row.pending and row.priority and "gpu" in row.partition]
    assert in_gpu == sorted(in_gpu)


def test_nodes_are_parsed(nodes: dict[str, NodeRow]) -> None:
    assert set(nodes) == {"n1", "n2", "migcatalog"}
    n1, catalog = nodes["n1"], nodes["migcatalog"]
    assert n1.open
    assert not n1.invalid
    assert n1.used["1g.10gb"] >= 1
    assert sum(n1.gres.values()) > n1.used["1g.10gb"]
    assert n1.partitions
    assert n1.cpus == 64
    assert n1.reason == ""
    assert not catalog.open
    assert catalog.gres["7g.80gb"] == 1
    assert catalog.reason


def test_truncated_listing_is_an_error_and_not_a_short_queue(release: str) -> None:
    text = recorded(release, "jobs")
    for end in range(len(text) - 3, 0, -97):
        cut = text[:end]
        if cut.rstrip("\n").endswith(MARK) and cut.count(MARK) % len(SQUEUE_FIELDS) == 0:
            continue
        with pytest.raises(SlurmError):
            parse_jobs(cut, MARK)


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "NodeName=n1 State=IDLE", "NodeName=n1 CPUAlloc=0 CPUTot=1 Gres=mig:1:2:3:4 GresUsed= State=IDLE"],
)
def test_malformed_node_listing_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError):
        parse_nodes(text)


def test_empty_queue_has_no_rows() -> None:
    assert parse_jobs("", MARK) == []


#: fields that users fill freely, or in which a later release may print more than today's
FREE = ("Name", "Comment", "Account", "tres-per-node", "Feature", "ReqNodes", "Reason", "UserName", "Partition")
PLAIN = dict.fromkeys(SQUEUE_FIELDS, "1") | {"State": "PENDING", "ArrayTaskID": "N/A", "TimeLimit": "1:00"}
#: any text, and text made of the separators that squeue, Slurm and migbatch use
texts = st.one_of(
    st.text(st.characters(blacklist_categories=["Cs"])),
    st.text("\x1f\x1e\x0b\x0c\x85|\n,:/NA%()=0123456789abcdef"),
    st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")),
)


def squeue_row(job: int, mark: str = MARK, **fields: str) -> str:
    values = PLAIN | {"JobID": str(job)} | {name.replace("_", "-"): value for name, value in fields.items()}
    return "".join(f"{values[name]}{mark}" for name in SQUEUE_FIELDS) + "\n"


@given(st.lists(st.fixed_dictionaries({name.replace("-", "_"): texts for name in FREE}), min_size=1, max_size=4))
def test_no_field_text_can_forge_or_corrupt_a_row(jobs: list[dict[str, str]]) -> None:
    found = parse_jobs("".join(squeue_row(number, **job) for number, job in enumerate(jobs, 1)), MARK)
    nothing = ("", "(null)", "N/A", "NONE", "n/a")
    assert [(row.job_id, row.state, row.name) for row in found] == [
        (number, "PENDING", job["Name"]) for number, job in enumerate(jobs, 1)
    ]
    for row, job in zip(found, jobs, strict=True):
        assert row.comment == ("" if job["Comment"] == "(null)" else job["Comment"])
        assert row.account == ("" if job["Account"] in nothing else job["Account"])
        assert row.gres == ("" if job["tres_per_node"] in nothing else job["tres_per_node"])
        assert row.features == ("" if job["Feature"] in nothing else job["Feature"])


@given(st.dictionaries(st.sampled_from([name for name in SQUEUE_FIELDS if name != "JobID"]), texts, max_size=6))
def test_unreadable_row_is_still_listed_and_does_not_affect_other_rows(odd: dict[str, str]) -> None:
    fields = {name.replace("-", "_"): value for name, value in odd.items()}
    first, second, third = parse_jobs(squeue_row(1) + squeue_row(2, **fields) + squeue_row(3), MARK)
    assert (first.job_id, second.job_id, third.job_id) == (1, 2, 3)
    assert first.pending and third.pending
    if second.unread:
        assert not second.pending and not second.active and second.reason
        assert (second.name, second.gres, second.comment) == ("", "", "")


@pytest.mark.parametrize("state", ["SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD"])
def test_held_job_is_pending_in_all_its_partitions(state: str) -> None:
    """squeue --priority prints a line for each partition of a pending job."""
    lines = [squeue_row(1, State=state, Partition=name, ArrayTaskID="1-3") for name in ("gpu", "train")]
    (row,) = merge_partitions(parse_jobs("".join(lines), MARK))
    assert (row.pending, row.active, row.partition, row.tasks) == (True, False, "gpu,train", 3)


#: the text of a field for each job, in successive listings; users may know the marks of other listings
listings = st.lists(st.dictionaries(st.integers(1, 4), st.one_of(texts, st.just(MARK), st.just("n[1")), max_size=4))


@given(listings, st.sampled_from([name for name in SQUEUE_FIELDS if name != "JobID"]))
def test_successive_listings_are_parsed_like_single_listings(queue: list[dict[int, str]], field: str) -> None:
    reader = JobReader()
    for number, jobs in enumerate(queue):
        mark = f"\x1fcall {number}\x1f"
        output = "".join(squeue_row(job, mark, **{field.replace("-", "_"): text}) for job, text in jobs.items())
        assert reader.read(output, mark) == parse_jobs(output, mark)


def test_row_printed_as_before_is_the_same_object() -> None:
    reader = JobReader()
    first = reader.read(squeue_row(9) + squeue_row(1) + squeue_row(2, Name="a") + squeue_row(3, Name="n"), MARK)
    rows = squeue_row(9, NEXT) + squeue_row(2, NEXT, Name="b") + squeue_row(3, NEXT, Name=f"n{MARK}")
    second = reader.read(rows + squeue_row(1, NEXT), NEXT)
    assert second[0] is first[0]
    assert second[3] is first[1]
    assert [row.name for row in second[1:3]] == ["b", f"n{MARK}"]


class Lowering(CliClient):
    """The client of a Slurm whose `squeue --priority` shows partitions in lower case, as those of tier 1."""

    partitions = "GPU-Long.a100,cpu,Two,two"
    tiers = (5, 1, 20, 10)

    def version(self) -> tuple[int, int]:
        return (25, 11)

    def _run(self, program: str, *arguments: str) -> str:
        if program == "scontrol":
            node = (
                f"NodeName=n1 CPUAlloc=0 CPUTot=8 Gres=mig:1g.10gb:7 GresUsed= State=IDLE Partitions={self.partitions}"
            )
            pairs = zip(self.partitions.split(","), self.tiers, strict=False)
            partitions = [f"PartitionName={name} PriorityTier={tier} State=UP\n" for name, tier in pairs]
            return node if "node" in arguments else "".join(partitions) if "partition" in arguments else ""
        mark = re.search(r"--Format=JobID:0([^,]*)", " ".join(arguments))
        if mark is None or "--array" in arguments:
            return ""
        shown = self.partitions.split(",")
        if "--priority" in arguments:
            shown = [name.lower() for name in shown]
        return "".join(
            squeue_row(1 + at, mark[1], Partition=name, State="PENDING") for at, name in enumerate([*shown, "cpu,Two"])
        )


def test_partitions_that_not_everybody_sees_or_may_use_are_hidden() -> None:
    class Listing(CliClient):
        def _run(self, program: str, *arguments: str) -> str:
            assert "--all" in arguments
            return (
                "PartitionName=gpu AllowGroups=ALL RootOnly=NO Hidden=NO State=UP\n"
                "PartitionName=all AllowGroups=root RootOnly=NO Hidden=YES State=UP\n"
                "PartitionName=admin AllowGroups=ALL RootOnly=YES Hidden=NO State=UP\n"
            )

    assert Listing().hidden_partitions() == {"all", "admin"}


def test_partitions_with_capital_letters_are_as_in_slurm_and_in_its_order() -> None:
    client = Lowering()
    for _ in range(2):
        assert [row.partition for row in client.jobs()] == ["Two", "Two,cpu", "two", "GPU-Long.a100", "cpu"]
        on_node = [row.partition for row in client.jobs_on(frozenset({"n1"}))]
        assert on_node == ["GPU-Long.a100", "cpu", "Two", "two", "cpu,Two"]
        client.nodes()
    client.partitions = "gpu-long.a100,cpu,two"
    client.nodes()
    assert [row.partition for row in client.jobs()][:3] == ["gpu-long.a100", "cpu", "two"]


@pytest.mark.parametrize(
    ("shown", "tres", "nodes", "per_node", "per_cpu"),
    [
        ("100000M", "cpu=1,mem=100000M,node=1,billing=1", "1", 100_000, 0),
        ("3G", "cpu=2,mem=6G,node=2,billing=2", "2", 3072, 0),
        ("3333M", "cpu=5,mem=16665M,node=2,billing=5", "2", 0, 3333),
        ("1.50T", "cpu=1,mem=1.50T,node=1", "1-3", 1_572_864, 0),
        ("0", "cpu=1,mem=500000M,node=1,billing=1", "1", WHOLE, 0),
        ("450G", "cpu=1,node=1,billing=1", "1", 460_800, 0),
        ("1Q", "cpu=1,mem=many", "1", 0, 0),
        ("N/A", "N/A", "1", 0, 0),
    ],
)
def test_memory_of_jobs_is_parsed(shown: str, tres: str, nodes: str, per_node: int, per_cpu: int) -> None:
    fields = {"MinMemory": shown, "tres_alloc": tres, "NumNodes": nodes}
    (row,) = parse_jobs(squeue_row(1, **fields), MARK)
    assert (row.memory_per_node, row.memory_per_cpu) == (per_node, per_cpu)


def test_recorded_jobs_without_a_memory_request_need_the_whole_memory(jobs: dict[int, JobRow]) -> None:
    """The recorded site has no DefMemPerNode."""
    assert {row.memory_per_node for row in jobs.values()} == {WHOLE}


def test_memory_of_nodes_is_parsed(nodes: dict[str, NodeRow]) -> None:
    assert (nodes["n1"].memory, nodes["n1"].memory_used) == (500_000, 0)
    text = f"NodeName=n1 {CPUS} Gres=(null) State=IDLE RealMemory=500000 AllocMem=460800 MemSpecLimit=20000\n"
    (row,) = parse_nodes(text)
    assert (row.memory, row.memory_used) == (480_000, 460_800)


def test_owner_of_nodes_is_parsed() -> None:
    for text, owner in (("N/A", ""), ("ann(1001)", "ann"), ("4242(4242)", "4242")):
        (row,) = parse_nodes(f"NodeName=n1 {CPUS} Gres=(null) State=IDLE Owner={text} MCS_label=N/A\n")
        assert row.owner == owner


def test_a_job_that_waits_for_an_expedited_requeue_is_pending() -> None:
    (row,) = parse_jobs(squeue_row(1, State="EXPEDITING"), MARK)
    assert row.pending and not row.unread


@pytest.mark.parametrize(("account", "reason"), [("(null)", "None"), ("physics", "InvalidAccount")])
def test_invalid_account_reason_is_ignored_for_a_job_without_account(account: str, reason: str) -> None:
    (row,) = parse_jobs(squeue_row(1, State="PENDING", Reason="InvalidAccount", Account=account), MARK)
    assert row.reason == reason


def test_rows_of_similar_jobs_share_equal_values() -> None:
    kind = {"NodeList": "node7", "tres_per_node": "gres/mig:1g.10gb:1", "State": "RUNNING", "Account": "physics"}
    first, second = parse_jobs(squeue_row(1, **kind) + squeue_row(2, **kind), MARK)
    shared = ("user", "account", "partition", "state", "reason", "nodes", "gres", "qos")
    assert first.nodes == ("node7",)
    assert all(getattr(first, name) is getattr(second, name) for name in shared)


def test_row_of_builds_the_same_row_as_the_constructor() -> None:
    values = {field.name: object() for field in dataclasses.fields(JobRow)}
    row = row_of(*values.values())
    assert row == JobRow(**values)
    assert type(row) is JobRow
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.state = "RUNNING"
    with pytest.raises(TypeError):
        row_of(1)


def test_truncated_listing_keeps_the_rows_read_before() -> None:
    reader = JobReader()
    (row,) = reader.read(squeue_row(1), MARK)
    with pytest.raises(SlurmError):
        reader.read(squeue_row(2)[:-9], MARK)
    assert reader.read(squeue_row(1), MARK)[0] is row


@pytest.mark.parametrize("field", ["UserID", "TimeLimit", "NodeList", "ArrayTaskID"])
def test_reason_of_an_unread_row_names_the_unreadable_text(field: str) -> None:
    (row,) = parse_jobs(squeue_row(7, **{field: "n[1"}), MARK)
    assert (row.job_id, row.unread) == (7, True)
    assert "n[1" in row.reason


def test_job_in_a_state_of_a_later_release_is_unread() -> None:
    (row,) = parse_jobs(squeue_row(7, State="THAWING", NodeList="n1"), MARK)
    assert (row.job_id, row.unread) == (7, True)
    assert "THAWING" in row.reason


def test_times_are_also_read_in_slurms_own_form() -> None:
    """A release that does not follow SLURM_TIME_FORMAT must not make every job one without times."""
    at = datetime(2026, 9, 21, 14, 13, 20)
    times = ("SubmitTime", "EligibleTime", "StartTime", "EndTime")
    (row,) = parse_jobs(squeue_row(7, **dict.fromkeys(times, at.isoformat())), MARK)
    assert (row.submit, row.eligible, row.start, row.end) == (at.timestamp(),) * 4
    (none,) = parse_jobs(squeue_row(7, SubmitTime="Unknown", EligibleTime="N/A", StartTime="0", EndTime="NONE"), MARK)
    assert (none.submit, none.eligible, none.start, none.end) == (0.0, None, None, None)
    (odd,) = parse_jobs(squeue_row(7, EligibleTime="21.Sep.2026"), MARK)
    assert odd.unread and "21.Sep.2026" in odd.reason


def test_invalid_job_id_is_an_error_but_a_leading_warning_is_skipped() -> None:
    with pytest.raises(SlurmError, match="instead of a job id"):
        parse_jobs(squeue_row(1) + squeue_row(2, JobID="x"), MARK)
    (row,) = parse_jobs("slurmctld: a warning\n" + squeue_row(1), MARK)
    assert row.job_id == 1


@given(st.lists(texts, max_size=5))
def test_gres_of_each_job_is_parsed_whatever_its_text(listed: list[str]) -> None:
    output = "".join(f"{number}{MARK}{text}{MARK}\n" for number, text in enumerate(listed))
    found = parse_field(output, MARK)
    assert list(found) == list(range(len(listed)))
    assert all(found[number] in (text, "") for number, text in enumerate(listed))
    if listed:
        with pytest.raises(SlurmError, match="truncated"):
            parse_field(output.removesuffix(f"{MARK}\n"), MARK)


CPUS = "CPUAlloc=0 CPUTot=64"


def node_row(name: str, **more: str) -> str:
    extra = "".join(f" {key}={value}" for key, value in more.items())
    return f"NodeName={name} {CPUS} Gres=mig:none:1 GresUsed=mig:none:0 State=IDLE Partitions=gpu{extra}\n"


@given(text=texts, key=st.sampled_from(["Reason", "Comment", "Extra"]))
def test_no_text_of_a_node_can_forge_or_corrupt_another_node(text: str, key: str) -> None:
    rows = {row.name: row for row in parse_nodes(node_row("n1", **{key: text}) + node_row("n2"))}
    assert rows["n1"].states == rows["n2"].states == {"IDLE"}
    assert rows["n2"].gres == {"none": 1}


def test_number_in_the_text_of_a_slurmd_that_is_none_hides_no_other_node() -> None:
    """OS= comes before RealMemory=, and Python takes such characters for digits."""
    rows = parse_nodes(node_row("n1", OS="Linux RealMemory=\u00b2") + node_row("n2"))
    assert [(row.name, row.memory) for row in rows] == [("n1", 0), ("n2", 0)]


FORGED = f"x\nNodeName=n2 {CPUS} Gres=mig:7g.80gb:1 GresUsed=mig:7g.80gb:0 State=IDLE"


@pytest.mark.parametrize("key", ["Reason", "Comment", "Extra"])
def test_node_forged_in_another_nodes_text_is_left_out_and_named(key: str) -> None:
    """Unless its own row can be shown."""
    odd: dict[str, str] = {}
    rows = parse_nodes(node_row("n1", **{key: FORGED}) + node_row("n2") + node_row("n3"), odd.__setitem__)
    assert [row.name for row in rows] == ["n1", "n3"]
    assert "2 times" in odd["n2"]


class ForgedNodes(CliClient):
    """The client of a Slurm with these rows of nodes."""

    def __init__(self, **rows: str) -> None:
        super().__init__()
        self.rows, self.asked = rows, list[str]()

    def _finish(self, program: str, *arguments: str, **_: object) -> subprocess.CompletedProcess[bytes]:
        self.asked.append(arguments[-1])
        if program == "sinfo":
            shown = "".join(f"{name}\n" for name in self.rows)
        elif arguments[-1] == "node":
            shown = "".join(self.rows.values())
        elif "node" in arguments:
            names = arguments[-1].split(",")
            shown = "".join(self.rows.get(name, f"Node {name} not found\n") for name in names)
        else:
            shown = ""
        return subprocess.CompletedProcess(arguments, int("not found" in shown), shown.encode(), b"")


@pytest.mark.parametrize("key", ["Arch", "OS", "Version", "Comment"])
def test_root_of_a_node_hides_no_other_node_by_the_names_of_its_system(key: str) -> None:
    """Such as the release of its kernel, which slurmd reports; it may have any bytes."""
    own = node_row("n1").replace("NodeName=n1", f"NodeName=n1 {key}={FORGED}")
    invented = "".join(f"\nNodeName=x{number % 500} State=IDLE" for number in range(1000))
    options = f"\nNodeName=--help {CPUS} Gres=a GresUsed=b State=IDLE" * 2
    client = ForgedNodes(n1=own.replace("\n", f"{invented}{options}\n", 1), n2=node_row("n2"), n3=node_row("n3"))
    rows = {row.name: row for row in client.nodes()}
    assert list(rows) == ["n2", "n3"]
    assert rows["n2"] == parse_nodes(node_row("n2"))[0]
    assert [words.split(",")[0] for words in client.asked if "no-node-" in words] == ["n2"]


def test_nodes_that_are_listed_once_cost_no_further_command() -> None:
    client = ForgedNodes(n1=node_row("n1"), n2=node_row("n2"))
    assert [row.name for row in client.nodes()] == ["n1", "n2"]
    assert client.asked == ["node", "reservation"]


def test_name_with_other_bytes_than_a_nodes_is_left_out() -> None:
    odd: dict[str, str] = {}
    rows = parse_nodes(node_row("n1", OS="x\n" + node_row("n\udcff")) + node_row("n2"), odd.__setitem__)
    assert [row.name for row in rows] == ["n1", "n2"]
    assert list(odd) == ["n\udcff"]


@pytest.mark.parametrize("number", ["\u00b2", "9" * 1000, "9" * 5000], ids=["superscript", "large", "endless"])
@pytest.mark.parametrize(
    "key", ["CPUAlloc", "CPUTot", "CPUEfctv", "RealMemory", "MemSpecLimit", "AllocMem", "Gres", "GresUsed"]
)
def test_number_that_a_nodes_system_forges_concerns_that_node_alone(key: str, number: str) -> None:
    """scontrol prints the names that slurmd reports, Arch= and OS=, before numbers of the node."""
    value = f"mig:1g.10gb(CNT:{number})" if key.startswith("Gres") else number
    forged = node_row("n1").replace("NodeName=n1", f"NodeName=n1 Arch=x {key}={value} CoresPerSocket=1")
    rows = parse_nodes(forged + node_row("n2"))
    assert rows[-1] == parse_nodes(node_row("n2"))[0]
    assert all(max(row.cpus, row.cpus_used, row.memory, row.memory_used) < 10**20 for row in rows)


def test_node_without_gres_is_parsed_as_printed_from_24_11() -> None:
    (row,) = parse_nodes(f"NodeName=c1 {CPUS} Gres=(null) GresDrain=N/A State=IDLE Partitions=cpu\n")
    assert (row.name, row.gres, row.used, row.other_gres, row.cpus) == ("c1", {}, {}, "", 64)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("NodeName=n2 State=IDLE", "without Gres, CPUTot, CPUAlloc:"),
        (f"NodeName=n2 {CPUS} Gres=mig:1:2:3:4 GresUsed= State=IDLE", "not a GRES entry"),
        (f"NodeName=n2 {CPUS} Gres=mig:1g.10gb:1 GresAlloc= State=IDLE", "without GresUsed:"),
        ("NodeName=n2 CPUAlloc=0 CPUTotal=64 Gres=(null) State=IDLE", "without CPUTot:"),
        ("NodeName=n2 CPUsAlloc=0 CPUTot=64 Gres=(null) State=IDLE", "without CPUAlloc:"),
        (f"NodeName=n2 {CPUS} Gres=(null) Condition=IDLE", "without State:"),
        ("NodeName=", "not the name of a node"),
    ],
)
def test_unreadable_node_is_left_out_and_named_with_what_it_lacks(odd: str, why: str) -> None:
    unreadable: dict[str, str] = {}
    rows = parse_nodes(node_row("n1") + odd + "\n" + node_row("n3"), unreadable.__setitem__)
    assert [row.name for row in rows] == ["n1", "n3"]
    assert list(unreadable) == ["n2" if "n2" in odd else ""]
    assert why in next(iter(unreadable.values()))


@pytest.mark.parametrize(
    ("expression", "count"),
    [("0-400:2%4", 201), ("1,3,5-9", 7), ("7", 1), ("[4-7]", 4), ("0-0", 1), ("1-10:4", 3), ("5,9%1", 2)],
)
def test_tasks_of_an_array_expression_are_counted(expression: str, count: int) -> None:
    assert count_tasks(expression) == len(expand_tasks(expression)) == count


@pytest.mark.parametrize("expression", ["", "x", "1-", "-1", "1,,2", "1-x", "1-4:x"])
def test_malformed_array_expression_is_an_error(expression: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        count_tasks(expression)


@pytest.mark.parametrize(
    ("state", "is_open"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("ALLOCATED+COMPLETING", True),
        ("IDLE+DRAIN", False),
        ("IDLE*", False),
        ("DOWN+DRAIN+INVALID_REG", False),
        ("IDLE+NOT_RESPONDING", False),
        ("MIXED+MAINTENANCE+RESERVED", False),
        ("IDLE+BLOCKED", False),
    ],
)
def test_node_is_open_depending_on_its_state(state: str, is_open: bool) -> None:
    (row,) = parse_nodes(f"NodeName=n1 {CPUS} Gres=(null) State={state} Partitions=a,b Reason=x [root@2026]")
    assert row.open is is_open
    assert (row.partitions, row.reason) == (("a", "b"), "x")


def test_node_in_maintenance_is_open_to_jobs_of_its_reservation() -> None:
    states = frozenset({"IDLE", "MAINTENANCE", "RESERVED"})
    assert not NodeRow("n1", states).open
    assert NodeRow("n1", states, reservations=frozenset({"maint"})).open
    assert not NodeRow("n1", states | {"DRAIN"}, reservations=frozenset({"maint"})).open


def test_cpus_reserved_for_the_system_are_not_those_of_jobs() -> None:
    (row,) = parse_nodes("NodeName=n1 CPUAlloc=60 CPUEfctv=60 CPUTot=64 Gres=(null) State=ALLOCATED")
    assert (row.cpus, row.cpus_free) == (60, 0)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("Reason=profile catalog", "profile catalog"),
        ("Reason=maintenance [root@2026-11-22T22:10:00] Comment=see [ann@desk]", "maintenance"),
        ("Reason=migbatch: gpu=1 is lost [root@2026] Extra={} ReservationName=r", "migbatch: gpu=1 is lost"),
        ("Comment=no Reason", ""),
        ("Comment=see Reason=foo", ""),
        ("Extra={} Reason=foo", ""),
        ("Reason=gone Comment=x Reason=foo", "gone"),
        ("Reason=first line [root@2026-11-22T22:10:00]\n second line Extra=x", "first line\n second line"),
        ("", ""),
    ],
)
def test_reason_of_a_node_ends_where_its_other_texts_begin(shown: str, reason: str) -> None:
    (row,) = parse_nodes(f"NodeName=n1 {CPUS} Gres=(null) State=IDLE+DRAIN Partitions=a {shown}\n")
    assert row.reason == reason


def test_other_gres_of_a_node_are_kept_for_the_next_update() -> None:
    (row,) = parse_nodes(
        f"NodeName=n {CPUS} Gres=gpu:h100:4(S:0-1),mig:1g.10gb:2,mig:none:3 "
        "GresUsed=gpu:h100:0(IDX:N/A),mig:1g.10gb:1 State=IDLE"
    )
    assert row.other_gres == "gpu:h100:4"
    assert row.gres == {"1g.10gb": 2, "none": 3}
    assert row.used == {"1g.10gb": 1}


def test_no_consume_gres_of_a_node_is_parsed() -> None:
    """As 26.05 shows it; an update without the flag does not change it, and 22.05 does not show it."""
    (row,) = parse_nodes(
        f"NodeName=n {CPUS} Gres=mig:1g.10gb:7,bandwidth:lustre:no_consume:4G,seats:no_consume:3 "
        "GresUsed=mig:1g.10gb:1,bandwidth:lustre:0,seats:0 State=IDLE"
    )
    assert (row.gres, row.used) == ({"1g.10gb": 7}, {"1g.10gb": 1})
    assert row.other_gres == "bandwidth:lustre:4294967296,seats:3"


# -- commands, against scripts that stand in for them ---------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return tmp_path


def tool(directory: Path, name: str, script: str, timeout: float = 120.0) -> CliClient:
    path = directory / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return CliClient(directory, timeout=timeout)


def test_error_of_a_failed_command_has_its_message_and_exit_code(tools: Path) -> None:
    client = tool(tools, "squeue", "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1")
    with pytest.raises(SlurmError, match=r"`squeue .*` failed with exit code 1: .*Unable to contact slurm controller"):
        client.jobs()


def test_command_that_fails_again_has_the_same_message(tools: Path) -> None:
    """The log and the record of faults take another message for another cause."""
    client = tool(tools, "squeue", "echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1")
    messages = set()
    for _ in range(2):
        with pytest.raises(SlurmError) as raised:
            client.jobs()
        messages.add(str(raised.value))
    assert len(messages) == 1


def test_hanging_command_times_out(tools: Path) -> None:
    client = tool(tools, "scontrol", "exec sleep 600", timeout=0.5)
    with pytest.raises(SlurmError, match=r"did not answer within 0\.5 s"):
        client.nodes()


def test_error_for_a_missing_command_names_the_remedy(tools: Path) -> None:
    with pytest.raises(SlurmError, match="install slurm-client or set slurm_bin"):
        CliClient(tools / "none").jobs()


def test_the_callers_environment_does_not_reach_slurm(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    client = tool(tools, "squeue", 'echo "slurm 24.11.5"; test -z "$SQUEUE_FORMAT" && test "$SLURM_TIME_FORMAT" = "%s"')
    assert client.version() == (24, 11)


def test_release_is_asked_again_after_slurm_was_upgraded(tools: Path) -> None:
    """Of 22.05 and later ones squeue lists requeued tasks of arrays in different ways."""
    client = tool(tools, "squeue", "echo slurm 22.05.8")
    assert client.version() == (22, 5)
    tool(tools, "squeue", "echo Unable to contact slurm controller >&2; exit 1")
    assert client.version() == (22, 5)
    with pytest.raises(SlurmError, match="Unable to contact"):
        client.jobs()
    tool(tools, "squeue", "echo slurm 24.11.5")
    assert client.version() == (24, 11)


#: a stand-in for scontrol: refuses requests that contain "bad" and answers unknown keywords as Slurm's does; the random
#: digits of a separator may spell "bad"
SCONTROL = """
request() {
    case "$*" in
        after-*) echo "invalid keyword: $1" >&2; status=1;;
        *bad*) echo "Invalid node name specified" >&2; status=1;;
        update*|requeue*) echo "$*" >> LOG;;
        *) echo "invalid keyword: $1" >&2; status=1;;
    esac
}
status=0
echo "-- $1" >> LOG
if [ $# -gt 0 ]; then request "$@"; exit $status; fi
while read -r line; do
    [ "$line" = exit ] && exit $status
    [ "$line" = "update die" ] && exit 1
    printf "scontrol: %s\\n" "$line"
    request $line
done
exit $status
"""


@pytest.fixture
def scontrol(tools: Path) -> CliClient:
    return tool(tools, "scontrol", SCONTROL.replace("LOG", str(tools / "log")))


def logged_arguments(tools: Path) -> list[str]:
    return [line for line in (tools / "log").read_text().splitlines() if not line.startswith("--")]


def test_node_updates_use_one_process_and_refused_nodes_are_named(tools: Path, scontrol: CliClient) -> None:
    with pytest.raises(SlurmRefused, match="rejected 1 of 3 changes: bad: Invalid node name") as caught:
        scontrol.set_gres({"n1": "mig:none:1", "n2": "mig:none:1", "bad": "mig:none:2"})
    assert caught.value.refused == {"bad": "Invalid node name specified"}
    assert logged_arguments(tools) == ["update NodeName=n1,n2 Gres=mig:none:1"]
    assert scontrol.calls == 1


def test_refused_node_does_not_block_updates_of_other_nodes(tools: Path, scontrol: CliClient) -> None:
    with pytest.raises(SlurmRefused) as caught:
        scontrol.set_gres({"n1": "mig:none:1", "bad": "mig:none:1", "n2": "mig:none:1"})
    assert caught.value.refused == {"bad": "Invalid node name specified"}
    assert logged_arguments(tools) == ["update NodeName=n1 Gres=mig:none:1", "update NodeName=n2 Gres=mig:none:1"]


def test_job_updates_use_one_process_and_refused_jobs_are_named(tools: Path, scontrol: CliClient) -> None:
    updates = {str(job): {"Gres": "mig:2g.20gb:1"} for job in range(1, 200)}
    updates["7"] = {"Gres": "mig:bad:1"}
    updates["150_4"] = {"Comment": "bad-luck", "StartTime": "now+2"}
    with pytest.raises(SlurmRefused, match="rejected 2 of 200 changes") as caught:
        scontrol.update_jobs(updates)
    assert set(caught.value.refused) == {"7", "150_4"}
    assert logged_arguments(tools) == [f"update JobId={j} Gres=mig:2g.20gb:1" for j in range(1, 200) if j != 7]
    assert scontrol.calls == 1


def test_user_text_is_passed_as_one_argument_of_a_separate_command(tools: Path, scontrol: CliClient) -> None:
    hostile = 'x" NodeName=n1\tState=DOWN\nupdate NodeName=n1 State=DOWN'
    scontrol.update_jobs({"1": {"Gres": "mig:none:1"}, "2": {"Comment": hostile}, "3": {"Gres": "mig:none:1"}})
    log = (tools / "log").read_text()
    assert log == (
        "-- \nupdate JobId=1 Gres=mig:none:1\nupdate JobId=3 Gres=mig:none:1\n"
        f"-- update\nupdate JobId=2 Comment={hostile}\n"
    )


@given(value=st.text(max_size=40))
def test_dialog_lines_are_single_lines_of_plain_words(value: str) -> None:
    text = line(("update", "JobId=1", f"Comment={value}"))
    if text is not None:
        assert text.isascii() and text.isprintable()
        assert not set(text) & set("\\'`$!&|<>") and not text.startswith("#")
        assert shlex.split(text) == ["update", "JobId=1", f"Comment={value}"]


def test_marker_with_the_name_of_a_decision_is_sent_in_a_line() -> None:
    """Most updates have one; a process for each would make a round long."""
    marker = "[mig:1g.10gb:1#3f2a]"
    assert line(("update", "JobId=1", f"Comment={marker}")) == f"update JobId=1 Comment={marker}"
    assert line(("update", "JobId=1", f"Comment=migbatch: model=x {marker}")) is None, "scontrol would keep the quotes"
    assert line(("#", "JobId=1")) is None


def test_updates_without_an_answer_from_scontrol_are_sent_again(tools: Path) -> None:
    client = tool(
        tools,
        "scontrol",
        SCONTROL.replace("LOG", str(tools / "log")).replace("update die", "update JobId=2 Gres=mig:none:1"),
    )
    client.update_jobs({str(job): {"Gres": "mig:none:1"} for job in (1, 2, 3)})
    assert logged_arguments(tools) == [f"update JobId={job} Gres=mig:none:1" for job in (1, 2, 3)]


def test_unreachable_slurmctld_is_an_error_but_no_refusal(tools: Path) -> None:
    script = """
say() { case "$1" in after*) echo "invalid keyword: $1" >&2;; *) echo "Unable to contact slurm controller" >&2;; esac; }
[ $# -gt 0 ] && say "$@"
while read -r line; do say $line; done
exit 1
"""
    client = tool(tools, "scontrol", script)
    for updates in ({"1": {"Gres": "mig:none:1"}, "2": {"Gres": "mig:none:1"}}, {"1": {"Gres": "mig:none:1"}}):
        with pytest.raises(SlurmError, match="Unable to contact") as caught:
            client.update_jobs(updates)
        assert not isinstance(caught.value, SlurmRefused)


@pytest.mark.parametrize("job", ["", "1 2", "1\nshutdown", "1,2", "x", "-1", "1_", "1_[", "1_[1]x", "1;2", "\u0661"])
def test_invalid_job_ids_are_not_passed_to_slurm(tools: Path, scontrol: CliClient, job: str) -> None:
    for ask in (
        lambda: scontrol.update_jobs({job: {"Gres": "mig:none:1"}}),
        lambda: scontrol.requeue_all([job]),
        lambda: scontrol.signal_all([job], "USR1"),
    ):
        with pytest.raises(ValueError, match="not a job id"):
            ask()
    assert scontrol.calls == 0


def test_signals_to_ended_jobs_are_no_error_and_refused_ones_are_named(tools: Path) -> None:
    script = """
echo "$*" > LOG
echo "scancel: error: Kill job error on job id 5: Invalid job id specified" >&2
echo "scancel: error: Kill job error on job id 6: Job/step already completing or completed" >&2
case "$*" in *7_1*) echo "scancel: error: Kill job error on job id 7_1: Access/permission denied" >&2;; esac
exit 1
"""
    client = tool(tools, "scancel", script.replace("LOG", str(tools / "log")))
    client.signal_all([5, "6"], "USR1")
    assert (tools / "log").read_text() == "--full --state=RUNNING --signal=USR1 5 6\n"
    with pytest.raises(SlurmRefused) as caught:
        client.signal_all([5, 6, "7_1"], "USR2")
    assert caught.value.refused == {"7_1": "Access/permission denied"}
    assert (tools / "log").read_text() == "--full --state=RUNNING --signal=USR2 7_1\n"
    client.signal_all([5], "TERM", script=False)
    assert (tools / "log").read_text() == "--state=RUNNING --signal=TERM 5\n"


def test_other_failures_of_scancel_are_errors(tools: Path) -> None:
    client = tool(tools, "scancel", "echo scancel: error: no slurm.conf >&2; exit 1")
    with pytest.raises(SlurmError, match=r"no slurm\.conf"):
        client.signal_all([5], "USR1")


@pytest.mark.parametrize("name", ["", "usr1", "USR1 7", "-9"])
def test_invalid_signal_names_are_rejected(tools: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a signal"):
        CliClient(tools).signal_all([5], name)


@pytest.mark.parametrize("updates", [{"n1": "mig:none:1\nshutdown"}, {"n1 Foo=1": "mig:none:1"}, {"n1": ""}])
def test_malformed_node_updates_are_not_passed_to_scontrol(tools: Path, updates: dict[str, str]) -> None:
    client = tool(tools, "scontrol", "exit 0")
    with pytest.raises(SlurmRefused, match="cannot be passed to scontrol"):
        client.set_gres(updates)
    assert client.calls == 0


def test_oversized_update_of_a_node_does_not_block_other_nodes(tools: Path, scontrol: CliClient) -> None:
    """Root on a node may report hundreds of profiles."""
    long = ",".join(f"mig:{n % 99 + 1}g.{n}gb.me.all:1" for n in range(1000))
    with pytest.raises(SlurmRefused) as caught:
        scontrol.set_gres({"n1": "mig:none:1", "odd": long, "n2": "mig:none:2"})
    assert set(caught.value.refused) == {"odd"} and len(str(caught.value)) < 300
    assert logged_arguments(tools) == ["update NodeName=n1 Gres=mig:none:1", "update NodeName=n2 Gres=mig:none:2"]


def test_unreadable_rows_are_logged_once(tools: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark = 'if [ "$1" = --version ]; then echo slurm-wlm 24.11.5; exit; fi\n'
    mark += r'mark=$(printf %s "$*" | sed "s/.*JobID:0//; s/,.*//")'
    values = (PLAIN | {"JobID": "5", "UserID": "?"}).values()
    fields = " ".join(f"'{value}'" for value in values)
    client = tool(tools, "squeue", f'{mark}\nfor value in {fields}; do printf "%s%s" "$value" "$mark"; done; echo')
    for _ in range(3):
        assert [(row.job_id, row.unread) for row in client._listed()] == [(5, True)]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "job 5" in message and "'?'" in message
    odd = Unread("job")
    odd.name({str(job): "why" for job in range(50_000)})
    odd.name({str(job): "why" for job in range(50_000)})
    assert len(caplog.records) == 2
    assert len(caplog.records[1].getMessage()) < 500


def test_empty_updates_make_no_call(tools: Path) -> None:
    client = CliClient(tools)
    client.set_gres({})
    client.update_jobs({})
    client.update_jobs({"1": {}})
    client.requeue_all([])
    client.signal_all([], "USR1")
    assert client.calls == 0


def test_text_of_a_single_job_is_passed_as_one_argument(tools: Path) -> None:
    client = tool(tools, "scontrol", f'for a in "$@"; do printf "%s\\n--\\n" "$a"; done > {tools}/log')
    client.update_jobs({"7": {"Comment": "a b; rm -rf /\n$HOME `id`", "Gres": "mig:3g.40gb:1"}})
    assert (tools / "log").read_text() == (
        "update\n--\nJobId=7\n--\nComment=a b; rm -rf /\n$HOME `id`\n--\nGres=mig:3g.40gb:1\n--\n"
    )


@pytest.mark.parametrize(
    ("end", "restarts"), [(None, 1), (1_300.0, 1), (999.0, 2)], ids=["no limit", "expected", "ended"]
)
def test_completing_row_has_the_restart_count_of_the_ending_run(end: float | None, restarts: int) -> None:
    row = JobRow(7, state="COMPLETING", restarts=2, start=1_000.0, end=end)
    assert row.with_ending_run_count(1_000.0).restarts == restarts
    for other in (replace(row, state="RUNNING"), replace(row, state="PENDING"), replace(row, restarts=0)):
        assert other.with_ending_run_count(1_000.0) is other


@pytest.mark.parametrize(("text", "names"), [("", ()), ("a", ("a",)), ("b,a", ("b", "a")), ("a,,b,", ("a", "b"))])
def test_partitions_of_a_job_have_names(text: str, names: tuple[str, ...]) -> None:
    assert JobRow(1, partition=text).partitions == names
