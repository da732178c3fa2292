"""The rewrite: what a user writes and what it becomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.mig.grant import parse_comment
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.submit.comment import split_marker
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, Answer, JobRequest, Pass, Present, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import Shim

USER, SLURM_USER = 1001, 64030


@pytest.fixture
def ask(chooser: Chooser):
    def run(
        gres: str | None = None, comment: str | None = None, policy: SubmitPolicy | None = None, **fields
    ) -> Answer:
        fields.setdefault("partition", "gpu")
        fields.setdefault("uid", USER)
        request = JobRequest(tres_per_node=gres, comment=comment, **fields)
        return rewrite(request, SITE, chooser, policy or SubmitPolicy(), decision_id="abc12345")

    return run


def granted(answer: Answer) -> str:
    assert isinstance(answer, Accept), answer
    grant = parse_comment(answer.changes["comment"])
    assert grant is not None
    assert ",".join(part for part in answer.changes["tres_per_node"].split(",") if "mig" in part) in (
        grant.gres,
        grant.gres.replace("mig:", "gres:mig:"),
        grant.gres.replace("mig:", "gres/mig:"),
    )
    return grant.gres


@pytest.mark.parametrize(
    ("gres", "comment", "expected"),
    [
        ("gres:mig:2g.20gb:1", None, "mig:2g.20gb:1"),
        ("gres/mig:2g.20gb", None, "mig:2g.20gb:1"),
        ("gres/mig:2g.20gb=3", None, "mig:2g.20gb:3"),
        ("gres:mig:1g.10gb+me", None, "mig:1g.10gb.me:1"),
        ("gres:mig:1g.10gb.me:1", None, "mig:1g.10gb.me:1"),
        ("gres:mig:auto", None, "mig:1g.10gb:1"),
        ("gres:mig", None, "mig:1g.10gb:1"),
        ("gres:mig:3", None, "mig:1g.10gb:3"),
        ("gres:mig:auto:2", "migbatch: mem=30GiB", "mig:3g.40gb:2"),
        ("gres:mig:auto", "migbatch: mem=15GiB", "mig:1g.20gb:1"),
        ("gres:mig:auto", "migbatch: mem=15GiB min=2g.20gb", "mig:2g.20gb:1"),
        ("gres:mig:2g.20gb:1,gres:mig:1g.10gb:2", None, "mig:2g.20gb:1,mig:1g.10gb:2"),
        ("gres:mig:1g.10gb:1,gres:mig:1g.10gb:1", None, "mig:1g.10gb:2"),
        ("gres:mig:auto,gres:mig:1g.10gb", "migbatch: mem=30g", "mig:3g.40gb:1,mig:1g.10gb:1"),
        ("gres:gpu:1", None, "mig:7g.80gb:1"),
        ("gres/gpu:h100:2", None, "mig:7g.80gb:2"),
        ("gres:gpu", None, "mig:7g.80gb:1"),
    ],
)
def test_a_request_becomes_a_grant(ask, gres: str, comment: str | None, expected: str) -> None:
    assert granted(ask(gres, comment)) == expected


def test_other_gres_stay_where_they_are(ask) -> None:
    answer = ask("gres/license:2,gres/mig:auto,gres/shard:4")
    assert answer.changes["tres_per_node"] == "gres/license:2,gres/mig:1g.10gb:1,gres/shard:4"


def test_the_marker_follows_the_users_own_comment(ask) -> None:
    answer = ask("gres:mig:2g.20gb", "my best run \xc3\xa4")
    assert answer.changes["comment"] == "my best run \xc3\xa4 [mig:2g.20gb:1#abc12345]"
    assert answer.decision.granted == "mig:2g.20gb:1"
    assert answer.decision.reason == "explicit"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tres_per_job": "gres:gpu:2"}, "mig:7g.80gb:2"),
        ({"tres_per_job": "gres:gpu:4", "min_nodes": 2, "max_nodes": 2}, "mig:7g.80gb:2"),
        ({"tres_per_job": "gres:gpu:128", "min_nodes": 16, "max_nodes": 16}, "mig:7g.80gb:8"),
        ({"tres_per_task": "gres:gpu:1", "min_nodes": 1, "max_nodes": 1, "num_tasks": 3}, "mig:7g.80gb:3"),
        ({"tres_per_task": "gres:mig:1g.10gb:1", "ntasks_per_node": 4}, "mig:1g.10gb:4"),
        ({"tres_per_task": "gres/gpu=1", "ntasks_per_node": 8, "num_tasks": 2, "min_nodes": 1}, "mig:7g.80gb:2"),
        ({"tres_per_task": "gres/gpu=1", "ntasks_per_node": 2, "num_tasks": 3, "min_nodes": 2}, "mig:7g.80gb:2"),
        ({"tres_per_task": "gres/gpu=1", "ntasks_per_node": 8, "num_tasks": 3, "min_nodes": 2}, "mig:7g.80gb:2"),
        (
            {"tres_per_task": "gres/gpu=1", "ntasks_per_node": 8, "num_tasks": 2, "min_nodes": 2, "max_nodes": 2},
            "mig:7g.80gb:1",
        ),
        ({"tres_per_socket": "gres:gpu:1", "sockets_per_node": 2}, "mig:7g.80gb:2"),
        ({"tres_per_task": "cpu:2,gres/mig:auto", "num_tasks": 1}, "mig:1g.10gb:1"),
        ({"tres_per_job": "gres:gpu:1", "num_tasks": 4}, "mig:7g.80gb:1"),
        ({"tres_per_job": "gres:gpu:4", "num_tasks": 4}, "mig:7g.80gb:4"),
        ({"tres_per_job": "gres:gpu:3g.40gb:4", "num_tasks": 2, "min_nodes": 1}, "mig:3g.40gb:4"),
    ],
)
def test_counts_per_job_task_or_socket_become_counts_per_node(ask, fields: dict[str, object], expected: str) -> None:
    answer = ask(None, **fields)
    assert granted(answer) == expected
    (name,) = (key for key in fields if key.startswith("tres"))
    assert "mig" not in answer.changes[name] and "gpu" not in answer.changes[name]


@pytest.mark.parametrize(
    ("total", "fields", "nodes", "expected"),
    [
        (2, {"num_tasks": 4, "ntasks_per_node": 2}, "2", "mig:7g.80gb:1"),
        (4, {"num_tasks": 4, "ntasks_per_node": 2, "min_nodes": 2}, "2", "mig:7g.80gb:2"),
        (3, {"num_tasks": 3, "ntasks_per_node": 1, "min_nodes": 1}, "3", "mig:7g.80gb:1"),
    ],
)
def test_tasks_for_each_node_state_how_many_nodes_share_the_total(
    ask, total: int, fields: dict[str, int], nodes: str, expected: str
) -> None:
    """The job has as many nodes in Slurm."""
    answer = ask(None, tres_per_job=f"gres:gpu:{total}", **fields)
    assert granted(answer) == expected
    assert (answer.changes["min_nodes"], answer.changes["max_nodes"]) == (nodes, nodes)


@pytest.mark.parametrize(
    "fields",
    [{"num_tasks": 4}, {"num_tasks": 4, "min_nodes": 1}, {"min_nodes": 1, "max_nodes": 4}],
)
def test_one_slice_in_total_limits_the_job_to_one_node(ask, fields: dict[str, object]) -> None:
    for total in ("gres:gpu", "gres:gpu:h100:1", "gres:mig:1g.10gb:1"):
        assert ask(None, tres_per_job=total, **fields).changes["max_nodes"] == "1"
    assert "max_nodes" not in ask(None, tres_per_job="gres:gpu:1", num_tasks=1).changes
    assert "max_nodes" not in ask(None, tres_per_job="gres:gpu:1", num_tasks=4, min_nodes=1, max_nodes=1).changes


@pytest.mark.parametrize(
    ("hints", "note"),
    [
        ("mem=10gib", "do not change that: for the smallest slices"),
        ("max=3g.40gb", "do not change that: for the smallest slices"),
        ("mem=200gib", "mem=204800 MiB does not change that, and each has only "),
        ("model=resnet50", ""),
    ],
)
def test_hints_that_whole_gpus_leave_unused_are_named(ask, hints: str, note: str) -> None:
    for gres, fields in ((None, {"tres_per_job": "gres:gpu:2"}), ("gres:gpu:h100:2", {})):
        answer = ask(gres, f"migbatch: {hints}", **fields)
        assert granted(answer) == "mig:7g.80gb:2"
        assert note in answer.message and ("change that" in answer.message) == bool(note)
    assert "change that" not in ask("gres:gpu:1,gres:mig:auto", f"migbatch: {hints}".replace("200", "2")).message


def test_a_slice_for_each_task_limits_the_job_to_one_node_and_says_so(ask) -> None:
    for fields in (
        {"num_tasks": 4},
        {"num_tasks": 4, "min_nodes": 1, "max_nodes": 4},  # -N 1-4
        {"min_nodes": 1, "max_nodes": 4},
        {"num_tasks": 2, "min_nodes": 1, "ntasks_per_node": 8},
    ):
        answer = ask(None, tres_per_job="gres:gpu:4", **fields)
        assert granted(answer) == "mig:7g.80gb:4" and answer.changes["max_nodes"] == "1"
        assert "all of them on one node" in answer.message and "-N <nodes>" in answer.message
    for fields in ({"num_tasks": 5}, {"num_tasks": 8, "min_nodes": 1, "max_nodes": 4}):  # some tasks share a GPU
        answer = ask(None, tres_per_job="gres:gpu:4", **fields)
        assert granted(answer) == "mig:7g.80gb:4" and answer.changes["max_nodes"] == "1"
        assert "all of them on one node, which needs the CPUs and memory of all tasks" in answer.message
    for fields in ({"num_tasks": 1}, {"num_tasks": 4, "min_nodes": 2, "max_nodes": 2}):
        assert "on one node" not in ask(None, tres_per_job="gres:gpu:4", **fields).message
    assert "on one node" not in ask(None, tres_per_job="gres:gpu:1", num_tasks=4).message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tres_per_task": "gres:gpu:1", "num_tasks": 4}, "mig:7g.80gb:4"),
        ({"tres_per_task": "gres/gpu=2", "num_tasks": 4, "min_nodes": 1}, "mig:7g.80gb:8"),
        ({"tres_per_task": "cpu:2,gres/mig:auto", "num_tasks": 3}, "mig:1g.10gb:3"),
        ({"tres_per_task": "gres/mig:1g.10gb", "num_tasks": 64, "min_nodes": 1, "max_nodes": 4}, "mig:1g.10gb:64"),
    ],
)
def test_slices_per_task_limit_a_job_without_a_number_of_nodes_to_one(
    ask, fields: dict[str, object], expected: str
) -> None:
    answer = ask(None, **fields)
    assert granted(answer) == expected and answer.changes["max_nodes"] == "1"
    assert "all of them on one node" in answer.message
    for more in ({"ntasks_per_node": 2}, {"min_nodes": 1, "max_nodes": 1}):
        assert "max_nodes" not in ask(None, **{**fields, **more}).changes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tres_per_task": "gres/gpu:1", "num_tasks": 4}, "2"),
        ({"tres_per_task": "gres/gpu:1", "num_tasks": 4, "ntasks_per_node": 4}, "2"),
        ({"tres_per_task": "gres/gpu:1", "num_tasks": 2}, "1"),
        ({"tres_per_job": "gres/gpu:4", "num_tasks": 4}, "2"),
        ({"tres_per_job": "gres/gpu:4", "num_tasks": 2}, "1"),
        ({"tres_per_job": "gres/gpu:2", "num_tasks": 8}, None),  # several tasks use one slice
        ({"tres_per_node": "gres/gpu:2", "num_tasks": 4}, None),  # Slurm itself spreads these as it likes
        ({"tres_per_task": "gres/gpu:1", "num_tasks": 3, "ntasks_per_node": 2}, None),
    ],
)
def test_tasks_with_a_slice_each_are_spread_as_the_slices_are(ask, fields: dict[str, object], expected: object) -> None:
    answer = ask(fields.pop("tres_per_node", None), min_nodes=2, max_nodes=2, **fields)
    assert answer.changes.get("ntasks_per_node") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "nodes", "each", "tasks"),
    [
        ({"tres_per_job": "gres:gpu:4", "max_nodes": 3}, 2, 2, None),
        ({"tres_per_job": "gres:gpu:4", "max_nodes": 4, "num_tasks": 4}, 2, 2, "2"),
        ({"tres_per_job": "gres:gpu:3", "max_nodes": 4}, 3, 1, None),
        ({"tres_per_job": "gres:mig:1g.10gb:200", "max_nodes": 8}, 4, 50, None),
        ({"tres_per_job": "gres:gpu:4", "max_nodes": 4, "num_tasks": 4, "ntasks_per_node": 1}, 4, 1, "1"),
        ({"tres_per_task": "gres:gpu:1", "max_nodes": 4, "num_tasks": 6}, 2, 3, "3"),
        ({"tres_per_task": "gres:gpu:2", "max_nodes": 4, "num_tasks": 3}, 3, 2, "1"),
    ],
)
def test_of_a_range_of_nodes_a_job_gets_the_fewest_with_equal_shares(
    ask, shim: Shim, fields: dict[str, object], nodes: int, each: int, tasks: str | None
) -> None:
    """Slurm allocates the fewest that have the GPUs (-N 2-3 --gpus=4)."""
    answer = ask(None, min_nodes=2, **fields)
    assert isinstance(answer, Accept) and answer.changes["tres_per_node"].endswith(f":{each}")
    assert answer.changes["min_nodes"] == answer.changes["max_nodes"] == str(nodes)
    assert answer.changes.get("ntasks_per_node") == tasks
    assert f"they are on {nodes} nodes, {each} on each: for other shares use -N <nodes>" in answer.message
    local = shim(JobRequest(answer.decision.uid, partition="gpu", min_nodes=2, **fields))
    assert isinstance(local, Accept) and local.message == answer.message
    assert {**local.changes, "comment": ""} == {**answer.changes, "comment": ""}


@pytest.mark.parametrize(
    "fields",
    [
        {"tres_per_job": "gres:gpu:3", "num_tasks": 4, "ntasks_per_node": 2},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "ntasks_per_node": 3},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "ntasks_per_node": 2, "min_nodes": 1, "max_nodes": 4},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "ntasks_per_node": 2, "min_nodes": 3},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "ntasks_per_node": 2, "req_nodes": "n1,n2"},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "ntasks_per_node": 2, "now": Present(True, "gpu")},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "min_nodes": 2},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 3, "min_nodes": 2, "max_nodes": 4},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "min_nodes": 3, "max_nodes": 3},
        {"tres_per_job": "gres:gpu:5", "min_nodes": 2, "max_nodes": 4},
        {"tres_per_job": "gres:gpu:4", "min_nodes": 2, "max_nodes": 4, "req_nodes": "n1,n2"},
        {"tres_per_job": "gres:gpu:4", "min_nodes": 2, "max_nodes": 4, "now": Present(True, "gpu")},
        {"tres_per_task": "gres:gpu:1", "min_nodes": 2, "max_nodes": 4},
        {"tres_per_task": "gres:gpu:9", "num_tasks": 4294967280, "min_nodes": 2, "max_nodes": 4294967280},
        {"tres_per_job": "gres:gpu:4", "num_tasks": 4, "req_nodes": "n1,n2"},
        {"tres_per_job": "gres:gpu:1", "num_tasks": 4, "min_nodes": 2},
        {"tres_per_job": "gres:gpu:1", "num_tasks": 4, "req_nodes": "n1,n2"},
        {"tres_per_job": "gres:gpu:1,gres:mig:1g.10gb:1", "num_tasks": 4},
        {"tres_per_job": "gres:gpu:3", "min_nodes": 2, "max_nodes": 2},
        {"tres_per_task": "gres:gpu:1", "num_tasks": 65},
        {"tres_per_task": "gres:gpu:1", "num_tasks": 8, "min_nodes": 2},
        {"tres_per_task": "gres:gpu:1", "num_tasks": 8, "req_nodes": "n1,n2"},
        {"tres_per_task": "gres:gpu:1", "min_nodes": 1, "max_nodes": 4},
        {"tres_per_socket": "gres:gpu:1"},
    ],
)
def test_request_without_a_definite_count_per_node_is_refused(ask, fields: dict[str, object]) -> None:
    answer = ask(None, **fields)
    assert isinstance(answer, Refuse) and answer.code == "per_node"
    assert "-N" in answer.sentence


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("gres/mig:auto", "--tres-per-task"),
        ("cpu:2,gres/gpu:1", "--tres-per-task"),
        ("gres:gpu:h100:1", "--gpus-per-task"),
        ("gres/gpu:3g.40gb:1", "--gpus-per-task"),
    ],
)
def test_a_refusal_names_the_option_of_the_request(ask, text: str, option: str) -> None:
    assert ask(None, tres_per_task=text, num_tasks=8, min_nodes=2).sentence.startswith(f"{option} does not")
    twice = ask("gres/mig:auto", tres_per_task=text, num_tasks=1)
    assert twice.code == "two_ways" and f"(--gres and {option})" in twice.sentence
    assert "SBATCH_GPUS" in twice.sentence and "SBATCH_GRES" in twice.sentence, "either may be the variable's"


@pytest.mark.parametrize(
    ("gres", "comment", "code"),
    [
        ("gres:mig:1g", None, "profile_short"),
        ("gres:mig:3G", None, "spelling"),
        ("gres:mig:none", None, "filler"),
        ("gres:mig:none:1", None, "filler"),
        ("gres:mig:5g.50gb", None, "unknown_profile"),
        ("gres:mig:MIG", None, "spelling"),
        ("gres:MIG:auto", None, "spelling"),
        ("gres:Mig:1g.10gb", None, "spelling"),
        ("gres: mig:auto", None, "spelling"),
        ("gres:mig:auto ", None, "spelling"),
        ("gres:mig\t:auto", None, "spelling"),
        ("gres:mig:a:b:1", None, "spelling"),
        ("gres:mig:", None, "spelling"),
        ("gres:mig:1g.10gb:", None, "spelling"),
        ("gres:mig:1g.10gb:-1", None, "spelling"),
        ("gres:mig:1g.10gb:0", None, "count"),
        ("gres:mig:1g.10gb:65", None, "count"),
        ("gres:mig:1g.10gb:1k", None, "count"),
        ("gres:mig:1k", None, "count"),
        ("gres:mig:1g.10gb:1g", None, "count"),
        ("gres:mig:99999999999999999999", None, "count"),
        ("gres:mig:1g.10gb:40,gres:mig:1g.10gb:40", None, "count"),
        ("gres:mig:2g.20gb", "migbatch: mem=30gb", "mem_over_profile"),
        ("gres:mig:2g.20gb", "migbatch: max=1g.10gb", "profile_outside"),
        ("gres:mig:auto", "migbatch: min=3g.40gb max=1g.10gb", "min_over_max"),
        ("gres:mig:auto", "migbatch: min=3g.41gb", "unknown_profile"),
        ("gres:mig:auto", "migbatch: mem=90gb", "mem_nowhere"),
        ("gres:mig:auto", "migbatch: mem=30gb max=2g.20gb", "mem_nowhere"),
        ("gres:mig:auto", "migbatch: model=bert-large input=224px", "input_unit"),
        ("gres:mig:auto", "migbatch: modle=x", "hint_typo"),
        ("gres:mig:auto", "migbatch: colour=red", "hint_key"),
        ("gres:mig:auto", "Migbatch: model=resnet50", "hint_near"),
        ("gres:mig:auto", "x" * 1010, "comment_long"),
        ("gres:gpu:v100:1", None, "unknown_gpu"),
        ("gres:mig:auto,gres:gpu:1000", None, "count"),
    ],
)
def test_invalid_requests_are_refused_with_their_code(ask, gres: str, comment: str | None, code: str) -> None:
    answer = ask(gres, comment)
    assert isinstance(answer, Refuse) and answer.code == code, answer
    assert "\n" not in answer.sentence and len(answer.sentence) < 300


def test_refusal_of_a_short_profile_name_lists_the_full_names(ask) -> None:
    assert "1g.10gb, 1g.10gb.me, 1g.20gb, 2g.20gb" in ask("gres:mig:1g").sentence


def test_refusal_of_an_unknown_gpu_type_says_how_to_request_a_slice(ask) -> None:
    assert "mig:<profile>" in ask("gres:gpu:v100:1").sentence


def test_refusal_of_an_unknown_slice_of_static_mig_lists_the_profiles(ask) -> None:
    answer = ask("gres:gpu:h100_9g.90gb:1")
    assert (
        answer.code == "unknown_profile" and "9g.90gb" in answer.sentence and "1g.10gb, 1g.10gb.me" in answer.sentence
    )


@pytest.mark.parametrize(
    ("gres", "partition", "expected"),
    [
        ("gres:gpu:1g.10gb:1", "gpu", "mig:1g.10gb:1"),
        ("gres/gpu:nvidia_h100_80gb_hbm3_3g.39gb:2", "gpu", "mig:3g.40gb:2"),
        ("gres:gres/gpu:h100_1g10gb+me", "gpu", "mig:1g.10gb.me:1"),
        ("gpu:a100_1g.4gb=3", "mixed", "mig:1g.5gb:3"),
        ("gres/gpu:a100_7g.39gb:1", "mixed", "mig:7g.40gb:1"),
        ("gpu:3g.40gb:1,gpu:3g.39gb:1,gpu:h100:1", "gpu", "mig:3g.40gb:2,mig:7g.80gb:1"),
    ],
)
def test_a_slice_as_static_mig_counts_it_is_granted_as_a_slice(ask, gres: str, partition: str, expected: str) -> None:
    """AutoDetect of slurmd makes GPU types of slices, by their memory in GiB: gpu:a100_3g.39gb for 3g.40gb."""
    answer = ask(gres, partition=partition)
    assert granted(answer) == expected
    assert "is granted as --gres=mig:" in answer.message


def test_a_slice_of_several_gpu_kinds_is_granted_on_any_of_them(ask) -> None:
    assert "have it: --constraint chooses one" in ask("gpu:a100_1g.10gb:1", partition="mixed").message
    assert "--constraint" not in ask("gpu:h100_3g.39gb:1", partition="mixed").message


def test_a_slice_of_static_mig_keeps_the_limits_of_the_hints(ask) -> None:
    assert ask("gpu:3g.39gb:1", "migbatch: mem=50gb").code == "mem_over_profile"
    assert granted(ask("gpu:3g.39gb:1", "migbatch: mem=30gb")) == "mig:3g.40gb:1"


def test_partition_determines_how_a_request_is_rewritten(ask) -> None:
    assert isinstance(ask("gres:gpu:1", partition="cpu"), Pass)
    assert ask("gres:mig:auto", partition="cpu").code == "no_partition"
    assert ask("gres:gpu:1", partition="gpu,cpu").code == "mixed_partitions"
    assert granted(ask("gres:mig:auto", partition="old")) == "mig:2g.10gb:1"  # the site's default there
    assert granted(ask("gres:gpu:a100:1", partition="mixed")) == "mig:7g.40gb:1"
    assert granted(ask("gres:gpu:1", partition="old,gpu")) == "mig:7g.40gb:1"


def test_user_of_gpus_beside_slices_is_told_where_they_may_come_from(ask) -> None:
    """SBATCH_GPUS_PER_NODE fills the same field as --gres: Slurm's clients add both."""
    answer = ask("gres:gpu:1,gres:mig:2g.20gb:1")
    assert granted(answer) == "mig:7g.80gb:1,mig:2g.20gb:1"
    assert "SBATCH_GPUS_PER_NODE" in answer.message
    for text in ("gres:gpu:1", "gres:mig:2g.20gb,gres:mig:auto", "gres:gpu:h100_3g.39gb:1,gres:mig:1g.10gb"):
        assert "SBATCH_GPUS_PER_NODE" not in ask(text).message


def test_of_several_partitions_a_new_job_with_slices_keeps_those_that_have_them(ask) -> None:
    """As in Slurm, which starts a job of several partitions in one that has its GPUs."""
    for text in ("gres:mig:auto", "gres:mig:2g.20gb:2"):
        answer = ask(text, partition="cpu,gpu,cpu,mixed")
        assert isinstance(answer, Accept)
        assert answer.changes["partition"] == "gpu,mixed"
        assert "only in gpu,mixed: no MIG GPUs in cpu" in answer.message
    assert "partition" not in ask("gres:mig:auto", partition="gpu,mixed").changes
    assert ask("gres:gpu:a100_3g.39gb:1", partition="gpu,cpu").code == "mixed_partitions", "cpu may have other GPUs"


def test_of_several_partitions_a_pending_job_with_slices_keeps_those_that_have_them(ask) -> None:
    now = Present(True, "gpu", "gres:mig:2g.20gb:1", comment="mine [mig:2g.20gb:1#7fq3k2ab]")
    answer = ask(partition="cpu,gpu,mixed", now=now)
    assert isinstance(answer, Accept) and answer.changes == {"partition": "gpu,mixed"}
    assert answer.message == "migbatch: it starts only in gpu,mixed: no MIG GPUs in cpu"
    assert ask(partition="cpu", now=now).code == "no_partition"
    assert ask("gres:gpu:1", partition="cpu,gpu", now=now).code == "mixed_partitions"


def test_requests_without_slices_or_by_root_pass_unchanged(ask) -> None:
    assert ask(None) == Pass("")
    assert ask("gres:fpga:1", "hello") == Pass("")
    assert ask("gres:mig:auto", uid=0) == Pass("")
    assert ask("gres:migration:1") == Pass("")
    assert ask("gres:gpu:0") == Pass("")
    assert "add --gres=mig:auto" in ask(None, "migbatch: model=bert-large").message


def test_jobs_of_slurm_user_get_their_slices(ask, tmp_path: Path) -> None:
    """The Prolog asks slurmctld about root's jobs only; without a marker there would be no slice and no message."""
    policy = SubmitPolicy(trusted_uids=frozenset({0, SLURM_USER}))
    with Shim(tmp_path, policy=policy) as shim:
        for answer in (
            ask("gres/mig:2g.20gb:1", policy=policy, uid=SLURM_USER),
            shim(JobRequest(SLURM_USER, partition="gpu", tres_per_node="gres/mig:2g.20gb:1")),
        ):
            assert granted(answer) == "mig:2g.20gb:1"
        assert shim(JobRequest(0, partition="gpu", tres_per_node="gres/mig:2g.20gb:1")) == Pass()
    assert ask("gres/mig:2g.20gb:1", policy=policy, uid=0) == Pass()
    assert ask("gres/mig:1g.10gb:1", policy=policy, uid=SLURM_USER, now=Present()) == Pass(), "migbatchd updates jobs"


@pytest.mark.parametrize("gres", ["gres:gpu:1", "gres:mig:auto", "gres:mig:1g.10gb"])
def test_options_for_whole_gpus_are_refused(ask, gres: str) -> None:
    """Slurm's own refusal of a job without GPUs names no option."""
    assert ask(gres, cpus_per_tres="gres:gpu:4").code == "per_gpu"
    assert ask(gres, mem_per_tres="gres:gpu:4000").code == "per_gpu"
    assert ask(gres, tres_freq="gpu:high").code == "per_gpu"
    assert ask(gres, ntasks_per_tres=2).code == "per_gpu"
    assert ask(gres, tres_freq="gres:gpu:1", batch=1).code == "per_gpu"


@pytest.mark.parametrize(
    ("fields", "cpus", "memory"),
    [
        ({"tres_per_job": "gres:gpu:1"}, ("4", "4"), "3000"),
        ({"tres_per_job": "gres/gpu:2"}, ("8", "8"), "6000"),
        ({"tres_per_job": "gres:gpu:2", "num_tasks": 2}, ("4", "8"), "6000"),
        ({"tres_per_job": "gres:gpu:4", "min_nodes": 2, "max_nodes": 2, "num_tasks": 4}, ("4", "16"), "6000"),
        ({"gres": "gres:gpu:2", "min_nodes": 3, "max_nodes": 3}, ("8", "24"), "6000"),
        ({"gres": "gres:mig:1g.10gb:2,gres:mig:2g.20gb"}, ("12", "12"), "9000"),
        ({"gres": "gres:mig:auto", "num_tasks": 3, "min_nodes": 1, "max_nodes": 1}, ("2", "6"), "3000"),
    ],
)
def test_batch_jobs_get_cpus_and_memory_per_gpu_for_each_of_their_slices(
    ask, fields: dict[str, object], cpus: tuple[str, str], memory: str
) -> None:
    answer = ask(cpus_per_tres="gres:gpu:4", mem_per_tres="gres/gpu:3000", batch=1, **fields)
    assert isinstance(answer, Accept), answer
    assert (answer.changes["cpus_per_task"], answer.changes["min_cpus"]) == cpus
    assert answer.changes["pn_min_memory"] == memory
    assert answer.changes["cpus_per_tres"] == answer.changes["mem_per_tres"] == ""
    assert f"--cpus-per-gpu is granted as --cpus-per-task={cpus[0]}" in answer.message
    assert f"--mem-per-gpu is granted as --mem={memory}M" in answer.message


def test_cpus_per_gpu_need_a_known_number_of_tasks_on_each_node(ask) -> None:
    unknown = {"num_tasks": 3, "min_nodes": 2, "max_nodes": 3}
    assert ask("gres:gpu:1", cpus_per_tres="gres:gpu:4", batch=1, **unknown).code == "per_gpu"
    assert ask("gres:gpu:1", cpus_per_tres="gres:gpu:h100:4", batch=1).code == "per_gpu"
    assert ask("gres:gpu:64", cpus_per_tres="gres:gpu:2000", batch=1).code == "per_gpu"
    now = Present(partition="gpu", tres_per_node="gres:mig:1g.10gb:1", comment="[mig:1g.10gb:1]")
    assert ask("gres:gpu:1", cpus_per_tres="gres:gpu:4", now=now).code == "per_gpu"


@pytest.mark.parametrize(
    ("fields", "each", "accepted"),
    [
        ({"tres_per_job": "gres:gpu:1"}, 1, True),  # Snakemake's Slurm executor, for every rule with a GPU
        ({"gres": "gres:gpu:1", "num_tasks": 1}, 1, True),
        ({"tres_per_job": "gres:gpu:1", "num_tasks": 4}, 4, True),
        ({"tres_per_job": "gres:gpu:2", "num_tasks": 2}, 1, True),
        ({"tres_per_job": "gres:gpu:2", "num_tasks": 4}, 2, True),  # sbatch --gpus=2 --ntasks-per-gpu=2
        ({"tres_per_job": "gres:gpu:2", "num_tasks": 3}, 2, False),
        ({"gres": "gres:mig:1g.10gb:2", "min_nodes": 2, "max_nodes": 2, "num_tasks": 4}, 1, True),
        ({"tres_per_job": "gres:gpu:2", "num_tasks": 1}, 1, False),
        ({"tres_per_job": "gres:gpu:2", "ntasks_per_node": 1}, 1, False),
        ({"tres_per_job": "gres:gpu:1", "num_tasks": 2}, 1, False),
        ({"gres": "gres:gpu:1", "min_nodes": 1, "max_nodes": 2, "num_tasks": 2}, 1, False),
    ],
)
def test_batch_jobs_may_state_the_tasks_that_they_have_for_each_gpu(
    ask, fields: dict[str, object], each: int, accepted: bool
) -> None:
    answer = ask(ntasks_per_tres=each, batch=1, **fields)
    if accepted:
        assert isinstance(answer, Accept), answer
        assert answer.changes["ntasks_per_tres"] == "65534", "not given; Slurm would look for the GPU"
        several = fields.get("min_nodes") == 2
        assert answer.changes.get("ntasks_per_node") == ("2" if several else None), "not 3 of 4 on the first node"
    else:
        assert answer.code == "per_gpu"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_tasks": 2, "ntasks_per_tres": 1}, True),
        ({"num_tasks": 2, "ntasks_per_tres": 1, "batch": 1, "comment": "mine"}, True),
        ({"num_tasks": 2, "ntasks_per_tres": 1, "partition": "cpu"}, False),
        ({"num_tasks": 2}, False),
    ],
)
def test_tasks_for_each_gpu_alone_request_no_slice_and_the_user_is_told(ask, fields, told: bool) -> None:
    """Slurm requests GPUs for them, and refuses the job without saying so."""
    answer = ask(None, **fields)
    assert isinstance(answer, Pass) and ("state their number too, --gpus=<number>" in answer.message) == told


@pytest.mark.parametrize(
    ("fields", "each", "tasks", "nodes"),
    [
        ({"tres_per_job": "gres:gpu:2"}, 1, 2, 1),
        ({"tres_per_job": "gres:gpu:2"}, 2, 4, 1),
        ({"gres": "gres:gpu:1"}, 4, 4, 1),
        ({"gres": "gres:gpu:2", "num_tasks": 2}, 1, 2, 1),  # sbatch has counted them
        ({"gres": "gres:gpu:1", "num_tasks": 4}, 4, 4, 1),
        ({"gres": "gres:mig:1g.10gb:2", "min_nodes": 2, "max_nodes": 2}, 1, 4, 2),
        ({"tres_per_job": "gres:gpu:4", "min_nodes": 2, "max_nodes": 2, "cpus_per_task": 3}, 1, 4, 2),
    ],
)
def test_batch_jobs_get_the_tasks_that_they_state_for_each_gpu_alone(
    ask, fields: dict[str, int], each: int, tasks: int, nodes: int
) -> None:
    """As in Slurm with whole GPUs."""
    answer = ask(ntasks_per_tres=each, batch=1, **fields)
    assert isinstance(answer, Accept), answer
    of_tasks = {"num_tasks": tasks, "max_nodes": nodes, "ntasks_per_node": tasks // nodes}
    of_tasks["min_cpus"] = tasks * fields.get("cpus_per_task", 1)
    assert {name: answer.changes[name] for name in of_tasks} == {n: str(number) for n, number in of_tasks.items()}
    shared = ask(ntasks_per_tres=each, batch=1, cpus_per_tres="gres:gpu:8", **fields)
    assert shared.changes["cpus_per_task"] == str(8 // each)
    assert shared.changes["min_cpus"] == str(tasks * 8 // each)


def test_exclusive_job_is_refused_where_it_would_take_the_whole_node(ask) -> None:
    assert ask("gres:mig:auto", shared=0).code == "exclusive"
    assert granted(ask("gres/mig:auto", shared=0)) == "mig:1g.10gb:1"


def test_binding_of_slices_to_tasks_is_removed_and_left_to_the_node(ask) -> None:
    assert ask("gres:gpu:1", tres_bind="gres/gpu:per_task:1").changes["tres_bind"] == ""
    one_node = {"num_tasks": 2, "min_nodes": 1, "max_nodes": 1}
    answer = ask(None, tres_per_task="gres/mig:2g.20gb:1", tres_bind="gres/mig:per_task:1", **one_node)
    assert granted(answer) == "mig:2g.20gb:2"
    assert answer.changes["tres_bind"] == "" and answer.changes["tres_per_task"] == ""


def test_request_by_two_options_is_refused(ask) -> None:
    answer = ask("gres:mig:auto", tres_per_job="gres:gpu:1")
    assert answer.code == "two_ways"
    assert "unset SBATCH_GPUS" in answer.sentence, "users who wrote one option alone have the other in a variable"


def test_hints_in_extra_are_read_only_where_allowed(ask) -> None:
    hint = "migbatch: mem=30gib"
    assert granted(ask("gres:mig:auto", extra=hint)) == "mig:1g.10gb:1"
    assert granted(ask("gres:mig:auto", extra=hint, policy=SubmitPolicy(hints_in_extra=True))) == "mig:3g.40gb:1"


def test_a_slow_model_gets_a_larger_slice_and_a_tight_fit_a_warning(ask) -> None:
    loose = ask("gres:mig:auto", "migbatch: model=bert-large batch=32 slo=10s")
    tight = ask("gres:mig:auto", "migbatch: model=bert-large batch=32 slo=200ms")
    assert granted(loose) == "mig:1g.10gb:1"
    assert granted(tight) != "mig:1g.10gb:1"
    assert tight.decision.bucket == "bert-large/infer/b32/128tok/slo200000us/any"
    assert [candidate.ok for candidate in tight.decision.candidates].count(True) >= 1
    warned = ask("gres:mig:1g.10gb", "migbatch: model=llama-3.1-8b batch=8")
    assert "predicted to need" in warned.message and granted(warned) == "mig:1g.10gb:1"


def test_jobs_are_advised_on_batch_and_copies(ask) -> None:
    """The most effective batch; under a latency limit a smaller one and one process; no advice for training."""
    free = ask("gres:mig:3g.40gb", "migbatch: model=resnet50")
    bound = ask("gres:mig:3g.40gb", "migbatch: model=resnet50 slo=20ms")
    assert free.advice["batch"] >= 1 and free.advice["copies"] >= 1
    assert bound.advice["copies"] == 1 and bound.advice["batch"] <= free.advice["batch"]
    assert ask("gres:mig:auto", "migbatch: model=resnet50").advice
    assert free.decision.advice is not None and free.decision.to_dict()["advice"] == dict(free.advice)
    for comment in ("migbatch: model=resnet50 role=train", "migbatch: model=never-heard-of", "migbatch: mem=5gb"):
        assert ask("gres:mig:3g.40gb", comment).advice == {}
    assert ask("gres:mig:3g.40gb,gres:mig:1g.10gb", "migbatch: model=resnet50").advice == {}
    assert ask("gres:gpu:1", "migbatch: model=resnet50 input=100tok").advice == {}, "advice refuses nothing"


# -- changes of a job ------------------------------------------------------------------------------------------------

JOB = Present(True, "gpu", "gres:mig:2g.20gb:1", comment="mine [mig:2g.20gb:1#old]")


def test_a_new_comment_keeps_the_grant_of_a_pending_job(ask) -> None:
    answer = ask(None, "other words", partition=None, now=JOB)
    assert answer.changes == {"comment": "other words [mig:2g.20gb:1#old]"}


def test_a_new_comment_is_recorded_as_an_update_of_the_decision(ask) -> None:
    decision = ask(None, "other words", partition="mixed", now=replace(JOB, extra="more")).decision
    assert (decision.id, decision.kept) == ("old", True)
    assert decision.asked == {"comment": "other words", "extra": "more"}
    anew = ask("gres:mig:auto", partition=None, now=JOB).decision
    assert (anew.id, anew.kept) == ("abc12345", False)
    assert anew.asked == {"tres_per_node": "gres:mig:auto", "comment": "mine"}


def test_an_update_that_grants_anew_is_recorded_with_the_request_that_stays(ask) -> None:
    moved = ask(None, None, partition="gpu", now=Present(True, "cpu", tres_per_job="gres:gpu:1")).decision
    assert (moved.kept, moved.asked) == (False, {"tres_per_job": "gres:gpu:1"})
    unnamed = ask(None, "hello", partition=None, now=replace(JOB, comment="[mig:2g.20gb:1]")).decision
    assert (unnamed.id, unnamed.kept) == ("abc12345", False)
    assert unnamed.asked == {"tres_per_node": "gres:mig:2g.20gb:1", "comment": "hello"}


@pytest.mark.parametrize("name", ["auto", "chgauto", "chg"])
def test_a_new_comment_of_a_job_without_a_recorded_decision_is_not_recorded(ask, name: str) -> None:
    """Jobs that were granted while the service was down have a common name, or none."""
    answer = ask(None, "other words", partition=None, now=replace(JOB, comment=f"mine [mig:2g.20gb:1#{name}]"))
    assert answer.changes == {"comment": f"other words [mig:2g.20gb:1#{name}]"} and answer.decision is None


def test_a_new_gres_is_granted_anew(ask) -> None:
    answer = ask("gres:mig:auto", partition=None, now=JOB)
    assert answer.changes == {"tres_per_node": "gres:mig:1g.10gb:1", "comment": "mine [mig:1g.10gb:1#abc12345]"}
    hinted = ask("gres:mig:auto", "migbatch: mem=30gib", partition=None, now=JOB)
    assert hinted.changes["comment"] == "migbatch: mem=30gib [mig:3g.40gb:1#abc12345]"


def test_a_job_that_gives_its_slice_up_loses_the_marker(ask) -> None:
    assert ask("", partition=None, now=JOB).changes == {"comment": "mine"}
    bare = Present(True, "gpu", "gres:mig:2g.20gb:1", comment="[mig:2g.20gb:1#old]")
    assert ask("gres:fpga:1", partition=None, now=bare).changes == {"comment": " "}


def test_a_started_job_keeps_its_marker_and_its_slices(ask) -> None:
    started = Present(False, "gpu", "gres:mig:2g.20gb:1", comment="mine [mig:2g.20gb:1#old]")
    assert ask(None, "new", partition=None, now=started).changes == {"comment": "new [mig:2g.20gb:1#old]"}
    assert ask("gres:mig:7g.80gb:1", partition=None, now=started).code == "running"
    assert ask(None, "", partition=None, now=started).changes == {"comment": "[mig:2g.20gb:1#old]"}


def test_updates_by_root_or_unrelated_to_slices_pass(ask) -> None:
    assert isinstance(ask(None, None, partition="gpu", now=JOB), Pass)
    assert isinstance(ask(None, None, partition="old", now=Present(True, "cpu", "gres:fpga:1")), Pass)
    assert isinstance(ask(None, "hello", partition=None, now=Present(True, "cpu")), Pass)
    assert isinstance(ask("gres:mig:auto", "x [mig:7g.80gb:1]", uid=0, partition=None, now=JOB), Pass)


def test_job_that_is_moved_to_another_partition_keeps_slices_that_this_one_has(ask) -> None:
    """Otherwise it would pend for good."""
    assert ask(None, None, partition="mixed", now=JOB).changes == {}
    assert ask(None, None, partition="old", now=JOB).code == "unknown_profile"
    assert ask(None, None, partition="cpu", now=JOB).code == "no_partition"
    assert ask("gres:mig:auto", None, partition="old", now=JOB).changes["tres_per_node"] == "gres:mig:2g.10gb:1"
    started = Present(False, "gpu", "gres:mig:2g.20gb:1", comment="[mig:2g.20gb:1#old]")
    assert isinstance(ask(None, None, partition="old", now=started), Pass)


def test_job_with_whole_gpus_that_is_moved_to_a_partition_with_slices_gets_one(ask) -> None:
    whole = Present(True, "cpu", tres_per_job="gres:gpu:1")
    answer = ask(None, None, partition="gpu", now=whole)
    assert answer.changes == {
        "tres_per_node": "gres:mig:7g.80gb:1",
        "tres_per_job": "",
        "comment": "[mig:7g.80gb:1#abc12345]",
    }
    assert isinstance(ask(None, None, partition="other", now=whole), Pass)


def test_job_without_slices_may_get_one_by_an_update(ask) -> None:
    answer = ask("gres/mig:auto", partition=None, now=Present(True, "gpu", comment="hello"))
    assert answer.changes["comment"] == "hello [mig:1g.10gb:1#abc12345]"


@given(st.text(alphabet="[mig:1g.0b#]7 a", max_size=60))
def test_any_comment_splits_into_text_and_marker(comment: str) -> None:
    text, marker = split_marker(comment)
    assert "[mig:" not in text
    assert not marker or comment.endswith(marker)


@pytest.mark.parametrize(
    ("gres", "fields", "told"),
    [
        ("gres:gpu:2", {}, True),
        ("gres:gpu:2", {"num_tasks": 2}, True),
        ("gres:gpu:1", {"min_nodes": 2, "max_nodes": 2}, True),
        ("gres:gpu:1", {}, False),
        ("gres:mig:auto:2", {}, True),
        ("gres:mig:2g.20gb:1,gres:mig:1g.10gb:1", {"num_tasks": 1}, True),
        ("gres:mig:1g.10gb:3", {"num_tasks": 3}, False),
        ("gres:mig:1g.10gb:2", {"ntasks_per_node": 2, "num_tasks": 4, "min_nodes": 2, "max_nodes": 2}, False),
        ("gres:mig:1g.10gb", {"min_nodes": 2, "max_nodes": 2}, False),
    ],
)
def test_users_are_told_that_slices_do_not_make_one_gpu(ask, gres: str, fields: dict[str, int], told: bool) -> None:
    """NCCL refuses slices, so a data-parallel or tensor-parallel program fails on them."""
    answer = ask(gres, **fields)
    assert isinstance(answer, Accept) and ("NCCL does not connect them" in answer.message) == told


def test_too_large_a_request_is_not_sent_to_several_slices(ask) -> None:
    answer = ask("gres:mig:auto", "migbatch: mem=200gb")
    assert isinstance(answer, Refuse) and "use whole GPUs outside MIG" in answer.sentence
    assert "several slices" not in answer.sentence


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tres_per_job": "gres:gpu:1"}, ("9", "9", "50000")),
        ({"gres": "gres:mig:3g.40gb"}, ("3", "3", "21428")),
        ({"gres": "gres:mig:1g.10gb:2,gres:mig:7g.80gb"}, ("11", "11", "64284")),
        ({"tres_per_job": "gres:gpu:2", "num_tasks": 2}, ("9", "18", "100000")),
        ({"gres": "gres:mig:1g.10gb", "num_tasks": 4, "min_nodes": 1, "max_nodes": 1}, ("1", "4", "7142")),
        ({"gres": "gres:gpu:1", "cpus_per_task": 2}, (None, None, "50000")),
        ({"gres": "gres:gpu:1", "memory_given": 1}, ("9", "9", None)),
        ({"gres": "gres:gpu:1", "cpus_per_tres": "gres:gpu:2", "batch": 1}, ("2", "2", "50000")),
        ({"gres": "gres:gpu:1", "num_tasks": 3, "min_nodes": 2, "max_nodes": 3}, (None, None, "50000")),
        ({"gres": "gres:gpu:1", "partition": "gpu"}, (None, None, None)),
    ],
)
def test_jobs_get_their_slices_share_of_the_partitions_defaults_for_each_gpu(
    ask, fields: dict[str, object], expected: tuple[str | None, ...]
) -> None:
    """Slurm gives what DefCpuPerGPU and DefMemPerGPU say (here 9 and 50000) to jobs with gres/gpu only."""
    answer = ask(**{"partition": "mixed", **fields})
    assert isinstance(answer, Accept), answer
    assert tuple(answer.changes.get(name) for name in ("cpus_per_task", "min_cpus", "pn_min_memory")) == expected


def test_an_update_does_not_change_cpus_or_memory_by_the_partitions_defaults(ask) -> None:
    now = Present(partition="mixed", tres_per_node="gres:mig:1g.10gb:1", comment="[mig:1g.10gb:1#k]")
    answer = ask("gres:gpu:1", now=now, partition="mixed")
    assert isinstance(answer, Accept) and not {"cpus_per_task", "pn_min_memory"} & set(answer.changes)
    told = "scontrol update NumCPUs= and MinMemoryNode= change them"
    assert told in answer.message
    assert told not in ask("gres:mig:1g.10gb:1", now=now, partition="mixed").message
    assert told not in ask("gres:gpu:1", now=replace(now, partition="gpu"), partition=None).message
