"""Partly broken states of a running cluster: each is caused, reported by doctor and repaired; then all is well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from slurm_migbatch.install.scripts import SEVERAL
from slurm_migbatch.store.db import open_store
from slurm_migbatch.store.models import StoredNode
from slurm_migbatch.testbed.cluster import Cluster
from tests.support.commands import invoke
from tests.support.waiting import eventually

pytestmark = pytest.mark.slurm
USER = "mbalice"


@pytest.fixture(scope="module")
def bed(slurm_root: str) -> Iterator[Cluster]:
    with Cluster(nodes=1, gpus=1, slurm_root=slurm_root, migbatch="all", node_conf={"CheckEvery": "1"}) as running:
        yield running


def doctor(bed: Cluster, *options: str, code: int | None = None) -> dict[str, Any]:
    """The output of doctor on the controller, or with `--role`; its exit code must match its findings."""
    if "--role" not in options:
        options = ("-c", str(bed.product.config), *options)
    done = invoke(bed, "doctor", "--json", *options)
    report: dict[str, Any] = json.loads(done.stdout)
    levels = {finding["level"] for finding in report["findings"]}
    assert done.returncode == (1 if "FAIL" in levels else 2 if "unknown" in levels else 0), done.stderr
    assert all(finding["advice"] for finding in report["findings"] if finding["level"] != "ok")
    assert code is None or done.returncode == code
    return report


def wrong(bed: Cluster, *options: str) -> list[str]:
    """The findings to correct, as `subject: text -> advice`."""
    return [
        "{subject}: {text} -> {advice}".format(**finding)
        for finding in doctor(bed, *options)["findings"]
        if finding["level"] == "FAIL"
    ]


def on_node(bed: Cluster, *options: str, etc: Path | None = None) -> list[str]:
    return wrong(bed, "--role", "node", "--node", "n1", "--etc", str(etc or bed.product.etc), *options)


def named(found: list[str], *words: str) -> bool:
    return any(all(word in finding for word in words) for finding in found)


def in_order(bed: Cluster) -> None:
    """Wait until there is nothing to correct, on the controller and by the node's own checks."""
    found: list[str] = []

    def nothing() -> bool:
        found[:] = wrong(bed, "--nodes")
        return not found

    try:
        eventually(nothing, 60.0)
    except AssertionError:
        raise AssertionError(found) from None


@contextmanager
def edited(path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """A file with its text changed; its mode stays."""
    text = path.read_text()
    new = change(text)
    assert new != text
    path.write_text(new)
    try:
        yield
    finally:
        path.write_text(text)


def test_healthy_cluster_has_nothing_to_correct(bed: Cluster) -> None:
    in_order(bed)
    report = doctor(bed, "--nodes", code=0)
    assert report["roles"] == ["controller"] and report["version"] == 1
    assert on_node(bed) == []
    assert " 0 failed" in bed.product.migbatch("doctor")  # the program


@pytest.mark.parametrize("name", ["job_submit.lua", "cli_filter.lua"])
def test_changed_or_missing_lua_scripts_are_reported(bed: Cluster, name: str) -> None:
    script = bed.product.etc / name
    with edited(script, lambda text: text.replace("local core", "local  core")):
        assert named(
            wrong(bed), f"/{name}: differs from what this release renders", "migbatch install --role controller"
        )
    away = script.rename(script.with_suffix(".away"))
    try:
        assert named(wrong(bed), f"/{name}: is missing", "migbatch install --role controller --apply")
    finally:
        away.rename(script)
    with edited(script, lambda _: "function slurm_job_submit(a, b, c) return slurm.SUCCESS end\n"):
        load = "dofile(" if name == "job_submit.lua" else "pcall(dofile, "
        assert named(wrong(bed), "belongs to the site and does not load ours", load)
    in_order(bed)


def test_changed_or_unsafe_hooks_are_reported(bed: Cluster) -> None:
    hooks = bed.directory / "hooks"
    for mode, words in ((0o644, "is not executable"), (0o775, "users other than root can change")):
        (hooks / "prolog").chmod(mode)
        assert named(on_node(bed), "Prolog: ", words, f"{hooks}/prolog")
        (hooks / "prolog").chmod(0o755)
    with edited(hooks / "epilog", lambda _: "#!/bin/sh\nexit 0\n"):
        assert named(on_node(bed), "Epilog: ", f"{hooks}/epilog differs from the file that migbatch writes")
    epilog = bed.product.etc / "migbatch-epilog"
    with edited(epilog, lambda _: "#!/bin/sh\nexit 0\n"):
        advice = "install --role controller" if bed.root.version() >= SEVERAL["Epilog"] else f"add to {epilog}"
        assert named(on_node(bed), "Epilog: ", f"{epilog} does not run", advice)
        # the node's agent finds it too, and reports it to the controller
        assert eventually(lambda: named(wrong(bed), "n1: its own checks", "s ago found", "Epilog"))
        assert named(wrong(bed, "--nodes"), "n1: Epilog: ", "does not run", "s ago", advice)
    in_order(bed)


def test_wrong_gres_conf_and_catalog_are_reported(bed: Cluster) -> None:
    with edited(bed.product.etc / "migbatch-gres.conf", lambda text: text.replace("AutoDetect=off", "AutoDetect=nvml")):
        for found in (wrong(bed), on_node(bed)):
            assert named(found, "gres.conf: ", "AutoDetect=nvml", "NodeName=n1 AutoDetect=off")
    ours = bed.product.etc / "migbatch.conf"
    for path, old, new, key in (
        (ours, " NodeAddr=127.0.0.1 Port=1 ", " ", "NodeAddr"),
        (ours, " Port=1 CPUs=64 ", " Port=1 ", "CPUs"),
        (ours, " RealMemory=500000", " RealMemory=1", "RealMemory"),
        (bed.slurm_conf, "Features=mig_node_n1", "Features=h100,nvlink,mig_node_n1", "Features=h100,nvlink"),
    ):
        with edited(path, lambda text, old=old, new=new: text.replace(old, new)):
            assert named(wrong(bed), "catalog: no-mig-slice-free[1-2] lacks", f"needs {key}")
    in_order(bed)


def test_wrong_slurm_settings_are_reported(bed: Cluster) -> None:
    def change(text: str) -> str:
        text = text.replace("PrologFlags=Alloc,DeferBatch", "PrologFlags=Serial")
        return text.replace("PrologEpilogTimeout=60", "PrologEpilogTimeout=20")

    with edited(bed.product.etc / "migbatch.conf", change):
        bed.run(["scontrol", "reconfigure"])
        found = eventually(lambda: [finding for finding in wrong(bed) if "Prolog" in finding])
    bed.run(["scontrol", "reconfigure"])
    for words in ("has no Alloc", "has no DeferBatch", "has Serial"):
        assert named(found, "PrologFlags: ", words)
    assert named(found, "PrologEpilogTimeout: slurmd kills hooks after 20 s", "at least 60")
    in_order(bed)


def test_wrong_controller_address_or_credentials_are_reported(bed: Cluster, open_tmp_path: Path) -> None:
    """With a separate node.conf, beside the agent's own."""
    etc = open_tmp_path / "etc"
    shutil.copytree(bed.product.etc, etc)
    conf = etc / "node.conf"
    port = bed.ports["migbatchd"]
    for change, words in (
        ((f":{port}", ":1"), ("controller: no answer from http://127.0.0.1:1", "Controller= of")),
        ((f":{port}", f":{bed.ports['query']}"), ("controller: the server at", "is not migbatchd", "6830")),
        ((f"Controller=http://127.0.0.1:{port}", "Controller="), ("controller: node.conf has no Controller=",)),
        (("PeerUids=0,", "PeerUids="), ("credentials: ", "uid 0 is not authorized", "set PeerUids=0,")),
        (("MungeSocket=", "MungeSocket=/gone"), ("credentials: munge", "systemctl status munge")),
        (("Auth=munge", "Auth=token"), ("credentials: ", "migbatch node key n1")),
    ):
        with edited(conf, lambda text, change=change: text.replace(*change)):
            assert named(on_node(bed, etc=etc), *words), on_node(bed, etc=etc)
    token = f"TokenFile={bed.product.etc}/token", f"TokenFile={etc}/token"
    with edited(conf, lambda text: text.replace("Auth=munge", "Auth=token").replace(*token)):
        (etc / "token").chmod(0o644)
        assert named(on_node(bed, etc=etc), "credentials: ", "must be readable by its owner only", "chmod 600")
    conf.chmod(0o664)
    assert named(on_node(bed, etc=etc), "node.conf: ", "writable by nobody else")
    assert on_node(bed) == []


def test_login_node_settings_are_checked(bed: Cluster, tmp_path: Path) -> None:
    """With a separate login.conf; exit code 2 if nothing is wrong but not everything could be checked."""
    login = tmp_path / "login.conf"
    login.write_text(f"Servers=http://127.0.0.1:{bed.ports['query']}\nMungeSocket={bed.munge_socket}\nSlurmUser=root\n")
    role = ("--role", "login", "--login-conf", str(login))
    assert doctor(bed, *role, code=0)["roles"] == ["login"]
    assert any(
        finding["level"] == "unknown" for finding in doctor(bed, *role, "--slurm-conf", "/none", code=2)["findings"]
    )
    for old, new, words in (
        (str(bed.ports["query"]), "1", ("query service: no answer from 127.0.0.1 port 1",)),
        (
            str(bed.ports["query"]),
            str(bed.ports["migbatchd"]),
            ("query service: ", "another program answers", "Servers="),
        ),
        ("MungeSocket=", "MungeSocket=/gone", ("munge: ", "systemctl enable --now munge")),
        ("Servers=", "Server=", ("login.conf: ", "Servers=")),
    ):
        with edited(login, lambda text, old=old, new=new: text.replace(old, new)):
            assert named(wrong(bed, *role), *words)


def test_stopped_migbatchd_is_reported_and_nodes_are_unknown(bed: Cluster) -> None:
    """What cannot be checked is reported, and is never `nothing to correct`."""
    bed.stop("migbatchd")
    with open_store(bed.product.record) as store:  # as after some minutes
        store._write(lambda session: session.execute(update(StoredNode).values(seen=StoredNode.seen - 300.0)))
    try:
        findings = doctor(bed, code=1)["findings"]
        assert not any("no message from its agent" in finding["text"] for finding in findings)
        assert any(finding["level"] == "unknown" and finding["subject"] == "nodes" for finding in findings)
        # without its sockets, or stopped by a signal, it runs
        for subject in ("submit socket: ", "node API: "):
            assert named(wrong(bed), subject, "systemctl start migbatchd", "restart it if it runs")
        assert named(on_node(bed), "controller: no answer")
    finally:
        bed.product.start_daemon()
    in_order(bed)


def test_record_that_was_moved_is_to_be_put_back(bed: Cluster) -> None:
    """A restart of migbatchd would begin an empty record."""
    file = Path(bed.product.record.removeprefix("sqlite:///"))
    aside = file.with_name("aside.db")
    file.rename(aside)
    try:
        assert named(wrong(bed), f"no database at {file}", "put the file back", "restart of migbatchd would begin")
    finally:
        aside.rename(file)
    assert not named(wrong(bed), "no database")


def test_stopped_agent_and_node_drained_by_a_hook_are_reported(bed: Cluster) -> None:
    """slurmd drains with `Epilog error`; the node reports why. The last test here: the node stays drained."""
    run = bed.node_directory("n1") / "run"
    bed.stop("agent-n1")
    assert named(on_node(bed), "agent: is not running", "systemctl enable --now migbatch-node")
    run.chmod(0o775)
    try:
        job = bed.submit(wrap="true", user=USER)  # its Epilog runs, whatever the job requested
        eventually(lambda: "drain" in bed.run(["sinfo", "-h", "-n", "n1", "-p", "gpu", "-o", "%T"]).stdout)
        found = on_node(bed)
        assert named(
            found, "drained: n1 is", "Epilog error", "error of the hook: ", "exited with 11", "mode 775", "State=RESUME"
        )
    finally:
        run.chmod(0o755)
        bed.run(["scancel", str(job)], check=False)
        bed.product.start_agent("n1")
    assert eventually(lambda: named(wrong(bed), "n1: n1 is", "error of the hook: ", "exited with 11"))
    # slurmd reports the failure to slurmctld again for some seconds, which drains the node again
