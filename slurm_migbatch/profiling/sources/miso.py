"""Import MISO (SoCC 22): training steps on slices of an A100 40GB.

It reads the table of step times (one line for each slice, model and batch), the table of resources next to it, and the
lists of batches that fit each slice below it (`configs/1g_5gb.json`).

- The first step includes the warm-up; the mean over all later ones is used. Deep Speech varies much from step to step
  (its batches differ in length): the mean is what a whole job takes.
- A batch that the laboratory lists for some slice but not for this one did not fit: it is a point that did not run.
- Memory was read on the whole GPU, where TensorFlow allocates in large steps: ResNet shows 9.9 GB but
  trains on a slice of 4.75 GB. A figure is used for the point on 7g.40gb only if no smaller slice disproves it.
- Names are those of the laboratory's scripts: "bert" is BERT-base with 512 tokens, "resnet" and "mobilenet" are
  ResNet-50 and MobileNetV2 on CIFAR-10 (32 pixels), "transformer" is a small one for time series, "embedding" a 1-D CNN
  over word vectors. The last two and "gnn" get a prefix, because these names usually mean other networks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurm_migbatch.profiling.csvfile import LONGEST_ROW, LineError, Problems, header, number, read, whole
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.sources.laboratory import A100_40, Laboratory, Reading, known
from slurm_migbatch.workload.refusal import show

GPU = "a100-40gb"
WHOLE = "7g.40gb"
_STEPS = frozenset({"slice", "model", "batch", "mean_s", "p99_s"})
_RESOURCES = frozenset({"model", "batch", "memory_mib", "power_w"})
_CONFIG = re.compile(r"(\d)g_(\d+)gb\.json")


class _Known(NamedTuple):
    name: str
    family: str
    size: int | None


_MODELS: Mapping[str, _Known] = {
    "bert": _Known("bert-base", "encoder", 512),
    "resnet": _Known("resnet50", "cnn", 32),
    "mobilenet": _Known("mobilenet-v2", "cnn", 32),
    "cyclegan": _Known("cyclegan", "gan", 256),
    "deepspeech2": _Known("deepspeech2", "rnn", None),
    "embedding": _Known("miso-embedding", "cnn", 200),
    "gnn": _Known("miso-gnn", "gnn", None),
    "transformer": _Known("miso-transformer", "encoder", 500),
}


class _Step(NamedTuple):
    profile: str
    model: str
    batch: int
    mean: float
    p99: float


class _Use(NamedTuple):
    model: str
    batch: int
    mib: float


def _read(_root: Path, files: Sequence[Path], problems: Problems) -> Reading:
    steps: list[_Step] = []
    memory: dict[tuple[str, int], float] = {}
    anchors = [path for path in files if set(header(path)) >= _STEPS]
    for path in files:
        if path in anchors:
            steps += [step for _, step in read(path, problems, _step)]
        else:
            memory |= {(use.model, use.batch): use.mib for _, use in read(path, problems, _use)}
    if not anchors:
        return Reading([], ["resources of MISO without its step times are skipped"])
    fits = _fits(anchors, problems)
    ran = {(step.profile, step.model, step.batch) for step in steps}
    rows = [_point(step.profile, step.model, step.batch, step, _memory_need(memory, step, ran)) for step in steps]
    notices = []
    unproven = sum((model, batch) in memory for profile, model, batch in ran if profile == WHOLE)
    if used := sum(row.memory_mib is not None for row in rows):
        unproven -= used
    if unproven:
        notices.append(f"{unproven} memory figures of MISO are skipped: the same training ran in a smaller slice")
    if not fits:
        notices.append("without MISO's lists of what fits (configs/1g_5gb.json) points that did not run are unknown")
    listed = {(model, batch) for batches in fits.values() for model, batch in batches}
    for profile, batches in fits.items():
        rows += [
            _point(profile, model, batch, None, None)
            for model, batch in sorted(listed - batches)
            if (profile, model, batch) not in ran
        ]
    return Reading(rows, notices)


def _step(cells: dict[str, str]) -> _Step:
    profile, model = cells["slice"].strip().lower(), cells["model"].strip().lower()
    if profile not in A100_40:
        raise LineError(f"slice must be one of {', '.join(A100_40)}, not '{show(profile)}'")
    if not model:
        raise LineError("model is empty")
    mean, p99 = number(cells, "mean_s"), number(cells, "p99_s")
    if not mean:
        raise LineError("mean_s must be above 0")
    return _Step(profile, model, whole(cells, "batch"), mean, p99)


def _use(cells: dict[str, str]) -> _Use:
    return _Use(cells["model"].strip().lower(), whole(cells, "batch"), number(cells, "memory_mib"))


def _memory_need(
    memory: Mapping[tuple[str, int], float], step: _Step, ran: Iterable[tuple[str, str, int]]
) -> float | None:
    """Return the memory read on the whole GPU, unless the same training ran in a slice that has less memory."""
    mib = memory.get((step.model, step.batch))
    if step.profile != WHOLE or not mib:
        return None
    slices = [A100_40[profile].mib for profile, model, batch in ran if (model, batch) == (step.model, step.batch)]
    return mib if min(slices) >= mib else None


def _fits(anchors: Iterable[Path], problems: Problems) -> dict[str, set[tuple[str, int]]]:
    """Return (model, batch) by slice, from the lists below the folders of the step times."""
    by_slice: dict[str, set[tuple[str, int]]] = {}
    for path in sorted({path for anchor in anchors for path in anchor.parent.rglob("*g_*gb.json")}):
        match = _CONFIG.fullmatch(path.name)
        if match is None or not path.is_file() or (profile := f"{match[1]}g.{match[2]}gb") not in A100_40:
            continue
        try:
            with path.open(encoding="utf-8") as file:
                lists = json.loads(file.read(LONGEST_ROW))
            by_slice.setdefault(profile, set()).update((name.lower(), batch) for name, batch in _batches(lists))
        except ValueError as error:
            problems.add(path, 0, f"is not a list of batches: {error}")
    return by_slice


def _batches(lists: Any) -> Iterable[tuple[str, int]]:
    if not isinstance(lists, dict):
        raise LineError("it must contain one object")
    for name, batches in lists.items():
        if not isinstance(batches, list) or not all(type(batch) is int and batch > 0 for batch in batches):
            raise LineError(f"'{show(name)}' must have a list of whole numbers")
        yield from ((name, batch) for batch in batches)


def _point(profile: str, model: str, batch: int, step: _Step | None, mib: float | None) -> Measurement:
    described = _MODELS.get(model, _Known(model, "", None))
    facts = known(described.name)
    mig_slice = A100_40[profile]
    return Measurement(
        gpu=GPU,
        model=described.name,
        family=described.family,
        kind="train",
        profile=profile,
        compute_slices=mig_slice.compute,
        memory_slices=mig_slice.memory,
        sm_count=mig_slice.sms,
        batch=batch,
        input_size=described.size,
        throughput_per_s=batch / step.mean if step else None,
        latency_s=step.mean if step else None,
        latency_p99_s=(step.p99 or None) if step else None,
        memory_mib=mib,
        params=facts.params_m * 1e6 if facts else None,
        flops_per_item=facts.operations(described.size) if facts and described.size else None,
        source="MISO",
    )


LABORATORY = Laboratory("MISO", (_STEPS, _RESOURCES), _read)
