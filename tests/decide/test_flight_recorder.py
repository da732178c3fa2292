"""What migbatchd records of its decisions, and that a replay of the recording makes the same decisions."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import math
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.daemon.flightrecorder import read_entries, segments
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.decide.recording.codec import CodecError
from slurm_migbatch.decide.recording.memory import REMEMBERED
from slurm_migbatch.decide.recording.replay import replay
from slurm_migbatch.decide.recording.segments import FORMAT
from slurm_migbatch.mig.profile import Profile
from tests.support.loan_world import LoanWorld
from tests.support.recorded_day import play_day, record


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a recorded day, in several segments."""
    path = tmp_path_factory.mktemp("day")
    w = LoanWorld(f"sqlite:///{path}/r.db", nodes=2)
    recorder = record(w, path / "decisions", hours=8 * 70 / 3600)
    play_day(w, recorder)
    recorder.close()
    w.close()
    return path / "decisions"


def entries(day: Path) -> list[dict[str, Any]]:
    return [entry for path in segments(day) for entry in read_entries(path)]


#: attributes that are settings or caches, or are recreated by every decision
DERIVED = {
    "SupplyMemory": {"planner", "queue", "nodes", "demands", "offers"},
    "DispatchMemory": {"left", "nothing_fits"},
    "RetypeHistory": {"hold_s"},
    "LendingMemory": {"waiting", "growing", "job_views", "round"},
    "ElasticJobs": {"_predictions", "_restart_s", "_checkpoint_s", "_speeds", "waiting"},
    "Expectation": {"_days", "_day_s"},
    "LevelGaps": {"_part", "_day", "_around", "_days", "_ages", "_relevant"},
    "SliceSharing": {"_enabled"},
    "SharedRuns": {"_rules"},
    "PairSlowdowns": {"_table", "_usual", "_means"},
    "LengthHistory": {"weight"},
}


def rewritten(path: Path, to: Path, cut: int) -> Path:
    """A copy of a segment, as plain gzip, without its last `cut` bytes of text."""
    with gzip.open(path, "rb") as file:
        text = file.read()
    to.write_bytes(gzip.compress(text[: len(text) - cut]))
    return to


def test_replay_of_a_recorded_day_makes_the_same_decisions(day: Path) -> None:
    rounds = list(replay(entries(day)))
    assert len(rounds) == 260
    assert {recorded.segment for recorded in rounds} == {1, 2, 3, 4}
    assert [recorded.differences for recorded in rounds if recorded.differences] == []
    assert not any(recorded.unknown for recorded in rounds)
    kinds = {order[0] for entry in entries(day) for order in entry.get("actions", {}).get("orders", ())}
    assert kinds >= {"release", "signal", "requeue"}


def test_each_segment_can_be_replayed_alone(day: Path) -> None:
    for path in segments(day):
        assert not any(step.differences for step in replay(read_entries(path)))


def test_replay_with_another_setting_shows_changed_orders(day: Path) -> None:
    def patient(settings: Settings) -> Settings:
        assert settings.lending is not None
        rules = settings.lending.rules
        return replace(settings, lending=replace(settings.lending, rules=replace(rules, most_releases=1)))

    differences = [difference for step in replay(entries(day), patient) for difference in step.differences]
    orders = next(difference for difference in differences if difference.what == "orders")
    assert len(orders.recorded) > 1 and len(orders.replayed) == 1
    assert any("job " in why for why in orders.why_recorded)


def test_replay_with_another_preference_shows_changed_offers(day: Path) -> None:
    def small(settings: Settings) -> Settings:
        assert settings.supply is not None
        return replace(settings, supply=replace(settings.supply, preference=(Profile(1, 10),)))

    differences = [difference for step in replay(entries(day), small) for difference in step.differences]
    offers = [difference for difference in differences if difference.what == "offer"]
    assert {offer.subject for offer in offers} <= {"n1", "n2"}
    assert offers[0].recorded["offers"] != offers[0].replayed["offers"]


def test_truncated_end_of_a_segment_is_ignored(day: Path, tmp_path: Path) -> None:
    whole = segments(day)[0]
    count = len(list(read_entries(whole)))
    assert len(list(read_entries(rewritten(whole, tmp_path / "line.gz", 5)))) == count - 1
    cut = tmp_path / "member.gz"
    cut.write_bytes(whole.read_bytes()[:-200])
    assert 1 < len(list(read_entries(cut))) < count
    assert not any(step.differences for step in replay(read_entries(cut)))


@pytest.mark.parametrize("line", ["[" * 100_000, '{"now": NaN}', '{"now": 1'], ids=["deep", "nan", "cut off"])
def test_error_for_a_line_that_is_not_json_names_the_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "decisions.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(f"{line}\n{{}}\n")
    with pytest.raises(CodecError, match=re.escape(str(path))):
        list(read_entries(path))


def test_segments_can_be_joined(day: Path, tmp_path: Path) -> None:
    joined = tmp_path / "all.jsonl.gz"
    joined.write_bytes(b"".join(path.read_bytes() for path in segments(day)))
    assert len(list(replay(read_entries(joined)))) == 260


def test_recordings_are_not_readable_by_other_users(day: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in segments(day)} == {0o640}
    assert day.stat().st_mode & 0o007 == 0


def test_old_segments_are_removed(tmp_path: Path) -> None:
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, tmp_path / "decisions", hours=40 / 3600)
    play_day(w, recorder, 100)
    now = w.clock.time()
    recorder.close()
    w.close()
    kept = segments(tmp_path / "decisions")
    rounds = list(replay(entry for path in kept for entry in read_entries(path)))
    assert 40 <= len(rounds) <= 40 + 2 * 8
    assert rounds[-1].at == now
    assert not any(recorded.differences for recorded in rounds)


def test_recordings_take_no_more_disk_space_than_allowed(tmp_path: Path) -> None:
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, tmp_path / "decisions", megabytes=0.016)
    play_day(w, recorder, 200)
    now = w.clock.time()
    recorder.close()
    w.close()
    kept = segments(tmp_path / "decisions")
    assert len(kept) > 1
    assert sum(path.stat().st_size for path in kept) <= 16_000
    assert list(replay(read_entries(kept[-1])))[-1].at == now


def test_recording_resumes_once_the_disk_is_writable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now, directory = [0.0], tmp_path / "decisions"
    directory.write_text("in the way")
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, directory, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "slurm_migbatch.daemon.flightrecorder"):
        play_day(w, recorder, 30)
        assert len(w.loaned()) == 6
        directory.unlink()
        now[0] += 600
        play_day(w, recorder, 30)
    recorder.close()
    begun, ended = [entry.getMessage() for entry in caplog.records if entry.name.endswith("flightrecorder")]
    assert begun.startswith("decisions are not recorded: ") and str(directory) in begun
    assert ended.startswith("decisions are not recorded: recovered after 600 s")
    rounds = list(replay(entries(directory)))
    assert rounds[-1].at == w.clock.time() and not any(recorded.differences for recorded in rounds)
    w.close()


@pytest.mark.parametrize("broken", ["decide.recording.segments.SegmentWriter.recorded", "decide.recording.memory.take"])
def test_round_that_cannot_be_recorded_ends_only_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def odd(*_: object) -> None:
        raise ValueError("of a kind that nobody thought of")

    now = [0.0]
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, tmp_path / "decisions", clock=lambda: now[0])
    play_day(w, recorder, 5)
    with monkeypatch.context() as code, caplog.at_level(logging.INFO, "slurm_migbatch.daemon.flightrecorder"):
        code.setattr(f"slurm_migbatch.{broken}", odd)
        recorder._files.full = True
        play_day(w, recorder, 5)
        for _ in range(3):
            now[0] += 600
            play_day(w, recorder, 5)
    assert sum("nobody thought of" in entry.getMessage() for entry in caplog.records) == 1
    now[0] += 600
    play_day(w, recorder, 5)
    recorder.close()
    rounds = list(replay(entries(tmp_path / "decisions")))
    assert rounds[-1].at == w.clock.time() and not any(recorded.differences for recorded in rounds)
    w.close()


def test_failure_to_remove_a_segment_does_not_stop_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    now = [0.0]
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, tmp_path / "decisions", clock=lambda: now[0])
    with monkeypatch.context() as disk:
        disk.setattr("slurm_migbatch.daemon.flightrecorder._write_all", refused)
        disk.setattr(Path, "unlink", refused)
        play_day(w, recorder, 5)
    now[0] += 600
    play_day(w, recorder, 5)
    recorder.close()
    *_, last = segments(tmp_path / "decisions")
    assert list(replay(read_entries(last)))[-1].at == w.clock.time()
    w.close()


def test_segment_that_could_not_be_started_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    now = [0.0]
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, tmp_path / "decisions", clock=lambda: now[0])
    with monkeypatch.context() as disk:
        disk.setattr("slurm_migbatch.daemon.flightrecorder._write_all", full)
        for _ in range(3):
            play_day(w, recorder, 5)
            now[0] += 600
    assert segments(tmp_path / "decisions") == []
    play_day(w, recorder, 5)
    recorder.close()
    assert len(list(replay(entries(tmp_path / "decisions")))) >= 4
    w.close()


def test_recording_stops_when_one_segment_exceeds_the_allowed_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, tmp_path / "decisions", megabytes=0.0001)
    with caplog.at_level(logging.WARNING, "slurm_migbatch.daemon.flightrecorder"):
        play_day(w, recorder, 5)
    recorder.close()
    (message,) = [entry.getMessage() for entry in caplog.records if entry.name.endswith("flightrecorder")]
    assert message.startswith("decisions are no longer recorded: [daemon] record_mb is too small")
    w.close()


def test_rounds_that_exceed_the_queue_are_skipped_and_the_rest_replays(tmp_path: Path) -> None:
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db")
    recorder = record(w, tmp_path / "decisions")
    recorder._queue.maxsize = 1
    for number in range(60):
        if number == 5:
            for _ in range(4):
                w.train(needs=100)
        w.step()
    for _ in range(3):
        recorder.flush()
        w.step()
    recorder.close()
    w.close()
    rounds = list(replay(entry for path in segments(tmp_path / "decisions") for entry in read_entries(path)))
    assert rounds and not any(recorded.differences for recorded in rounds)


def test_every_attribute_of_the_memory_is_recorded_or_listed_as_derived(day: Path) -> None:
    w = LoanWorld(f"sqlite:///{day}/memory.db")
    w.infer("1g.10gb")
    w.step()
    found = [w.control.memory]
    while found:
        remembered = found.pop()
        kept = REMEMBERED[type(remembered)]
        assert vars(remembered).keys() == kept.keys() | DERIVED.get(type(remembered).__name__, set()), type(remembered)
        parts = [getattr(remembered, name) for name in kept]
        parts += [part for value in parts if isinstance(value, dict) for part in value.values()]
        found += [part for part in parts if type(part) in REMEMBERED]
    w.close()


def test_a_recording_is_json_lines(day: Path) -> None:
    with gzip.open(segments(day)[0], "rt", encoding="utf-8") as file:
        first = json.loads(file.readline())
    assert first["format"] == FORMAT
    assert first["memory"] is None


# -- the command -------------------------------------------------------------------------------------------------------


def migbatch(*arguments: object) -> tuple[int, str]:
    """The exit code, and what was written to both streams."""
    with redirect_stdout(StringIO()) as text, redirect_stderr(text):
        code = run(cli, "migbatch", ["replay", *(str(argument) for argument in arguments)])
    return code, text.getvalue()


def test_replay_command_reports_no_differences(day: Path) -> None:
    assert migbatch(day) == (0, "260 rounds, 0 differ\n")


def test_replay_command_shows_differences_under_another_configuration(day: Path, tmp_path: Path) -> None:
    config = tmp_path / "migbatch.toml"
    config.write_text('[supply]\npreference = ["1g.10gb"]\n[lending]\nenabled = false\n')
    code, output = migbatch(day, "-c", config, "--limit", 2)
    assert code == 1
    assert output.count(", round ") == 2
    assert "replayed: nothing" in output
    assert "rounds, " in output.splitlines()[-1]
    code, output = migbatch(day, "-c", config, "--json")
    lines = [json.loads(line) for line in output.splitlines()]
    assert code == 1
    assert lines[-1]["rounds"] == 260
    assert {line["what"] for line in lines[:-1]} >= {"orders", "offer"}


def test_replay_command_skips_recordings_of_another_format_in_a_directory(day: Path, tmp_path: Path) -> None:
    """As in run_dir/decisions after an upgrade; a bug report needs the rest."""
    first, *others = segments(day)
    header, *rounds = read_entries(first)
    lines = [{**header, "format": FORMAT - 1}, *rounds]
    foreign = tmp_path / first.name
    foreign.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    code, output = migbatch(tmp_path)
    assert code == 2 and "replay them with that release" in output and len(output.splitlines()) == 1
    for path in others:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    code, output = migbatch(tmp_path)
    assert code == 0 and output.startswith("1 recordings in the format of another release are skipped\n")
    assert migbatch(tmp_path, "--export", tmp_path / "copy.gz")[0] == 0
    assert migbatch(foreign)[0] == 2


@pytest.mark.parametrize(
    "text",
    [b"", b"no gzip", gzip.compress(b"{}\n", mtime=0), gzip.compress(b"[1\n{}\n", mtime=0)],
    ids=["empty", "not gzip", "no header", "not JSON"],
)
def test_replay_command_reports_an_unreadable_recording_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(text)
    code, output = migbatch(path)
    assert code == 2
    assert len(output.splitlines()) == 1
    assert migbatch(tmp_path / "none")[0] == 2


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("asked", [5]),
        ("offers", {"new": [[None, {}]]}),
        ("offers", {"new": [["n1", math.inf]]}),
        ("actions", {"orders": 1}),
    ],
)
def test_replay_command_reports_an_edited_recording_in_one_line(
    day: Path, tmp_path: Path, part: str, value: object
) -> None:
    first, second = list(read_entries(segments(day)[0]))[:2]
    path = tmp_path / "edited.jsonl.gz"
    lines = [json.dumps(entry).replace("Infinity", "1e999") for entry in (first, {**second, part: value})]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    code, output = migbatch(path)
    assert code == 2
    assert re.fullmatch(r"migbatch: error: entry 2 of the recording is damaged or was edited \(.*\)\n", output)
    code, output = migbatch(path, "--export", tmp_path / "copy.jsonl.gz")
    assert code in (0, 2) and len(output.splitlines()) == 1


def test_replay_command_prints_no_control_characters_of_a_recording(day: Path, tmp_path: Path) -> None:
    """Recordings are attached to bug reports: the person who replays one has not written it."""
    config, foreign = tmp_path / "migbatch.toml", tmp_path / "foreign.jsonl.gz"
    config.write_text("[lending]\nenabled = false\n")
    text = b"".join(gzip.decompress(path.read_bytes()) for path in segments(day))
    odd = json.dumps("\x1b[2J\x9b").encode()[1:-1]
    variants = [text.replace(b'"n1"', b'"%s"' % odd), text.replace(b"idle", odd), text.replace(b"NVIDIA H100", odd)]
    variants.append(re.sub(rb'"profiles":\[(\{.*?\}),', rb'"profiles":[\1,\1,', variants[-1]))
    for variant in variants:
        assert variant != text
        foreign.write_bytes(gzip.compress(variant, mtime=0))
        code, output = migbatch(foreign, "-c", config)
        assert code and all(line.isprintable() for line in output.splitlines()), output


def test_exported_copy_contains_no_names_and_can_be_replayed(tmp_path: Path) -> None:
    w = LoanWorld(f"sqlite:///{tmp_path}/r.db", nodes=2, quota={"ml": 5})
    recorder = record(w, tmp_path / "decisions", hours=8 * 70 / 3600)
    written = {"name": "secret-job", "comment": "for project Manhattan", "wckey": "Manhattan", "qos": "secret-qos"}
    w.infer("1g.10gb", runs=100, requested_nodes="n2", gid=90210, **written)
    w.infer("1g.10gb", runs=100, comment="project Manhattan [mig-exclude:n1] [mig:1g.10gb:1#7fq3k]")
    play_day(w, recorder, 150)
    recorder.close()
    w.close()
    copy = tmp_path / "copy.jsonl.gz"
    code, output = migbatch(tmp_path / "decisions", "--export", copy)  # two of the hosts are in the catalog
    assert (code, output) == (0, f"{copy}: 4 hosts and 2 users renamed; review it before you share it\n"), (
        "with the catalog"
    )
    assert migbatch(copy)[0] == 0
    text = gzip.decompress(copy.read_bytes()).decode()
    for name in ('"n1"', '"n2"', "alice", "bob", '"ml"', "web", "secret", "Manhattan", "1001", "90210", "exclude:n1"):
        assert name not in text, name
    assert "[mig-exclude:host00000" in text
    assert "host000001" in text and "signal=usr1" in text
    assert migbatch(tmp_path / "decisions", "--export", copy)[0] == 2
