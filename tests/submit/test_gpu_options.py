"""No rewritten request has GPUs in a way that Slurm 26.05 refuses: --gres=gpu with --gpus-per-node.

Both options fill the same field of a request, so a rewritten request may have no GPU there, nor in any other field.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.slurm import gres
from slurm_migbatch.submit.request import TRES_FIELDS, Accept, JobRequest, Refuse
from tests.support.examples import examples
from tests.support.lua_shim import Shim
from tests.support.submit_agreement import agree, numbers, words

entries = words(
    "gres:gpu:1 gres/gpu:2 gres/gpu:h100:1 gpu gpu=1 gres:gpu:0 gres/gpu:h100:0 gres:mig:auto gres/mig:2g.20gb:1 "
    "gres:fpga:1 gres:gpu:1,gres:gpu:1 gres/gpu:1,gres/gpu:h100:1 gres:gpu:0,gres/gpu:1 mig,gpu:1 gres:fpga:1,gpu:2"
)
fields = st.one_of(st.none(), st.none(), entries)
requests = st.builds(
    JobRequest,
    uid=st.just(1001),
    partition=st.just("gpu"),
    tres_per_node=st.one_of(st.none(), entries, st.lists(entries, max_size=3).map(",".join)),
    tres_per_job=fields,
    tres_per_socket=fields,
    tres_per_task=fields,
    min_nodes=numbers,
    max_nodes=numbers,
    num_tasks=numbers,
    ntasks_per_node=numbers,
    sockets_per_node=numbers,
)


def gpus(text: str | None) -> list[str]:
    """Entries of a field that request GPUs, or none."""
    return [entry for entry in gres.split(text or "") if gres.prefix_of(entry)[1].split(":")[0].split("=")[0] == "gpu"]


@settings(max_examples=examples(400))
@given(requests)
def test_rewritten_request_asks_for_no_gpus(shim: Shim, chooser: Chooser, wanted: JobRequest) -> None:
    answer = agree(wanted, shim, chooser)
    if not isinstance(answer, Accept) or "tres_per_node" not in answer.changes:
        return
    after = asdict(replace(wanted, **{k: v for k, v in answer.changes.items() if k in TRES_FIELDS}))
    written = {entry for name in TRES_FIELDS for entry in gpus(asdict(wanted)[name])}
    for name in TRES_FIELDS:
        left = gpus(after[name])
        assert all(gres.parse_entry(entry).count == 0 for entry in left), after
        assert set(left) <= written, "nothing is added"


@pytest.mark.parametrize(
    "text", ["gres:gpu:1", "gres/gpu:2", "gres/gpu:h100:1", "gres:fpga:1,gres:gpu:1", "gres/gpu=1", "gres:gpu"]
)
@pytest.mark.parametrize("field", ["tres_per_node", "tres_per_job", "tres_per_task"])
def test_gpus_of_every_option_become_slices(shim: Shim, chooser: Chooser, field: str, text: str) -> None:
    request = JobRequest(uid=1001, partition="gpu", min_nodes=1, max_nodes=1, num_tasks=1, **{field: text})
    answer = agree(request, shim, chooser)
    assert isinstance(answer, Accept)
    assert "mig:7g.80gb" in answer.changes["tres_per_node"]
    assert not gpus(answer.changes["tres_per_node"]) and not gpus(answer.changes.get(field))


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("gres/gpu:1,gres/gpu:1", "7g.80gb:1"),
        ("gres/gpu:2,gres/gpu:1", "7g.80gb:1"),
        ("gres/gpu:1,gres/gpu:2", "7g.80gb:2"),
        ("gres/gpu:h100:1,gres/fpga:1,gres/gpu:h100:2", "7g.80gb:2"),
    ],
)
def test_the_last_of_several_requests_for_gpus_counts(shim: Shim, chooser: Chooser, text: str, granted: str) -> None:
    """As in Slurm, whose clients put --gpus-per-node before --gres."""
    for field in ("tres_per_node", "tres_per_job"):
        answer = agree(JobRequest(uid=1001, partition="gpu", **{field: text}), shim, chooser)
        assert isinstance(answer, Accept)
        assert f"[mig:{granted}" in answer.changes["comment"]
        assert f"mig:{granted}" in answer.changes["tres_per_node"]


@pytest.mark.parametrize(
    ("fields", "granted", "set_"),
    [
        ({"tres_per_node": "gres/gpu:1", "tres_per_job": "gres/gpu:1"}, "7g.80gb:1", {}),
        (
            {"tres_per_node": "gres/gpu:2", "tres_per_job": "gres/gpu:2", "num_tasks": 2},
            "7g.80gb:2",
            {"max_nodes": "1"},
        ),
        ({"tres_per_job": "gres/gpu:h100:2", "tres_per_task": "gres/gpu:h100=1", "num_tasks": 2}, "7g.80gb:2", {}),
        (
            {"tres_per_node": "gres/fpga:1,gres/gpu:1", "tres_per_job": "gres/gpu:2", "min_nodes": 2, "max_nodes": 2},
            "7g.80gb:1",
            {"tres_per_node": "gres/fpga:1,gres/mig:7g.80gb:1"},
        ),
        (
            {
                "tres_per_node": "gres/gpu:2",
                "tres_per_task": "cpu:2,gres/gpu=1",
                "num_tasks": 4,
                "min_nodes": 2,
                "max_nodes": 2,
            },
            "7g.80gb:2",
            {"ntasks_per_node": "2", "tres_per_task": "cpu:2"},
        ),
    ],
)
def test_gpus_that_two_options_request_alike_are_granted_once(
    shim: Shim, chooser: Chooser, fields: dict[str, object], granted: str, set_: dict[str, str]
) -> None:
    """As in Slurm: `--gpus=2 --gpus-per-node=1 -N2`."""
    answer = agree(JobRequest(uid=1001, partition="gpu", **fields), shim, chooser)  # type: ignore[arg-type]
    assert isinstance(answer, Accept)
    assert f"[mig:{granted}" in answer.changes["comment"]
    assert {name: answer.changes[name] for name in set_} == set_
    for name in TRES_FIELDS:
        assert not gpus(answer.changes.get(name, "" if name not in fields else str(fields[name])))


@pytest.mark.parametrize(
    "fields",
    [
        {"tres_per_node": "gres/gpu:1", "tres_per_job": "gres/gpu:2"},
        {"tres_per_node": "gres/gpu:1", "tres_per_job": "gres/gpu:h100:1"},
        {"tres_per_node": "gres/gpu:4", "tres_per_task": "gres/gpu:1", "num_tasks": 2},
        {"tres_per_node": "gres/mig:7g.80gb:1", "tres_per_job": "gres/gpu:1"},
        {"tres_per_node": "gres/gpu:9k", "tres_per_job": "gres/gpu:9k"},
    ],
)
def test_different_requests_by_two_options_are_refused(shim: Shim, chooser: Chooser, fields: dict[str, object]) -> None:
    answer = agree(JobRequest(uid=1001, partition="gpu", **fields), shim, chooser)  # type: ignore[arg-type]
    assert isinstance(answer, Refuse) and "more than one option" in answer.sentence
