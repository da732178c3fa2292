"""A small real training: a network of two layers on generated data, with momentum, noise and a learning-rate schedule.

python small_training.py DIRECTORY LOSSES MOST [key=value of Care ...]     prints the number of every step that begins

It appends "step loss" to LOSSES, the loss before the step's update. MOST is the largest micro-batch.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from slurm_migbatch import elastic

ITEMS, BATCH, TOTAL = 203, 32, 90
PAUSE_S = float(os.environ.get("STEP_S", "0.004"))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ITEMS, 5))
    return x, np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.05 * rng.normal(size=ITEMS)


def fresh() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    model = {"a": rng.normal(size=(5, 12)) * 0.4, "b": np.zeros(12), "c": rng.normal(size=12) * 0.3}
    return model | {f"v{name}": np.zeros_like(value) for name, value in model.items()}


def gradient(model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Return the mean squared error and its gradient."""
    hidden = np.tanh(x @ model["a"] + model["b"])
    residual = hidden @ model["c"] - y
    hidden_gradient = (2 / len(y)) * residual[:, None] * model["c"] * (1 - hidden**2)
    return float(np.mean(residual**2)), {
        "a": x.T @ hidden_gradient,
        "b": hidden_gradient.sum(axis=0),
        "c": (2 / len(y)) * hidden.T @ residual,
    }


def rate(step: int) -> float:
    """Return the learning rate: warm-up, then a cosine."""
    return 0.05 * min(1.0, (step + 1) / 8) * 0.5 * (1 + math.cos(math.pi * step / TOTAL))


def train(
    run: elastic.Trainer, losses: TextIO, total: int = TOTAL, report_step: Callable[[int], object] = lambda step: None
) -> dict[str, np.ndarray]:
    x, y = data()
    model = run.restore() or fresh()
    for step in run.steps(total, save=lambda: model):
        report_step(step.number)
        total_loss = 0.0
        added: dict[str, np.ndarray] = {}
        for micro in step:
            noise = [np.random.default_rng([step.seed, index]).normal(size=5) for index in micro.indices]
            chosen = list(micro.indices)
            loss, gradients = gradient(model, x[chosen] + 0.1 * np.array(noise), y[chosen])
            total_loss += micro.weight * loss
            for name, value in gradients.items():
                added[name] = added.get(name, 0.0) + micro.weight * value
        for name, value in added.items():
            model[f"v{name}"] = 0.9 * model[f"v{name}"] + value
            model[name] = model[name] - rate(step.number) * model[f"v{name}"]
        losses.write(f"{step.number} {float(total_loss)!r}\n")
        losses.flush()
        time.sleep(PAUSE_S)
    return model


def main(directory: str, losses: str, most: str, *care: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options: dict[str, Any] = {key: float(value) for key, value in (word.split("=") for word in care)}
    with (
        Path(losses).open("a") as file,
        elastic.Trainer(
            directory, items=ITEMS, effective_batch=BATCH, fits=int(most), seed=11, care=elastic.Care(**options)
        ) as run,
    ):
        train(run, file, report_step=lambda number: print(number, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
