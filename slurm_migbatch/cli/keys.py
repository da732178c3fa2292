"""Keys of a terminal: decode bytes to one name per key."""

from __future__ import annotations

import re
from typing import Final

_NAMES: Final = {
    "\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace",
}  # fmt: skip
#: sequences after ESC [ or ESC O, of xterm, the Linux console, screen and tmux
_SEQUENCES: Final = {
    "A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "Z": "backtab", "1~": "home",
    "7~": "home", "4~": "end", "8~": "end", "5~": "pgup", "6~": "pgdn", "P": "f1", "11~": "f1", "[A": "f1",
    "21~": "f10",
}  # fmt: skip
_SEQUENCE: Final = re.compile(r"\x1b(?:\[\[[A-E]|\[[0-?]*[ -/]*[@-Z\\-~]|O[ -~])")
_BEGUN: Final = re.compile(r"\x1b(?:\[\[?|\[[0-?]*[ -/]*|O)?")
_LONGEST: Final = 32


def decode(data: bytes, *, ended: bool = False) -> tuple[list[str], bytes]:
    """Return the keys in the previous rest and the new input, and a rest that may be the beginning of another key.
    `ended`: nothing follows for now, so that a lone ESC is that key.
    """
    text = data.decode("utf-8", "ignore" if ended else "surrogateescape")
    keys: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        if "\udc80" <= char <= "\udcff":
            if len(text) - at < 4 and all("\udc80" <= byte <= "\udcff" for byte in text[at:]):
                break  # the other bytes of the character have not arrived yet
            at += 1
        elif char != "\x1b":
            keys += [_NAMES.get(char, char)] if char in _NAMES or char.isprintable() else []
            at += 1
        elif (found := _SEQUENCE.match(text, at)) is not None:
            known = _SEQUENCES.get(found[0][2:])
            keys += [known] if known is not None else []
            at = found.end()
        elif not ended and _BEGUN.fullmatch(text, at) is not None and len(text) - at < _LONGEST:
            break
        else:
            keys.append("esc")
            at += 1
    return keys, text[at:].encode("utf-8", "surrogateescape")
