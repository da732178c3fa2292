"""`migbatch eval torch` on the measurements of this repository, and what they say about the shipped figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.evaluate import torch
from slurm_migbatch.predict.bounds import impossible
from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.predict.llm.names import resolve
from slurm_migbatch.profiling.table import read_folder

MEASUREMENTS = Path(__file__).parents[2] / "measurements"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return torch.evaluate(torch.read(MEASUREMENTS))


def test_shipped_efficiencies_are_those_of_the_fit(result: dict[str, Any]) -> None:
    for kind, fitted in result["fit"].items():
        for name, value in fitted.items():
            assert result["shipped"][kind][name] == pytest.approx(value, rel=0.05), (kind, name)


def test_targets_are_met_and_the_data_sheet_alone_is_worse(result: dict[str, Any]) -> None:
    assert all(bar["ok"] for bar in result["bars"]), result["bars"]
    for kind in ("infer", "train"):
        assert (
            result["scores"][f"{kind}/seconds/held out"]["mean"]
            < result["scores"][f"{kind}/seconds/data sheet"]["mean"] / 3
        )
    for levels in result["coverage"].values():
        assert levels["80%"] >= 0.8 and levels["90%"] >= 0.89, result["coverage"]


def test_command_prints_scores_by_network_and_targets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(cli, "migbatch", ["eval", "torch", "--data", str(MEASUREMENTS)]) == 0
    shown = capsys.readouterr().out
    assert "llama-3.1-8b" in shown and "held out" in shown and "target <= 30" in shown
    assert run(cli, "migbatch", ["eval", "torch", "--data", str(MEASUREMENTS), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"]["train"] > 30
    (tmp_path / "other.csv").write_text("gpu,model,batch,latency_s\nNVIDIA H100 80GB HBM3,own-network,1,0.1\n")
    with pytest.raises(NotMeasurable, match="no row of a public language model"):
        torch.read(tmp_path)


def test_measured_networks_have_the_parameters_of_the_table_of_public_models() -> None:
    """torch counted those of transformers' own classes."""
    counted = set()
    for row in read_folder(MEASUREMENTS):
        found = resolve(row.model)
        if row.params and found is not None and "lora" not in row.tuning:
            assert row.params == found.architecture.parameters, row.model
            counted.add(found.name)
    assert len(counted) >= 15


def test_measurements_are_possible() -> None:
    knowledge = ModelKnowledge()
    assert [row for row in read_folder(MEASUREMENTS) if impossible(row, knowledge)] == []


def test_targets_name_every_measured_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factories need torch, which is not installed here; their names do not."""
    spec = importlib.util.spec_from_file_location("architectures", MEASUREMENTS / "architectures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(bfloat16=None, float16=None))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the module adds to it
    spec.loader.exec_module(module)
    for row in read_folder(MEASUREMENTS):
        assert callable(getattr(module.infer, row.model.replace("-", "_").replace(".", "_"))), row.model
    with pytest.raises(AttributeError):
        _ = module.train.no_such_model
