"""Jobs that name nodes, exclude some or request features; and slices that none of their nodes can ever hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.slurm.client import SLURM_LIMIT
from slurm_migbatch.submit import protocol
from slurm_migbatch.submit.nodes import READ, listed
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import TEXTS, Accept, Answer, JobRequest, Pass, Present, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.submit.table import TableCompiler, write_table
from slurm_migbatch.workload.catalog import GpuKind, MigNode, Partition, SiteCatalog
from slurm_migbatch.workload.holding import STEPS, _HoldingSearch, can_hold, layouts_of
from tests.support.examples import examples
from tests.support.lua_shim import Shim
from tests.support.submit_agreement import words

USER = 1001
H100 = GpuKind("h100-80gb", geometry("h100-80gb"), 989, 3350, 132, ("h100",))
A100 = GpuKind("a100-40gb", geometry("a100-40gb"), 312, 1555, 108, ("a100",))


def node(name: str, gpus: str, partitions: str, features: str, named: bool = True) -> MigNode:
    own = {f"mig_node_{name}"} if named else set()
    return MigNode(name, tuple(gpus.split()), frozenset(partitions.split()), frozenset(features.split()) | own, named)


NODES = [
    node("n1", "h100-80gb", "gpu both", "h100 fast"),
    node("n2", "h100-80gb", "gpu both", "h100"),
    node("n3", "h100-80gb h100-80gb", "gpu both", "h100 big"),
    node("a1", "a100-40gb", "both old", "a100"),
    node("new", "h100-80gb", "gpu", "h100", named=False),
    *(node(name, "h100-80gb", "racks", "") for name in ("r1n08", "r1n09", "r2n08", "r2n09", "r1n08-ib", "r2n9")),
]
CATALOG = SiteCatalog(
    {
        "gpu": Partition("gpu", (H100,)),
        "both": Partition("both", (A100, H100)),
        "old": Partition("old", (A100,), others=frozenset({"v100", ""})),
        "racks": Partition("racks", (H100,)),
    },
    {node.name: node for node in NODES},
    "migcatalog",
    4,
)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory, compiler: TableCompiler) -> Iterator[Shim]:
    folder = tmp_path_factory.mktemp("nodes")
    write_table(folder / "table.lua", compiler.text(CATALOG))
    with Shim(folder, table=str(folder / "table.lua"), catalog=CATALOG) as running:
        yield running


@pytest.fixture
def ask(shim: Shim, chooser: Chooser):
    """The answer of service and shim, which must be the same."""

    def answer(**fields) -> Answer:
        return both(JobRequest(USER, **{"partition": "gpu", **fields}), shim, chooser)

    return answer


def both(request: JobRequest, shim: Shim, chooser: Chooser) -> Answer:
    local, service = shim(request), rewrite(request, CATALOG, chooser, SubmitPolicy())
    assert shim.errors == []
    if isinstance(service, Refuse):
        service = Refuse(service.sentence, "")
    elif isinstance(service, Accept):
        service = Accept(service.changes, service.message) if service.changes else Pass(service.message)
    assert local == service
    return service


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"req_nodes": "n1"}, {"req_nodes": "", "features": "mig_node_n1"}),
        ({"req_nodes": "n1", "min_nodes": 1}, {"req_nodes": "", "features": "mig_node_n1"}),
        ({"req_nodes": "n[1-2]"}, {"req_nodes": "", "features": "mig_node_n1|mig_node_n2", "min_nodes": "2"}),
        ({"req_nodes": "n2,n1,n2", "min_nodes": 2}, {"req_nodes": "", "features": "mig_node_n2|mig_node_n1"}),
        # Slurm takes as many of the nodes as the job may have
        (
            {"req_nodes": "n[1-2]", "min_nodes": 1, "max_nodes": 1},
            {"req_nodes": "", "features": "mig_node_n1|mig_node_n2"},
        ),
        (
            {"req_nodes": "n[1-3]", "min_nodes": 1, "max_nodes": 2},
            {"req_nodes": "", "features": "mig_node_n1|mig_node_n2|mig_node_n3", "min_nodes": "2"},
        ),
        ({"req_nodes": "n[1-2]", "num_tasks": 1}, {"req_nodes": "", "features": "mig_node_n1|mig_node_n2"}),
        (
            {"req_nodes": "n[1-3]", "num_tasks": 2},
            {"req_nodes": "", "features": "mig_node_n1|mig_node_n2|mig_node_n3", "min_nodes": "2"},
        ),
        ({"req_nodes": "n1", "features": "h100&fast"}, {"req_nodes": "", "features": "mig_node_n1"}),
        (
            {"req_nodes": "r[1-2]n[08-09]", "partition": "racks"},
            {
                "req_nodes": "",
                "features": "mig_node_r1n08|mig_node_r1n09|mig_node_r2n08|mig_node_r2n09",
                "min_nodes": "4",
            },
        ),
        (
            {"req_nodes": "r[1]n[08]-ib,r2n9", "partition": "racks"},
            {"req_nodes": "", "features": "mig_node_r1n08-ib|mig_node_r2n9", "min_nodes": "2"},
        ),
        ({"features": "h100"}, {}),
        ({"exc_nodes": "n1"}, {}),
    ],
)
def test_a_node_list_becomes_features(ask, fields: dict, changes: dict) -> None:
    answer = ask(tres_per_node="gres/mig:1g.10gb:1", **fields)
    assert isinstance(answer, Accept) and answer.message == ""
    assert {
        name: value for name, value in answer.changes.items() if name not in ("tres_per_node", "comment")
    } == changes


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"req_nodes": "n9"}, "--nodelist names n9, which is no node with MIG GPUs of partition gpu"),
        ({"req_nodes": "a1"}, "--nodelist names a1, which"),
        ({"req_nodes": "n[1-2]x"}, "--nodelist names n1x, which"),
        ({"req_nodes": "n2", "features": "fast"}, "--nodelist names n2, which"),
        ({"req_nodes": "n2", "exc_nodes": "n[2,3]"}, "--nodelist names n2, which"),
        ({"req_nodes": "n1", "min_nodes": 2}, "the job asks for 2 nodes and --nodelist names 1"),
        (
            {"req_nodes": "n[1-2]", "num_tasks": 3, "ntasks_per_node": 1},
            "the job asks for 3 nodes and --nodelist names 2",
        ),
        ({"features": "a100"}, "no node with MIG GPUs of partition gpu meets --constraint and --exclude"),
        ({"exc_nodes": "n[1-3],new"}, "no node with MIG GPUs of partition gpu meets --constraint and --exclude"),
    ],
)
def test_request_that_no_node_meets_is_refused(ask, fields: dict, sentence: str) -> None:
    answer = ask(tres_per_node="gres/mig:1g.10gb:1", **fields)
    assert isinstance(answer, Refuse) and answer.sentence.startswith(sentence)


@pytest.mark.parametrize(
    ("gres", "fields"),
    [
        ("gres/gpu:v100:2", {}),
        ("gres:gpu:v100", {"features": "fast"}),
        ("gres/gpu:1", {"req_nodes": "v[1-2]"}),
        ("gpu:2", {"features": "v100"}),
        ("gres/gpu:1", {"exc_nodes": "a1"}),
    ],
)
def test_gpus_of_nodes_without_mig_are_left_to_slurm(ask, gres: str, fields: dict) -> None:
    """A partition may have both, and its users name the type, the nodes or a feature of those."""
    assert ask(partition="old", tres_per_node=gres, **fields) == Pass()
    assert ask(partition="old", tres_per_job=gres, **fields) == Pass()


@pytest.mark.parametrize(
    ("gres", "fields"),
    [
        ("gres/gpu:1", {}),
        ("gres/gpu:a100:1", {"features": "a100"}),
        ("gres/gpu:1", {"req_nodes": "a1"}),
        ("gres/gpu:a100_3g.20gb:1", {}),
    ],
)
def test_gpus_of_mig_nodes_become_slices_beside_other_nodes(ask, gres: str, fields: dict) -> None:
    assert isinstance(ask(partition="old", tres_per_node=gres, **fields), Accept)


@pytest.mark.parametrize("gres", ["gres/gpu:v100:1,gres/mig:1g.5gb:1", "gres/gpu:a100:1,gres/gpu:v100:1"])
def test_slices_and_gpus_of_nodes_without_mig_in_one_request_are_refused(ask, gres: str) -> None:
    """The sentence was that no GPU of the partition is of that type."""
    answer = ask(partition="old", tres_per_node=gres)
    assert isinstance(answer, Refuse) and answer.sentence.startswith("nodes with slices have no gpu:v100: request ")


def test_user_of_any_gpu_is_told_of_those_of_nodes_without_mig(ask) -> None:
    """All such requests become slices: Slurm cannot give one of two resources."""
    words = "gpu:v100 is a GPU without MIG here"
    for gres in ("gres/gpu:1", "gres/gpu"):
        answer = ask(partition="old", tres_per_node=gres)
        assert isinstance(answer, Accept) and words in answer.message
    for partition, gres in (("old", "gres/gpu:a100:1"), ("old", "gres/mig:1g.5gb"), ("gpu", "gres/gpu:1")):
        answer = ask(partition=partition, tres_per_node=gres)
        assert isinstance(answer, Accept) and words not in answer.message


@pytest.mark.parametrize(
    ("gres", "fields"),
    [
        ("gres/gpu:v100:1", {"partition": "gpu"}),
        ("gres/gpu:v100:1,gres/mig:1g.5gb:1", {}),
        ("gres/mig:1g.5gb:1", {"req_nodes": "v1"}),
        ("gres/gpu:1", {"req_nodes": "a1,v1"}),
        ("gres/gpu:k80:1", {}),
    ],
)
def test_request_for_slices_of_other_nodes_is_refused(ask, gres: str, fields: dict) -> None:
    assert isinstance(ask(tres_per_node=gres, **{"partition": "old", **fields}), Refuse)


@pytest.mark.parametrize(
    "fields",
    [
        {"req_nodes": "new"},
        {"req_nodes": "n1,new", "min_nodes": 2},
        {"req_nodes": "n1", "features": "[fast|big]"},
        {"req_nodes": "n[1-40]"},
        {"req_nodes": "r[1-4]n[1-9]"},
        {"req_nodes": "n[1-2]%x"},
    ],
)
def test_user_is_told_of_a_node_list_that_cannot_become_features(ask, fields: dict) -> None:
    answer = ask(tres_per_node="gres/mig:1g.10gb:1", **fields)
    assert isinstance(answer, Accept) and not {"req_nodes", "features"} & set(answer.changes)
    assert answer.message.startswith("migbatch: --nodelist is left to Slurm, which refuses the job unless")


MARK = "[mig:1g.10gb:1]"


@pytest.mark.parametrize(
    ("fields", "comment"),
    [
        ({"exc_nodes": "n[1-2]"}, f"[mig-exclude:n[1-2]] {MARK}"),
        ({"exc_nodes": "n1,cpu7", "comment": "mine"}, f"mine [mig-exclude:n1,cpu7] {MARK}"),
        ({"exc_nodes": "n1", "req_nodes": "n2"}, f"[mig-exclude:n1] {MARK}"),
        ({"exc_nodes": "n1", "comment": "m" * 919}, f"{'m' * 919} {MARK}"),
        ({"exc_nodes": "n1,n2", "comment": "m" * 918}, f"{'m' * 918} [mig-exclude:n1] {MARK}"),
        ({"exc_nodes": ",".join(["n1"] * 100)}, f"[mig-exclude:{','.join(['n1'] * 85)}] {MARK}"),
        ({"exc_nodes": "n1," * 170 + "n13"}, MARK),
        ({"exc_nodes": "", "comment": "mine"}, f"mine {MARK}"),
    ],
)
def test_excluded_nodes_are_written_into_the_comment(ask, fields: dict, comment: str) -> None:
    answer = ask(tres_per_node="gres/mig:1g.10gb:1", **fields)
    assert isinstance(answer, Accept) and answer.changes["comment"] == comment


TOLD = f"mine [mig-exclude:n1] {MARK}"


@pytest.mark.parametrize(
    ("now", "fields", "comment"),
    [
        (TOLD, {"exc_nodes": "n2"}, f"mine [mig-exclude:n2] {MARK}"),
        (TOLD, {"exc_nodes": ""}, f"mine {MARK}"),
        (f"mine {MARK}", {"exc_nodes": "n2"}, f"mine [mig-exclude:n2] {MARK}"),
        (TOLD, {"exc_nodes": "n1"}, None),
        (TOLD, {"comment": "other"}, f"other [mig-exclude:n1] {MARK}"),
        (TOLD, {"comment": ""}, f"[mig-exclude:n1] {MARK}"),
        (TOLD, {"tres_per_node": "gres/mig:2g.20gb:1"}, "mine [mig-exclude:n1] [mig:2g.20gb:1]"),
        (f"[mig-exclude:n1] {MARK}", {"exc_nodes": "", "tres_per_node": "gres/license:1"}, " "),
        ("mine", {"exc_nodes": "n2"}, None),
    ],
)
@pytest.mark.parametrize("pending", [True, False])
def test_update_of_excluded_nodes_is_written_into_the_comment(
    ask, now: str, fields: dict, comment: str | None, pending: bool
) -> None:
    present = Present(pending, "gpu", "gres/mig:1g.10gb:1" if "[mig:" in now else None, comment=now)
    answer = ask(partition=None, now=present, **fields)
    if pending:
        assert isinstance(answer, Pass) if comment is None else answer.changes["comment"] == comment
    elif "comment" in fields:
        assert isinstance(answer, Accept) and answer.changes == {"comment": comment}


def test_a_change_that_leaves_no_node_is_refused(ask) -> None:
    present = Present(True, "gpu", "gres/mig:1g.10gb:1", comment=TOLD)
    answer = ask(partition=None, now=present, exc_nodes="n[1-3],new")
    assert isinstance(answer, Refuse) and "meets --constraint and --exclude" in answer.sentence


def test_user_is_told_of_a_reservation_without_the_catalog_node(ask) -> None:
    answer = ask(tres_per_node="gres/mig:1g.10gb:1", uncatalogued=1)
    assert isinstance(answer, Accept) and "no catalog node (migcatalog...)" in answer.message


@pytest.mark.parametrize(
    ("constraint", "granted"),
    [(None, "7g.40gb"), ("h100", "7g.80gb"), ("fast|big", "7g.80gb"), ("a100", "7g.40gb"), ("[h100*1]", "7g.40gb")],
)
def test_a_constraint_chooses_the_kind_of_gpu(ask, constraint: str | None, granted: str) -> None:
    answer = ask(partition="both", tres_per_node="gres/gpu:1", features=constraint)
    assert isinstance(answer, Accept) and answer.changes["tres_per_node"] == f"gres/mig:{granted}:1"
    warned = "of its kinds (a100-40gb, h100-80gb) the first is taken, ask for another by gpu:<kind>" in answer.message
    assert warned == (constraint in (None, "[h100*1]"))


def test_auto_chooses_among_the_profiles_of_the_allowed_nodes(ask) -> None:
    answer = ask(partition="both", tres_per_node="gres/mig:auto", comment="migbatch: mem=60gib", features="h100")
    assert isinstance(answer, Accept) and "mig:7g.80gb:1" in answer.changes["tres_per_node"]
    answer = ask(partition="both", tres_per_node="gres/mig:auto", comment="migbatch: mem=60gib", req_nodes="a1")
    assert isinstance(answer, Refuse) and "fits no slice available to the job" in answer.sentence


@pytest.mark.parametrize(
    ("asked", "fields", "ok"),
    [
        ("mig:7g.80gb:1,mig:1g.10gb:1", {}, True),
        ("mig:7g.80gb:1,mig:1g.10gb:1", {"exc_nodes": "n3"}, False),
        ("mig:7g.80gb:1,mig:1g.10gb:1", {"req_nodes": "n1"}, False),
        ("mig:7g.80gb:2,mig:1g.10gb:1", {}, False),
        ("mig:1g.10gb:15", {}, False),
        ("mig:1g.10gb:14", {}, True),
        ("mig:1g.10gb.me:2", {"features": "fast"}, False),
        ("mig:3g.40gb:1,mig:4g.40gb:1", {"req_nodes": "n1"}, True),
        ("mig:4g.40gb:2", {"req_nodes": "n1"}, False),
        ("mig:3g.40gb:2,mig:1g.10gb:1", {"req_nodes": "n1"}, False),
        ("mig:1g.20gb:4,mig:1g.10gb:1", {"req_nodes": "n1"}, False),
        ("mig:7g.40gb:1,mig:1g.10gb:1", {"partition": "both"}, False),
        ("gpu:2", {"req_nodes": "n2"}, False),
    ],
)
def test_request_that_no_node_can_ever_hold_is_refused(ask, asked: str, fields: dict, ok: bool) -> None:
    entries = ",".join(f"gres/{entry}" for entry in asked.split(","))
    answer = ask(tres_per_node=entries, **fields)
    assert isinstance(answer, Accept) == ok
    if isinstance(answer, Refuse):
        assert answer.sentence.startswith("no node available to the job can ever hold mig:")


def test_request_is_refused_if_too_few_nodes_can_hold_it(ask) -> None:
    assert isinstance(ask(tres_per_node="gres/mig:7g.80gb:1", min_nodes=4), Accept)
    answer = ask(tres_per_node="gres/mig:7g.80gb:2", min_nodes=2)
    assert isinstance(answer, Refuse)
    assert answer.sentence.startswith(
        "only 1 of the nodes available to the job can ever hold mig:7g.80gb:2, and it asks for 2"
    )


@pytest.mark.parametrize(
    ("fields", "nodes", "share", "tasks"),
    [
        ({"tres_per_task": "gres/gpu:1", "num_tasks": 4}, 4, "7g.80gb:1", "1"),
        ({"tres_per_task": "gres/gpu:3g.40gb:1", "num_tasks": 6}, 3, "3g.40gb:2", "2"),
        ({"tres_per_task": "gres/mig:1g.10gb:2", "num_tasks": 12}, 4, "1g.10gb:6", "3"),
        ({"tres_per_job": "gres/gpu:4", "num_tasks": 4}, 4, "7g.80gb:1", "1"),
        ({"tres_per_job": "gres/gpu:4", "num_tasks": 4, "min_nodes": 1, "max_nodes": 4}, 4, "7g.80gb:1", "1"),
        ({"tres_per_job": "gres/gpu:4"}, 4, "7g.80gb:1", None),
        ({"tres_per_job": "gres/gpu:4", "exc_nodes": "n3"}, None, "", None),
        ({"tres_per_job": "gres/gpu:4", "num_tasks": 4, "min_nodes": 1, "max_nodes": 3}, None, "", None),
        ({"tres_per_job": "gres/gpu:4", "num_tasks": 1}, None, "", None),
        ({"tres_per_job": "gres/gpu:4", "max_nodes": 1}, None, "", None),
        ({"tres_per_task": "gres/gpu:1", "num_tasks": 5}, None, "", None),
        ({"tres_per_job": "gres/gpu:2"}, 1, "7g.80gb:2", None),
        ({"tres_per_job": "gres/gpu:4", "min_nodes": 2, "max_nodes": 4}, 4, "7g.80gb:1", None),
        ({"tres_per_task": "gres/gpu:1", "num_tasks": 4, "min_nodes": 2, "max_nodes": 5}, 4, "7g.80gb:1", "1"),
        ({"tres_per_job": "gres/gpu:4", "min_nodes": 2, "max_nodes": 3}, None, "", None),
    ],
)
def test_slices_in_total_that_no_node_can_hold_are_spread_over_several(
    ask, fields: dict, nodes: int | None, share: str, tasks: str | None
) -> None:
    answer = ask(**fields)
    if nodes is None:
        assert isinstance(answer, Refuse) and "can ever hold mig:" in answer.sentence
        return
    assert isinstance(answer, Accept) and answer.changes["tres_per_node"] == f"gres/mig:{share}"
    assert answer.changes.get("ntasks_per_node") == tasks
    stated = [answer.changes.get(name) for name in ("min_nodes", "max_nodes")]
    assert stated == ([None, None] if nodes == 1 else [str(nodes)] * 2)
    reason = "" if fields.get("min_nodes", 1) > 1 else ", because no node has all of them"
    said = f"they are on {nodes} nodes, {share.rpartition(':')[2]} on each{reason}: for other shares use -N <nodes>"
    assert (said in answer.message) == (nodes > 1) and "all of them on one node" not in answer.message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tres_per_node": "gres/mig:1g.10gb:1", "min_nodes": 5, "max_nodes": 5}, True),
        ({"tres_per_node": "gres/mig:1g.10gb:1", "min_nodes": 4, "max_nodes": 5}, False),
        ({"tres_per_node": "gres/mig:1g.10gb:1", "req_nodes": "r[1-2]n[08-09],r2n9"}, True),
        ({"tres_per_job": "gres/gpu:5"}, True),
        ({"tres_per_node": "gres/mig:1g.10gb:1"}, False),
    ],
)
def test_user_of_more_nodes_than_catalog_nodes_is_told_why_slurm_may_refuse_the_job(ask, fields, told: bool) -> None:
    answer = ask(partition="racks", **fields)
    said = "fewer than 5 nodes offer these slices at this moment: submit it again later"
    assert isinstance(answer, Accept) and (said in answer.message) == told


def test_node_list_of_a_pending_job_cannot_be_changed(ask) -> None:
    now = Present(tres_per_node="gres/mig:1g.10gb:1", comment="x [mig:1g.10gb:1]", partition="gpu")
    answer = ask(job_id=7, partition=None, req_nodes="n2", now=now)
    assert isinstance(answer, Refuse) and "scontrol update JobId=... Features=mig_node_..." in answer.sentence


def test_update_respects_the_features_of_the_job(ask) -> None:
    now = Present(
        tres_per_node="gres/mig:1g.10gb:1", comment="[mig:1g.10gb:1]", partition="both", features="mig_node_a1"
    )
    answer = ask(partition=None, tres_per_node="gres/gpu:1", now=now)
    assert isinstance(answer, Accept) and answer.changes["tres_per_node"] == "gres/mig:7g.40gb:1"


entries = words(
    "gres/mig:auto gres/mig:1g.10gb:3 gres/mig:7g.80gb:1 gres/mig:3g.40gb:2 gres/gpu:1 gres/mig:1g.10gb.me:2 "
    "gres/gpu:v100:1"
)
lists = st.one_of(
    st.none(),
    words("n1 n2 n[1-2] n[1-3] n3,a1 a1 new n1,new n[01-02] n[2-1] n[1-99] n1,,n2 n[1 n] [1-2] n[1-2]x n[] n[1,3],a1"),
    words("[1]n[1-2] n[][1] n[1-4][1-9] n[1-4][1-8] n[1-4][1-4][1-2],n9 n[1,1][2,2]x n[1]n]2,n1"),
    st.text(alphabet="na12[],-", max_size=12),
    st.just("n1," * 400),
)
constraints = st.one_of(
    st.none(),
    words("h100 a100 h100&fast fast|big mig_node_n1 mig_node_new mig_node_n1|mig_node_n2 [fast|big] h100& |h100 nope"),
    st.text(alphabet="h100&|fast", max_size=10),
)
requests = st.builds(
    JobRequest,
    uid=st.just(USER),
    partition=st.sampled_from(["gpu", "both", "old", "gpu,both"]),
    tres_per_node=st.lists(entries, min_size=1, max_size=3).map(",".join),
    comment=st.sampled_from([None, "migbatch: mem=30gib", "migbatch: model=bert-large batch=8", "m" * 700, "m" * 915]),
    req_nodes=lists,
    exc_nodes=lists,
    features=constraints,
    uncatalogued=st.sampled_from([None, None, 1]),
    min_nodes=st.sampled_from([None, 0, 1, 2, 3]),
    max_nodes=st.sampled_from([None, 0, 1, 2, 3]),
)


@settings(max_examples=examples(1500), deadline=None)
@given(asked=requests)
def test_service_and_shim_agree_on_submissions(shim: Shim, chooser: Chooser, asked: JobRequest) -> None:
    both(asked, shim, chooser)


@pytest.mark.parametrize(
    ("fields", "granted"),
    [
        ({"tres_per_job": "gres/gpu:2", "num_tasks": 2}, "7g.80gb:2"),
        ({"tres_per_job": "gres/gpu:1", "num_tasks": 4}, "7g.80gb:1"),
        ({"tres_per_task": "gres/mig:1g.10gb:1", "num_tasks": 3}, "1g.10gb:3"),
        ({"tres_per_node": "gres/gpu:2", "num_tasks": 2, "ntasks_per_tres": 1, "batch": 1}, "7g.80gb:2"),
        ({"tres_per_job": "gres/gpu:4", "num_tasks": 4}, None),
    ],
)
def test_job_of_several_tasks_that_names_one_node_gets_its_slices_there(ask, fields: dict, granted: str | None) -> None:
    answer = ask(req_nodes="n3", **fields)
    if granted is None:
        assert isinstance(answer, Refuse) and "can ever hold mig:7g.80gb:4" in answer.sentence
        return
    assert isinstance(answer, Accept) and answer.changes["tres_per_node"] == f"gres/mig:{granted}"
    assert (answer.changes["features"], answer.changes["max_nodes"]) == ("mig_node_n3", "1") or "batch" in fields


totals = st.builds(
    JobRequest,
    uid=st.just(USER),
    partition=st.sampled_from(["gpu", "both", "racks"]),
    tres_per_job=st.one_of(st.none(), words("gres/gpu:4 gres/gpu:6 gres/mig:3g.40gb:4 gres/mig:auto:8 gres/gpu:2")),
    tres_per_task=st.one_of(st.none(), words("gres/gpu:1 gres/mig:3g.40gb:2 gres/mig:1g.10gb:5 gres/mig:auto:4")),
    batch=st.sampled_from([None, 1]),
    cpus_per_tres=st.sampled_from([None, None, "gres/gpu:2"]),
    ntasks_per_tres=st.sampled_from([None, None, None, 1, 2]),
    exc_nodes=st.sampled_from([None, None, "n3", "n1"]),
    req_nodes=st.sampled_from([None, None, "n3", "n2", "n[1-2]", "n1,n3", "r1n08"]),
    num_tasks=st.sampled_from([None, 0, 1, 2, 3, 4, 6, 8, 12]),
    ntasks_per_node=st.sampled_from([None, None, 1, 2, 4]),
    min_nodes=st.sampled_from([None, None, 0, 1, 2]),
    max_nodes=st.sampled_from([None, None, 0, 1, 2, 3, 4]),
)


@settings(max_examples=examples(1000), deadline=None)
@given(asked=totals)
def test_service_and_shim_agree_on_slices_in_total(shim: Shim, chooser: Chooser, asked: JobRequest) -> None:
    answer = both(asked, shim, chooser)
    if isinstance(answer, Accept) and (number := int(answer.changes.get("min_nodes", 0))) > 1:
        assert number <= (asked.max_nodes or number)
        tasks = asked.num_tasks or number
        # --ntasks-per-node=2 -n 3 -w n1,n2 gets two slices on each: Slurm chooses which node has one task
        assert tasks % number == 0 or (asked.req_nodes and tasks <= number * (asked.ntasks_per_node or 0))


comments = st.builds(
    lambda words, listed, marker: " ".join(filter(None, [words, listed and f"[mig-exclude:{listed}]", marker])),
    st.sampled_from(["", " ", "mine", "migbatch: mem=30gib", "mine [mig-exclude:n9]", "x[mig-exclude:n9]", "m" * 900]),
    lists,
    st.sampled_from(["", "[mig:1g.10gb:1]", "[mig:1g.10gb:1#7fq3k]", "[mig:1g.10gb:1#auto]", "[mig:x"]),
).filter(lambda comment: len(comment) <= SLURM_LIMIT)
changes = st.builds(
    lambda request, given, now: replace(
        request,
        req_nodes=None,
        now=now,
        **{name: None for name in ("tres_per_node", "comment", "exc_nodes") if name not in given},
    ),
    requests,
    st.sets(st.sampled_from(["tres_per_node", "comment", "exc_nodes"])),
    st.builds(
        Present,
        pending=st.sampled_from([True, True, False]),
        partition=st.just("gpu"),
        tres_per_node=st.just("gres/mig:1g.10gb:1"),
        comment=comments,
    ),
)


@settings(max_examples=examples(1500), deadline=None)
@given(asked=changes)
def test_service_and_shim_agree_on_changes(shim: Shim, chooser: Chooser, asked: JobRequest) -> None:
    both(asked, shim, chooser)


counts = st.dictionaries(
    words("7g.80gb 4g.40gb 3g.40gb 2g.20gb 1g.20gb 1g.10gb 1g.10gb.me"), st.integers(1, 12), min_size=1
)


@settings(max_examples=examples(400), deadline=None)
@given(asked=counts, wide=st.booleans())
def test_service_and_shim_agree_on_what_a_node_can_hold(
    shim: Shim, chooser: Chooser, asked: dict[str, int], wide: bool
) -> None:
    tres = ",".join(f"gres/mig:{kind}:{count}" for kind, count in asked.items())
    both(JobRequest(USER, partition="gpu", tres_per_node=tres, req_nodes="n3" if wide else None), shim, chooser)


def test_search_agrees_with_the_placements_of_one_gpu() -> None:
    """The search allows on one GPU exactly what its placements allow."""
    gpu = layouts_of(H100.geometry)
    plain = [info for info in H100.geometry.profiles if not info.profile.suffix]

    def placeable(infos, mask=0) -> bool:
        if not infos:
            return True
        return any(not mask & p.mask and placeable(infos[1:], mask | p.mask) for p in infos[0].placements)

    for size in range(1, 8):
        for infos in combinations_with_replacement(plain, size):
            need: dict[str, int] = {}
            for info in infos:
                need[info.profile.gres_type] = need.get(info.profile.gres_type, 0) + 1
            legal = H100.geometry.admits(info.profile for info in infos) and placeable(infos)
            assert can_hold([gpu], need) == legal, need


@settings(max_examples=examples(400), deadline=None)
@given(asked=counts, gpus=st.integers(1, 16))
def test_search_stops_near_its_step_limit(asked: dict[str, int], gpus: int) -> None:
    search = _HoldingSearch([layouts_of(H100.geometry)] * gpus)
    search.holds(0, tuple(asked.items()))
    assert search._steps <= STEPS + 30 * gpus


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n1,n2,n1", ("n1", "n2")),
        ("n[08-10,3],m", ("n08", "n09", "n10", "n3", "m")),
        ("n[1-2][3-4]", ("n13", "n14", "n23", "n24")),
        ("n[1-8][1-5]", None),
        ("n" * 500 + "%", None),
        ("n[1-32]", tuple(f"n{i}" for i in range(1, 33))),
        ("n[1-33]", None),
        ("n[3-1]", None),
        ("n[", None),
        ("", None),
    ],
)
def test_short_node_lists_are_expanded(text: str, names: tuple[str, ...] | None) -> None:
    assert listed(text) == names


def test_request_with_every_field_at_its_limit_fits_in_a_packet() -> None:
    text, short = "\xff" * SLURM_LIMIT, "\xff" * READ
    now = Present(True, *[text] * 7, short)
    more = {"req_nodes": short, "exc_nodes": short, "features": short}
    asked = JobRequest(4_000_000_000, job_id=4_000_000_000, now=now, **dict.fromkeys(TEXTS, text), **more)
    assert len(protocol.encode(asked.to_fields())) <= protocol.MAX_REQUEST


LONG = {
    "names": lambda n: ",".join(["n1"] * (n // 3)),
    "ranges": lambda n: "n[" + ",".join(["1-2"] * (n // 4)) + "]",
    "brackets": lambda n: "[" * n,
    "commas": lambda n: "," * n,
    "digits": lambda n: "n[" + "9" * n + "]",
    "features": lambda n: "&".join(["h100"] * (n // 5)),
    "others": lambda n: "|".join(["h100"] * (n // 5)),
}


@pytest.mark.parametrize("name", ["req_nodes", "exc_nodes", "features"])
def test_steps_grow_at_most_linearly_with_the_length_of_a_list(
    tmp_path: Path, compiler: TableCompiler, name: str
) -> None:
    write_table(tmp_path / "table.lua", compiler.text(CATALOG))
    with Shim(tmp_path, table=str(tmp_path / "table.lua"), catalog=CATALOG, count_steps=True) as counting:

        def steps(text: str) -> int:
            asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:1g.10gb:1", **{name: text})
            for _ in range(2):  # the first answer fills caches
                counting(asked)
            return counting.steps

        for what, text in LONG.items():
            small, medium, large = (steps(text(size)) for size in (125, 250, 500))
            assert large - medium <= 3 * max(medium - small, 0) + 4000, (what, small, medium, large)
            assert steps(text(60_000)) <= large + 4000, what


@pytest.mark.slow
def test_heaviest_search_takes_a_limited_number_of_steps(tmp_path: Path, compiler: TableCompiler) -> None:
    """The heaviest of many requests of slices takes slurmctld no longer than a few milliseconds."""
    wide = node("wide", " ".join(["h100-80gb"] * 16), "gpu", "")
    catalog = SiteCatalog({"gpu": CATALOG.partitions["gpu"]}, {"wide": wide}, "migcatalog")
    write_table(tmp_path / "table.lua", compiler.text(catalog))
    heavy = 0
    with Shim(tmp_path, table=str(tmp_path / "table.lua"), catalog=catalog, count_steps=True) as counting:
        for large, middle, small in product((8, 15, 16), (0, 7, 16), (0, 9, 16)):
            parts = {"3g.40gb": large, "2g.20gb": middle, "1g.20gb": small, "1g.10gb": 5, "1g.10gb.me": 11}
            tres = ",".join(f"gres/mig:{kind}:{count}" for kind, count in parts.items() if count)
            counting(JobRequest(USER, partition="gpu", tres_per_node=tres))
            heavy = max(heavy, counting.steps)
    assert heavy < 2_000_000, heavy


def test_site_catalog_keeps_its_nodes_when_serialized(tmp_path: Path) -> None:
    assert SiteCatalog.from_dict(CATALOG.to_dict()) == CATALOG
