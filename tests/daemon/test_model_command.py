"""`migbatch model`: what an administrator sees of the learned models, and what he can do about them."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from slurm_migbatch.cli.common import run as run_command
from slurm_migbatch.cli.main import cli
from slurm_migbatch.config import text_of
from slurm_migbatch.daemon.facts import models_of
from slurm_migbatch.daemon.refit import run
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.store.db import open_store


@pytest.fixture
def model(site, tmp_path, capsys):
    """Runs `migbatch model ...`; its exit code and what it printed."""
    path = tmp_path / "migbatch.toml"
    path.write_text(text_of(site))

    def call(*arguments):
        capsys.readouterr()
        return run_command(cli, "migbatch", ["model", *arguments, "-c", str(path)]), capsys.readouterr().out

    return call


def test_commands_say_that_nothing_has_been_learned_yet(model, record):
    assert model("list") == (0, "nothing learned yet: predictions use physics and data sheets\n")
    code, text = model("show")
    assert code == 0 and "physics alone (version 0)" in text and "0 of 5 new runs" in text
    code, text = model("refit")
    assert (code, "no run has reported" in text) == (3, True)


def test_refit_list_and_show_report_the_current_version(model, record, site):
    record.add(30)
    code, text = model("refit")
    assert code == 0 and text.startswith("version 1 is current: time x1.")
    code, text = model("list")
    version, status = text.splitlines()[1].split()[:2]
    assert (code, version, status) == (0, "1", "current")
    assert "asked for" in text.split("last refits")[1]
    record.add(25, factor=3.0)
    code, text = model("show")
    assert code == 0
    assert "BELOW THE CONFIDENCE LEVEL" in text
    (line,) = (line for line in text.splitlines() if line.startswith("net/infer/h100-80gb  time"))
    assert line.split()[3] == "30" and line.split()[5] == "25" and "drifts" in line
    assert "due: 25 new runs" in text
    found = json.loads(model("show", "--json")[1])
    assert found["watch"]["kept"]["time"] == {"runs": 25, "share": 0.0, "broken": True}
    assert found["report"]["runs"] == 30 and found["waiting"]["runs"] == 25


def test_users_whose_runs_are_rejected_are_counted_and_not_named(model, record):
    record.add(30)
    record.add(4, user="mallory", factor=500.0)
    model("refit")
    text = model("show")[1]
    assert "rejected: time of net/infer/h100-80gb in 4 runs of 1 user," in text
    assert "mallory" not in text + model("list", "--json")[1]


def test_rollback_returns_to_an_earlier_version(model, record, site):
    for _ in range(2):
        record.add(10)
        run(site)
    assert model("rollback") == (0, "predictions use version 1 instead of version 2\n")
    assert "2        rejected" in model("list")[1]
    assert "not current" in model("show", "2")[1]
    assert model("rollback", "0") == (0, "predictions use physics alone (version 0) instead of version 1\n")
    assert "none of them is current" in model("list")[1]
    assert model("rollback", "2")[0] == 0
    assert models_of(site).index().current == 2
    assert run(site)["refit"] is None


def test_refused_refits_are_listed_with_their_reason(model, record, site):
    record.add(20)
    run(site)
    models_of(site).note({"ts": 1.0, "outcome": "refused", "reason": "5 new runs", "why": "it is off by 9"}, {})
    assert "it is off by 9" in model("list")[1]
    assert json.loads(model("list", "--json")[1])["refits"][-1]["outcome"] == "refused"


def test_broken_model_file_is_shown_as_unusable(model, record, site):
    for _ in range(2):
        record.add(10)
        run(site)
    (models_of(site).path / "model-2.json.gz").write_bytes(b"x")
    assert "unusable" in model("list")[1]
    found = json.loads(model("show", "--json")[1])
    assert found["version"] == 1 and "model-2.json.gz" in found["troubles"][0]


def test_only_root_and_slurm_user_may_change_models(record, site, open_tmp_path, capfd):
    record.add(10)
    run(site)
    path = open_tmp_path / "migbatch.toml"
    path.write_text(text_of(site))
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        codes = [
            run_command(cli, "migbatch", ["model", *words, "-c", str(path)]) for words in (["refit"], ["rollback"])
        ]
        os._exit(0 if codes == [1, 1] else 9)
    assert os.waitpid(pid, 0)[1] == 0
    assert "run this as root or SlurmUser" in capfd.readouterr().err
    assert models_of(site).index().current == 1


def test_impossible_measurements_are_reported_and_not_learned(model, record, site):
    row = Measurement(
        "NVIDIA A100-SXM4-80GB", "resnet50", "cnn", "infer", "2g.20gb", 2, 2, 28, 32, 224, latency_s=0.02, source="s"
    )
    rows = [replace(row, batch=batch, latency_s=0.0006 * batch) for batch in (1, 2, 4, 8, 16, 32)]
    with open_store(site.store.url) as store:
        store.add_measurements([*rows, replace(row, batch=64, latency_s=1e-5)])
    assert model("refit")[0] == 0
    found = json.loads(model("show", "--json")[1])
    (trouble,) = found["troubles"]
    assert trouble.startswith("impossible measured points in the record, ignored: 1, first: ")
    assert found["rows"] == len(rows)
