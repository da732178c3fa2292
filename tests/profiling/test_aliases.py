"""Tables with the column names, units and cells of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_migbatch.profiling import aliases
from slurm_migbatch.profiling.csvfile import TableError
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


def test_columns_of_the_common_table_are_not_replaced() -> None:
    header = ("latency_ms", "latency_s", "batch", "batch_size", "note")
    assert aliases.renamed(header) == header


@given(st.lists(st.text(max_size=20), max_size=6, unique=True), st.text(max_size=12))
def test_no_text_breaks_the_reader(header: list[str], cell: str) -> None:
    names = aliases.renamed(header)
    assert len(names) == len(header)
    aliases.converted(dict.fromkeys(header, cell), dict(zip(header, names, strict=True)))
