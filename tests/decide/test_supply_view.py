"""The controller's view of the nodes, according to their events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from slurm_migbatch.daemon.nodesview import MOST_SLOTS, LiveView
from slurm_migbatch.decide.capacity.facts import GpuFacts
from tests.support.supply_gpus import A30, H100, layout, slot
from tests.support.supply_jobs import INVENTORY, only, slice_entry, start, stop


@pytest.fixture
def view() -> LiveView:
    found = LiveView()
    found.apply("n1", [INVENTORY])
    return found


def test_a_run_holds_its_slots_from_start_to_stop(view: LiveView) -> None:
    view.apply("n1", [start(7, "2g.20gb@0", "1g.10gb@4")])
    assert only(view).leases == ((slot("1g.10gb@4"), (7, 0)), (slot("2g.20gb@0"), (7, 0)))
    view.apply("n1", [stop(7, "2g.20gb@0", "1g.10gb@4")])
    assert only(view).leases == ()
    assert only(view).warm == layout("2g.20gb@0 1g.10gb@4")


def test_a_late_stop_does_not_end_the_next_run(view: LiveView) -> None:
    view.apply("n1", [start(7, "2g.20gb@0"), start(7, "2g.20gb@0", restart=1), stop(7, "2g.20gb@0")])
    assert only(view).leases == ((slot("2g.20gb@0"), (7, 1)),)


def test_repeated_events_change_nothing(view: LiveView) -> None:
    events = [start(7, "2g.20gb@0"), stop(7, "2g.20gb@0"), start(8, "1g.10gb@1")]
    view.apply("n1", events)
    after_first = view.facts()
    view.apply("n1", events)
    assert view.facts() == after_first


def test_create_destroy_and_zombie_events_update_the_view(view: LiveView) -> None:
    view.apply("n1", [{"kind": "create", **slice_entry("3g.40gb@4")}, {"kind": "zombie", **slice_entry("1g.10gb@0")}])
    assert (only(view).warm, only(view).zombies) == (layout("3g.40gb@4"), (slot("1g.10gb@0"),))
    view.apply("n1", [{"kind": "destroy", **slice_entry("3g.40gb@4")}, {"kind": "cleared", **slice_entry("1g.10gb@0")}])
    assert (only(view).warm, only(view).zombies) == (layout(), ())


def test_boot_event_clears_leases_and_zombies(view: LiveView) -> None:
    view.apply("n1", [start(7, "2g.20gb@0"), {"kind": "zombie", **slice_entry("1g.10gb@6")}, {"kind": "boot"}])
    assert only(view) == GpuFacts("a", H100)


def test_inventory_keeps_leases_unless_the_gpu_changed(view: LiveView) -> None:
    view.apply("n1", [start(7, "2g.20gb@0"), INVENTORY])
    assert only(view).leases
    other = [{"uuid": "a", "mig": True, "geometry": A30.to_dict()}, {"uuid": "b", "mig": False, "geometry": {}}]
    view.apply("n1", [{"kind": "inventory", "gpus": other}])
    assert only(view) == GpuFacts("a", A30)


def test_draining_fault_makes_the_node_unhealthy_until_its_next_inventory(view: LiveView) -> None:
    view.apply("n1", [{"kind": "fault", "gpu": "a", "what": "lost", "drain": False}])
    assert view.facts()["n1"].healthy
    view.apply("n1", [{"kind": "fault", "gpu": "a", "what": "lost", "drain": True}])
    assert not view.facts()["n1"].healthy
    view.apply("n1", [INVENTORY])
    assert view.facts()["n1"].healthy


def test_number_of_slots_that_a_node_reports_for_one_gpu_is_bounded(view: LiveView) -> None:
    """Root on the node could report new slots for ever; each would be kept, and examined in each round."""
    view.apply("n1", [start(7, "2g.20gb@0"), {"kind": "zombie", **slice_entry("1g.10gb@6")}])
    for number in range(1000):
        odd = {"gpu": "a", "profile": f"1g.{number + 100}gb", "start": 63, "size": 1}
        run = {"job": number, "restart": 0, "slices": [odd]}
        view.apply("n1", [{"kind": "start", **run}, {"kind": "zombie", **odd}, {"kind": "create", **odd}])
    (gpu,) = view._nodes["n1"].values()
    assert max(len(gpu.held), len(gpu.zombies), len(gpu.made)) <= MOST_SLOTS
    assert slot("2g.20gb@0") in dict(only(view).leases) and slot("1g.10gb@6") in only(view).zombies
    view.apply("n1", [stop(7, "2g.20gb@0"), {"kind": "cleared", **slice_entry("1g.10gb@6")}])
    assert slot("2g.20gb@0") not in dict(only(view).leases) and slot("1g.10gb@6") not in only(view).zombies


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "start", "job": 1, "slices": [{"gpu": "zz", "profile": "1g.10gb", "start": 0, "size": 1}]},
        {"kind": "start", "job": 1, "slices": [{"gpu": "a", "profile": "nonsense", "start": 0, "size": 1}]},
        {"kind": "start", "job": 1, "slices": [{"gpu": "a", "profile": "1g.10gb", "start": "x", "size": 1}]},
        {"kind": "inventory"},
        {"kind": "unheard of"},
        {},
    ],
)
def test_malformed_events_create_no_leases(view: LiveView, event: dict[str, Any]) -> None:
    view.apply("n1", [event])
    view.apply("stranger", [event])
    assert all(not gpu.leases for node in view.facts().values() for gpu in node.gpus)


def test_view_is_loaded_from_the_record() -> None:
    @dataclass
    class Row:
        node: str = "n1"
        gpu: str = "a"
        profile: str = "2g.20gb"
        start: int = 4
        size: int = 2
        job: int = 9
        restart: int = 1

    view = LiveView()
    view.load({"n1": INVENTORY["gpus"]}, [Row(), Row(node="gone")])  # type: ignore[dict-item]
    assert only(view).leases == ((slot("2g.20gb@4"), (9, 1)),)
