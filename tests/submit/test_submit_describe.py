"""cli_filter.lua, which runs as the user, turns model=/path into hints where the site has switched that on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_migbatch.config import loads
from slurm_migbatch.config.reader import ConfigError
from slurm_migbatch.submit.policy import SubmitPolicy
from slurm_migbatch.submit.shim import CLI_FILTER, render
from slurm_migbatch.workload.hints import parse
from tests.support.gpu_kinds import SITE
from tests.support.lua_shim import LUA

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
ASK = """
slurm = setmetatable({ SUCCESS = 0, ERROR = -1 }, { __index = function() return function() end end })
dofile(arg[1])
local options = { type = arg[2], comment = arg[3] }
io.stdout:write(slurm_cli_pre_submit(options, 0), " ", options.comment)
"""
MIGBATCH = str(Path(sys.executable).with_name("migbatch"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "our-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def ask(tmp_path: Path, comment: str, kind: str = "sbatch", describe: str = MIGBATCH, inside: bool = False) -> str:
    """The comment after the filter; the submission itself always goes on."""
    text = render(
        CLI_FILTER, socket="/x", table="/y", catalog=SITE, policy=SubmitPolicy(describe=describe),
        default_partition="gpu",
    )  # fmt: skip
    (tmp_path / CLI_FILTER).write_text(text)
    (tmp_path / "ask.lua").write_text(ASK)
    environ = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), **({"SLURM_JOB_ID": "7"} if inside else {})}
    done = subprocess.run(
        [LUA, tmp_path / "ask.lua", tmp_path / CLI_FILTER, kind, comment],
        capture_output=True, text=True, env=environ, timeout=60, check=True,
    )  # fmt: skip
    code, _, comment = done.stdout.partition(" ")
    assert code == "0", done.stderr
    assert not list(tmp_path.glob("migbatch.*")), "nothing is left behind"
    return comment


def program(tmp_path: Path, text: str) -> str:
    file = tmp_path / "program"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_model_path_becomes_the_hints_of_the_model(tmp_path: Path, model: Path) -> None:
    comment = ask(tmp_path, f"migbatch: engine=vllm model={model} max_num_seqs=4 dtype=fp16")
    assert comment.startswith("migbatch: engine=vllm model=our-llama arch=") and str(model) not in comment
    hints = parse(comment)
    assert (hints.model, hints.llm.engine, hints.llm.max_num_seqs) == ("our-llama", "vllm", 4)
    assert hints.llm.dtype == "fp16", "the user's own hints count"
    assert hints.llm.arch is not None and "layers:16" in hints.llm.arch


def test_adapter_becomes_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}')
    assert ask(tmp_path, f"migbatch: model={folder} batch=4") == "migbatch: model=llama-3.1-8b batch=4"


def test_comment_without_a_path_or_with_describe_off_is_unchanged(tmp_path: Path, model: Path) -> None:
    for comment in (f"model={model}", "migbatch: model=llama-3-8b", f"migbatch: input=4 note model={model}/../'x"):
        assert ask(tmp_path, comment) == comment
    path = f"migbatch: model={model}"
    assert ask(tmp_path, path, describe="") == path
    assert ask(tmp_path, path, kind="srun", inside=True) == path
    assert ask(tmp_path, path, kind="salloc") != path


@pytest.mark.parametrize("name", ["missing", "a'b", "$(touch x)", "a;touch x", "-x"])
def test_path_that_cannot_be_described_is_left_unchanged(tmp_path: Path, name: str) -> None:
    comment = f"migbatch: model={tmp_path}/{name}"
    assert ask(tmp_path, comment) == comment
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "sleep 600",
        "trap '' TERM; sleep 600",
        "exit 1",
        "echo end",
        "echo 'model=x mem=1gb; rm'",
        "head -c 100000 /dev/zero | tr '\\0' a",
        "echo \"model=x arch=$(head -c 2000 /dev/zero | tr '\\0' 1)\"",
        "kill $PPID",
    ],
)
def test_misbehaving_describe_program_neither_blocks_nor_fails_a_submission(
    tmp_path: Path, model: Path, text: str
) -> None:
    comment = f"migbatch: model={model}"
    assert ask(tmp_path, comment, describe=program(tmp_path, text)) == comment


def test_describe_setting_must_be_the_absolute_path_of_a_program() -> None:
    assert loads("").submit.describe == ""
    assert loads('[submit]\ndescribe = "/opt/migbatch/bin/migbatch"').submit.describe == "/opt/migbatch/bin/migbatch"
    for wrong in ("migbatch", "/bin/sh -c", "/bin/$x"):
        with pytest.raises(ConfigError):
            loads(f'[submit]\ndescribe = "{wrong}"')
