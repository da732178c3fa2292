"""Train with slurm_migbatch.elastic: fit a line to noisy points by gradient descent. Needs no GPU.

python elastic_training.py DIRECTORY [STEPS [SECONDS OF ONE STEP]]
"""

import logging
import random
import sys
import time

from slurm_migbatch import elastic

POINTS = [(n / 500 - 1, 3 * (n / 500 - 1) - 1 + random.Random(n).gauss(0, 0.1)) for n in range(1000)]


def gradient(model, points):
    """Return the gradient of the mean squared error."""
    misses = [(model["slope"] * x + model["offset"] - y, x) for x, y in points]
    return {
        "slope": 2 * sum(miss * x for miss, x in misses) / len(points),
        "offset": 2 * sum(miss for miss, _ in misses) / len(points),
    }


def rate(step, steps):
    """Return the learning rate, a function of the step, so that it is the same after an interruption."""
    return 0.2 * (1 - step / steps)


def main(directory, steps=600, pause_s=0.1):
    """Train; the output of each step is the same however often the job was interrupted."""
    # the memory of the slice limits the micro-batch; put the figures of your model here
    fits = elastic.Memory(bytes_per_item=150e6, fixed_bytes=2e9)
    model = {"slope": 0.0, "offset": 0.0}
    with elastic.Trainer(directory, items=len(POINTS), effective_batch=256, fits=fits, seed=1) as run:
        model.update(run.restore() or {})
        print(f"{run.slice}: micro-batches of {run.micro}, from step {run.done}", flush=True)
        for step in run.steps(steps, save=lambda: model):
            change = {"slope": 0.0, "offset": 0.0}
            for micro in step:
                part = gradient(model, [POINTS[i] for i in micro.indices])
                for name in change:
                    change[name] += micro.weight * part[name]
            for name in model:
                model[name] -= rate(step.number, steps) * change[name]
            time.sleep(pause_s)  # in place of GPU work
            if step.number % 50 == 49:
                print(f"step {step.number + 1}: y = {model['slope']:.6f} x + {model['offset']:.6f}", flush=True)
    print("trained", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(sys.argv[1], *map(int, sys.argv[2:3]), *map(float, sys.argv[3:4]))
