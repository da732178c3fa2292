"""Map requests to buckets: the finite grid on which decisions are made.

A request is rounded to the demanding side, to a cell of (model, role, batch, input size, objective): batch and input
size up to an edge of the model's grid, a latency limit down and a rate up to the preferred numbers of ISO 3 (R20: 20
per decade, so at most an eighth tighter than requested). Two requests of one bucket always get the same slice; this
lets a compiled table give the same answers as the service.

All figures are integers (microseconds, thousandths of items per second), so that Python and Lua agree exactly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.workload.hints import Hints
from slurm_migbatch.workload.modelfile import tagged_side

R20: Final = (100, 112, 125, 140, 160, 180, 200, 224, 250, 280, 315, 355, 400, 450, 500, 560, 630, 710, 800, 900)
"""The preferred numbers of one decade, times 100."""


@dataclass(frozen=True)
class Grid:
    """The edges of one model's buckets, ascending, and the defaults.

    `unit` is the unit of its input, `tok` or `px`; `guessed`: nothing states it. The last edge times powers of two are
    edges too, and of inputs also seven between each two of those, because memory grows with the square of a side; the
    compiled table contains none.
    """

    unit: str
    inputs: tuple[int, ...]
    batches: tuple[int, ...]
    default_input: int
    default_batch: int = 8
    guessed: bool = False

    def __post_init__(self) -> None:
        for edges in (self.inputs, self.batches):
            if not edges or list(edges) != sorted(set(edges)) or edges[0] < 1:
                raise ValueError(f"bucket edges must be ascending positive integers, not {edges}")

    def up_batch(self, batch: int | None) -> int:
        """Return the edge for a batch size; for None the default batch size, which is on the grid."""
        return up(batch or min(self.default_batch, self.batches[-1]), self.batches)

    def up_input(self, size: int | None) -> int:
        """Return the edge for an input size; for None the default input size, which is on the grid."""
        edge = up(size or min(self.default_input, self.inputs[-1]), self.inputs)
        if size is None or edge <= self.inputs[-1]:
            return edge
        step = max(edge // 16, 1)
        return -(-size // step) * step

    @property
    def ladder(self) -> tuple[int, ...]:
        """The batch sizes considered if the user gives none.

        They are the powers of two among the edges, and the default batch size.
        """
        usual = self.up_batch(None)
        return tuple(batch for batch in self.batches if batch == usual or batch & (batch - 1) == 0)


@dataclass(frozen=True)
class Bucket:
    """One cell. `batch` and `input` are the cell's upper edges (0: a model without a grid, whose figures are unknown).

    `slo_us` is the latency limit of one batch in microseconds, `rate` the needed thousandths of items per second; None
    if not requested.
    """

    model: str
    role: str
    batch: int
    input: int
    unit: str
    slo_us: int | None = None
    rate: int | None = None

    @property
    def cell(self) -> str:
        """The part of the name that the predicted figures depend on: `bert-large/infer/b32/128tok`."""
        return f"{self.model}/{self.role}/b{self.batch}/{self.input}{self.unit}"

    @property
    def name(self) -> str:
        """A stable name: `bert-large/infer/b32/128tok/slo200000us/any`."""
        slo = "any" if self.slo_us is None else f"slo{self.slo_us}us"
        rate = "any" if self.rate is None else f"rate{self.rate}"
        return f"{self.cell}/{slo}/{rate}"


def up(value: int, edges: Sequence[int]) -> int:
    """Return the smallest edge that is at least `value`; above the last one, that edge doubled as often as needed."""
    index = bisect_left(edges, value)
    return edges[index] if index < len(edges) else edges[-1] << ((value - 1) // edges[-1]).bit_length()


def preferred(value: int, *, ceiling: bool) -> int:
    """Return the preferred number at or below `value` (at or above it with `ceiling`); below 100 the value itself."""
    if value < 100:
        return value
    scale = 1
    while value >= 1000 * scale:
        scale *= 10
    if ceiling:
        index = bisect_left(R20, -(-value // scale))
        return (R20[index] if index < len(R20) else 1000) * scale
    return R20[bisect_right(R20, value // scale) - 1] * scale


def rate_of(items: int, seconds: int) -> int:
    """Return the thousandths of items per second, rounded up, that process `items` in `seconds`."""
    return -(-items * 1000 // seconds)


def rounded(given: Mapping[str, str | int]) -> dict[str, str | int]:
    """Return fields of Hints with the latency limit and the rate as `bucket_of` rounds them, all others as they are."""
    fields = dict(given)
    if isinstance(slo := fields.get("slo_us"), int):
        fields["slo_us"] = preferred(slo, ceiling=False)
    if isinstance(items := fields.get("items"), int) and isinstance(time := fields.get("deadline_s"), int):
        del fields["items"], fields["deadline_s"]
        fields["rate"] = preferred(rate_of(items, time), ceiling=True)
    return fields


def bucket_of(hints: Hints, model: str, grid: Grid) -> Bucket:
    """Return the bucket of a request whose model has a grid.

    Images are as large as the model's usual ones, or as a tag of its name states, if the hints do not say.
    """
    side = tagged_side(hints.model or "") if grid.unit == "px" else 0
    # in another unit than a guessed one it says nothing
    size = None if hints.input_unit not in (None, "", grid.unit) else hints.input
    usual = side if grid.default_input < side <= grid.inputs[-1] else None
    rate = None if hints.deadline_s is None or hints.items is None else rate_of(hints.items, hints.deadline_s)
    return Bucket(
        model=model,
        role=hints.kind,
        batch=grid.up_batch(hints.batch),
        input=grid.up_input(size or usual),
        unit=grid.unit,
        slo_us=None if hints.slo_us is None else preferred(hints.slo_us, ceiling=False),
        rate=None if rate is None else preferred(rate, ceiling=True),
    )
