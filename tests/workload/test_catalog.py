"""The catalog: what the site has, as a value that is serialized as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_migbatch.workload.catalog import CatalogError, Partition, SiteCatalog, load
from tests.support.gpu_kinds import A100_40, H100, SITE, P


def test_catalog_round_trips_through_json(tmp_path: Path) -> None:
    path = tmp_path / "catalog.json"
    path.write_text(json.dumps(SITE.to_dict()))
    assert load(path) == SITE


def test_offers_are_ordered_and_use_the_smallest_memory() -> None:
    mixed = Partition("both", (H100, A100_40))
    names = list(mixed.offers)
    assert names[:4] == ["1g.5gb", "1g.10gb", "1g.10gb.me", "1g.20gb"]
    assert mixed.offers["1g.10gb"].memory_mib == 9856  # the A100's double-memory slice is the smaller one
    assert mixed.offers["1g.10gb"].memory_slices == 2
    assert [offer.profile.name for offer in mixed.plain if offer.profile.suffix] == []


def test_default_of_a_partition_is_a_profile_that_its_gpus_have() -> None:
    assert SITE.partitions["gpu"].default.profile == P("1g.10gb")
    assert SITE.partitions["old"].default.profile == P("2g.10gb")
    assert Partition("x", (H100,), P("2g.10gb")).default.profile == P("1g.10gb")  # a default that no GPU has


def test_view_of_several_partitions_has_the_kinds_of_all() -> None:
    view = SITE.view(["old", "gpu"])
    assert [kind.name for kind in view.kinds] == ["a100-40gb", "h100-80gb"]
    assert view.default.profile == P("2g.10gb")
    assert view.kind_of(None) is A100_40 and view.kind_of("h100") is H100 and view.kind_of("v100") is None


@pytest.mark.parametrize(
    "data",
    [{}, {"version": 9}, {"version": 1}, {"version": 1, "kinds": [{}], "partitions": []}, {"version": 1, "kinds": []}],
)
def test_invalid_catalog_data_is_refused(data: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CatalogError):
        SiteCatalog.from_dict(data)


def test_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.json"
    path.write_text("{")
    with pytest.raises(CatalogError, match="not JSON"):
        load(path)
