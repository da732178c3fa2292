"""Disks where the process is killed, or the power fails, at a chosen effect."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_migbatch.elastic.disk import Disk

#: an operation, the name or inode that it changed, and its further arguments
Effect = tuple[Any, ...]


class Deadly(Disk):
    """A disk that kills the process right before its k-th effect (a write: after half of it); counts effects."""

    def __init__(self, kill_at: int = 0) -> None:
        self.kill_at, self.count = kill_at, 0

    def _effect(self, half: Callable[[], object] | None = None) -> None:
        self.count += 1
        if self.count == self.kill_at:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        self._effect()
        return super().create(path)

    def write(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        self._effect(lambda: super(Deadly, self).write(handle, bytes(data)[: len(data) // 2], offset))
        return super().write(handle, data, offset)

    def sync(self, handle: int) -> None:
        self._effect()
        super().sync(handle)

    def rename(self, old: Path, new: Path) -> None:
        self._effect()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._effect()
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._effect()
        super().sync_directory(path)


class Recorded(Disk):
    """A disk that records every effect, for `after_power_cut` to compute its possible content after a power failure."""

    def __init__(self, *, syncs: bool = True) -> None:
        self.effects: list[Effect] = []
        self.syncs = syncs
        self._inodes = 0
        self._open: dict[int, int] = {}

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self._inodes += 1
        self._open[handle] = self._inodes
        self.effects.append(("create", path.name, self._inodes))
        return handle

    def write(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        count = super().write(handle, data, offset)
        self.effects.append(("write", self._open[handle], offset, bytes(data)[:count]))
        return count

    def sync(self, handle: int) -> None:
        super().sync(handle)
        if self.syncs:
            self.effects.append(("sync", self._open[handle]))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.effects.append(("rename", old.name, new.name))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.effects.append(("unlink", path.name))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        if self.syncs:
            self.effects.append(("sync directory",))


def after_power_cut(
    effects: Sequence[Effect], survives: Callable[[int], bool], names_kept: Callable[[int], int]
) -> dict[str, bytes]:
    """Return the files by name after a power failure that follows `effects`.

    Synced effects are kept. Of later writes to a file, those are kept for which `survives(number)` holds, in any
    combination; of n later changes of names, the first `names_kept(n)`.
    """
    synced: dict[int, int] = {}
    names_synced = 0
    for number, effect in enumerate(effects):
        if effect[0] == "sync":
            synced[effect[1]] = number
        elif effect[0] == "sync directory":
            names_synced = number
    content: dict[int, bytearray] = {}
    for number, effect in enumerate(effects):
        if effect[0] == "create":
            content.setdefault(effect[2], bytearray())
        if effect[0] == "write" and (number < synced.get(effect[1], -1) or survives(number)):
            _, inode, offset, data = effect
            buffer = content[inode]
            buffer.extend(bytes(max(0, offset + len(data) - len(buffer))))
            buffer[offset : offset + len(data)] = data
    changes = [(number, effect) for number, effect in enumerate(effects) if effect[0] in ("create", "rename", "unlink")]
    certain = [effect for number, effect in changes if number < names_synced]
    doubtful = [effect for number, effect in changes if number >= names_synced]
    names: dict[str, int] = {}
    for effect in [*certain, *doubtful[: names_kept(len(doubtful))]]:
        if effect[0] == "create":
            names[effect[1]] = effect[2]
        elif effect[0] == "rename":
            names[effect[2]] = names.pop(effect[1])
        else:
            names.pop(effect[1], None)
    return {name: bytes(content[inode]) for name, inode in names.items()}
