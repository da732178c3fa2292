"""Compare files and directories of one host with the wanted ones: diff, write with backups, undo.

Written files are listed in a record next to the backups, with a digest: a file of migbatch's that was edited since is
never overwritten, and a site's file is restored to its earlier content. Standard library only.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from slurm_migbatch.install.undo import added_words, remaining, undo
from slurm_migbatch.slurm.users import uid_of
from slurm_migbatch.values import atomicfile

Kind = Literal["own", "once", "site", "directory"]
_RECORD: Final = "record.json"
_LONG: Final = 150
"""Lines of a new file that a diff shows by default."""
_PASSWORDS: Final = (re.compile(r"(://[^:/@\s]*:)[^@\n]*(?=@)"), re.compile(r"(://[^?\n]*\?).*"))
"""What may be the password of a URL, and its query, which may have one."""
_SHOWN: Final = 8
"""Words of migbatch's in a file of the site that a message names."""


class InstallConflict(RuntimeError):
    """A file cannot be written or removed without losing other changes; the text says what to do."""


@dataclass(frozen=True)
class Wanted:
    """A wanted file or directory.

    Attributes:
        text: empty for a directory.
        kind: "own" belongs to migbatch alone, "once" is written if missing and then belongs to the site, "site" is the
            site's and edited, "directory" is created.
        mode, owner: of new files; a site's file keeps its own.
    """

    path: str
    text: str = ""
    kind: Kind = "own"
    mode: int = 0o644
    owner: str = "root"


@dataclass(frozen=True)
class Entry:
    """Record of one path: the text as written by migbatch, and the name of the backup of the previous content.

    A site's file without a digest must be restored by hand.
    """

    path: str
    kind: Kind
    digest: str = ""
    written: str = ""
    backup: str = ""


@dataclass(frozen=True)
class FileChange:
    """A difference between the current and the wanted state; `before` or `after` None: no such file.

    `conflict` says why it cannot be applied, and what to do; `back`: it removes something written earlier.
    """

    path: str
    before: str | None
    after: str | None
    kind: Kind
    mode: int = 0o644
    owner: str = "root"
    conflict: str = ""
    back: bool = False


def read(path: str) -> str | None:
    """Return the text of a file, keeping bytes that are not UTF-8; None if there is none."""
    try:
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_own(path: Path, handle: int) -> None:
    status = os.fstat(handle)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise InstallConflict(f"{path} must be owned by root and writable by root only: restore it from a backup")


def digest(text: str) -> str:
    """Return a digest of a file's bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class InstallRecord:
    """Record of the files written to this host, in a directory owned by root.

    The parent directory may belong to SlurmUser, who could replace this one. So only files that root owns are read, and
    files are written only if the directory is no link and only root can change it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        text = self._read(_RECORD)
        if text is not None:
            try:
                data = json.loads(text)
                self.entries = {entry["path"]: Entry(**entry) for entry in data["entries"]}
                for entry in [Entry(**replaced) for replaced in data.get("replaced", ())]:
                    if digest(read(entry.path) or "") != self.entries[entry.path].digest:
                        self.entries[entry.path] = entry
            except (ValueError, KeyError, TypeError):
                raise InstallConflict(
                    f"{directory / _RECORD} cannot be read: restore it from a backup, or move it away"
                ) from None

    def keep(self, name: str, text: str) -> str:
        """Store a text next to the record; return the name of its file."""
        file = f"{name.strip('/').replace('/', '%')}.{digest(text)[:12]}"
        if self._read(file) is None:
            self._write(file, text)
        return file

    def kept(self, name: str) -> str:
        """Return a stored text.

        Raises:
            InstallConflict: it is missing.
        """
        text = self._read(name)
        if text is None:
            raise InstallConflict(f"{self.directory / name} is missing: restore this file")
        return text

    def save(self, replaced: Entry | None = None) -> None:
        """Write the record; an empty one is removed, with all backups.

        Args:
            replaced: earlier entry of the file that is written next; it is valid until then.
        """
        if self.entries:
            data = {
                "version": 1,
                "entries": [asdict(entry) for entry in self.entries.values()],
                "replaced": [asdict(replaced)] if replaced else [],
            }
            self._write(_RECORD, json.dumps(data, indent=1) + "\n")
            return
        with self._opened() as folder:
            for name in os.listdir(folder) if folder is not None else ():  # noqa: PTH208 - the opened directory
                os.unlink(name, dir_fd=folder)
        if folder is not None:
            self.directory.rmdir()

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        """Open the directory; yield None if there is none. Raises InstallConflict if non-root can change it."""
        try:
            handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            text = f"{self.directory} must be a directory owned by root: {error.strerror}"
            raise InstallConflict(text) from None
        try:
            _check_own(self.directory, handle)
            yield handle
        finally:
            os.close(handle)

    def _read(self, name: str) -> str | None:
        """Return a text; None if there is none. Raises InstallConflict if others could have written it."""
        with self._opened() as folder:
            if folder is None:
                return None
            try:
                handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise InstallConflict(f"{self.directory / name} cannot be opened: {error.strerror}") from None
            with os.fdopen(handle, "rb") as file:
                _check_own(self.directory / name, handle)
                return file.read().decode("utf-8", "surrogateescape")

    def _write(self, name: str, text: str) -> None:
        self.directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.directory.mkdir(mode=0o700)
        with self._opened() as folder:
            if folder is None:
                raise InstallConflict(f"{self.directory} has just been removed: run this again")
            atomicfile.write(name, _encoded(text), 0o600, folder=folder)


# --- differences


def differing(wanted: Iterable[Wanted], record: InstallRecord) -> list[FileChange]:
    """Return the changes needed for `wanted`, none if all is in place, the site's files last: they name others."""
    changes = [change for target in wanted if (change := _difference(target, record)) is not None]
    return sorted(changes, key=lambda change: change.kind == "site")


def _difference(target: Wanted, record: InstallRecord) -> FileChange | None:
    if target.kind == "directory":
        return _directory(target)
    present = read(target.path)
    if target.kind == "once" and present is not None:
        return None
    if present == target.text and (target.kind == "site" or _is_sound(target)):
        return None
    conflict = ""
    entry = record.entries.get(target.path)
    if target.kind == "own" and present is not None and (entry is None or entry.digest != digest(present)):
        reason = "was edited since migbatch wrote it" if entry else "exists and was not written by `migbatch install`"
        conflict = f"{target.path} {reason}, and is left unchanged: move it away and run this again to get ours"
    return FileChange(target.path, present, target.text, target.kind, target.mode, target.owner, conflict)


def _is_sound(target: Wanted) -> bool:
    """Return whether a file of migbatch's can be run if it is a program, and changed by its owner alone.

    A text beside slurm.conf may be SlurmUser's, and have the mode of the site's own files.
    """
    status = Path(target.path).stat()
    if target.mode & 0o111:
        return (status.st_uid, status.st_mode & 0o7777) == (_uid(target.owner), target.mode)
    return not status.st_mode & 0o022


def _directory(target: Wanted) -> FileChange | None:
    try:
        status = Path(target.path).stat()
    except FileNotFoundError:
        return FileChange(target.path, None, "", "directory", target.mode, target.owner)
    if (status.st_uid, status.st_mode & 0o7777) == (_uid(target.owner), target.mode):
        return None
    return FileChange(target.path, "", "", "directory", target.mode, target.owner)


def leaving(record: InstallRecord) -> list[FileChange]:
    """Return the changes that remove everything that was written, the site's files first: they name the others.

    If one of them must be restored by hand, there are no other changes: slurm.conf may still include migbatch's files.
    """
    entries = sorted(record.entries.values(), key=lambda entry: entry.kind == "site")[::-1]
    changes = [_back(entry, record) for entry in entries if entry.kind != "directory"]
    if blocked := [change for change in changes if change.kind == "site" and change.conflict]:
        return blocked
    folders = sorted((entry for entry in record.entries.values() if entry.kind == "directory"), key=lambda e: e.path)
    return changes + [FileChange(entry.path, "", None, "directory") for entry in reversed(folders)]


def _back(entry: Entry, record: InstallRecord) -> FileChange:
    present = read(entry.path)
    if present is None:
        return FileChange(entry.path, None, None, entry.kind, back=True)
    if entry.kind != "site":
        edited = entry.digest != digest(present)
        text = f"{entry.path} was edited since migbatch wrote it, and is kept: remove it by hand" if edited else ""
        return FileChange(entry.path, present, None, entry.kind, conflict=text, back=True)
    after = _without(entry, present, record)
    if after is None:
        previous = f"; its previous version is {record.directory / entry.backup}" if entry.backup else ""
        words = remaining(*_texts(entry, record), present)
        shown = ", ".join(words[:_SHOWN]) + (", ..." if len(words) > _SHOWN else "")
        text = f"{entry.path} was edited in the lines that migbatch wrote: remove them by hand ({shown}){previous}"
        return FileChange(entry.path, present, present, "site", conflict=text, back=True)
    return FileChange(entry.path, present, after if after or entry.backup else None, "site", back=True)


def _without(entry: Entry, present: str, record: InstallRecord) -> str | None:
    """Return the present content of a site's file without migbatch's edits; None if it must be restored by hand."""
    original, written = _texts(entry, record)
    after = undo(original, written, present) if entry.digest else None
    return present if after is None and not remaining(original, written, present) else after


def _texts(entry: Entry, record: InstallRecord) -> tuple[str, str]:
    """Return the content of a site's file without migbatch's edits and with them, when they were made."""
    return record.kept(entry.backup) if entry.backup else "", record.kept(entry.written)


def diff(changes: Sequence[FileChange], *, full: bool = False) -> Iterator[str]:
    """Yield the lines of a unified diff; only the first ones of long new files, unless `full`."""
    for change in changes:
        if change.conflict:
            continue
        if change.kind == "directory":
            yield f"directory {change.path}: " + (
                "remove if empty" if change.after is None else f"mode {change.mode:04o}, owner {change.owner}"
            )
            continue
        if change.before == change.after:
            yield f"{change.path}: mode {change.mode:04o}, owner {change.owner}"
            continue
        before, after = (_shown(text, secret=change.kind == "once") for text in (change.before, change.after))
        names = (
            ("/dev/null" if change.before is None else change.path),
            ("/dev/null" if change.after is None else change.path),
        )
        lines = [line.rstrip("\n") for line in difflib.unified_diff(before, after, *names)]
        cut = len(lines) if full or (change.before is not None and change.after is not None) else _LONG
        yield from lines[:cut]
        if len(lines) > cut:
            yield f"... and {len(lines) - cut} more lines of {change.path} (--full shows them)"


def _shown(text: str | None, *, secret: bool) -> list[str]:
    """Return the lines of a text as they are shown; of one that may be secret without passwords in URLs."""
    printable = (text or "").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    for password in _PASSWORDS if secret else ():
        printable = password.sub(r"\1***", printable)
    return printable.splitlines(keepends=True)


# --- applying


def apply(changes: Iterable[FileChange], record: InstallRecord) -> None:
    """Apply changes and record each before it is made; those with a conflict are skipped.

    A file that was written once and is kept is the site's: it leaves the record, which prevents a package's removal.
    """
    for change in changes:
        if change.conflict and not (change.kind == "once" and change.back):
            continue
        if change.conflict:
            record.entries.pop(change.path, None)
        elif change.kind == "directory":
            _apply_directory(change, record)
        else:
            _apply_file(change, record)
        record.save()


def _apply_directory(change: FileChange, record: InstallRecord) -> None:
    path = Path(change.path)
    if change.after is None:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        record.entries.pop(change.path, None)
        return
    _make_directories([*reversed(path.parents), path], record)
    path.chmod(change.mode)
    os.chown(path, _uid(change.owner), -1)


def _make_directories(places: Iterable[Path], record: InstallRecord) -> None:
    for path in places:
        if not path.exists():
            path.mkdir()
            path.chmod(0o755)  # whatever the umask: users run TaskProlog
            record.entries[str(path)] = Entry(str(path), "directory")


def _apply_file(change: FileChange, record: InstallRecord) -> None:
    path = Path(change.path)
    if change.after is None:
        path.unlink(missing_ok=True)
        record.entries.pop(change.path, None)
        return
    if change.back:
        if change.after != change.before:
            _write(change)
        record.entries.pop(change.path, None)
        return
    replaced = record.entries.get(change.path)
    if change.kind == "site":
        record.entries[change.path] = _site_entry(change, change.after, record)
    else:
        record.entries[change.path] = Entry(change.path, change.kind, digest(change.after))
    _make_directories(reversed(path.parents), record)
    record.save(replaced)
    _write(change)


def _write(change: FileChange) -> None:
    """Write a file's content; an existing one keeps its mode, owner and attributes unless it is migbatch's.

    Links are followed only to the file that was read, because a link may have been created since.
    """
    assert change.after is not None
    place = Path(change.path).resolve()
    if read(str(place)) != change.before or (change.before is None and os.path.lexists(change.path)):
        raise InstallConflict(f"{change.path} has changed since it was read: run this again")
    if change.kind == "site" and change.before is not None:
        status = place.stat()
        mode, owner, attributes = status.st_mode & 0o7777, (status.st_uid, status.st_gid), _attributes(place)
    else:
        mode, owner, attributes = change.mode, (_uid(change.owner), 0), {}
    atomicfile.write(place, _encoded(change.after), mode, owner, attributes=attributes)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _attributes(place: Path) -> dict[str, bytes]:
    """Return the extended attributes of a file, which include access control lists and the SELinux label."""
    try:
        return {name: os.getxattr(place, name) for name in os.listxattr(place)}
    except OSError:  # the file system has none
        return {}


def _site_entry(change: FileChange, after: str, record: InstallRecord) -> Entry:
    """Return the record of a site's file: its content without migbatch's edits, and with them.

    If the site edited lines that migbatch had written, the original content is kept, without a digest: the file must be
    restored by hand, and the written texts serve to detect that this has been done.
    """
    name = f"{change.path}.written"
    original = change.before
    entry = record.entries.get(change.path)
    if entry is not None and entry.kind == "site" and original is not None:
        before = _without(entry, original, record)
        if before is None:
            words = " ".join(sorted(added_words(original, after)))
            return replace(entry, digest="", written=record.keep(name, f"{record.kept(entry.written)}\n{words}\n"))
        original = None if before == "" and not entry.backup else before
    backup = "" if original is None else record.keep(change.path, original)
    return Entry(change.path, "site", digest(after), record.keep(name, after), backup)


def _uid(owner: str) -> int:
    for uid in uid_of(owner):
        return uid
    raise InstallConflict(f"no user {owner!r} on this host")
