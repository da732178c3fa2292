"""Small copies of the laboratories' folders: each pitfall of their tables has a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_migbatch.profiling.csvfile import TableError
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.table import read_folder, scan

STACKED = "model,gpc,batch,procs,throughput_per_s,latency_s"
STEPS = "slice,model,batch,epochs_logged,steps_logged,first_step_s,mean_s,p50_s,p05_s,p95_s,p99_s"
RESOURCES = "model,batch,memory_mib,power_w,mem_util_pct,sm_util_pct"
TEXT80 = ",model_name,batch_size,seq_length,latency,latency_std,throughput,start_timestamp,end_timestamp,mig_profile"
IMAGE80 = TEXT80.replace("seq_length,", "")
TEXT40 = "model_name,total_params,seq_length,batch_size,latency,latency_std,throughput,start_timestamp,end_timestamp"
DCGM = ",gract_mean,gract_std,fb_used_mean,fb_used_std"
BERT = "bert-base-multilingual-cased,177853440"


def put(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def only(rows: list[Measurement], **wanted: object) -> Measurement:
    (found,) = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    return found


class TestParvaGPU:
    @pytest.fixture
    def rows(self, tmp_path: Path) -> list[Measurement]:
        put(
            tmp_path / "any name.csv",
            STACKED,
            "bert,1,1,1,74.408,0.013",
            "bert,1,1,4,31.14,0.032",
            "bert,1,1,5,0,0",
            "inceptionv3,7,2,1,200,0.01",
            "mobilenetv2,3,2,1,200,0.01",
            "newnet,4,2,1,200,0.01",
        )
        put(tmp_path / "SLO" / "SLO_req_rate.csv", "19,353,N/A", "69,1091,949")
        return read_folder(tmp_path)

    def test_throughput_is_the_sum_over_all_processes(self, rows: list[Measurement]) -> None:
        four = only(rows, model="bert-large", procs=4)
        assert four.throughput_per_s == pytest.approx(4 * 31.14)
        assert four.rate == pytest.approx(4 * 31.14)

    def test_time_is_computed_from_throughput_not_from_rounded_latency(self, rows: list[Measurement]) -> None:
        assert only(rows, model="bert-large", procs=1).seconds == pytest.approx(1 / 74.408)
        assert only(rows, model="bert-large", procs=4).seconds == pytest.approx(1 / 31.14)

    def test_zero_rows_are_left_out_and_not_taken_as_out_of_memory(self, rows: list[Measurement]) -> None:
        assert all(row.ran for row in rows)
        assert not [row for row in rows if row.procs == 5]

    def test_model_names_are_mapped_to_the_actual_networks(self, rows: list[Measurement]) -> None:
        bert = only(rows, model="bert-large", procs=1)
        assert (bert.family, bert.input_size, bert.params) == ("encoder", 128, 335e6)
        assert 75e9 < (bert.flops_per_item or 0) < 85e9
        assert only(rows, model="inception-v3").input_size == 224
        assert only(rows, model="mobilenet-v2").family == "cnn"
        other = only(rows, model="newnet")
        assert (other.family, other.input_size, other.params, other.flops_per_item) == ("", None, None, None)

    def test_slices_are_those_of_an_a100_80gb(self, rows: list[Measurement]) -> None:
        found = {(row.profile, row.compute_slices, row.memory_slices, row.sm_count) for row in rows}
        assert found == {
            ("1g.10gb", 1, 1, 14),
            ("3g.40gb", 3, 4, 42),
            ("4g.40gb", 4, 4, 56),
            ("7g.80gb", 7, 8, 98),
        }

    def test_model_is_read_from_the_raw_file_name(self, tmp_path: Path) -> None:
        put(
            tmp_path / "prof_data" / "resnet50.csv",
            "Mig instance,Batch size,Workload Number,Throughput,Latency",
            "7,32,2,1000,0.032",
            "7,32,3,0,0",
        )
        put(tmp_path / "stacked.csv", STACKED, "resnet50,7,32,2,1000,0.032", "resnet50,7,32,3,0,0")
        found = scan([tmp_path])
        (row,) = found.rows
        assert (row.model, row.throughput_per_s, row.latency_s) == ("resnet50", 2000, 0.032)
        assert found.notices[0].startswith("1 points")

    def test_invalid_lines_are_reported_by_line_and_column(self, tmp_path: Path) -> None:
        put(tmp_path / "p.csv", STACKED, "bert,5,1,1,74,0.013", "bert,1,1.5,1,74,0.013", "bert,1,1,1,fast,0.013")
        with pytest.raises(TableError) as caught:
            read_folder(tmp_path)
        for line, what in ((2, "gpc"), (3, "batch"), (4, "throughput_per_s")):
            assert f"p.csv:{line}: {what}" in str(caught.value)


class TestMISO:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        put(
            tmp_path / "steps.csv",
            STEPS,
            "1g.5gb,resnet,64,1,100,6.4,0.05,0.049,0.04,0.06,0.07",
            "7g.40gb,resnet,64,1,100,5.7,0.02,0.019,0.01,0.03,0.04",
            "2g.10gb,bert,2,1,100,13.2,0.12,0.12,0.1,0.13,0.14",
            "7g.40gb,bert,2,1,100,13.3,0.05,0.05,0.04,0.06,0.07",
            "7g.40gb,bert,8,1,100,13.3,0.12,0.12,0.1,0.13,0.14",
        )
        put(tmp_path / "use.csv", RESOURCES, "resnet,64,9933.0,94,4,41", "bert,2,6347.0,160,33,69", "dummy,32,1,1,1,1")
        for name, lists in (
            ("1g_5gb", {"resnet": [64], "bert": []}),
            ("2g_10gb", {"resnet": [64], "bert": [2]}),
            ("7g_40gb", {"resnet": [64], "bert": [2, 8]}),
        ):
            put(tmp_path / "raw" / "configs" / f"{name}.json", json.dumps(lists))
        return tmp_path

    def test_training_points_leave_out_the_first_step(self, folder: Path) -> None:
        row = only(read_folder(folder), model="resnet50", profile="1g.5gb")
        assert (row.kind, row.gpu, row.latency_s, row.latency_p99_s) == ("train", "a100-40gb", 0.05, 0.07)
        assert row.throughput_per_s == pytest.approx(1280)

    def test_model_names_are_mapped_to_their_own_variants(self, folder: Path) -> None:
        """Its "bert" is the base model at 512 tokens, its "resnet" takes images of 32 pixels."""
        rows = read_folder(folder)
        assert {(row.model, row.input_size) for row in rows} == {("bert-base", 512), ("resnet50", 32)}
        flops = only(rows, model="resnet50", profile="7g.40gb").flops_per_item
        assert flops == pytest.approx(2 * 4.09e9 * (32 / 224) ** 2)

    def test_batches_missing_from_the_list_of_a_slice_did_not_run(self, folder: Path) -> None:
        idle = {(row.model, row.batch, row.profile) for row in read_folder(folder) if not row.ran}
        assert idle == {("bert-base", 2, "1g.5gb"), ("bert-base", 8, "1g.5gb"), ("bert-base", 8, "2g.10gb")}

    def test_memory_that_a_smaller_slice_disproves_is_left_out(self, folder: Path) -> None:
        found = scan([folder])
        known = {(row.model, row.batch, row.profile): row.memory_mib for row in found.rows if row.memory_mib}
        assert known == {("bert-base", 2, "7g.40gb"): 6347.0}
        assert any(notice.startswith("1 memory figures") for notice in found.notices)

    def test_missing_batch_lists_mark_no_point_as_not_run(self, folder: Path) -> None:
        for path in (folder / "raw" / "configs").iterdir():
            path.unlink()
        found = scan([folder])
        assert all(row.ran for row in found.rows)
        assert any("configs/1g_5gb.json" in notice for notice in found.notices)

    def test_malformed_batch_list_is_an_error(self, folder: Path) -> None:
        put(folder / "raw" / "configs" / "3g_20gb.json", '{"bert": ["2"]}')
        with pytest.raises(TableError, match=r"3g_20gb\.json: is not a list of batches"):
            read_folder(folder)


class TestMIGPerf:
    def test_throughput_is_computed_from_latency_not_from_its_column(self, tmp_path: Path) -> None:
        """On the 80 GB card the column holds 3000 / latency."""
        put(
            tmp_path / "A100-80g" / "infer" / "nlp" / "nlp_infer.csv",
            TEXT80,
            "0,bert-base,1,64,6.31,0.14,475.07,1661746519,1661746640,7g.80gb",
            "0,bert-base,32,64,26.34,0.02,113.89,1661747520,1661747641,7g.80gb",
        )
        batch_1, batch_32 = read_folder(tmp_path)
        assert batch_1.throughput_per_s == pytest.approx(1000 / 6.31)
        assert (batch_32.throughput_per_s, batch_32.latency_s) == (pytest.approx(32000 / 26.34), 0.02634)
        assert (batch_32.model, batch_32.kind, batch_32.gpu, batch_32.input_size) == (
            "bert-base",
            "infer",
            "a100-80gb",
            64,
        )

    def test_copies_of_a_measurement_are_merged_and_repetitions_averaged(self, tmp_path: Path) -> None:
        """The file named by number has no memory column, the one by size has; the length sweep repeats one point."""
        below = tmp_path / "A100-40g" / "infer_bsz" / "bert-base"
        put(below / "bert_MIG_profile_0.csv", TEXT40, f"{BERT},64,32,10.0,0.1,1,1656797167,1656797287")
        put(
            below / "bert_infer_40g_bsz.csv",
            "," + TEXT40 + DCGM,
            f"0,{BERT},64,32,10.0,0.1,1,1656797167,1656797287,0.1,0.1,2599.983,0.2",
        )
        put(
            tmp_path / "A100-40g" / "infer_seq" / "bert-base" / "bert-base_seq.csv",
            "Unnamed: 0," + TEXT40 + DCGM + ",instance_memory",
            f"1,{BERT},64,32,12.0,0.1,1,1656773604,1656773724,0.1,0.1,2700.017,0.2,40",
        )
        (row,) = read_folder(tmp_path)
        assert (row.profile, row.latency_s, row.memory_mib) == ("7g.40gb", 0.011, 2650.0)
        assert (row.model, row.family, row.params) == ("bert-base-multilingual-cased", "encoder", 177853440)

    @pytest.mark.parametrize(
        ("name", "profile"),
        [("x_MIG_profile_19.csv", "1g.5gb"), ("x_infer_10g_bsz.csv", "2g.10gb"), ("x_05g_bsz.csv", "1g.5gb"),
         ("x_MIG_profile_9.csv", "3g.20gb"), ("x_infer_20g_seq.csv", "3g.20gb")],
    )  # fmt: skip
    def test_slice_is_read_from_the_file_name(self, tmp_path: Path, name: str, profile: str) -> None:
        put(tmp_path / "A100-40g" / "infer_bsz" / name, TEXT40, f"{BERT},64,32,10.0,0.1,1,1656797167,1656797287")
        assert [row.profile for row in read_folder(tmp_path)] == [profile]

    def test_zero_row_did_not_fit_unless_the_point_ran_elsewhere(self, tmp_path: Path) -> None:
        below = tmp_path / "A100-80g" / "train" / "cv"
        put(
            below / "integrated_result.csv",
            IMAGE80 + DCGM,
            "0,resnet50,128,0,0,0,0,0,1g.10gb,0,0,0,0",
            "0,resnet50,64,0,0,0,0,0,1g.10gb,0,0,0,0",
        )
        put(below / "cv_train.csv", IMAGE80, "0,resnet50,64,485.5,0.08,131.8,1661702795,1661702916,1g.10gb")
        rows = read_folder(tmp_path)
        assert {(row.batch, row.ran) for row in rows} == {(128, False), (64, True)}
        assert {(row.kind, row.input_size, row.memory_mib) for row in rows} == {("train", 224, None)}

    def test_finetuning_model_names_are_mapped(self, tmp_path: Path) -> None:
        put(
            tmp_path / "A100-40g" / "finetune_vit" / "vit_finetune.csv",
            "Unnamed: 0," + IMAGE80.strip(",").replace(",mig_profile", "") + DCGM + ",mig",
            "0,vision_transformer,8,157.7,0.04,50.73,1657289532,1657289653,0.9,0.1,3934.0,0.0,5",
            "0,resnet50_moco,8,100.9,0.02,79.3,1657288019,1657288140,0.9,0.1,2564.0,0.0,5",
        )
        vit, moco = read_folder(tmp_path)
        assert (vit.model, vit.family, vit.kind, vit.profile, vit.memory_mib) == (
            "vit-b-16", "vit", "train", "1g.5gb", 3934.0,
        )  # fmt: skip
        assert (moco.model, moco.source) == ("resnet50", "MIGPerf fine-tuning")

    def test_sequence_lengths_beyond_the_texts_are_left_out(self, tmp_path: Path) -> None:
        put(
            tmp_path / "A100-80g" / "infer" / "nlp" / "nlp_infer_seq.csv",
            TEXT80,
            "0,bert-base,32,128,49.82,1.74,60.21,1661748552,1661748673,7g.80gb",
            "0,bert-base,32,512,82.4,33.29,36.41,1661749038,1661749159,7g.80gb",
        )
        found = scan([tmp_path])
        assert [row.input_size for row in found.rows] == [128]
        assert any(notice.startswith("1 points of MIGPerf are skipped") for notice in found.notices)

    def test_flops_of_an_encoder_grow_with_its_tokens(self, tmp_path: Path) -> None:
        put(
            tmp_path / "A100-40g" / "infer_seq" / "x_05g_seq.csv",
            TEXT40,
            f"{BERT},64,32,10.0,0.1,1,1656797167,1656797287",
            f"{BERT},512,32,90.0,0.1,1,1656797367,1656797387",
        )
        short, long = (row.flops_per_item or 0 for row in read_folder(tmp_path))
        assert short == pytest.approx(2 * 85e6 * 64, rel=0.02)
        assert 8 < long / short < 9

    def test_files_in_unknown_folders_are_left_out_with_a_notice(self, tmp_path: Path) -> None:
        line = f"{BERT},64,32,10.0,0.1,1,1656797167,1656797287"
        put(tmp_path / "A100-40g" / "mocel_compare" / "x_05g_bsz.csv", TEXT40, line)
        put(tmp_path / "elsewhere" / "infer" / "x_05g_bsz.csv", TEXT40, line)
        put(tmp_path / "A100-40g" / "infer_bsz" / "x_05g_bsz.csv", TEXT40, line)
        found = scan([tmp_path])
        assert len(found.rows) == 1
        assert any("infer, train or finetune" in notice for notice in found.notices)
        assert any("A100-40g or A100-80g" in notice for notice in found.notices)

    @pytest.mark.parametrize(
        ("name", "line", "message"),
        [
            ("x.csv", f"{BERT},64,32,10.0,0.1,1,1,2", "gives the slice"),
            ("x_05g_bsz.csv", f"{BERT},64,32,slow,0.1,1,1,2", "latency must be a number"),
            ("x_05g_bsz.csv", f"{BERT},64,0,10,0.1,1,1,2", "batch_size must be a whole number"),
        ],
    )
    def test_invalid_lines_are_reported_by_line_and_column(
        self, tmp_path: Path, name: str, line: str, message: str
    ) -> None:
        put(tmp_path / "A100-40g" / "infer_bsz" / name, TEXT40, line)
        with pytest.raises(TableError, match=rf":2: .*{message}"):
            read_folder(tmp_path)


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        (
            STEPS,
            "7g.40gb,resnet,1e10,1,100,5.7,0.02,0.019,0.01,0.03,0.04",
            "batch must be a whole number from 1 to 10^9",
        ),
        (
            STEPS,
            "7g.40gb,resnet,64,1,100,5.7,1e-320,0.019,0.01,0.03,0.04",
            "mean_s must be 0, or between 1e-30 and 1e+30",
        ),
        (STACKED, "resnet50,7,32,1,1e200,0.032", "throughput_per_s must be 0, or between"),
    ],
)
def test_number_out_of_range_is_reported_as_invalid_line(tmp_path: Path, header: str, line: str, message: str) -> None:
    put(tmp_path / "s.csv", header, line)
    with pytest.raises(TableError) as caught:
        read_folder(tmp_path)
    assert f"s.csv:2: {message}" in str(caught.value)


def test_parent_folder_is_read_with_several_laboratories(tmp_path: Path) -> None:
    put(tmp_path / "a" / "p.csv", STACKED, "resnet50,7,32,1,1000,0.032")
    put(tmp_path / "b" / "s.csv", STEPS, "7g.40gb,resnet,64,1,100,5.7,0.02,0.019,0.01,0.03,0.04")
    put(tmp_path / "c" / "own.csv", "gpu,model,batch,latency_s", "h200,resnet50,1,0.004")
    put(tmp_path / "d" / "A100-80g" / "infer" / "i.csv", IMAGE80, "0,resnet50,1,5.2,0.1,192,1661684399,2,7g.80gb")
    assert {row.source for row in read_folder(tmp_path)} == {"ParvaGPU", "MISO", "MIGPerf", ""}


def test_single_file_of_a_laboratory_is_refused_with_advice(tmp_path: Path) -> None:
    put(tmp_path / "s.csv", STEPS, "7g.40gb,resnet,64,1,100,5.7,0.02,0.019,0.01,0.03,0.04")
    with pytest.raises(TableError, match="file of MISO: give its directory"):
        read_folder(tmp_path / "s.csv")


def test_impossible_rows_are_skipped_for_a_laboratory_and_refused_in_a_table(tmp_path: Path) -> None:
    put(tmp_path / "lab" / "s.csv", STACKED, "bert,1,1,1,74.4,0.013", "vgg16,1,1,1,74.4,0.013")
    put(tmp_path / "t.csv", "gpu,model,batch,latency_s", "a100,bert-large,1,0.1", "a100,vgg16,1,0.1")

    def refuse(row: Measurement) -> str:
        return "too good" if row.model == "vgg16" else ""

    found = scan([tmp_path / "lab"], refuse)
    assert [row.model for row in found.rows] == ["bert-large"]
    assert any("1 rows of" in notice and notice.endswith("skipped: too good") for notice in found.notices)
    with pytest.raises(TableError, match=r"t\.csv:3: cannot be: too good"):
        scan([tmp_path / "t.csv"], refuse)
