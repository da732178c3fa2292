"""Declare configuration keys: their defaults, meanings and bounds; check values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field
from typing import Any, Final

from slurm_migbatch.config.age import parse_age
from slurm_migbatch.config.hours import Hours
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.slurm.nodelist import NodeListError, expand
from slurm_migbatch.slurm.restaddress import RestAddress

#: dispatch looks back two weeks; users look back further
_LEAST_AGE_S = 30 * 86400
_NAME = "[A-Za-z0-9_.-]{1,64}"

#: A check returns the error of a value as the end of a sentence ("must be ..."), or None.
Check = Callable[[Any], str | None]


def key(default: Any, doc: str, check: Check | None = None) -> Any:
    """Declare a configuration key: its default, its meaning (shown in the default file) and its bounds."""
    return field(default=default, metadata={"doc": doc, "check": check})


def required(doc: str, check: Check | None = None) -> Any:
    """Declare a key without a default, for tables that exist only if written."""
    return key(MISSING, doc, check)


def table(doc: str, check: Check) -> Any:
    """Declare a table of integers with the site's own names as keys, empty by default; `check` gets each entry."""
    return field(default_factory=dict, metadata={"doc": doc, "check": check})


def between(low: float, high: float) -> Check:
    """Accept numbers from low to high, both included."""
    return lambda value: None if low <= value <= high else f"must be between {low:g} and {high:g}"


def one_of(*choices: str) -> Check:
    """Accept one of some words."""
    return lambda value: None if value in choices else f"must be one of {', '.join(map(repr, choices))}"


def _matching(pattern: str, otherwise: str) -> Check:
    """Accept texts that match a pattern."""
    return lambda value: None if re.fullmatch(pattern, value, re.DOTALL) else f"must be {otherwise}"


def _all_matching(pattern: str, kind: str) -> Check:
    """Accept lists of texts that match a pattern."""

    def check(values: tuple[str, ...]) -> str | None:
        bad = [value for value in values if not re.fullmatch(pattern, value)]
        return f"must contain {kind}, and {bad[0]!r} is not one" if bad else None

    return check


def _all_parsed(parse: Callable[[str], object], kind: str) -> Check:
    """Accept lists of texts that can be parsed."""

    def check(values: tuple[str, ...]) -> str | None:
        try:
            for value in values:
                parse(value)
        except ValueError as error:
            return f"must contain {kind} ({error})"
        return None

    return check


# services have no useful working directory
absolute: Final = _matching("/.*", "an absolute path")
#: of a unix socket Linux takes 107 bytes; the longest name of ours has 11 more than what is configured
_SOCKET_BYTES: Final = 96
absolute_or_empty: Final = _matching("(/.*)?", "an absolute path")
program_or_empty: Final = _matching("(/[A-Za-z0-9._/-]+)?", "an absolute path of letters, digits and . _ / -")
"""The path of a program that needs no shell quoting, or empty."""
database_url: Final = _matching(
    r"(sqlite|mysql|mariadb|postgresql)(\+[a-z0-9_]+)?://([^:/]*(:[^@]*)?@)?(\[[^/?@]*\]|[^/:?@\[]*)(:[0-9]+)?([/?].*)?",
    "a database URL such as 'sqlite:////var/lib/migbatch/migbatch.db' or 'mysql+pymysql://user@host/db', with @ in a "
    "password as %40",
)
name: Final = _matching(_NAME, "a plain name (letters, digits, _ . -)")
"""A word that is valid in Slurm's configuration."""
names: Final = _all_matching(_NAME, "plain names")
model_names: Final = _all_matching("[A-Za-z0-9_.+/-]{1,128}", "names of letters, digits and _ . + / -")
profiles: Final = _all_parsed(Profile.parse, "MIG profiles such as '1g.10gb'")
hours: Final = _all_parsed(Hours.parse, "times such as '08:00-18:00' or 'Mon-Fri 08:00-18:00'")


def socket_path(value: str) -> str | None:
    """Accept the path of a unix socket, or of a directory for some."""
    too_long = len(value.encode()) > _SOCKET_BYTES
    return f"must have at most {_SOCKET_BYTES} bytes, as a path of sockets" if too_long else absolute(value)


def profile_or_empty(value: str) -> str | None:
    """Accept a MIG profile, or empty."""
    return profiles((value,)) if value else None


def rest_address(value: str) -> str | None:
    """Accept an address of slurmrestd."""
    try:
        RestAddress.parse(value)
    except ValueError:
        return "must be unix:/PATH, http://HOST:PORT or https://HOST:PORT"
    return None


def age(value: str) -> str | None:
    """Accept an age limit: at least as long as any reader of the record looks back."""
    try:
        seconds = parse_age(value)
    except ValueError as error:
        return f"must be a duration such as '400d', '60w', '3y', or 'forever' ({error})"
    return None if seconds >= _LEAST_AGE_S else f"must be at least '{_LEAST_AGE_S // 86400:g}d'"


def host_list(value: str) -> str | None:
    """Accept a host list that names at least one node."""
    try:
        return None if expand(value) else "must name at least one node"
    except NodeListError as error:
        return f"must be a host list such as 'none[1-2]' ({error})"


def share_of(entry: Mapping[str, int]) -> str | None:
    """Accept an account's limit."""
    for account, value in entry.items():
        if name(account):
            return "must be the plain name of an account (letters, digits, _ . -)"
        if not 0 <= value <= 10**6:
            return "must be between 0 and 1000000"
    return None
