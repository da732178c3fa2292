"""Which lines of the site's are found to need what an uninstallation removes."""

from slurm_migbatch.install.files import FileChange
from slurm_migbatch.install.leftovers import leftovers


def test_catalog_node_is_found_in_lists_and_not_in_other_words(tmp_path):
    main, own_file = tmp_path / "slurm.conf", tmp_path / "migbatch.conf"
    main.write_text(
        "JobCompType=jobcomp/none\nProlog=/opt/none/prolog\nPartitionName=a Nodes=n[1-2],none\n"
        "PartitionName=b Nodes=nonesuch\nSuspendExcNodes=none[1-2]\nInclude migbatch.conf\n"
    )
    own_file.write_text("NodeName=none,none[1-2] State=DOWN\n")
    found = leftovers(str(main), [FileChange(str(own_file), own_file.read_text(), None, "own")])
    places = [sentence.partition(", which")[0].removeprefix(f"{main}:") for sentence in found]
    assert places == ["3 needs none", "5 needs none[1-2]", "6 needs migbatch.conf"]
