"""Partly broken states of a controller, found in files and in reports of nodes; no finding when all is well."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.doctor import doctor, roles
from slurm_migbatch.config import Config, StoreConfig, loads
from slurm_migbatch.config.marks import marks
from slurm_migbatch.config.schema import ClusterConfig
from slurm_migbatch.daemon import messages
from slurm_migbatch.daemon.facts import slurm_uids
from slurm_migbatch.daemon.jsonfields import MessageError
from slurm_migbatch.daemon.reports import NodeReports
from slurm_migbatch.doctor import (
    catalog,
    controller,
    controllers,
    database,
    health,
    lending,
    limits,
    link,
    lua,
    luaposix,
    nodes,
    partitions,
    paths,
    record,
    reports,
    service,
    settings,
)
from slurm_migbatch.doctor.luaposix import check_posix
from slurm_migbatch.doctor.programs import Reader, reader, unreadable
from slurm_migbatch.install import scripts
from slurm_migbatch.install.files import read
from slurm_migbatch.install.slurmconf import load
from slurm_migbatch.node.findings import FAIL, LONGEST, MOST, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.slurm.client import UNREAD, JobRow, NodeRow, SlurmError
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.engines import sqlite_file
from slurm_migbatch.store.wal import LARGE_BYTES
from slurm_migbatch.submit import shim
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.workload.catalog import SiteCatalog
from tests.support.gpu_kinds import H100, SITE
from tests.support.lua_shim import plant_modules

NOBODY = Reader("nobody", 65534, frozenset({65534}))


def wrong(findings) -> list[str]:
    """The findings to correct, as `subject: text -> advice`."""
    found = list(findings)
    assert all(finding.advice for finding in found if finding.level != OK)
    return [f"{finding.subject}: {finding.text} -> {finding.advice}" for finding in found if finding.level == FAIL]


def only_problem(findings) -> str:
    (found,) = wrong(findings)
    return found


# --- slurm.conf

ONE_H100 = "mig:7g.80gb:0,mig:4g.40gb:0,mig:3g.40gb:0,mig:2g.20gb:0,mig:1g.20gb:0,mig:1g.10gb:{},mig:1g.10gb.me:0"


@pytest.mark.parametrize(
    ("line", "shown", "problem"),
    [
        (f"Gres=gpu:h100:2,{ONE_H100.format(14)},mig:none:0", 14, ""),
        (f"Gres=gpu:h100:2,{ONE_H100.format(14)},mig:none:0,mig:loan:1", 15, ""),
        ("Gres=gpu:h100:2", 0, "n1 reports GPUs in MIG mode, but has no mig in"),
        ("#removed", 14, "slurm.conf has no line for n1"),
        (f"Gres={ONE_H100.format(14)},mig:none:0", 0, "slurmctld counts no slices of n1"),
        (f"Gres={ONE_H100.format(7)},mig:none:0", 7, "n1 reports GPUs for 14 slices, but"),
        (f"Gres={ONE_H100.format(21)},mig:none:0", 21, "n1 reports GPUs for 14 slices, but"),
        ("Gres=mig:7g.40gb:0,mig:1g.5gb:14,mig:none:0", 14, "n1 reports GPUs with other profiles than"),
    ],
)
def test_node_whose_gpus_are_not_those_of_slurm_conf_is_reported(
    tmp_path: Path, line: str, shown: int, problem: str
) -> None:
    """It was added, or a GPU was added, replaced, or is missing since the node was booted."""
    name = "n2" if line == "#removed" else "n1"
    (tmp_path / "slurm.conf").write_text(f"NodeName=DEFAULT CPUs=8\nNodeName={name} {line}\n")
    conf = load(str(tmp_path / "slurm.conf"), read)
    rows = [NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": shown} if shown else {}, {}, ("gpu",), "")]
    gpu = {"mig": True, "geometry": H100.geometry.to_dict()}
    off = {"mig": False, "geometry": None}
    found = wrong(nodes.check_counts(rows, conf, {"n1": [gpu, gpu, off], "gone": [gpu], "plain": [off]}))
    assert (problem in one_of(found)) if problem else found == []


def test_slices_of_a_gpu_that_does_not_answer_count(tmp_path: Path) -> None:
    """Else one faulty GPU would have an administrator change slurm.conf and restart Slurm's daemons."""
    (tmp_path / "slurm.conf").write_text(f"NodeName=n1 CPUs=8 Gres={ONE_H100.format(14)},mig:none:0\n")
    rows = [NodeRow("n1", frozenset({"IDLE"}), {"1g.10gb": 14}, {}, ("gpu",), "")]
    gpu = {"mig": True, "geometry": H100.geometry.to_dict()}
    lost = {**gpu, "mig": False, "problem": "the GPU fell off the bus"}
    assert wrong(nodes.check_counts(rows, load(str(tmp_path / "slurm.conf"), read), {"n1": [gpu, lost]})) == []


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ({"4g.40gb": 1, "none": 6}, ""),
        ({"none": 7, "loan": 1}, ""),
        ({}, "dynamic node n1 reports GPUs for 7 slices, but registered with none"),
        ({"1g.10gb": 14}, "dynamic node n1 reports GPUs for 7 slices, but registered with 14"),
    ],
)
def test_dynamic_node_needs_slices_but_no_line(tmp_path: Path, shown: dict[str, int], problem: str) -> None:
    (tmp_path / "slurm.conf").write_text("NodeName=DEFAULT CPUs=8\n")
    rows = [NodeRow("n1", frozenset({"IDLE", "DYNAMIC_NORM"}), shown)]
    gpu = {"mig": True, "geometry": H100.geometry.to_dict()}
    found = wrong(nodes.check_counts(rows, load(str(tmp_path / "slurm.conf"), read), {"n1": [gpu]}))
    assert (problem in one_of(found)) if problem else found == []


NODES = """NodeName=DEFAULT State=UNKNOWN
NodeName=h[1-2] NodeAddr=10.0.0.[1-2] Sockets=2 CoresPerSocket=8 RealMemory=200000 Feature=h100,nvlink \\
 Gres=gpu:h100:2,fpga:2,mig:none:7
NodeName=c1 CPUs=128 RealMemory=900000 Features=big
NodeName=no-mig-slice-free NodeAddr=127.0.0.1 Port=1 Sockets=2 CoresPerSocket=8 RealMemory=200000 \\
 Features=h100,nvlink,more,mig_node_h1,mig_node_h2 Gres=fpga:2,mig:none:0
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("NodeAddr=127.0.0.1 Port=1", "Port=1", "NodeAddr=127.0.0.1"),
        ("Port=1 Sockets=2 CoresPerSocket=8", "Port=1", "Sockets=2"),
        ("RealMemory=200000 \\", "\\", "RealMemory=200000"),
        ("Features=h100,nvlink,more", "Features=h100", "Features=h100,nvlink"),
        (",mig_node_h1", "", "mig_node_h1"),
        ("Gres=fpga:2,mig:none:0", "Gres=fpga:1,mig:none:0", "Gres=fpga:2"),
    ],
)
def test_catalog_node_without_address_size_or_features_is_reported(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    def findings(text: str) -> list[str]:
        (tmp_path / "slurm.conf").write_text(text)
        conf = load(str(tmp_path / "slurm.conf"), read)
        return wrong(catalog.check_catalog(conf, "no-mig-slice-free", frozenset({"h1", "h2"})))

    assert findings(NODES) == []
    assert old in NODES
    found = findings(NODES.replace(old, new))
    assert any(message in finding for finding in found) and all(
        "migbatch install --role controller" in finding for finding in found
    )


def test_catalog_node_that_inherits_the_size_of_other_nodes_is_reported(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "NodeName=h1 CPUs=8\nNodeName=DEFAULT Sockets=1 CoresPerSocket=2\n"
        "NodeName=catalog NodeAddr=127.0.0.1 Port=1 CPUs=8 Features=mig_node_h1\n"
    )
    conf = load(str(tmp_path / "slurm.conf"), read)
    found = wrong(catalog.check_catalog(conf, "catalog", frozenset({"h1"})))
    assert "jobs with -c, -n are refused" in found[0] and any("needs Sockets=8" in text for text in found)


@pytest.mark.parametrize(("reserved", "few"), [("MemSpecLimit=40", True), ("", False)])
def test_catalog_node_that_reserves_more_than_a_mig_node_is_reported(tmp_path: Path, reserved: str, few: bool) -> None:
    (tmp_path / "slurm.conf").write_text(
        "NodeName=h1 CPUs=8 CoreSpecCount=2 MemSpecLimit=20\n"
        f"NodeName=catalog NodeAddr=127.0.0.1 Port=1 CPUs=8 {reserved} Features=mig_node_h1\n"
    )
    conf = load(str(tmp_path / "slurm.conf"), read)
    found = wrong(catalog.check_catalog(conf, "catalog", frozenset({"h1"})))
    assert any("needs MemSpecLimit=20" in text for text in found) == few == bool(found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("DeferBatch", "has no Alloc"),
        ("Alloc", "has no DeferBatch"),
        ("Alloc,DeferBatch,Serial", "has Serial"),
        ("Contain,DeferBatch,RunInJob", "has RunInJob"),
    ],
)
def test_missing_or_unsuitable_prolog_flags_are_reported(flags: str, message: str) -> None:
    conf = {"grestypes": "gpu,mig", "jobsubmitplugins": "lua", "prolog": "/p", "epilog": "/e", "taskprolog": "/t"}
    for fine in ("Alloc,DeferBatch", "Contain,DeferBatch,X11"):
        assert wrong(settings.check_slurm_conf({**conf, "prologflags": fine})) == []
    problem = only_problem(settings.check_slurm_conf({**conf, "prologflags": flags}))
    assert message in problem
    # the installer adds flags, and removes none of the site's
    assert ("migbatch install" in problem) == message.startswith("has no ")


def test_select_type_without_gres_is_reported() -> None:
    """`scontrol show config` shows the default, which is select/linear on 22.05."""

    def found(value: str) -> list[str]:
        return [text for text in wrong(settings.check_slurm_conf({"selecttype": value})) if "SelectType" in text]

    assert found("select/cons_tres") == []
    (text,) = found("select/linear")
    assert text.startswith("SelectType: is select/linear: slices need select/cons_tres")


@pytest.mark.parametrize("value", ["lua", "require_timelimit,lua", "job_submit/lua"])
def test_job_submit_plugins_with_lua_are_accepted(value: str) -> None:
    found = settings.check_slurm_conf({"jobsubmitplugins": value})
    assert [finding.level for finding in found if finding.subject == "JobSubmitPlugins"] == [OK]


# --- scripts


@pytest.mark.parametrize(
    ("script", "beside"), [("job_submit.lua", "migbatch_submit.lua"), ("cli_filter.lua", "migbatch_cli_filter.lua")]
)
def test_site_lua_script_must_load_an_up_to_date_module(tmp_path: Path, script: str, beside: str) -> None:
    """Our module is beside it; a truncated module and one rendered for an earlier site are distinguished."""

    def rendering(name: str, module: bool, catalog: SiteCatalog = SITE) -> str:
        assert name == script and module
        return shim.render(name, socket="/s", table="/t", catalog=catalog, policy=SubmitPolicy(), module=module)

    site, ours = tmp_path / script, tmp_path / beside
    site.write_text("return slurm.SUCCESS\n")

    def findings() -> list[Finding]:
        return list(lua.check_script(str(site), rendering, reader("root"), users=False))

    problem = only_problem(findings())
    assert "does not load ours" in problem
    added = problem.rpartition("or add: ")[2]
    assert "migbatch.after(" in added and "--" not in added, "a comment would end the line before the call"
    site.write_text(scripts.call_lua(site.read_text(), str(ours)))
    assert "is missing: every submission fails" in only_problem(findings())
    ours.write_text(rendering(script, True))
    assert [finding.level for finding in findings()] == [OK]
    ours.write_text(rendering(script, True, SiteCatalog()))
    assert [finding.level for finding in findings()] == [WARN]
    ours.write_text(rendering(script, True)[:-20])
    problem = only_problem(findings())  # after each upgrade too: nothing has to be moved away, which fails submissions
    assert "differs from what this release renders" in problem and "mv " not in problem
    ours.write_text(rendering(script, True))
    ours.chmod(0o666)
    assert f"chmod go-w {ours}" in only_problem(findings())


# --- who may read and write


def test_paths_unreadable_for_slurm_user_are_reported(open_tmp_path: Path) -> None:
    folder = open_tmp_path / "state"
    folder.mkdir()
    (folder / "table.lua").write_text("return {}\n")
    submit = dataclasses.replace(Config().submit, table=str(folder / "table.lua"), socket=str(folder / "submit.sock"))
    config = dataclasses.replace(Config(), submit=submit)
    assert wrong(paths.check_paths(config, NOBODY)) == []
    folder.chmod(0o700)
    found = wrong(paths.check_paths(config, NOBODY))
    assert all(f"chmod a+rX {folder}" in finding for finding in found) and len(found) == 2
    assert wrong(paths.check_paths(config, Reader("root", 0, frozenset()))) == []
    assert "has no user" in only_problem(paths.check_paths(config, None))
    os.chown(folder, 0, 65534)
    folder.chmod(0o750)
    assert unreadable(str(folder / "table.lua"), NOBODY) == ""


def test_database_password_that_others_can_read_is_reported(open_tmp_path: Path) -> None:
    file = open_tmp_path / "migbatch.toml"
    file.write_text("")
    submit = dataclasses.replace(Config().submit, table=str(open_tmp_path / "none"), socket=str(open_tmp_path / "s"))
    config = dataclasses.replace(Config(), path=str(file), submit=submit)
    secret = dataclasses.replace(config, store=StoreConfig("mariadb://u:se#cret@db/x"))
    file.chmod(0o644)
    assert wrong(paths.check_paths(config, NOBODY)) == []
    problem = only_problem(paths.check_paths(secret, NOBODY))
    assert f"chmod 600 {file}" in problem and "se#cret" not in problem
    for mode in (0o600, 0o640):
        file.chmod(mode)
        assert wrong(paths.check_paths(secret, NOBODY)) == []


def test_numeric_slurm_user_is_resolved() -> None:
    assert reader("65534") == reader("nobody") and reader("nobody") is not None
    cluster = dataclasses.replace(Config().cluster, slurm_user="65534")
    assert 65534 in slurm_uids(dataclasses.replace(Config(), cluster=cluster))


def test_missing_or_readable_token_file_is_reported(tmp_path: Path) -> None:
    token = tmp_path / "token"
    api = dataclasses.replace(Config().node_api, auth="token", token_file=str(token))
    config = dataclasses.replace(Config(), node_api=api)
    assert "openssl rand -hex 32" in only_problem(paths.check_credentials(config, None))
    token.write_text("a" * 64)
    token.chmod(0o600)
    assert wrong(paths.check_credentials(config, reader(0))) == []
    assert f"chown nobody {token}" in only_problem(paths.check_credentials(config, NOBODY))
    os.chown(token, NOBODY.uid, -1)
    assert wrong(paths.check_credentials(config, NOBODY)) == []
    os.chown(token, 0, -1)
    token.chmod(0o640)
    assert "other users can read the nodes' secret" in only_problem(paths.check_credentials(config, None))


@pytest.mark.parametrize(
    ("section", "key"), [("node_api", "metrics_token_file"), ("report", "page = true\ntoken_file")]
)
def test_token_of_metrics_and_charts_must_be_migbatchds_alone(tmp_path: Path, section: str, key: str) -> None:
    token = tmp_path / "token"
    config = loads(f"[{section}]\n{key} = '{token}'\n")
    assert "No such file" in only_problem(paths.check_tokens(config, NOBODY))
    token.write_text("a" * 64)
    token.chmod(0o600)
    assert f"chown nobody {token}" in only_problem(paths.check_tokens(config, NOBODY))
    os.chown(token, NOBODY.uid, -1)
    assert wrong(paths.check_tokens(config, NOBODY)) == []
    token.chmod(0o644)
    assert f"chmod 600 {token}" in only_problem(paths.check_tokens(config, None))
    assert wrong(paths.check_tokens(Config(), None)) == []


def test_munge_that_is_not_running_is_reported(tmp_path: Path) -> None:
    api = dataclasses.replace(Config().node_api, munge_socket=str(tmp_path / "none"))
    finding = only_problem(paths.check_credentials(dataclasses.replace(Config(), node_api=api), None))
    assert "munge" in finding and "systemctl enable --now munge" in finding


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", str(place), str(place)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_read_only_database_file_is_reported(open_tmp_path: Path) -> None:
    file = open_tmp_path / "record/migbatch.db"
    file.parent.mkdir()
    file.touch()
    assert sqlite_file(f"sqlite:///{file}") == file
    assert wrong(database.check_file(str(file), reader(0))) == []
    problem = only_problem(database.check_file(str(file), NOBODY))
    # not of all in its folder, which has root's record of the installation
    assert "runs as nobody" in problem and f"chown nobody {file.parent} {file}*" in problem
    # migbatchd is down
    (finding,) = database.check_file(str(file), None)
    assert finding.level == UNKNOWN and "systemctl start migbatchd" in finding.advice
    file.parent.chmod(0o777)
    file.chmod(0o666)
    assert wrong(database.check_file(str(file), NOBODY)) == []
    with read_only(file.parent):
        assert "is read-only: Read-only file system" in only_problem(database.check_file(str(file), reader(0)))


@pytest.mark.parametrize("kept", [40_000, 0])
def test_damaged_database_file_is_to_be_restored(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "migbatch.db"
    open_store(f"sqlite:///{file}").close()
    file.write_bytes(file.read_bytes()[:kept] or b"not a database" * 1000)
    problem = only_problem(record.check_record(f"sqlite:///{file}"))
    assert str(file) in problem and "migbatch db restore" in problem


def test_interrupted_restore_is_reported(tmp_path: Path) -> None:
    file, part = tmp_path / "migbatch.db", tmp_path / ".migbatch.db.0a1b2c3d.part"
    open_store(f"sqlite:///{file}").close()
    assert list(database.check_restores(file)) == []
    part.touch()
    (found,) = database.check_restores(file)
    assert found.level == WARN and f"{part} is left of a restore that was interrupted" in found.text
    assert "run migbatch db restore again" in found.advice
    assert found in list(record.check_record(f"sqlite:///{file}"))
    assert found not in list(record.check_record(f"sqlite:///{file}", live=False))


def test_large_log_of_the_database_is_reported(tmp_path: Path) -> None:
    file, log = tmp_path / "migbatch.db", tmp_path / "migbatch.db-wal"
    assert list(database.check_log(str(file))) == []
    log.touch()
    os.truncate(log, LARGE_BYTES)
    assert list(database.check_log(str(file))) == []
    os.truncate(log, LARGE_BYTES + 1)
    (found,) = database.check_log(str(file))
    assert found.level == WARN and f"{log} has 256 MiB" in found.text and f"fuser -v {file}-shm" in found.advice


# --- nodes


def row(state: str = "IDLE", reason: str = "") -> NodeRow:
    return NodeRow("n1", frozenset(state.split("+")), {"1g.10gb": 7}, {}, ("gpu",), reason)


CATALOG = NodeRow("no-mig-slice-free", frozenset({"DOWN"}), {"1g.10gb": 14, "none": 0}, {}, ("gpu",))


def test_agent_silent_for_more_than_a_minute_is_reported() -> None:
    def findings(silent: float) -> list[str]:
        return wrong(nodes.check_nodes([row(), CATALOG], {"n1": []}, {"n1": 1000.0}, 1000.0 + silent, Config()))

    assert findings(59.0) == []
    assert "n1: no message from its agent for 61 s" in one_of(findings(61.0))


@pytest.mark.parametrize("inventory", [{}, {"n1": []}])
def test_nodes_are_given_time_to_report_after_a_start(inventory: dict[str, object]) -> None:
    seen = {"n1": 1000.0} if inventory else {}
    for received, level, words in ((59.0, UNKNOWN, "has not reported yet"), (61.0, FAIL, "")):
        found = list(nodes.check_nodes([row(), CATALOG], inventory, seen, 2000.0, Config(), received_s=received))
        (finding,) = [finding for finding in found if finding.subject == "n1"]
        assert finding.level == level and words in finding.text


@pytest.mark.parametrize(
    "state",
    ["IDLE+POWERED_DOWN", "IDLE+CLOUD+POWERING_DOWN", "MIXED+NOT_RESPONDING+POWERING_UP", "DOWN+DRAIN+NOT_RESPONDING"],
)
def test_node_that_is_down_in_slurm_is_not_expected_to_report(state: str) -> None:
    assert wrong(nodes.check_nodes([row(state), CATALOG], {"n1": []}, {"n1": 1000.0}, 9000.0, Config())) == []


def one_of(found: list[str]) -> str:
    (only,) = found
    return only


def test_catalog_node_lists_profiles_that_slurm_takes_for_the_same() -> None:
    """Slurm counts 4g.20gb and 1g.23gb together and shows one of them, so the installer could add nothing."""
    old = dataclasses.replace(row(), gres={"4g.20gb": 1, "3g.20gb": 1}, partitions=("a100",))

    def findings(*kinds: str) -> list[str]:
        listed = dataclasses.replace(CATALOG, gres=dict.fromkeys(kinds, 1), partitions=("a100",))
        return wrong(nodes.check_nodes([old, listed], {"n1": []}, {"n1": 1000.0}, 1000.0, Config()))

    assert findings("1g.23gb", "3g.20gb") == []
    assert "does not list 4g.20gb" in one_of(findings("1g.24gb", "3g.20gb"))


def test_node_drained_by_a_hook_is_reported_with_the_hook_error() -> None:
    def findings(reason: str) -> list[str]:
        rows, causes = [row("IDLE+DRAIN", reason), CATALOG], {"n1": "prolog exited with 11: no directory"}
        return wrong(nodes.check_nodes(rows, {"n1": []}, {"n1": 1000.0}, 1000.0, Config(), causes))

    assert findings("new memory") == []
    assert "error of the hook: prolog exited with 11" in one_of(findings("Prolog error"))


def report_content(**more: object) -> bytes:
    return json.dumps({"node": "n1", "sent": 1000.0, "findings": [], **more}).encode()


@pytest.mark.parametrize(
    "body",
    [
        report_content(findings={}),
        report_content(findings=[{"level": "ok", "subject": "s", "text": "t", "advice": "a"}]),
        report_content(findings=[{"level": "FAIL", "subject": "s", "text": 1, "advice": "a"}]),
        report_content(findings=[{"level": ["FAIL"], "subject": "s", "text": "t", "advice": "a"}]),
        report_content(findings=[{"level": "FAIL", "subject": "s", "text": "t" * (LONGEST + 1), "advice": "a"}]),
        report_content(findings=[{"level": "FAIL", "subject": "s", "text": "t", "advice": "a"}] * (MOST + 1)),
        report_content(sent="now"),
        report_content(sent=None),
        report_content(node="n2"),
    ],
)
def test_malformed_findings_of_a_node_are_rejected(body: bytes) -> None:
    with pytest.raises(MessageError):
        messages.read_findings("n1", body)


def test_findings_of_nodes_are_shown_without_control_characters() -> None:
    now = [1000.0]
    board = NodeReports(lambda: now[0])
    for node, sent, text in (("n1", 1000.0, "a\x1b[2Jb\n"), ("n2", 1300.0, ""), ("n3", 1000.0, "")):
        rows = [{"level": "FAIL", "subject": "Prolog", "text": text, "advice": "do"}] if text else []
        message = messages.read_findings(node, report_content(node=node, sent=sent, findings=rows))
        assert board.keep(node, message.sent, message.findings) == 1000.0
    now[0] = 1100.0
    board.keep("n4", 1100.0, (Finding(UNKNOWN, "drained", "who knows", "look"),))
    now[0] = 1125.0
    board.keep("n1", 1125.0, messages.read_findings("n1", report_content(findings=[
        {"level": "FAIL", "subject": "Prolog", "text": "a\x1b[2Jb\n", "advice": "do"}])).findings)  # fmt: skip
    node_reports = reports.read_reports(json.dumps({"nodes": board.to_dict()}).encode())
    found = list(reports.check_reports(node_reports, ["n1", "n4", "n9"]))
    problems = wrong(found)
    assert "n1: Prolog: a?[2Jb? (0 s ago) -> do" in problems
    assert [problem.partition(":")[0] for problem in problems if "not reported its checks" in problem] == [
        "n2",
        "n3",
        "n9",
    ]
    assert any(finding.level == UNKNOWN and finding.subject == "n4: drained" for finding in found)
    summary = only_problem(reports.summary(node_reports, ["n1", "n4"]))
    assert summary.startswith("n1: its own checks 0 s ago found Prolog"), "it may have been mended since"


def test_checks_of_nodes_are_given_time_after_a_start() -> None:
    now = [1000.0]
    board = NodeReports(lambda: now[0])
    for later, level in ((1119.0, UNKNOWN), (1121.0, FAIL)):
        now[0] = later
        answer = reports.read_reports(json.dumps({"nodes": board.to_dict(), "age": board.age()}).encode())
        assert [(finding.level, finding.subject) for finding in reports.check_reports(answer, ["n1"])] == [
            (level, "n1")
        ]


def test_clock_difference_of_a_node_is_reported() -> None:
    board = NodeReports(lambda: 1000.0)
    board.keep("n1", 1060.0, ())
    node_reports = reports.read_reports(json.dumps({"nodes": board.to_dict()}).encode())
    for found in (reports.check_reports(node_reports, ["n1"]), reports.summary(node_reports, ["n1"])):
        assert "its clock is 60 s ahead of the controller" in only_problem(found)


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"no", b'{"nodes": {"n1": {}}}', b'{"nodes": {"n1": {"findings": [1]}}}']
)
def test_malformed_report_answer_is_rejected(body: bytes) -> None:
    with pytest.raises(ValueError):
        reports.read_reports(body)


# --- the command


def test_roles_of_a_host_are_detected_from_its_files(tmp_path: Path) -> None:
    toml, node, login = (tmp_path / name for name in ("migbatch.toml", "node.conf", "login.conf"))

    def found() -> list[str]:
        return list(roles(str(toml), str(node), str(login)))

    assert found() == ["controller"]  # the packages of that extra are installed here
    login.touch()
    assert found() == ["login"]
    node.touch()
    assert found() == ["node", "login"]
    toml.touch()
    assert found() == ["controller", "node", "login"]


def test_exit_codes_distinguish_findings_and_wrong_usage(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("CliFilterPlugins=lua\n")
    etc = ["--role", "node", "--etc", str(tmp_path)]
    done = CliRunner().invoke(doctor, [*etc, "--json"])
    assert done.exit_code == 1 and json.loads(done.output)["roles"] == ["node"]
    for usage in (["--role", "printer"], ["--role", "node", "--nodes"], ["--nothing"]):
        assert CliRunner().invoke(doctor, usage).exit_code == 2
    assert "could not run" in CliRunner().invoke(doctor, ["--help"]).output


# --- migbatchd


class Health(BaseHTTPRequestHandler):
    """A server that answers in place of migbatchd."""

    answer = b'{"ok": false, "checks": {"slurm": "ok", "writer": "failing"}}'
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(503)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def answering(answer: bytes = Health.answer) -> Iterator[tuple[Config, list[str]]]:
    """A server on the port of migbatchd: the configuration of the host, and the requested paths."""
    handler: type[Health] = type("Answering", (Health,), {"answer": answer, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            api = dataclasses.replace(Config().node_api, listen="127.0.0.1", port=server.server_address[1])
            yield dataclasses.replace(Config(), node_api=api), handler.asked
        finally:
            server.shutdown()
            thread.join()


def test_migbatchd_health_is_requested_once_and_reported(tmp_path: Path) -> None:
    with answering() as (config, asked):
        config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, slurm_bin=str(tmp_path)))
        found = list(controller.examine(config, lambda name, module: ""))
    assert asked == ["/healthz"]
    levels = {finding.subject: finding.level for finding in found}
    assert (levels["migbatchd: slurm"], levels["migbatchd: writer"]) == (OK, FAIL)


@pytest.mark.parametrize(
    ("words", "settings", "problem"),
    [
        ("OverSubscribe=NO DefMemPerNode=UNLIMITED", "CR_CORE_MEMORY", "gpu: a job without --mem gets all memory"),
        ("OverSubscribe=NO DefMemPerCPU=4000", "CR_CORE_MEMORY", ""),
        ("OverSubscribe=NO DefMemPerNode=UNLIMITED", "CR_CORE", ""),
        ("OverSubscribe=NO DefMemPerNode=UNLIMITED SelectTypeParameters=CR_CORE", "CR_CPU_MEMORY", ""),
        ("OverSubscribe=EXCLUSIVE DefMemPerNode=UNLIMITED", "CR_CPU_MEMORY", "gpu: OverSubscribe=EXCLUSIVE gives"),
        ("OverSubscribe=NO Exclusive=NODE DefMemPerCPU=4000", "CR_CPU_MEMORY", "gpu: Exclusive=NODE gives"),
        ("OverSubscribe=NO Exclusive=USER DefMemPerCPU=4000", "CR_CPU_MEMORY", ""),
        ("JobDefaults=(null) DefMemPerNode=UNLIMITED", "CR_CPU_MEMORY", "gpu: a job without --mem gets all memory"),
        ("JobDefaults=DefCpuPerGPU=8,DefMemPerGPU=64000 DefMemPerNode=UNLIMITED", "CR_CPU_MEMORY", ""),
    ],
)
def test_partition_in_which_a_job_takes_whole_nodes_is_reported(words: str, settings: str, problem: str) -> None:
    """The lines are those of `scontrol -o show partition` and `scontrol show config`."""
    shown = f"PartitionName=gpu {words}\nPartitionName=cpu OverSubscribe=EXCLUSIVE\n"
    found = list(
        partitions.check_partitions(
            lending.parse_partitions(shown),
            {"gpu"},
            {"selecttypeparameters": settings, "defmempernode": "UNLIMITED"},
        )
    )
    (finding,) = found
    assert finding.level == (WARN if problem else OK) and problem in finding.text


@pytest.mark.parametrize(
    ("tres", "named"),
    [("cpu=2,gres/mig:2g.20gb=2", ["course"]), ("gres/mig=1", ["course"]), ("cpu=128,node=2", [])],
)
def test_reservation_of_slices_is_reported(tres: str, named: list[str]) -> None:
    """The lines are those of `scontrol --oneliner show reservation`."""
    assert list(partitions.check_reservations("No reservations in the system\n")) == []
    shown = f"ReservationName=course StartTime=2026-11-22T22:32:08 Nodes=n1 Flags= TRES={tres} State=ACTIVE\n"
    found = list(partitions.check_reservations(shown))
    assert [finding.text.partition(" ")[0] for finding in found] == named
    assert all(finding.level == WARN and "reserve whole nodes" in finding.advice for finding in found)


@pytest.mark.parametrize(
    ("weights", "reported"),
    [
        ("", False),
        ("CPU=1.0,Mem=0.25G", False),
        ("CPU=1.0,GRES/gpu=4.0", True),
        ("CPU=1.0,GRES/gpu:h100=4.0", True),
        ("GRES/gpu=4.0,GRES/mig:1g.10gb=0.57,GRES/mig:7g.80gb=4", False),
    ],
)
def test_weights_of_gpus_without_those_of_slices_are_reported(weights: str, reported: bool) -> None:
    """The words are those of `scontrol -o show partition` and `scontrol show config`."""
    shown = {"gpu": {"TRESBillingWeights": weights} if weights else {}, "old": {"TRESBillingWeights": "GRES/gpu=1"}}
    found = list(limits.check_weights(shown, {"gpu"}, {}))
    assert [(finding.level, "of gpu has" in finding.text) for finding in found] == [(WARN, True)] * reported
    assert len(list(limits.check_weights(shown, (), {"priorityweighttres": weights}))) == reported


def test_limits_of_gpus_that_slices_do_not_count_for_are_reported() -> None:
    """The rows are those of sacctmgr of Slurm 24.11."""
    rows = {
        "qos": "normal|||||||||||\ngpumin|||||||||||gres/gpu=1\ngpumax|||||||cpu=64,gres/gpu=1||||\n"
        "both||||gres/gpu=8,gres/mig=4|||||||\nmig|||||||gres/mig:7g.80gb=1||||\nday|||||||||gres/gpu=1440||\n",
        "associations": "root||||||||\nphysics|||gres/gpu=4||gres/gpu=600|||\nphysics|alice|gpu|||||||\n",
    }
    asked = []

    def show(*words: str) -> str:
        asked.append(words)
        return rows[words[0]]

    assert list(limits.check_limits({"accountingstorageenforce": "associations"}, show)) == [] == asked
    conf = {"accountingstorageenforce": "associations,limits,qos", "clustername": "hpc"}
    least, others = limits.check_limits(conf, show)
    assert least.level == others.level == WARN
    assert "of QOS gpumin demands" in least.text and "QOSMinGRES" in least.text
    assert others.text.endswith(
        "slices: QOS gpumax (MaxTRESPU), QOS day (MaxTRESRunMinsPU), physics (GrpTRES, GrpTRESRunMins)"
    )
    assert "clusters=hpc" in asked[1]
    assert "WOPLimits" in asked[1], "the limits of an account would be shown for each of its users"


def test_limits_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "sacctmgr").write_text(
        "#!/bin/sh\necho sacctmgr: error: Sending PersistInit msg: Connection refused >&2\nexit 1\n"
    )
    (tmp_path / "sacctmgr").chmod(0o755)
    config = Config(cluster=ClusterConfig(slurm_bin=str(tmp_path)))
    show = partial(controller._sacctmgr, config)
    (found,) = limits.check_limits({"accountingstorageenforce": "limits"}, show)
    assert (found.level, found.text) == (UNKNOWN, "sacctmgr: Sending PersistInit msg: Connection refused")


def test_only_some_of_many_limits_are_named() -> None:
    rows = {"qos": "".join(f"q{number}|gres/gpu=1||||||||||\n" for number in range(9)), "associations": ""}
    (found,) = limits.check_limits({"accountingstorageenforce": "safe"}, lambda *words: rows[words[0]])
    assert found.text.endswith("q4 (GrpTRES) and 4 more")


def test_minimum_of_gpus_beside_one_of_slices_is_reported() -> None:
    """Slurm demands both of a job."""
    rows = {"qos": f"both{'|' * 11}gres/gpu=1,gres/mig=1\nmig{'|' * 11}gres/mig=1\n", "associations": ""}
    (found,) = limits.check_limits({"accountingstorageenforce": "safe"}, lambda *words: rows[words[0]])
    assert "MinTRES of QOS both demands" in found.text


def test_slurmctld_that_stops_answering_during_the_checks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "scontrol").chmod(0o755)
    methods = {"version": lambda _: (24, 11), "nodes": lambda _: [row(), CATALOG], "jobs": lambda _: []}
    monkeypatch.setattr(QuerySite, "slurm", lambda _: type("Slurm", (), methods)())
    monkeypatch.setattr(controller, "_SCONTROL_S", 0.2)
    with answering() as (config, _):
        config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, slurm_bin=str(tmp_path)))
        found = list(controller.examine(config, lambda name, module: ""))
    assert any(finding.subject == "Slurm" and "timed out after 0.2 seconds" in finding.text for finding in found)
    assert "migbatchd: slurm" in {finding.subject for finding in found}


def test_release_that_was_not_tested_is_named_if_its_nodes_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> list[NodeRow]:
        raise SlurmError("a row for node 'n1' without GresUsed=")

    methods = {"version": lambda _: (27, 5), "nodes": refuse, "jobs": lambda _: []}
    monkeypatch.setattr(QuerySite, "slurm", lambda _: type("Slurm", (), methods)())
    monkeypatch.setattr(controller, "_scontrol", lambda *_: "slurm 27.05.0\n")
    with answering() as (config, _):
        found = {finding.subject: finding for finding in controller.examine(config, lambda name, module: "")}
    assert found["Slurm release"].level == WARN and "27.05.0 is later than" in found["Slurm release"].text
    assert found["Slurm"].level == FAIL and "GresUsed" in found["Slurm"].text


@pytest.mark.parametrize(
    ("jobs", "problem"),
    [
        ([], ""),
        ([JobRow(7, gres="gres/mig:1g.10gb:1", comment="[mig:1g.10gb:1]"), JobRow(8)], ""),
        ([JobRow(7, state=UNREAD, reason="its state 'QUEUED' is unknown"), JobRow(8)], "1 of 2 jobs.*job 7: its state"),
        ([JobRow(7, gres="gres/mig/1g.10gb", comment="[mig:1g.10gb:1]")], "job 7 is 'gres/mig/1g.10gb'"),
        ([JobRow(7, comment="x [mig:1g.10gb:1]")], "job 7 is ''"),
    ],
)
def test_jobs_of_a_later_release_that_cannot_be_read_are_reported(jobs: list[JobRow], problem: str) -> None:
    found = wrong(nodes.check_queue(jobs))
    assert re.search(f"Slurm's queue: .*{problem}", one_of(found)) if problem else found == []


@pytest.mark.parametrize("everywhere", [False, True])
def test_nodes_are_unknown_when_the_record_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    """The record and migbatchd's socket belong to root, and doctor runs as another user."""
    methods = {"version": lambda _: (24, 11), "nodes": lambda _: [row(), CATALOG], "jobs": lambda _: []}
    monkeypatch.setattr(QuerySite, "slurm", lambda _: type("Slurm", (), methods)())
    monkeypatch.setattr(controller, "_scontrol", lambda *_: "")
    with answering() as (config, _):
        daemon = dataclasses.replace(config.daemon, run_dir=str(tmp_path))
        config = dataclasses.replace(config, store=StoreConfig(f"sqlite:///{tmp_path}/none.db"), daemon=daemon)
        found = list(controller.examine(config, lambda name, module: "", everywhere=everywhere))
    by_subject = {finding.subject: finding for finding in found}
    assert by_subject["database"].level == FAIL and "as root" in by_subject["database"].advice
    assert by_subject["nodes"].level == UNKNOWN and "n1" not in by_subject


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"checks": 1}', b'{"checks": {}, "marks": []}', b"\xff", b"[" * 60_000]
)
def test_another_program_on_the_migbatchd_port_is_reported(answer: bytes) -> None:
    with answering(answer) as (config, _):
        found = wrong(service.check_service(config, health.ask_local(config)))
        url = health.url_of(config.node_api.listen, config.node_api.port)
        assert link._read_facts(url).other_program or b'"checks": {}' in answer, "nodes check it too"
    assert any("is not migbatchd -> another program uses the [node_api] port" in finding for finding in found)


def test_migbatchd_that_does_not_listen_is_reported() -> None:
    with answering() as (config, _):
        pass
    found = wrong(service.check_service(config, health.ask_local(config)))
    assert any("node API: " in finding and "Connection refused -> start migbatchd" in finding for finding in found)


def test_proxy_variables_are_ignored_for_migbatchd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with answering() as (config, _):
        assert health.ask_local(config).checks == {"slurm": "ok", "writer": "failing"}


# --- two controllers

PROGRAMS = ("slurmctldprimaryonprog", "slurmctldprimaryoffprog")
ACTIVE = health.DaemonState(marks={"supply": "1", "lending": "2", "release": "3"})
STANDBY = dataclasses.replace(ACTIVE, standby="slurmctld's primary is ctl")


def pair(tmp_path: Path, daemon_state: health.DaemonState, **conf: str) -> list[str]:
    """The findings to correct on the first of two controllers, whose migbatchd is active."""
    (tmp_path / "heartbeat").touch()
    programs = {key: str(tmp_path / name) for key, name in zip(PROGRAMS, scripts.PRIMARY, strict=True)}
    for path in programs.values():
        Path(path).touch()
    config = dataclasses.replace(Config(), store=StoreConfig("mariadb://db1/migbatch"))
    shown = {"statesavelocation": str(tmp_path), **programs, **conf}
    return wrong(controllers.check_controllers(config, shown, ACTIVE, {"ctl2": daemon_state}))


@pytest.mark.parametrize(
    ("daemon_state", "message"),
    [
        (STANDBY, ""),
        (health.DaemonState(silent="Connection refused"), "does not answer, so it would not take over"),
        (ACTIVE, "both are active"),
        (dataclasses.replace(STANDBY, marks={**ACTIVE.marks, "supply": "x"}), "differ in [supply]"),
        (dataclasses.replace(STANDBY, marks={**ACTIVE.marks, "release": "x"}), "different releases"),
        (dataclasses.replace(STANDBY, marks=dict.fromkeys(ACTIVE.marks, "x")), "another database"),
    ],
)
def test_controller_pair_that_cannot_take_over_is_reported(
    tmp_path: Path, daemon_state: health.DaemonState, message: str
) -> None:
    found = pair(tmp_path, daemon_state)
    assert len(found) == bool(message) and all(message in finding for finding in found)


def test_missing_state_or_primary_programs_are_reported(tmp_path: Path) -> None:
    (found,) = pair(tmp_path, STANDBY, statesavelocation=str(tmp_path / "elsewhere"))
    assert "has no sign of slurmctld's primary" in found
    (found,) = pair(tmp_path, STANDBY, slurmctldprimaryonprog=f"{tmp_path}/gone/{next(iter(scripts.PRIMARY))}")
    assert "SlurmctldPrimaryOnProg" in found and "is not on this host" in found


def test_heartbeat_file_being_replaced_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setattr(time, "sleep", lambda seconds: seconds and (state / "heartbeat").touch())
    assert pair(tmp_path, STANDBY, statesavelocation=str(state)) == []


def test_marks_differ_only_in_the_changed_section() -> None:
    mine = marks(Config(), "database")
    other = dataclasses.replace(Config(), node_api=dataclasses.replace(Config().node_api, listen="10.0.0.1"))
    assert marks(other, "database") == mine, "addresses differ from host to host"
    retry = dataclasses.replace(Config(), recurring=dataclasses.replace(Config().recurring, retry=False))
    assert {name for name, mark in marks(retry, "database").items() if mine[name] != mark} == {"recurring"}
    assert not set(marks(Config(), "another").values()) & set(mine.values())


def test_lua_posix_of_the_current_directory_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert check_posix([], "job_submit_lua.so", "").subject == "lua-posix"
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    ("library", "release"),
    [("liblua5.1.so.0", "5.1"), ("liblua-5.3.so", "5.3"), ("liblua.so.5.4", "5.4"), ("liblua.so", "")],
)
@pytest.mark.parametrize("of", ["program", "folder"])
def test_lua_posix_is_looked_for_in_the_lua_of_slurm(
    library: str, release: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may have several, and slurmctld's the one without the module."""
    plugins, programs, modules = (tmp_path / name for name in ("plugins", "programs", "modules"))
    plugins.mkdir()
    programs.mkdir()
    (plugins / "job_submit_lua.so").write_bytes(b"\x7fELF\0" + library.encode() + b"\0liblua.so\0")
    monkeypatch.setenv("PATH", f"{programs}")
    monkeypatch.setattr(luaposix, "_FOLDERS", (str(modules),))
    for found in ("5.1", "5.3", "5.4"):
        if of == "program":
            place = programs / f"lua{found}"
            place.write_text("#!/bin/sh\nexit 0\n")
            place.chmod(0o755)
        else:
            place = modules / found / "posix" / "init.lua"
            place.parent.mkdir(parents=True)
            place.touch()
        finding = check_posix(["/none", str(plugins)], "job_submit_lua.so", "jobs are refused")
        assert finding.level == (OK if release in ("", found) else WARN), finding
        if finding.level == WARN:
            assert f"Lua {release}, which Slurm's job_submit_lua.so loads," in finding.text
            assert finding.advice == f"install lua-posix for Lua {release}; until then jobs are refused"
        place.unlink()
