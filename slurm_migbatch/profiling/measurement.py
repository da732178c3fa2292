"""Define one measured point: a model at one batch on one slice of one GPU, in the columns common to all sources."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from slurm_migbatch.mig.profile import Profile, ProfileError
from slurm_migbatch.profiling.csvfile import BEYOND
from slurm_migbatch.workload.llmhints import CHOICES
from slurm_migbatch.workload.refusal import show

RUN_KINDS: Final = ("infer", "train")
SERVE: Final = "serve"
KINDS: Final = (*RUN_KINDS, SERVE)
CPU: Final = "cpu"
"""The name in the column `gpu` for a run without a GPU."""


class MeasurementError(ValueError):
    """Values that are not a measurement; the message says which column and what to write instead."""


class Tuning(NamedTuple):
    """How a language model was trained, in the form of hints; None: as if the hint were omitted."""

    method: str | None = None
    optimizer: str | None = None
    checkpointing: str | None = None

    @classmethod
    def parse(cls, text: str) -> Tuning:
        """Read `lora/adamw/checkpointing`, parts of it in any order, or nothing; raises MeasurementError."""
        parts: dict[str, str] = {}
        for word in filter(None, text.split("/")):
            name = next((key for key in ("method", "optimizer") if word in CHOICES[key]), None)
            if name is None and word != "checkpointing":
                known = ", ".join((*CHOICES["method"], *CHOICES["optimizer"], "checkpointing"))
                raise MeasurementError(f"tuning must be words of {known} joined by /, not {show(text)}")
            parts[name or "checkpointing"] = word if name else "on"
        return cls(**parts)

    @property
    def usual(self) -> bool:
        """Whether all parameters are trained, without activation checkpointing."""
        return self.method in (None, "full") and self.checkpointing != "on"


@dataclass(frozen=True)
class Measurement:
    """One row of the common table. None (in CSV: empty) is "unknown".

    A row with neither throughput nor latency means that the point was tried and could not run (out of memory).

    Attributes:
        gpu: the GPU's name in NVML or in the source, `NVIDIA A100-SXM4-80GB`, `a100-80gb`; `cpu` for a test.
        model: the model's name in lower case, `resnet50`.
        family: kind of network: `cnn`, `encoder`, `decoder`, `vit`; free text, empty if unknown.
        kind: `infer`, `train`, or `serve`: a server of a language model under load. There an item is a request, a batch
            is the number of concurrent requests, `input_size` and `output` are the tokens of each request and answer,
            and `latency_s` is the time of a request from end to end.
        profile: the MIG profile, `2g.20gb`; empty for a whole GPU without MIG.
        compute_slices: GPU slices of the profile, of 7 on most GPUs.
        memory_slices: memory slices of the profile, of 8 on most GPUs.
        sm_count: streaming multiprocessors of the slice.
        batch: items in one batch of one process.
        input_size: tokens of an item, or the side of a square image in pixels.
        procs: identical processes that share the slice (MPS); every figure of speed below counts them all.
        throughput_per_s: items per second of the slice, all processes together.
        latency_s: mean seconds for one batch of one process.
        latency_p99_s: the 99th percentile of it.
        memory_mib: frame buffer in use on the slice, all processes together.
        params: parameters of the model (a count, not millions).
        flops_per_item: floating-point operations of a forward pass for one item (a multiply-add counts as two).
        source: where the row comes from, as free text.
        engine: the serving engine, `vllm`; with `kind` serve.
        precision: precision of the weights, `bf16`, `awq`; empty: as in the model's name.
        output: tokens that each request generated.
        ttft_s, ttft_p99_s: seconds to the first token, the median and the 99th percentile.
        tpot_s, tpot_p99_s: the same for each further token.
        tuning: how a language model was trained, with `kind` train: `lora/adamw_8bit/checkpointing`, see `Tuning`;
            empty: fully, with AdamW. There an item is a sequence of `input_size` tokens.
    """

    gpu: str
    model: str
    family: str = ""
    kind: str = "infer"
    profile: str = ""
    compute_slices: int | None = None
    memory_slices: int | None = None
    sm_count: int | None = None
    batch: int = 1
    input_size: int | None = None
    procs: int = 1
    throughput_per_s: float | None = None
    latency_s: float | None = None
    latency_p99_s: float | None = None
    memory_mib: float | None = None
    params: float | None = None
    flops_per_item: float | None = None
    source: str = ""
    engine: str = ""
    precision: str = ""
    output: int | None = None
    ttft_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_s: float | None = None
    tpot_p99_s: float | None = None
    tuning: str = ""

    def __post_init__(self) -> None:
        if not self.gpu or not self.model:
            raise MeasurementError("gpu and model must not be empty")
        if self.kind not in KINDS:
            raise MeasurementError(f"kind must be infer, train or serve, not {show(self.kind)}")
        if self.profile:
            try:
                object.__setattr__(self, "profile", Profile.parse(self.profile).name)
            except ProfileError as error:
                raise MeasurementError(f"profile: {error}") from None
        self._check_texts()
        self._check_numbers()

    def _check_texts(self) -> None:
        for name, most in TEXT_LENGTHS.items():
            text = getattr(self, name)
            if len(text) > most or not text.isprintable():
                raise MeasurementError(f"{name} must be at most {most} printable characters, not '{show(text)}'")
        if self.tuning and self.kind != "train":
            raise MeasurementError(f"tuning is only for kind train, not {self.kind}: leave it empty")
        Tuning.parse(self.tuning)

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 10**9:
                raise MeasurementError(f"{name} must be a whole number from 1 to 10^9, not {value}")
        for name in _FIGURES:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise MeasurementError(f"{name} must be above 0, not {value}: leave it empty if unknown")

    @property
    def ran(self) -> bool:
        """Whether the point ran; False if it was tried and ran out of memory."""
        return self.throughput_per_s is not None or self.latency_s is not None

    @property
    def seconds(self) -> float | None:
        """Seconds for one batch of one process, from either figure of speed; None if it did not run."""
        if self.latency_s is not None:
            return self.latency_s
        return None if self.throughput_per_s is None else self.batch * self.procs / self.throughput_per_s

    @property
    def rate(self) -> float | None:
        """Items per second of the whole slice, from either figure; None if it did not run."""
        if self.throughput_per_s is not None:
            return self.throughput_per_s
        return None if self.latency_s is None else self.batch * self.procs / self.latency_s

    def figure(self, name: str) -> float | None:
        """Return the seconds per batch (`time`) or the MiB (`memory`); None if unknown."""
        return self.seconds if name == "time" else self.memory_mib

    def agrees(self, most: float) -> bool:
        """Return whether throughput and latency differ by a factor of at most `most`, or one of them is unknown."""
        if self.throughput_per_s is None or self.latency_s is None:
            return True
        return 1 / most <= self.throughput_per_s * self.latency_s / (self.batch * self.procs) <= most

    @property
    def trained(self) -> Tuning:
        """How a language model was trained."""
        return Tuning.parse(self.tuning)

    @property
    def point(self) -> tuple[Any, ...]:
        """The point's key: its values of IDENTITY. The other columns are results.

        Values that only some kinds have come last, and only if set: the record keeps digests of points.
        """
        key = tuple(getattr(self, name) for name in IDENTITY)
        for names in (SERVED_IDENTITY, TRAINED_IDENTITY):
            extra = tuple(getattr(self, name) for name in names)
            key = (*key, *extra) if any(extra) else key
        return key

    def to_dict(self) -> dict[str, Any]:
        """Return the columns by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def from_text(cls, row: Mapping[str, str | None]) -> Measurement:
        """Return a row of text cells by column name; empty or missing ones, and figures of 0, are unknown.

        Raises MeasurementError.
        """
        values: dict[str, Any] = {}
        for name in COLUMNS:
            text = (row.get(name) or "").strip()
            if not text:
                continue
            if name in _COUNTS:
                values[name] = _count(name, text)
            elif name in _FIGURES:
                value = _figure(name, text)
                if value > 0 and not 1 / BEYOND < value < BEYOND:
                    raise MeasurementError(f"{name} must be between {1 / BEYOND:g} and {BEYOND:g}, not {show(text)}")
                values[name] = value or None  # laboratories write 0 for "did not run"
            else:
                values[name] = text.lower() if name in _LOWER else text
        for name in ("gpu", "model", "batch"):
            if name not in values:
                raise MeasurementError(f"{name} is empty")
        return cls(**values)


COLUMNS: Final = tuple(field.name for field in fields(Measurement))
"""The common table's columns in order."""
IDENTITY: Final = ("gpu", "model", "kind", "profile", "batch", "input_size", "procs", "source")
SERVED_IDENTITY: Final = ("engine", "precision", "output")
"""Further key columns of servers."""
TRAINED_IDENTITY: Final = ("tuning",)
"""Further key columns of training jobs."""
TEXT_LENGTHS: Final[Mapping[str, int]] = {
    "gpu": 128, "model": 128, "family": 64, "source": 256, "engine": 32, "precision": 32, "tuning": 64,
}  # fmt: skip
_LOWER: Final = ("model", "family", "kind", "profile", "engine", "precision", "tuning")
_COUNTS: Final = ("compute_slices", "memory_slices", "sm_count", "batch", "input_size", "procs", "output")
_FIGURES: Final = (
    "throughput_per_s", "latency_s", "latency_p99_s", "memory_mib", "params", "flops_per_item", "ttft_s", "ttft_p99_s",
    "tpot_s", "tpot_p99_s",
)  # fmt: skip


OF_SPEED: Final = frozenset({"throughput_per_s", "latency_s"})
"""Columns of speed, of which a table has one, unless all its rows are of servers and it has the times of tokens."""
LEAST_COUNT: Final = 1000.0
"""Fewer parameters or operations than any network has: such a number is probably in millions or billions."""


def rounded(value: float | None) -> float | None:
    """Return a measured figure as it is written: six significant digits; measurements are far less accurate."""
    return None if value is None else float(f"{value:.6g}")


def _count(name: str, text: str) -> int:
    value = _figure(name, text)
    if value != int(value):
        raise MeasurementError(f"{name} must be a whole number, not {show(text)}")
    return int(value)


_NUMBER_AND_MORE: Final = re.compile(r"[0-9]+(?:\.[0-9]+)? ?[^0-9.,]")


def _figure(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        advice = "leave it empty if unknown"
        if _NUMBER_AND_MORE.match(text):
            advice = "write a number alone, in the column's unit"
        elif name in OF_SPEED:  # without any, the point did not run
            advice = "leave it empty if the row has another speed, write OOM if memory ran out, else leave the row out"
        raise MeasurementError(f"{name} must be a number, not {show(text)}: {advice}")
    return value
