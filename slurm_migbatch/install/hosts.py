"""Determine what a compute node and a login node need; reads the host, writes nothing. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from slurm_migbatch.install import containers, scripts
from slurm_migbatch.install.files import Wanted, read
from slurm_migbatch.install.slurmconf import Conf, load
from slurm_migbatch.node import install as node_install
from slurm_migbatch.node.conf import NAME
from slurm_migbatch.node.install import InstallError
from slurm_migbatch.slurm.users import uid_of

UNIT: Final = "migbatch-node.service"
CLI_FILTER: Final = "cli_filter.lua"
CONFIGLESS: Final = "/run/slurm/conf/slurm.conf"
"""slurmd's copy on a configless node, with the other files that slurmctld sends."""
_USUAL: Final = ("/etc/slurm/slurm.conf", CONFIGLESS, "/etc/slurm-llnl/slurm.conf")
HOOKS: Final = (("Prolog", "prolog"), ("Epilog", "epilog"), ("TaskProlog", "task_prolog"))
"""Keys of slurm.conf, and the names of migbatch's programs for them."""
_PORT: Final = 6830


@dataclass
class HostPlan:
    """Needs of one host.

    Attributes:
        wanted: files and directories, in the order in which they are to be written.
        lines: changes of the site's own scripts, as sentences; if edits are allowed, they are in `wanted` instead.
        notes, problems: sentences.
        next: what to do once it is written.
        python: interpreter with which the hooks' imports are compiled when the plan is applied; empty: none.
    """

    wanted: list[Wanted] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    python: str = ""


@dataclass(frozen=True)
class Places:
    """Paths on a host.

    Attributes:
        prefix: the virtual environment.
        etc, hooks, systemd: directories of migbatch's settings, of the hook programs, and of units.
        packaged_units: directory of units from packages.
    """

    prefix: Path
    etc: Path = Path("/etc/migbatch")
    hooks: Path = Path("/etc/migbatch/hooks")
    systemd: Path = Path("/etc/systemd/system")
    packaged_units: Path = Path("/usr/lib/systemd/system")

    @property
    def enroot(self) -> Path:
        """Directory of Enroot's settings, /etc/enroot beside /etc/migbatch."""
        return self.etc.with_name(Path(containers.ENROOT).name)


def node(
    places: Places,
    conf: Conf,
    *,
    controller: str = "",
    python: str = "",
    task_python: str = "",
    edit: bool = False,
    release: tuple[int, ...] = (),
) -> HostPlan:
    """Return what a compute node needs.

    Args:
        controller: URLs of migbatchd; empty: those of slurm.conf's SlurmctldHost.
        python, task_python: interpreters of the hooks; empty: that of the virtual environment.
        edit: change the site's own scripts too.
        release: of Slurm; empty if unknown.

    Raises:
        InstallError: others than root could change what root is to run, or the release matters and is unknown.
    """
    python = python or str(places.prefix / "bin/python3")
    plan = HostPlan(python=python)
    url = controller or _controller(conf)
    plan.wanted += [
        Wanted(str(path), text, mode=0o755)
        for path, text in node_install.programs(places.hooks, places.etc, python, task_python)
    ]
    paths = node_install.package_paths()
    for used in ([Path(task_python or python).resolve()], node_install.read_by_users(paths)):
        if part := node_install.closed_to_users(used):
            plan.problems.append(
                f"users run TaskProlog, but {part} is not accessible to them: change its mode (what pip has written: "
                f"chmod -R a+rX {paths[0]}; pip uses the umask of its caller), or create the virtual environment "
                "elsewhere or with another Python (--prefix, --task-python)"
            )
    elsewhere = "" if conf.main in _USUAL else conf.main
    peers = sorted({0, *uid_of(conf.value("SlurmUser") or "root")})
    scontrol, node_conf = shutil.which("scontrol") or "", places.etc / NAME
    settings = node_install.settings(url, scontrol, elsewhere, peers)
    plan.wanted.append(Wanted(str(node_conf), settings, "once"))
    if not scontrol and not node_conf.exists():
        plan.notes.append(
            f"scontrol is not in PATH: unless it is /usr/bin/scontrol, set ScontrolPath= in {node_conf}, or hooks can "
            "neither requeue jobs nor drain the node"
        )
    unit = node_install.unit(str(places.prefix / "bin/migbatch"), str(places.etc))
    add_unit(plan, places, UNIT, unit)
    _site_hooks(plan, places, conf, edit=edit, release=release)
    _cli_filter(plan, conf)
    _enroot(plan, places, conf, task_python or python)
    plan.next.append(start_unit(UNIT))
    return plan


def _site_hooks(plan: HostPlan, places: Places, conf: Conf, *, edit: bool, release: tuple[int, ...]) -> None:
    """Have the site's own hooks run ours, where slurm.conf cannot name both."""
    for key, hook in HOOKS:
        path = str(places.hooks / hook)
        if not _is_sites_alone(conf, key, path):
            continue
        if key in scripts.SEVERAL and not release:
            # from 24.11 on the controller adds a line of slurm.conf: a call in the script would run the hook twice
            raise InstallError(
                f"{key}={conf.value(key)}: how ours is added depends on Slurm's release, and `scontrol --version` "
                "does not tell it: add the directory of scontrol to PATH"
            )
        if key in scripts.SEVERAL and release >= scripts.SEVERAL[key]:
            continue  # a line of slurm.conf, which the controller writes
        _add_to_site_hook(plan, conf, key, path, edit)


def _enroot(plan: HostPlan, places: Places, conf: Conf, python: str) -> None:
    """Add a hook of Enroot that gives containers their slices, and what mounts TaskProlog there, where Enroot is.

    With pyxis Slurm runs TaskProlog inside the container, and the task fails if it does not exist there. A site with a
    TaskProlog of its own mounts that already.
    """
    if not places.enroot.is_dir():
        return
    hook = node_install.enroot_hook(places.etc, python)
    plan.wanted.append(Wanted(str(places.enroot / containers.HOOK), hook, mode=0o755))
    ours = scripts.beside_slurm_conf("task_prolog")
    values = conf.values("TaskProlog")
    if not values:
        values = [str(Path(conf.main if conf.main != CONFIGLESS else _USUAL[0]).with_name(ours))]
    if Path(values[-1]).name == ours:
        line = containers.mount_line(conf.beside(values[-1]))
        plan.wanted.append(Wanted(str(places.enroot / containers.FSTAB), line))


def start_unit(unit: str) -> str:
    """Return the command that starts a unit, anew if it runs: `enable --now` would not."""
    return f"systemctl daemon-reload && systemctl enable {unit} && systemctl restart {unit}"


def add_unit(plan: HostPlan, places: Places, name: str, text: str) -> None:
    """Add a unit, unless a package installed the same one and no unit of the host overrides it."""
    own = places.systemd / name
    if own.exists() or read(str(places.packaged_units / name)) != text:
        plan.wanted.append(Wanted(str(own), text))


def login(conf: Conf) -> HostPlan:
    """Return what a host needs on which users run srun, sbatch and salloc."""
    plan = HostPlan()
    _cli_filter(plan, conf)
    return plan


def _controller(conf: Conf) -> str:
    """Return migbatchd's URLs on the hosts of slurmctld, separated by commas."""
    hosts = [
        address.rstrip(")") or name for name, _, address in (host.partition("(") for host in slurmctld_hosts(conf))
    ]
    if not conf.value("SlurmctldHost") and conf.value("ControlAddr"):
        hosts = [conf.value("ControlAddr")]
    return ",".join(f"http://{f'[{host}]' if ':' in host else host}:{_PORT}" for host in hosts)


def slurmctld_hosts(conf: Conf) -> list[str]:
    """Return slurmctld's hosts in slurm.conf, `name` or `name(address)`, in their order."""
    return conf.values("SlurmctldHost") or [host for host in (conf.value("ControlMachine"),) if host]


def slurm_release(conf: Conf) -> tuple[int, ...]:
    """Return the release of this host's Slurm; empty if unknown. Even `scontrol --version` needs a slurm.conf."""
    words, env = ["scontrol", "--version"], {**os.environ, "SLURM_CONF": conf.main}
    try:
        result = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"(\d+)\.(\d+)", result.stdout)
    return (int(match[1]), int(match[2])) if match else ()


def _is_sites_alone(conf: Conf, key: str, hook: str) -> bool:
    """Return whether slurm.conf names hooks of the site for a key, and none of migbatch's."""
    values = conf.values(key)
    return bool(values) and hook not in values and stub_path(conf, hook) not in values


def _add_to_site_hook(plan: HostPlan, conf: Conf, key: str, hook: str, edit: bool) -> None:
    """Add migbatch's hook to the site's hook of a key."""
    values = conf.values(key)
    site_hook = conf.beside(values[-1])
    if scripts.is_pattern(site_hook):
        stub_file = scripts.name_in(site_hook)
        others = [path for path in scripts.programs_of(site_hook) if path != stub_file and not Path(path).is_dir()]
        if any(_runs(path, hook) for path in others):
            return
        if stub_file:
            plan.wanted.append(Wanted(stub_file, scripts.stub(hook), mode=0o755))
        else:
            plan.problems.append(f"{key}={site_hook}: create a link to {hook} that matches this pattern")
        return
    if Path(site_hook).is_dir():
        plan.problems.append(f"{key}={site_hook} is a directory, which Slurm does not run: set {key}={site_hook}/*")
        return
    text = read(site_hook)
    if text is None:
        plan.problems.append(f"{key}={site_hook} is not on this host; it must run {hook}")
    elif scripts.calls_hook(text, hook):
        return
    elif conf.main == CONFIGLESS and not values[-1].startswith("/"):
        plan.problems.append(f"{key}={values[-1]} comes from slurmctld: make it run {hook} there")
    elif not scripts.is_shell(text):
        plan.problems.append(
            f"{site_hook} ({key}) is not a shell script: make it run {hook} and exit with its status unless that is 0"
        )
    elif edit:
        plan.wanted.append(Wanted(site_hook, scripts.call_hook(text, hook), "site"))
    else:
        plan.lines.append(f"{site_hook}:2: add: {scripts.hook_line(hook)}")


def _runs(path: str, hook: str) -> bool:
    """Return whether a program is migbatch's hook, by a link, or calls it."""
    return Path(path).resolve() == Path(hook).resolve() or scripts.calls_hook(read(path) or "", hook)


def _cli_filter(plan: HostPlan, conf: Conf) -> None:
    """Add a script that changes nothing if slurm.conf names cli_filter/lua and the host has none for it."""
    filters = scripts.plugins(conf.value("CliFilterPlugins"))
    path = Path(conf.main).parent / CLI_FILTER
    if "lua" in filters and not path.exists():
        plan.wanted.append(Wanted(str(path), scripts.DOES_NOTHING))
        plan.notes.append(f"{path} is missing; copy the controller's for `srun --gres=mig:auto`; this one does nothing")


def stub_path(conf: Conf, hook: str) -> str:
    """Return the path of the program with which slurm.conf runs a hook: it is on every node with slurm.conf."""
    return str(Path(conf.main).with_name(scripts.beside_slurm_conf(Path(hook).name)))


def slurm_conf(given: str, environment: str) -> Conf | None:
    """Read this host's slurm.conf at one of two paths, or without any in Slurm's places; None if there is none."""
    named = [path for path in (given, environment) if path]
    for path in named or _USUAL:
        if read(path) is not None:
            return load(path, read)
    return None
