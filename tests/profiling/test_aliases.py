"""Tables with the column names, units and cells of others."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.profiling import aliases, statedunits
from slurm_migbatch.profiling.csvfile import TableError
from slurm_migbatch.profiling.measurement import MeasurementError
from slurm_migbatch.profiling.table import read_folder, scan

OUTSIDE = """GPU,Model,MIG Profile,Batch Size,Throughput (img/s),Latency (ms),Memory (GB)
NVIDIA A100-SXM4-80GB,resnet50,1g10gb,8,"1,045.3",7.65,2.1
NVIDIA A100-SXM4-80GB,resnet50,MIG 3g.40gb,8,1900,4.2,
NVIDIA A100-SXM4-80GB,resnet50,full,8,2045,3.9,2
NVIDIA A100-SXM4-80GB,resnet50,1g.10gb,512,OOM,OOM,
"""


def table(folder: Path, text: str) -> Path:
    path = folder / "points.csv"
    path.write_text(text)
    return path


def test_usual_names_units_and_cells_are_read_with_a_notice(tmp_path: Path) -> None:
    found = scan([table(tmp_path, OUTSIDE)])
    assert [(row.profile, row.batch, row.throughput_per_s, row.latency_s, row.memory_mib) for row in found.rows] == [
        ("1g.10gb", 8, 1045.3, 0.00765, 2150.4),
        ("3g.40gb", 8, 1900, 0.0042, None),
        ("", 8, 2045, 0.0039, 2048),
        ("1g.10gb", 512, None, None, None),
    ]
    assert [row.ran for row in found.rows] == [True, True, True, False]
    assert "reading columns mig profile as profile, batch size as batch" in found.notices[0]
    assert read_folder(tmp_path) == list(found.rows)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("gpu,model,batch,latency", r"neither throughput_per_s nor latency_s \(the unit of latency is not known\)"),
        ("gpu,model,batch,latency_ms,latency_us", "duplicate columns: latency_s"),
    ],
)
def test_columns_that_cannot_be_read_are_named(tmp_path: Path, header: str, message: str) -> None:
    path = table(tmp_path, f"{header}\na100-80gb,net,1,{','.join('1' for _ in header.split(',')[3:])}\n")
    with pytest.raises(TableError, match=message):
        scan([path])


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("Peak GPU Memory (GB)", 3072),
        ("gpu_memory_used_mib", 3),
        ("Max VRAM used [MiB]", 3),
        ("Max memory (GB)", None),
        ("Memory usage (GiB)", 3072),
        ("gpu_mem_gb", 3072),
        ("memory.used [MiB]", 3),
        ("Frame buffer used [MiB]", 3),
        ("fb_used_mb", 3),
        ("max_memory_allocated_mb", None),
        ("gpu_memory_percent", None),
    ],
)
def test_memory_is_read_under_its_usual_names(tmp_path: Path, name: str, mib: float | None) -> None:
    (row,) = scan([table(tmp_path, f"gpu,model,batch,latency_ms,{name}\na100-80gb,net,8,5,3\n")]).rows
    assert row.memory_mib == mib


def test_part_of_a_slice_in_a_column_that_is_not_read_is_refused(tmp_path: Path) -> None:
    text = "gpu,model,batch,latency_ms,GI Profile,CI Profile\na100-80gb,net,8,5,2g.20gb,{}\n"
    with pytest.raises(TableError, match=r"ci profile is 1c\.2g\.20gb: leave out what ran on a part of a GPU instance"):
        scan([table(tmp_path, text.format("1c.2g.20gb"))])
    for whole in ("2c.2g.20gb", "2g.20gb", ""):
        assert [row.profile for row in scan([table(tmp_path, text.format(whole))]).rows] == ["2g.20gb"]


@pytest.mark.parametrize("name", ["peak_memory_bytes", "GPU memory used (bytes)"])
def test_memory_is_read_in_bytes(tmp_path: Path, name: str) -> None:
    (row,) = scan([table(tmp_path, f"gpu,model,batch,latency_ms,{name}\na100-80gb,net,8,5,2147483648\n")]).rows
    assert row.memory_mib == 2048


@pytest.mark.parametrize(
    "cell", ["OOM", "CUDA OOM", "CUDA out of memory", "OutOfMemoryError", "oom-killed", "FAILED (OOM)", "error: oom"]
)
def test_point_whose_figure_says_that_memory_ran_out_did_not_run(tmp_path: Path, cell: str) -> None:
    (row,) = scan([table(tmp_path, f"gpu,model,batch,latency_ms,memory_mb\na100-80gb,net,512,{cell},\n")]).rows
    assert not row.ran
    for other in ("N/A", "room", "1oom", "failed", "5 (no oom)"):
        with pytest.raises(TableError, match=f"must be a number, not {re.escape(other)}"):
            scan([table(tmp_path, f"gpu,model,batch,latency_ms\na100-80gb,net,512,{other}\n")])


@pytest.mark.parametrize("other", ["N/A", "-", "NaN", "failed"])
def test_speed_without_a_number_is_not_advised_to_be_left_empty_where_it_is_the_only_one(
    tmp_path: Path, other: str
) -> None:
    with pytest.raises(TableError, match=f"(?i)not {other}: .* write OOM if memory ran out, else leave the row out"):
        scan([table(tmp_path, f"gpu,model,batch,latency_ms\na100-80gb,net,512,{other}\n")])


@pytest.mark.parametrize("speed", ["", "0", "0.0"])
@pytest.mark.parametrize("name", ["Status", "error"])
def test_point_that_failed_for_another_reason_than_memory_is_refused(tmp_path: Path, name: str, speed: str) -> None:
    text = f"gpu,model,batch,latency_ms,{name}\na100-80gb,net,512,{speed},{{}}\n"
    for reason in ("timeout", "skipped", "failed"):
        with pytest.raises(
            TableError, match=f"{name.lower()} is {reason}, but a row without a speed means that memory"
        ):
            scan([table(tmp_path, text.format(reason))])
    for reason in ("OOM", "CUDA out of memory", ""):
        assert [row.ran for row in scan([table(tmp_path, text.format(reason))]).rows] == [False]
    ran = f"gpu,model,batch,latency_ms,{name}\na100-80gb,net,8,5,ok\na100-80gb,net,512,OOM,failed\n"
    assert [row.ran for row in scan([table(tmp_path, ran)]).rows] == [True, False]


@pytest.mark.parametrize("micro", ["\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}"])
def test_micro_sign_of_a_unit_is_read(tmp_path: Path, micro: str) -> None:
    (row,) = scan([table(tmp_path, f"gpu,model,batch,Latency ({micro}s)\na100-80gb,net,1,5200\n")]).rows
    assert row.latency_s == 0.0052


@pytest.mark.parametrize(
    ("name", "cell", "column", "figure"),
    [
        ("latency (msec)", "52", "latency_s", 0.052),
        ("Avg Latency (milliseconds)", "52", "latency_s", 0.052),
        ("latency_mean_us", "52000", "latency_s", 0.052),
        ("latency [sec]", "0.052", "latency_s", 0.052),
        ("P50 (ms)", "52", "latency_s", 0.052),
        ("Latency p50 [us]", "52000", "latency_s", 0.052),
        ("median_latency_ms,latency_p99_ms", "52,90", "latency_s", 0.052),
        ("p50_ms,mean_latency_ms", "50,52", "latency_s", 0.052),
        ("Throughput (infer/sec)", "750", "throughput_per_s", 750.0),
        ("Inferences/Second", "750", "throughput_per_s", 750.0),
        ("images/sec", "750", "throughput_per_s", 750.0),
        ("FPS", "750", "throughput_per_s", 750.0),
        ("latency (ms) mean", "52", "latency_s", 0.052),
        ("latency_s_mean,latency_s_std", "0.052,0.01", "latency_s", 0.052),
        ("latency (us) p99,throughput", "90000,750", "latency_p99_s", 0.09),
        ("latency_ms,Used memory (GB)", "52,2", "memory_mib", 2048.0),
        ("latency_ms,s/img", "52,0.01", "throughput_per_s", None),
        ("latency_ms", "52.5 \N{PLUS-MINUS SIGN} 0.3", "latency_s", 0.0525),
        ("latency_ms", "52+/-1.5", "latency_s", 0.052),
        ("latency_ms,requests/s", "52,20", "throughput_per_s", None),
    ],
)
def test_usual_words_for_units_are_read(tmp_path: Path, name: str, cell: str, column: str, figure: float) -> None:
    (row,) = scan([table(tmp_path, f"accelerator,model,batch,{name}\na100-80gb,net,1,{cell}\n")]).rows
    assert getattr(row, column) == pytest.approx(figure)


@pytest.mark.parametrize("cell", ["3x640x480", "(8, 3, 640, 480)", "640"])
def test_shape_of_images_is_read_as_their_size(tmp_path: Path, cell: str) -> None:
    (row,) = scan([table(tmp_path, f'gpu,model,batch,latency_s,Input Shape\na100-80gb,net,8,0.1,"{cell}"\n')]).rows
    assert row.input_size == 640


def test_columns_of_public_benchmarks_are_read(tmp_path: Path) -> None:
    timm = "gpu,model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,infer_gmacs"
    (row,) = scan([table(tmp_path, f"{timm}\na100-80gb,net,224,2560,100,256,4.1\n")]).rows
    assert (row.batch, row.input_size, row.throughput_per_s, row.latency_s) == (256, 224, 2560.0, 0.1)
    assert row.flops_per_item == 8.2e9
    vllm = "gpu,model,kind,batch,input_len,output_len,throughput,mean_ttft_ms,median_ttft_ms,p99_ttft_ms,median_tpot_ms"
    (row,) = scan([table(tmp_path, f"{vllm}\nh100-80gb,net,serve,8,512,256,2,45,40,90,8\n")]).rows
    assert (row.input_size, row.output, row.ttft_s, row.ttft_p99_s, row.tpot_s) == (512, 256, 0.04, 0.09, 0.008)


@pytest.mark.parametrize(
    ("columns", "cells", "precision"),
    [
        ("dtype", "torch.bfloat16", "bf16"),
        ("Dtype", "float16", "fp16"),
        ("torch_dtype", "auto", ""),
        ("precision", "Q4_K_M", "q4-k-m"),
        ("quantization", "fp8_e4m3", "fp8"),
        ("quantization", "None", ""),
        ("dtype,quantization", "bfloat16,awq", "awq"),
        ("quantization,dtype", "awq,bfloat16", "awq"),
        ("dtype,quantization", "bfloat16,none", "bf16"),
        ("dtype,quantization", "bfloat16,", "bf16"),
        ("precision,dtype", "int8,float16", "int8"),
    ],
)
def test_data_type_and_quantization_are_read_as_the_precision(
    tmp_path: Path, columns: str, cells: str, precision: str
) -> None:
    text = f"gpu,model,batch,latency_s,{columns}\nh100-80gb,net,1,0.1,{cells}\n"
    (row,) = scan([table(tmp_path, text)]).rows
    assert row.precision == precision


@pytest.mark.parametrize(
    ("cell", "engine"),
    [
        ("tensorrt-llm", "trtllm"),
        ("TensorRT-LLM", "trtllm"),
        ("TRT-LLM 0.15.0", "trtllm"),
        ("vLLM v0.6.3.post1", "vllm"),
        ("llama.cpp", "llamacpp"),
        ("Text Generation Inference", "tgi"),
        ("lmdeploy", "lmdeploy"),
        ("", ""),
    ],
)
def test_engines_are_read_under_the_names_that_they_have_themselves(tmp_path: Path, cell: str, engine: str) -> None:
    text = f"gpu,model,kind,batch,latency_s,engine\nh100-80gb,llama-3.1-8b,serve,1,0.1,{cell}\n"
    (row,) = scan([table(tmp_path, text)]).rows
    assert row.engine == engine


@pytest.mark.parametrize("name", ["mps_percentage", "CUDA MPS active thread percentage", "MPS (%)"])
def test_row_of_a_part_of_the_gpu_by_mps_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TableError, match="leave out what MPS limits to a part of the GPU"):
        scan([table(tmp_path, f"gpu,model,batch,latency_s,{name}\na100-80gb,net,1,0.1,50\n")])
    for whole in ("100", "", "0"):
        assert scan([table(tmp_path, f"gpu,model,batch,latency_s,{name}\na100-80gb,net,1,0.1,{whole}\n")]).rows


@pytest.mark.parametrize("unit", ["%", "in %", "% of peak"])
def test_percentages_are_not_read_as_counts_or_rates(tmp_path: Path, unit: str) -> None:
    header = f"gpu,model,batch,latency_s,Throughput ({unit}),SMs ({unit}),Processes ({unit})"
    (row,) = scan([table(tmp_path, f"{header}\na100-80gb,net,1,0.1,55,14,3\n")]).rows
    assert (row.throughput_per_s, row.sm_count, row.procs) == (None, None, 1)
    with pytest.raises(TableError, match="neither throughput_per_s nor latency_s"):
        scan([table(tmp_path, f"gpu,model,batch,Throughput ({unit})\na100-80gb,net,1,55\n")])


@pytest.mark.parametrize("name", ["#Proc", "# Processes", "Num. proc", "nproc"])
def test_processes_are_read_under_their_usual_names(tmp_path: Path, name: str) -> None:
    (row,) = scan([table(tmp_path, f"gpu,model,batch,latency_s,{name}\na100-80gb,net,8,0.1,2\n")]).rows
    assert (row.procs, row.rate) == (2, 160.0)


@pytest.mark.parametrize(
    ("name", "cell", "size"),
    [
        ("seq_len", "384", 384),
        ("imgsz", "640", 640),
        ("SeqLen", "384", 384),
        ("prompt_len", "384", 384),
        ("Image Size", "224x320", 320),
        ("sequence_length", "", None),
        ("input_size", "3x224x320", 320),
        ("input_size", "320x224x3", 320),
        ("input_size", "8x3x224x224", 224),
        ("input_size", "224px", 224),
        ("input_size", "384 tokens", 384),
        ("input_size", '"(3, 224, 320)"', 320),
        ("input_size", '"[8, 3, 224, 224]"', 224),
        ("input_size", '"(224,224,3)"', 224),
        ("input_size", '"3,224,224"', 224),
        ("input_size", '"512,512"', 512),
        ("seq_len", '"131,072"', 131072),
        ("seq_len", '"1,048,576"', 1048576),
    ],
)
def test_input_sizes_under_usual_names_distinguish_points(
    tmp_path: Path, name: str, cell: str, size: int | None
) -> None:
    lines = f"a100-80gb,net,1,0.01,64\na100-80gb,net,1,0.1,{cell}\n"
    found = scan([table(tmp_path, f"gpu,model,batch,latency_s,{name}\n{lines}")]).rows
    assert [(row.input_size, row.latency_s) for row in found] == [(64, 0.01), (size, 0.1)]


@pytest.mark.parametrize("cell", ["1g.10gb", "MIG 1g.10gb", "1g10gb", "1g.10gb+me"])
def test_slice_in_a_column_that_is_not_read_is_refused(tmp_path: Path, cell: str) -> None:
    path = table(tmp_path, f"gpu,model,batch,latency_s,instance\na100-80gb,net,1,0.1,{cell}\n")
    with pytest.raises(TableError, match=r"points\.csv:2: instance has the slice .* call that column profile"):
        scan([path])
    path = table(tmp_path, f"gpu,model,batch,latency_s,instance,profile\na100-80gb,net,1,0.1,{cell},2g.20gb\n")
    assert [row.profile for row in scan([path]).rows] == ["2g.20gb"]


def test_repeated_points_that_a_column_that_is_not_read_distinguishes_give_a_notice(tmp_path: Path) -> None:
    header = "gpu,model,batch,latency_s,mode,run,power_w\n"
    path = table(
        tmp_path,
        f"{header}a100-80gb,net,1,0.1,fp32,1,200\na100-80gb,net,1,0.03,fp16,1,200\na100-80gb,net,2,0.2,fp32,1,210\n",
    )
    (notice,) = [text for text in scan([path]).notices if "repeat points" in text]
    assert "2 lines (first 2) repeat points with other speeds" in notice
    assert "and differ in mode: if that is the input size, kind, precision" in notice
    steady = f"{header}a100-80gb,net,1,0.1,fp32,1,200\na100-80gb,net,1,0.11,fp32,2,190\n"
    assert not [text for text in scan([table(tmp_path, steady)]).notices if "repeat points" in text]


def test_columns_of_the_common_table_are_not_replaced() -> None:
    header = ("latency_ms", "latency_s", "batch", "batch_size", "note")
    assert aliases.renamed(header) == header


@pytest.mark.parametrize(
    ("separator", "text", "seconds"),
    [
        (";", "0,123", 0.123),
        (";", "5,125", 5.125),
        (";", "-1,5e-3", None),
        (";", "1561,0", 1561.0),
        (";", "1,234,567", 1234567.0),
        (";", "1,234.5", 1234.5),
        (";", "1.5e-2", 0.015),
        (",", '"1,045.3"', 1045.3),
        (",", '"5,125"', 5125.0),
        (",", '"0,123"', None),
        ("\t", "0,123", 0.123),
        ("\t", "5,1", 5.1),
        ("\t", "1,234,567", 1234567.0),
        ("\t", "5,125", None),
        ("|", "5,125", None),
    ],
)
def test_comma_of_a_number_is_a_decimal_comma_where_cells_are_separated_by_another_character(
    tmp_path: Path, separator: str, text: str, seconds: float | None
) -> None:
    path = table(tmp_path, separator.join(("gpu", "model", "batch", "latency_s")) + "\n")
    path.write_text(path.read_text() + separator.join(("a100-80gb", "net", "1", text)) + "\n")
    if seconds is None:
        with pytest.raises(TableError, match=r"points\.csv:2: latency_s "):
            scan([path])
    else:
        assert [row.latency_s for row in scan([path]).rows] == [seconds]


def test_comma_that_may_be_either_is_refused_with_both_readings(tmp_path: Path) -> None:
    path = table(tmp_path, "gpu\tmodel\tbatch\tlatency (ms)\na100-80gb\tnet\t1\t5,125\n")
    with pytest.raises(TableError, match=r"latency \(ms\) 5,125 may be 5125 or 5\.125: write it without a comma"):
        scan([path])


@pytest.mark.parametrize(
    ("name", "gpu", "profile"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3", "1g.10gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "NVIDIA H100 80GB HBM3", "1g.10gb+me"),
        ("NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "NVIDIA-A100-SXM4-40GB", "3g.20gb"),
        ("NVIDIA A100-SXM4-80GB (MIG 2g20gb)", "NVIDIA A100-SXM4-80GB", "2g.20gb"),
        ("a100-80gb_4g.40gb", "a100-80gb", "4g.40gb"),
        ("NVIDIA A10G 24GB", "NVIDIA A10G 24GB", ""),
        ("NVIDIA GH200 480GB", "NVIDIA GH200 480GB", ""),
    ],
)
def test_profile_in_the_name_of_the_gpu_is_read_from_there(tmp_path: Path, name: str, gpu: str, profile: str) -> None:
    for header, cells in (("", ""), (",profile", ","), (",profile", f",{profile}"), (",mig slice", f",MIG {profile}")):
        if profile or cells in ("", ","):
            found = scan([table(tmp_path, f"gpu,model,batch,latency_s{header}\n{name},net,1,0.1{cells}\n")])
            (row,) = found.rows
            assert (row.gpu, row.profile) == (gpu, profile)
            assert [notice for notice in found.notices if "in 1 lines (first 2) the slice is read" in notice] == (
                [f"{tmp_path / 'points.csv'}: in 1 lines (first 2) the slice is read from the GPU's name: {name}"]
                if profile
                else []
            )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb,2g.20gb", "gpu names the slice 1g.10gb, and profile is 2g.20gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb,full", "gpu names the slice 1g.10gb, and profile is full"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb,1g", "profile: '1g' is an incomplete profile"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb,", "profile: '1c.3g.40gb' is a part of a GPU instance"),
        ("MIG 1g.10gb,", r"gpu names only a slice, not the GPU: write the GPU there .* and 1g\.10gb in profile"),
        ("1g.10gb,1g.10gb", "gpu names only a slice"),
    ],
)
def test_slice_in_the_name_of_the_gpu_that_leaves_a_doubt_is_refused(tmp_path: Path, line: str, message: str) -> None:
    gpu, _, profile = line.rpartition(",")
    with pytest.raises(TableError, match=rf"points\.csv:2: {message}"):
        scan([table(tmp_path, f"gpu,model,batch,latency_s,profile\n{gpu},net,1,0.1,{profile}\n")])


@pytest.mark.parametrize("column", ["MIG", "MIG Type", "mig_partition", "GPU Instance Profile", "mig-instance-type"])
@pytest.mark.parametrize(
    ("cell", "profile"), [("1g.10gb", "1g.10gb"), ("MIG 3g.40gb", "3g.40gb"), ("disabled", ""), ("", ""), ("no", "")]
)
def test_slice_is_read_from_columns_that_are_called_after_it(
    tmp_path: Path, column: str, cell: str, profile: str
) -> None:
    path = table(tmp_path, f"gpu,model,batch,latency_s,{column}\na100-80gb,net,1,0.1,{cell}\n")
    assert [row.profile for row in scan([path]).rows] == [profile]


@pytest.mark.parametrize(
    ("columns", "cells", "profile", "seconds"),
    [
        ("mig,mig_profile,latency_ms,step_time_ms", "yes,1g.10gb,10,99", "1g.10gb", 0.01),
        ("step_time_s,latency_ms,mig", "99,10,1g.10gb", "1g.10gb", 0.01),
        ("batch_time_s,step_time_s,profile,MIG", "1,2,2g.20gb,enabled", "2g.20gb", 1.0),
    ],
)
def test_usual_name_of_a_column_comes_before_others(
    tmp_path: Path, columns: str, cells: str, profile: str, seconds: float
) -> None:
    path = table(tmp_path, f"gpu,model,batch,{columns}\na100-80gb,net,1,{cells}\n")
    assert [(row.profile, row.latency_s) for row in scan([path]).rows] == [(profile, pytest.approx(seconds))]


@pytest.mark.parametrize(
    ("column", "seconds"),
    [("Step Time (s)", 20.0), ("batch_time_ms", 0.02), ("avg step time [ms]", 0.02), ("time per batch (us)", 2e-5)],
)
def test_time_of_a_batch_is_read_under_the_names_of_trainers(tmp_path: Path, column: str, seconds: float) -> None:
    path = table(tmp_path, f"gpu,model,batch,kind,{column}\na100-80gb,net,8,train,20\n")
    assert [row.latency_s for row in scan([path]).rows] == [pytest.approx(seconds)]


@pytest.mark.parametrize("name", ["grad_accum", "Gradient Accumulation Steps", "accumulation_steps"])
def test_step_of_several_batches_is_not_taken_for_one(tmp_path: Path, name: str) -> None:
    text = f"gpu,model,batch,kind,{{}},{name}\na100-80gb,net,8,train,20,{{}}\n"
    with pytest.raises(TableError, match=f"{name.lower()} is 4: state the seconds of one of its batches"):
        scan([table(tmp_path, text.format("step_time_s", 4))])
    for column, count in (("step_time_s", 1), ("samples/s", 4)):
        assert scan([table(tmp_path, text.format(column, count))]).rows


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("gi", "1", "gi has the slice 1: call that column profile"),
        ("GPCs", "2", "gpcs has the slice 2: call that column profile"),
        ("Profile ID", "19", "profile id has the slice 19: call that column profile"),
        ("MIG instance", "3g", "mig instance has the slice 3g: call that column profile"),
        ("instance", "1/7", "instance has the slice 1/7: call that column profile"),
        ("instance", "1/4", "instance has the slice 1/4: call that column profile"),
        ("instance", "2", None),
        ("fraction", "1/7", "fraction has the slice 1/7: call that column profile"),
        ("config", "2g", "config has the slice 2g: call that column profile"),
        ("GPU share", "0.14", r"gpu share has the slice 0\.14: call that column profile"),
        ("SM quota (%)", "14", r"sm quota \(%\) has the slice 14: call that column profile"),
        ("GPU share", "1.0", None),
        ("SM quota (%)", "100", None),
        ("gpu_memory_fraction", "0.9", None),
        ("time_share", "0.5", None),
        ("memory limit", "4g", None),
        ("instance", "p4d.24xlarge", None),
        ("mig.mode.current", "Disabled", None),
        ("mig", "off", None),
        ("mode", "Training", "mode has Training: call that column kind"),
        ("mode", "inference", None),
        ("phase", "fine-tuning", "phase has fine-tuning: call that column kind"),
        ("task", "pretraining", "task has pretraining: call that column kind"),
        ("task", "image classification", None),
        ("optimizer", "adamw", "optimizer is that of a training: add the column kind, with train there"),
        ("backward_ms", "20", "backward_ms is that of a training: add the column kind, with train there"),
        ("gradient accumulation", "4", "gradient accumulation is that of a training: add the column kind"),
        ("optimizer", "none", None),
        ("training", "yes", "training is that of a training: add the column kind, with train there"),
        ("is_training", "True", "is_training is that of a training: add the column kind"),
        ("train", "50000", None),
        ("training", "no", None),
        ("pass", "forward+backward", r"pass has forward\+backward: call that column kind"),
        ("pass", "fwd", None),
        ("device", "cpu", "device is cpu: leave out what ran on no GPU"),
        ("provider", "CPUExecutionProvider", "provider is CPUExecutionProvider: leave out what ran on no GPU"),
        ("provider", "CUDAExecutionProvider", None),
        ("MPS", "50%", "mps is 50%: leave out what MPS limits to a part of the GPU"),
        ("active thread %", "50", "active thread % is 50: leave out what MPS limits to a part of the GPU"),
        ("MPS", "100%", None),
        ("jobs", "3", "jobs is 3: if these are processes on one slice, call that column procs"),
        ("co-located", "2", "co-located is 2: if these are processes on one slice"),
        ("time-slicing", "4", "time-slicing is 4: if these are processes on one slice"),
        ("num_streams", "2", "num_streams is 2: latency_s is the time of a batch alone, without the wait for others"),
        ("unit", "tokens/s", "unit is tokens/s: throughput_per_s counts items, not tokens"),
        ("unit", "batches/s", "unit is batches/s: throughput_per_s counts items, not batches"),
        ("Unit", "it/s", "unit is it/s: throughput_per_s counts items, not batches"),
        ("unit", "s/batch", None),
        ("unit", "ms/batch", "unit is ms/batch, and latency_s is in s: name each column after its own unit"),
        ("Latency unit", "ms", "latency unit is ms, and latency_s is in s"),
        ("time_unit", "us", "time_unit is us, and latency_s is in s"),
        ("latency_units", "\N{MICRO SIGN}s", r"latency_units is \?s, and latency_s is in s"),
        ("latency unit", "seconds", None),
        ("unit", "GB", None),
        ("unit", "items/s", None),
        ("units", "samples/s", None),
        ("dataset split", "train", None),
        ("median_ttft_ms", "40", "median_ttft_ms is that of a server: add the column kind, with serve there"),
        ("OSL", "128", "osl is that of a server: add the column kind, with serve there"),
        ("tpot_ms", "", None),
        ("# of Accelerators", "8", "# of accelerators is 8: leave out what ran on several GPUs"),
        ("num_gpus", "1", None),
        ("instances", "1", None),
        ("num_instances", "7", "num_instances is 7: if these are processes on one slice, call that column procs; if"),
        ("num_mig_instances", "7", "num_mig_instances is 7: if these are processes on one slice"),
        ("GPU instances", "7", "gpu instances is 7: if these are processes on one slice"),
        ("MPS clients", "3", "mps clients is 3: if these are processes on one slice"),
        ("mps_processes", "3", "mps_processes is 3: if these are processes on one slice"),
        ("MIG count", "7", "mig count is 7: if these are processes on one slice"),
        ("replicas", "2", "replicas is 2: if these are processes on one slice"),
        ("num_models", "4", "num_models is 4: if these are processes on one slice"),
        ("mps", "1", None),
        ("max_instances", "7", None),
        ("gpus_used", "4", "gpus_used is 4: leave out what ran on several GPUs"),
        ("devices", "2", "devices is 2: leave out what ran on several GPUs"),
        ("Concurrency", "4", "concurrency is 4: latency_s is the time of a batch alone, without the wait for others"),
        ("concurrent_requests", "4", "concurrent_requests is 4: latency_s is the time of a batch alone"),
        ("clients", "4", "clients is 4: latency_s is the time of a batch alone"),
        ("concurrency", "1", None),
        ("global_batch_size", "64", "global_batch_size is 64, and batch 1: state the seconds of one of its batches"),
        ("effective batch", "1", None),
        ("uuid", "MIG-5f1c9f6e-1111-2222-3333-444444444444", "uuid is that of a slice: add a column profile"),
        ("uuid", "GPU-5f1c9f6e-1111-2222-3333-444444444444", None),
        ("tensor_parallel_size", "2", "tensor_parallel_size is 2: leave out what ran on several GPUs"),
        ("world_size", "4", "world_size is 4: leave out what ran on several GPUs"),
        ("world_size", "1", None),
        ("num_devices", "2", "num_devices is 2: leave out what ran on several GPUs"),
        ("data_parallel_size", "2.0", "data_parallel_size is 2.0: leave out what ran on several GPUs"),
        ("GPUs", "8x", "gpus is 8x: leave out what ran on several GPUs"),
        ("GPUs", "2 GPUs", "gpus is 2 GPUs: leave out what ran on several GPUs"),
        ("GPUs", "1 GPU", None),
        ("GPUs", "0-3", None),
    ],
)
def test_row_that_another_column_says_to_be_something_else_is_refused(
    tmp_path: Path, column: str, cell: str, message: str | None
) -> None:
    path = table(tmp_path, f"gpu,model,batch,latency_s,{column}\na100-80gb,net,1,0.1,{cell}\n")
    if message is None:
        assert len(scan([path]).rows) == 1
    else:
        with pytest.raises(TableError, match=rf"points\.csv:2: {message}"):
            scan([path])


@pytest.mark.parametrize(
    ("columns", "cells", "contradicts"),
    [
        ("latency_ms,unit", "100,ms", False),
        ("latency_ms,memory_mb,unit", "100,1000,s", True),
        ("latency_ms,throughput_per_s,unit", "100,10,images/s", False),
        ("latency_ms,throughput_per_s,unit", "100,10,images per second", False),
        ("latency_ms,throughput_per_s,unit", "100,600,images/min", True),
        ("latency_ms,fps,throughput unit", "100,10,samples/hour", True),
        ("latency_ms,memory_mb,memory_unit", "100,1000,MiB", False),
        ("latency_ms,memory_mb,memory_unit", "100,1,GB", True),
        ("latency_ms,memory_gb,memory_unit", "100,1,GiB", False),
        ("latency_ms,queue_time,queue_time_unit", "100,3,us", False),
        ("latency_ms,latency_p99_ms,p99 unit", "100,3,us", True),
        ("latency_ms,units", "100,", False),
        ("latency_ms,units", "100,anything", False),
    ],
)
def test_unit_in_a_column_of_its_own_that_contradicts_the_names_is_refused(
    tmp_path: Path, columns: str, cells: str, *, contradicts: bool
) -> None:
    path = table(tmp_path, f"gpu,model,batch,{columns}\na100-80gb,net,1,{cells}\n")
    if contradicts:
        with pytest.raises(TableError, match=r"points\.csv:2: .* is in .*: name each column after its own unit"):
            scan([path])
    else:
        assert [row.latency_s for row in scan([path]).rows] == [0.1]


def test_units_of_all_known_names_can_be_shown() -> None:
    for name, (column, factor) in aliases.ALIASES.items():
        for unit in ("min", "kb"):
            contradicted = statedunits.contradicted("unit", [unit], {name: (column, factor)})
            assert contradicted is None or contradicted[0] == name


def test_throughput_of_concurrent_requests_or_of_a_larger_whole_batch_is_read(tmp_path: Path) -> None:
    for name in ("concurrency", "global_batch_size"):
        text = f"gpu,model,batch,throughput_per_s,latency_ms,{name}\na100-80gb,net,8,500,,4\n"
        assert [row.throughput_per_s for row in scan([table(tmp_path, text)]).rows] == [500.0]
    served = "gpu,model,kind,batch,latency_s,concurrency\nh100-80gb,net,serve,8,0.5,8\n"
    assert [row.latency_s for row in scan([table(tmp_path, served)]).rows] == [0.5]


def test_names_of_trainers_are_read_for_trainings_only(tmp_path: Path) -> None:
    text = "gpu,model,{}per_device_train_batch_size,train_samples_per_second\na100-80gb,net,{}8,400\n"
    (row,) = scan([table(tmp_path, text.format("kind,", "train,"))]).rows
    assert (row.kind, row.batch, row.throughput_per_s) == ("train", 8, 400.0)
    with pytest.raises(TableError, match="is that of a training: add the column kind, with train there"):
        scan([table(tmp_path, text.format("", ""))])
    timm = "gpu,model,infer_batch_size,infer_samples_per_sec,train_batch_size,train_samples_per_sec"
    (row,) = scan([table(tmp_path, f"{timm}\na100-80gb,net,256,2560,64,700\n")]).rows
    assert (row.kind, row.batch, row.throughput_per_s) == ("infer", 256, 2560.0)


def test_requests_are_the_items_of_servers_only(tmp_path: Path) -> None:
    text = "gpu,model_id,kind,max_concurrency,request_throughput,random_input_len,mean_ttft_ms\nh100-80gb,net,{},{}\n"
    (row,) = scan([table(tmp_path, text.format("serve", "8,2.5,512,40"))]).rows
    assert (row.batch, row.throughput_per_s, row.input_size, row.ttft_s) == (8, 2.5, 512, 0.04)
    with pytest.raises(TableError, match="max_concurrency counts requests: of a server, add the column kind"):
        scan([table(tmp_path, text.format("infer", "8,2.5,512,"))])
    with pytest.raises(TableError, match=r"req/s counts requests: .* else state items per second"):
        scan([table(tmp_path, "gpu,model,batch,req/s\na100-80gb,net,8,20\n")])


def test_time_per_token_comes_before_the_time_between_tokens(tmp_path: Path) -> None:
    header = "gpu,model,kind,batch,output,TTFT (ms),ITL (ms),TPOT (ms)"
    (row,) = scan([table(tmp_path, f"{header}\nh100-80gb,llama-3.1-8b,serve,8,128,120,17,18\n")]).rows
    assert row.tpot_s == 0.018
    header = header.replace(",TPOT (ms)", "")
    (row,) = scan([table(tmp_path, f"{header}\nh100-80gb,llama-3.1-8b,serve,8,128,120,17\n")]).rows
    assert row.tpot_s == 0.017


def test_times_of_tokens_are_enough_for_a_server(tmp_path: Path) -> None:
    head = "gpu,model,kind,batch,isl,osl,ttft_ms,tpot_ms"
    (row, failed) = scan(
        [table(tmp_path, f"{head}\nh100-80gb,net,serve,8,512,101,50,10\nh100-80gb,net,serve,999,512,101,,\n")]
    ).rows
    assert row.latency_s == pytest.approx(1.05) and row.ran and not failed.ran
    with pytest.raises(TableError, match="needs throughput_per_s or latency_s"):
        scan([table(tmp_path, f"{head}\nh100-80gb,net,train,8,512,101,50,10\n")])
    with pytest.raises(TableError, match="has neither throughput_per_s nor latency_s"):
        scan([table(tmp_path, "gpu,model,kind,batch,ttft_ms,tpot_ms\nh100-80gb,net,serve,8,50,10\n")])


@pytest.mark.parametrize(("word", "kind"), [("Training", "train"), ("inference", "infer"), ("train", "train")])
def test_kind_may_be_written_out(tmp_path: Path, word: str, kind: str) -> None:
    (row,) = scan([table(tmp_path, f"gpu,model,batch,latency_s,kind\na100-80gb,net,1,0.1,{word}\n")]).rows
    assert row.kind == kind


@given(
    st.lists(st.text(max_size=20), max_size=6, unique=True), st.text(max_size=12), st.sampled_from(["", ",", ".", "?"])
)
def test_no_text_breaks_the_reader(header: list[str], cell: str, decimal: str) -> None:
    names = aliases.renamed(header)
    assert len(names) == len(header)
    with contextlib.suppress(MeasurementError):
        aliases.converted(dict.fromkeys(header, cell), dict(zip(header, names, strict=True)), decimal)


@pytest.mark.parametrize("kind", ["fine-tuning", "Finetune", "training", "pre-training", "sft"])
def test_kinds_of_training_are_read_as_such(tmp_path: Path, kind: str) -> None:
    path = table(tmp_path, f"gpu,model,batch,latency_s,kind,optimizer\na100-80gb,net,1,0.1,{kind},adamw\n")
    assert [row.kind for row in scan([path]).rows] == ["train"]


@pytest.mark.parametrize("gpu", ["0", "cuda:1", "GPU 3", "gpu0"])
def test_number_of_a_gpu_is_not_taken_for_its_name(tmp_path: Path, gpu: str) -> None:
    with pytest.raises(TableError, match="is a number: write the GPU's name"):
        scan([table(tmp_path, f"gpu,model,batch,latency_s\n{gpu},net,1,0.1\n")])
