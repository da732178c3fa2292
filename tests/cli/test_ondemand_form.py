"""The app for Open OnDemand: what its form offers, and which sbatch arguments a user's choices become."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from slurm_migbatch.workload.hints import Hints, parse
from tests.support.erb import render

APP = Path(__file__).resolve().parents[2] / "sbatch_examples/ondemand"
PROFILES = ["1g.10gb", "1g.20gb", "7g.80gb"]
#: the values of a session as Open OnDemand passes them to submit.yml.erb: text
CHOSEN = {"bc_num_slots": "4", "gpu_memory": "18"}
CONTEXT = {"portal": "https://portal.example.org", "environment": "module load jupyter"}


def read(name: str) -> str:
    return (APP / name).read_text(encoding="utf-8")


def native(gres: str) -> list[str]:
    submit = yaml.safe_load(render(read("submit.yml.erb"), auto_gres=gres, **CHOSEN))
    assert submit["batch_connect"] == {"template": "basic"}
    return submit["script"]["native"]


def test_form_offers_the_profiles_of_the_site_and_the_choice_by_memory() -> None:
    form = yaml.safe_load(render(read("form.yml.erb"), profiles=PROFILES, partition="gpu"))
    values = [value for _, value, *_ in form["attributes"]["auto_gres"]["options"]]
    assert values == ["mig:auto", "mig:1g.10gb", "mig:1g.20gb", "mig:7g.80gb"]
    hides = [extra for _, _, *extra in form["attributes"]["auto_gres"]["options"]]
    assert hides == [[], *[[{"data-hide-gpu-memory": True}]] * 3]
    assert set(form["attributes"]) <= set(form["form"]) and form["attributes"]["bc_queue"] == "gpu"


def test_form_offers_the_choice_by_memory_if_sinfo_fails() -> None:
    form = yaml.safe_load(render(read("form.yml.erb"), profiles=[], partition="gpu"))
    assert [value for _, value in form["attributes"]["auto_gres"]["options"]] == ["mig:auto"]


def test_request_for_a_named_profile_has_no_hints() -> None:
    """`mem=` above the slice's memory would be refused, although the form does not show it then."""
    assert native("mig:1g.10gb") == ["--nodes=1", "--ntasks=1", "--cpus-per-task=4", "--gres=mig:1g.10gb"]


def test_memory_choice_becomes_a_valid_hint() -> None:
    *others, comment = native("mig:auto")
    assert others == ["--nodes=1", "--ntasks=1", "--cpus-per-task=4", "--gres=mig:auto"]
    assert " " not in comment, "arguments that pass through ssh are split at spaces"
    assert parse(comment.removeprefix("--comment=")) == Hints(mem_mib=18 * 10**9 // 2**20 + 1)


def test_the_manifest_is_that_of_a_batch_connect_app() -> None:
    assert yaml.safe_load(read("manifest.yml"))["role"] == "batch_connect"


@pytest.mark.parametrize("script", ["before.sh.erb", "script.sh.erb", "after.sh.erb"])
def test_rendered_scripts_are_valid_bash(script: str) -> None:
    text = render(read(f"template/{script}"), **CONTEXT)
    assert "<%" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


@pytest.mark.ruby
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("submit.yml.erb", {"auto_gres": "mig:auto", **CHOSEN}),
        ("submit.yml.erb", {"auto_gres": "mig:1g.10gb", **CHOSEN}),
        ("template/before.sh.erb", CONTEXT),
        ("template/script.sh.erb", CONTEXT),
        ("view.html.erb", {"host": "n1", "port": 5, "password": "x"}),
        ("form.yml.erb", {"profiles": PROFILES, "partition": "gpu"}),
    ],
)
def test_ruby_renders_the_same_text(name: str, values: dict[str, object], tmp_path: Path) -> None:
    """Ruby also runs the statements of the form, on the output of a fake `sinfo` that is first on PATH."""
    gres = "gpu:0(S:0),mig:7g.80gb:1,mig:none:9,mig:1g.20gb:4\nmig:1g.20gb:4,mig:1g.10gb:7\n"
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\ncat <<'END'\n{gres}END\n")
    (tmp_path / "sinfo").chmod(0o755)
    program = (
        'require "erb"; require "json"; require "ostruct"; values = JSON.parse(ARGV[1]); b = binding; '
        "values.each { |k, v| b.local_variable_set(k, v) }; b.local_variable_set(:context, OpenStruct.new(values)); "
        'print ERB.new(File.read(ARGV[0], encoding: "UTF-8"), trim_mode: "-").result(b)'
    )
    done = subprocess.run(
        ["ruby", "-e", program, str(APP / name), json.dumps(values)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == render(read(name), **values), done.stderr
