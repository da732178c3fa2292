"""Check that a node and migbatchd reach and authenticate each other, and that their clocks agree."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from slurm_migbatch.node.auth import AuthError, Signer, make_signer
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.controller_client import ControllerClient, ControllerError
from slurm_migbatch.node.findings import FAIL, OK, Finding, tell
from slurm_migbatch.query.client import connection_to

CLOCK_S: Final = 5.0
"""Seconds that clocks may differ; munge refuses credentials from five minutes on."""
_ANSWER_S: Final = 5.0
_MOST: Final = 1 << 16


@dataclass(frozen=True)
class LinkFacts:
    """Result of a request to migbatchd.

    Attributes:
        url: its URL in node.conf, or several; empty: none is set.
        silent: of several URLs, those that do not answer while another does.
        unreachable: why there is no answer.
        other_program: another program answers.
        signer: why no credential could be created.
        refused: why a signed message, or its answer, was rejected.
        ahead: seconds that this host's clock is ahead of the controller's; None if unknown.
    """

    url: str
    silent: tuple[str, ...] = ()
    unreachable: str = ""
    other_program: bool = False
    signer: str = ""
    refused: str = ""
    ahead: float | None = None


def gather(config: NodeConfig, findings: Sequence[Finding]) -> LinkFacts:
    """Send a request to migbatchd as the agent does, with the findings."""
    if not config.controllers:
        return LinkFacts("")
    results = [_read_facts(url) for url in config.controllers]
    for facts in results:
        if facts.other_program:
            return facts
    silent = tuple(facts.url for facts in results if facts.unreachable)
    if len(silent) == len(results):
        return results[0]
    return replace(_report_findings(config, findings), silent=silent)


def _read_facts(url: str) -> LinkFacts:
    try:
        return LinkFacts(url, other_program=not _is_migbatchd(url))
    except (OSError, http.client.HTTPException) as error:
        return LinkFacts(url, unreachable=getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _report_findings(config: NodeConfig, findings: Sequence[Finding]) -> LinkFacts:
    url = ", ".join(config.controllers)
    try:
        signer: Signer = make_signer(
            config.auth, munge_socket=config.munge_socket, token_file=config.token_file, uids=config.peer_uids
        )
        signer.sign(b"", config.node)
    except AuthError as error:
        return LinkFacts(url, signer=str(error))
    try:
        return LinkFacts(
            url, ahead=tell(ControllerClient(config.controllers, signer, config.node), config.node, findings)
        )
    except ControllerError as error:
        return LinkFacts(url, refused=str(error))


def _is_migbatchd(url: str) -> bool:
    """Return whether the listening program is migbatchd, whatever its health. Raises OSError, HTTPException."""
    link = connection_to(url, _ANSWER_S)
    try:
        link.request("GET", f"{urlsplit(url).path.rstrip('/')}/healthz")
        health = json.loads(link.getresponse().read(_MOST))
    except (ValueError, RecursionError):
        return False
    finally:
        link.close()
    return isinstance(health, dict) and isinstance(health.get("checks"), dict)


def check_link(config: NodeConfig, facts: LinkFacts) -> Iterator[Finding]:
    """Check that events and plans are transferred."""
    subject = "controller"
    conf_path = f"{config.etc}/node.conf"
    if not facts.url:
        advice = f"set Controller=http://<host of migbatchd>:6830 in {conf_path}, then: systemctl restart migbatch-node"
        yield Finding(FAIL, subject, "node.conf has no Controller=: this node does not report to migbatchd", advice)
    elif facts.unreachable:
        advice = (
            f"check that migbatchd runs there, that its [node_api] port matches Controller= of {conf_path}, and the "
            "firewall"
        )
        yield Finding(FAIL, subject, f"no answer from {facts.url}: {facts.unreachable}", advice)
    elif facts.other_program:
        advice = f"set Controller= in {conf_path} to [node_api] port of migbatch.toml (default 6830)"
        yield Finding(FAIL, subject, f"the server at {facts.url} is not migbatchd", advice)
    elif facts.signer:
        yield Finding(FAIL, "credentials", facts.signer, _remedy(config, facts.signer))
    elif facts.refused:
        yield Finding(FAIL, "credentials", facts.refused, _remedy(config, facts.refused))
    else:
        yield Finding(OK, subject, f"{facts.url} and this node accept each other's messages")
    for url in facts.silent:
        text = f"no answer from {url}, so there is no fail-over"
        yield Finding(FAIL, subject, text, "check that migbatchd runs there as standby: systemctl status migbatchd")
    if facts.ahead is not None:
        yield from check_clock("this host", facts.ahead)


def check_clock(whose: str, ahead: float) -> Iterator[Finding]:
    """Check that a clock equals the controller's within `CLOCK_S`; `ahead`: seconds."""
    if abs(ahead) > CLOCK_S:
        text = f"{whose} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the controller"
        yield Finding(FAIL, "clock", text, "synchronize both (systemctl status chronyd): munge and Slurm need it")
    else:
        yield Finding(OK, "clock", f"{whose} and the controller agree to {abs(ahead):.1f} s")


def _remedy(config: NodeConfig, why: str) -> str:
    if re.search(r"\b(?:expired|future|clock)", why):
        return "synchronize the clocks of this host and the controller"
    if user := re.search(r"does not come from the controller: uid ([0-9]+) is not authorized", why):
        peers = ",".join(map(str, sorted({0, *config.peer_uids, int(user[1])})))
        return (
            f"if migbatchd runs as user {user[1]}, which must be root or SlurmUser: set PeerUids={peers} in "
            f"{config.etc}/node.conf, then: systemctl restart migbatch-node"
        )
    if " 403 " in why:
        return "correct NodeAddr= of this node in slurm.conf, or set [node_api] check_addresses = false"
    if config.auth == "token":
        return (
            f"on the controller: migbatch node key {config.node}; put its line into {config.token_file} here, then: "
            f"chown root {config.token_file}; chmod 600 {config.token_file}; systemctl restart migbatch-node"
        )
    return (
        "systemctl status munge here and there; both need the same /etc/munge/munge.key, and [node_api] auth = 'munge' "
        "in migbatch.toml"
    )
