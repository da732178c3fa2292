"""What `migbatch doctor` looks at. Each check is a generator of findings and touches nothing."""

from __future__ import annotations

import http
import http.client
import json
import re
import socket
import subprocess
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_migbatch.cli.common import fetch, service_url
from slurm_migbatch.config import Config
from slurm_migbatch.daemon.audit import orphans
from slurm_migbatch.node.conf import insecure
from slurm_migbatch.query.protocol import PATH
from slurm_migbatch.slurm import gres
from slurm_migbatch.slurm.client import JobRow, NodeRow
from slurm_migbatch.slurm.nodelist import expand
from slurm_migbatch.store.queries import LeaseRow
from slurm_migbatch.submit.service import reserved

GOOD, ODD, BAD = "ok", "warn", "FAIL"
#: seconds that a hook may take by default (node.conf HookDeadline); slurmd must wait longer
_HOOK_DEADLINE_S = 30
#: seconds that a run must have had its slices before Slurm's queue is held against it
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One result: `level` is ok, warn or FAIL; `advice` says what to do unless it is ok."""

    level: str
    subject: str
    text: str
    advice: str = ""


def parse_slurm_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`, keys in lower case."""
    found = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"\s*[A-Za-z][\w\[\]]*\s*", key):
            found[key.strip().lower()] = "" if value.strip() == "(null)" else value.strip()
    return found


def check_slurm_conf(conf: Mapping[str, str]) -> Iterator[Finding]:
    """Check that slurmctld runs with what migbatch needs."""
    types = conf.get("grestypes", "").split(",")
    missing = [word for word in ("mig", "gpu") if word not in types]
    if "mig" in missing:
        yield Finding(BAD, "GresTypes", "holds no mig", "set GresTypes=gpu,mig (migbatch config render slurm)")
    elif missing:
        yield Finding(
            ODD, "GresTypes", "holds no gpu", "without it, --gpus is refused before the submit filter sees it"
        )
    else:
        yield Finding(GOOD, "GresTypes", conf["grestypes"])
    plugins = conf.get("jobsubmitplugins", "")
    if "lua" in plugins.split(","):
        yield Finding(GOOD, "JobSubmitPlugins", plugins)
    else:
        yield Finding(BAD, "JobSubmitPlugins", "lua is not loaded", "set JobSubmitPlugins=lua and restart slurmctld")
    for key in ("Prolog", "Epilog", "TaskProlog"):
        value = next((v for k, v in conf.items() if re.fullmatch(rf"{key.lower()}(\[\d+\])?", k) and v), "")
        if "migbatch" in value or "prolog" in value.lower() or "epilog" in value.lower():
            yield Finding(GOOD, key, value)
        else:
            advice = f"run `migbatch node install` on the nodes and set {key}= to the hook it names"
            yield Finding(BAD, key, f"is {value or 'not set'}", advice)
    flags = conf.get("prologflags", "").lower().split(",")
    if "alloc" in flags or "contain" in flags:
        yield Finding(GOOD, "PrologFlags", conf["prologflags"])
    else:
        text = "has no Alloc, so that nodes without a first step get no slices"
        yield Finding(BAD, "PrologFlags", text, "set PrologFlags=Alloc,DeferBatch")
    yield from _timeout(conf)
    if conf.get("jobrequeue") == "0":
        yield Finding(
            ODD, "JobRequeue", "is 0", "jobs cannot be requeued after a misfit or a GPU failure; set JobRequeue=1"
        )
    if conf.get("accountingstoragetype", "").endswith("slurmdbd") and "gres/mig" not in conf.get(
        "accountingstoragetres", ""
    ):
        advice = "add gres/mig (and gres/mig:<profile> for each profile) for fairshare and sreport"
        yield Finding(ODD, "AccountingStorageTRES", "does not count slices", advice)


def _timeout(conf: Mapping[str, str]) -> Iterator[Finding]:
    words = [conf.get(key, "") for key in ("prologepilogtimeout", "prologtimeout")]
    found = next((re.match(r"(\d+)", word) for word in words if re.match(r"\d+", word)), None)
    if found and int(found[1]) != 65534 and int(found[1]) <= _HOOK_DEADLINE_S:
        text = f"slurmd kills hooks after {found[1]} s, before their own deadline"
        yield Finding(BAD, "PrologEpilogTimeout", text, "set it to at least 60, or lower HookDeadline in node.conf")
    else:
        yield Finding(GOOD, "PrologEpilogTimeout", f"{found[1]} s" if found else "unlimited")


def check_nodes(
    rows: Sequence[NodeRow], inventory: Mapping[str, object], seen: Mapping[str, float], now: float, config: Config
) -> Iterator[Finding]:
    """Check that the nodes are registered, valid and report to migbatchd."""
    catalog = expand(config.cluster.catalog_nodes)
    mig = [row for row in rows if any(kind != "none" for kind in row.gres) and row.name not in catalog]
    if not mig:
        yield Finding(BAD, "MIG nodes", "no node has mig in its Gres", "add it (migbatch config render slurm, gres)")
    for row in mig:
        if row.invalid:
            text = f"slurmctld refuses its registration: {row.reason or 'gres counts differ'}"
            advice = "gres.conf, slurm.conf and live counts must have one sum; restart slurmd after correcting them"
            yield Finding(BAD, row.name, text, advice)
        elif not row.open:
            state = "+".join(sorted(row.states)).lower()
            advice = f"scontrol update NodeName={row.name} State=RESUME once the cause is gone"
            yield Finding(ODD, row.name, f"is {state}: {row.reason or 'no reason given'}", advice)
        if row.name not in inventory:
            text = "has reported no GPUs"
            advice = "start `migbatch node agent` there (systemctl status migbatch-node) and look at its log"
            yield Finding(BAD, row.name, text, advice)
        elif now - seen.get(row.name, 0.0) > max(600.0, 10 * config.supply.node_silence_s):
            ago = f"{(now - seen.get(row.name, 0.0)) / 60:.0f} minutes"
            yield Finding(
                ODD, row.name, f"has not reported for {ago}", "look at migbatch-node there, and at its network"
            )
        else:
            yield Finding(GOOD, row.name, f"{sum(row.gres.values())} counts, {len(row.used)} types in use")
    for name in catalog:
        yield from _catalog(rows, mig, name)


def check_orphans(held: Sequence[LeaseRow], jobs: Sequence[JobRow], now: float) -> Iterator[Finding]:
    """Check for runs that hold slices though Slurm has ended them."""
    old = [row for row in held if row.since is not None and now - row.since > PATIENCE_S]
    found = sorted(orphans(((row.node, row.job, row.restart) for row in old), jobs))
    for orphan in found:
        text = f"job {orphan.job} run {orphan.restart} holds slices, though Slurm no longer has it there"
        advice = (
            f"if this is still so in a minute, run `migbatch node reconcile` on {orphan.node}; is its agent running?"
        )
        yield Finding(ODD, orphan.node, text, advice)
    if not found:
        yield Finding(GOOD, "leases", f"{len(held)} slices are held, all by jobs that Slurm has")


def _catalog(rows: Sequence[NodeRow], mig: Sequence[NodeRow], name: str) -> Iterator[Finding]:
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        text = f"there is no node {name} that lists every profile"
        advice = (
            "without it, jobs are refused while no node offers their profile; add it (migbatch config render slurm)"
        )
        yield Finding(BAD, "catalog node", text, advice)
        return
    if row.open:
        yield Finding(
            BAD, "catalog node", f"{name} is not down", f"scontrol update NodeName={name} State=DOWN Reason=catalog"
        )
    lacking = sorted({kind for other in mig for kind in other.gres} - set(row.gres) - {"none"})
    outside = sorted({p for other in mig for p in other.partitions} - set(row.partitions))
    if lacking:
        yield Finding(BAD, "catalog node", f"{name} does not list {', '.join(lacking)}", "render slurm.conf again")
    if outside:
        yield Finding(BAD, "catalog node", f"{name} is not in partition {', '.join(outside)}", "add it to Nodes= there")
    if not (row.open or lacking or outside):
        yield Finding(GOOD, "catalog node", f"{name} lists {len(row.gres)} types")


def check_leaving(jobs: Sequence[JobRow]) -> Iterator[Finding]:
    """Check for jobs that ask for or hold slices, so that mig cannot be removed from slurm.conf yet."""
    odd = [str(row.job_id) for row in jobs if row.unread]
    waiting = [_named(row) for row in jobs if row.pending and _needs_mig(row)]
    running = [_named(row) for row in jobs if not row.pending and _needs_mig(row)]
    if running:
        yield Finding(BAD, "leaving", f"jobs hold slices: {_first(running)}", "wait for their end, or scancel them")
    if waiting:
        text = f"jobs wait for slices: {_first(waiting)}; a slurmctld without mig kills them or starts them without any"
        yield Finding(BAD, "leaving", text, "let them run, scancel them, or have them ask for something else")
    if odd:
        yield Finding(BAD, "leaving", f"of jobs {_first(odd)} nobody knows what they ask for", "look at each in squeue")
    if not (running or waiting or odd):
        yield Finding(GOOD, "leaving", "no job asks for slices; mig may be taken out of slurm.conf and gres.conf")


def _needs_mig(row: JobRow) -> bool:
    return any(gres.prefix_of(entry)[1].partition(":")[0] == "mig" for entry in gres.split(row.gres))


def _named(row: JobRow) -> str:
    name = str(row.job_id) if row.array_job is None else f"{row.array_job}_[{row.array_task}]"
    return f"{name} ({row.state.lower()})"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def check_paths(config: Config, uid: int) -> Iterator[Finding]:
    """Check that nobody else can change what root and slurmctld act on."""
    for path in (
        config.path,
        config.submit.table,
        config.node_api.token_file if config.node_api.auth == "token" else "",
    ):
        if not path or not Path(path).exists():
            continue
        wrong = insecure(path, uid)
        if wrong:
            yield Finding(BAD, path, wrong, "what slurmctld and root read must not be writable by others")
        elif path == config.node_api.token_file and Path(path).stat().st_mode & 0o077:
            yield Finding(BAD, path, "others can read the nodes' secret", f"chmod 600 {path}, and make a new secret")
        else:
            yield Finding(GOOD, path, "safe")


def check_lua(slurm_conf: str) -> Iterator[Finding]:
    """Check that job_submit.lua is in place, and that Lua can reach a unix socket."""
    if slurm_conf:
        script = Path(slurm_conf).parent / "job_submit.lua"
        if not script.exists():
            advice = f"migbatch config render job_submit > {script}"
            yield Finding(BAD, str(script), "is missing", advice)
        elif "migbatch" not in script.read_text(errors="replace"):
            advice = "merge yours with `migbatch config render job_submit`"
            yield Finding(BAD, str(script), "is not migbatch's", advice)
        else:
            wrong = insecure(str(script))
            yield Finding(BAD, str(script), wrong, "slurmctld runs it") if wrong else Finding(GOOD, str(script), "safe")
    for lua in ("lua5.1", "lua5.3", "lua5.4", "lua"):
        try:
            done = subprocess.run(
                [lua, "-e", 'require "posix"'], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            yield Finding(GOOD, "lua-posix", f"found by {lua}")
            return
    text = "no Lua here finds the module posix"
    advice = "install lua-posix for slurmctld's Lua; until then submissions use the compiled table only"
    yield Finding(ODD, "lua-posix", text, advice)


def check_service(config: Config) -> Iterator[Finding]:
    """Check that migbatchd answers on both sides."""
    everybodys = Path(config.submit.socket)
    for path in (reserved(everybodys), everybodys):
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.settimeout(2)
                probe.connect(str(path))
            yield Finding(GOOD, "submit socket", str(path))
        except PermissionError:  # slurmctld's, and somebody else asks
            continue
        except OSError as error:
            text = f"{path}: {error.strerror or error}"
            yield Finding(BAD, "submit socket", text, "start migbatchd; until then slurmctld uses the compiled table")
    yield from check_query(config)
    url = service_url(config, "/healthz")
    try:
        body = fetch(url)
    except urllib.error.HTTPError as error:
        body = error.read()
    except (OSError, ValueError) as error:
        yield Finding(
            BAD, "node API", f"{url}: {getattr(error, 'reason', error)}", "start migbatchd (systemctl start migbatchd)"
        )
        return
    try:
        checks = json.loads(body)["checks"]
    except (ValueError, KeyError, TypeError):
        yield Finding(BAD, "node API", f"{url} is not migbatchd", "another program listens on [node_api] port")
        return
    for part, text in checks.items():
        yield Finding(GOOD if text == "ok" else BAD, f"migbatchd: {part}", text, "" if text == "ok" else "see its log")


def check_query(config: Config) -> Iterator[Finding]:
    """Check that the service for users' questions listens, and that it is this one."""
    if not config.query.enabled:
        yield Finding(
            ODD, "query service", "is off ([query] enabled)", "users on login nodes cannot ask migacct and why"
        )
        return
    listen, port = config.query.listen, config.query.port
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)  # noqa: S104
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("POST", PATH, b"")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        text = f"nobody answers at {host} port {port}: {getattr(error, 'strerror', None) or error}"
        advice = "look for query in migbatchd's log: the port may be taken ([query] port), or munge be missing"
        yield Finding(BAD, "query service", text, advice)
        return
    finally:
        connection.close()
    if status == http.HTTPStatus.UNAUTHORIZED:
        yield Finding(GOOD, "query service", f"{host} port {port}")
    else:
        text = f"what answers at {host} port {port} is another program"
        yield Finding(BAD, "query service", text, "end it, or set [query] port and login.conf")
