"""Decide what slurm.conf and gres.conf need for migbatch: in files of migbatch's, and in lines of the site's.

For most keys Slurm uses the last line alone, and it refuses a node or partition that is named twice (tested on 22.05
and 24.11: `GresTypes specified more than once, latest value used`; Prolog and Epilog add up from `scripts.SEVERAL`
on). So a key that the site has is changed in place, and migbatch's own file holds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from slurm_migbatch.install import scripts, topology
from slurm_migbatch.install.catalogline import (
    Counts,
    NodeNameLine,
    catalog_settings,
    gres_entries,
    gres_words,
    has_gres,
    listed_features,
    others_of,
)
from slurm_migbatch.install.devices import constrains, expanded, has_cgroups, not_counted
from slurm_migbatch.install.slurmconf import FEATURES, Conf, Line, LineEdit, added, changed, edit
from slurm_migbatch.install.slurmconf import INCLUDED as INCLUDED
from slurm_migbatch.site import PREEMPT_EXEMPT, NodeLine, Setting, Site, preemption, render
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.nodelist import NodeListError, expand, fold
from slurm_migbatch.workload.catalog import NODE_FEATURE

INCLUDED_GRES: Final = "migbatch-gres.conf"
_PER_NODE: Final = ("nodename", "nodeaddr", "nodehostname", "bcastaddr", "port")
_TIMEOUTS: Final = ("PrologTimeout", "EpilogTimeout")
"""From 25.05 on Slurm uses these, if a site has them, instead of PrologEpilogTimeout."""
_TIERS: Final = range(2, 10)
"""Tiers of other partitions that those with MIG nodes, if they have none, must not pass by getting 10."""
_PREEMPTS: Final = (
    f"Slurm preempts on this site already, so PreemptExemptTime is left to you: with {PREEMPT_EXEMPT} Slurm leaves "
    "loans to migbatchd, which ends those with the least loss, but jobs of other partitions cannot be preempted "
    "earlier either"
)
_BY_QOS: Final = (
    "PreemptType=preempt/qos is kept: while migbatchd is down, Slurm ends loans only for jobs whose QOS preempts that "
    "of training, with PreemptMode=REQUEUE (sacctmgr)"
)


@dataclass
class SlurmPlan:
    """Needs of slurm.conf and gres.conf.

    Attributes:
        site: input for rendering migbatch's own files.
        edits: lines of the site's to change.
        notes: remaining steps elsewhere, and unsupported settings, as sentences.
        problems: what prevents migbatch from working, as sentences.
    """

    site: Site
    edits: list[LineEdit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plan(
    site: Site,
    conf: Conf,
    gres_conf: Conf,
    lending: Collection[str] = (),
    topology_conf: Conf | None = None,
    cgroup_conf: Conf | None = None,
) -> SlurmPlan:
    """Return the needs of a site's files.

    Args:
        site: built from the nodes' reports, see `reported`.
        gres_conf: empty if there is none; `topology_conf`, `cgroup_conf`: None if Slurm reads none.
        lending: partitions whose training jobs are lent idle slices.
    """
    counts = {name: line.counts for line in site.nodes for name in expand(line.names)}
    result = SlurmPlan(site)
    rows = list(_nodes(conf, site.catalog.names, result))
    configured = {name for _, _, names in rows for name in names}
    if unknown := sorted(set(counts) - configured):
        result.problems.append(
            f"{conf.main} has no NodeName line for {fold(unknown)}, which reported MIG GPUs: add it, or restart "
            "slurmctld if the node was removed"
        )
    result.problems += _unreported(rows, counts)
    result.problems += _clashes(rows, counts)
    result.problems += _static_slices(rows, counts)
    without_gpus = frozenset[str]()
    if cgroup_conf is not None and constrains(conf, cgroup_conf):
        without_gpus = not_counted(rows, gres_conf, site.gpu_devices, result.problems)
    elif cgroup_conf is not None and not cgroup_conf.texts and has_cgroups(conf) and _count_gpus(rows, counts):
        result.notes.append(
            f"{cgroup_conf.main} does not exist here: if nodes have one with ConstrainDevices=yes, copy it here and "
            "run this command again, or Slurm will deny jobs the GPUs of their slices"
        )
    for line, values, names in rows:
        result.edits += _node_edit(conf, line, values, names, counts, without_gpus)
    preempts = _preempts(conf)
    result.edits += _partition_edits(
        conf, rows, counts, site.catalog.names, _preemption(conf, lending, preempts), result
    )
    if not lending:
        result.notes += _after_lending(conf)
    settings = catalog_settings(rows, counts, conf.defaults("nodename", conf.beside(INCLUDED)))
    catalog = replace(site.catalog, settings=settings, others=gres_words(others_of(rows, counts)))
    if site.lends and preempts:
        result.notes += _of_own_preemption(conf)
    needed = replace(
        site,
        catalog=catalog,
        accounting=conf.value("AccountingStorageType").endswith("slurmdbd"),
        suspends=bool(conf.value("SuspendProgram")),
        preempts=preempts,
        own=(),
    )
    result.site = replace(needed, own=frozenset(_settings(needed, conf, result)))
    result.edits += [*_include(conf, INCLUDED), *_include(gres_conf, INCLUDED_GRES)]
    _select_type(conf, result)
    if topology_conf is not None:
        plugin = conf.value("TopologyPlugin").lower().removeprefix("topology/")
        topology_plan = topology.plan(plugin, topology_conf, site.catalog.names, site.version)
        result.edits += topology_plan.edits
        result.notes += topology_plan.notes
        result.problems += topology_plan.problems
    _own_gres(gres_conf, counts, result)
    if not gres_conf.texts and any(has_gres(values, "gpu") for _, values, _ in rows):
        result.notes.append(
            f"{gres_conf.main} does not exist here, though nodes have GPUs: if they have files of their own, do not "
            f"replace these, but add `Include {INCLUDED_GRES}` to them, and on MIG nodes a File= line for each GPU "
            "that AutoDetect has found so far"
        )
    if not result.problems:
        counting = {name: node_counts for name, node_counts in counts.items() if name not in without_gpus}
        result.site = replace(result.site, devices=list(_devices(gres_conf, rows, counting, result)))
    return result


# --- settings of the cluster


def _settings(site: Site, conf: Conf, done: SlurmPlan) -> Iterator[str]:
    """Yield the keys in the site's own lines; their changes are added to `done`."""
    own_file = conf.beside(INCLUDED)
    changes: dict[Line, dict[str, str]] = {}
    timeouts = [Setting(key, str(site.hook_timeout), "at_least") for key in _TIMEOUTS] if site.prolog else []
    for setting in [*site.needed(), *timeouts]:
        present = conf.setting(setting.key, without=own_file)
        if present is None:
            continue
        line, token = present
        if setting.kind == "hook" and token.value != setting.value:
            if setting.key in scripts.SEVERAL and site.version >= scripts.SEVERAL[setting.key]:
                if any(other.path != own_file and _holds(other, setting) for other in conf.lines):
                    yield setting.key
                continue
            done.notes.append(
                f"{line.place}: {setting.key}={token.value} belongs to the site and is kept; `migbatch install "
                "--role node` adds ours on each node"
            )
        elif setting.kind == "program" and token.value != setting.value:
            done.notes.append(
                f"{line.place}: {setting.key}={token.value} belongs to the site and is kept; make it run "
                f"{setting.value} too, or migbatchd follows slurmctld with some seconds delay"
            )
        else:
            former = _former(conf, site.catalog.names) if setting.key == "SuspendExcNodes" else set()
            kept = _without(token.value, {*former, *expand(site.catalog.names)}) if former else token.value
            new = _merged(setting, kept)
            if new != token.value:
                changes.setdefault(line, {})[token.key] = new
        yield setting.key
    done.edits += [edit(conf, line, change) for line, change in changes.items()]
    _unwanted(conf, done)


def _unwanted(conf: Conf, done: SlurmPlan) -> None:
    """Add settings of the site with which migbatch does not work, or not well, to `done`."""
    flags = conf.value("PrologFlags").lower().split(",")
    if "runinjob" in flags:
        done.problems.append(
            "PrologFlags has RunInJob: the Prolog would run inside the job's cgroup and could not create slices; "
            "remove it"
        )
    if "serial" in flags:
        done.notes.append(
            "PrologFlags has Serial: the hooks of a node run one at a time, so that the Prolog of a job may wait in "
            "vain for the Epilog of another; remove it"
        )
    if conf.value("JobRequeue") == "0":
        done.notes.append("JobRequeue=0: jobs whose slice could not be created cannot be requeued")


def _preempts(conf: Conf) -> bool:
    """Return whether the site had preemption before migbatch: an earlier run may have changed its PreemptType."""
    own_file = conf.beside(INCLUDED)
    exempt = conf.setting("PreemptExemptTime")
    ours = exempt is not None and exempt[0].path == own_file
    return not ours and conf.value("PreemptType", own_file) not in ("", "preempt/none")


def _of_own_preemption(conf: Conf) -> Iterator[str]:
    """Yield sentences on lending where the site has preemption of its own."""
    if not conf.value("PreemptExemptTime"):
        yield _PREEMPTS
    if _by_qos(conf):
        yield _BY_QOS


def _holds(line: Line, setting: Setting) -> bool:
    token = line.get(setting.key.lower())
    return token is not None and token.value == setting.value


def _merged(setting: Setting, present: str) -> str:
    """Return a value that meets the needs of the site and of migbatch; the current one if it does."""
    if setting.kind == "words":
        present_words = {_comparable(setting.key, item) for item in gres.split(present)}
        missing = [item for item in gres.split(setting.value) if _comparable(setting.key, item) not in present_words]
        return ",".join([*([present] if present else []), *missing])
    if setting.kind == "default":
        return present
    if setting.kind == "preemption":
        ways = set(present.lower().split(","))
        if ways == {"gang"}:
            return f"{present},{setting.value}"
        return setting.value if ways <= {"off", "preempt/none"} else present
    return present if not present.isdigit() or int(present) >= int(setting.value) else setting.value


def _comparable(key: str, item: str) -> str:
    """Return one word of a list in the form in which Slurm compares it."""
    plain = item.strip().lower()
    if key == "AuthInfo":
        return plain.partition("=")[0]
    return plain.removeprefix("cli_filter/").removeprefix("job_submit/") if key.endswith("Plugins") else plain


def _hosts(line: Line, text: str, done: SlurmPlan) -> tuple[str, ...]:
    """Return the hosts of a list; none, and a problem of `done`, if it is malformed."""
    try:
        return tuple(expand(text))
    except NodeListError as error:
        done.problems.append(f"{line.place}: {error}")
        return ()


def _include(conf: Conf, name: str) -> Iterator[LineEdit]:
    """Yield the line that includes migbatch's file, if it is missing."""
    own_file = conf.beside(name)
    if not any(line.include and conf.beside(line.include) == own_file for line in conf.lines):
        yield added(conf, f"Include {name}")


def _select_type(conf: Conf, done: SlurmPlan) -> None:
    setting = conf.setting("SelectType")
    if setting and not setting[1].value.lower().endswith("cons_tres"):
        line, token = setting
        done.problems.append(f"{line.place}: SelectType={token.value} does not support GRES; use select/cons_tres")


# --- nodes


def _nodes(conf: Conf, catalog: str, done: SlurmPlan) -> Iterator[NodeNameLine]:
    """Yield the site's lines of nodes, with their values and names; those of the catalog are migbatch's."""
    own_file = conf.beside(INCLUDED)
    listed = set(expand(catalog))
    for line, values in conf.records("nodename"):
        if line.path == own_file:
            continue
        names = _hosts(line, values["nodename"], done)
        if not names:
            continue
        if listed & set(names):
            done.problems.append(
                f"{line.place}: {fold(listed & set(names))} is the name of migbatch's catalog node; remove this "
                "line, or set another in [cluster] catalog_nodes of migbatch.toml"
            )
            continue
        yield line, values, names


def _node_edit(
    conf: Conf,
    line: Line,
    values: Mapping[str, str],
    names: tuple[str, ...],
    counts: Counts,
    without_gpus: Collection[str],
) -> Iterator[LineEdit]:
    """Yield the change of a line of nodes: mig next to its own GRES, and each node's own feature.

    It becomes several lines if its nodes differ. Nodes `without_gpus` no longer count GPUs.
    """
    key = next((key for key in FEATURES if key in values), "")
    present = values.get("gres", ""), values.get(key, "")
    names_by_values: dict[tuple[str, str], list[str]] = {}
    for name in names:
        dropped = frozenset({"mig", "gpu"}) if name in without_gpus else frozenset({"mig"})
        wanted = _gres(present[0], counts.get(name), dropped), _features(present[1], name if name in counts else "")
        names_by_values.setdefault(wanted, []).append(name)
    if list(names_by_values) == [present]:
        return
    text = conf.texts[line.path]
    lines = []
    for (gres_value, features), members in names_by_values.items():
        change = _subset(line, names, members) if len(names_by_values) > 1 else {}
        change["gres"] = gres_value
        additions = {"Gres": gres_value} if gres_value and not line.get("gres") else {}
        if key and line.get(key):
            change[key] = features
        elif features != present[1]:
            additions["Features"] = features
        lines.append(changed(text, line, change, additions))
    yield LineEdit(line.path, line.number, line.start, line.end, text[line.start : line.end], "\n".join(lines))


def _gres(present: str, counts: Mapping[str, int] | None, dropped: Collection[str]) -> str:
    """Return the GRES of a node: its GRES except those `dropped`, then its slices."""
    if counts is None:
        return present
    entries = (entry for entry in gres.split(present) if entry)
    kept = [entry for entry in entries if gres.prefix_of(entry)[1].partition(":")[0] not in dropped]
    return NodeLine("", counts, others=",".join(kept)).gres


def _features(present: str, name: str) -> str:
    """Return the features of a node with its own one appended; `name` is empty for a node without MIG GPUs."""
    features = [feature for feature in present.split(",") if feature]
    own = NODE_FEATURE + name
    return ",".join([*features, own] if name and own not in features else features)


def _unreported(rows: Sequence[NodeNameLine], counts: Counts) -> Iterator[str]:
    """Yield a sentence for each line that gives mig to nodes without MIG GPUs.

    gres.conf would not count it there, and Slurm drains a node with less than its line has.
    """
    for line, values, names in rows:
        members = [name for name in names if name not in counts]
        if members and has_gres(values, "mig"):
            yield (
                f"{line.place}: {fold(members)} has mig in its Gres, but reports no GPU in MIG mode: correct that "
                "(migbatch doctor there), or remove mig and the feature of the node from this line"
            )


def _former(conf: Conf, catalog: str) -> set[str]:
    """Return the catalog nodes of an earlier run that are not in `catalog`: slurmctld would not know them any more."""
    own_file = conf.beside(INCLUDED)
    lines = (values["nodename"] for line, values in conf.records("nodename") if line.path == own_file)
    return {name for names in lines for name in expanded(names)} - set(expand(catalog))


def _without(listed: str, removed: Collection[str]) -> str:
    """Return a host list without the parts that name only nodes of `removed`."""
    return ",".join(item for item in gres.split(listed) if not set(expanded(item) or (item,)) <= set(removed))


def _clashes(rows: Sequence[NodeNameLine], counts: Counts) -> Iterator[str]:
    """Yield a sentence for each line that gives a node the feature of another."""
    own = {NODE_FEATURE + name: name for name in counts}
    for line, values, names in rows:
        for feature in listed_features(values):
            if feature in own and names != (own[feature],):
                text = f"{feature} is reserved by migbatch for node {own[feature]}; rename this feature"
                yield f"{line.place}: {text}"


def _static_slices(rows: Sequence[NodeNameLine], counts: Counts) -> Iterator[str]:
    """Yield a sentence for each entry of a MIG node's GRES that counts slices as GPUs, as AutoDetect names them."""
    for line, values, names in rows:
        members = [name for name in names if name in counts]
        for text, entry in gres_entries(values) if members else ():
            if entry.name == "gpu" and gres.profile_in(entry.type or "") is not None:
                yield (
                    f"{line.place}: {text} counts slices of {fold(members)}, which migbatch creates for each "
                    "job: write the whole GPUs (Gres=gpu:TYPE:NUMBER) or leave gpu out, and destroy the slices"
                )


def _count_gpus(rows: Sequence[NodeNameLine], counts: Counts) -> bool:
    """Return whether a MIG node counts GPUs."""
    return any(has_gres(values, "gpu") for _, values, names in rows if not counts.keys().isdisjoint(names))


def _subset(line: Line, names: tuple[str, ...], members: list[str]) -> dict[str, str]:
    """Return the names, addresses and ports of some nodes of a line."""
    settings = {}
    for key in _PER_NODE:
        token = line.get(key)
        if token is None:
            continue
        values: Sequence[str] = ()
        with suppress(NodeListError):  # an address may be no list: [fe80::1]
            values = expand(token.value)
        if len(values) == len(names):
            chosen = [values[names.index(member)] for member in members]
            folded = fold(chosen)
            settings[key] = folded if list(expand(folded)) == chosen else ",".join(chosen)
    return settings


# --- partitions


def _preemption(conf: Conf, lending: Collection[str], preempts: bool) -> Callable[[str], str]:
    """Return what gives the settings of a partition, by its name, with which Slurm itself may end loans.

    What the site's own preemption does to others remains: by QOS it needs none, and by partition those that do not lend
    keep the mode of the cluster. `preempts`: whether the site has preemption of its own.
    """
    if _by_qos(conf):
        return lambda name: ""
    others = (values for _, values in conf.records("partitionname") if values["partitionname"] not in lending)
    tiers = any(tier.isdigit() and int(tier) in _TIERS for values in others if (tier := values.get("prioritytier", "")))

    def settings(name: str) -> str:
        wanted = preemption(lending, name, tiers=tiers)
        return wanted.removesuffix("PreemptMode=OFF") if preempts else wanted

    return settings


def _by_qos(conf: Conf) -> bool:
    return conf.value("PreemptType").lower() == "preempt/qos"


def _partition_edits(
    conf: Conf,
    rows: Sequence[NodeNameLine],
    counts: Counts,
    catalog: str,
    preempting: Callable[[str], str],
    done: SlurmPlan,
) -> Iterator[LineEdit]:
    """Yield the changes of partitions that have MIG nodes: the catalog must be one of their nodes.

    `preempting`: see `_preemption`.
    """
    sets = dict(_node_sets(conf, rows, done))
    former = _former(conf, catalog)
    for line, values in conf.records("partitionname"):
        listed = values.get("nodes", "")
        items = _hosts(line, listed, done)
        all_nodes = any(item.upper() == "ALL" for item in items)
        members = {name for item in items for name in sets.get(item, (item,))}
        if not (all_nodes or members & {*counts, *former}):
            continue
        change, additions = {}, {}
        token = line.get("nodes")
        if not all_nodes and (not set(expand(catalog)) <= members or members & former):
            if token:
                change["nodes"] = ",".join(filter(None, (_without(token.value, {*former, *expand(catalog)}), catalog)))
            else:
                additions["Nodes"] = f"{listed},{catalog}"
        for setting in preempting(values["partitionname"]).split():
            key, _, value = setting.partition("=")
            if key.lower() not in values:
                additions[key] = value
        if change or additions:
            yield edit(conf, line, change, additions)


def _after_lending(conf: Conf) -> Iterator[str]:
    """Yield a sentence for each partition that has what is written with lending, which is off now."""
    for line, _ in conf.records("partitionname"):
        last = [(token.key, token.value) for token in line.tokens[-2:]]
        for settings in (preemption(("x",), "x"), preemption(("x",), "x", tiers=True), preemption(("x",), "")):
            words = (setting.partition("=") for setting in settings.split())
            if last == [(key.lower(), value) for key, _, value in words]:
                yield (
                    f"{line.place}: {settings} remains though lending is off; remove it, and PreemptType and "
                    "PreemptMode of the cluster, if only lending needed them"
                )


def _node_sets(conf: Conf, rows: Sequence[NodeNameLine], done: SlurmPlan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the nodes of each NodeSet."""
    for line, values in conf.records("nodeset"):
        members: list[str] = []
        feature = values.get("feature", "")
        for _, node, names in rows:
            if feature and feature in listed_features(node):
                members += names
        members += _hosts(line, values.get("nodes", ""), done)
        yield values["nodeset"], tuple(members)


# --- gres.conf


def _own_gres(conf: Conf, counts: Counts, done: SlurmPlan) -> None:
    """Add lines of the site's gres.conf that must be removed to the problems of `done`."""
    own_file = conf.beside(INCLUDED_GRES)
    for line in conf.lines:
        if line.path == own_file:
            continue
        name = line.get("name")
        if name is not None and name.value == "mig":
            done.problems.append(
                f"{line.place}: lines with Name=mig belong to migbatch, in {INCLUDED_GRES}; remove this one"
            )
        detect = line.get("autodetect")
        nodes = line.get("nodename")
        if detect is None or detect.value.lower() == "off" or nodes is None:
            continue
        if affected := sorted(set(_hosts(line, nodes.value, done)) & set(counts)):
            text = (
                f"AutoDetect={detect.value} detects the slices of {fold(affected)} and drains the node when they change"
            )
            done.problems.append(f"{line.place}: {text}; set it to off there, with a File= line for each GPU")


def _devices(conf: Conf, rows: Sequence[NodeNameLine], counts: Counts, done: SlurmPlan) -> Iterator[str]:
    """Yield lines of gres.conf for GPUs of MIG nodes that AutoDetect, which is disabled there, has found so far."""
    described = _described(conf, done)
    if described is None:
        return
    nodes_by_gpus: dict[str, list[str]] = {}  # not by line: a first run splits these into a line for each node
    for line, values, names in rows:
        members = [name for name in names if name in counts and name not in described]
        gpus = [entry for _, entry in gres_entries(values) if entry.name == "gpu"]
        if not members or not gpus:
            continue
        if len(gpus) > 1:
            done.problems.append(
                f"{line.place}: AutoDetect is disabled on MIG nodes; add a line for each type of GPU of "
                f"{fold(members)} to {conf.main}: NodeName={fold(members)} Name=gpu Type=... File=/dev/nvidia..."
            )
            continue
        (gpu,) = gpus
        last = f"[0-{gpu.count - 1}]" if gpu.count > 1 else "0"
        kind = f" Type={gpu.type}" if gpu.type else ""
        nodes_by_gpus.setdefault(f"Name=gpu{kind} File=/dev/nvidia{last}", []).extend(members)
    for gpus_of_nodes, members in nodes_by_gpus.items():
        yield f"NodeName={fold(members)} {gpus_of_nodes}"


def _described(conf: Conf, done: SlurmPlan) -> set[str] | None:
    """Return the nodes whose GPUs the site's gres.conf describes; None if those of all, or none are detected."""
    described: set[str] = set()
    detects = False
    for line in conf.lines:
        name, nodes, detect = line.get("name"), line.get("nodename"), line.get("autodetect")
        if line.path == conf.beside(INCLUDED_GRES):
            continue
        if name is not None and name.value == "gpu":
            if nodes is None:
                return None
            described |= set(_hosts(line, nodes.value, done))
        elif detect is not None and detect.value.lower() != "off":
            detects = True
    return described if detects else None


def rendered(slurm: SlurmPlan) -> dict[str, str]:
    """Return migbatch's own files beside slurm.conf, by name."""
    return {
        INCLUDED: render("slurm.conf.j2", site=slurm.site),
        INCLUDED_GRES: render("gres.conf.j2", site=slurm.site),
    }
