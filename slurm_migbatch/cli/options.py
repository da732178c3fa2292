"""Options as data: read without click by a command whose start is most of its time, made into click's for the rest.

Click takes as long to import as the interpreter takes to start, twice. It is needed for help, completion and for saying
what is wrong with a command line; `parse` reads the others as click would.
"""

from __future__ import annotations

from slurm_migbatch.values import TYPE_CHECKING, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class Option(Value):
    """One option.

    Attributes:
        flags: how it is written, short ones first.
        help: its line of the help text.
        metavar: what stands for its value there; "" for an option that has none.
        name: what the command knows it by; the longest flag's name where not given.
        default: of an option with a value.
        shown: whether the help text tells the default.
        many: whether it may come several times; its values are a tuple then.
        instead: whether something is shown instead of running the command; only click knows what.
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
        """What the command knows it by."""
        return self.name or max(self.flags, key=len).lstrip("-").replace("-", "_")


def parse(options: Sequence[Option], arguments: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the values of all options by their names; None where click must look at the command line."""
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
                # the next letter is an option of its own
                rest.append(f"-{given}")
            found[option.key] = True
            continue
        if given is None:
            if not rest:
                return None
            given = rest.pop()
        found[option.key] = (*found[option.key], given) if option.many else given
    return found
