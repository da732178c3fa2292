"""Decide what slurm.conf and gres.conf need for migbatch: in files of migbatch's, and in lines of the site's.

For most keys Slurm uses the last line alone, and it refuses a node or partition that is named twice (tested on 22.05
and 24.11: `GresTypes specified more than once, latest value used`; Prolog and Epilog add up from `scripts.SEVERAL`
on). So a key that the site has is changed in place, and migbatch's own file holds the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from slurm_migbatch.install import scripts, topology
from slurm_migbatch.install.catalogline import (
    Counts,
    NodeNameLine,
    catalog_settings,
    former_catalog,
    gres_entries,
    gres_words,
    has_gres,
    listed_features,
    others_of,
    without_hosts,
)
from slurm_migbatch.install.devices import constrains, has_cgroups, not_counted
from slurm_migbatch.install.dynamicnodes import is_dynamic
from slurm_migbatch.install.dynamicnodes import options as dynamic_options
from slurm_migbatch.install.gresconf import check_gres, gpu_lines
from slurm_migbatch.install.partitionlines import (
    left_after_lending,
    partition_edits,
    partition_settings,
    preempts_by_qos,
)
from slurm_migbatch.install.slurmconf import FEATURES, INCLUDED, Conf, Line, LineEdit, added, changed, edit
from slurm_migbatch.install.slurmplan import INCLUDED_GRES, SlurmPlan, hosts_of
from slurm_migbatch.site import PREEMPT_EXEMPT, NodeLine, Setting, Site, render
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.nodelist import NodeListError, expand, fold
from slurm_migbatch.workload.catalog import NODE_FEATURE
from slurm_migbatch.workload.loans import LOAN

_PER_NODE: Final = ("nodename", "nodeaddr", "nodehostname", "bcastaddr", "port")
_WITHOUT_GRES_CONF: Final = (
    "{} does not exist here, though nodes have GPUs: if they have files of their own, do not replace these, but add "
    f"`Include {INCLUDED_GRES}` to them, and on MIG nodes a File= line for each GPU that AutoDetect has found so far"
)
_TIMEOUTS: Final = ("PrologTimeout", "EpilogTimeout")
"""From 25.05 on Slurm uses these, if a site has them, instead of PrologEpilogTimeout."""
_PREEMPTS: Final = (
    f"Slurm preempts on this site already, so PreemptExemptTime is left to you: with {PREEMPT_EXEMPT} Slurm leaves "
    "loans to migbatchd, which ends those with the least loss, but jobs of other partitions cannot be preempted "
    "earlier either"
)
_BY_QOS: Final = (
    "PreemptType=preempt/qos is kept: while migbatchd is down, Slurm ends loans only for jobs whose QOS preempts that "
    "of training, with PreemptMode=REQUEUE (sacctmgr)"
)


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
    result.problems += [
        *_not_configured(conf, rows, counts),
        *_unreported(rows, counts),
        *_clashes(rows, counts),
        *_static_slices(rows, counts),
    ]
    without_gpus = frozenset[str]()
    if cgroup_conf is not None and constrains(conf, cgroup_conf):
        without_gpus = not_counted(rows, gres_conf, site.gpu_devices, result.problems)
    elif cgroup_conf is not None:
        result.notes += _unknown_constraint(conf, cgroup_conf, rows, counts)
    for line, values, names in rows:
        if not is_dynamic(conf, line):
            result.edits += _node_edit(conf, line, values, names, counts, without_gpus)
    result.notes += _dynamic_notes(conf, rows, counts, without_gpus)
    preempts = _preempts(conf)
    result.edits += partition_edits(
        conf, rows, counts, site.catalog.names, partition_settings(conf, lending, preempts), result
    )
    if not lending:
        result.notes += left_after_lending(conf)
    if site.lends and preempts:
        result.notes += _of_own_preemption(conf)
    result.site = _needed(site, conf, rows, counts, preempts=preempts)
    result.site = replace(result.site, own=frozenset(_settings(result.site, conf, result)))
    result.edits += [*_include(conf, INCLUDED), *_include(gres_conf, INCLUDED_GRES)]
    _select_type(conf, result)
    if topology_conf is not None:
        _add_topology(site, conf, topology_conf, result)
    check_gres(gres_conf, counts, result)
    if not gres_conf.texts and any(has_gres(values, "gpu") for _, values, _ in rows):
        result.notes.append(_WITHOUT_GRES_CONF.format(gres_conf.main))
    if not result.problems:
        counting = {name: node_counts for name, node_counts in counts.items() if name not in without_gpus}
        result.site = replace(result.site, devices=list(gpu_lines(gres_conf, rows, counting, result)))
    return result


def _needed(site: Site, conf: Conf, rows: Sequence[NodeNameLine], counts: Counts, *, preempts: bool) -> Site:
    """Return the site with its catalog, and what slurm.conf says of it. `preempts`: it had preemption of its own."""
    settings = catalog_settings(rows, counts, conf.defaults("nodename", conf.beside(INCLUDED)))
    return replace(
        site,
        catalog=replace(site.catalog, settings=settings, others=gres_words(others_of(rows, counts))),
        accounting=conf.value("AccountingStorageType").endswith("slurmdbd"),
        suspends=bool(conf.value("SuspendProgram")),
        preempts=preempts,
        own=(),
    )


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
            former = former_catalog(conf, site.catalog.names) if setting.key == "SuspendExcNodes" else set()
            kept = without_hosts(token.value, {*former, *expand(site.catalog.names)}) if former else token.value
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
    if preempts_by_qos(conf):
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


def _include(conf: Conf, name: str) -> Iterator[LineEdit]:
    """Yield the line that includes migbatch's file, if it is missing."""
    own_file = conf.beside(name)
    if not any(line.include and conf.beside(line.include) == own_file for line in conf.lines):
        yield added(conf, f"Include {name}")


def _add_topology(site: Site, conf: Conf, topology_conf: Conf, done: SlurmPlan) -> None:
    plugin = conf.value("TopologyPlugin").lower().removeprefix("topology/")
    needed = topology.plan(plugin, topology_conf, site.catalog.names, site.version)
    done.edits += needed.edits
    done.notes += needed.notes
    done.problems += needed.problems


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
        names = hosts_of(line, values["nodename"], done)
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

    It becomes several lines if its nodes differ.
    """
    key = next((key for key in FEATURES if key in values), "")
    present = values.get("gres", ""), values.get(key, "")
    names_by_values: dict[tuple[str, str], list[str]] = {}
    for name in names:
        dropped = _dropped(name, without_gpus)
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


def _dynamic_notes(
    conf: Conf, rows: Sequence[NodeNameLine], counts: Counts, without_gpus: Collection[str]
) -> Iterator[str]:
    """Yield sentences for dynamic nodes that registered without their slices or feature, or with too few or many."""
    needed: dict[tuple[str, str], list[str]] = {}
    for line, values, (name, *_) in rows:
        if not is_dynamic(conf, line) or name not in counts:
            continue
        wanted = _gres(values.get("gres", ""), counts[name], _dropped(name, without_gpus))
        features = [feature for feature in listed_features(values) if feature]
        own = NODE_FEATURE + name
        if own not in features or _totals({"gres": wanted}) != _totals(values):
            others = ",".join(feature for feature in features if feature != own)
            needed.setdefault((wanted, others), []).append(name)
    yield from dynamic_options(needed)


def _totals(values: Mapping[str, str]) -> Counter[str]:
    """Return the counts of a node's GRES by name, which slurmd's registration must match: migbatchd changes types."""
    totals = Counter[str]()
    for _, entry in gres_entries(values):
        totals[entry.name] += 0 if (entry.name, entry.type) == ("mig", LOAN) else entry.count
    return +totals


def _dropped(name: str, without_gpus: Collection[str]) -> frozenset[str]:
    """Return the GRES of a MIG node that are replaced, or not kept: nodes `without_gpus` no longer count GPUs."""
    return frozenset({"mig", "gpu"}) if name in without_gpus else frozenset({"mig"})


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


def _not_configured(conf: Conf, rows: Sequence[NodeNameLine], counts: Counts) -> Iterator[str]:
    """Yield a sentence if nodes with MIG GPUs have no line."""
    if unknown := sorted(set(counts).difference(*(names for _, _, names in rows))):
        yield (
            f"{conf.main} has no NodeName line for {fold(unknown)}, which reported MIG GPUs: add it, or restart "
            "slurmctld if the node was removed"
        )


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


def _unknown_constraint(conf: Conf, cgroup_conf: Conf, rows: Sequence[NodeNameLine], counts: Counts) -> Iterator[str]:
    """Yield a sentence if a MIG node counts GPUs, and nothing here says whether Slurm denies jobs those of others."""
    counting = any(has_gres(values, "gpu") for _, values, names in rows if not counts.keys().isdisjoint(names))
    if counting and has_cgroups(conf) and not cgroup_conf.texts:
        yield (
            f"{cgroup_conf.main} does not exist here: if nodes have one with ConstrainDevices=yes, copy it here and "
            "run this command again, or Slurm will deny jobs the GPUs of their slices"
        )


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


def rendered(slurm: SlurmPlan) -> dict[str, str]:
    """Return migbatch's own files beside slurm.conf, by name."""
    return {
        INCLUDED: render("slurm.conf.j2", site=slurm.site),
        INCLUDED_GRES: render("gres.conf.j2", site=slurm.site),
    }
