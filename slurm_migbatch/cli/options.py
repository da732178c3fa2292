"""Options as data: parsed without click for a command dominated by its start-up time, converted to click's otherwise.

Importing click takes twice as long as the interpreter's start. It is needed for help, completion and usage errors;
`parse` reads all other command lines as click would.
"""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class ReportOption(Value):
    """One option.

    Attributes:
        flags: spellings, short ones first.
        help: its line of the help text.
        metavar: placeholder of its value in the help; "" for a flag.
        name: its name in the command; default: the longest flag's name.
        default: of an option with a value.
        shown: whether the help shows the default.
        many: whether it may be repeated; its value is a tuple then.
        instead: whether it shows something instead of running the command; only click handles it.
    """

    flags: tuple[str, ...]
    help: str
    metavar: str = ""
    name: str = ""
    default: str | None = None
    shown: bool = False
    many: bool = False
    instead: bool = False

    @property
    def key(self) -> str:
        """Its name in the command."""
        return self.name or max(self.flags, key=len).lstrip("-").replace("-", "_")


def completed(options: Sequence[ReportOption], arguments: Sequence[str]) -> list[str]:
    """Return the arguments with every unambiguous beginning of a long option completed, as Slurm's commands do."""
    keys = {flag: option.key for option in options for flag in option.flags if flag.startswith("--")}
    keys["--help"] = "help"
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:end]):
        begin, equals, text = word.partition("=")
        if begin.startswith("--") and begin not in keys:
            meant = [flag for flag in keys if flag.startswith(begin)]
            if len({keys[flag] for flag in meant}) == 1:
                words[place] = f"{meant[0]}{equals}{text}"
    return words


def parse(options: Sequence[ReportOption], arguments: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the values of all options by name, given ones last, in the order in which they were last given; None if
    click must parse the command line.
    """
    found: dict[str, Any] = {
        option.key: () if option.many else option.default if option.metavar else False
        for option in options
        if not option.instead
    }
    known = {flag: option for option in options if not option.instead for flag in option.flags}
    rest = list(reversed(arguments))
    while rest:
        word = rest.pop()
        given: str | None = None
        if word.startswith("--"):
            flag, equals, text = word.partition("=")
            given = text if equals else None
        elif len(word) > 2:
            flag, given = word[:2], word[2:]
        else:
            flag = word
        option = known.get(flag)
        if option is None:
            return None
        if not option.metavar:
            if given is not None:
                if word.startswith("--"):
                    return None
                # the next letter is another option
                rest.append(f"-{given}")
            found.pop(option.key)
            found[option.key] = True
            continue
        if given is None:
            if not rest:
                return None
            given = rest.pop()
        before = found.pop(option.key)
        found[option.key] = (*before, given) if option.many else given
    return found
