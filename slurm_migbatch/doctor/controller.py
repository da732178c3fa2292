"""Check the host that runs migbatchd and slurmctld."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

from slurm_migbatch.config import Config
from slurm_migbatch.doctor import catalog, controllers, health, lending, lua, nodes, paths, settings, slurmfiles
from slurm_migbatch.doctor.database import check_file, check_log, check_restores, check_server
from slurm_migbatch.doctor.disks import check_disks, read_disk
from slurm_migbatch.doctor.leaving import check_leaving
from slurm_migbatch.doctor.limits import check_limits, check_weights
from slurm_migbatch.doctor.luaposix import check_posix
from slurm_migbatch.doctor.partitions import check_partitions, check_reservations
from slurm_migbatch.doctor.preemption import check_preemption
from slurm_migbatch.doctor.programs import Reader, readable, reader, unreadable_file
from slurm_migbatch.doctor.releases import check_release, untyped_gres
from slurm_migbatch.doctor.reports import ReceivedReports, causes, check_reports, read_reports, summary
from slurm_migbatch.doctor.rest import check_rest
from slurm_migbatch.doctor.service import check_service
from slurm_migbatch.install import scripts
from slurm_migbatch.install.dynamicnodes import with_dynamic
from slurm_migbatch.install.files import read
from slurm_migbatch.install.slurmconf import Conf, load
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, WARN, Finding
from slurm_migbatch.query.nodes import troubles
from slurm_migbatch.query.site import QuerySite
from slurm_migbatch.slurm.client import NodeRow, SlurmClient, SlurmError
from slurm_migbatch.slurm.commands import LOCAL
from slurm_migbatch.slurm.reservations import COMMAND
from slurm_migbatch.slurm.settings import CONFIG_COMMAND, parse_settings
from slurm_migbatch.slurm.versions import parse_release
from slurm_migbatch.store.engines import sqlite_file
from slurm_migbatch.store.errors import MissingDatabaseError, StoreError
from slurm_migbatch.store.queries import LeaseRow, last_seen
from slurm_migbatch.store.recent import instance_events

_SCONTROL_S: Final = 30.0


def examine(config: Config, rendering: lua.Rendering, *, everywhere: bool = False) -> Iterator[Finding]:
    """Yield all findings, dependencies first; with `everywhere` also those of the nodes, else only their number."""
    yield from _packages()
    if not config.path:
        advice = "migbatch install --role controller --apply"
        yield Finding(WARN, "migbatch.toml", "not found, using defaults", advice)
    yield from readable(
        lambda: paths.check_paths(config, reader(config.cluster.slurm_user)),
        lambda: paths.check_credentials(config, _daemon(config)),
        lambda: paths.check_tokens(config, _daemon(config)),
        lambda: check_rest(config, _daemon(config)),
    )
    own = health.ask_local(config)
    reports: ReceivedReports | None = None
    if own.standby:
        yield Finding(OK, "migbatchd", f"standby: {own.standby}")
        if everywhere:
            yield Finding(UNKNOWN, "nodes", "nodes report to the active migbatchd", "run migbatch doctor on its host")
    else:
        try:
            reports = read_reports(QuerySite(config).daemon("/v1/findings"))
        except (OSError, ValueError) as error:
            text = f"cannot query findings of nodes at {config.daemon.api_socket}: {error}"
            advice = "as root, with migbatchd running (systemctl status migbatchd) and of this release"
            yield Finding(UNKNOWN, "nodes", text, advice)
    try:
        yield from readable(lambda: _slurm(config, rendering, own, reports, everywhere))
    except SlurmError as error:
        yield _no_slurm(error)
    yield from readable(lambda: _disks(config))
    if not own.standby:
        yield from check_service(config, own)


def _daemon(config: Config) -> Reader | None:
    """Return the user of migbatchd, by its socket."""
    try:
        return reader(Path(config.daemon.api_socket).stat().st_uid)
    except OSError:
        return None


def _disks(config: Config) -> Iterator[Finding]:
    needed_mib = {config.daemon.run_dir: 16, str(Path(config.submit.table).parent): 16}
    if file := sqlite_file(config.store.url):
        needed_mib[str(file.parent)] = 128
        if file.exists():
            yield from check_file(str(file), _daemon(config))
            yield from check_log(str(file))
        yield from check_restores(file)
    else:
        yield from check_server(config.store.url)
    yield from check_disks(read_disk(directory, directory, needed) for directory, needed in needed_mib.items())


def needed() -> Iterator[str]:
    """Yield the packages of the extra `controller`, as this installation's metadata names them."""
    for line in requires("slurm-migbatch") or ():
        match = re.match(r"[\w.-]+", line)
        if match and 'extra == "controller"' in line and "python_version" not in line:
            yield match[0]


def _packages() -> Iterator[Finding]:
    text = f"Python {sys.version.split()[0]}, slurm-migbatch {version('slurm-migbatch')}"
    yield Finding(OK, "installation", text)
    for package in needed():
        try:
            yield Finding(OK, package, version(package))
        except PackageNotFoundError:
            yield Finding(FAIL, package, "is not installed", "pip install 'slurm-migbatch[controller]'")


def _slurm(
    config: Config,
    rendering: lua.Rendering,
    local_state: health.DaemonState,
    reports: ReceivedReports | None,
    everywhere: bool,
) -> Iterator[Finding]:
    """Check Slurm's state and configuration; `reports`: of the nodes, None if unknown here. Raises SlurmError."""
    client = QuerySite(config).slurm()
    number = client.version()
    try:
        rows = client.nodes()
    except SlurmError:
        yield from _release(config, {}, ())  # one that was not tested may be the cause
        raise
    yield Finding(OK, "Slurm", f"{number[0]}.{number[1]:02d}, {len(rows)} nodes")
    conf = parse_settings(_run(config, *CONFIG_COMMAND).stdout)
    slurm_conf = yield from _slurm_conf(conf.get("slurm_conf", ""))
    yield from _release(config, conf, untyped_gres(slurm_conf) if slurm_conf else ())
    yield from settings.check_slurm_conf(conf)
    yield from _controllers(config, conf, local_state)
    effect = "jobs that name a model and no mem= are refused"
    yield check_posix(conf.get("plugindir", "").split(":"), "job_submit_lua.so", effect)
    if slurm_conf:
        yield from _files(config, conf, slurm_conf, rows, rendering, active=not local_state.standby)
    inventory: Mapping[str, object] | None = None
    seen: dict[str, float] = {}
    held: list[LeaseRow] = []
    try:
        with QuerySite(config).record() as store:
            recorded, held, seen = store.inventory(), store.leases(), store.read(last_seen)
            zombies, _ = troubles(store.read(instance_events, changes=False))
    except StoreError as error:
        yield Finding(FAIL, "database", str(error), _advice(error, local_state))
    else:
        inventory = recorded
        yield Finding(OK, "record", f"{len(recorded)} nodes have reported")
        yield from nodes.check_zombies(zombies, nodes.mig_nodes(rows, config))
        if slurm_conf:
            yield from nodes.check_counts(rows, slurm_conf, recorded)
    # while migbatchd is down it receives no reports, so their age is measured from the newest one
    now = max(seen.values(), default=0.0) if local_state.silent else time.time()
    received_s = math.inf if reports is None else reports.age
    yield from nodes.check_nodes(rows, inventory, seen, now, config, causes(reports or {}), received_s)
    if reports is not None:
        yield from (check_reports if everywhere else summary)(reports, nodes.mig_nodes(rows, config))
    yield from _queue(client, held)
    partitions = lending.parse_partitions(_scontrol(config, "-o", "show", "partition"))
    mig = nodes.mig_nodes(rows, config)
    served = {partition for row in rows if row.name in mig for partition in row.partitions}
    yield from _partitions(config, conf, served, partitions)
    if config.moves.preempt:
        yield from check_preemption(lambda command: _run(config, *command).stdout)
    if config.lending.enabled:
        yield from lending.check_lending(config, conf, rows, partitions, number)


def _slurm_conf(path: str) -> Generator[Finding, None, Conf | None]:
    """Return slurm.conf; yield why not if this user may not read it."""
    try:
        return load(path, read) if path else None
    except PermissionError as error:
        yield unreadable_file(error)
        return None


def _partitions(
    config: Config, conf: Mapping[str, str], served: Collection[str], partitions: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    """Check the partitions with MIG nodes, and what limits the jobs in them."""
    yield from _topology(config, served, partitions)
    yield from check_partitions(partitions, served, conf)
    yield from check_reservations(_scontrol(config, *COMMAND[1:]))
    yield from check_weights(partitions, served, conf)
    yield from check_limits(conf, partial(_sacctmgr, config))


def _queue(client: SlurmClient, held: Sequence[LeaseRow]) -> Iterator[Finding]:
    try:
        jobs = client.jobs()
    except SlurmError as error:
        yield Finding(FAIL, "Slurm's queue", str(error), "check the output of squeue")
        return
    yield from nodes.check_queue(jobs)
    yield from nodes.check_orphans(held, jobs, time.time())


def _advice(error: StoreError, local_state: health.DaemonState) -> str:
    """Return what to do about a record that cannot be read."""
    if isinstance(error, MissingDatabaseError) and not local_state.silent:
        advice = "put the file back, which migbatchd then uses; a restart of migbatchd would begin an empty record"
        return f"run migbatch doctor as root; if the file was moved, {advice}"
    return "run migbatch doctor as root; start migbatchd once, it creates the database"


def _topology(
    config: Config, served: Collection[str], partitions: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    names = catalog.topologies_of(partitions, served)
    shown = {name: _scontrol(config, "show", "topology", *filter(None, [name])) for name in names}
    yield from catalog.check_topology(shown, config.cluster.catalog_nodes)


def _controllers(config: Config, conf: Mapping[str, str], local_state: health.DaemonState) -> Iterator[Finding]:
    hosts = controllers.other_hosts(conf, socket.gethostname())
    urls = {name: health.url_of(address, config.node_api.port) for name, address in hosts.items()}
    others = {name: health.ask(url) for name, url in urls.items()}
    yield from controllers.check_controllers(config, conf, local_state, others)


def _files(
    config: Config,
    shown: Mapping[str, str],
    conf: Conf,
    rows: Sequence[NodeRow],
    rendering: lua.Rendering,
    *,
    active: bool,
) -> Iterator[Finding]:
    """Check Slurm's files on this host; `active`: whether its migbatchd knows the current site."""
    mig = nodes.mig_nodes(rows, config)
    slurm_user = reader(config.cluster.slurm_user)

    def script(name: str, *, users: bool) -> Iterator[Finding]:
        return lua.check_script(str(Path(conf.main).with_name(name)), rendering, slurm_user, users=users, known=active)

    filters = "lua" in scripts.plugins(shown.get("clifilterplugins", ""))
    yield from readable(
        lambda: catalog.check_catalog(with_dynamic(conf, rows), config.cluster.catalog_nodes, mig),
        lambda: slurmfiles.check_autodetect(slurmfiles.beside(conf, "gres.conf"), mig),
        lambda: slurmfiles.check_cloud_nodes(conf, shown),
        lambda: script(lua.JOB_SUBMIT, users=False),
        lambda: script(lua.CLI_FILTER, users=True) if filters else (),
    )


def _release(config: Config, conf: Mapping[str, str], untyped: Sequence[str]) -> Iterator[Finding]:
    release_text = conf.get("slurm_version")  # slurmctld's own; the commands may be of another release
    try:
        release = parse_release(f"slurm {release_text}" if release_text else _scontrol(config, "version"))
    except SlurmError as error:
        yield Finding(WARN, "Slurm release", str(error), "check that `scontrol show config` works here")
        return
    yield from check_release(release, conf, untyped)


def leaving(config: Config) -> Iterator[Finding]:
    """Yield the jobs that prevent the removal of mig from slurm.conf."""
    try:
        jobs = QuerySite(config).slurm().jobs()
    except SlurmError as error:
        yield _no_slurm(error)
        return
    yield from check_leaving(jobs)


def _no_slurm(error: SlurmError) -> Finding:
    return Finding(FAIL, "Slurm", str(error), "check [cluster] slurm_bin and slurm_conf, and that slurmctld runs")


def _scontrol(config: Config, *arguments: str) -> str:
    return _run(config, "scontrol", *arguments).stdout


def _sacctmgr(config: Config, *arguments: str) -> str:
    """Return what `sacctmgr show` prints. Raises SlurmError."""
    done = _run(config, "sacctmgr", "-n", "-P", "show", *arguments)
    if done.returncode:
        reason = done.stderr.strip().rpartition("sacctmgr: error: ")[2]
        raise SlurmError(f"sacctmgr: {reason or f'exit status {done.returncode}'}")
    return done.stdout


def _run(config: Config, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = f"{config.cluster.slurm_bin}/{name}" if config.cluster.slurm_bin else name
    env = {**os.environ, **LOCAL, **({"SLURM_CONF": config.cluster.slurm_conf} if config.cluster.slurm_conf else {})}
    words = [program, *arguments]
    try:
        return subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=_SCONTROL_S, env=env, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(str(error)) from None
