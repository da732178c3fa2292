"""Train a small transformer with slurm_migbatch.elastic and torch; write each step's loss and the last weights.

python torch_training.py DIRECTORY OUTPUT STEPS [EXTRA MEGABYTES OF STATE]
"""

import logging
import sys
import time
from pathlib import Path

import torch

from slurm_migbatch import elastic

ITEMS, WORDS = 512, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(directory: str, output: str, total: str, extra_mb: str = "0") -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), layer, torch.nn.Linear(64, 100)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = torch.randint(0, 100, (ITEMS, WORDS), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ballast = torch.zeros(int(extra_mb) << 18, device=DEVICE)
    fits = elastic.Memory(bytes_per_item=1e6, fixed_bytes=1e9)

    def write(line: str) -> None:
        with Path(output).open("a") as file:
            file.write(line + "\n")

    def save() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ballast": ballast}

    with elastic.Trainer(directory, items=ITEMS, effective_batch=48, fits=fits, seed=3, micro=16) as run:
        begun = time.monotonic()
        state = run.restore()
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            ballast.copy_(state["ballast"])
        print(f"restored {run.done} steps in {time.monotonic() - begun:.2f} s", flush=True)
        for step in run.steps(total=int(total), save=save):
            torch.manual_seed(step.seed)
            mean = 0.0
            for micro in step:
                words = texts[torch.tensor(list(micro.indices), device=DEVICE)]
                loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
                (loss * micro.weight).backward()
                mean += float(loss.detach()) * micro.weight
            optimizer.step()
            optimizer.zero_grad()
            write(f"{step.number} {mean!r}")
            time.sleep(0.02)
    weights = torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])
    write(f"weights {weights.double().sum().item()!r} {weights.double().square().sum().item()!r}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(*sys.argv[1:])
