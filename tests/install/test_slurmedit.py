"""Which lines of a site's slurm.conf and gres.conf must change, and what is written to our own files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_migbatch import site
from slurm_migbatch.install.dynamicnodes import with_dynamic
from slurm_migbatch.install.slurmconf import apply, load
from slurm_migbatch.install.slurmedit import plan
from slurm_migbatch.site import NodeLine
from slurm_migbatch.slurm.client import NodeRow
from tests.support.slurm_files import GRES, MAIN, NODES, SITE, H, M

DEVICES = ("/dev/nvidia0", "/dev/nvidia1")


def planned(slurm, gres="", wanted=SITE, lending=()):
    conf = load(MAIN, {MAIN: slurm}.get)
    gres_conf = load(GRES, ({GRES: gres} if gres else {}).get)
    return plan(wanted, conf, gres_conf, lending)


def edited(slurm, gres="", wanted=SITE, lending=()):
    """The texts after the edits, and the texts of the included files."""
    done = planned(slurm, gres, wanted, lending)
    texts = apply({MAIN: slurm, GRES: gres}, done.edits)
    ours = site.render("slurm.conf.j2", site=done.site), site.render("gres.conf.j2", site=done.site)
    return texts[MAIN], texts[GRES], ours, done


def test_settings_missing_at_the_site_are_written_to_our_file():
    slurm, gres, (included, included_gres), done = edited(NODES)
    assert slurm.splitlines() == [
        f"NodeName=h1 CPUs=8 RealMemory=100 Gres={H} Features=mig_node_h1",
        f"NodeName=h2 CPUs=8 RealMemory=100 Gres={H} Features=mig_node_h2",
        f"NodeName=m1 CPUs=4 RealMemory=200 Feature=a30,mig_node_m1 Gres={M}",
        "PartitionName=p Nodes=h1,migcatalog",
        "Include migbatch.conf",
    ]
    assert gres == "Include migbatch-gres.conf\n"
    for line in (
        "GresTypes=gpu,mig",
        "PrologFlags=Alloc,DeferBatch",
        "Prolog=/etc/slurm/migbatch-prolog",
        "PrologEpilogTimeout=60",
        "JobSubmitPlugins=lua",
    ):
        assert line in included.splitlines()
    (catalog,) = [line for line in included.splitlines() if line.startswith("NodeName=")]
    assert (
        " NodeAddr=127.0.0.1 Port=1 CPUs=8 RealMemory=200 Features=a30,mig_node_h1,mig_node_h2,mig_node_m1 State=DOWN "
        in catalog
    )
    assert "PartitionName" not in included and "AccountingStorageTRES" not in included
    assert "NodeName=h[1-2] AutoDetect=off" in included_gres.splitlines()
    assert not done.problems and not done.notes


def dynamic(gres: str, *features: str, name: str = "h2", cpus: int = 16) -> NodeRow:
    """A dynamic node as slurmctld shows it; `gres`: types of mig and their counts, as migbatchd has set them last."""
    counts = {kind: int(count) for kind, _, count in (word.partition(":") for word in gres.split(",") if word)}
    states = frozenset({"IDLE", "DYNAMIC_NORM"})
    return NodeRow(
        name, states, counts, features=frozenset(features), cpus=cpus, memory=500, other_gres="gpu:2,fpga:x:3"
    )


@pytest.mark.parametrize(
    ("gres", "features", "lacks"),
    [
        ("", ["big"], True),
        ("7g.80gb:1,none:13", ["big"], True),
        ("1g.10gb:7", ["big", "mig_node_h2"], True),
        ("7g.80gb:1,none:13", ["big", "mig_node_h2"], False),
        ("7g.80gb:1,none:13,loan:1", ["big", "mig_node_h2"], False),
    ],
)
def test_dynamic_node_gets_no_line_but_the_options_of_its_slurmd(gres, features, lacks):
    slurm = NODES.replace("h[1-2]", "h1").replace("Nodes=h1", "Nodes=more") + "NodeSet=more Feature=big\n"
    slurm += "NodeName=DEFAULT CPUs=99\n"
    conf = with_dynamic(load(MAIN, {MAIN: slurm}.get), [dynamic(gres, *features), dynamic("", name="h1", cpus=77)])
    done = plan(SITE, conf, load(GRES, {}.get))
    text = apply({MAIN: slurm, GRES: ""}, done.edits)[MAIN]
    assert not done.problems and "h2" not in text and "PartitionName=p Nodes=more,migcatalog" in text
    notes = [note for note in done.notes if "--conf" in note]
    assert len(notes) == lacks
    if lacks:
        assert notes[0].startswith(f"dynamic nodes h2 need Gres=gpu:2,fpga:x:3,{H} and Feature=big,mig_node_NAME (")
    included, gres_file = site.render("slurm.conf.j2", site=done.site), site.render("gres.conf.j2", site=done.site)
    (catalog,) = [line for line in included.splitlines() if line.startswith("NodeName=")]
    assert " CPUs=16 RealMemory=500 Features=" in catalog and "fpga:x:3" in catalog and ",mig_node_h2," in catalog
    assert "big" in catalog.split("Features=")[1].split()[0].split(",")
    assert "NodeName=h[1-2] Name=mig Type=1g.10gb Count=14" in gres_file


def test_feature_of_a_dynamic_node_adds_no_setting_to_slurm_conf():
    """Root of the node chooses it; Slurm's REST API shows any text."""
    slurm = NODES.replace("h[1-2]", "h1")
    odd = dynamic("none:14", "big", "x State=UP", "a\nProlog=/tmp/x", "b#", 'c"', "mig_node_h2")
    done = plan(SITE, with_dynamic(load(MAIN, {MAIN: slurm}.get), [odd]), load(GRES, {}.get))
    included = site.render("slurm.conf.j2", site=done.site)
    assert " Features=big,a30,mig_node_h1,mig_node_h2,mig_node_m1 " in included
    assert not any(text in included for text in ("State=UP", "/tmp/x", "b#", 'c"'))


@pytest.mark.parametrize(
    ("own", "default", "then"),
    [
        ("CPUs=8", "Sockets=1 CoresPerSocket=2", "CPUs=8 Sockets=8 CoresPerSocket=1"),
        ("Sockets=2 CoresPerSocket=4", "CPUs=2 ThreadsPerCore=2", "Sockets=2 CoresPerSocket=4 ThreadsPerCore=1 CPUs=8"),
        ("CPUs=8", "CoreSpecCount=4 MemSpecLimit=90", "CPUs=8 CoreSpecCount=0 MemSpecLimit=0"),
        ("CPUs=8 CoreSpecCount=1", "CoreSpecCount=2 Weight=3", "CPUs=8 CoreSpecCount=0 CpuSpecList=0"),
    ],
)
def test_catalog_does_not_inherit_the_size_of_other_nodes(own, default, then):
    """Slurm corrects a CPUs= that does not match the sockets, and refuses jobs that no node is large enough for."""
    slurm = f"NodeName=h[1-2],m1 {own}\nNodeName=DEFAULT {default}\nNodeName=c1\n"
    (catalog,) = [line for line in edited(slurm)[2][0].splitlines() if line.startswith("NodeName=")]
    assert f" Port=1 {then} Features=" in catalog
    after = edited(f"Include migbatch.conf\n{slurm}")[2][0].splitlines()[-1]
    own = own.replace("CoreSpecCount=1", "CpuSpecList=0")
    assert f" Port=1 {own} Features=" in after, "it is above the DEFAULT line"


def test_catalog_reserves_for_the_system_what_all_mig_nodes_do():
    """Otherwise a job for more than any node gives to jobs waits for good, instead of being refused.

    The catalog node never registers, so Slurm would choose no cores for CoreSpecCount there.
    """
    slurm = NODES.replace("RealMemory=100", "RealMemory=100 CoreSpecCount=2 MemSpecLimit=10")
    assert "SpecLimit" not in edited(slurm)[2][0], "m1 reserves none"
    slurm = slurm.replace("RealMemory=200", "RealMemory=200 CoreSpecCount=1 MemSpecLimit=30")
    done = edited(slurm)
    assert " CpuSpecList=0 MemSpecLimit=10 RealMemory=200 " in done[2][0]
    threads = slurm.replace("CPUs=8", "Sockets=1 CoresPerSocket=8 ThreadsPerCore=2").replace(
        "CoreSpecCount=1", "CpuSpecList=0,3"
    )
    assert " ThreadsPerCore=2 CpuSpecList=0-3 MemSpecLimit=10 " in edited(threads)[2][0]


def test_catalog_has_the_memory_of_mig_nodes_that_is_given_in_k():
    """Otherwise it has 1 MiB, and Slurm refuses jobs with --mem while no node offers their profile."""
    included = edited(NODES.replace("RealMemory=100", "RealMemory=500K"))[2][0]
    assert " RealMemory=512000 " in included


def test_catalog_node_has_the_other_gres_of_mig_nodes():
    """Slurm refuses a job for `mig:7g.80gb,fpga:1` if no node at all currently has both."""
    slurm = NODES.replace("RealMemory=100", "RealMemory=100 Gres=gpu:h100:2,fpga:2,net:ib:no_consume:1k")
    slurm = slurm.replace("Feature=a30", "Feature=a30 Gres=fpga:3") + "NodeName=c1 Gres=fpga:8\n"
    _, _, (included, _), _ = edited(slurm)
    assert f"Gres=fpga:3,net:ib:1024,{SITE.catalog.gres}" in included


@pytest.mark.parametrize(
    ("theirs", "then"),
    [
        ("GresTypes=gpu", "GresTypes=gpu,mig"),
        ("grestypes = mps", "grestypes = mps,gpu,mig"),
        ("PrologFlags=Contain,X11", "PrologFlags=Contain,X11,Alloc,DeferBatch"),
        ("PrologFlags=deferbatch,alloc", "PrologFlags=deferbatch,alloc"),
        ("JobSubmitPlugins=job_submit/lua", "JobSubmitPlugins=job_submit/lua"),
        ("JobSubmitPlugins=require_timelimit", "JobSubmitPlugins=require_timelimit,lua"),
        ("PrologEpilogTimeout=20", "PrologEpilogTimeout=60"),
        ("PrologEpilogTimeout=300", "PrologEpilogTimeout=300"),
        ("PrologTimeout=20", "PrologTimeout=60"),
        ("EpilogTimeout=90", "EpilogTimeout=90"),
        ("Prolog=/etc/slurm/p.sh", "Prolog=/etc/slurm/p.sh"),
        ("TaskProlog=/t", "TaskProlog=/t"),
    ],
)
def test_existing_setting_is_changed_in_place(theirs, then):
    slurm, _, (included, _), _ = edited(f"{theirs}\n{NODES}")
    assert slurm.splitlines()[0] == then
    key = theirs.partition("=")[0].strip().lower()
    assert not any(line.lower().startswith(f"{key}=") for line in included.splitlines())


def test_second_plan_has_nothing_to_do():
    nodes = NODES.replace("h[1-2]", "h[1-2] Gres=gpu:h100:2")
    start = f"GresTypes=gpu\nProlog=/p\nAccountingStorageType=accounting_storage/slurmdbd\n{nodes}"
    slurm, gres, (included, included_gres), _ = edited(start, "AutoDetect=nvml\n")
    files = {
        MAIN: slurm,
        GRES: gres,
        "/etc/slurm/migbatch.conf": included,
        "/etc/slurm/migbatch-gres.conf": included_gres,
    }
    again = plan(SITE, load(MAIN, files.get), load(GRES, files.get))
    assert again.edits == []
    assert site.render("slurm.conf.j2", site=again.site) == included
    assert site.render("gres.conf.j2", site=again.site) == included_gres


def test_several_prologs_are_used_where_slurm_runs_all_of_them():
    old, new = replace(SITE, version=(22, 5)), replace(SITE, version=(24, 11))
    theirs = f"Prolog=/p\nTaskProlog=/t\n{NODES}"
    assert "Prolog=" not in edited(theirs, wanted=old)[2][0].replace("TaskProlog=", "")
    included = edited(theirs, wanted=new)[2][0].splitlines()
    assert "Prolog=/etc/slurm/migbatch-prolog" in included
    assert not any(line.startswith("TaskProlog=") for line in included)
    assert len(planned(theirs, wanted=old).notes) == 2 and len(planned(theirs, wanted=new).notes) == 1


def test_takeover_program_of_the_site_is_kept_with_a_note():
    ours = {"primary_on": "/etc/slurm/migbatch-primary_on", "primary_off": "/etc/slurm/migbatch-primary_off"}
    own = "SlurmctldPrimaryOnProg=/usr/local/sbin/failover\n"
    slurm, _, (included, _), done = edited(own + NODES, wanted=replace(SITE, **ours))
    assert own in slurm and "SlurmctldPrimaryOnProg" not in included
    assert f"SlurmctldPrimaryOffProg={ours['primary_off']}" in included.splitlines()
    (note,) = [note for note in done.notes if "SlurmctldPrimaryOnProg" in note]
    assert "is kept; make it run /etc/slurm/migbatch-primary_on too" in note


def test_prologs_that_run_one_at_a_time_are_noted():
    (note,) = planned(f"PrologFlags=Alloc,Serial,X11\n{NODES}").notes
    assert note.startswith("PrologFlags has Serial: ") and note.endswith("remove it")


def test_node_line_is_split_when_its_nodes_differ():
    text = "NodeName=h[1-2],c1,m1 NodeAddr=10.0.0.[1-3],10.0.1.1 Port=[7001-7004] Gres=gpu:2 # all\n"
    lines = edited(text)[0].splitlines()
    assert lines[:4] == [
        f"NodeName=h1 NodeAddr=10.0.0.1 Port=7001 Gres=gpu:2,{H} Features=mig_node_h1 # all",
        f"NodeName=h2 NodeAddr=10.0.0.2 Port=7002 Gres=gpu:2,{H} Features=mig_node_h2 # all",
        "NodeName=c1 NodeAddr=10.0.0.3 Port=7003 Gres=gpu:2 # all",
        f"NodeName=m1 NodeAddr=10.0.1.1 Port=7004 Gres=gpu:2,{M} Features=mig_node_m1 # all",
    ]


def test_features_from_default_lines_are_kept():
    text = "NodeName=DEFAULT Features=ib\nNodeName=h1\nNodeName=h2 Features=fast\nNodeName=c1\nNodeName=m1\n"
    lines = edited(text)[0].splitlines()
    assert f"NodeName=h1 Gres={H} Features=ib,mig_node_h1" in lines
    assert f"NodeName=h2 Features=fast,mig_node_h2 Gres={H}" in lines and "NodeName=c1" in lines


def test_features_key_that_slurm_reads_is_changed():
    """Of the two keys Slurm reads `Feature`, and those of DEFAULT lines only if the line has neither key."""
    text = "NodeName=DEFAULT Features=ib\nNodeName=h1 Feature=fast\nNodeName=h2 Features=x Feature=y\nNodeName=m1\n"
    lines = edited(text)[0].splitlines()
    assert f"NodeName=h1 Feature=fast,mig_node_h1 Gres={H}" in lines
    assert f"NodeName=h2 Features=x Feature=y,mig_node_h2 Gres={H}" in lines
    catalog = edited(text)[2][0].splitlines()[-1]
    assert " Features=fast,y,ib,mig_node_h1," in catalog


def test_reserved_feature_on_another_node_is_a_problem():
    text = "NodeName=h1 Features=mig_node_h2\nNodeName=h2\nNodeName=m1\n"
    assert [
        problem for problem in planned(text).problems if "mig_node_h2 is reserved by migbatch for node h2" in problem
    ]
    assert not planned("NodeName=h1 Features=mig_node_h1\nNodeName=h2\nNodeName=m1\n").problems


def test_catalog_is_added_to_partitions_given_by_default_nodeset_and_all():
    text = (
        "NodeName=h[1-2],m1 Feature=big\nNodeName=c1\nNodeSet=bigs Feature=big\n"
        "PartitionName=DEFAULT Nodes=h1\nPartitionName=a\nPartitionName=b Nodes=bigs\nPartitionName=c Nodes=c1\n"
        "PartitionName=d Nodes=ALL\n"
    )
    lines = edited(text)[0].splitlines()
    assert "PartitionName=a Nodes=h1,migcatalog" in lines and "PartitionName=b Nodes=bigs,migcatalog" in lines
    assert "PartitionName=c Nodes=c1" in lines and "PartitionName=d Nodes=ALL" in lines


def test_profiles_that_slurm_takes_for_the_same_are_noted_in_their_common_partition():
    nodes = [NodeLine("h[1-2]", {"4g.20gb": 1, "none": 0}), NodeLine("m1", {"1g.23gb": 7, "none": 0})]
    text = (
        "NodeName=h[1-2]\nNodeName=m1\nPartitionName=a Nodes=h[1-2]\nPartitionName=b Nodes=m1\n"
        "PartitionName=c Nodes=h1,m1\nPartitionName=d Nodes=ALL\n"
    )
    notes = [note for note in planned(text, wanted=replace(SITE, nodes=nodes)).notes if "for the same" in note]
    assert notes == [
        f"{MAIN}:{line}: Slurm takes 1g.23gb and 4g.20gb in partition {name} for the same: it compares a sum of their "
        "bytes; jobs would be sent to nodes that cannot create their slice: put these nodes into separate partitions"
        for line, name in ((5, "c"), (6, "d"))
    ]


@pytest.mark.parametrize(
    ("former", "names"), [("migcatalog", "none[1-2]"), ("migcatalog", "migcatalog,migcatalog2"), ("a[1-3]", "a[1-2]")]
)
def test_former_catalog_nodes_are_removed_from_partitions(former, names):
    """slurmctld does not start if a partition names a node that slurm.conf does not have."""
    text = f"SuspendProgram=/s\nSuspendExcNodes=c1:2,c[2-3]\n{NODES}PartitionName=d Nodes=DEFAULTS,c1,m1\n"
    before, other = (replace(SITE, catalog=replace(SITE.catalog, names=catalog)) for catalog in (former, names))
    slurm, _, (included, _), _ = edited(text, wanted=before)
    files = {MAIN: slurm, "/etc/slurm/migbatch.conf": included}
    done = plan(other, load(MAIN, files.get), load(GRES, {}.get))
    lines = apply(files, done.edits)[MAIN].splitlines()
    assert f"PartitionName=p Nodes=h1,{names}" in lines
    assert f"PartitionName=d Nodes=DEFAULTS,c1,m1,{names}" in lines
    assert f"SuspendExcNodes=c1:2,c[2-3],{names}" in lines


def test_lending_partitions_get_tier_and_preempt_mode():
    text = f"{NODES}PartitionName=train Nodes=m1 PriorityTier=3\n"
    slurm = edited(text, wanted=replace(SITE, lends=True), lending=("train",))[0]
    assert "PartitionName=train Nodes=m1,migcatalog PriorityTier=3 PreemptMode=REQUEUE" in slurm
    assert "PartitionName=p Nodes=h1,migcatalog PriorityTier=10 PreemptMode=OFF" in slurm


@pytest.mark.parametrize(
    ("theirs", "then"),
    [
        ("PreemptType=preempt/qos\nPreemptMode=SUSPEND,GANG", "PreemptType=preempt/qos\nPreemptMode=SUSPEND,GANG"),
        (
            "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL",
            "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL",
        ),
        ("PreemptMode=GANG", "PreemptMode=GANG,REQUEUE"),
        ("PreemptType=preempt/none\nPreemptMode=off", "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE"),
    ],
)
def test_preemption_of_the_site_remains_with_lending(theirs, then):
    """Partitions and QOS without MIG nodes rely on it, too."""
    text = f"{theirs}\n{NODES}PartitionName=train Nodes=m1\n"
    slurm, _, _, done = edited(text, wanted=replace(SITE, lends=True), lending=("train",))
    assert slurm.startswith(f"{then}\n")
    lines = [line for line in slurm.splitlines() if line.startswith("PartitionName=")]
    if "qos" in theirs:
        assert not any("Preempt" in line or "Priority" in line for line in lines)
        assert any("PreemptType=preempt/qos is kept" in note for note in done.notes)
    else:
        assert lines[1].endswith(" PriorityTier=1 PreemptMode=REQUEUE")
        assert lines[0].endswith(" PriorityTier=10" if "CANCEL" in theirs else " PriorityTier=10 PreemptMode=OFF")
    assert not planned(slurm, "Include migbatch-gres.conf\n", replace(SITE, lends=True), ("train",)).edits


def test_partitions_with_lower_tiers_than_others_remain_below_them_with_lending():
    lends = replace(SITE, lends=True)
    text = f"{NODES}PartitionName=train Nodes=m1\nPartitionName=urgent Nodes=h2 PriorityTier=5\n"
    slurm = edited(text, wanted=lends, lending=("train",))[0]
    assert [line for line in slurm.splitlines() if line.startswith("PartitionName=")] == [
        "PartitionName=p Nodes=h1,migcatalog PreemptMode=OFF",
        "PartitionName=train Nodes=m1,migcatalog PriorityTier=0 PreemptMode=REQUEUE",
        "PartitionName=urgent Nodes=h2,migcatalog PriorityTier=5 PreemptMode=OFF",
    ]
    assert not planned(slurm, "Include migbatch-gres.conf\n", lends, ("train",)).edits
    (note,) = planned(slurm).notes
    assert note.startswith(f"{MAIN}:5: PriorityTier=0 PreemptMode=REQUEUE remains")


def test_settings_that_remain_when_lending_is_turned_off_are_noted():
    """Without PreemptExemptTime, which is no longer written, Slurm would requeue training jobs immediately."""
    text = f"PreemptType=preempt/none\n{NODES}PartitionName=train Nodes=m1\nPartitionName=c PreemptMode=OFF\n"
    assert not edited(text)[3].notes
    slurm = edited(text, wanted=replace(SITE, lends=True), lending=("train",))[0]
    notes = planned(slurm).notes
    assert [note.partition(" remains")[0] for note in notes] == [
        f"{MAIN}:5: PriorityTier=10 PreemptMode=OFF",
        f"{MAIN}:6: PriorityTier=1 PreemptMode=REQUEUE",
    ]


def test_exempt_time_is_set_for_lending_unless_the_site_already_preempts():
    lends = replace(SITE, lends=True)
    _, _, (included, _), done = edited(NODES, wanted=lends, lending=("p",))
    assert "PreemptExemptTime=00:30:00" in included.splitlines() and not done.notes
    slurm, _, (included, _), done = edited(f"PreemptExemptTime=5\n{NODES}", wanted=lends, lending=("p",))
    assert slurm.startswith("PreemptExemptTime=5\n") and "PreemptExemptTime" not in included and not done.notes
    _, _, (included, _), done = edited(f"PreemptType=preempt/none\n{NODES}", wanted=lends, lending=("p",))
    assert "PreemptExemptTime=00:30:00" in included and not done.notes
    _, _, (included, _), done = edited(f"PreemptType=preempt/partition_prio\n{NODES}", wanted=lends, lending=("p",))
    assert "PreemptExemptTime" not in included
    assert ["PreemptExemptTime is left to you" in note for note in done.notes] == [True]
    assert "Preempt" not in edited(NODES)[2][0]


@pytest.mark.parametrize("theirs", ["", "PreemptType=preempt/none\n", "PreemptType=preempt/partition_prio\n"])
def test_second_run_keeps_the_exempt_time_or_its_absence(theirs):
    lends = replace(SITE, lends=True)
    slurm, _, (included, _), first = edited(f"{theirs}{NODES}", wanted=lends, lending=("p",))
    conf = load(MAIN, {MAIN: slurm, "/etc/slurm/migbatch.conf": included}.get)
    again = plan(lends, conf, load(GRES, {}.get), ("p",))
    assert site.render("slurm.conf.j2", site=again.site) == included
    assert again.notes == first.notes


def test_cred_expire_is_lowered_for_lending_on_older_slurm():
    lends = replace(SITE, lends=True)
    assert "AuthInfo=cred_expire=30" in edited(NODES, wanted=lends, lending=("p",))[2][0]
    for theirs, ours in (
        ("socket=/m", "socket=/m,cred_expire=30"),
        ("cred_expire=60,socket=/m", "cred_expire=60,socket=/m"),
    ):
        slurm, _, (included, _), _ = edited(f"AuthInfo={theirs}\n{NODES}", wanted=lends, lending=("p",))
        assert slurm.splitlines()[0] == f"AuthInfo={ours}" and "AuthInfo" not in included
    for other in (SITE, replace(lends, version=(24, 11))):
        assert "AuthInfo" not in edited(NODES, wanted=other)[2][0]


def test_accounting_tres_and_suspend_exclusion_are_extended():
    theirs = (
        "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageTRES=gres/gpu\n"
        f"SuspendProgram=/s\nSuspendExcNodes=c1\n{NODES}"
    )
    lines = edited(theirs)[0].splitlines()
    assert lines[1].startswith("AccountingStorageTRES=gres/gpu,gres/mig,gres/mig:7g.80gb,")
    assert lines[3] == "SuspendExcNodes=c1,migcatalog"
    several = replace(SITE, catalog=replace(SITE.catalog, names="none[1,3]"))
    brackets = theirs.replace("SuspendExcNodes=c1", "SuspendExcNodes=c[1,3]")
    assert "SuspendExcNodes=c[1,3],none[1,3]" in edited(brackets, wanted=several)[0].splitlines()


def test_autodetected_gpus_get_device_files_in_gres_conf():
    theirs = "NodeName=h[1-2] Gres=gpu:h100:2,bandwidth:lustre:no_consume:4G\nNodeName=m1 Gres=gpu:1\n"
    included = edited(theirs, "AutoDetect=nvml\n")[2][1].splitlines()
    assert "NodeName=h[1-2] Name=gpu Type=h100 File=/dev/nvidia[0-1]" in included
    assert "NodeName=m1 Name=gpu File=/dev/nvidia0" in included
    with_comma = edited(theirs.replace("m1 Gres=gpu:1", "m1 Gres=gpu:1,"), "AutoDetect=nvml\n")[2][1].splitlines()
    assert "NodeName=m1 Name=gpu File=/dev/nvidia0" in with_comma
    listed = "AutoDetect=nvml\nNodeName=h[1-2],m1 Name=gpu File=/dev/nvidia0\n"
    assert not any("Name=gpu" in line for line in edited(theirs, listed)[2][1].splitlines())


CGROUP = "/etc/slurm/cgroup.conf"
SLICED = replace(SITE, gpu_devices={"h1": DEVICES, "h2": DEVICES, "m1": ("/dev/nvidia0",)})


def constrained(slurm, gres, cgroup="ConstrainDevices=yes\n"):
    """What a site with cgroups needs; GPUs 0 and 1 of h1 and h2, and GPU 0 of m1, are in MIG mode."""
    conf = load(MAIN, {MAIN: f"TaskPlugin=task/affinity,task/cgroup\n{slurm}"}.get)
    return plan(SLICED, conf, load(GRES, {GRES: gres}.get), cgroup_conf=load(CGROUP, {CGROUP: cgroup}.get))


@pytest.mark.parametrize(
    "gres",
    [
        "NodeName=h[1-2] Name=gpu Type=h100 File=/dev/nvidia[0-1]\nNodeName=m1 Name=gpu File=/dev/nvidia0\n",
        "AutoDetect=nvml\n",
        "",
    ],
)
def test_slurm_does_not_count_gpus_with_slices_where_cgroups_would_deny_them_to_jobs(gres):
    """Slurm refuses a node that counts GPUs without listing their devices, and denies jobs those that it lists."""
    theirs = "NodeName=h[1-2] Gres=gpu:h100:2,fpga:1\nNodeName=m1 Gres=gpu:1\nNodeName=g1 Gres=gpu:4\n"
    done = constrained(theirs, gres)
    assert not done.problems
    slurm = apply({MAIN: f"TaskPlugin=task/affinity,task/cgroup\n{theirs}", GRES: gres}, done.edits)[MAIN]
    assert f"NodeName=h1 Gres=fpga:1,{H} Features=mig_node_h1\n" in slurm
    assert f"NodeName=m1 Gres={M} Features=mig_node_m1\nNodeName=g1 Gres=gpu:4\n" in slurm
    assert "Name=gpu" not in site.render("gres.conf.j2", site=done.site)
    for cgroup in ("ConstrainDevices=no\n", "ConstrainRAMSpace=yes\n"):
        kept = apply({MAIN: f"TaskPlugin=task/affinity,task/cgroup\n{theirs}"}, constrained(theirs, gres, cgroup).edits)
        assert f"NodeName=h1 Gres=gpu:h100:2,fpga:1,{H} Features=mig_node_h1\n" in kept[MAIN]


def test_gpus_without_slices_remain_counted_where_cgroups_constrain_devices():
    theirs = "NodeName=h[1-2] Gres=gpu:2\nNodeName=m1\n"
    done = constrained(theirs, "NodeName=h[1-2] Name=gpu File=/dev/nvidia[2-3]\n")
    assert not done.problems and all("gpu:2" in edit.new for edit in done.edits if "h1" in edit.new)


@pytest.mark.parametrize(
    ("slurm", "gres", "message"),
    [
        (
            "NodeName=h[1-2] Gres=gpu:4\nNodeName=m1\n",
            "Name=gpu File=/dev/nvidia[0-3]\n",
            "slurm.conf:2: with ConstrainDevices=yes in cgroup.conf Slurm denies a job every GPU that it has not "
            "allocated to it, also that of its slices: count as gpu of h1, and list by File= in /etc/slurm/gres.conf, "
            "only other GPUs than /dev/nvidia[0-1]",
        ),
        ("NodeName=h[1-2] Gres=gpu:4\nNodeName=m1\n", "AutoDetect=nvml\n", "only other GPUs than /dev/nvidia[0-1]"),
        (
            "NodeName=h[1-2] Gres=gpu:2,shard:8\nNodeName=m1\n",
            "",
            "slurm.conf:2: h1 has slices on all of its GPUs; remove shard and mps from its Gres",
        ),
    ],
)
def test_gpus_that_cgroups_would_deny_to_jobs_with_slices_are_named(slurm, gres, message):
    assert message in constrained(slurm, gres).problems[0]


def test_nodes_with_cgroup_files_of_their_own_are_mentioned():
    conf = load(MAIN, {MAIN: "TaskPlugin=cgroup\nNodeName=h[1-2] Gres=gpu:2\nNodeName=m1\n"}.get)
    (note,) = plan(SLICED, conf, load(GRES, {GRES: ""}.get), cgroup_conf=load(CGROUP, {}.get)).notes
    assert note.startswith("/etc/slurm/cgroup.conf does not exist here: if nodes have one with ConstrainDevices=yes")


def test_gres_conf_of_the_nodes_own_is_not_to_be_replaced():
    """Without a gres.conf on the controller, Slurm knows its GPUs from files of the nodes."""
    slurm = "NodeName=h[1-2],m1\nNodeName=g1 Gres=gpu:4\n"
    (note,) = planned(slurm).notes
    assert f"{GRES} does not exist here" in note and "add `Include migbatch-gres.conf` to them" in note
    assert planned(slurm, "AutoDetect=nvml\n").notes == planned(slurm.replace("gpu", "fpga")).notes == []


@pytest.mark.parametrize(
    ("slurm", "gres", "message"),
    [
        ("NodeName=h1\n", "", "no NodeName line for h2,m1"),
        (f"{NODES}NodeName=migcatalog\n", "", "slurm.conf:4: migcatalog is the name of migbatch's catalog node"),
        (f"SelectType=select/linear\n{NODES}", "", "slurm.conf:1: SelectType=select/linear"),
        (f"PrologFlags=RunInJob\n{NODES}", "", "RunInJob"),
        (NODES, "NodeName=h1 AutoDetect=nvml\n", "gres.conf:1: AutoDetect=nvml detects the slices of h1"),
        (f"{NODES}NodeSet=s Nodes=h[1-\n", "", "slurm.conf:4: 'h[1-' lacks a closing bracket"),
        (NODES, "NodeName=h[1- Name=gpu File=/dev/nvidia0\n", "gres.conf:1: 'h[1-' lacks a closing bracket"),
        (NODES, "NodeName=h1 Name=mig Type=a Count=1\n", "gres.conf:1: lines with Name=mig belong to migbatch"),
        ("NodeName=h[1-2],m1 Gres=gpu:a:1,gpu:b:1\n", "AutoDetect=nvml\n", "slurm.conf:1: AutoDetect is disabled"),
        (
            "NodeName=h[1-2],m1 Gres=gpu:a100_3g.39gb:2\n",
            "AutoDetect=nvml\n",
            "slurm.conf:1: gpu:a100_3g.39gb:2 counts",
        ),
        (f"{NODES}NodeName=h[3-4] Gres={H}\n", "", "slurm.conf:4: h[3-4] has mig in its Gres, but reports no GPU"),
        ("NodeName=h[1-2],m1 Gres=gpu:a:1,gpu:1g.10gb:7(S:0)\n", "", "gpu:1g.10gb:7(S:0) counts slices of h[1-2],m1"),
        (f"{NODES}PartitionName=x Nodes=n[1\n", "", "slurm.conf:4: "),
    ],
)
def test_unusable_settings_are_reported_with_file_and_line(slurm, gres, message):
    assert any(message in problem for problem in planned(slurm, gres).problems), planned(slurm, gres).problems
