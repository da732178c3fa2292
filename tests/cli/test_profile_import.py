"""profile import, export and list with a real record."""

import gzip
import json

import pytest

from slurm_migbatch.cli.common import run
from slurm_migbatch.cli.main import cli
from slurm_migbatch.store.db import open_store

TABLE = (
    "gpu,model,kind,profile,compute_slices,memory_slices,batch,latency_s,source,colour\n"
    "a100,ResNet50,infer,7g.80gb,7,8,8,0.006,here,red\n"
    "a100,resnet50,infer,1g.10gb,1,1,8,0.03,here,red\n"
    "a100,resnet50,infer,1g.10gb,1,1,512,,here,red\n"
    "a100,bert,train,7g.80gb,7,8,8,0.03,here,red\n"
)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/db"


@pytest.fixture
def migbatch(tmp_path, url, monkeypatch, capsys):
    """The command with a record that migbatchd has made."""
    config = tmp_path / "m.toml"
    config.write_text(f"[store]\nurl = '{url}'\n")
    monkeypatch.setenv("MIGBATCH_CONFIG", str(config))
    open_store(url).close()

    def call(*arguments):
        code = run(cli, "migbatch", ["profile", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    return path


def test_import_reports_points_added_replaced_and_unchanged(migbatch, table, url):
    assert migbatch("import", table) == (
        0,
        "4 points of 2 models (1 did not run): 4 added, 0 replaced, 0 unchanged\n",
        f"migbatch: notice: {table}: ignoring unknown columns: colour\n",
    )
    code, out, _ = migbatch("import", table)
    assert (code, out) == (0, "4 points of 2 models (1 did not run): 0 added, 0 replaced, 4 unchanged\n")
    with open_store(url) as store:
        assert [row.model for row in store.measurements()] == ["resnet50", "resnet50", "resnet50", "bert"]


def test_a_dry_run_writes_nothing(migbatch, table, url):
    code, out, _ = migbatch("import", "--dry-run", table)
    assert (code, out) == (0, "4 points of 2 models (1 did not run): nothing was written (--dry-run)\n")
    with open_store(url) as store:
        assert store.measurements() == []


def test_one_bad_file_prevents_the_whole_import(migbatch, table, tmp_path, url):
    bad = tmp_path / "bad.csv"
    bad.write_text("gpu,model,batch,latency_s\na100,net,1,0.1\na100,net,x,0.1\n")
    code, out, err = migbatch("import", table, bad)
    assert (code, out) == (1, "")
    assert err.startswith(f"migbatch: error: nothing was imported: {bad}:3: batch must be a number")
    assert err.count("\n") == 1
    with open_store(url) as store:
        assert store.measurements() == []


def test_bad_lines_are_listed_one_below_the_other(migbatch, tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text("gpu,model,batch,latency_s\na100,net,y,0.1\na100,net,x,0.1\n")
    code, _, err = migbatch("import", bad)
    first, *listed = err.splitlines()
    assert (code, first) == (1, "migbatch: error: nothing was imported:")
    assert [line.partition(" batch must")[0] for line in listed] == [f"  {bad}:{number}:" for number in (2, 3)]


def test_source_option_sets_the_source_and_merges_points_of_two_tables(migbatch, table, tmp_path, url):
    again = tmp_path / "again.csv"
    again.write_text("gpu,model,profile,batch,latency_s,source\na100,resnet50,7g.80gb,8,0.04,there\n")
    code, out, _ = migbatch("import", "--source", "site A", table, again)
    assert code == 0 and out.startswith("4 points")
    with open_store(url) as store:
        rows = store.measurements()
    assert {row.source for row in rows} == {"site A"}
    assert rows[0].latency_s == pytest.approx(0.023)


def test_import_json_reports_counts_and_notices(migbatch, table):
    code, out, err = migbatch("import", "--json", table)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["models"] == ["bert", "resnet50"]
    assert (found["points"], found["did_not_run"], found["added"], found["dry_run"]) == (4, 1, 4, False)
    assert "colour" in found["notices"][0]


def test_serving_points_on_a_gpu_of_unknown_speed_are_kept_with_a_notice(migbatch, tmp_path, url):
    path = tmp_path / "served.csv"
    head = "gpu,model,kind,batch,input_size,output,latency_s,ttft_s,tpot_s\n"
    path.write_text(f"{head}x900-96gb,llama-3.1-8b,serve,4,512,128,2,0.1,0.015\n")
    code, out, err = migbatch("import", path)
    assert code == 0 and "1 added" in out
    assert "predictions do not use them: the speed of the GPU is unknown to migbatch (x900-96gb)" in err
    path.write_text(f"{head}h100-80gb,llama-3.1-8b,serve,4,512,128,2,0.1,0.015\n")
    assert "unknown to migbatch" not in migbatch("import", path)[2]


@pytest.mark.parametrize(
    ("model", "tpot", "params", "used"),
    [
        ("llama-3.1-8b", "0.015", "", True),
        ("our-llama", "0.015", "", False),
        ("our-llama", "0.015", "8.03e9", True),
        ("llama-3.1-8b", "", "", False),
    ],
)
def test_serving_points_that_no_prediction_uses_are_kept_with_a_notice(migbatch, tmp_path, model, tpot, params, used):
    path = tmp_path / "served.csv"
    head = "gpu,model,kind,batch,input_size,output,latency_s,ttft_s,tpot_s,params\n"
    path.write_text(f"{head}h100-80gb,{model},serve,4,512,128,2,0.1,{tpot},{params}\n")
    code, out, err = migbatch("import", path)
    assert code == 0 and "1 added" in out
    assert (f"points of servers of {model} are kept, but predictions do not use them" in err) is not used


def test_training_points_on_a_gpu_of_unknown_speed_are_kept_with_a_notice(migbatch, tmp_path, url):
    path = tmp_path / "trained.csv"
    head = "gpu,model,kind,tuning,batch,input_size,latency_s,memory_mib\n"
    path.write_text(f"{head}x900-96gb,qwen2.5-0.5b,train,lora,2,512,0.4,9000\n")
    code, out, err = migbatch("import", path)
    assert code == 0 and "1 added" in out
    assert "step times (not the memory) of language models in training are kept, but predictions do not use" in err
    assert "unknown to migbatch (x900-96gb)" in err
    for gpu, model in (("h100-80gb", "qwen2.5-0.5b"), ("x900-96gb", "resnet50")):
        tuning = "lora" if "qwen" in model else ""
        path.write_text(f"{head}{gpu},{model},train,{tuning},2,512,0.4,9000\n")
        assert "unknown to migbatch" not in migbatch("import", path)[2]


def test_exported_points_are_unchanged_by_import(migbatch, table, tmp_path, url):
    migbatch("import", table)
    for name in ("o.csv", "o.csv.gz"):
        code, out, err = migbatch("export", tmp_path / name)
        assert (code, out, err) == (0, "", f"4 points written to {tmp_path / name}\n")
        assert migbatch("import", tmp_path / name)[1].endswith("0 added, 0 replaced, 4 unchanged\n")
    assert gzip.decompress((tmp_path / "o.csv.gz").read_bytes()) == (tmp_path / "o.csv").read_bytes()
    first = (tmp_path / "o.csv.gz").read_bytes()
    migbatch("export", tmp_path / "o.csv.gz")
    assert (tmp_path / "o.csv.gz").read_bytes() == first
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
    assert migbatch("export")[1] == (tmp_path / "o.csv").read_text()
    assert migbatch("export", "--model", "ResNet50", "--kind", "infer")[1].count("\n") == 4


def test_file_that_cannot_be_written_is_named_by_export(migbatch, table, tmp_path):
    migbatch("import", table)
    path = tmp_path / f"{'x' * 230}.csv"  # too long with what a temporary file's name adds
    code, out, err = migbatch("export", path)
    assert (code, out) == (1, "")
    assert err == f"migbatch: error: cannot write {path}: File name too long: choose another file\n"
    code, out, err = migbatch("export", "/nowhere/t.csv")
    assert (code, out) == (1, "")
    assert err == "migbatch: error: no such directory: /nowhere: create it, or choose another file\n"


def test_export_of_nothing_writes_no_file(migbatch, tmp_path):
    code, _, err = migbatch("export", tmp_path / "o.csv")
    assert code == 1 and "no such points" in err
    assert not (tmp_path / "o.csv").exists()


def test_list_shows_models_with_their_points(migbatch, table):
    migbatch("import", table)
    code, out, _ = migbatch("list", "-P")
    assert code == 0
    assert out.splitlines() == [
        "Model|Kind|GPU|Profiles|Batches|Inputs|Points|Ran|Sources",
        "bert|train|a100|7g.80gb|8|-|1|1|here",
        "resnet50|infer|a100|1g.10gb,7g.80gb|8,512|-|3|2|here",
    ]
    assert len(migbatch("list", "-n", "--kind", "train")[1].splitlines()) == 1
    (model,) = json.loads(migbatch("list", "--json", "--model", "BERT")[1])["models"]
    assert (model["batches"], model["points"], model["with_memory"]) == ([8], 1, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("import",), 2, "Missing argument"),
        (("import", "/nowhere"), 2, "does not exist"),
        (("import", "--source", "", "/"), 2, "printable"),
        (("export", "t.txt"), 2, "must end in .csv"),
        (("list", "--kind", "think"), 2, "serve"),
    ],
)
def test_wrong_usage_is_a_one_line_error_and_exit_2(migbatch, arguments, code, message):
    got, out, err = migbatch(*arguments)
    assert (got, out) == (code, "")
    assert message in err and err.count("\n") == 1


def test_import_does_not_create_the_database(migbatch, table, tmp_path):
    """The daemon could not write to a file that root created."""
    (tmp_path / "db").unlink()
    for command in (("import", table), ("list",)):
        code, _, err = migbatch(*command)
        assert code == 1 and "migbatchd creates it at its first start, where [store] url of migbatch.toml says" in err
        assert "MIGBATCH_CONFIG" in err and "--db" not in err and "MIGBATCH_DB" not in err
    assert not (tmp_path / "db").exists()


HEAD = "gpu,model,kind,profile,compute_slices,memory_slices,batch,input_size,latency_s,memory_mib,source\n"
ROW = "NVIDIA A100-SXM4-80GB,resnet50,infer,2g.20gb,2,2,32,224,%s,%s,here\n"


def test_impossible_measurement_is_refused_with_its_line_number(migbatch, tmp_path, url):
    path = tmp_path / "wrong.csv"
    rows = ROW % (0.02, 3000), ROW.replace("32", "64") % (0.00002, 3000), ROW.replace("32", "8") % (0.01, 1)
    path.write_text(HEAD + "".join(rows))
    code, out, err = migbatch("import", path)
    assert (code, out) == (1, "")
    assert f"{path}:3: cannot be: " in err and "TFLOPS" in err
    assert f"{path}:4: cannot be: memory_mib 1 is less than the weights of resnet50" in err
    with open_store(url) as store:
        assert store.measurements() == []


def test_measurement_that_all_others_contradict_is_named(migbatch, tmp_path):
    path = tmp_path / "one.csv"
    seconds = {1: 0.012, 2: 0.013, 4: 0.017, 8: 0.4, 16: 0.045, 32: 0.09, 64: 0.18, 128: 0.36}
    rows = (ROW.replace("32", str(batch)) % (time, 3000 + 10 * batch) for batch, time in seconds.items())
    path.write_text(HEAD + "".join(rows))
    code, _, err = migbatch("import", path)
    assert code == 0
    assert (
        "notice: contradicted by the other points of its model: the time of resnet50 (infer) on "
        "NVIDIA A100-SXM4-80GB, 2g.20gb, batch 8; kept, but predictions do not use it\n" in err
    )
    assert err.count("contradicted by") == 1


def test_unusual_measurement_is_imported_with_a_notice(migbatch, tmp_path):
    path = tmp_path / "slow.csv"
    path.write_text(HEAD + "".join(ROW.replace("32", str(batch)) % (0.6 * batch, 3000) for batch in (1, 8, 32)))
    code, out, err = migbatch("import", path)
    assert (code, out) == (0, "3 points of 1 model: 3 added, 0 replaced, 0 unchanged\n")
    assert (
        "notice: unusual: resnet50 (infer) on NVIDIA A100-SXM4-80GB: at 3 of 3 points (first: 2g.20gb, batch 1) "
        in (err)
    )
    assert "times the value expected from all other data" in err and "if they are wrong" in err
    code, out, _ = migbatch("import", "--json", path)
    assert any("unusual" in notice for notice in json.loads(out)["notices"])
