"""Declare configuration keys: their defaults, meanings and bounds; check values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from slurm_migbatch.config.age import parse_age
from slurm_migbatch.config.hours import Hours, HoursError
from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.slurm.restaddress import RestAddress

#: dispatch looks back two weeks; users look back further
_LEAST_AGE_S = 30 * 86400

#: A check returns the error of a value as the end of a sentence ("must be ..."), or None.
Check = Callable[[Any], str | None]


def key(default: Any, doc: str, check: Check | None = None) -> Any:
    """Declare a configuration key: its default, its meaning (shown in the default file) and its bounds."""
    return field(default=default, metadata={"doc": doc, "check": check})


def required(doc: str, check: Check | None = None) -> Any:
    """Declare a key without a default, for tables that exist only if written."""
    return field(metadata={"doc": doc, "check": check})


def table(doc: str, check: Check | None = None) -> Any:
    """Declare a table of integers with the site's own names as keys, empty by default; `check` gets each entry."""
    return field(default_factory=dict, metadata={"doc": doc, "check": check})


def between(low: float, high: float) -> Check:
    """Accept numbers from low to high, both included."""

    def check(value: float) -> str | None:
        return None if low <= value <= high else f"must be between {low:g} and {high:g}"

    return check


def one_of(*choices: str) -> Check:
    """Accept one of some words."""

    def check(value: str) -> str | None:
        return None if value in choices else f"must be one of {', '.join(repr(c) for c in choices)}"

    return check


def absolute(value: str) -> str | None:
    """Accept an absolute path, because services have no useful working directory."""
    return None if value.startswith("/") else "must be an absolute path"


def absolute_or_empty(value: str) -> str | None:
    """Accept an absolute path, or empty for 'not set'."""
    return None if not value else absolute(value)


def program_or_empty(value: str) -> str | None:
    """Accept the path of a program that needs no shell quoting, or empty."""
    if not value or re.fullmatch(r"/[A-Za-z0-9._/-]+", value):
        return None
    return "must be an absolute path of letters, digits and . _ / -"


def rest_address(value: str) -> str | None:
    """Accept an address of slurmrestd."""
    try:
        RestAddress.parse(value)
    except ValueError:
        return "must be unix:/PATH, http://HOST:PORT or https://HOST:PORT"
    return None


def database_url(value: str) -> str | None:
    """Accept an SQLAlchemy URL of one of the databases that the store supports."""
    if re.match(r"(sqlite|mysql|mariadb|postgresql)(\+[a-z0-9_]+)?://", value):
        return None
    return "must be a database URL such as 'sqlite:////var/lib/migbatch/migbatch.db' or 'mysql+pymysql://user@host/db'"


def name(value: str) -> str | None:
    """Accept a word that is valid in Slurm's configuration."""
    return None if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value) else "must be a plain name (letters, digits, _ . -)"


def names(values: tuple[str, ...]) -> str | None:
    """Accept several such words."""
    bad = [v for v in values if name(v)]
    return f"must contain plain names, and {bad[0]!r} is not one" if bad else None


def model_names(values: tuple[str, ...]) -> str | None:
    """Accept names of models, such as org/model-7b."""
    bad = [v for v in values if not re.fullmatch(r"[A-Za-z0-9_.+/-]{1,128}", v)]
    return f"must contain names of letters, digits and _ . + / -, and {bad[0]!r} is not one" if bad else None


def profile_or_empty(value: str) -> str | None:
    """Accept a MIG profile, or empty."""
    return None if not value else profiles((value,))


def profiles(values: tuple[str, ...]) -> str | None:
    """Accept MIG profiles as nvidia-smi spells them."""
    for value in values:
        try:
            Profile.parse(value)
        except ProfileError as error:
            return f"must contain MIG profiles such as '1g.10gb' ({error})"
    return None


def hours(values: tuple[str, ...]) -> str | None:
    """Accept hours of the day, on some days of the week."""
    for value in values:
        try:
            Hours.parse(value)
        except HoursError as error:
            return f"must contain times such as '08:00-18:00' or 'Mon-Fri 08:00-18:00' ({error})"
    return None


def age(value: str) -> str | None:
    """Accept an age limit: at least as long as any reader of the record looks back."""
    try:
        seconds = parse_age(value)
    except ValueError as error:
        return f"must be a duration such as '400d', '60w', '3y', or 'forever' ({error})"
    return None if seconds >= _LEAST_AGE_S else f"must be at least '{_LEAST_AGE_S // 86400:g}d'"


def share_of(entry: Mapping[str, int]) -> str | None:
    """Accept an account's limit."""
    for account, value in entry.items():
        if name(account):
            return "must be the plain name of an account (letters, digits, _ . -)"
        if not 0 <= value <= 10**6:
            return "must be between 0 and 1000000"
    return None
