"""`migbatch replay`: repeat recorded decisions of migbatchd, and show differences."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from slurm_migbatch.cli.ending import EXIT_FAILED, EXIT_USAGE
from slurm_migbatch.config import Config, load
from slurm_migbatch.daemon.flightrecorder import SUFFIX, read_entries, segments
from slurm_migbatch.daemon.settings import blackout_of, settings_of
from slurm_migbatch.decide.core import Settings
from slurm_migbatch.decide.recording.codec import CodecError, canonical
from slurm_migbatch.decide.recording.pseudonyms import CollectedNames, Pseudonyms, without_names
from slurm_migbatch.decide.recording.replay import Difference, ReplayedRound
from slurm_migbatch.decide.recording.replay import replay as decide_again
from slurm_migbatch.decide.recording.segments import FORMAT, begins_segment
from slurm_migbatch.decide.snapshot import ClusterSnapshot
from slurm_migbatch.mig.text import printable
from slurm_migbatch.slurm.times import time_formatter


class Unreadable(click.ClickException):
    """A recording cannot be read. Exit code 2."""

    exit_code = EXIT_USAGE


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-c", "--config", "path", metavar="FILE", help="Decide with this configuration.")
@click.option("--json", "as_json", is_flag=True, help="Differences as lines of JSON, and a line with the counts.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(0), default=20, show_default=True, help="Number of rounds to show."
)
@click.option("--export", metavar="OUT", type=click.Path(path_type=Path), help="Only write an anonymized copy.")
@click.pass_context
def replay(
    ctx: click.Context, files: tuple[Path, ...], path: str | None, as_json: bool, limit: int, export: Path | None
) -> None:
    """Repeat recorded decisions of migbatchd, and show differences.

    FILE is a recording, or a directory of them; migbatchd writes them to run_dir/decisions. In a directory, recordings
    in the format of another release are skipped. Without a configuration the settings of the recording are used. The
    exit code is 0 if all decisions are the same, 1 if some differ, and 2 if a recording cannot be read.

    --export writes a copy with other names of users, accounts, jobs and hosts, and only hints in comments. It can be
    replayed and attached to a bug report.
    """
    paths = _paths(files)
    if export is not None:
        _export(paths, export)
        return
    changes = _changes(load(path)) if path is not None else (lambda settings: settings, lambda snapshot: snapshot)
    counts: Counter[str] = Counter()
    try:
        for done in decide_again(_entries(paths), *changes):
            counts["rounds"] += 1
            counts["unknown_predictions"] += done.unknown
            if done.differences:
                counts["rounds_that_differ"] += 1
                counts.update(difference.what for difference in done.differences)
                if counts["rounds_that_differ"] <= limit:
                    _show(done, as_json)
    except (CodecError, OSError) as error:
        raise Unreadable(str(error)) from error
    if not counts["rounds"]:
        raise Unreadable("this recording has no rounds")
    _summary(counts, as_json)
    ctx.exit(EXIT_FAILED if counts["rounds_that_differ"] else 0)


def _paths(files: tuple[Path, ...]) -> list[Path]:
    found = [path for file in files for path in (segments(file) if file.is_dir() else [file])]
    if not found:
        raise Unreadable(f"no recordings (*{SUFFIX}) in {', '.join(map(str, files))}")
    # after an upgrade a directory has both for some hours
    readable = [path for path in found if path in files or not _is_foreign(path)]
    if not readable:
        raise Unreadable("these recordings are all in the format of another release: replay them with that release")
    if len(readable) < len(found):
        click.echo(f"{len(found) - len(readable)} recordings in the format of another release are skipped", err=True)
    return readable


def _is_foreign(path: Path) -> bool:
    """Return whether a recording begins as those of another release."""
    try:
        entry = next(read_entries(path), None)
    except (CodecError, OSError):
        return False  # reported when it is read
    return entry is not None and begins_segment(entry) and entry["format"] != FORMAT


def _entries(paths: list[Path]) -> Iterator[Any]:
    for path in paths:
        try:
            yield from read_entries(path)
        except OSError as error:
            raise OSError(f"cannot read {path}: {error.strerror or error}") from error


def _changes(
    config: Config,
) -> tuple[Callable[[Settings], Settings], Callable[[ClusterSnapshot], ClusterSnapshot]]:
    """Return what changes the settings and a snapshot to those of another configuration."""
    settings, blackout = settings_of(config), blackout_of(config.lending)
    return lambda _: settings, lambda snapshot: replace(snapshot, blackout=blackout(snapshot.now))


def _export(paths: list[Path], out: Path) -> None:
    names = CollectedNames()
    try:
        for _ in without_names(_entries(paths), names):
            pass
        other = Pseudonyms(names)
        with gzip.open(out, "xt", encoding="utf-8") as file:
            for entry in without_names(_entries(paths), other):
                file.write(json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n")
    except FileExistsError as error:
        raise click.UsageError(f"{out} exists") from error
    except (ValueError, OSError) as error:  # also numbers such as 1e999, which are not written
        raise Unreadable(str(error)) from error
    hosts = len(names.found.get("host", ()))
    click.echo(f"{out}: {hosts} hosts and {len(names.uids)} users renamed; review it before you share it")


def _show(done: ReplayedRound, as_json: bool) -> None:
    if as_json:
        for difference in done.differences:
            row = {"round": done.number, "segment": done.segment, "at": done.at, **asdict(difference)}
            print(json.dumps(row))
        return
    moment = time_formatter(os.environ.get("SLURM_TIME_FORMAT"))
    print(f"{moment(done.at)}, round {done.number}:")
    for difference in done.differences:
        _show_difference(difference)


def _show_difference(difference: Difference) -> None:
    print(printable(f"  {difference.what} {difference.subject}".rstrip()))
    then, now = _without_common(difference.recorded, difference.replayed)
    for word, value, reasons in (
        ("recorded", then, difference.why_recorded),
        ("replayed", now, difference.why_replayed),
    ):
        print(f"    {word}: {'nothing' if value in (None, [], {}) else canonical(value)}")
        for reason in reasons:
            print(printable(f"      {reason}"))


def _without_common(then: Any, now: Any) -> tuple[Any, Any]:
    """Return the differences of two lists or objects; everything if only the order differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return {name: then.get(name) for name in names}, {name: now.get(name) for name in names}
    before, after = then or [], now or []
    if not isinstance(before, list) or not isinstance(after, list):
        return then, now
    only = [item for item in before if item not in after], [item for item in after if item not in before]
    return only if any(only) else (then, now)


def _summary(counts: Counter[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(counts)))
        return
    of_rounds = ("rounds", "rounds_that_differ", "unknown_predictions")
    rounds, differ, unknown = (counts[name] for name in of_rounds)
    kinds = ", ".join(f"{count} x {what}" for what, count in sorted(counts.items()) if what not in of_rounds)
    print(f"{rounds} rounds, {differ} differ{f' ({kinds})' if kinds else ''}")
    if unknown:
        print(f"{unknown} predictions were needed that the recording does not have; they count as unknown")
