"""Commands exit with the codes that docs/operate.md lists."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from slurm_migbatch.cli import doctor
from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.cli.migacctclick import command as migacct
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, Finding
from tests.support.gpu_kinds import SITE

PAGE = Path(__file__).resolve().parents[2] / "docs/operate.md"
ROW = re.compile(r"^\| (?:`([a-z ]+)`|(all)) \| (\d+) \| (.+) \|$", re.MULTILINE)
DOCUMENTED = {(named or every, int(code)) for named, every, code, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))}


@click.command()
def interrupted() -> None:
    raise KeyboardInterrupt


def _explain(tmp: Path) -> int:
    (tmp / "catalog.json").write_text(json.dumps(SITE.to_dict()))
    return run(cli, "migbatch", ["explain", "--catalog", str(tmp / "catalog.json"), "-p", "gpu", "--gres=mig:1g"])


def _damaged(tmp: Path) -> int:
    (tmp / "backup.db").write_bytes(b"no database" * 99)
    return run(cli, "migbatch", ["db", "check", str(tmp / "backup.db")])


CHECKS: dict[tuple[str, int], Callable[[Path], int]] = {
    ("all", 0): lambda tmp: run(cli, "migbatch", ["model", "describe", "bert-large"]),
    ("all", 1): lambda tmp: run(cli, "migbatch", ["model", "describe", "nothing-of-the-kind"]),
    ("all", 130): lambda tmp: run(interrupted, "migbatch", []),
    ("migbatch", 2): lambda tmp: run(cli, "migbatch", ["exlpain"]),
    ("migacct", 1): lambda tmp: run(migacct, "migacct", ["--no-such-option"]),
    ("migbatch explain", 3): _explain,
    ("migbatch db check", 1): _damaged,
    ("migbatch replay", 2): lambda tmp: run(cli, "migbatch", ["replay", str(tmp / "none.jsonl.gz")]),
}


@pytest.mark.parametrize("row", CHECKS, ids=str)
def test_command_exits_with_the_documented_code(
    row: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "migbatch.toml").write_text("")
    monkeypatch.setenv("MIGBATCH_CONFIG", str(tmp_path / "migbatch.toml"))
    assert row in DOCUMENTED
    assert CHECKS[row](tmp_path) == row[1]


@pytest.mark.parametrize(("levels", "code"), [((OK,), 0), ((OK, UNKNOWN), 2), ((FAIL, UNKNOWN), 1)])
def test_doctor_exit_code_follows_from_its_findings(
    levels: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_examine", lambda *_: [Finding(level, "it", "is", "") for level in levels])
    assert run(cli, "migbatch", ["doctor", "--role", "login"]) == code
    assert code == 0 or ("migbatch doctor", code) in DOCUMENTED


@click.command()
def names() -> None:
    print("n\u00e4me \u65e5")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_characters_that_the_locale_lacks_are_replaced(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "latin-1", errors))
    assert run(names, "migbatch", []) == 0
    assert out.getvalue() == b"n\xe4me ?\n"


def test_help_lists_the_general_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    run(cli, "migbatch", ["--help"])
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted" in " ".join(capsys.readouterr().out.split())
