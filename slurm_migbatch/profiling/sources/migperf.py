"""Import MIGPerf (MIGProfiler): inference and training on slices of an A100 40GB and 80GB, from its folder `data/`.

All tables with `model_name`, `latency` and `start_timestamp` are read; the GPU and the kind come from the folders
(`A100-40g/infer_bsz`, `A100-80g/train/cv`), the slice from a column or from the file's name.

- Latency is in milliseconds for one batch. The throughput column of the text models on the 80 GB card is wrong (its
  script divides the number of tensors, 3, by the latency), so throughput is batch / latency everywhere.
- One measurement is in up to four files; the same start is the same measurement, and the copy with the memory is
  taken. The same point with two start times was measured twice.
- Rows of zeros did not fit.
- On the 80 GB card texts are padded to the longest of their batch, and few reviews are as long as 256 tokens: if the
  spread of the latency is over a tenth of its mean, the length differs from the column, and the row is dropped.
- Memory is the frame buffer in use (MiB), the CUDA context included, which differs from slice to slice.
- `resnet50_moco` is ResNet-50 trained from MoCo's weights, `vision_transformer` is torchvision's ViT-B/16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from slurm_migbatch.profiling.csvfile import LineError, Problems, number, read, whole
from slurm_migbatch.profiling.measurement import Measurement
from slurm_migbatch.profiling.sources.laboratory import A100_40, A100_80, Laboratory, LaboratorySlice, Reading, known
from slurm_migbatch.workload.refusal import show

PIXELS: Final = 224
MOST_SPREAD: Final = 0.1
_COLUMNS = frozenset({"model_name", "batch_size", "latency", "latency_std", "throughput", "start_timestamp"})
_ALIASES = {"vision_transformer": "vit-b-16", "resnet50_moco": "resnet50"}
_FOLDER = re.compile(r"a100-(40|80)gb?")
_NAMED = re.compile(r"(?:^|_)(\d+)g_")
_NUMBERED = re.compile(r"mig_profile_(\d+)")
_NUMBERS = {"0": 7, "9": 3, "14": 2, "19": 1}
_GPUS: Final = {"40": A100_40, "80": A100_80}


class _Shape(NamedTuple):
    params: float
    layers: int
    width: int

    def operations(self, tokens: int) -> float:
        """Count a forward pass: two for each weight of the layers and token (12 width^2 a layer), plus attention."""
        return 24.0 * self.layers * self.width**2 * tokens + 4.0 * self.layers * self.width * tokens**2


_BERT, _DISTIL = _Shape(177.9e6, 12, 768), _Shape(134.7e6, 6, 768)
_ENCODERS = {
    "bert-base-multilingual-cased": _BERT,
    "paraphrase-multilingual-mpnet-base-v2": _Shape(278.0e6, 12, 768),
    "paraphrase-multilingual-minilm-l12-v2": _Shape(117.7e6, 12, 384),
    "distiluse-base-multilingual-cased-v1": _DISTIL,
    "distiluse-base-multilingual-cased-v2": _DISTIL,
}
"""From their published configurations."""


class _Place(NamedTuple):
    """GPU, kind of work and slice according to the file's path; `profile` is None if the path names none."""

    card: str
    kind: str
    profile: str | None


class _Taken(NamedTuple):
    row: Measurement
    start: int
    steady: bool


def _read(root: Path, files: Sequence[Path], problems: Problems) -> Reading:
    taken: list[_Taken] = []
    unplaced: dict[str, list[str]] = {}
    for path in files:
        place = _place(path)
        if isinstance(place, str):
            unplaced.setdefault(place, []).append(str(path.relative_to(root)))
            continue
        taken += [point for _, point in read(path, problems, partial(_row, place))]
    notices = [
        f"{len(names)} files of MIGPerf are skipped ({', '.join(names[:3])}{', ...' if names[3:] else ''}): {why}"
        for why, names in unplaced.items()
    ]
    varying = {_measured(point) for point in taken if not point.steady}
    if varying:
        notices.append(
            f"{len(varying)} points of MIGPerf are skipped: their texts were shorter than stated in the column"
        )
    return Reading(_copies_joined(point for point in taken if point.steady), notices)


def _place(path: Path) -> _Place | str:
    """Return the GPU, kind of work and slice of a file, or why it is skipped."""
    parts = [part.lower() for part in path.resolve().parts]
    cards = [i for i, part in enumerate(parts[:-1]) if _FOLDER.fullmatch(part)]
    if not cards:
        return "no parent directory is named A100-40g or A100-80g"
    match = _FOLDER.fullmatch(parts[cards[-1]])
    assert match is not None
    inside = parts[cards[-1] + 1 :]
    if any("train" in part or "finetune" in part for part in inside[:-1]):
        kind = "train"
    elif any("infer" in part for part in inside[:-1]):
        kind = "infer"
    else:
        return "no parent directory is named infer, train or finetune"
    return _Place(match[1], kind, _profile_in(inside[-1], match[1]))


def _profile_in(name: str, card: str) -> str | None:
    if (numbered := _NUMBERED.search(name)) and numbered[1] in _NUMBERS:
        return _by(_GPUS[card], slices=_NUMBERS[numbered[1]])
    if named := _NAMED.search(name):
        return _by(_GPUS[card], gigabytes=int(named[1]))
    return None


def _by(profiles: dict[str, LaboratorySlice], *, slices: int | None = None, gigabytes: int | None = None) -> str | None:
    """Return the first profile with this many slices or this much memory: of 3g and 4g, MIGPerf used only 3g."""
    for name, mig_slice in profiles.items():
        if mig_slice.compute == slices or name.endswith(f".{gigabytes}gb"):
            return name
    return None


def _row(place: _Place, cells: dict[str, str]) -> _Taken:
    name = cells["model_name"].strip().lower()
    if not name:
        raise LineError("model_name is empty")
    profiles = _GPUS[place.card]
    profile = _profile(place, cells)
    batch = whole(cells, "batch_size")
    tokens = whole(cells, "seq_length") if "seq_length" in cells else None
    seconds, spread = (round(number(cells, column) / 1000, 9) for column in ("latency", "latency_std"))
    memory = number(cells, "fb_used_mean") if cells.get("fb_used_mean", "").strip() else 0.0
    facts, shape = known(_ALIASES.get(name, name)), _ENCODERS.get(name)
    size = tokens or (PIXELS if facts and facts.unit == "px" else None)
    flops = None
    if size and (facts or shape):
        flops = facts.operations(size) if facts else shape.operations(size) if shape else None
    params = number(cells, "total_params") if "total_params" in cells else facts.params_m * 1e6 if facts else 0.0
    row = Measurement(
        gpu=f"a100-{place.card}gb",
        model=facts.name if facts else name,
        family=facts.family if facts else "encoder" if tokens else "",
        kind=place.kind,
        profile=profile,
        compute_slices=profiles[profile].compute,
        memory_slices=profiles[profile].memory,
        sm_count=profiles[profile].sms,
        batch=batch,
        input_size=size,
        throughput_per_s=batch / seconds if seconds else None,
        latency_s=seconds or None,
        memory_mib=memory or None,
        params=params or (shape.params if shape else None),
        flops_per_item=flops,
        source="MIGPerf fine-tuning" if name == "resnet50_moco" else "MIGPerf",
    )
    start = int(number(cells, "start_timestamp"))
    return _Taken(row, start, not tokens or spread <= MOST_SPREAD * seconds)


def _profile(place: _Place, cells: dict[str, str]) -> str:
    profiles = _GPUS[place.card]
    text = cells.get("mig_profile", "").strip().lower()
    for column in ("instance_memory", "mig"):
        if cells.get(column, "").strip():
            text = _by(profiles, gigabytes=whole(cells, column)) or cells[column].strip()
    profile = text or place.profile
    if profile is None:
        raise LineError("neither a column (mig_profile, instance_memory, mig) nor the file name gives the slice")
    if profile not in profiles:
        raise LineError(f"'{show(profile)}' is not a slice of an A100 {place.card}GB: {', '.join(profiles)}")
    return profile


def _measured(point: _Taken) -> tuple[object, ...]:
    """Return the common key of two copies of one measurement."""
    row = point.row
    return row.gpu, row.model, row.kind, row.profile, row.batch, row.input_size, row.source, point.start


def _copies_joined(taken: Iterable[_Taken]) -> list[Measurement]:
    joined: dict[tuple[object, ...], Measurement] = {}
    for point in taken:
        copy = joined.setdefault(_measured(point), point.row)
        if copy.memory_mib is None and point.row.memory_mib is not None:
            joined[_measured(point)] = replace(copy, memory_mib=point.row.memory_mib)
    return list(joined.values())


LABORATORY = Laboratory("MIGPerf", (_COLUMNS,), _read)
