"""Convert Slurm's host lists: `n[1-4,07],m3` to names and back."""

from __future__ import annotations

from itertools import product

from slurm_migbatch.values import TYPE_CHECKING, Pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Limit of hosts in one list: a longer one is a mistake or an attack, not a cluster.
MAX_HOSTS = 65536

_SEGMENT = Pattern(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = Pattern(r"(\d{1,18})(?:-(\d{1,18}))?$")
_TAIL = Pattern(r"(.*?)(\d{1,18})$", "DOTALL")


class NodeListError(ValueError):
    """A text that is not a host list; the message names the invalid part."""


def expand(text: str, most: int = MAX_HOSTS) -> tuple[str, ...]:
    """Return the names in `text`, in its order, each once. Empty text has none.

    Raises:
        NodeListError: a bracket or range is malformed, or there are more than `most` names; none is made then.
    """
    names: dict[str, None] = {}
    for item in items(text):
        choices: list[list[str]] = []
        size, end = 1, 0
        for segment in _SEGMENT.made.finditer(item):
            if segment.start() != end:
                break
            end = segment.end()
            choices.append(_ranges(segment[0][1:-1], item, most) if segment[0][0] == "[" else [segment[0]])
            size *= len(choices[-1])
            if size + len(names) > most:
                raise NodeListError(f"{item!r} names more than {most} hosts")
        if end != len(item) or not item:
            raise NodeListError(f"{item!r} is not a host list; write names such as 'n1,n[3-5]'")
        names.update(dict.fromkeys(map("".join, product(*choices))))
    return tuple(names)


def items(text: str) -> Iterator[str]:
    """Yield the comma-separated parts of `text`; commas inside brackets do not separate. Raises NodeListError."""
    text = text.strip()
    depth = start = 0
    for position, char in enumerate(text):
        if char in "[]":
            depth += 1 if char == "[" else -1
            if depth not in (0, 1):
                raise NodeListError(f"{text!r} has an unmatched bracket at {position}")
        elif char == "," and not depth:
            yield text[start:position].strip()
            start = position + 1
    if depth:
        raise NodeListError(f"{text!r} lacks a closing bracket")
    if text:
        yield text[start:].strip()


def _ranges(body: str, item: str, most: int) -> list[str]:
    """Expand `1-3,07` to 1 2 3 07; a range keeps the zero padding of its first number."""
    numbers: list[str] = []
    for part in body.split(","):
        match = _RANGE.match(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or low > high:
            raise NodeListError(f"{part!r} in {item!r} is not a number or a rising range")
        if len(numbers) + high - low >= most:
            raise NodeListError(f"{item!r} names more than {most} hosts")
        numbers.extend(str(n).zfill(len(match[1])) for n in range(low, high + 1))
    return numbers


def expand_valid(hosts: str) -> tuple[str, ...]:
    """Return the hosts or files of a list; none if it is malformed."""
    try:
        return expand(hosts)
    except NodeListError:
        return ()


def fold(names: Iterable[str]) -> str:
    """Fold `names` into a host list: sorted, each once, consecutive numbers as ranges."""
    plain: set[str] = set()
    numbered: dict[tuple[str, int], set[int]] = {}
    unpadded: list[tuple[str, str]] = []
    for name in set(names):
        match = _TAIL.match(name)
        if not match:
            plain.add(name)
        elif match[2].startswith("0") and len(match[2]) > 1:
            numbered.setdefault((match[1], len(match[2])), set()).add(int(match[2]))
        else:
            unpadded.append((match[1], match[2]))
    for prefix, digits in unpadded:
        width = len(digits) if (prefix, len(digits)) in numbered else 0
        numbered.setdefault((prefix, width), set()).add(int(digits))
    parts = [(name, name) for name in plain]
    for (prefix, width), values in numbered.items():
        pairs = [(f"{low:0{width}d}", f"{high:0{width}d}") for low, high in _runs(values)]
        runs = [low if low == high else f"{low}-{high}" for low, high in pairs]
        only = len(runs) == 1 and "-" not in runs[0]
        parts.append((prefix, f"{prefix}{runs[0]}" if only else f"{prefix}[{','.join(runs)}]"))
    return ",".join(text for _, text in sorted(parts))


def _runs(values: set[int]) -> Iterator[tuple[int, int]]:
    ordered = sorted(values)
    low = high = ordered[0]
    for value in ordered[1:]:
        if value != high + 1:
            yield low, high
            low = value
        high = value
    yield low, high
