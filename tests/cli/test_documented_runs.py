"""The measuring commands of the documentation run as they are written there, with small inputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from slurm_migbatch.cli.main import cli
from tests.support.laboratory_tables import served, write_table
from tests.support.shown_calls import PAGES, calls, inline, inline_calls, shell

#: options added to the documented command
SMALL: Final[dict[str, list[str]]] = {
    "bench sampling": ["--rounds", "5"],
    "bench scale": ["--nodes", "2", "--gpus", "1", "--pending", "5"],
    "eval batch": ["--data", "{sliced}"],
    "eval llm": ["--data", "{served}"],
    "eval predictor": ["--data", "{sliced}", "--quick"],
    "eval pairs": ["--data", str(Path(__file__).parents[2] / "measurements")],
    "eval profiling": ["--data", "{sliced}"],
    "eval torch": ["--data", str(Path(__file__).parents[2] / "measurements")],
}
#: commands that take minutes or that another test runs, and where they, or their parts, are tested with less work
LONG: Final = {
    "bench all": "tests/cli/test_bench_all.py",
    "bench dispatch": "tests/lab/test_bench_dispatch.py",
    "bench fragmentation": "tests/lab/test_bench_fragmentation.py",
    "bench hooks": "tests/cli/test_benchmarks.py",
    "bench lending": "tests/lab/test_bench_lending.py",
    "bench live": "tests/lab/slurm",
    "bench reports": "tests/report/test_report_parts.py",
    "bench nodes": "tests/lab/slurm",
    "bench pipelines": "tests/lab/test_bench_pipelines.py",
    "bench rounds": "tests/lab/slurm",
    "bench sharing": "tests/lab/test_bench_sharing.py",
    "bench study deepboot": "tests/lab/test_study_deepboot.py",
    "bench study dstack": "tests/lab/test_study_pariselsa.py",
    "bench study instances": "tests/lab/test_study_instances.py",
    "bench study paris-elsa": "tests/lab/test_study_pariselsa.py",
    "bench study placement": "tests/lab/test_study_placement.py",
    "bench submit": "tests/cli/test_benchmarks.py",
    "eval services": "tests/lab/test_services_evaluation.py",
}


def named() -> dict[str, list[list[str]]]:
    """The measuring commands of the pages, each with the options of every mention."""
    lines = (words for page in PAGES for line in shell(page) for _, words in calls(line))
    codes = (words for page in PAGES for code in inline(page) for _, words in inline_calls(code))
    found: dict[str, list[list[str]]] = {}
    for words in (*lines, *codes):
        if words[:1] not in (["bench"], ["eval"]) or len(words) < 2 or (words[1] == "study" and len(words) < 3):
            continue
        last = 2 if words[1] == "study" else 1
        for name in re.split(r"[|,]", words[last].strip("{}")):
            options = [word for word in words[last + 1 :] if not word.startswith(("DIR", "measurements"))]
            kept = [word for word in options if word not in ("--data", "--train", "--plot", "--leave")]
            found.setdefault(" ".join([*words[:last], name]), []).append(kept)
    return found


MODELS: Final = [("resnet50", 0.007, 5e-4), ("resnet101", 0.013, 8e-4), ("vgg16", 0.0015, 9e-4), ("vgg19", 0.002, 1e-3)]
NAMED: Final = named()


def test_every_documented_command_is_run_or_listed_as_long() -> None:
    assert len(NAMED) > 12
    assert sorted(NAMED.keys() - SMALL.keys() - LONG.keys()) == []
    root = Path(__file__).parents[2]
    assert [place for place in LONG.values() if not (root / place).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMED.keys() & SMALL.keys()))
def test_documented_command_succeeds_and_prints_output(name: str, tmp_path: Path) -> None:
    folders = {"sliced": write_table(tmp_path / "sliced", MODELS), "served": served(tmp_path / "served")}
    small = [word.format(**folders) for word in SMALL[name]]
    for options in {tuple(options) for options in NAMED[name]}:
        done = CliRunner().invoke(cli, [*name.split(), *options, *small], standalone_mode=False)
        assert done.exception is None, done.exception
        assert done.stdout.strip()
