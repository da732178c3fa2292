"""Error messages for a misspelt word and for a file that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.report.errors import ReportError
from slurm_migbatch.report.format import find


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exlpain"], "migbatch: error: No such command 'exlpain'; did you mean explain? (try 'migbatch -h')\n"),
        (["profile", "improt"], "No such command 'improt'; did you mean import? (try 'migbatch profile -h')\n"),
        (["frobnicate"], "migbatch: error: No such command 'frobnicate' (try 'migbatch -h')\n"),
    ],
)
def test_unknown_command_error_suggests_the_nearest_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cli, "migbatch", words) == 2
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["usage", "--start"], "No such option '--start'; did you mean --starttime? (try 'migbatch usage -h')\n"),
        (["usage", "--bogus"], "No such option '--bogus' (try 'migbatch usage -h')\n"),
    ],
)
def test_unknown_option_error_suggests_only_a_similar_option(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dashes that all options have do not make them similar."""
    assert run(cli, "migbatch", words) == 2
    assert capsys.readouterr().err.endswith(said)


def test_misspelt_column_error_suggests_the_nearest_column() -> None:
    with pytest.raises(ReportError, match=r'Invalid field requested: "Profle"; did you mean Profile\? -e lists them'):
        find("Profle")
    with pytest.raises(ReportError, match='Invalid field requested: "zz"; -e lists them'):
        find("zz")


def test_html_report_into_a_missing_directory_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "migbatch", ["report", "--html", str(tmp_path / "no" / "use.html")]) == 1
    assert f"no such directory: {tmp_path / 'no'}" in capsys.readouterr().err


def test_empty_migbatch_config_variable_is_ignored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job scripts and service files set a variable to an empty value in order to omit it."""
    monkeypatch.setenv("MIGBATCH_CONFIG", "")
    run(cli, "migbatch", ["model", "list"])
    assert "Is a directory" not in capsys.readouterr().err
