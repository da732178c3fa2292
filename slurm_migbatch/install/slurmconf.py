"""Read slurm.conf and gres.conf as Slurm does, with the position of each value in its file.

Source: Slurm's parse_config.c. `#` begins a comment unless it is escaped, also within quotes; a backslash at the end of
a line continues it; keys are case-insensitive; several `Key=Value` may share a line; `Include FILE` is read in
its place, relative to the directory of slurm.conf (22.05: of the file with that line), with ClusterName for `%c`. The
last value of a repeated key counts.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INCLUDED: Final = "migbatch.conf"
"""migbatch's own part, which slurm.conf includes."""
RECORDS: Final = ("nodename", "partitionname", "nodeset", "downnodes", "frontendname", "switchname", "blockname")
"""Keys that make a line a separate record, whose other keys are not settings of the cluster."""
FEATURES: Final = ("feature", "features")
"""Two spellings of a key of nodes, the one that Slurm prefers first; a line with one of them inherits neither."""
_TOKEN: Final = re.compile(r'([A-Za-z0-9_.]+)\s*([-*+/]?=)\s*("[^"]*"|\S+)(?=\s|$)')
_INCLUDE: Final = re.compile(r'\s*include\s+("[^"]*"|\S+)\s*$', re.IGNORECASE)
_DEEPEST: Final = 10


@dataclass(frozen=True)
class Token:
    """One `Key=Value`: the key in lower case, the value without quotes, and where it is in the file with them."""

    key: str
    value: str
    start: int
    end: int


@dataclass(frozen=True)
class Line:
    """One line as Slurm reads it, which may be several of the file.

    Attributes:
        number: of its first line, from 1.
        start, end: its position in the file, without the last line's end.
        include: the file that it includes, empty for none.
    """

    path: str
    number: int
    start: int
    end: int
    tokens: tuple[Token, ...] = ()
    include: str = ""

    def get(self, key: str) -> Token | None:
        """Return the last value of `key`, given in lower case; None if the line has none."""
        return next((token for token in reversed(self.tokens) if token.key == key), None)

    @property
    def place(self) -> str:
        """`/etc/slurm/slurm.conf:41`; the path alone for a line of no file."""
        return f"{self.path}:{self.number}" if self.number else self.path

    @property
    def record(self) -> str:
        """The key that makes it a record ("nodename"); empty for a line of settings."""
        return next((token.key for token in self.tokens if token.key in RECORDS), "")


@dataclass(frozen=True)
class Conf:
    """A configuration file with all its includes.

    Attributes:
        main: path of the file itself.
        texts: text of each file, by path.
        lines: all lines in the order in which Slurm reads them.
        missing: included files that do not exist, with the line that includes each.
    """

    main: str
    texts: Mapping[str, str]
    lines: tuple[Line, ...]
    missing: tuple[tuple[str, Line], ...] = ()

    def beside(self, name: str) -> str:
        """Return the path of a file or program that Slurm looks for beside this file; absolute paths stay."""
        return str(Path(self.main).parent / name)

    def setting(self, key: str, without: str = "") -> tuple[Line, Token] | None:
        """Return the effective value of a key of the cluster, with its line; lines of file `without` are ignored."""
        for line in reversed(self.lines):
            token = line.get(key.lower())
            if token is not None and not line.record and line.path != without:
                return line, token
        return None

    def value(self, key: str, without: str = "") -> str:
        """Return the value of a key of the cluster, see `setting`; empty if there is none."""
        effective = self.setting(key, without)
        return effective[1].value if effective else ""

    def values(self, key: str) -> list[str]:
        """Return all values of a key of the cluster, in the order in which Slurm reads them."""
        return [token.value for line in self.lines if not line.record and (token := line.get(key.lower()))]

    @property
    def cluster(self) -> str:
        """The cluster's name, in lower case as Slurm keeps it; empty if there is none."""
        return self.value("ClusterName").lower()

    def records(self, kind: str) -> Iterator[tuple[Line, dict[str, str]]]:
        """Yield each record of `kind` ("nodename") with its values, those of the DEFAULT lines above it included."""
        defaults: dict[str, str] = {}
        for line in self.lines:
            if line.record != kind:
                continue
            values = {token.key: token.value for token in line.tokens}
            if values[kind].upper() == "DEFAULT":
                defaults.update({key: value for key, value in values.items() if key != kind})
            else:
                hidden = FEATURES if any(key in values for key in FEATURES) else ()
                yield line, {**{key: value for key, value in defaults.items() if key not in hidden}, **values}

    def defaults(self, kind: str, path: str) -> dict[str, str]:
        """Return what records of `kind` in an included file (else at the end) inherit from the DEFAULT lines above."""
        defaults: dict[str, str] = {}
        for line in self.lines:
            if line.include and self.beside(line.include) == path:
                break
            values = {token.key: token.value for token in line.tokens} if line.record == kind else {}
            if values.pop(kind, "").upper() == "DEFAULT":
                defaults.update(values)
        return defaults


def parse(path: str, text: str) -> Iterator[Line]:
    """Yield the nonempty lines of one file."""
    position, number = 0, 1
    while position < len(text):
        characters, end, count = _logical(text, position)
        line = _line(path, number, position, end, characters)
        if line is not None:
            yield line
        position, number = end + 1, number + count


def _logical(text: str, start: int) -> tuple[list[tuple[str, int]], int, int]:
    """Return the characters of a logical line with their positions, its end, and its number of lines in the file."""
    characters: list[tuple[str, int]] = []
    count = 0
    while True:
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        count += 1
        content = text[start : _comment(text, start, end)]
        body = content.rstrip()
        slashes = len(body) - len(body.rstrip("\\"))
        if slashes % 2 and end < len(text):
            characters += [(char, start + i) for i, char in enumerate(body[:-1])]
            start = end + 1
            continue
        characters += [(char, start + i) for i, char in enumerate(content)]
        return characters, end, count


def _comment(text: str, start: int, end: int) -> int:
    """Return where the comment begins; `end` if there is none."""
    slashes = 0
    for position in range(start, end):
        if text[position] == "#" and slashes % 2 == 0:
            return position
        slashes = slashes + 1 if text[position] == "\\" else 0
    return end


def _line(path: str, number: int, start: int, end: int, kept: list[tuple[str, int]]) -> Line | None:
    body = "".join(char for char, _ in kept)
    include = _INCLUDE.match(body)
    if include:
        return Line(path, number, start, end, include=include[1].strip('"'))
    tokens = []
    for match in _TOKEN.finditer(body):
        first, last = kept[match.start(3)][1], kept[match.end(3) - 1][1] + 1
        tokens.append(Token(match[1].lower(), match[3].strip('"'), first, last))
    return Line(path, number, start, end, tuple(tokens)) if tokens else None


def load(main: str, read: Callable[[str], str | None]) -> Conf:
    """Read a configuration file and its includes.

    Args:
        main: its path; other names are relative to its directory.
        read: returns the text of a file, None if there is none.

    Raises:
        OSError: files include each other.
    """
    texts: dict[str, str] = {}
    lines: list[Line] = []
    missing: list[tuple[str, Line]] = []

    def descend(path: str, depth: int) -> bool:
        if depth > _DEEPEST:
            raise OSError(errno.ELOOP, "files include each other", path)
        text = read(path)
        if text is None:
            return False
        texts[path] = text
        for line in parse(path, text):
            lines.append(line)
            if line.include:
                cluster = Conf(main, texts, tuple(lines)).cluster if "%c" in line.include else ""
                name = line.include.replace("%c", cluster)
                # 22.05 looks for it beside the file with this line, 23.11 and later beside the main file
                places = [str(Path(file).parent / name) for file in (main, path)]
                if not any(descend(place, depth + 1) for place in dict.fromkeys(places)):
                    missing.append((places[0], line))
        return True

    descend(main, 0)
    return Conf(main, texts, tuple(lines), tuple(missing))


@dataclass(frozen=True)
class LineEdit:
    """A change of a line in a site's file.

    Attributes:
        path, number: its file and line.
        start, end: its position in the file's text; equal for a line that is added.
        old, new: its text before and after; `new` may be several lines, `old` is empty for a line that is added.
    """

    path: str
    number: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        """`/etc/slurm/slurm.conf:41: OLD  ->  NEW`."""
        new = "  and  ".join(self.new.strip("\n").split("\n"))
        return f"{self.path}:{self.number}: {self.old}  ->  {new}" if self.old else f"{self.path}: add: {new}"


def edit(conf: Conf, line: Line, change: Mapping[str, str], add: Mapping[str, str] | None = None) -> LineEdit:
    """Replace values of a line (by key in lower case), and append further `Key=Value`."""
    text = conf.texts[line.path]
    return LineEdit(
        line.path, line.number, line.start, line.end, text[line.start : line.end], changed(text, line, change, add)
    )


def changed(text: str, line: Line, change: Mapping[str, str], add: Mapping[str, str] | None = None) -> str:
    """Return the text of a line with other values; the rest stays as it was written."""
    result = text[line.start : line.end]
    if add:
        position = line.tokens[-1].end - line.start
        result = result[:position] + "".join(f" {key}={value}" for key, value in add.items()) + result[position:]
    for token in sorted(line.tokens, key=lambda token: -token.start):
        if token.key in change and line.get(token.key) is token:
            old = text[token.start : token.end]
            new = change[token.key]
            new = f'"{new}"' if old.startswith('"') else new
            result = result[: token.start - line.start] + new + result[token.end - line.start :]
    return result


def added(conf: Conf, text: str) -> LineEdit:
    """Append `text` to the main file."""
    present = conf.texts.get(conf.main, "")
    lead = "" if not present or present.endswith("\n") else "\n"
    if present.rstrip().endswith("\\"):
        lead += "\n"  # ends a line continued by a backslash
    return LineEdit(conf.main, present.count("\n") + 1, len(present), len(present), "", f"{lead}{text}\n")


def apply(texts: Mapping[str, str], edits: Iterator[LineEdit] | list[LineEdit]) -> dict[str, str]:
    """Return the texts of the files with the edits made."""
    result = dict(texts)
    for line_edit in sorted(edits, key=lambda line_edit: (line_edit.path, -line_edit.start)):
        text = result.get(line_edit.path, "")
        result[line_edit.path] = text[: line_edit.start] + line_edit.new + text[line_edit.end :]
    return result
