"""Predict figures of any known model on any slice from the learned state.

Without measurements the physical prior predicts, with correspondingly wide intervals. Each measured model, of this site
or an imported laboratory, improves the first prediction for all other models a little, and that for itself much.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import numpy as np

from slurm_migbatch.mig.geometry import ProfileInfo
from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import FAR_TOO_LARGE, Figures, Interval, step_of
from slurm_migbatch.predict.cells import Array, Cells, GpuSpec
from slurm_migbatch.predict.facts import BUILT_IN, ModelFacts
from slurm_migbatch.predict.knee import LARGEST_BATCH, batch_edges, input_edges
from slurm_migbatch.predict.known import Known, ModelKnowledge, usual_tokens
from slurm_migbatch.predict.llm.memory import need_of
from slurm_migbatch.predict.llm.names import Found, resolve
from slurm_migbatch.predict.llm.served import ServedMeasurements
from slurm_migbatch.predict.llm.speed import Correction, Machine, machine_of, step_interval
from slurm_migbatch.predict.llm.trained import TrainedMeasurements
from slurm_migbatch.predict.llm.workload import Workload, encoder_serving_of, plain_serving_of, training_of
from slurm_migbatch.predict.recommend import MOST_COPIES, Advice, advise
from slurm_migbatch.predict.sheet import Block
from slurm_migbatch.predict.state import SURFACES, Learned, Tried
from slurm_migbatch.values.remembering import remembered
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind
from slurm_migbatch.workload.gpufacts import facts_of, model_of

CONFIDENCE: Final = 0.9
"""Confidence of bounds: the upper end of a latency, the lower end of a rate."""
LARGEST_INPUT: Final = {"encoder": 512, "decoder": 32768}
LARGEST_PIXELS: Final = 1024
EDGE_SHARES: Final = ((1, 1), (2, 2), (3, 4), (4, 4), (7, 8))
"""Slices whose knees set the bucket edges: compute slices of 7 and memory slices of 8."""
EDGE_GPU: Final = "a100-80gb"
ENOUGH_POINTS: Final = 2
"""Measured points of a training from which on its curve is more accurate than its computation."""
_MOST_GROWN: Final = 128
"""Grids that are kept, of a figure, a model, a kind of work and a kind of GPU each."""
LEAST_WIDTH: Final = 0.01
"""Least half width of the interval of a computed figure, in standard deviations; at a confidence of 0.5 it would be 0.
"""
_NORMAL: Final = NormalDist()
_MOST: Final = 6.0
"""Half of the widest interval, in logarithms."""


class LearnedPredictor:
    """Predict from a `Learned` state.

    Figures depend only on the bucket's cell (model, role, batch, input), never on its objective: the compiled table
    holds them for every cell and compares them with objectives itself.
    """

    def __init__(
        self, learned: Learned | None = None, facts: Iterable[ModelFacts] = BUILT_IN, *, confidence: float = CONFIDENCE
    ) -> None:
        """`facts`: public specifications of models, later ones replace earlier ones of the same name. `confidence`: 0.5
        to 0.99.
        """
        self.learned = learned or Learned()
        self.knowledge = ModelKnowledge(facts)
        self._served = ServedMeasurements(self.learned.served)
        self._trained = TrainedMeasurements(self.learned.trained)
        self._level = max(2.0 * confidence - 1.0, 0.0)
        #: width of the intervals of computed figures relative to that at the default confidence
        self.widening = max(_NORMAL.inv_cdf(confidence), LEAST_WIDTH) / _NORMAL.inv_cdf(CONFIDENCE)
        self._known = {name: self.knowledge.of(name) for name in self.knowledge.facts}
        self._known.update({name: known for name, known in self.learned.known.items() if name not in self._known})
        self._grids = {name: self._grid(name, known) for name, known in self._known.items()}
        self._grown: dict[tuple[str, str, str, GpuKind], Array] = {}

    @property
    def version(self) -> str:
        """Name of the predictor: `prior`, or `learned-<version>`."""
        return f"learned-{self.learned.version}" if self.learned.version else "prior"

    def grids(self) -> Mapping[str, Grid]:
        """Return the known models by canonical name, with their bucket edges."""
        return self._grids

    def aliases(self) -> Mapping[str, str]:
        """Return other names of known models, canonical name by alias."""
        return self.knowledge.aliases

    def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
        """Return the figures of every plain profile; none for an unknown model."""
        if cell.model not in self._known:
            return {}
        sheet = self.sheet(Block(cell.model, cell.role, (cell.batch,), (cell.input,)), kind)[:, :, 0]
        plain = [info.profile for info in kind.geometry.profiles if not info.profile.suffix]
        return {
            profile: Figures(*(Interval(*ends) for ends in sheet[:, :, i].tolist())) for i, profile in enumerate(plain)
        }

    def sheet(self, block: Block, kind: GpuKind) -> Array:
        """Return the numbers of `figures` for all cells of a block: figures x ends x cells x plain profiles in the
        kind's order.

        Figures are seconds per batch, items per second and MiB, their ends low, mid and high.
        """
        gpu = GpuSpec.of_kind(kind)
        infos = [info for info in kind.geometry.profiles if not info.profile.suffix]
        batches = np.repeat(np.array(block.batches, dtype=np.float64), len(block.inputs))
        size, points = len(infos), len(batches)
        ends = self._growing("time", block, kind, infos, gpu)
        ends[2] = _by_share(ends[2], infos)
        seconds = _monotone(ends.reshape(-1, size), infos).reshape(3, points, size)
        least, most = self._tried_mib(block, kind, gpu)
        least = np.maximum(least, self._unsized_mib(block, kind, gpu))
        mib = np.minimum(self._growing("memory", block, kind, infos, gpu), most[:, None])
        mib = np.maximum(mib, least[:, None])
        far = FAR_TOO_LARGE * kind.full.memory_mib
        far -= far % step_of(far)
        # a need beyond it is refused: by its median, not because little is known
        mib[2] = np.where(mib[1] < far, np.minimum(mib[2], far), mib[2])
        sheet: Array = np.stack([seconds, batches[:, None] / seconds[::-1], mib])
        return sheet

    def _tried_mib(self, block: Block, kind: GpuKind, gpu: GpuSpec) -> tuple[Array, Array]:
        """Return the MiB that each cell needs at least, more than the slices on which no more work than its own ran out
        of memory, and at most, those of the slices on which no less was measured.
        """
        batches = np.repeat(np.array(block.batches), len(block.inputs))
        inputs = np.tile(np.array(block.inputs), len(block.batches))
        least, most = np.zeros(len(batches)), np.full(len(batches), np.inf)
        key = block.model, block.role, self.learned.as_measured(gpu).name

        def known(tried: Iterable[Tried]) -> Iterator[tuple[int, int, int]]:
            for batch, size, name in tried:
                profile = Profile.parse(name) if name else kind.full.profile
                if profile in kind.geometry:
                    yield batch, size, kind.geometry.info(profile).memory_mib

        for batch, size, mib in known(self.learned.short.get(key, ())):
            as_much = (batches >= batch) & (inputs >= size)
            least[as_much] = np.maximum(least[as_much], mib + 1)
        for batch, size, mib in known(self.learned.held.get(key, ())):
            no_more = (batches <= batch) & (inputs <= size)
            # rounded up, as predictions are, it is no more than the slice has
            most[no_more] = np.minimum(most[no_more], mib - mib % step_of(mib))
        return least, most

    def _unsized_mib(self, block: Block, kind: GpuKind, gpu: GpuSpec) -> Array:
        """Return the MiB of each cell of longer texts than usual as computed from the architecture, of a public encoder
        whose measured rows state no length: theirs may be much shorter. 0 for any other cell and model.
        """
        fitted = self.learned.fitted.get((block.model, block.role, self.learned.as_measured(gpu).name))
        found = None if block.model in self.knowledge.facts else resolve(block.model)
        if fitted is None or fitted.inputs or found is None or found.how != "public":
            return np.zeros(len(block))
        if found.architecture.kind != "encoder":
            return np.zeros(len(block))
        needs = [need_of(workload, kind.full.memory_mib).used for workload in self._workloads(found, block)]
        longer = np.tile(np.array(block.inputs), len(block.batches)) > self._known[block.model].reference
        return np.where(longer, needs, 0.0)

    def computable(self, figure: str, model: str, role: str, gpu: GpuSpec) -> Found | None:
        """Return the model whose time or memory in training is computed from its architecture; None if it was measured,
        or its architecture is unknown. That of a plain model gives the memory alone, of inference too.

        On the measured slices of MIGPerf and on an H100 that is more accurate than the curves of other models
        (`migbatch eval torch`).
        """
        found = resolve(model)
        if found is None:
            return None
        if found.architecture.kind == "plain":
            described = figure == "memory" and model not in self.knowledge.facts
        else:
            described = role == "train" and found.how == "public"
        fitted = self.learned.fitted.get((model, role, self.learned.as_measured(gpu).name))
        measured = fitted is not None and fitted.points_of(figure) >= ENOUGH_POINTS
        return found if described and not measured else None

    def _computed_seconds(self, found: Found, block: Block, kind: GpuKind, infos: Sequence[ProfileInfo]) -> Array:
        """Return the seconds of a training step (3 x cells x profiles) as computed, corrected by measured trainings."""
        gpu, machines = model_of(kind.name), [machine_of(kind, info) for info in infos]
        ends = []
        for workload in self._workloads(found, block):
            need = need_of(workload, kind.full.memory_mib)
            for machine in machines:
                correction = self._trained.correction(workload, gpu, machine, _share_of_gpu(machine, kind))
                ends.append(step_interval(workload, need, machine, correction).widened(self.widening))
        seconds = np.array([(end.low, end.mid, end.high) for end in ends]).T
        shaped: Array = seconds.reshape(3, len(block), len(infos))
        return shaped

    def _workloads(self, found: Found, block: Block) -> Iterator[Workload]:
        serving_of = plain_serving_of if found.architecture.kind == "plain" else encoder_serving_of
        workload_of = training_of if block.role == "train" else serving_of
        for batch, size in itertools.product(block.batches, block.inputs):
            yield self.sized(workload_of(found, batch, size))

    def _ends(self, figure: str, block: Block, kind: GpuKind, infos: Sequence[ProfileInfo], gpu: GpuSpec) -> Array:
        """Return low, mid and high of the seconds or of the MiB, 3 x cells x profiles."""
        found = self.computable(figure, block.model, block.role, gpu)
        if found is None:
            known = self._known[block.model]
            cells = _cells(block, infos, gpu, known)
            ends = self.interval(figure, block.model, known, gpu, block.role, cells)
            return ends.reshape(3, len(block), len(infos))
        if figure == "time":
            return self._computed_seconds(found, block, kind, infos)
        # it depends on no slice
        needs = [need_of(workload, kind.full.memory_mib) for workload in self._workloads(found, block)]
        doubt = self.widening * np.array([need.doubt for need in needs])
        used = np.array([need.used for need in needs])
        mib = np.stack([used - doubt, used, used + doubt])
        return np.repeat(mib[:, :, None], len(infos), axis=2)

    def _growing(self, figure: str, block: Block, kind: GpuKind, infos: Sequence[ProfileInfo], gpu: GpuSpec) -> Array:
        """Return ends (3 x cells x profiles) that never fall as batch or input grows: each is at least that of all
        cells of the model's grid with no larger batch and input.

        The curves grow, but their intervals are narrower near measured points.
        """
        grid = self._grids[block.model]
        shape = 3, len(block.batches), len(block.inputs), len(infos)

        def accumulated() -> Array:
            whole = Block(block.model, block.role, grid.batches, grid.inputs)
            ends = self._ends(figure, whole, kind, infos, gpu)
            ends = ends.reshape(3, len(grid.batches), len(grid.inputs), len(infos))
            return np.maximum.accumulate(np.maximum.accumulate(ends, axis=1), axis=2)

        grown = remembered(self._grown, _MOST_GROWN, (figure, block.model, block.role, kind), accumulated)
        rows = np.searchsorted(grid.batches, block.batches, "right") - 1
        columns = np.searchsorted(grid.inputs, block.inputs, "right") - 1
        ends: Array = np.where(
            (rows[:, None, None] >= 0) & (columns[:, None] >= 0), grown[:, rows.clip(0)][:, :, columns.clip(0)], 0.0
        )
        if not ({*block.batches} <= {*grid.batches} and {*block.inputs} <= {*grid.inputs}):
            ends = np.maximum(ends, self._ends(figure, block, kind, infos, gpu).reshape(shape))
        return ends.reshape(3, len(block), len(infos))

    def correction(self, workload: Workload, kind: GpuKind, info: ProfileInfo) -> Correction:
        """Return the correction of computed figures by measured servers and training jobs of language models."""
        machine = machine_of(kind, info)
        measured = self._served if workload.training is None else self._trained
        return measured.correction(workload, model_of(kind.name), machine, _share_of_gpu(machine, kind))

    def sized(self, workload: Workload) -> Workload:
        """Return a language model's training job with its memory corrected by measurements; any other workload
        unchanged.
        """
        return self._trained.sized(workload)

    def advice(self, bucket: Bucket, kind: GpuKind, profile: Profile) -> Advice | None:
        """Return the batch and copies to run on a slice under the bucket's latency limit.

        All batches are candidates if the bucket's batch is 0, else only that one. None if there is no prediction, and
        for training: its batch is the user's decision.
        """
        known, grid = self._known.get(bucket.model), self._grids.get(bucket.model)
        if known is None or grid is None or bucket.role != "infer" or profile not in kind.geometry:
            return None
        info, gpu = kind.geometry.info(profile), GpuSpec.of_kind(kind)
        batches = (bucket.batch,) if bucket.batch else grid.batches
        count, copies = len(batches), 1 if bucket.slo_us else MOST_COPIES
        single = Cells.grid(1, bucket.input, [info] * (count * copies), gpu, known)
        cells = replace(
            single,
            batch=np.tile(np.array(batches, dtype=np.float64), copies),
            procs=np.repeat(np.arange(1.0, copies + 1.0), count),
        )
        seconds = self.interval("time", bucket.model, known, gpu, bucket.role, cells)
        mib = self.interval("memory", bucket.model, known, gpu, bucket.role, cells)[2].reshape(copies, count)
        least, most = self._tried_mib(Block(bucket.model, bucket.role, batches, (bucket.input,)), kind, gpu)
        number = np.arange(1.0, copies + 1.0)
        mib = np.maximum(np.minimum(mib, np.outer(number, most)), np.outer(number, least))
        if bucket.slo_us:
            mib = np.where(seconds[2] * 1e6 <= bucket.slo_us, mib, np.inf)
        return advise(batches, seconds[1].reshape(copies, count), mib, info.memory_mib)

    def interval(self, figure: str, model: str, known: Known, gpu: GpuSpec, role: str, cells: Cells) -> Array:
        """Return low, mid and high (3 x points) of a figure: seconds per batch, or MiB in use."""
        belief, points, stack = self.learned.belief(figure, model, role, known, gpu)
        surface = SURFACES[figure]
        value, deviation, pace = belief.predict_paced(surface, cells)
        stranger = self.learned.population(figure, role).is_stranger(known, self.learned.as_measured(gpu), stack)
        calibration = self.learned.calibration(figure, role)
        factor = calibration.factor(self._level, points, pace, stranger=stranger, close=known.is_close)
        half = np.clip(factor * deviation, 1e-3, _MOST)
        ends: Array = np.exp(np.stack([value - half, value, value + half]))
        if figure == "memory":
            least, most = self._shown_mib(model, role, known, gpu, cells)
            ends[2] = np.maximum(np.minimum(ends[2], most), least)
            ends = np.minimum(ends, ends[2])
        return ends

    def _shown_mib(self, model: str, role: str, known: Known, gpu: GpuSpec, cells: Cells) -> tuple[Array, Array]:
        """Return the least and the most MiB of each point by what runs took: as much as those with no more work, and no
        more than those with no less.
        """
        least, most = np.zeros(len(cells)), np.full(len(cells), np.inf)
        key = model, role, self.learned.as_measured(gpu).name
        for batch, size, needed, enough in self.learned.peaks.get(key, ()):
            volume = known.volume(size or known.reference)
            no_less = (cells.batch >= batch) & (cells.volume >= volume)
            least = np.where(no_less, np.maximum(least, needed), least)
            no_more = (cells.batch <= batch) & (cells.volume <= volume)
            most = np.where(no_more, np.minimum(most, enough), most)
        return least * cells.procs, most * cells.procs

    def _grid(self, model: str, known: Known) -> Grid:
        """Return the bucket edges from the model's own curve, that of inference if both kinds of work are known."""
        facts = facts_of(EDGE_GPU)
        assert facts is not None
        gpu = GpuSpec(EDGE_GPU, facts, 80)
        measured = [
            fitted for fitted in self.learned.fitted.values() if fitted.model == model and "time" in fitted.beliefs
        ]
        if measured:
            belief = min(measured, key=lambda fitted: (fitted.kind, -fitted.points, fitted.gpu)).beliefs["time"]
        else:
            belief = self.learned.population("time", "infer").prior(model, known, gpu)
        usual = self._usual_input(model, known)
        anchors = frozenset({known.reference, usual, *(size for fitted in measured for size in fitted.inputs)})
        return _grid_of(known, tuple(belief.mean.tolist()), anchors, usual)

    def _usual_input(self, model: str, known: Known) -> int:
        """Return the input size of a request that states none. A table may have shorter texts than a public model
        takes, and than its jobs had before that table.
        """
        given = known.unit == "px" or model in self.knowledge.facts or not self.knowledge.facts
        return max(known.reference, (not given and usual_tokens(model)) or 0)


def _share_of_gpu(machine: Machine, kind: GpuKind) -> float:
    """Return a slice's share of the GPU's operations per second."""
    return machine.flops / (kind.tflops * 1e12)


@lru_cache(maxsize=1)
def _edge_cells() -> Sequence[Cells]:
    """Return every batch on each of EDGE_SHARES, at the reference size of any model."""
    batches = np.arange(1, LARGEST_BATCH + 1, dtype=np.float64)
    ones = np.ones(len(batches))
    shares = [(14 * compute / 108 * ones, memory / 8 * ones) for compute, memory in EDGE_SHARES]
    return [Cells(batches, sm, memory, ones, ones, ones) for sm, memory in shares]


@lru_cache(maxsize=1024)  # most models have the same grid in every version of the predictor
def _grid_of(known: Known, mean: tuple[float, ...], anchors: frozenset[int], usual: int) -> Grid:
    """Return the bucket edges of a model whose time has the parameters `mean`; `anchors`: input sizes to include;
    `usual`: the one of a request that states none.
    """
    columns = [np.exp(SURFACES["time"].curve(np.array(mean), cells)) for cells in _edge_cells()]
    largest = LARGEST_PIXELS if known.unit == "px" else LARGEST_INPUT.get(known.family, LARGEST_INPUT["decoder"])
    return Grid(
        known.unit,
        input_edges(known.work, anchors, max(largest, *anchors)),
        batch_edges(np.column_stack(columns)),
        usual,
        guessed=known.guessed_unit,
    )


def _cells(block: Block, infos: Sequence[ProfileInfo], gpu: GpuSpec, known: Known) -> Cells:
    """Return a block's cells on each profile of a GPU."""
    single = Cells.grid(1, known.reference, infos, gpu, known)
    size, points = len(infos), len(block)

    def over_inputs(values: Iterable[float]) -> Array:
        return np.repeat(np.tile(np.array(list(values)), len(block.batches)), size)

    return Cells(
        np.repeat(np.array(block.batches, dtype=np.float64), len(block.inputs) * size),
        np.tile(single.sm, points),
        np.tile(single.memory, points),
        np.ones(points * size),
        over_inputs(known.work(value) for value in block.inputs),
        over_inputs(known.volume(value) for value in block.inputs),
    )


def _by_share(seconds: Array, infos: list[ProfileInfo]) -> Array:
    """Enforce that more hardware is no faster than its share: upper ends (cells x profiles) are at least those of
    slices within it, divided by how much more it has.

    Where a slice may be limited by the host, the interval does not include that its device may be as slow as on others.
    """
    result: Array = seconds.copy()
    for i, info in enumerate(infos):
        for j in _within(info, infos):
            more = max(info.sm_count / max(infos[j].sm_count, 1), info.memory_slices / infos[j].memory_slices)
            result[:, i] = np.maximum(result[:, i], seconds[:, j] / more)
    return result


def _monotone(seconds: Array, infos: list[ProfileInfo]) -> Array:
    """Enforce that more hardware is never slower: a slice's interval ends are at most those of slices within it."""
    result: Array = np.empty_like(seconds)
    for i, info in enumerate(infos):
        result[:, i] = np.min(seconds[:, _within(info, infos)], axis=1)
    return result


def _within(info: ProfileInfo, infos: list[ProfileInfo]) -> list[int]:
    """Return the indices of the slices that have no more of anything, the slice itself included."""
    return [
        j
        for j, other in enumerate(infos)
        if other.sm_count <= info.sm_count and other.memory_slices <= info.memory_slices
    ]
