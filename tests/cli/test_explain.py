"""`migbatch explain` shows the whole decision and submits nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_migbatch.cli.explain import explain
from tests.support.gpu_kinds import SITE
from tests.support.transcripts import shows, transcript


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MIGBATCH_CONFIG", str(tmp_path / "migbatch.toml"))
    (tmp_path / "migbatch.toml").write_text("")
    (tmp_path / "catalog.json").write_text(json.dumps(SITE.to_dict()))

    def run(*arguments: str, partition: str = "gpu") -> Result:
        place = ["--catalog", str(tmp_path / "catalog.json"), *(["-p", partition] if partition else [])]
        return CliRunner().invoke(explain, [*place, *arguments], standalone_mode=False)

    return run


def test_explain_shows_the_choice_and_its_candidates(shown) -> None:
    result = shown("--gres=mig:auto", "--comment", "migbatch: model=bert-large batch=32 slo=200ms")
    assert result.return_value == 0
    assert "bert-large/infer/b32/128tok/slo200000us/any" in result.output
    assert "mig:1g.20gb:1 (fits)" in result.output
    table = result.output.split("\n\n")[1].splitlines()
    assert table[0].split()[:3] == ["PROFILE", "SLICES", "GIB"]
    assert table[1].startswith("1g.20gb") and "over 200 ms" in table[-1]


def test_refusal_exits_with_3_and_names_matching_profiles(shown) -> None:
    result = shown("--gres=mig:1g")
    assert result.return_value == 3
    assert "refused:" in result.output and "1g.10gb, 1g.10gb.me" in result.output


def test_explain_prints_what_the_documentation_shows(shown) -> None:
    """README's first request, and the language model of docs/users.md that fits no slice."""
    hints = "migbatch: model=bert-large batch=32 slo=200ms"
    documented = transcript("README.md", f'sbatch --gres=mig:auto --comment="{hints}" infer.sh').splitlines()[0]
    assert shows(documented.removeprefix("sbatch: "), shown("--gres=mig:auto", f"--comment={hints}").output)
    hints = "migbatch: model=mixtral-8x7b max_model_len=4096 max_num_seqs=8"
    documented = transcript("docs/users.md", f'migbatch explain --gres=mig:auto --comment="{hints}"')
    assert shows(documented, shown("--gres=mig:auto", f"--comment={hints}").output)
    assert not shows("refused: ... 104 GiB", "refused: it needs 103 GiB")


def test_request_for_whole_gpus_is_explained_as_json(shown) -> None:
    found = json.loads(shown("--gpus=2", "--nodes=1", "--json").output)
    assert found["verdict"] == "accept" and found["asked"] == {"--gpus": "2"}
    assert found["changes"] == {"tres_per_node": "mig:7g.80gb:2", "tres_per_job": "", "comment": "[mig:7g.80gb:2]"}
    assert found["decision"]["reason"] == "whole_gpu"


def test_whole_gpus_of_several_types_are_explained(shown) -> None:
    found = json.loads(shown("--gpus=h100:1,a100:2", "--nodes=1", "--json", partition="mixed").output)
    assert found["asked"] == {"--gpus": "h100:1,a100:2"}
    assert found["changes"]["tres_per_node"] == "mig:7g.80gb:1,mig:7g.40gb:2"


def test_gpus_that_two_options_request_count_once(shown) -> None:
    found = json.loads(shown("--gpus-per-node=2", "--gres=gpu:1", "--json").output)
    assert found["changes"]["tres_per_node"] == "mig:7g.80gb:1"


def test_job_without_slices_is_unchanged(shown) -> None:
    result = shown("--comment", "hello")
    assert result.return_value == 0 and "unchanged" in result.output


def test_non_ascii_comment_is_kept(shown) -> None:
    result = shown("--gres=mig:auto", "--comment", "größe")
    assert "größe [mig:1g.10gb:1#auto]" in result.output


def test_missing_partition_or_catalog_is_an_error(shown, tmp_path: Path) -> None:
    (tmp_path / "migbatch.toml").write_text(f"[cluster]\nslurm_bin = '{tmp_path}'\n")  # no Slurm there
    unnamed = shown("--gres=mig:auto", partition="")
    assert "gpu, old, mixed" in str(unnamed.exception)
    lost = shown("--gres=mig:auto", "--catalog", "/nonexistent")
    assert "migbatchd" in str(lost.exception)


def test_default_partition_is_the_one_that_sbatch_uses(shown, tmp_path: Path) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho old; echo gpu*; echo mixed\n")
    sinfo.chmod(0o755)
    (tmp_path / "migbatch.toml").write_text(f"[cluster]\nslurm_bin = '{tmp_path}'\n")
    found = shown("--gres=mig:auto", "--json", partition="")
    assert found.return_value == 0
    assert found.output == shown("--gres=mig:auto", "--json", partition="gpu").output


def test_unreachable_service_is_an_error(shown) -> None:
    assert "is migbatchd running" in str(shown("--gres=mig:auto", "--service", "/nonexistent").exception)


def test_language_model_shows_token_times_and_rate(shown) -> None:
    text = shown(
        "--gres=mig:auto", "--comment", "migbatch: model=llama-3.1-8b max_model_len=4096 max_num_seqs=8"
    ).output
    table = text.split("\n\n")[1].splitlines()
    assert table[0].split()[4:7] == ["TTFT_MS", "TPOT_MS", "TOKENS/S"]
    assert table[1].startswith("3g.40gb") and "needs 21.9 GiB" in text
    assert "llama-3.1-8b/bf16/serve/8x4096tok" in text and "hints: " in text
    found = json.loads(shown("--gres=mig:auto", "--comment", "migbatch: model=llama-3-70b", "--json").output)
    assert found["verdict"] == "refuse" and found["code"] == "model_nowhere"
