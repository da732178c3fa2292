"""The study of instances on synthetic laboratories with ParvaGPU's scenarios: baselines and bounds."""

import json
import math

import pytest
from click.testing import CliRunner

from slurm_migbatch.lab.bars import NotMeasurable
from slurm_migbatch.lab.cli.bench import bench
from slurm_migbatch.lab.studies import instances
from slurm_migbatch.lab.studies.instances import MEASURED, MIG_OFF, measure


@pytest.fixture(scope="module")
def result(parvagpu, instance_bench):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instances, "InstanceBench", lambda *_: instance_bench)
        return measure(parvagpu)


def test_bounds_and_baselines_are_in_the_expected_order(result):
    rows = {row["name"]: row for row in result["rows"]}
    assert result["scenarios"] == ["S1", "S2"]
    assert result["services"] == 7
    assert "ParvaGPU" not in rows  # these are not its six scenarios
    divided, whole = rows["bound: slices divided at will"], rows["bound: whole instances, no packing"]
    alone, ours = rows["each service alone, then packed"], rows[MEASURED]
    dedicated, shared = rows[MIG_OFF], rows["MIG off, ideal sharing in time"]
    one_process, five, without = (
        rows[name] for name in (f"{MIG_OFF}, one process", f"{MEASURED}, up to 5 processes", f"{MEASURED}, without MPS")
    )
    assert ours["exact"]
    assert result["bars"] == []
    for i in range(2):
        assert divided["gpus"][i] <= whole["gpus"][i] + 0.01 <= ours["gpus"][i] + 0.02
        assert ours["gpus"][i] <= alone["gpus"][i] <= dedicated["gpus"][i]
        assert shared["gpus"][i] <= dedicated["gpus"][i]
        assert dedicated["gpus"][i] >= (3, 4)[i]
        assert math.ceil(whole["gpus"][i] - 0.01) <= ours["gpus"][i]
        assert five["gpus"][i] <= ours["gpus"][i] <= without["gpus"][i] <= one_process["gpus"][i]
        assert dedicated["gpus"][i] <= one_process["gpus"][i]


def test_command_prints_one_json_object_or_a_table(parvagpu, result, monkeypatch):
    monkeypatch.setattr(instances, "measure", lambda data, progress: result)
    runner = CliRunner()
    found = runner.invoke(bench, ["study", "instances", "--data", str(parvagpu), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["bars"] == []
    report = runner.invoke(bench, ["study", "instances", "--data", str(parvagpu)])
    assert report.exit_code == 0, report.output
    assert MEASURED in report.stdout


def test_table_without_services_on_a_known_gpu_is_reported(tmp_path):
    lines = ["kind,model,gpu,profile,batch,procs,throughput_per_s"]
    lines += [f"infer,resnet50,gpu-of-nobody,,{batch},1,{100 + batch}" for batch in (1, 2, 4, 8)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(NotMeasurable, match="name ParvaGPU's folder"):
        measure(tmp_path)
    found = CliRunner().invoke(bench, ["study", "instances", "--data", str(tmp_path)])
    assert found.exit_code == 1
    assert "name ParvaGPU's folder" in str(found.exception)
