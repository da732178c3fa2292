"""Commands that take long say on stderr how far they are, where stderr is a terminal, and nothing where it is none."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_migbatch.cli.common import progress_bar, run, tell_stage
from slurm_migbatch.cli.main import cli


class Screen(io.StringIO):
    """A terminal that keeps what is written on it."""

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


def test_stages_and_bars_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(Screen(), monkeypatch, lambda: tell_stage("reading")) == "reading ...\n"
    assert on(io.StringIO(), monkeypatch, lambda: tell_stage("reading")) == ""
    shown = on(Screen(), monkeypatch, bar)
    assert "playing" in shown and "100%" in shown
    assert on(io.StringIO(), monkeypatch, bar) == ""


def test_a_check_of_a_backup_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "migbatch.toml").write_text("")
    (tmp_path / "backup.db").write_bytes(b"no database" * 99)
    words = ["db", "check", str(tmp_path / "backup.db"), "-c", str(tmp_path / "migbatch.toml")]
    assert f"reading {tmp_path / 'backup.db'} through ..." in on(
        Screen(), monkeypatch, lambda: run(cli, "migbatch", words)
    )
    assert on(io.StringIO(), monkeypatch, lambda: run(cli, "migbatch", words)) == ""
