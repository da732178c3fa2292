"""Learned models on disk: what was written is read back, and nothing else is accepted."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict import statefile
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.state import Learned, MemoryBounds, StateError, Tried
from slurm_migbatch.predict.statefile import Index, ModelDirectory
from slurm_migbatch.predict.training import learn
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.workload.buckets import Bucket
from tests.support.gpu_kinds import H100

ME = frozenset({os.geteuid()})
CELL = Bucket("resnet50", "infer", 8, 224, "px")


def rows(model: str = "resnet50", factor: float = 1.0) -> list[Measurement]:
    return [
        Measurement(
            "h100-80gb", model, "cnn", "infer", name, compute, memory, sms, batch, 224,
            throughput_per_s=factor * batch / max(4e-3, batch * 4e-4 * 132 / sms), memory_mib=1500.0 + 20 * batch,
        )
        for name, compute, memory, sms in (("1g.10gb", 1, 1, 16), ("3g.40gb", 3, 4, 60), ("7g.80gb", 7, 8, 132))
        for batch in (1, 8, 64)
    ]  # fmt: skip


@cache
def learned_once() -> Learned:
    """Not at import: every process of a run imports every test."""
    return learn([*rows(), *rows("vgg16", 0.2), *rows("not-in-the-books", 2.0)], ModelKnowledge())


@pytest.fixture
def models(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(tmp_path / "models", ME)


def add(models: ModelDirectory, keep: int = 5, **report: object) -> int:
    return models.add(learned_once(), report, {"lesson": 7}, keep, 100.0)


def figures(learned: Learned) -> object:
    return LearnedPredictor(learned).figures(CELL, H100)


def test_empty_directory_gives_the_prior(models: ModelDirectory) -> None:
    assert models.index() == Index()
    assert models.versions() == []
    assert models.current().saved.learned.version == 0
    assert not models.path.exists()


def test_written_model_is_read_back(models: ModelDirectory) -> None:
    assert add(models, runs=12) == 1
    saved = models.load(1)
    assert (saved.learned.version, saved.learned.created, saved.report) == (1, 100.0, {"runs": 12})
    assert figures(saved.learned) == figures(learned_once())
    assert saved.learned.to_dict() == replace(learned_once(), version=1, created=100.0).to_dict()
    assert models.index().current == 1 and models.index().seen == {"lesson": 7}
    assert {oct(path.stat().st_mode)[-3:] for path in models.path.glob("[!.]*")} == {"644"}


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)
floats = st.floats(-50, 50)


@given(
    st.dictionaries(names, st.one_of(names, floats, st.integers(-(2**40), 2**40)), max_size=5),
    st.floats(-30, 30),
    names,
)
def test_every_state_round_trips(
    tmp_path_factory: pytest.TempPathFactory, report: dict, shift: float, model: str
) -> None:
    models = ModelDirectory(tmp_path_factory.mktemp("m") / "models", ME)
    fitted = {}
    for fit in learned_once().fitted.values():
        beliefs = {name: replace(belief, mean=belief.mean + shift * 0.5) for name, belief in fit.beliefs.items()}
        fitted[model, fit.kind, fit.gpu] = replace(fit, model=model, beliefs=beliefs)
    short = {(model, "train", "h100-80gb"): (Tried(8, 224, "1g.10gb"), Tried(64, 224, "3g.40gb"))}
    known = {model: learned_once().known["not-in-the-books"]}
    peaks = {(model, "infer", "h100-80gb"): (MemoryBounds(8, 0, 1900.0, 2000.5), MemoryBounds(64, 224, 9000.0, 9000.0))}
    held = {(model, "train", "h100-80gb"): (Tried(4, 224, "1g.10gb"), Tried(64, 224, ""))}
    learned = replace(learned_once(), fitted=fitted, known=known, short=short, held=held, peaks=peaks)
    models.add(learned, report, {}, 2, 5.0)
    saved = models.current()
    assert saved.troubles == ()
    assert saved.saved.report == report
    assert saved.saved.learned.to_dict() == replace(learned, version=1, created=5.0).to_dict()
    read = saved.saved.learned
    assert (read.short, read.held, read.peaks) == (short, held, peaks)


def test_only_the_last_versions_are_kept(models: ModelDirectory) -> None:
    for _ in range(5):
        add(models, keep=3)
    assert models.versions() == [3, 4, 5]
    assert [attempt["version"] for attempt in models.index().tries] == [1, 2, 3, 4, 5]


def test_the_index_remembers_a_bounded_number_of_tries(models: ModelDirectory) -> None:
    for number in range(2 * statefile.MOST_TRIES):
        models.note({"ts": 0.0, "outcome": "refused", "n": number}, {})
    tries = models.index().tries
    assert len(tries) == statefile.MOST_TRIES and tries[-1]["n"] == 2 * statefile.MOST_TRIES - 1


def test_roll_back_rejects_the_newer_version(models: ModelDirectory) -> None:
    for _ in range(3):
        add(models)
    assert models.roll_back(None, 200.0, {"lesson": 9}) == (3, 2)
    index = models.index()
    assert (index.current, index.rejected, index.seen["lesson"]) == (2, {3: 200.0}, 9)
    # the rejected version does not come back when the current one cannot be read, nor by its number
    (models.path / "model-2.json.gz").write_bytes(b"")
    current = models.current()
    assert current.saved.learned.version == 1 and "model-2" in current.troubles[0]
    assert add(models) == 4
    (models.path / "model-4.json.gz").unlink()
    assert models.current().saved.learned.version == 1


def test_roll_back_to_a_given_version_and_forward_again(models: ModelDirectory) -> None:
    for _ in range(3):
        add(models)
    assert models.roll_back(1, 1.0, {}) == (3, 1)
    assert models.roll_back(None, 2.0, {}) == (1, 0)
    assert models.current().saved.learned.version == 0
    assert models.roll_back(3, 3.0, {}) == (0, 3)
    assert 3 not in models.index().rejected and models.current().saved.learned.version == 3


def test_roll_back_without_an_older_version_is_refused(models: ModelDirectory) -> None:
    with pytest.raises(StateError, match="no learned version"):
        models.roll_back(None, 0.0, {})
    add(models)
    with pytest.raises(StateError, match="already current"):
        models.roll_back(1, 0.0, {})
    with pytest.raises(StateError, match=r"model-9\.json\.gz is missing"):
        models.roll_back(9, 0.0, {})
    assert models.index().current == 1


def test_reader_sees_only_complete_versions_during_writes(models: ModelDirectory) -> None:
    add(models)
    troubles: list[object] = []
    versions: set[int] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            current = models.current()
            troubles.extend(current.troubles)
            versions.add(current.saved.learned.version)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        add(models, keep=20)
    done.set()
    reader.join()
    assert troubles == [] and versions <= set(range(1, 12)) and versions


def test_leftover_files_of_a_killed_writer_are_removed(models: ModelDirectory) -> None:
    add(models)
    (models.path / ".model-2.json.gz.deadbeef").write_bytes(b"half")
    (models.path / "model-2.json.gz").write_bytes(b"written, but not in the index")
    assert add(models) == 3
    assert not (models.path / ".model-2.json.gz.deadbeef").exists()
    assert models.current().saved.learned.version == 3


def trouble(models: ModelDirectory) -> str:
    """The reported problem with the newer of two versions; the older one must be in use."""
    current = models.current()
    assert current.saved.learned.version == 1
    assert figures(current.saved.learned) == figures(learned_once())
    (text,) = current.troubles
    assert str(models.path) in text
    return text


@pytest.fixture
def two(models: ModelDirectory) -> Path:
    add(models)
    add(models)
    return models.path / "model-2.json.gz"


def test_a_symbolic_link_is_not_followed(models: ModelDirectory, two: Path, tmp_path: Path) -> None:
    two.rename(tmp_path / "elsewhere")
    two.symlink_to(tmp_path / "elsewhere")
    assert "regular file" in trouble(models)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_file_writable_by_others_is_not_read(models: ModelDirectory, two: Path, mode: int) -> None:
    two.chmod(mode)
    assert "it is writable by others; chmod go-w" in trouble(models)


def test_file_owned_by_another_user_is_not_read(models: ModelDirectory, two: Path) -> None:
    os.chown(two, 12345, -1)
    assert "belongs to uid 12345" in trouble(models)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_fifo_or_directory_in_place_of_a_file_is_rejected(models: ModelDirectory, two: Path, make: object) -> None:
    two.unlink()
    make(two)
    assert "not a regular file" in trouble(models)


def test_a_file_that_is_too_long_is_not_read(models: ModelDirectory, two: Path) -> None:
    with two.open("r+b") as file:
        file.truncate(statefile.MOST_BYTES + 1)
    assert "more than" in trouble(models)


def test_decompression_bomb_is_rejected(models: ModelDirectory, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statefile, "MOST_UNPACKED", 1 << 20)
    two.write_bytes(gzip.compress(b" " * (1 << 25)))
    assert two.stat().st_size < 1 << 16
    assert "unpacked it is larger" in trouble(models)


def test_truncated_file_is_rejected(models: ModelDirectory, two: Path) -> None:
    two.write_bytes(two.read_bytes()[:-20])
    assert "incomplete" in trouble(models)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        gzip.compress(b""),
        gzip.compress(b"[1, 2]"),
        gzip.compress(b"[" * 100_000),
        gzip.compress(b'{"format": 1, "report": {}, "learned": {}}'),
        gzip.compress(b'{"format": 1, "report": {}, "learned": []}'),
        gzip.compress(b'{"format": 99, "report": {}, "learned": {}}'),
        gzip.compress(b"\xff\xfe{}"),
        gzip.compress(b"{}") + b"more",
    ],
    ids=lambda content: f"{len(content)}-bytes",
)
def test_file_that_is_no_model_is_rejected(models: ModelDirectory, two: Path, content: bytes) -> None:
    two.write_bytes(content)
    trouble(models)


def corrupted(path: Path, change: object) -> None:
    head, *lines = gzip.decompress(path.read_bytes()).splitlines()
    data, fitted = json.loads(head), [json.loads(line) for line in lines]
    change(data["learned"], fitted)
    path.write_bytes(gzip.compress("\n".join(json.dumps(part) for part in (data, *fitted)).encode()))


def _set(place: object, value: object) -> object:
    def change(learned: dict, fitted: list) -> None:
        *path, last = place
        target = {"learned": learned, "fitted": fitted}
        for key in path:
            target = target[key]
        target[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set(["fitted", 0, "beliefs", "time", "mean", 0], float("nan")),
        _set(["fitted", 0, "beliefs", "time", "mean", 0], 1e300),
        _set(["fitted", 0, "beliefs", "time", "mean"], [1.0]),
        _set(["fitted", 0, "beliefs", "time", "covariance", 0, 0], -1.0),
        _set(["fitted", 0, "beliefs", "time", "covariance", 0, 0], 1e30),
        _set(["fitted", 0, "beliefs", "time", "covariance", 0, 1], 1000.0),
        _set(["fitted", 0, "beliefs", "luck"], {}),
        _set(["fitted", 0, "points"], -3),
        _set(["fitted", 0, "points"], "many"),
        _set(["fitted", 0, "inputs"], [0]),
        _set(["fitted", 0, "kind"], "dream"),
        _set(["learned", "populations", "time/infer"], None),
        _set(["learned", "calibrations", "time/infer"], {"0h": [1.0]}),
        _set(["learned", "known"], {"x": {"family": "cnn"}}),
        _set(["learned", "known", "not-in-the-books", "flops"], -1.0),
        _set(["learned", "short"], [["resnet50", "train", "h100-80gb", 8, 224]]),
        _set(["learned", "short"], [["resnet50", "train", "h100-80gb", 8, 224, "large"]]),
        _set(["learned", "short"], [["resnet50", "dream", "h100-80gb", 8, 224, "1g.10gb"]]),
        _set(["learned", "short"], [["resnet50", "train", "h100-80gb", 0, 224, "1g.10gb"]]),
        _set(["learned", "peaks"], [["resnet50", "train", "h100-80gb", 8, 224]]),
        _set(["learned", "peaks"], [["resnet50", "train", "h100-80gb", 0, 224, 2000.0, 2000.0]]),
        _set(["learned", "peaks"], [["resnet50", "train", "h100-80gb", 8, 224, -1.0, 2000.0]]),
        _set(["learned", "peaks"], [["resnet50", "dream", "h100-80gb", 8, 224, 2000.0, 2000.0]]),
        _set(["learned", "version"], 77),
        _set(["learned", "version"], "two"),
    ],
)
def test_model_with_invalid_numbers_is_rejected(models: ModelDirectory, two: Path, change: object) -> None:
    corrupted(two, change)
    trouble(models)


@given(st.data())
def test_changed_bytes_never_break_the_reader(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    models = ModelDirectory(tmp_path_factory.mktemp("m") / "models", ME)
    add(models)
    path = models.path / "model-1.json.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(gzip.compress(bytes(content)))
    learned = models.current().saved.learned
    with np.errstate(all="raise", under="ignore"):
        for figure in LearnedPredictor(learned).figures(CELL, H100).values():
            for interval in (figure.latency_s, figure.throughput_per_s, figure.memory_mib):
                assert 0 < interval.low <= interval.mid <= interval.high < float("inf")


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_directory_writable_by_others_is_not_used(models: ModelDirectory, two: Path, mode: int) -> None:
    models.path.chmod(mode)
    current = models.current()
    assert current.saved.learned.version == 0
    assert "writable by others" in current.troubles[0]
    with pytest.raises(StateError, match="writable by others"):
        add(models)
    with pytest.raises(StateError, match="writable by others"):
        models.index()


def test_directory_owned_by_another_user_is_not_used(models: ModelDirectory, two: Path) -> None:
    os.chown(models.path, 12345, -1)
    assert "belongs to uid 12345" in models.current().troubles[0]


def test_directory_that_is_a_symbolic_link_is_not_used(models: ModelDirectory, two: Path, tmp_path: Path) -> None:
    models.path.rename(tmp_path / "other")
    models.path.symlink_to(tmp_path / "other")
    assert "must be a directory" in models.current().troubles[0]


def test_number_that_overflows_is_rejected(models: ModelDirectory, two: Path) -> None:
    content = gzip.decompress(two.read_bytes())
    changed, count = re.subn(rb'"rows": ?[0-9]+', b'"rows":1e999', content)
    assert count == 1
    two.write_bytes(gzip.compress(changed))
    trouble(models)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"format": 1, "current": 9, "last": 2, "rejected": {}, "seen": {}}',
        '{"format": 1, "current": 1e999, "last": 2, "rejected": {}, "seen": {}, "tries": []}',
    ],
)
def test_broken_index_gives_the_prior_until_the_next_refit(models: ModelDirectory, two: Path, text: str) -> None:
    (models.path / "index.json").write_text(text)
    current = models.current()
    assert current.saved.learned.version == 0 and "index.json" in current.troubles[0]
    assert add(models) == 3
    assert models.current().saved.learned.version == 3


def test_lock_that_is_a_symbolic_link_is_not_followed(models: ModelDirectory, two: Path, tmp_path: Path) -> None:
    (models.path / ".lock").unlink()
    (models.path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        add(models)
    assert not (tmp_path / "victim").exists()


def test_lock_file_is_accessible_to_its_owner_only(models: ModelDirectory, two: Path) -> None:
    assert (models.path / ".lock").stat().st_mode & 0o077 == 0


def test_files_written_by_root_belong_to_slurm_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    models = ModelDirectory(tmp_path / "models", {12345})
    add(models)
    assert {path.stat().st_uid for path in (models.path, *models.path.iterdir())} == {12345}
    assert models.current().saved.learned.version == 1
