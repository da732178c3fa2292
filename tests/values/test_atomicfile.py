"""A file is the old or the new one at any instant, with the mode that was asked for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from slurm_migbatch.values import atomicfile


@pytest.mark.parametrize(("umask", "mode", "expected"), [(0o77, 0o644, 0o644), (0o27, None, 0o640), (0, 0o600, 0o600)])
def test_mode_is_the_one_asked_for_or_follows_the_umask(tmp_path: Path, umask: int, mode: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        atomicfile.write(tmp_path / "file", b"text", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected


def test_link_is_replaced_and_its_target_left(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("target")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        atomicfile.write("link", b"new", folder=folder)
    finally:
        os.close(folder)
    assert not (tmp_path / "link").is_symlink()
    assert [(tmp_path / name).read_text() for name in ("link", "target")] == ["new", "target"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_interrupted_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str
) -> None:
    (tmp_path / "file").write_text("old")

    def interrupted(*_: object, **__: object) -> None:
        assert (tmp_path / "file").read_text() == "old"
        raise error

    monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(type(error)):
        atomicfile.write(tmp_path / "file", b"new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
