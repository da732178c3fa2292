"""`migbatch top` and `nodes --watch`: keys, pages for a pipe, an unavailable service, and a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurm_migbatch.cli import live
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.keys import decode
from slurm_migbatch.cli.live import QueryResult, frames, query_once
from slurm_migbatch.cli.main import cli
from slurm_migbatch.query.client import NoAnswer
from slurm_migbatch.query.questions import TopQuestion
from slurm_migbatch.query.reply import Reply
from slurm_migbatch.report.pagestate import PageState
from slurm_migbatch.store.db import open_store
from tests.support.daemon_fakes import gpu
from tests.support.pages import page
from tests.support.waiting import PATIENCE_S, eventually

# -- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"u\xc3\xa9\r", ["u", "é", "enter"]),
        (b"\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[H\x1b[4~\x1b[Z", ["up", "down", "pgup", "pgdn", "home", "end", "backtab"]),
        (b"\x1bOP\x1b[11~\x1b[[A", ["f1", "f1", "f1"]),
        (b"\t\x7f\x08 ", ["tab", "backspace", "backspace", " "]),
        (b"\x1b[1;5Cq\x01", ["q"]),
        (b"\x1bq", ["esc", "q"]),
        (b"\xff\xfe\xfd\xfcq", ["q"]),
    ],
)
def test_terminal_bytes_are_decoded_to_keys(data: bytes, keys: list[str]) -> None:
    assert decode(data) == (keys, b"")
    found, rest = [], b""
    for at in range(len(data)):
        some, rest = decode(rest + data[at : at + 1])
        found += some
    assert (found, rest) == (keys, b""), "the same if the bytes arrive one by one"


def test_incomplete_key_sequence_waits_for_more_bytes() -> None:
    for begun in (b"\x1b", b"\x1b[", b"\x1b[1;", b"\x1bO", b"\xc3"):
        assert decode(b"a" + begun) == (["a"], begun)
    assert decode(b"\x1b", ended=True) == (["esc"], b"")
    assert decode(b"\xc3", ended=True) == ([], b"")


# -- pages for a pipe --------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration on a host without Slurm, with a record of two nodes."""
    path, url = tmp_path / "m.toml", f"sqlite:///{tmp_path}/db"
    path.write_text(f"[store]\nurl = '{url}'\n[cluster]\nslurm_bin = '{tmp_path}'\n[daemon]\nrun_dir = '{tmp_path}'\n")
    with open_store(url) as store:
        for node in ("n1", "n2"):
            held = {"gpu": f"GPU-{node}", "profile": "3g.40gb", "start": 0, "size": 4, "mig_uuid": "MIG-1"}
            run = {"job": int(node[1]) + 700, "restart": 0, "uid": 0, "user": "root", "slices": [held]}
            events: list[dict[str, Any]] = [
                {"kind": "inventory", "gpus": [gpu(0, uuid=f"GPU-{node}")]},
                {"kind": "start", **run},
            ]
            store.ingest(node, "j", "b", [{"seq": n, "ts": time.time(), **e} for n, e in enumerate(events, 1)])
    return path


def migbatch(config: Path, *arguments: str, **env: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "-c", str(config)], env={"COLUMNS": "", **env})


def test_batch_prints_one_page_without_escape_codes(config: Path) -> None:
    done = migbatch(config, "top", "-b", "-n", "1")
    assert done.exit_code == 0, done.output
    assert "n1    0 |=3g.40gb 701===================|.......|.......|.......|.......| ?" in done.stdout
    assert "start    n2" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "no answer from Slurm" in done.stderr
    wide = migbatch(config, "top", "-b", "-n", "1", COLUMNS="150").stdout
    assert 100 < max(map(len, wide.splitlines())) <= 150


def test_output_to_a_pipe_is_in_batch_mode(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    done = migbatch(config, "top", "-n", "2", "-d", "1", "-u", "root")
    assert done.exit_code == 0
    assert done.stdout.count("NODE") == 2 + done.stdout.count("EVENT")
    assert "user=root" in done.stdout


def test_nodes_watch_shows_only_the_requested_nodes(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "batch", lambda ask, state, names, count: print(*frames(ask, state, names, 1, print)))
    done = migbatch(config, "nodes", "--watch", "-n", "n2")
    assert "n2    0 |=3g.40gb 702" in done.stdout
    assert "n1" not in done.stdout and "EVENT" not in done.stdout
    refused = migbatch(config, "nodes", "--watch", "--json")
    assert refused.exit_code == 2 and "--watch" in refused.output


@pytest.mark.parametrize("arguments", [("-d", "0"), ("-n", "0"), ("-d", "x"), ("-n", "1", "-d", "nan")])
def test_wrong_options_are_refused(config: Path, arguments: tuple[str, ...]) -> None:
    assert migbatch(config, "top", "-b", *arguments).exit_code == 2


# -- an unavailable service --------------------------------------------------------------------------------------


class Service:
    """Gives its prepared replies, or raises its prepared errors."""

    def __init__(self, *replies: Reply | Exception) -> None:
        self.replies, self.asked = list(replies), []

    def __call__(self, question: Any) -> Reply:
        self.asked.append(question)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


GOOD = Reply((page().write(),))


def test_pages_continue_after_the_service_was_unavailable(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service(GOOD, NoAnswer("nobody answers"), Failure("Slurm is away"), GOOD)
    pages = list(frames(service, PageState(user="alice"), None, 4, lambda _: None))
    assert len(pages) == 2
    assert all(text.startswith("migbatch - hpc") for text in pages)
    assert capsys.readouterr().err == "migbatch: nobody answers\nmigbatch: Slurm is away\n"
    assert service.asked == [TopQuestion(None, "alice", "")] * 4
    with pytest.raises(Failure, match="nobody answers"):
        list(frames(Service(NoAnswer("nobody answers")), PageState(), None, 1, lambda _: None))


def test_expected_error_becomes_a_message_and_a_bug_is_raised() -> None:
    for error in (NoAnswer("away"), OSError(5, "away"), Failure("away"), ValueError("is not a page")):
        if isinstance(error, ValueError):
            assert "not a page" in query_once(Service(Reply(("{}",))), TopQuestion()).trouble
        else:
            assert query_once(Service(error), TopQuestion()).trouble == "away"
    with pytest.raises(ZeroDivisionError):
        query_once(Service(ZeroDivisionError()), TopQuestion())


class PlayedTerminal:
    """Types its keys one by one, each when a page is shown, and keeps what was drawn."""

    def __init__(self, *keys: str) -> None:
        self.keys, self.drawn = list(keys), []

    def size(self) -> tuple[int, int]:
        return 80, 24

    def draw(self, lines: Any, *, colour: bool) -> None:
        self.drawn.append(("\n".join(line.plain for line in lines), colour))

    def wake(self) -> None:
        """Nothing waits here."""

    def wait(self, seconds: float) -> list[str]:
        time.sleep(0.001)  # lets the polling thread run
        return [self.keys.pop(0)] if self.keys and "MEMORY" in self.drawn[-1][0] else []


def test_keys_change_the_page_and_repeat_the_question() -> None:
    terminal = PlayedTerminal("u", "b", "enter", "z", "q")
    service = Service(*[GOOD] * 9)
    live.watch(service, PageState(), None, None, terminal)  # type: ignore[arg-type]
    assert any("User (empty: all): b_" in text for text, _ in terminal.drawn)
    assert terminal.drawn[-1][1] is False
    assert [question.user for question in service.asked] in (["", "b"], [""]), "a query ends later than its key"


def test_page_stays_on_screen_while_the_service_is_unavailable() -> None:
    terminal = PlayedTerminal()
    service = Service(GOOD, NoAnswer("nobody answers"), GOOD)
    live.watch(service, PageState(interval=0.0), None, 2, terminal)  # type: ignore[arg-type]
    troubled = [text for text, _ in terminal.drawn if "stale, retrying: nobody answers" in text]
    assert troubled and all("gpu2  0 |=7g.80gb 4700 alice" in text for text in troubled)
    assert len(service.asked) == 3
    assert QueryResult().page is None


# -- a pseudo-terminal -------------------------------------------------------------------------------------------

_START = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from slurm_migbatch.cli.main import main; main()"
_RAISES = """
from slurm_migbatch.cli.terminal import Terminal
with Terminal() as terminal:
    terminal.wait(0.0)
    raise ZeroDivisionError
"""
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9])")
LEAVE = b"\x1b[?1049l"


class Pty:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str, code: str = _START, columns: int = 80, **env: str) -> None:
        self.master, self.slave = os.openpty()
        self.resize(columns, 24)
        self.before = termios.tcgetattr(self.slave)
        environment = {**os.environ, "TERM": "xterm-256color", **env}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment, start_new_session=True,
        )  # fmt: skip
        self.output = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        """Type keys; the output from now on is the answer."""
        self.output = b""
        os.write(self.master, keys)

    def read(self) -> None:
        while select.select([self.master], [], [], 0.05)[0]:
            self.output += os.read(self.master, 65536)

    def shows(self, words: str) -> None:
        def shown() -> bool:
            self.read()
            return words.encode() in _ESCAPES.sub(b"", self.output)

        try:
            eventually(shown)
        except AssertionError:
            raise AssertionError(f"no {words!r} in {_ESCAPES.sub(b'', self.output).decode(errors='replace')}") from None

    def ends(self) -> int:
        eventually(lambda: self.read() or self.process.poll() is not None)
        self.read()
        return self.process.wait(PATIENCE_S)

    def restored(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def pty_of() -> Iterator[Any]:
    opened: list[Pty] = []

    def start(*arguments: str, **more: Any) -> Pty:
        opened.append(Pty(*arguments, **more))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.mark.slow
def test_top_on_a_terminal_handles_keys_resizing_and_stale_data(config: Path, pty_of: Any) -> None:
    shown = pty_of("top", "-c", str(config), "-d", "1")
    shown.shows("|=3g.40gb 702===================|.......|")
    assert not shown.restored(), "single keys are read"
    assert b"\x1b[?1049h" in shown.output and b";5;" in shown.output, "in colours, on the alternate screen"
    shown.press(b"h")
    shown.shows("Keys of migbatch top")
    shown.press(b"x")
    shown.shows("MEMORY SLICES")
    shown.press(b"z")
    shown.shows("MEMORY SLICES")
    assert b";5;" not in shown.output
    shown.output = b""
    shown.resize(120, 30)
    shown.shows("|..........|..........|")
    database = config.parent / "db"
    database.rename(config.parent / "away")
    shown.shows("stale, retrying")
    (config.parent / "away").rename(database)

    def back() -> bool:
        shown.output = b""
        shown.press(b" ")
        shown.shows("MEMORY SLICES")
        return b"not up to date" not in shown.output

    eventually(back)
    shown.press(b"q")
    assert shown.ends() == 0
    assert shown.restored()
    assert LEAVE in shown.output and b"Traceback" not in shown.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"), [("key", 130), (signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["Ctrl-C", "SIGTERM", "SIGINT"]
)
def test_terminal_is_restored_after_ctrl_c_and_signals(config: Path, pty_of: Any, how: Any, code: int) -> None:
    shown = pty_of("nodes", "--watch", "-c", str(config), NO_COLOR="1")
    shown.shows("MEMORY SLICES")
    assert b";5;" not in shown.output and b"\x1b[3" not in shown.output, "no colours"
    shown.press(b"\x03" if how == "key" else b"")
    if how != "key":
        shown.process.send_signal(how)
    assert shown.ends() == code
    assert shown.restored() and LEAVE in shown.output and b"Traceback" not in shown.output


def test_terminal_is_restored_after_an_error(pty_of: Any) -> None:
    shown = pty_of(code=_RAISES)
    assert shown.ends() == 1
    assert shown.restored()
    assert LEAVE in shown.output and shown.output.index(LEAVE) < shown.output.index(b"ZeroDivisionError")


def test_top_can_be_suspended_and_continued(config: Path, pty_of: Any) -> None:
    shown = pty_of("top", "-c", str(config))
    shown.shows("MEMORY SLICES")
    stat = Path(f"/proc/{shown.process.pid}/stat")
    shown.output = b""
    shown.process.send_signal(signal.SIGTSTP)
    eventually(lambda: shown.read() or stat.read_text().rpartition(")")[2].split()[0] == "T")
    assert shown.restored() and LEAVE in shown.output
    shown.output = b""
    shown.process.send_signal(signal.SIGCONT)
    shown.shows("MEMORY SLICES")
    shown.press(b"q")
    assert shown.ends() == 0 and shown.restored()


def test_dumb_terminal_gets_plain_pages(config: Path, pty_of: Any) -> None:
    shown = pty_of("top", "-n", "1", "-c", str(config), TERM="dumb")
    assert shown.ends() == 0
    assert b"MEMORY SLICES" in shown.output and b"\x1b" not in shown.output
