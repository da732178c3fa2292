"""A whole migbatchd in a thread of the test process, with fakes around it."""

import dataclasses
import logging

import pytest

from slurm_migbatch.config import Config
from slurm_migbatch.daemon.service import Service
from slurm_migbatch.store.db import open_store
from tests.support.daemon_fakes import FakeSigner, FakeSlurm, FakeStore, Node
from tests.support.daemon_running import Running
from tests.support.learning_record import FACTS, Record


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog):
    """A record that cannot be made is an error, also where nobody reads it."""
    caplog.set_level(logging.DEBUG, "slurm_migbatch")


@pytest.fixture
def slurm():
    return FakeSlurm()


@pytest.fixture
def store():
    return FakeStore()


@pytest.fixture
def config(tmp_path):
    base = Config()
    return dataclasses.replace(
        base,
        cluster=dataclasses.replace(base.cluster, poll_s=0.05),
        submit=dataclasses.replace(
            base.submit,
            socket=str(tmp_path / "submit.sock"),
            table=str(tmp_path / "table.lua"),
            catalog=str(tmp_path / "catalog.json"),
        ),
        node_api=dataclasses.replace(base.node_api, listen="127.0.0.1", port=0, max_body_kb=16),
        query=dataclasses.replace(base.query, enabled=False),
        learning=dataclasses.replace(base.learning, models=str(tmp_path / "models")),
        daemon=dataclasses.replace(base.daemon, run_dir=str(tmp_path / "run"), queue=20),
    )


@pytest.fixture
def site(config, tmp_path):
    """The same with a record of its own and a model of which the site's facts say too much."""
    return dataclasses.replace(
        config,
        models={"net": FACTS},
        store=dataclasses.replace(config.store, url=f"sqlite:///{tmp_path}/record.db"),
        learning=dataclasses.replace(config.learning, min_new=5, every_s=0.2),
    )


@pytest.fixture
def record(site):
    """What `site` remembers, to which runs can be added."""
    with open_store(site.store.url) as store:
        yield Record(store)


@pytest.fixture
def signer():
    return FakeSigner()


@pytest.fixture
def running(config, slurm, store, signer):
    with Running(Service(config, client=slurm, open_store=lambda: store, signer=signer)) as running:
        yield running


@pytest.fixture
def node(running):
    return Node(running.port, FakeSigner())
