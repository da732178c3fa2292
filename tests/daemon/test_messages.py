"""Messages of nodes as they are received: any bytes become a bounded message or a sentence that says what is wrong."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_migbatch.config import Config
from slurm_migbatch.daemon import catalog as catalogs
from slurm_migbatch.daemon import messages
from slurm_migbatch.daemon.facts import chooser_of
from slurm_migbatch.daemon.jsonfields import MessageError
from slurm_migbatch.daemon.messages import read_events, read_plan
from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.lab.sim import gpus
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.mig.planning import is_searchable
from slurm_migbatch.slurm.client import NodeRow
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.request import Accept, JobRequest, Refuse
from slurm_migbatch.submit.rewrite import rewrite
from slurm_migbatch.submit.table import TableCompiler, site_source
from slurm_migbatch.workload.catalog import SiteCatalog
from tests.support.daemon_fakes import GEOMETRY, gpu, inventory, state
from tests.support.examples import examples

HEAD = {"node": "n1", "journal": "ab", "boot_id": "b1"}
PLACE = {"gpu": "GPU-0", "profile": "1g.10gb", "start": 0, "size": 1, "gi": 3}
START = {"seq": 1, "ts": 1.0, "kind": "start", "job": 7, "restart": 0, "slices": [PLACE]}


def read_event(event: object) -> messages.Event:
    (found,) = read_events("n1", json.dumps({**HEAD, "events": [event]}).encode()).events
    return found


def several(*events: object) -> tuple[messages.Event, ...]:
    return read_events("n1", json.dumps({**HEAD, "events": events}).encode()).events


def test_valid_events_pass_unchanged() -> None:
    run = {"job": 7, "restart": 0, "uid": 1000, "since": 12.5, "slices": [PLACE], "user": "ann"}
    full_state = state(
        gpu(0), gpu(1, mig=False, geometry=None), runs=[run], zombies=[{**PLACE, "reason": "busy"}], idle=[PLACE]
    )
    fault = {"seq": 1, "ts": 1.0, "kind": "fault", "gpu": None, "what": "x", "action": "noted", "drain": False}
    stop = {**START, "kind": "stop", "exit_code": None, "memory_mib": None}
    # the most that a job may report, by node/progress.py: 1e15 items in 1e-6 s
    fast = {"seq": 1, "ts": 1.0, "kind": "progress", "job": 7, "restart": 0, "items": 10**15, "throughput_per_s": 1e21}
    for event in (inventory(gpu(0)), full_state, START, {**START, "beside": [3, 0]}, stop, fault, fast):
        assert read_event(event).wire == event
    later = {"seq": 9, "ts": 5.0, "kind": "of-tomorrow", "any": [1, {"x": None}]}
    assert read_event(later).wire == later


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"node": "n1", "have": NaN}',
        b'{"node": "n1", "have": Infinity}',
        b'{"node": "n1", "have": 1e999}',
        b'{"node": "n1", "have": 1, "have": 2}',
        b'{"node": "n1", "have": ' + b"9" * 5000 + b"}",
        b'{"node": "n1", "have": ' + str(2**62).encode() + b"}",
        b'{"node": "n1", "have": ' + str(2**53).encode() + b"}",
        b'{"node": "n1", "have": -1}',
        b'{"node": "n1", "have": 1.0}',
        b'{"node": "n1", "have": true}',
        b'{"node": "n1", "have": "1"}',
        b'{"node": "n1", "have": 1, "wait": -1}',
        b'{"node": "n1", "have": 1, "wait": "x"}',
        b'{"node": "n2", "have": 1}',
        b'{"have": 1}',
        '{"node": "n1"}'.encode("utf-16"),
        b'\xff{"node": "n1"}',
    ],
)
def test_invalid_requests_for_a_plan_raise_a_message_error(body: bytes) -> None:
    with pytest.raises(MessageError):
        read_plan("n1", body)


@pytest.mark.parametrize(
    "change",
    [
        {"database": "no hex; drop"},
        {"database": 7},
        {"acked": -1},
        {"acked": 2**62},
        {"acked": True},
        {"acked": None},
        {"journal": ""},
        {"events": {}},
        {"events": [{**START, "seq": 0}]},
        {"events": [{**START, "seq": 2**62}]},
        {"events": [{**START, "seq": True}]},
        {"events": [{**START, "kind": "S P A C E"}]},
        {"events": [START] * 501},
    ],
)
def test_invalid_envelopes_of_events_raise_a_message_error(change: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        read_events("n1", json.dumps({**HEAD, "events": [], **change}).encode())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"job": 0}, "job must be a whole number from 1"),
        ({"job": 2**62}, "job must be"),
        ({"job": 7.0}, "job must be"),
        ({"restart": None}, "restart must be"),
        ({"slices": {}}, "slices must be a list"),
        ({"slices": [7]}, "slices must be a list of objects"),
        ({"slices": [PLACE] * 257}, "at most 256"),
        ({"slices": [{**PLACE, "start": 2**40}]}, r"slices\[0\]: start must be"),
        ({"slices": [{**PLACE, "size": 0}]}, "size must be"),
        ({"slices": [{**PLACE, "size": 2**30}]}, "size must be"),
        ({"slices": [{**PLACE, "profile": "huge"}]}, "is not a MIG profile"),
        ({"slices": [{**PLACE, "gpu": "G" * 5000}]}, "gpu must be a string of at most 128"),
        ({"beside": [1, 2, 3]}, "beside must be"),
        ({"ts": "now"}, "ts must be"),
        ({"ts": -5}, "ts must be"),
        ({"ts": 1e300}, "ts must be"),
        ({"more": "x" * 5000}, "at most 4096"),
        ({"more": [[[[[[[[[[[[[[1]]]]]]]]]]]]]]}, "nested deeper"),
        ({"more": 2**60}, "too large a number"),
        ({"kind": "inventory", "gpus": [{}]}, "uuid must be"),
        ({"kind": "inventory", "gpus": [gpu(n) for n in range(65)]}, "at most 64"),
        ({"kind": "inventory", "gpus": [gpu(0, geometry=None)]}, "needs a geometry"),
        (
            {"kind": "inventory", "gpus": [gpu(0, geometry={"version": 1, "name": "x", "profiles": []})]},
            "no MIG profile",
        ),
        ({"kind": "state", "gpus": [], "runs": [], "zombies": []}, "idle must be"),
        ({"kind": "zombie"}, "gpu must be"),
    ],
)
def test_invalid_event_is_refused_without_the_others_of_its_message(change: dict[str, Any], expected: str) -> None:
    after = {**START, "seq": 2}
    body = json.dumps({**HEAD, "events": [{**START, **change}, after]}).encode()
    message = read_events("n1", body)
    refused, good = message.events
    assert (refused.kind, refused.seq) == ("refused", 1)
    (reason,) = message.refused
    assert re.search(expected, reason), reason
    assert good.wire == after
    assert messages.holding(message.events)


@pytest.mark.parametrize(
    ("kind", "key"), [("fault", "what"), ("fault", "action"), ("misfit", "reason"), ("misfit", "grant")]
)
def test_text_fields_of_an_event_must_be_strings(kind: str, key: str) -> None:
    """A list of as many values as an event may have would be a line of a megabyte in each answer."""
    event = {"seq": 1, "ts": 1.0, "kind": kind, "job": 7, "restart": 0, key: ["x" * 4000] * 200}
    assert read_event(event).kind == messages.REFUSED
    assert read_event({**event, key: "x"}).kind == kind


def test_slices_in_one_message_are_limited() -> None:
    """A node sends half a megabyte at a time; root on a node may send as much as the service reads."""
    run = {"job": 7, "restart": 0, "since": 1.0, "slices": [PLACE]}
    full_state = {"kind": "state", "gpus": [], "zombies": [], "idle": [], "runs": [run] * messages.MAX_SLICES}
    starts = [{**START, "seq": 10 + n, "slices": [PLACE] * 8} for n in range(400)]
    for events, good in (([full_state] * 9, 2), ([full_state, *starts], 1 + 328), (starts, 400)):
        numbered = [{**event, "seq": n, "ts": 1.0} for n, event in enumerate(events, 1)]
        message = read_events("n1", json.dumps({**HEAD, "events": numbered}).encode())
        assert [event.kind for event in message.events].count(messages.REFUSED) == len(events) - good
        assert messages.holding(message.events) == (good < len(events)), "the node has to send its state again"
        assert [event.seq for event in message.events] == list(range(1, len(events) + 1))


def described(slices: int, profiles: int) -> dict[str, Any]:
    """A GPU whose profiles all fit everywhere, beside each other."""
    zeros = dict.fromkeys(("sm_count", "copy_engines", "decoders", "encoders", "jpegs", "ofas"), 0)
    small = {**zeros, "compute_slices": 1, "memory_slices": 1, "memory_mib": 1, "max_instances": slices}
    rows = [
        {**small, "profile": f"1g.{n + 1}gb", "profile_id": n, "placements": [[at, 1] for at in range(slices)]}
        for n in range(profiles)
    ]
    whole = {"compute_slices": slices, "memory_slices": slices, "max_instances": 1, "placements": [[0, slices]]}
    rows.append({**small, **whole, "profile": "99g.999gb", "profile_id": 999})
    return gpu(0, geometry={"version": 1, "name": "x", "profiles": rows})


@pytest.mark.parametrize(("slices", "profiles"), [(64, 1), (32, 2), (8, 127), (12, 8), (64, 127)])
def test_geometry_too_large_to_search_is_refused(slices: int, profiles: int) -> None:
    """One event of one node would keep migbatchd, and the process that answers submissions, busy for ever."""
    entry = described(slices, profiles)
    for event in (inventory(entry), state(entry)):
        refused = read_event(event)
        assert refused.kind == messages.REFUSED and "layouts" in refused.fields["what"]


def test_geometry_of_every_known_gpu_is_accepted() -> None:
    for name in gpus.models():
        event = inventory(gpu(0, geometry=gpus.geometry(name).to_dict()))
        assert read_event(event).wire == event


def test_gpu_with_seven_slices_and_every_profile_for_media_engines_is_accepted() -> None:
    """nvml.h has these profiles; a later driver may offer them on GPUs that have only +me today."""
    known = gpus.geometry("b200").to_dict()
    rows = {row["profile"]: row for row in known["profiles"]}
    none, every = dict.fromkeys(("decoders", "jpegs", "ofas"), 0), {"decoders": 7, "jpegs": 7, "ofas": 1}
    added = [
        {**rows["2g.45gb"], "profile": "2g.45gb+me", "ofas": 1, "max_instances": 1},
        *({**rows[name], "profile": f"{name}-me", **none} for name in ("1g.23gb", "2g.45gb")),
        *({**rows[name], "profile": f"{name}+me.all", **every, "max_instances": 1} for name in ("1g.23gb", "2g.45gb")),
    ]
    event = inventory(gpu(0, geometry={**known, "profiles": [*known["profiles"], *added]}))
    assert read_event(event).wire == event


def test_different_geometries_searched_per_message_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search may take a while, and a message has room for thousands."""
    searched: set[str] = set()

    def search(known: Geometry) -> bool:
        searched.add(known.name)
        return is_searchable(known)

    monkeypatch.setattr(messages, "is_searchable", search)
    models = [gpu(0, geometry={**gpu(0)["geometry"], "name": f"model {number}"}) for number in range(40)]
    events = [inventory(*models[at : at + 10], seq=1 + at // 10) for at in (0, 10, 20, 30)]
    events += [inventory(models[0], seq=5), state(models[39], seq=6)]
    read = several(*events)
    assert [event.kind for event in read] == ["inventory", *["refused"] * 3, "inventory", "refused"]
    assert len(searched) <= messages.MAX_GEOMETRIES


def test_gpu_descriptions_read_per_message_are_limited() -> None:
    events = [inventory(*(gpu(number) for number in range(60)), seq=seq) for seq in range(1, 21)]
    read = several(*events)
    assert [event.kind for event in read] == ["inventory"] * 16 + ["refused"] * 4


def test_geometry_with_impossible_placements_is_refused() -> None:
    entry = json.loads(json.dumps(gpu(0)))
    entry["geometry"]["profiles"][0]["placements"] = [[0, 2**30]]
    assert read_event(inventory(entry)).kind == "refused"


def _change(entry: dict[str, Any], change: dict[str, Any], which: slice) -> dict[str, Any]:
    entry = json.loads(json.dumps(entry))
    for row in entry["geometry"]["profiles"][which]:
        row.update(change)
    return entry


@pytest.mark.parametrize(
    ("change", "which", "expected"),
    [
        ({"memory_slices": 0}, slice(0, 1), "1g.10gb takes no part"),
        ({"placements": []}, slice(3, 4), "7g.80gb takes no part"),
        ({"compute_slices": 0}, slice(3, 4), "7g.80gb takes no part"),
        ({"max_instances": 2**31 - 1}, slice(0, 1), "1g.10gb: no GPU has more than 64 slices"),
        ({"max_instances": 64}, slice(0, 1), ""),
        ({"profile": "7g.80gb+gfx"}, slice(3, 4), ""),
        ({"memory_mib": 1}, slice(0, 1), "1g.10gb of NVIDIA H100 80GB HBM3 has 1 MiB"),
        ({"memory_mib": 1 << 18}, slice(3, 4), f"7g.80gb of NVIDIA H100 80GB HBM3 has {1 << 18} MiB"),
        ({"memory_mib": 9 * 1024}, slice(0, 1), ""),
    ],
)
def test_impossible_gpu_of_one_node_does_not_prevent_answers_for_others(
    change: dict[str, Any], which: slice, expected: str
) -> None:
    """Root on a node describes an impossible GPU; submissions to its partition must still be answered."""
    bad = _change(gpu(0), change, which)
    event = read_event(inventory(bad))
    assert (event.kind == messages.REFUSED) == bool(expected) and expected in event.fields.get("what", "")
    nodes = [NodeRow(name, frozenset({"IDLE"}), {"1g.10gb": 7}, {}, ("gpu",)) for name in ("n1", "n2")]
    view = LiveView()
    view.load({"n1": [gpu(0)], "n2": event.fields.get("gpus", [bad])}, ())
    catalog = catalogs.build(view.geometries(), nodes, Config())
    chooser = chooser_of(Config())
    assert TableCompiler(chooser, ["bert-large"]).text(catalog)
    for comment in ("migbatch: model=bert-large batch=32 slo=200ms", "migbatch: model=llama-7b engine=vllm"):
        request = {"kind": "submit", "uid": "1000", "partition": "gpu", "tres_per_node": "gres/mig:auto"}
        job = JobRequest.from_fields({**request, "comment": comment})
        assert isinstance(rewrite(job, catalog, chooser, SubmitPolicy(), decision_id="d", ts=1.0, past={}), Accept)


def test_refusal_suggests_partitions_that_are_not_hidden() -> None:
    def suggested(*hidden: str) -> list[str]:
        nodes = [NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7}, {}, ("all", "gpu"))]
        view = LiveView()
        view.load({"n1": [gpu(0)]}, ())
        built = catalogs.build(view.geometries(), nodes, Config(), None, hidden)
        catalog = SiteCatalog.from_dict(json.loads(json.dumps(built.to_dict())))
        assert catalog == built and list(catalog.partitions) == ["all", "gpu"]
        request = JobRequest(1001, partition="cpu", tres_per_node="gres/mig:auto")
        refused = rewrite(request, catalog, chooser_of(Config()), SubmitPolicy(), decision_id="d", ts=1.0, past={})
        names = catalog.suggested
        assert isinstance(refused, Refuse) and f"choose one of {names} with" in refused.sentence
        assert f'names = "{names}"' in site_source(catalog)
        return names.split(", ")

    assert suggested() == ["all", "gpu"]
    assert suggested("all", "cpu") == ["gpu"]
    assert suggested("all", "gpu") == ["all", "gpu"], "there are no others"


def test_a_geometry_without_the_whole_gpu_is_refused() -> None:
    """It would be another kind of H100, to whose whole GPU `gpu:h100` may be rewritten."""
    event = read_event(inventory(gpu(0, geometry={**GEOMETRY, "profiles": GEOMETRY["profiles"][:1]})))
    assert event.kind == messages.REFUSED
    assert "1g.10gb is the largest profile of NVIDIA H100 80GB HBM3" in event.fields["what"]


def test_an_integrated_gpu_names_no_memory() -> None:
    profiles = [{**GEOMETRY["profiles"][0], "profile": "1g.0gb"}, {**GEOMETRY["profiles"][3], "profile": "7g.0gb"}]
    event = read_event(inventory(gpu(0, geometry={**GEOMETRY, "name": "NVIDIA Thor", "profiles": profiles})))
    assert event.kind == "inventory", event.fields


def test_kinds_of_one_gpu_are_in_the_order_of_their_numbers() -> None:
    """A node that describes its GPUs differently does not change what `gpu:1` and `gpu:h100` mean to others."""
    odd = gpu(0, geometry={**GEOMETRY, "name": "A GPU", "profiles": GEOMETRY["profiles"][1:]})
    nodes = [NodeRow(name, frozenset({"IDLE"}), {}, {}, ("gpu",)) for name in ("n0", "n1", "n2")]
    view = LiveView()
    view.load({"n0": [odd], "n1": [gpu(0)], "n2": [gpu(0)]}, ())
    catalog = catalogs.build(view.geometries(), nodes, Config())
    assert [kind.name for kind in catalog.partitions["gpu"].kinds] == ["h100-80gb", "a-gpu-80gb"]


def test_gpus_that_slurm_counts_on_other_nodes_of_a_partition_are_known() -> None:
    """Not those of a node with slices that has not reported yet."""
    idle = frozenset({"IDLE"})
    nodes = [
        NodeRow("n1", idle, {"1g.10gb": 7}, {}, ("gpu",), other_gres="gpu:h100:1"),
        NodeRow("n2", idle, {"1g.10gb": 7}, {}, ("gpu",), other_gres="gpu:h200:1"),
        NodeRow("v1", idle, {}, {}, ("gpu", "old"), other_gres="gpu:v100:4,nic:1"),
        NodeRow("k1", idle, {}, {}, ("gpu",), other_gres="gpu:2"),
    ]
    view = LiveView()
    view.load({"n1": [gpu(0)]}, ())
    catalog = catalogs.build(view.geometries(), nodes, Config())
    assert {name: part.others for name, part in catalog.partitions.items()} == {"gpu": {"v100", ""}}


def test_a_geometry_without_a_plain_profile_is_refused() -> None:
    zeros = dict.fromkeys(("sm_count", "copy_engines", "decoders", "encoders", "jpegs", "ofas"), 0)
    row = {**zeros, "profile_id": 0, "compute_slices": 1, "memory_slices": 1, "memory_mib": 1, "max_instances": 1}
    rows = [{**row, "profile": "1g.10gb+gfx", "placements": [[0, 1]]}]
    event = read_event(inventory(gpu(0, geometry={"version": 1, "name": "x", "profiles": rows})))
    assert event.kind == messages.REFUSED and "no profile without a suffix" in event.fields["what"]


def test_refused_progress_event_does_not_require_the_state_again() -> None:
    message = read_events("n1", json.dumps({**HEAD, "events": [{**START, "kind": "progress", "job": 0}]}).encode())
    assert message.refused
    assert not messages.holding(message.events)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["seq", "ts", "kind", "job", "restart", "slices", "gpus", "runs", "zombies", "idle", "beside", "gpu", "profile",
        "start", "size", "boot_id", "geometry", "uuid", "drain", "since"]  # fmt: skip
EVENTS = st.dictionaries(
    st.sampled_from(KEYS),
    JSON | st.sampled_from(["start", "stop", "state", "inventory", "boot", "zombie", "fault"]) | st.integers(1, 9)
    | st.just([PLACE]) | st.just([gpu(0)]),
    max_size=8,
)  # fmt: skip


@settings(max_examples=examples(300))
@given(st.lists(EVENTS.map(lambda event: {"seq": 1, "ts": 1.0, "kind": "start", **event}), max_size=4))
def test_accepted_events_can_be_applied(events: list[dict[str, Any]]) -> None:
    """Accepted events break nothing that reads them, and contain no NaN or infinity."""
    try:
        message = read_events("n1", json.dumps({**HEAD, "events": events}).encode())
    except MessageError as error:
        assert str(error)
        return
    view = LiveView()
    view.apply("n1", [inventory(gpu(0))])
    view.apply("n1", [event.wire for event in message.events])
    view.facts()
    for event in message.events:
        assert type(event.seq) is int and 0 < event.seq < 2**53
        assert math.isfinite(event.ts)
        json.dumps(event.wire, allow_nan=False)


@settings(max_examples=examples(300))
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_raise_an_error_with_a_sentence(body: bytes) -> None:
    for read in (read_plan, read_events):
        try:
            read("n1", body)
        except MessageError as error:
            assert 0 < len(str(error)) < 1000
