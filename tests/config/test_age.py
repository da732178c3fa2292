"""How long records are kept, as set in the configuration file."""

import math

import pytest

from slurm_migbatch.config import ConfigError, loads
from slurm_migbatch.config.age import parse_age


@pytest.mark.parametrize(
    ("text", "days"),
    [("400d", 400), ("60w", 420), ("3y", 1098), (" 30 D ", 30), ("forever", math.inf), ("0", math.inf)],
)
def test_valid_ages_are_parsed(text, days):
    assert parse_age(text) == days * 86400


@pytest.mark.parametrize("text", ["", "400", "-3d", "1.5y", "two years", "30d 2w", "1000000d", "0d ago"])
def test_invalid_ages_are_refused(text):
    with pytest.raises(ValueError, match="a number and d, w or y"):
        parse_age(text)


def test_store_keep_is_validated():
    assert loads("").store.keep_s == 400 * 86400
    assert math.isinf(loads("[store]\nkeep = 'forever'\n").store.keep_s)
    for wrong, message in (
        ("'12months'", "store.keep must be a duration such as '400d', '60w', '3y', or 'forever'"),
        ("'7d'", "store.keep must be at least '30d', not '7d'"),
        ("'0d'", "store.keep must be at least '30d', not '0d'"),
        ("400", "store.keep must be a quoted string"),
    ):
        with pytest.raises(ConfigError, match=f"m.toml:2: {message}"):
            loads(f"[store]\nkeep = {wrong}\n", "m.toml")


def test_store_keep_must_cover_forecast_days():
    lending = "[lending]\nenabled = true\npartitions = ['train']\nforecast_days = 90\n"
    assert loads(f"{lending}[store]\nkeep = '90d'\n").store.keep == "90d"
    with pytest.raises(ConfigError) as caught:
        loads(f"{lending}[store]\nkeep = '60d'\n", "m.toml")
    assert str(caught.value) == "m.toml:6: store.keep = '60d' is shorter than the 90 days of lending.forecast_days"
