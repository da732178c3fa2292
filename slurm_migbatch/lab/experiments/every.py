"""Run all experiments that have targets, each in its own process: a failure is reported, and the others continue.

Studies of papers' ideas, which have none, and experiments with wrong predictions, which take long, run on request.

Two run at a time if the machine has two processors; measurements of elapsed time run alone, after the others
(the simulator counts its own processor seconds). Every process has one thread for linear algebra, so that two of
them do not compete for two processors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from slurm_migbatch.lab.experiments.headlines import HEADLINES
from slurm_migbatch.lab.progress import Progress, silent

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START: Final = "from slurm_migbatch.cli.main import main; main()"

Extra: TypeAlias = Literal["studies", "wrong"]


@dataclass(frozen=True)
class Experiment:
    """A command.

    Attributes:
        group: that it belongs to: `migbatch bench`, `migbatch bench study` or `migbatch eval`.
        seeds: the option for the number of draws, "" without draws; `default`: how many.
        fixed: further options. `quick`: those instead with --quick.
        data: whether it reads data sets. `alone`: whether it measures elapsed time, so nothing else may run
            at the same time.
        wrong: whether it is measured with wrong predictions and forecasts.
    """

    name: str
    group: Literal["bench", "bench study", "eval"] = "bench"
    seeds: str = ""
    default: int = 10
    fixed: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    data: bool = True
    alone: bool = False
    wrong: bool = False

    @property
    def title(self) -> str:
        """The name, with `--wrong` if predictions are wrong."""
        return f"{self.name} --wrong" if self.wrong else self.name

    @property
    def extra(self) -> Extra | Literal[""]:
        """What it is, if it runs only on request."""
        return "studies" if self.study else "wrong" if self.wrong else ""

    @property
    def study(self) -> bool:
        """Whether it is a study of a paper's idea that migbatchd does not use; it has no bars."""
        return self.group == "bench study"

    def draws(self, seeds: int | None, quick: bool) -> int | None:
        """Return the number of draws; None without draws."""
        if not self.seeds:
            return None
        return seeds if seeds is not None else QUICK_SEEDS if quick else self.default

    def options(self, data: Path, seeds: int | None, quick: bool) -> list[str]:
        """Return the words of its command line after `migbatch`."""
        draws = self.draws(seeds, quick)
        return [
            *self.group.split(),
            self.name,
            *(("--data", str(data)) if self.data else ()),
            *((self.seeds, str(draws)) if draws is not None else ()),
            *(self.quick if quick else self.fixed),
            *(("--wrong",) if self.wrong else ()),
            "--json",
        ]


QUICK_SEEDS: Final = 2
EXPERIMENTS: Final = (
    Experiment("lending", seeds="--seeds"),
    Experiment("lending", seeds="--seeds", default=2, wrong=True),
    Experiment("sharing", seeds="--seeds"),
    Experiment("fragmentation", seeds="--seeds"),
    Experiment("fragmentation", seeds="--seeds", default=2, wrong=True),
    Experiment("services", "eval"),
    Experiment("dispatch", seeds="--seeds"),
    Experiment("pipelines", seeds="--seeds"),
    Experiment("simulator", quick=("--scale", "1", "--scale", "2")),
    Experiment("deepboot", "bench study", "--seeds"),
    Experiment("paris-elsa", "bench study", "--seeds"),
    Experiment("dstack", "bench study", "--mixes"),
    Experiment("instances", "bench study"),
    Experiment("placement", "bench study", "--seeds"),
    Experiment("scale", data=False, alone=True),
    Experiment("submit", quick=("--submissions", "200"), data=False, alone=True),
)
"""In the order in which they are begun: the longest first."""
SHOWN: Final = (
    *("fragmentation", "services", "dispatch", "pipelines", "sharing", "lending", "simulator", "scale", "submit"),
    *("fragmentation --wrong", "lending --wrong"),
    *("instances", "placement", "paris-elsa", "dstack", "deepboot"),
)

Run = Callable[[Sequence[str]], Mapping[str, Any]]
"""Run a command line after `migbatch`; return its JSON. Raises RuntimeError with its output if it fails."""


def child(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Run a command in a process of its own. Raises RuntimeError."""
    environment = {**os.environ, **dict.fromkeys(_THREADS, "1")}
    done = subprocess.run(
        [sys.executable, "-c", _START, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.endswith(" ...")]
        raise RuntimeError("; ".join(lines[-3:]) or f"it ended with status {done.returncode} without output")
    try:
        result = json.loads(done.stdout)
    except ValueError as error:
        raise RuntimeError(f"it printed no JSON ({error})") from None
    if not isinstance(result, dict):
        raise RuntimeError("it printed JSON that is not an object")
    return result


def deciders(result: Any) -> list[str]:
    """Return the decision functions that an experiment's result names, with the digests of their configurations."""
    named: dict[str, None] = {}
    if isinstance(result, Mapping):
        if "decides" in result and "configuration" in result:
            named[f"{result['decides']}, configuration {result['configuration']}"] = None
        for value in result.values():
            named.update(dict.fromkeys(deciders(value)))
    elif isinstance(result, list):
        for value in result:
            named.update(dict.fromkeys(deciders(value)))
    return list(named)


def measure(
    data: Path,
    seeds: int | None = None,
    *,
    quick: bool = False,
    also: Collection[Extra] = (),
    experiments: Sequence[Experiment] = EXPERIMENTS,
    run: Run = child,
    together: int = min(2, os.cpu_count() or 1),
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run them, of the extra ones those in `also`; `seeds` None: each its default.

    Returns:
        {"bench", "data", "quick", "seconds", "failed", "bars", "experiments"}: the experiments' bars with "experiment",
        and for each experiment "name", "study", "seeds" (None without draws), "seconds", "error" (None),
        "notes", "decides" (functions of migbatchd, each with its configuration), "headline" (None if no paper has
        one) and "result".
    """

    def measure_one(experiment: Experiment) -> dict[str, Any]:
        draws = experiment.draws(seeds, quick)
        progress(f"{experiment.title}{'' if draws is None else f', {draws} draws'}", 2 * len(experiments))
        began = time.perf_counter()
        entry: dict[str, Any] = {
            "name": experiment.title,
            "study": experiment.study,
            "seeds": draws,
            "error": None,
            "headline": None,
            "result": {},
        }
        try:
            result = run(experiment.options(data, seeds, quick))
            entry["result"] = result
            if experiment.title in HEADLINES:
                entry["headline"] = HEADLINES[experiment.title](result).to_dict()
        except (RuntimeError, OSError) as error:
            entry["error"] = str(error)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            entry["error"] = f"its result is not as expected: {error!r}"
        entry["notes"] = list(entry["result"].get("notes", ()))
        entry["decides"] = deciders(entry["result"])
        entry["seconds"] = round(time.perf_counter() - began, 1)
        progress(f"{experiment.title}: {entry['error'] or 'measured'}, {entry['seconds']:.0f} s", 2 * len(experiments))
        return entry

    began = time.perf_counter()
    experiments = [experiment for experiment in experiments if experiment.extra in ("", *also)]
    with ThreadPoolExecutor(together) as pool:
        rows = list(pool.map(measure_one, [experiment for experiment in experiments if not experiment.alone]))
    rows += [measure_one(experiment) for experiment in experiments if experiment.alone]
    rows.sort(key=lambda row: SHOWN.index(row["name"]) if row["name"] in SHOWN else len(SHOWN))
    return {
        "bench": "all",
        "data": str(data),
        "quick": quick,
        "seconds": round(time.perf_counter() - began, 1),
        "failed": [row["name"] for row in rows if row["error"]],
        "bars": [{"experiment": row["name"], **bar} for row in rows for bar in row["result"].get("bars", ())],
        "experiments": rows,
    }
