"""The neutral table: what is read back, what is refused with its line, and how a folder of tables is read."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.predict.known import ModelKnowledge
from slurm_migbatch.profiling.csvfile import LONGEST_ROW, SHOWN_PROBLEMS, TableError
from slurm_migbatch.profiling.measurement import COLUMNS, IDENTITY, Measurement
from slurm_migbatch.profiling.table import merge, read_folder, scan, write

POINT = Measurement("a100", "net", profile="2g.20gb", batch=8, throughput_per_s=400.0, latency_s=0.02, source="here")

counts = st.none() | st.integers(1, 10**6)
figures = st.none() | st.floats(1e-9, 1e15)
words = st.text("abcXYZ 0159.,;\"'-_/+:é", max_size=12).map(str.strip)
names = st.text("abcz0159.-_", min_size=1, max_size=12)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    return Measurement(
        gpu=draw(words.filter(bool)),
        model=draw(names),
        family=draw(names | st.just("")),
        kind=draw(st.sampled_from(("infer", "train"))),
        profile=draw(st.sampled_from(("", "1g.10gb", "1g.10gb+me", "7g.80gb"))),
        compute_slices=draw(counts),
        memory_slices=draw(counts),
        sm_count=draw(counts),
        batch=draw(st.integers(1, 4)),
        input_size=draw(st.none() | st.integers(1, 3)),
        procs=draw(st.integers(1, 2)),
        throughput_per_s=draw(figures),
        latency_s=draw(figures),
        latency_p99_s=draw(figures),
        memory_mib=draw(figures),
        params=draw(figures),
        flops_per_item=draw(figures),
        source=draw(words),
    )


def table(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@given(st.lists(measurements(), max_size=6, unique_by=lambda row: row.point))
def test_written_table_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Measurement]) -> None:
    text = io.StringIO()
    write(rows, text)
    path = tmp_path_factory.mktemp("t") / "t.csv"
    path.write_text(text.getvalue())
    assert list(scan([path]).rows) == rows


@given(st.lists(measurements(), max_size=8))
def test_merging_keeps_each_point_once_and_is_idempotent(rows: list[Measurement]) -> None:
    merged = merge(rows)
    assert [row.point for row in merged] == list(dict.fromkeys(row.point for row in rows))
    assert merge(merged) == merged
    ran = {row.point for row in rows if row.ran}
    assert {row.point for row in merged if row.ran} == ran


def test_gzip_columns_in_any_order_and_unknown_columns_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8-sig") as file:
        file.write("colour,Batch , latency_s,MODEL,gpu\nred,8,0.02,ResNet50,a100\n\nblue,16,,resnet50,a100\n")
    found = scan([path])
    assert found.rows == (
        Measurement("a100", "resnet50", batch=8, latency_s=0.02),
        Measurement("a100", "resnet50", batch=16),
    )
    (notice,) = found.notices
    assert "colour" in notice and str(path) in notice


def test_every_invalid_line_is_reported_and_nothing_is_imported(tmp_path: Path) -> None:
    path = table(
        tmp_path / "t.csv",
        "gpu,model,batch,latency_s,profile",
        "a100,good,1,0.1,1g.10gb",
        "a100,net,eight,0.1,1g.10gb",
        "a100,net,8,-1,1g.10gb",
        "a100,net,8,0.1,9x",
        "a100,net,8,0.1",
        ",net,8,0.1,1g.10gb",
    )
    with pytest.raises(TableError) as caught:
        read_folder(tmp_path)
    text = str(caught.value)
    for line, what in ((3, "batch"), (4, "latency_s"), (5, "profile"), (6, "4 cells"), (7, "gpu is empty")):
        assert any(f"{path}:{line}: " in message and what in message for message in text.splitlines())
    assert ":2:" not in text


def test_further_invalid_lines_are_counted(tmp_path: Path) -> None:
    table(tmp_path / "t.csv", "gpu,model,batch,latency_s", *["a100,net,x,1"] * (SHOWN_PROBLEMS + 7))
    with pytest.raises(TableError, match=r"and 7 more\Z"):
        read_folder(tmp_path)


def test_one_invalid_line_gives_a_one_line_message(tmp_path: Path) -> None:
    table(tmp_path / "t.csv", "gpu,model,batch,latency_s", "a100,net,x,1")
    with pytest.raises(TableError, match=r"\Anothing was read: .*t\.csv:2: batch .*\Z"):
        read_folder(tmp_path)


def test_truncated_line_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("gpu,model,batch,latency_s\na100,net,1,0.1\na100,net,2")
    with pytest.raises(TableError, match=r":3: has 3 cells where the header has 4"):
        read_folder(tmp_path)


def test_truncated_gzip_is_an_error(tmp_path: Path) -> None:
    text = "gpu,model,batch,latency_s\n" + "".join(f"a100,net{i * 7919},1,0.{i}1\n" for i in range(5000))
    whole = gzip.compress(text.encode())
    (tmp_path / "t.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TableError, match="not valid CSV"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("gpu,model,batch,memory_mib", "neither throughput_per_s nor latency_s"),
        ("gpu,model,batch,latency_s,latency_s", "duplicate columns: latency_s"),
    ],
)
def test_header_without_speed_or_with_duplicates_is_refused(tmp_path: Path, header: str, message: str) -> None:
    table(tmp_path / "t.csv", header, ",".join(["a100", "net", "1", "1", "1"][: header.count(",") + 1]))
    with pytest.raises(TableError, match=message):
        read_folder(tmp_path)


def test_control_characters_and_too_long_text_are_refused(tmp_path: Path) -> None:
    table(tmp_path / "t.csv", "gpu,model,batch,latency_s", "a100,net\x1b[31m,1,1", f"a100,{'n' * 200},1,1")
    with pytest.raises(TableError) as caught:
        read_folder(tmp_path)
    assert "\x1b" not in str(caught.value)
    assert ":2:" in str(caught.value) and ":3:" in str(caught.value)


def test_contradicting_throughput_and_latency_give_a_notice(tmp_path: Path) -> None:
    """The two usual mistakes: milliseconds instead of seconds, and one process's throughput instead of the total."""
    table(
        tmp_path / "t.csv",
        "gpu,model,batch,procs,throughput_per_s,latency_s",
        "a100,net,8,1,400,0.021",
        "a100,net,8,4,400,0.02",
        "a100,net,16,1,400,40",
    )
    (notice,) = scan([tmp_path]).notices
    assert "in 2 lines (first 3)" in notice


def test_repeated_points_give_the_median(tmp_path: Path) -> None:
    rows = [replace(POINT, latency_s=value, throughput_per_s=8 / value) for value in (0.02, 0.9, 0.021)]
    failed = replace(POINT, latency_s=None, throughput_per_s=None, memory_mib=70000.0)
    other = replace(POINT, source="there", latency_s=0.5, throughput_per_s=None)
    text = io.StringIO()
    write([*rows, failed, other], text)
    (tmp_path / "t.csv").write_text(text.getvalue())
    median, other_source = read_folder(tmp_path)
    assert median.latency_s == 0.021
    assert median.throughput_per_s == pytest.approx(8 / 0.021)
    assert median.memory_mib is None
    assert other_source == other


def test_folder_is_read_at_any_depth_and_other_files_are_ignored(tmp_path: Path) -> None:
    table(tmp_path / "lab1" / "deep" / "t.csv", "gpu,model,batch,latency_s", "a100,one,1,0.1")
    table(tmp_path / "lab2" / "t.csv", "gpu,model,batch,latency_s", "a100,two,1,0.1")
    table(tmp_path / "lab2" / "jobs.csv", "job,user", "1,ann")
    table(tmp_path / "lab2" / ".hidden.csv", "gpu,model,batch,latency_s", "a100,three,1,0.1")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "picture.csv").write_bytes(b"\xff\xfe\x00\x01")
    found = scan([tmp_path])
    assert [row.model for row in found.rows] == ["one", "two"]
    assert "3 other CSV files" in found.notices[-1]
    assert scan([tmp_path / "lab1", tmp_path / "lab2" / "t.csv"]).rows == found.rows


@pytest.mark.parametrize("files", [{}, {"jobs.csv": "job,user\n1,ann\n"}, {"t.csv": "gpu,model,batch,latency_s\n"}])
def test_folder_without_measurements_is_an_error_with_advice(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TableError, match=r"no measurements.*ParvaGPU, MIGPerf, MISO"):
        read_folder(tmp_path)


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    (target / "a.csv").write_text("gpu,model,batch,latency_s\na100,net,1,0.1\n")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("one", "two"):
        (data / name).symlink_to(target)
    (target / "round").symlink_to(data)
    assert len(read_folder(data)) == 1
    (tmp_path / "link").symlink_to(data)
    assert read_folder(tmp_path / "link") == read_folder(data)


def test_pipes_and_devices_in_a_folder_are_skipped(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "gpu,model,batch,latency_s", "a100,net,1,0.1")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "endless.csv").symlink_to("/dev/zero")
    assert read_folder(tmp_path) == read_folder(path)


@pytest.mark.parametrize("unit", ["x,", '"\n",'])
def test_row_without_end_is_refused(tmp_path: Path, unit: str) -> None:
    row = unit * (LONGEST_ROW // len(unit) + 1)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(f"gpu,model,batch,latency_s\n{row}".encode()))
    with pytest.raises(TableError, match=f"a row has more than {LONGEST_ROW} characters"):
        read_folder(path)
    path.write_bytes(gzip.compress(f"gpu,model,batch,latency_s,{row}".encode()))
    with pytest.raises(TableError, match=f"cannot be read: a row has more than {LONGEST_ROW} characters"):
        read_folder(path)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_are_accepted(tmp_path: Path, separator: str) -> None:
    lines = ("gpu,model,batch,latency_s,memory_mib", "a100,net,1,0.1,900", "a100,net,2,0.2,950")
    path = table(tmp_path / "t.csv", *(line.replace(",", separator) for line in lines))
    expected = read_folder(table(tmp_path / "u" / "t.csv", *lines))
    assert read_folder(path) == expected
    assert read_folder(tmp_path) == expected


@pytest.mark.parametrize("separator", [";", "\t"])
def test_dots_separate_thousands_where_the_comma_is_the_decimal_one(tmp_path: Path, separator: str) -> None:
    head = "gpu;model;batch;latency_s;throughput_per_s;memory_mib"
    german = head, "NVIDIA A100.40;net 1.000;8;0,0065;1.230,7;12.345", "a;net;8;6,5;1,2;1.012.345"
    plain = head, "NVIDIA A100.40;net 1.000;8;0.0065;1230.7;12345", "a;net;8;6.5;1.2;1012345"
    one, other = (
        read_folder(table(tmp_path / name / "t.csv", *(line.replace(";", separator) for line in lines)))
        for name, lines in (("german", german), ("plain", plain))
    )
    assert one == other and one[0].memory_mib == 12345.0
    kept = table(tmp_path / "t.csv", *(line.replace(";", separator) for line in (head, "a;net;8;0.125;1.234;12.345")))
    assert read_folder(kept)[0].memory_mib == 12.345, "no comma says that the dots are no decimal ones"


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize(
    ("first", "second", "memory"),
    [
        ("a;net;8;0,5;5,1;900", "a;net;16;1;10;1.900", [900, 1900]),
        ("a;net;8;0.5;5.1;900", "a;net;16;1;10;1,900", [900, 1900]),
        ("a;net;8;0,5;5,1;900", "a;net;16;1;10;1,900", [900, 1.9]),
        ("a;net;8;0.5;5.1;900", "a;net;16;1;10;1.900", [900, 1.9]),
        ("a;net;8;0,5;5.1;900", "a;net;16;1;10;1.900", "memory_mib 1.900 may be 1900 or 1.900: write it without a dot"),
        ("a;net;8;0,5;5.1;900", "a;net;16;1;10;1,900", "memory_mib 1,900 may be 1900 or 1.900: write it without a com"),
    ],
)
def test_the_whole_table_tells_its_decimal_mark(
    tmp_path: Path, separator: str, first: str, second: str, memory: list[float] | str
) -> None:
    lines = "gpu;model;batch;latency_s;throughput_per_s;memory_mib", second, first, second.replace("16", "32")
    path = table(tmp_path / "t.csv", *(line.replace(";", separator) for line in lines))
    if isinstance(memory, str):
        with pytest.raises(TableError, match=re.escape(memory)):
            read_folder(path)
    else:
        assert [row.memory_mib for row in read_folder(path)] == [memory[1], memory[0], memory[1]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "gpu,model".encode("utf-16"), r"is not UTF-8 text: save it in UTF-8 \(not UTF-16 or Latin-1\)"),
        ("t.csv", "gpu,model".encode("utf-16-le"), r"is not UTF-8 text: save it in UTF-8 \(not UTF-16 or Latin-1\)"),
        ("t.csv", gzip.compress("gpu,model".encode("utf-16")), "is not UTF-8 text"),
        ("t.csv.gz", b"gpu,model,batch\n", "cannot be read: Not a gzipped file"),
        ("t.csv.gz", gzip.compress(b"gpu,model,batch\n" * 99)[:20], "cannot be read: Compressed file ended"),
        ("t.csv", b"", "is empty"),
    ],
    ids=["utf-16", "utf-16 without its mark", "utf-16 in a gzip", "no gzip", "a gzip cut off", "nothing"],
)
def test_unreadable_file_is_reported_with_the_reason(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TableError, match=message):
        read_folder(tmp_path / name)


def test_gzipped_table_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "gpu;model;batch;latency_s", "a100;net;1;0,1")
    rows = read_folder(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert read_folder(path) == read_folder(tmp_path) == rows


@pytest.mark.parametrize("cell", ["NaN", "N/A", "-"])
def test_figure_without_a_number_is_refused_with_advice(tmp_path: Path, cell: str) -> None:
    path = table(tmp_path / "t.csv", "gpu,model,batch,latency_s,memory_mib", f"a100,net,1,0.1,{cell}")
    with pytest.raises(TableError, match=f":2: memory_mib must be a number, not {cell}: leave it empty if unknown"):
        read_folder(path)


def test_params_and_flops_given_in_millions_are_ignored_with_a_notice(tmp_path: Path) -> None:
    head = "gpu,model,batch,latency_s,params,flops_per_item"
    rows = "a100,net,1,0.1,25.6,8.2e9", "a100,net,2,0.1,2.56e7,8.2", "a100,net,4,0.1,2.56e7,"
    found = scan([table(tmp_path / "t.csv", head, *rows)])
    params, flops = found.notices
    assert "in 1 lines (first 2) params is below 1000 and not used: it counts parameters, not millions" in params
    assert "in 1 lines (first 3) flops_per_item is below 1000 and not used: it counts operations" in flops
    unknown = ModelKnowledge(())
    assert unknown.of("net", found.rows[:1]) == unknown.of("net", [replace(found.rows[0], params=None)])


def test_file_that_is_no_table_is_refused_with_the_needed_columns(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", "job,user", "1,ann")
    with pytest.raises(TableError, match="must name gpu, model, batch"):
        read_folder(path)


def test_identity_columns_distinguish_points() -> None:
    assert set(IDENTITY) < set(COLUMNS)
    assert replace(POINT, memory_mib=5.0).point == POINT.point
    assert replace(POINT, procs=2).point != POINT.point


def test_headers_of_files_that_were_joined_are_no_points(tmp_path: Path) -> None:
    text = "gpu,model,batch,latency_s\na100-80gb,net,{},0.1\n"
    (tmp_path / "points.csv").write_text(text.format(1) + text.format(2))
    assert [row.batch for row in read_folder(tmp_path)] == [1, 2]


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;", "sep=;;;;", "", "\n\nsep=;"])
def test_line_of_excel_before_the_header_states_the_separator(tmp_path: Path, first: str) -> None:
    header, good = "gpu;model,net;batch;model;latency_s", "a100;x;1;net;0,5"
    (row,) = scan([table(tmp_path / "excel.csv", first, header, good, "")]).rows
    assert (row.model, row.latency_s) == ("net", 0.5)
    with pytest.raises(TableError, match=rf"excel\.csv:{first.count(chr(10)) + 4}: batch must be a whole number"):
        scan([table(tmp_path / "excel.csv", first, header, good, "a100;x;0.5;net;1")])


@pytest.mark.parametrize("comment", ["# on 2025-03-01, with driver 535", "#", "# one process\n\n# batches: 1, 2"])
def test_comments_before_the_header_are_skipped(tmp_path: Path, comment: str) -> None:
    (row,) = scan([table(tmp_path / "t.csv", comment, "gpu,model,batch,latency_s", "a100,net,2,1")]).rows
    assert (row.batch, row.latency_s) == (2, 1.0)
    with pytest.raises(TableError, match=rf"t\.csv:{comment.count(chr(10)) + 3}: batch must be a whole number"):
        scan([table(tmp_path / "t.csv", comment, "gpu,model,batch,latency_s", "a100,net,0.5,1")])


def test_header_that_begins_as_a_comment_is_read(tmp_path: Path) -> None:
    (row,) = scan([table(tmp_path / "t.csv", "# gpu,model,batch,latency_s", "a100,net,2,1")]).rows
    assert row.batch == 2


def test_tables_with_tabs_are_read_from_a_folder(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", "gpu,model,batch,latency_s", "a100,net,1,0.1")
    table(tmp_path / "b.tsv", "gpu\tmodel\tbatch\tlatency_s", "a100\tnet\t2\t0.1")
    assert [row.batch for row in read_folder(tmp_path)] == [1, 2]


def test_space_before_a_quoted_cell_is_not_part_of_it(tmp_path: Path) -> None:
    (row,) = scan(
        [table(tmp_path / "spaced.csv", '"gpu", "model", "batch", "latency_s"', '"a100", "net", "2", "1"')]
    ).rows
    assert (row.model, row.batch, row.latency_s) == ("net", 2, 1.0)


NESTED = """{"env": {"gpu": "NVIDIA A100-SXM4-80GB", "memory_gb": 60}, "model": "net", "throughput": 9999, "batch": 8,
  "results": {
  "1g.10gb": [{"latency": {"mean_ms": 40, "p99_ms": 44}, "queue": {"p50_ms": 3}, "all_ms": [39, 41]}],
  "7g.80gb": {"latency": {"mean_ms": 6, "p99_ms": 7}}}}"""
"""A measurement of two slices, with a throughput of both together."""


def test_json_is_read(tmp_path: Path) -> None:
    point = '{"gpu": "a100", "model": "net", "batch": %d, "latency_s": 0.5, "precision": null}'
    for name, text in (("a.json", f"[{point % 1}, {point % 2}]"), ("a.jsonl", f"{point % 1}\n\n{point % 2}\n")):
        (tmp_path / name).write_text(text)
        assert [(row.batch, row.latency_s) for row in scan([tmp_path / name]).rows] == [(1, 0.5), (2, 0.5)]
    (tmp_path / "b.json").write_text(NESTED)
    assert [
        (row.gpu, row.profile, row.batch, row.latency_s, row.latency_p99_s, row.throughput_per_s or row.memory_mib)
        for row in scan([tmp_path / "b.json"]).rows
    ] == [
        ("NVIDIA A100-SXM4-80GB", "1g.10gb", 8, 0.04, 0.044, None),
        ("NVIDIA A100-SXM4-80GB", "7g.80gb", 8, 0.006, 0.007, None),
    ]


def test_object_with_figures_is_read(tmp_path: Path) -> None:
    text = '{"gpu": {"name": "a100-80gb"}, "model": {"id": "net"}, "config": {"batch_size": 8}, "latency": {"ms": 5}, '
    (tmp_path / "a.json").write_text(text + '"hardware": {"memory_gb": 60}, "queue": {"latency_ms": 1}}')
    (row,) = scan([tmp_path / "a.json"]).rows
    assert (row.gpu, row.model, row.batch, row.latency_s, row.memory_mib) == ("a100-80gb", "net", 8, 0.005, None)


def test_object_without_a_speed_is_not_taken_for_one_that_ran_out_of_memory(tmp_path: Path) -> None:
    text = (
        '{"gpu": "a100-80gb", "model": "net", "kind": "train", "batch": 8, "log_history": [{"loss": 1, "step": 1}, %s]}'
    )
    (tmp_path / "a.json").write_text(text % '{"step_time_ms": 20, "step": 2}, {"step_time_ms": null, "step": 3}')
    assert [row.latency_s for row in scan([tmp_path / "a.json"]).rows] == [0.02]
    (tmp_path / "a.json").write_text(text % '{"step_time_ms": 20}, {"eval_samples_per_second": 3}')
    with pytest.raises(TableError, match=r"a\.json:2: it has none of step_time_ms: leave it out"):
        scan([tmp_path / "a.json"])


def test_points_in_json_are_found_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("gpu,model,batch,latency_s\na100,net,1,0.5\n")
    (tmp_path / "b.jsonl").write_text('{"gpu": "a100", "model": "net", "batch": 2, "latency_s": 0.5}\n')
    for name, text in (("config.json", '{"model": "net"}'), ("list.json", "[1, 2]"), ("bad.json", "{")):
        (tmp_path / name).write_text(text)
    with gzip.open(tmp_path / "c.json.gz", "wt") as file:
        file.write('[{"gpu": "a100", "model": "net", "batch": 3, "latency_s": 0.5}]')
    found = scan([tmp_path])
    assert [row.batch for row in found.rows] == [1, 2, 3] and not found.notices


def test_json_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(json, "loads", lambda text, loads=json.loads: parsed.append(text) or loads(text))
    (tmp_path / "a.json").write_text('{"gpu": "a100", "model": "net", "batch": 7, "latency_s": 0.5}')
    assert len(scan([tmp_path]).rows) == len(parsed) == 1


def test_bad_object_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"gpu": "a100", "model": "net", "batch": 1, "latency_s": 1}\n'
        '{"gpu": "a100", "model": "net", "batch": "x", "latency_s": 1}\n'
    )
    with pytest.raises(TableError, match=r"a\.jsonl:2: batch must be a number, not x"):
        scan([tmp_path / "a.jsonl"])


@pytest.mark.parametrize(
    "names", ["Latency 1g.10gb (ms),Latency 7g.80gb (ms)", "1g.10gb latency_ms,7g.80gb latency_ms"]
)
def test_columns_for_each_slice_are_points_of_it(tmp_path: Path, names: str) -> None:
    text = f"gpu,model,batch,{names}\na100-80gb,net,8,40,6\na100-80gb,net,16,OOM,11\na100-80gb,net,32,,21\n"
    (tmp_path / "a.csv").write_text(text)
    assert [(row.profile, row.batch, row.latency_s) for row in scan([tmp_path / "a.csv"]).rows] == [
        ("1g.10gb", 8, 0.04), ("7g.80gb", 8, 0.006), ("1g.10gb", 16, None), ("7g.80gb", 16, 0.011),
        ("7g.80gb", 32, 0.021),
    ]  # fmt: skip


def test_columns_for_each_slice_that_are_no_speeds_make_no_points_of_others(tmp_path: Path) -> None:
    text = "gpu,model,batch,latency_ms,1g.10gb memory_mb,fits 1g.10gb\na100-80gb,net,8,6,900,yes\n"
    (tmp_path / "a.csv").write_text(text)
    assert [(row.profile, row.latency_s, row.memory_mib) for row in scan([tmp_path / "a.csv"]).rows] == [
        ("", 0.006, None)
    ]


def test_units_in_cells_are_read(tmp_path: Path) -> None:
    text = "gpu,model,batch,Latency,Memory\na100-80gb,net,8,15 ms,2.5 GB\na100-80gb,net,16,0.03s,\n"
    (tmp_path / "a.csv").write_text(text + "a100-80gb,net,32,OOM,\n")
    assert [(row.latency_s, row.memory_mib) for row in scan([tmp_path / "a.csv"]).rows] == [
        (0.015, 2560.0), (0.03, None), (None, None),
    ]  # fmt: skip
    (tmp_path / "a.csv").write_text(text + "a100-80gb,net,32,40,\n")
    with pytest.raises(TableError, match="the unit of latency is not known"):
        scan([tmp_path / "a.csv"])


def test_table_in_markdown_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# Results\n\n| GPU | Model | MIG profile | Batch size | Latency (ms) |\n"
        "|-----|-------|:---:|---:|---|\n| a100-80gb | net | 1g.10gb | 8 | 40 |\n"
    )
    (row,) = scan([tmp_path / "a.md"]).rows
    assert (row.gpu, row.profile, row.batch, row.latency_s) == ("a100-80gb", "1g.10gb", 8, 0.04)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"gpu": "a100", "model": "net", "latency_s": 1}', r"is JSON: .* \(or add what it lacks: batch\)"),
        ("a.json", '{"gpu": "a100", "model', "is JSON: .* it is not JSON: Unterminated string"),
        ("a.json", "null", r"is JSON: .* \(is empty\)"),
        ("a.json", "[" * 100_000, "is JSON: .* it is not JSON: "),
        ("a.csv", "model,batch_size,latency_s\nnet,1,1\n", r"gpu, model, batch \(it lacks gpu\) and any of"),
        ("a.json", '{"request_throughput": 2.0, "model_id": "net"}\n', "is JSON: write its figures as CSV"),
        (
            "a.csv",
            "gpu,model,batch,1g.10gb\na100,net,1,9\n",
            r"called after a figure and its unit: 1g\.10gb latency_ms",
        ),
        ("a.csv", "gpu,model,batch,QPS\na100,net,1,9\n", r"unit of qps is not known\).* per second throughput_per_s"),
        ("a.csv", "gpu,model,batch,latency_s\na100,net,1,12 ms\n", "not 12 ms: write a number alone, in the column's"),
        ("a.csv", "gpu,model,batch,latency_s\na100,net,1,N/A\n", "not N/A: leave it empty if .* write OOM"),
    ],
)
def test_refusal_says_what_to_change(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TableError, match=message):
        scan([tmp_path / name])
