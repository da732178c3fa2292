"""The event `state`: all that a node holds, at once; and nothing is planned for nodes that have not sent it."""

from __future__ import annotations

from typing import Any

from slurm_migbatch.daemon.nodesview import LiveView
from slurm_migbatch.daemon.observer import CompleteView
from slurm_migbatch.mig.layout import Layout
from tests.support.supply_gpus import H100, layout, slot
from tests.support.supply_jobs import INVENTORY, only, slice_entry, start, stop

GPUS = INVENTORY["gpus"]


def state(*runs: tuple[int, str], **fields: Any) -> dict[str, Any]:
    rows = [{"job": job, "restart": 0, "slices": [slice_entry(place)]} for job, place in runs]
    return {"kind": "state", "gpus": GPUS, "runs": rows, "zombies": [], "idle": [], **fields}


def test_state_event_replaces_the_view_of_the_node() -> None:
    view = LiveView()
    zombie = {"kind": "zombie", **slice_entry("1g.10gb@6")}
    view.apply("n1", [INVENTORY, start(7, "2g.20gb@0"), start(8, "1g.10gb@4"), zombie])
    view.apply(
        "n1",
        [
            state(
                (8, "1g.10gb@4"), (9, "3g.40gb@0"), zombies=[slice_entry("1g.10gb@5")], idle=[slice_entry("1g.10gb@6")]
            )
        ],
    )
    gpu = only(view)
    assert gpu.leases == ((slot("1g.10gb@4"), (8, 0)), (slot("3g.40gb@0"), (9, 0)))
    assert gpu.zombies == (slot("1g.10gb@5"),)
    assert gpu.warm == layout("1g.10gb@6")
    view.apply("n1", [stop(9, "3g.40gb@0")])
    assert only(view).leases == ((slot("1g.10gb@4"), (8, 0)),)


def test_state_event_lists_hosts_and_guests_in_any_order() -> None:
    view = LiveView()
    guest = {"job": 3, "restart": 0, "slices": [slice_entry("1g.10gb@4")], "beside": [8, 0]}
    event = state((8, "1g.10gb@4"))
    view.apply("n1", [{**event, "runs": [guest, *event["runs"]]}])
    assert only(view).leases == ((slot("1g.10gb@4"), (8, 0)),)
    assert only(view).guests == ((slot("1g.10gb@4"), (3, 0)),)


def test_state_event_from_the_record_does_not_change_leases() -> None:
    view = LiveView()
    view.load({"n1": GPUS}, ())
    view.apply("n1", [start(7, "2g.20gb@0"), {"kind": "state", "zombies": [slice_entry("1g.10gb@5")], "idle": []}])
    assert only(view).leases == ((slot("2g.20gb@0"), (7, 0)),)
    assert only(view).zombies == (slot("1g.10gb@5"),)


def test_nodes_that_have_not_sent_their_state_are_not_in_the_view() -> None:
    view = CompleteView()
    view.load({"n1": GPUS, "n2": GPUS}, ())
    assert view.facts() == {}
    view.set_complete("n2", True)
    assert list(view.facts()) == ["n2"]
    view.set_complete("n2", False)
    view.set_complete("n1", True)
    assert list(view.facts()) == ["n1"]
    assert view.facts()["n1"].gpus[0].geometry == H100


def test_jobs_keep_their_slices_on_a_gpu_that_its_node_does_not_use_any_more() -> None:
    """Otherwise Slurm counts slices that nobody knows, and the offer of the whole node is left as it is."""
    view = LiveView()
    view.apply("n1", [INVENTORY, start(7, "2g.20gb@2"), {"kind": "create", **slice_entry("1g.10gb@6")}])
    before = only(view)
    (description,) = GPUS
    withdrawn = {key: value for key, value in description.items() if key != "geometry"}
    withdrawn |= {"mig": False, "problem": "the driver failed"}
    view.apply("n1", [{"kind": "inventory", "gpus": [withdrawn]}])
    gpu = only(view)
    assert gpu.leases == before.leases and not gpu.warm.slots
    taken = layout("2g.20gb@2").union(Layout(gpu.zombies))
    assert not any(taken.free_of(place.placement) for place in H100.slots), "nothing can start there"
    view.apply("n1", [INVENTORY])
    assert only(view) == before
    view.apply("n1", [stop(7, "2g.20gb@2"), {"kind": "inventory", "gpus": [withdrawn]}])
    assert view.facts()["n1"].gpus == ()
