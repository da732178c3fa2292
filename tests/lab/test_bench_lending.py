"""The inputs of `migbatch bench lending`: its synthetic requests, and data sets that are missing."""

import numpy as np
import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.experiments import lending, lendslices
from slurm_migbatch.lab.experiments.lendslices import Load
from tests.support.lending_folders import write_miso, write_pollux


@pytest.fixture
def data(tmp_path):
    return write_pollux(tmp_path)


def test_requests_follow_the_daily_pattern_and_the_requested_count():
    rng = np.random.Generator(np.random.PCG64(1))
    moments = lendslices.Moments([], np.cumsum(rng.exponential(0.3, 400)))
    load = Load("many", 6000, 4, 5.0)
    before = lendslices.HISTORY_DAYS * 86400.0
    found = [(at - before, seconds) for at, _, seconds in lendslices.requests(load, moments, 3)]
    arrivals = [at for at, _ in found if at >= 0]
    assert 0.6 * load.requests < len(arrivals) < 1.6 * load.requests
    assert found[0][0] == pytest.approx(-before, abs=0.05 * 86400)
    assert np.mean([seconds for _, seconds in found]) == pytest.approx(5.0, rel=0.1)
    day = sum(3 * 3600 <= at < 9 * 3600 for at in arrivals)
    assert day > 1.5 * sum(at >= 9.5 * 3600 for at in arrivals)


def test_missing_data_sets_are_named_in_the_error(tmp_path, data):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotMeasurable, match="no Pollux data"):
        lending.measure(empty)
    with pytest.raises(NotMeasurable, match="no MISO data"):
        lending.measure(data)
    write_miso(data)
    (data / "mooncake_conversation_1h.csv").unlink()
    with pytest.raises(NotMeasurable, match="no request trace"):
        lending.measure(data)


def test_command_names_the_missing_data_set(tmp_path):
    answer = CliRunner().invoke(cli, ["bench", "lending", "--data", str(tmp_path)])
    assert answer.exit_code != 0
    assert "no Pollux data" in str(answer.exception)
