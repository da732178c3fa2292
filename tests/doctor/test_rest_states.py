"""Settings of `backend = "slurmrestd"` that keep migbatchd from using it are reported; no finding when all is well."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_migbatch.config import Config
from slurm_migbatch.doctor.programs import Reader, reader
from slurm_migbatch.doctor.rest import check_rest
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN
from slurm_migbatch.testbed import restd
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.rest_server import PARTITIONS, Answers, RestHandler, RestServer

NOBODY = Reader("nobody", 65534, frozenset({65534}))
NODE = {
    "name": "n1",
    "state": ["IDLE"],
    "gres": "mig:1g.10gb:7",
    "gres_used": "",
    "partitions": ["gpu"],
    "reason": "",
    "active_features": [],
    "cpus": 8,
    "alloc_cpus": 0,
}
ANSWERS: Answers = {
    "ping/": (200, {"errors": [], "meta": {"slurm": {"release": "24.11.5"}}}),
    "partitions/": (200, PARTITIONS),
    "jobs/": (200, {"jobs": [], "errors": []}),
    "nodes/": (200, {"nodes": [NODE], "errors": []}),
    "reservations/": (200, {"reservations": [], "errors": []}),
}


class Site:
    """A controller's configuration, its token and the server at the socket."""

    def __init__(self, folder: Path, server: RestServer) -> None:
        self.server, self.socket, self.token = server, folder / "rest/socket", folder / "token"
        self.token.write_text("SLURM_JWT=a.b.c\n")
        self.own(NOBODY.uid)
        self.cluster = dataclasses.replace(
            Config().cluster, backend="slurmrestd", slurmrestd=f"unix:{self.socket}", slurmrestd_token=str(self.token)
        )

    def own(self, uid: int, mode: int = 0o600) -> None:
        os.chown(self.token, uid, 0)
        self.token.chmod(mode)

    def finding(self, daemon: Reader | None = NOBODY, **cluster: str) -> tuple[str, str, str]:
        """The one finding: level, text and advice."""
        config = dataclasses.replace(Config(), cluster=dataclasses.replace(self.cluster, **cluster))
        (found,) = check_rest(config, daemon)
        assert found.subject == "slurmrestd"
        return found.level, found.text, found.advice


@pytest.fixture
def site(open_tmp_path: Path) -> Iterator[Site]:
    folder = open_tmp_path / "site"
    (folder / "rest").mkdir(parents=True)
    with RestServer(str(folder / "rest/socket"), RestHandler) as server:
        server.answers, server.headers = dict(ANSWERS), []
        (folder / "rest/socket").chmod(0o777)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Site(folder, server)
        finally:
            server.shutdown()
            thread.join()


def test_answering_slurmrestd_is_ok(site: Site) -> None:
    level, text, _ = site.finding()
    assert (level, text) == (OK, f"unix:{site.socket} answers with API version v0.0.45")
    assert {headers.get("X-SLURM-USER-TOKEN") for headers in site.server.headers} == {"a.b.c"}
    assert list(check_rest(Config(), NOBODY)) == [], "there is no finding with another backend"


def test_slurmrestd_is_checked_with_the_token_while_migbatchd_is_down(site: Site) -> None:
    site.socket.chmod(0o755)
    assert site.finding(None)[0] == OK


def test_slurmrestd_that_authenticates_the_socket_peer_is_ok(site: Site) -> None:
    level, text, _ = site.finding(slurmrestd_token="")
    assert level == OK and "without a token, as user 0" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "mode", "message", "advice"),
    [
        (65534, 0o644, "(mode 0644): others can act as slurm with this token", "chmod 600"),
        (65534, 0o640, "(mode 0640): others can act as slurm with this token", "chmod 600"),
        (0, 0o600, "migbatchd's user nobody cannot read the token", "chown nobody"),
        (1, 0o600, "migbatchd's user nobody cannot read the token", "chown nobody"),
    ],
)
def test_token_readable_by_others_or_unreadable_for_migbatchd_is_reported(
    site: Site, owner: int, mode: int, message: str, advice: str
) -> None:
    site.own(owner, mode)
    level, text, mend = site.finding()
    assert level == FAIL and message in text and advice in mend
    assert not site.server.headers, "a readable token is not sent"


def test_token_owned_by_another_user_is_reported_under_root(site: Site) -> None:
    site.own(1)
    level, text, advice = site.finding(reader(0))
    assert level == FAIL and "belongs neither to root, migbatchd's user" in text and "chown root" in advice


def test_missing_or_empty_token_is_reported(site: Site) -> None:
    site.token.write_text("scontrol: error: no\n")
    level, text, _ = site.finding()
    assert level == FAIL and "has no token" in text
    site.token.unlink()
    level, text, advice = site.finding()
    assert level == FAIL and "No such file" in text and "scontrol token username=slurm" in advice


def test_token_rejected_by_slurmrestd_is_reported(site: Site) -> None:
    site.server.answers["jobs/"] = (401, "Authentication failure")
    level, text, _ = site.finding()
    assert level == FAIL and f"it rejects the token in {site.token}" in text


def test_socket_closed_to_migbatchd_is_reported(site: Site) -> None:
    site.socket.chmod(0o755)
    level, text, advice = site.finding()
    assert level == FAIL and f"migbatchd's user nobody cannot connect to {site.socket}" in text and "by group" in advice
    assert site.finding(reader(0))[0] == FAIL, "the token's owner is unknown"


@pytest.mark.parametrize("where", ["unix:/nonexistent/socket", "http://127.0.0.1:1"])
def test_slurmrestd_that_does_not_listen_is_reported(site: Site, where: str) -> None:
    level, text, advice = site.finding(slurmrestd=where)
    assert level == FAIL and f"slurmrestd at {where} cannot be reached: " in text and "docs/install.md" in advice


def test_unsupported_api_version_is_reported(site: Site) -> None:
    del site.server.answers["ping/"]
    level, text, _ = site.finding()
    assert level == FAIL and "offers none of the API versions v0.0.40 to v0.0.45" in text


def test_check_without_root_is_unknown_with_advice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    level, _, advice = site.finding()
    assert level == UNKNOWN and "as root" in advice


@pytest.mark.slurm
@pytest.mark.slurmrestd
def test_slurmrestd_of_slurm_is_checked(cluster: Cluster, tmp_path: Path) -> None:
    rest = dataclasses.replace(
        Config().cluster,
        backend="slurmrestd",
        slurm_bin=str(cluster.bin),
        slurm_conf=str(cluster.slurm_conf),
        slurmrestd=restd.address(cluster.directory),
        slurmrestd_token=str(restd.token_file(cluster.directory)),
        slurm_user=cluster.spec.slurm_user,
    )
    (found,) = check_rest(dataclasses.replace(Config(), cluster=rest), reader(0))
    assert found.level == OK and "answers with API version v0.0.4" in found.text
    token = tmp_path / "token"
    token.write_text(cluster.run(["scontrol", "token", "lifespan=600"], "mbalice").stdout)
    token.chmod(0o600)
    other = dataclasses.replace(rest, slurmrestd_token=str(token))
    (found,) = check_rest(dataclasses.replace(Config(), cluster=other), reader(0))
    assert found.level == FAIL and found.advice
