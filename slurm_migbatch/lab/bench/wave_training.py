"""Run the training job of a wave: steps with the duration that its slice implies. Started by Slurm as an ordinary user.

    python3 -I wave_training.py LIBRARY DIRECTORY STEPS STEP_S

A step sleeps for STEP_S seconds over the slice's speed, the square root of its share of the compute slices of seven
(`decide.lending.values.usual_speed`). `bench.live` checks its checkpoint reports for lost ones.
"""

from __future__ import annotations

import math
import sys
import time


def main(library: str, directory: str, total: int, step_s: float) -> None:
    """Train, and print the steps at which this run began and ended, and the saved steps."""
    sys.path.insert(0, library)
    from slurm_migbatch import elastic

    with elastic.Trainer(directory, effective_batch=32, care=elastic.Care(every_s=20.0, report_s=2.0)) as run:
        state = run.restore() or {"steps": 0}
        compute = int(run.slice.profile.partition("g")[0] or 7)
        _tell(f"begin {state['steps']} {run.slice.profile}")

        def save() -> dict[str, int]:
            _tell(f"saved {state['steps']}")
            return dict(state)

        for _ in run.steps(total, save):
            time.sleep(step_s / math.sqrt(compute / 7))
            state["steps"] += 1
    _tell(f"end {state['steps']}")


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
