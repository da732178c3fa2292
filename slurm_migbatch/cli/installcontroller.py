"""Changes on the controller host: migbatchd, and Slurm's files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from slurm_migbatch import site
from slurm_migbatch.cli.common import open_record, slurm_client
from slurm_migbatch.cli.ending import Failure
from slurm_migbatch.cli.scripts import lua
from slurm_migbatch.config import DEFAULT_PATH, Config, loads
from slurm_migbatch.config import load as load_config
from slurm_migbatch.config import render as render_config
from slurm_migbatch.daemon.ended import HistoryClient
from slurm_migbatch.daemon.nodesview import geometry_of
from slurm_migbatch.doctor.health import ask_local
from slurm_migbatch.doctor.nodes import ANOTHER_NAME
from slurm_migbatch.doctor.slurmfiles import beside
from slurm_migbatch.install import containers, scripts, topology
from slurm_migbatch.install.dynamicnodes import with_dynamic
from slurm_migbatch.install.files import InstallRecord, Wanted, read
from slurm_migbatch.install.hosts import HOOKS, HostPlan, Places, add_unit, slurmctld_hosts, start_unit, stub_path
from slurm_migbatch.install.reported import describe
from slurm_migbatch.install.slurmconf import INCLUDED, Conf, apply
from slurm_migbatch.install.slurmedit import plan as plan_slurm
from slurm_migbatch.install.slurmedit import rendered
from slurm_migbatch.install.slurmplan import INCLUDED_GRES, SlurmPlan
from slurm_migbatch.mig.geometry import Geometry
from slurm_migbatch.node.conf import insecure
from slurm_migbatch.node.install import InstallError
from slurm_migbatch.site import Site
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.nodelist import fold
from slurm_migbatch.slurm.users import name_of, uid_of
from slurm_migbatch.store.engines import has_password, sqlite_file
from slurm_migbatch.store.errors import OlderDatabaseError, StoreError
from slurm_migbatch.submit import shim

UNIT: Final = "migbatchd.service"
STATE: Final = "/var/lib/migbatch"
_PATH_OF_UNITS: Final = frozenset(f"{top}/{name}" for top in ("/usr/local", "/usr", "") for name in ("sbin", "bin"))
"""Directories in which services find programs, whatever PATH is in the shell of an administrator: systemd's default."""
_LUA_PLUGINS: Final = {
    "JobSubmitPlugins": ("job_submit_lua.so", "slurmctld would not start"),
    "CliFilterPlugins": ("cli_filter_lua.so", "srun, salloc and sbatch would fail"),
}
TOPOLOGY_YAML: Final = (25, 5)
"""The release from which on Slurm reads topology.yaml, and ignores topology.conf if there is one."""


@dataclass(frozen=True)
class Choices:
    """Options of the administrator.

    Attributes:
        config: path of migbatch.toml.
        user: user of migbatchd; empty: unchanged, at first root.
        store: URL of the database; empty: unchanged.
        cli_filter: whether slurm.conf must name cli_filter/lua; None: unchanged.
        edit: change the site's own lines too.
    """

    config: str = DEFAULT_PATH
    user: str = ""
    store: str = ""
    cli_filter: bool | None = None
    edit: bool = False


class NothingReported(Failure):
    """No node has reported GPUs in MIG mode."""


def controller(places: Places, conf: Conf, choices: Choices, record: InstallRecord) -> HostPlan:
    """Return the changes for the controller host as far as known: Slurm's part once nodes have reported."""
    plan = HostPlan()
    slurm_user = name_of(conf.value("SlurmUser") or "root")
    config = _service(plan, places, conf, choices, slurm_user)
    if len(slurmctld_hosts(conf)) > 1 and (standby := ask_local(config).standby):
        where = Path(conf.main).parent
        plan.notes.append(f"Slurm's files are written on the active migbatchd's host; copy its {where} here: {standby}")
        return plan
    try:
        slurm = slurm_part(config, conf, choices.cli_filter)
    except NothingReported as error:
        plan.next = [start_unit(UNIT)]
        plan.notes.append(f"run this command again to configure Slurm: {error}")
        return plan
    plan.notes += slurm.notes
    if problems := [*slurm.problems, *_missing(conf), *_lacking_plugins(config, slurm.site, conf)]:
        plan.problems += problems
        return plan  # Slurm's files are changed together or not at all: some of their lines would be missing
    for name in (shim.JOB_SUBMIT, shim.CLI_FILTER):
        _lua(plan, config, Path(conf.main).with_name(name), choices.edit, record)
    plan.notes += _newly_loaded(plan, slurm.site, conf)
    _slurm(plan, slurm, conf, choices.edit)
    named = {setting.value for setting in slurm.site.settings} | {
        token.value for line in conf.lines for token in line.tokens
    }
    for _, name in HOOKS:
        if (path := stub_path(conf, name)) in named:
            plan.wanted.append(Wanted(path, scripts.stub(str(places.hooks / name)), mode=0o755))
    for name, on in scripts.PRIMARY.items():
        path = str(Path(conf.main).with_name(name))
        if path in named:
            program = scripts.primary_program(str(places.prefix / "bin/python3"), config.daemon.api_socket, on=on)
            plan.wanted.append(Wanted(path, program, mode=0o755))
    if len(slurmctld_hosts(conf)) > 1 and config.store.url.startswith("sqlite"):
        plan.notes.append(
            f"{conf.main} has several SlurmctldHost: for fail-over of migbatchd, [store] url in "
            f"{choices.config} must be the same MariaDB or PostgreSQL database on every controller (docs/install.md)"
        )
    return plan


def slurm_part(config: Config, conf: Conf, cli_filter: bool | None) -> SlurmPlan:
    """Return the changes to slurm.conf and gres.conf for the nodes that have reported.

    Raises:
        NothingReported: no node has reported GPUs yet.
        Failure: Slurm cannot be queried.
    """
    found, conf = reported_site(config, conf)
    wanted = "lua" in scripts.plugins(conf.value("CliFilterPlugins")) if cli_filter is None else cli_filter
    lending = config.lending.partitions if config.lending.enabled else ()
    prolog, epilog, task_prolog = (stub_path(conf, name) for _, name in HOOKS)
    hooked = replace(found, cli_filter=wanted, prolog=prolog, epilog=epilog, task_prolog=task_prolog)
    if len(slurmctld_hosts(conf)) > 1:
        on, off = (str(Path(conf.main).with_name(name)) for name in scripts.PRIMARY)
        hooked = replace(hooked, primary_on=on, primary_off=off)
    yaml = read(conf.beside("topology.yaml")) if found.version >= TOPOLOGY_YAML else None
    tree = beside(conf, "topology.conf") if yaml is None else None
    planned = plan_slurm(hooked, conf, beside(conf, "gres.conf"), lending, tree, beside(conf, "cgroup.conf"))
    own = conf.setting("CliFilterPlugins", without=conf.beside(INCLUDED))
    if cli_filter is False and own and "lua" in scripts.plugins(own[1].value):
        line, token = own
        planned.notes.append(
            f"{line.place}: CliFilterPlugins={token.value} remains; remove lua if only migbatch needs it"
        )
    if not conf.values("TaskProlog") and containers.has_pyxis(conf):
        planned.notes.append(_in_containers(task_prolog, found.version))
    if yaml is not None and (note := topology.yaml_note(yaml, found.catalog.names)):
        planned.notes.append(note)
    return planned


def _in_containers(task_prolog: str, release: tuple[int, ...]) -> str:
    """Say what is to be done before slurm.conf gets a TaskProlog, where pyxis is loaded."""
    note = (
        f"every task in a container of pyxis will fail where Enroot does not mount {task_prolog}: copy "
        f"{containers.ENROOT}/{containers.FSTAB} from a GPU node to all other nodes with pyxis before (docs/install.md)"
    )
    if containers.needs_libraries(release):
        note += "; with Slurm 24.11 also in every container without Slurm's libraries"
    return note


def reported_site(config: Config, conf: Conf) -> tuple[Site, Conf]:
    """Return the site from the record and from Slurm, without the hooks, and slurm.conf with the dynamic nodes.

    Raises:
        NothingReported: no node has reported GPUs yet.
        Failure: Slurm cannot be queried.
    """
    try:
        with open_record(config) as store:
            inventory = store.inventory()
    except OlderDatabaseError:
        raise NothingReported("the record is of an older release, and migbatchd migrates it when it restarts") from None
    except StoreError as error:
        raise NothingReported(f"no node has reported yet: {error}") from None
    client = slurm_client(config)
    try:
        version, rows = client.version(), client.nodes()
    except SlurmError as error:
        raise Failure(f"cannot read Slurm's nodes and release: {error}") from None
    known = {row.name for row in rows}
    gpus = cut_by_mig(inventory, known)
    if not gpus and (unknown_nodes := set(inventory) - known):
        raise NothingReported(
            f"{fold(unknown_nodes)} reported, but Slurm has no such node: {ANOTHER_NAME}, or add its line to slurm.conf"
        )
    if not gpus:
        raise NothingReported(
            "no node in Slurm has reported MIG GPUs yet; run `migbatch install --role node` on the nodes "
            "first, and start migbatch-node there"
        )
    lending = config.lending.partitions if config.lending.enabled else ()
    described = describe(gpus, version, config.cluster.catalog_nodes, lending)
    gpus_of_nodes = {name: gpu_devices(inventory[name]) for name in gpus}
    return replace(described, gpu_devices=gpus_of_nodes), with_dynamic(conf, rows)


def gpu_devices(gpus: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the device files of a node's GPUs in MIG mode."""
    return tuple([f"/dev/nvidia{gpu['minor']}" for gpu in gpus if gpu.get("minor") is not None and geometry_of(gpu)])


def cut_by_mig(
    inventory: Mapping[str, Iterable[Mapping[str, Any]]], known: Collection[str]
) -> dict[str, list[Geometry]]:
    """Return the geometries of GPUs in MIG mode, by node, for nodes in Slurm."""
    found: dict[str, list[Geometry]] = {}
    for name, gpus in inventory.items():
        geometries = [geometry for gpu in gpus if (geometry := geometry_of(gpu)) is not None]
        if geometries and name in known:
            found[name] = geometries
    return found


def _service(plan: HostPlan, places: Places, conf: Conf, choices: Choices, slurm_user: str) -> Config:
    """Add migbatchd's files to a plan, with its present or future configuration."""
    cluster = {"slurm_user": slurm_user}
    if conf.main != "/etc/slurm/slurm.conf":
        cluster["slurm_conf"] = conf.main
    if (scontrol := shutil.which("scontrol")) and (folder := str(Path(scontrol).parent)) not in _PATH_OF_UNITS:
        cluster["slurm_bin"] = folder
    values: dict[str, Mapping[str, str]] = {"cluster": cluster}
    if choices.store:
        values["store"] = {"url": choices.store}
    text = render_config(values)
    present = Path(choices.config).exists()
    config = load_config(choices.config) if present else loads(text, choices.config)
    if present and name_of(config.cluster.slurm_user) != slurm_user:
        plan.problems.append(
            f"{choices.config}: slurm_user is {config.cluster.slurm_user!r}; correct it, {conf.main} has "
            f"SlurmUser={slurm_user}"
        )
    if choices.store and config.store.url != choices.store:
        plan.problems.append(f"{choices.config}: [store] url differs from --store; correct it, and restart migbatchd")
    user = choices.user or _present_user(places)
    if not uid_of(user):
        plan.problems.append(f"no user {user!r} on this host, as whom migbatchd is to run")
    elif foreign := _foreign(config, choices.config, user):
        command = f"chown -R {user} {' '.join(foreign)}"
        plan.notes.append(f"files of migbatchd belong to another user: stop it, run `{command}`, and start it")
    secret = has_password(config.store.url)
    plan.wanted += [
        Wanted(STATE, kind="directory", mode=0o755, owner=user),
        Wanted(choices.config, text, "once", mode=0o600 if secret else 0o644, owner=user if secret else "root"),
    ]
    program = places.prefix / "bin/migbatchd"
    if user == "root":
        _check_program(program)
    unit = site.render("migbatchd.service.j2", program=program, config=choices.config, user=user)
    add_unit(plan, places, UNIT, unit)
    if any(Path(target.path).name == UNIT and read(target.path) != target.text for target in plan.wanted):
        plan.next.append(start_unit(UNIT))
    return config


def _foreign(config: Config, path: str, user: str) -> list[str]:
    """Return migbatchd's files that belong to another user, as whom it has run before; not all of their directories,
    which hold root's record of the installation too.
    """
    database = sqlite_file(config.store.url)
    paths = [
        Path(config.daemon.run_dir) / "migbatchd.pid",
        Path(config.daemon.run_dir) / "decisions",
        *([database] if database else []),
        Path(config.learning.models),
        Path(config.submit.table),
        Path(config.submit.catalog),
    ]
    secrets = (
        *(path, config.node_api.token_file, config.node_api.metrics_token_file, config.report.token_file),
        config.cluster.slurmrestd_token,
    )
    paths += [Path(name) for name in secrets if name and Path(name).exists() and not Path(name).stat().st_mode & 0o077]
    others = [path for path in paths if path.exists() and path.stat().st_uid not in uid_of(user)]
    return [f"{path}*" if path == database else str(path) for path in others]


def _check_program(program: Path) -> None:
    """Raise InstallError if others than root could change what root is to run."""
    for place in (program.parent, program.resolve(), Path(site.__file__).resolve().parents[1]):
        if place.exists() and (reason := insecure(str(place))):
            raise InstallError(f"root is to run migbatchd, but {reason}")


def _present_user(places: Places) -> str:
    found = re.search(r"^User=(\S+)", read(str(places.systemd / UNIT)) or "", re.MULTILINE)
    return found[1] if found else "root"


def _slurm(plan: HostPlan, slurm: SlurmPlan, conf: Conf, edit: bool) -> None:
    """Add files beside slurm.conf, and edits of the site's files, to a plan."""
    directory = Path(conf.main).parent
    wanted = [Wanted(str(directory / name), text) for name, text in rendered(slurm).items()]
    texts = {**beside(conf, "topology.conf").texts, **beside(conf, "gres.conf").texts, **conf.texts}
    if edit:
        found = apply(texts, slurm.edits)
        paths = sorted({line_edit.path for line_edit in slurm.edits}, key=lambda path: (path == conf.main, path))
        wanted += [Wanted(path, found[path], "site") for path in paths]
    else:
        plan.lines += [str(line_edit) for line_edit in slurm.edits]
    plan.wanted += wanted
    step = f"bring {directory} to every host as usual"
    if plan.lines or any(read(item.path) != item.text for item in wanted):  # scripts are read anew without a restart
        step += ", then restart slurmctld, and slurmd on every node"
    plan.next.append(step)


def _missing(conf: Conf) -> Iterator[str]:
    for path, line in conf.missing:
        if Path(path).name not in (INCLUDED, INCLUDED_GRES):
            yield f"{line.place}: {path} is included but does not exist"


def _lacking_plugins(config: Config, wanted: Site, conf: Conf) -> Iterator[str]:
    """Yield a sentence for each plugin that slurm.conf does not name yet, is to name, and that this Slurm lacks."""
    keys = {setting.key for setting in wanted.needed()}
    for key, (plugin, effect) in _LUA_PLUGINS.items():
        if key not in keys or "lua" in scripts.plugins(conf.value(key)):
            continue
        folders = plugin_dirs(config)
        if folders and not any((Path(folder) / plugin).exists() for folder in folders):
            text = f"{':'.join(folders)} has no {plugin}, which {key}=lua needs, so {effect}"
            yield f"{text}: install Slurm's plugin, or a Slurm that was built with Lua's development files"


def plugin_dirs(config: Config) -> list[str]:
    """Return the directories of Slurm's plugins; none if Slurm does not say."""
    try:
        return list(filter(None, HistoryClient(*config.cluster.commands).settings().get("plugindir", "").split(":")))
    except SlurmError:
        return []


def _lua(plan: HostPlan, config: Config, path: Path, edit: bool, record: InstallRecord) -> None:
    """Add one of the Lua scripts to a plan: alone if the site has none, else loaded by the site's."""
    present = read(str(path))
    entry = record.entries.get(str(path))
    is_own = present is None or present.startswith(scripts.OURS) or (entry is not None and entry.kind == "own")
    if is_own:
        plan.wanted.append(Wanted(str(path), lua(config, path.name)))
        return
    assert present is not None
    module = str(path.with_name(scripts.BESIDE[path.name]))
    plan.wanted.append(Wanted(module, lua(config, path.name, module=True)))
    if scripts.calls_lua(present, module):
        return
    text = scripts.call_lua(present, module)
    if edit:
        plan.wanted.append(Wanted(str(path), text, "site"))
    else:
        before_and_after = zip_longest(present.splitlines(), text.splitlines(), fillvalue="")
        number = next(i for i, (a, b) in enumerate(before_and_after, 1) if a != b)
        lines = text.splitlines()[number - 1 : number + 1]
        plan.lines.append(f"{path}:{number}: add before this line: {'  and  '.join(lines)}")


def _newly_loaded(plan: HostPlan, wanted: Site, conf: Conf) -> Iterator[str]:
    """Yield a sentence for each Lua script of the site that slurm.conf has not loaded so far, and will load."""
    keys = {setting.key for setting in wanted.needed()}
    paths = {target.path for target in plan.wanted}
    for key, name in (("JobSubmitPlugins", shim.JOB_SUBMIT), ("CliFilterPlugins", shim.CLI_FILTER)):
        beside_own = conf.beside(scripts.BESIDE[name]) in paths
        if beside_own and key in keys and "lua" not in scripts.plugins(conf.value(key)):
            path = conf.beside(name)
            yield f"{path} was there, but slurm.conf did not load it ({key}): its rules take effect now"


def scripts_to_reload(changed: set[str]) -> Iterator[Path]:
    """Yield the site's Lua scripts that slurmctld must reload because they load a changed file of migbatch."""
    for name, module in scripts.BESIDE.items():
        for path in changed:
            script = Path(path).with_name(name)
            if Path(path).name == module and script.exists() and str(script) not in changed:
                yield script
