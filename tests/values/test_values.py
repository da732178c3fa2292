"""Values that are cheap to declare behave like frozen dataclasses, and importing the module imports nothing else."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from typing import ClassVar

import pytest

from slurm_migbatch.values import Field, Pattern, Value, fields, replace
from slurm_migbatch.values.figures import digits, gib, plural


class Place(Value):
    """A value."""

    kind: ClassVar[str] = "place"

    node: str
    gpu: int = 0
    names: tuple[str, ...] = Field((), limit=3)  # type: ignore[assignment]

    @property
    def text(self) -> str:
        return f"{self.node}:{self.gpu}"


class FreePlace(Place):
    """A value with more fields."""

    free: bool = True


class Call(Place, kw_only=True):
    """A value whose own field is given by name only."""

    loud: bool = False


def test_kw_only_fields_are_given_by_name_only() -> None:
    assert Call("n1", 2, loud=True).loud
    with pytest.raises(TypeError):
        Call("n1", 2, (), True)


def test_fields_are_set_by_position_by_name_and_by_default() -> None:
    assert (Place("n1").text, Place("n1", 2).text, Place(gpu=3, node="n2").text) == ("n1:0", "n1:2", "n2:3")
    assert (Place("n1").names, FreePlace("n1").free, FreePlace("n1", 1, ("a",), False).free) == ((), True, False)


@pytest.mark.parametrize(
    ("given", "named"), [((), {}), (("n1", 1, (), 4), {}), (("n1",), {"node": "n2"}), (("n1",), {"other": 1})]
)
def test_missing_unknown_or_duplicate_field_is_refused(given: tuple[object, ...], named: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="Place"):
        Place(*given, **named)


def test_values_are_frozen_compared_and_hashed_by_their_fields() -> None:
    place = Place("n1")
    with pytest.raises(AttributeError):
        place.node = "n2"
    with pytest.raises(AttributeError):
        del place.node
    assert place == Place("n1") != Place("n2")
    assert place != FreePlace("n1")
    assert len({place, Place("n1"), Place("n2")}) == 2
    assert repr(place) == "Place(node='n1', gpu=0, names=())"
    assert copy.deepcopy(place) == pickle.loads(pickle.dumps(place)) == place


def test_replace_returns_a_changed_copy() -> None:
    assert replace(FreePlace("n1"), gpu=4) == FreePlace("n1", 4)
    with pytest.raises(TypeError):
        replace(FreePlace("n1"), nothing=4)


def test_fields_returns_the_declared_metadata() -> None:
    assert [(name, dict(facts)) for name, facts in fields(FreePlace)] == [
        ("node", {"kind": "str"}),
        ("gpu", {"kind": "int"}),
        ("names", {"limit": 3, "kind": "tuple[str, ...]"}),
        ("free", {"kind": "bool"}),
    ]


def test_pattern_behaves_like_a_compiled_regex() -> None:
    pattern = Pattern(r"\w+", "ASCII", "IGNORECASE")
    assert pattern.made == re.compile(r"\w+", re.ASCII | re.IGNORECASE)
    assert pattern.match("ab ") and not pattern.fullmatch("ab ")
    assert not pattern.match(" ab") and pattern.match(" ab", 1)


def test_values_module_imports_nothing() -> None:
    check = "import sys; before = set(sys.modules); import slurm_migbatch.values; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-S", "-c", check], capture_output=True, text=True, check=True)
    names = {"slurm_migbatch", "slurm_migbatch.values", "__future__"}
    assert eval(done.stdout) <= names


def test_digits_shows_three_digits_and_no_exponent_for_large_numbers() -> None:
    found = [digits(value) for value in (0.0, 0.25, 1.2345, 99.96, 100.0, 180.4, 1234.5, 72000.0)]
    assert found == ["0", "0.25", "1.23", "100", "100", "180", "1234", "72000"]
    assert [gib(mib) for mib in (9984, 1430512)] == ["9.75", "1397"]


def test_counts_have_their_noun_in_the_right_number() -> None:
    assert [plural(count, "run") for count in (0, 1, 2, 1200)] == ["0 runs", "1 run", "2 runs", "1,200 runs"]
