"""Slurm releases with faults: which are reported, when, and that `migbatch doctor` checks the running one."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.doctor import doctor
from slurm_migbatch.doctor.leaving import check_leaving
from slurm_migbatch.doctor.releases import check_release, untyped_gres
from slurm_migbatch.install.files import read
from slurm_migbatch.install.slurmconf import load
from slurm_migbatch.slurm.client import UNREAD, JobRow, SlurmError
from slurm_migbatch.slurm.versions import NEWEST, Release, parse_release

Site = tuple[dict[str, str], tuple[str, ...]]
PLAIN: Site = ({}, ())
METRICS: Site = ({"metricstype": "metrics/openmetrics"}, ())
BACKUP = {"slurmctldhost[0]": "a", "slurmctldhost[1]": "b"}


@pytest.mark.parametrize(
    ("release", "site", "levels"),
    [
        ((22, 5, 8), PLAIN, ["ok"]),
        ((25, 5, 0), PLAIN, ["FAIL"]),
        ((25, 5, 0), METRICS, ["FAIL"]),
        ((25, 5, 1), PLAIN, ["ok"]),
        ((25, 11, 0), PLAIN, ["ok"]),
        ((25, 11, 0), METRICS, ["warn"]),
        ((25, 11, 4), METRICS, ["warn"]),
        ((25, 11, 0), ({"metricstype": "metrics/none"}, ()), ["ok"]),
        ((25, 11, 5), METRICS, ["ok"]),
        ((26, 5, 5), METRICS, ["ok"]),
        ((NEWEST[0], NEWEST[1] + 1, 0), PLAIN, ["warn"]),
        ((NEWEST[0] + 1, 5, 1), METRICS, ["warn"]),
        ((24, 11, 5), (BACKUP, ("gpu:4",)), ["warn"]),
        ((24, 11, 5), (BACKUP, ()), ["ok"]),
        ((24, 11, 5), ({"slurmctldhost[0]": "a"}, ("gpu:4",)), ["ok"]),
        ((25, 5, 1), (BACKUP, ("gpu:4",)), ["ok"]),
    ],
)
def test_release_with_a_relevant_fault_is_reported(release: Release, site: Site, levels: list[str]) -> None:
    found = list(check_release(release, *site))
    assert [finding.level for finding in found] == levels
    assert all("{}.{:02d}.{}".format(*release) in finding.text and "{" not in finding.text for finding in found)
    assert all(finding.advice for finding in found if finding.level != "ok")
    assert all("gpu:4" in finding.text for finding in found if finding.level == "warn" and site[1])


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("slurm 22.05.8", (22, 5, 8)),
        ("slurm-wlm 24.11.5", (24, 11, 5)),
        ("slurm 25.11.0-0rc1", (25, 11, 0)),
        ("slurm 26.05", (26, 5, 0)),
        ("slurm 26.11-rc1", (26, 11, 0)),
        ("slurm 23.11.4-Ubuntu", (23, 11, 4)),
        ("slurm24.05 24.05.4-git1a2b3c", (24, 5, 4)),
    ],
)
def test_release_is_parsed_into_three_numbers(text: str, release: Release) -> None:
    assert parse_release(text) == release


def test_text_without_a_release_is_an_error() -> None:
    with pytest.raises(SlurmError, match="not a Slurm release"):
        parse_release("scontrol: error: no slurm.conf")


def test_untyped_gres_is_found_in_slurm_conf_and_included_files(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "GresTypes=gpu,mig\n#NodeName=old Gres=gpu:9\n"
        "NodeName=n1 CPUs=4 \\\n  Gres=mig:1g.10gb:7,gpu:h100:1\n"
        "NodeName=n2 gres=gpu:2,shard:8 CPUs=1\ninclude nodes1.conf\n"
    )
    (tmp_path / "nodes1.conf").write_text(
        "NodeName=DEFAULT Gres=tpu:1\nnodename=n3 Gres=gpu:4,gpu:2 # eight\nNodeName=n4\n"
    )
    assert untyped_gres(load(str(tmp_path / "slurm.conf"), read)) == ("gpu:2", "shard:8", "gpu:4", "tpu:1")
    assert untyped_gres(load(str(tmp_path / "none.conf"), read)) == ()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A migbatch.toml whose Slurm commands are scripts that print the files beside it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("squeue", "scontrol"):
        (tools / name).write_text(
            f'#!/bin/sh\ncase "$*" in *" node") cat {tmp_path}/nodes;; *config) cat {tmp_path}/config;; '
            f"*reservation) test ! -e {tmp_path}/reservations || cat {tmp_path}/reservations;; "
            f"*--version*|version) echo slurm 25.05.1;; esac\n"
        )
        (tools / name).chmod(0o755 | stat.S_IXUSR)
    (tmp_path / "nodes").write_text(
        "NodeName=n1 CPUAlloc=0 CPUTot=8 Gres=mig:none:1 GresUsed=mig:none:0 State=IDLE Partitions=gpu\n"
    )
    config = tmp_path / "migbatch.toml"
    config.write_text(f'[cluster]\nslurm_bin = "{tools}"\n[store]\nurl = "sqlite:///{tmp_path}/none.db"\n')
    return config


@pytest.mark.parametrize(
    ("config", "level", "message"),
    [
        ("SLURM_VERSION = 25.05.0\n", "FAIL", "25.05.0: it allocates the same GRES to several jobs"),
        ("SLURM_VERSION = 25.11.2\nMetricsType = metrics/openmetrics\n", "warn", "25.11.2: with MetricsType set"),
        ("SLURM_VERSION = 25.11.2\nMetricsType = metrics/none\n", "ok", "25.11.2"),
        ("GresTypes = mig\n", "ok", "25.05.1"),
        (
            "SLURM_VERSION = 24.11.5\nSlurmctldHost[0] = a\nSlurmctldHost[1] = b\nSLURM_CONF = WHERE/slurm.conf\n",
            "warn",
            "has no type (gpu:4)",
        ),
    ],
)
def test_doctor_checks_the_release_of_slurmctld(site: Path, config: str, level: str, message: str) -> None:
    (site.parent / "slurm.conf").write_text("NodeName=n1 Gres=gpu:4\n")
    (site.parent / "config").write_text(config.replace("WHERE", str(site.parent)))
    done = CliRunner().invoke(doctor, ["-c", str(site), "--json"])
    findings = {finding["subject"]: finding for finding in json.loads(done.output)["findings"]}
    assert findings["Slurm release"]["level"] == level
    assert message in findings["Slurm release"]["text"]


def test_bytes_of_another_encoding_do_not_stop_doctor(site: Path) -> None:
    (site.parent / "config").touch()
    reservation = "ReservationName=course Nodes=n1 State=ACTIVE Flags=SPEC_NODES Comment=für alle\n"
    (site.parent / "reservations").write_bytes(reservation.encode("latin-1"))
    done = CliRunner().invoke(doctor, ["-c", str(site), "--json"], catch_exceptions=False)
    assert "Slurm release" in {finding["subject"] for finding in json.loads(done.output)["findings"]}


def test_running_pending_and_unreadable_mig_jobs_block_leaving() -> None:
    plain = JobRow(1, gres="gres:gpu:2")
    assert [finding.level for finding in check_leaving([plain])] == ["ok"]
    rows = [
        plain,
        JobRow(2, state="RUNNING", gres="gres/mig:1g.10gb:1"),
        JobRow(3, array_job=3, array_task="1-9", gres="gres:gpu:1,gres:mig:2g.20gb:1"),
        JobRow(4, state="COMPLETING", gres="mig"),
        JobRow(5, state=UNREAD),
        JobRow(6, state="SPECIAL_EXIT", gres="gres:mig:1g.10gb:1"),
    ]
    held, waiting, odd = check_leaving(rows)
    assert {finding.level for finding in (held, waiting, odd)} == {"FAIL"}
    assert "2 (running), 4 (completing)" in held.text
    assert "3_[1-9] (pending), 6 (special_exit)" in waiting.text
    assert "5" in odd.text
