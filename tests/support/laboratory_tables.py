"""Small tables of measurements in the formats that evaluations and studies read, computed by known rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_migbatch.lab.evaluate.llm import pace
from slurm_migbatch.lab.evaluate.servers import COLUMNS, scan_servers
from slurm_migbatch.lab.sim.gpus import geometry
from slurm_migbatch.lab.studies.pariselsa import kinds_of
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.llm.speed import Efficiencies

KINDS = kinds_of(geometry("a100-80gb"))
TRUE = Efficiencies(compute=0.65, narrow=1.4, bandwidth=0.75, layer_us=20.0, first=3.5, each=0.05, turn=0.2)
MODELS = {"meta-llama/Llama-3.1-8B-Instruct": "", "Qwen/Qwen3-14B": "", "Qwen/Qwen3-8B": "fp8"}


def table(folder: Path, rows: list[list[object]]) -> Path:
    lines = [",".join(COLUMNS), *(",".join(map(str, row)) for row in rows)]
    (folder / "served.csv").write_text("\n".join(lines) + "\n")
    return folder


def grid() -> list[list[object]]:
    return [
        ["trtllm", model, "h100_sxm", precision, inputs, outputs, batch, 1.0, 1.0]
        for model, precision in MODELS.items()
        for inputs in (512, 2048)
        for outputs in (64, 256)
        for batch in (1, 4, 16, 32)
    ]


def served(folder: Path) -> Path:
    """Write a table of language models with exactly the figures that `TRUE` gives; return its folder."""
    folder.mkdir(exist_ok=True)
    rows = grid()
    for row, point in zip(rows, scan_servers(table(folder, rows)).points, strict=True):
        figures = pace(point, TRUE)
        row[7:] = [1e3 * figures.ttft, 1e3 * figures.tpot]
    return table(folder, rows)


def write_table(
    path: Path,
    models: Sequence[tuple[str, float, float]],
    kinds: Sequence[Profile] = KINDS,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
) -> Path:
    """Write a table of models, each with a minimum time per batch and a time per item and compute slice."""
    lines = ["gpu,model,profile,batch,procs,latency_s"]
    for name, floor, item in models:
        for kind in kinds:
            for batch in batches:
                lines.append(f"a100-80gb,{name},{kind.name},{batch},1,{max(floor, item * batch / kind.compute):.6f}")
    path.mkdir(exist_ok=True)
    (path / "table.csv").write_text("\n".join(lines) + "\n")
    return path
