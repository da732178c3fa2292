"""What migbatchd logs about nodes that send no messages."""

import dataclasses
import logging

import pytest

from slurm_migbatch.daemon.service import Service
from slurm_migbatch.daemon.silence import SilenceWatch
from slurm_migbatch.slurm.client import NodeRow
from tests.support.daemon_fakes import gpu
from tests.support.daemon_running import Running
from tests.support.waiting import eventually

SILENCE_S = 90.0


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "slurm_migbatch.daemon.silence")

    def new():
        found = [record.getMessage() for record in caplog.records if record.name.endswith(".silence")]
        caplog.clear()
        return found

    return new


def test_silence_is_logged_when_it_begins_and_when_it_ends(lines):
    watch = SilenceWatch(SILENCE_S)
    watch.check({"n1": 1.0, "n2": 2.0}, 0.0)
    watch.check({"n1": 90.0, "n2": 5.0}, 89.0)
    assert lines() == []
    watch.check({"n1": 92.0, "n2": 5.0}, 91.0)
    (line,) = lines()
    assert line.startswith("no message from n1 since 20") and "systemctl status migbatch-node" in line
    watch.check({"n1": 93.0, "n2": 5.0}, 92.0)
    assert lines() == []
    watch.check({"n1": 1.0, "n2": 5.0}, 300.0)
    assert lines() == ["n1 sends messages again after 300 s"]
    watch.check({"n1": 2.0, "n2": 5.0}, 301.0)
    assert lines() == []


def test_nodes_that_fall_silent_together_take_one_line(lines):
    watch = SilenceWatch(SILENCE_S)
    for now in (0.0, 100.0):
        watch.check({f"n{number}": now for number in range(1, 41)}, now)
    (line,) = lines()
    assert line.startswith("no message from n[1-40] since ")


def test_node_that_is_down_in_slurm_is_not_reported(lines):
    """A node that is powered down sends nothing, and its slurmd may register before its agent sends something."""
    watch = SilenceWatch(SILENCE_S)
    watch.check({"n1": 1.0}, 0.0)
    watch.check({}, 600.0)
    watch.check({"n1": 900.0}, 900.0)
    watch.check({"n1": 1.0}, 920.0)
    assert lines() == []


def test_return_of_a_node_that_slurm_set_down_meanwhile_is_logged(lines):
    watch = SilenceWatch(SILENCE_S)
    for now, silences in ((0.0, {"n1": 0.0}), (100.0, {"n1": 100.0}), (400.0, {})):
        watch.check(silences, now)
    assert len(lines()) == 1
    watch.check({"n1": 600.0}, 600.0)
    watch.check({"n1": 700.0}, 700.0)
    watch.check({"n1": 0.0}, 800.0)
    assert lines() == ["n1 sends messages again after 800 s"]


def test_service_logs_the_silence_of_an_agent(config, slurm, store, signer, lines):
    store.gpus = {name: [gpu(0)] for name in ("n1", "n2")}
    slurm.node_rows["n1"] = NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 7}, {}, ("gpu",))
    slurm.node_rows["n2"] = NodeRow("n2", frozenset({"DOWN"}), {"1g.10gb": 7}, {}, ("gpu",))
    config = dataclasses.replace(config, supply=dataclasses.replace(config.supply, node_silence_s=1.0))
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)):
        (line,) = eventually(lines)
    assert line.startswith("no message from n1 since ")
