"""Long commands show their progress on stderr if it is a terminal, and print nothing there otherwise."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_migbatch.cli.common import run, show_stage, steps
from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.cli.simulate import progress_bar


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def on(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    work()
    return stream.getvalue()


def bar() -> None:
    with progress_bar("playing") as show:
        for done in range(5):
            if show is not None:
                show(done, 4)


def test_stages_and_progress_bars_are_shown_only_on_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(Screen(), monkeypatch, lambda: show_stage("reading")) == "reading ...\n"
    assert on(io.StringIO(), monkeypatch, lambda: show_stage("reading")) == ""
    shown = on(Screen(), monkeypatch, bar)
    assert "playing" in shown and "100%" in shown
    assert on(io.StringIO(), monkeypatch, bar) == ""


def counted() -> None:
    with steps() as progress:
        progress("reading", 0)
        for number in range(3):
            progress(f"cell {number}", 3)
        progress("writing", 2)


def test_steps_are_shown_as_a_bar_if_their_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on(Screen(), monkeypatch, counted)
    assert shown.startswith("reading ...\n")
    first, second = shown.removeprefix("reading ...\n").split("3/3", 1)
    assert "0/3" in first and "1/3" in first and "cell 1" in first
    assert "0/2" in second and "writing" in second
    assert on(io.StringIO(), monkeypatch, counted) == ""


def test_failed_work_ends_the_line_of_its_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        with pytest.raises(OSError), steps() as progress:
            progress("reading", 2)
            raise OSError

    assert on(Screen(), monkeypatch, fails).endswith("\n")


def test_backup_check_shows_its_stage_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "migbatch.toml").write_text("")
    (tmp_path / "backup.db").write_bytes(b"no database" * 99)
    words = ["db", "check", str(tmp_path / "backup.db"), "-c", str(tmp_path / "migbatch.toml")]
    assert f"checking {tmp_path / 'backup.db'} ..." in on(Screen(), monkeypatch, lambda: run(cli, "migbatch", words))
    assert on(io.StringIO(), monkeypatch, lambda: run(cli, "migbatch", words)) == ""
