"""What topology.conf needs for the catalog, and no change where it is already present."""

from __future__ import annotations

import pytest

from slurm_migbatch.install.slurmconf import apply, load
from slurm_migbatch.install.topology import SWITCH, plan, yaml_note

PATH = "/etc/slurm/topology.conf"
CATALOG = "none[1-2]"
OWN = f"SwitchName={SWITCH} Nodes={CATALOG}\n"


def changed(
    plugin: str, text: str, version: tuple[int, int] = (24, 11), catalog: str = CATALOG
) -> tuple[str, int, int]:
    """The new text and the numbers of notes and problems; a second plan has nothing to do."""
    conf = load(PATH, {PATH: text}.get)
    done = plan(plugin, conf, catalog, version)
    new = apply(conf.texts, done.edits)[PATH]
    if done.edits:
        assert plan(plugin, load(PATH, {PATH: new}.get), catalog, version).edits == []
    return new, len(done.notes), len(done.problems)


@pytest.mark.parametrize(
    ("before", "after", "notes"),
    [
        ("SwitchName=a Nodes=n[1-9]\n", f"SwitchName=a Nodes=n[1-9],{CATALOG}\n", 0),
        (
            "SwitchName=a Nodes=n1\nswitchname=top Switches=a # up\n",
            f"SwitchName=a Nodes=n1\nswitchname=top Switches=a,{SWITCH} # up\n{OWN}",
            0,
        ),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n", f"SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n{OWN}", 1),
        ("", "", 0),
    ],
)
def test_catalog_is_added_to_the_switches(before: str, after: str, notes: int) -> None:
    assert changed("tree", before) == (after, notes, 0)
    assert changed("default", before) == (before, 0, 0)


def test_grown_catalog_is_updated() -> None:
    assert changed("tree", f"SwitchName=a Nodes=n1\n{OWN}", catalog="none[1-4]")[0].endswith(" Nodes=none[1-4]\n")


def test_invalid_node_list_is_a_problem() -> None:
    assert changed("tree", "SwitchName=a Nodes=n[1-\n") == ("SwitchName=a Nodes=n[1-\n", 0, 1)


def test_catalog_is_added_to_the_blocks() -> None:
    text = "BlockName=a Nodes=n[1-4]\nBlockSizes={}\n"
    own = f"BlockName={SWITCH} Nodes={CATALOG}\n"
    assert changed("block", text.format(4)) == (text.format(4), 1, 0)
    assert changed("block", text.format("2,4")) == (text.format("2,4") + own, 0, 0)
    assert changed("block", text.format(4), (25, 11)) == (text.format(4) + own, 0, 0)


def test_missing_catalog_in_topology_yaml_is_noted() -> None:
    assert yaml_note(f"nodes: {CATALOG}", CATALOG) == yaml_note("nodes: none1,none2", CATALOG) == ""
    assert f"- switch: {SWITCH}" in yaml_note("nodes: n1", CATALOG)
