"""The compiled table: its records against the service, its size, and files that are not valid tables."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_migbatch.mig.profile import Profile
from slurm_migbatch.predict.candidate import Figures, Interval
from slurm_migbatch.predict.facts import BUILT_IN
from slurm_migbatch.predict.learned import LearnedPredictor
from slurm_migbatch.predict.selection import Chooser
from slurm_migbatch.predict.sheet import Block
from slurm_migbatch.submit.request import Accept, JobRequest
from slurm_migbatch.submit.table import TableCompiler, write_table
from slurm_migbatch.workload.buckets import Bucket, Grid
from slurm_migbatch.workload.catalog import GpuKind, MigNode, Partition, SiteCatalog
from tests.support.gpu_kinds import H100, SITE
from tests.support.lua_shim import Shim
from tests.support.predictors import ByCells
from tests.support.submit_agreement import OBJECTIVES, USER, agree

GRIDS = {
    "small": Grid("tok", (128,), (1,), 128, 1),
    "odd": Grid("px", (32, 224, 1024), (1, 3, 50, 65536), 224),
    "guess": Grid("px", (32, 224, 512), (1, 8), 224, guessed=True),
    "long": Grid("tok", tuple(range(1, 60)), (1, 2), 7),
}


class Arbitrary(ByCells):
    """Figures that follow no model: many decades, no order between slices, gaps."""

    version = "arbitrary"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def grids(self) -> Mapping[str, Grid]:
        return GRIDS

    def aliases(self) -> Mapping[str, str]:
        return {"tiny": "small", "gone": "nowhere"}

    def advice(self, bucket: Bucket, kind: GpuKind, profile: Profile) -> None:
        """None is given."""

    def figures(self, cell: Bucket, kind: GpuKind) -> Mapping[Profile, Figures]:
        chance = random.Random(f"{self._seed} {cell} {kind.name}")

        def about(low: float, high: float) -> Interval:
            value = 10 ** chance.uniform(low, high)
            return Interval(value / 2, value, value * 1.5)

        return {
            info.profile: Figures(about(-7, 6), about(-5, 8), about(0, 7))
            for info in kind.geometry.profiles
            if not info.profile.suffix and chance.random() < 0.9
        }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_table_gives_the_answers_of_the_service_for_arbitrary_figures(tmp_path: Path, seed: int) -> None:
    chooser, table = Chooser(Arbitrary(seed)), tmp_path / "table.lua"
    write_table(table, TableCompiler(chooser).text(SITE))
    with Shim(tmp_path, table=str(table)) as shim:
        for name in (*GRIDS, "tiny", "gone"):
            grid = GRIDS.get(name, GRIDS["small"])
            for batch in grid.batches:
                for size in grid.inputs:
                    objective = OBJECTIVES[(batch + size) % len(OBJECTIVES)]
                    for partition, unit in itertools.product(("gpu", "mixed"), ("px", "tok", "")):
                        hint = f"migbatch: model={name} batch={batch} input={size}{unit}{objective}"
                        asked = JobRequest(USER, partition=partition, tres_per_node="gres/mig:auto", comment=hint)
                        agree(asked, shim, chooser)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_table_chooses_slice_and_batch_for_arbitrary_figures(tmp_path: Path, seed: int) -> None:
    chooser, table = Chooser(Arbitrary(seed)), tmp_path / "table.lua"
    write_table(table, TableCompiler(chooser).text(SITE))
    objectives = (
        "slo=1d",
        "slo=20m items=10m deadline=1h",
        "slo=90s max=3g.40gb",
        "slo=1d mem=12gib",
        "slo=5s role=serve",
        "slo=1h role=serve rate=3",
    )
    chosen = 0
    with Shim(tmp_path, table=str(table)) as shim:
        for name, grid in GRIDS.items():
            for size in grid.inputs:
                for objective in objectives:
                    hint = f"migbatch: model={name} input={size}{grid.unit} {objective}"
                    for partition in ("gpu", "mixed"):
                        asked = JobRequest(USER, partition=partition, tres_per_node="gres:mig", comment=hint, batch=1)
                        answer = agree(asked, shim, chooser)
                        chosen += isinstance(answer, Accept) and "MIGBATCH_BATCH" in answer.message
    assert chosen > 50


def test_table_compiled_at_once_equals_table_compiled_cell_by_cell() -> None:
    class Plain(ByCells):
        def __init__(self) -> None:
            self._inner = LearnedPredictor()
            self.version, self.grids, self.aliases = self._inner.version, self._inner.grids, self._inner.aliases
            self.figures = self._inner.figures

    models = ["bert-large"]
    at_once = TableCompiler(Chooser(LearnedPredictor()), models).text(SITE)
    assert at_once == TableCompiler(Chooser(Plain()), models).text(SITE)


def test_a_change_of_nodes_alone_does_not_compile_the_records_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    sheet = LearnedPredictor.sheet

    def counted(self: LearnedPredictor, block: Block, kind: GpuKind) -> Any:
        computed.append(kind.name)
        return sheet(self, block, kind)

    monkeypatch.setattr(LearnedPredictor, "sheet", counted)
    chooser = Chooser(LearnedPredictor())
    compiler = TableCompiler(chooser, ["bert-large"])
    gpu = Partition("gpu", (H100,))
    node = MigNode("n1", (H100.name,), frozenset({"gpu"}))
    catalogs = [SiteCatalog({"gpu": gpu}), SiteCatalog({"gpu": gpu}, {"n1": node}), SITE, SiteCatalog({"gpu": gpu})]
    texts = [compiler.text(catalog) for catalog in catalogs]
    assert texts[0] != texts[1] and texts[0] == texts[3]
    assert len(computed) == 2 + 0 + 2 * len(SITE.kinds) + 2
    assert texts == [TableCompiler(chooser, ["bert-large"]).text(catalog) for catalog in catalogs]


@pytest.mark.slow
def test_table_header_that_slurmctld_loads_does_not_grow_with_the_grid() -> None:
    site = SiteCatalog({"gpu": Partition("gpu", (H100,))})
    facts = [
        replace(model, name=f"{model.name}-{number}", aliases=(), gflops=model.gflops * (1 + number / 7))
        for number in range(2)
        for model in BUILT_IN
    ]
    chooser = Chooser(LearnedPredictor(None, facts))
    text = TableCompiler(chooser).text(site)
    header = int(text.split("\n", 1)[0].split()[-1])
    cells = sum(2 * len(grid.batches) * len(grid.inputs) for grid in chooser.grids.values())
    assert text.isascii()
    assert header < 2000 + 60 * len(chooser.grids)
    assert len(text) < 15 * cells


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:50],
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("migbatch table 2", "migbatch table 1", 1),
        lambda text: text.replace("return {", "return nil --", 1),
        lambda text: text.replace("return {", "os.exit(3) x = {", 1),
        lambda text: text[: int(text.split("\n", 1)[0].split()[-1]) + 40],
    ],
)
def test_submission_is_accepted_with_a_damaged_table(tmp_path: Path, chooser: Chooser, damage: object) -> None:
    table = tmp_path / "table.lua"
    write_table(table, damage(TableCompiler(chooser, ["bert-large", "resnet50"]).text(SITE)))  # type: ignore[operator]
    with Shim(tmp_path, table=str(table)) as shim:
        asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto", comment="migbatch: batch=2")
        assert isinstance(shim(asked), Accept) and shim.errors == []


def test_new_table_is_loaded_and_a_deleted_one_stays_in_use(tmp_path: Path, chooser: Chooser) -> None:
    table, larger = tmp_path / "table.lua", Partition("gpu", (H100,), Profile.parse("3g.40gb"))
    asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:auto")

    def granted(shim: Shim) -> str:
        answer = shim(asked)
        assert isinstance(answer, Accept)
        return answer.changes["tres_per_node"]

    write_table(table, TableCompiler(chooser, ["resnet50"]).text(SITE))
    with Shim(tmp_path, table=str(table)) as shim:
        assert granted(shim) == "gres/mig:1g.10gb:1"
        write_table(table, TableCompiler(chooser, ["bert-large"]).text(SiteCatalog({"gpu": larger})))
        assert granted(shim) == "gres/mig:3g.40gb:1"
        table.unlink()
        assert granted(shim) == "gres/mig:3g.40gb:1"
        known = shim(replace(asked, comment="migbatch: model=bert-large batch=32 slo=200ms"))
        assert isinstance(known, Accept) and "bert-large/infer" in known.message


def test_texts_of_slurm_that_are_not_utf8_are_written_as_they_are(tmp_path: Path, compiler: TableCompiler) -> None:
    """Such as features: bytes for both Slurm and Lua. Without them there would be no table for anybody."""
    feature = b"caf\xe9".decode("utf-8", "surrogateescape")
    node = MigNode("n1", (H100.name,), frozenset({"gpu"}), frozenset({feature}))
    table = tmp_path / "table.lua"
    write_table(table, compiler.text(SiteCatalog(SITE.partitions, {"n1": node})))
    asked = JobRequest(USER, partition="gpu", tres_per_node="gres/mig:1g.10gb:1")
    with Shim(tmp_path, table=str(table)) as shim:
        assert isinstance(shim(replace(asked, features="caf\xe9")), Accept)
        assert not isinstance(shim(replace(asked, features="cafe")), Accept)
