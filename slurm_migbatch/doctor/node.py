"""Check a compute node. Standard library, pynvml and what hooks have: the agent runs these checks too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from slurm_migbatch.doctor import containers, disks, drained, gpus, hooks, link, settings, slurmfiles
from slurm_migbatch.doctor.programs import readable, unreadable
from slurm_migbatch.install import scripts
from slurm_migbatch.install.hosts import slurm_conf
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.mig.driver import DriverError
from slurm_migbatch.node import conf as node_conf
from slurm_migbatch.node import failure, jobmaps, unwritable
from slurm_migbatch.node.caps import helper_is_setuid
from slurm_migbatch.node.conf import ConfError, insecure
from slurm_migbatch.node.config import NodeConfig
from slurm_migbatch.node.disk_reserve import RESERVE
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, Finding
from slurm_migbatch.node.gpus import Gpus
from slurm_migbatch.node.own_name import load_own
from slurm_migbatch.node.scontrol import ScontrolError, query
from slurm_migbatch.node.status import agent_answers
from slurm_migbatch.slurm.client import SlurmError
from slurm_migbatch.slurm.fields import fields_of, reason_of
from slurm_migbatch.slurm.versions import parse_release

_JOURNAL_MIB: Final = 2 * RESERVE >> 20
_RUN_MIB: Final = 1
_AS_ROOT: Final = "run migbatch doctor as root"


@dataclass(frozen=True)
class NodePlaces:
    """Paths on a node. Empty: `slurm_conf` by node.conf or by Slurm's rules, `name` (in Slurm) the host's there."""

    etc: str = "/etc/migbatch"
    hooks: str = "/etc/migbatch/hooks"
    slurm_conf: str = ""
    name: str = ""


def examine(places: NodePlaces) -> Iterator[Finding]:
    """Yield all findings of this node, for an administrator on it; migbatchd receives them too."""
    try:
        config = load_own(places.etc, places.name)
    except ConfError as error:
        yield Finding(FAIL, "node.conf", str(error), "migbatch install --role node --apply writes one to start from")
        return
    driver = Gpus(config)
    try:
        findings = [*_settings(config), *_local(places, config, driver), *_agent(config), *_drained(config)]
    finally:
        driver.reset()
    yield from findings
    if os.geteuid() != 0:
        yield Finding(UNKNOWN, "controller", "only root can act for a node", _AS_ROOT)
    else:
        yield from link.check_link(config, link.gather(config, findings))


def examine_quietly(places: NodePlaces, config: NodeConfig, driver: Gpus) -> list[Finding]:
    """Return all findings of this node for its agent. Slurm is queried only if a hook has failed."""
    findings = [*_settings(config), *_local(places, config, driver)]
    return findings + (list(_drained(config)) if failure.last(config.run_dir) else [])


def _settings(config: NodeConfig) -> Iterator[Finding]:
    path = f"{config.etc}/{node_conf.NAME}"
    reason = insecure(path)
    if reason:
        yield Finding(FAIL, "node.conf", reason, f"chown root {path}; chmod go-w {path} {config.etc}")
    elif closed := unreadable(path, None):
        text = f"TaskProlog, which users run, cannot read it: {closed}"
        yield Finding(FAIL, "node.conf", text, f"chmod a+rX {config.etc} {path}")
    else:
        yield Finding(OK, "node.conf", path)


def _local(places: NodePlaces, config: NodeConfig, driver: Gpus) -> Iterator[Finding]:
    whole: list[str] = []
    sliced: list[str] = []
    yield from _gpus(config, driver, whole, sliced)
    yield from gpus.check_helper(helper_is_setuid())
    yield from gpus.check_manager()
    yield from readable(lambda: _slurm(places, config, whole, sliced))
    directories = (("journal and spool", config.state_dir, _JOURNAL_MIB), ("hand-offs", config.run_dir, _RUN_MIB))
    yield from disks.check_disks(disks.read_disk(*directory) for directory in directories)
    yield from _journal(config)
    yield from check_job_maps(config)


def _gpus(config: NodeConfig, driver: Gpus, whole: list[str], sliced: list[str]) -> Iterator[Finding]:
    """Check the GPUs; the devices of those with slices are added to `sliced`, those of the others to `whole`."""
    try:
        checked = gpus.gather(driver.all(), config)
        unidentified = driver.unidentified()
    except DriverError as error:
        text = f"the driver does not answer: {error}"
        yield Finding(FAIL, "GPUs", text, "check nvidia-smi, dmesg, and NvmlLibrary= in node.conf")
        return
    for problem in unidentified.values():
        yield Finding(FAIL, "GPUs", problem, "check dmesg and nvidia-smi; drain the node before a reset")
    whole += [gpu.device for gpu in checked if not gpu.cut]
    sliced += [gpu.device for gpu in checked if gpu.cut]
    idle = [gpu.device for gpu in checked if gpu.cut and not (gpu.on and gpu.later)]
    held = [
        *gpus.holders(idle),
        *gpus.holders([gpu.device for gpu in checked if gpu.cut and gpu.device not in idle], gpus.SLURM),
    ]
    yield from gpus.check_gpus(checked, held)
    if any(gpu.managed for gpu in checked) and all(gpu.device for gpu in checked) and not unidentified:
        yield from gpus.check_named(checked, config.gpus)


def _slurm(places: NodePlaces, config: NodeConfig, whole: list[str], sliced: list[str]) -> Iterator[Finding]:
    configured = places.slurm_conf or config.slurm_conf
    conf = slurm_conf(configured, "" if configured else os.environ.get("SLURM_CONF", ""))
    if conf is None:
        advice = "use --slurm-conf, or SlurmConf= in node.conf"
        yield Finding(UNKNOWN, "slurm.conf", "not found in Slurm's default location", advice)
        return
    release = _release(config)
    several = release >= scripts.SEVERAL["Prolog"]
    limits = {key.lower(): conf.value(key) for key in (settings.TIMEOUT, "PrologTimeout", "EpilogTimeout")}
    found = settings.check_timeouts({key: value for key, value in limits.items() if value}, config)
    yield from (finding for finding in found if finding.level != OK)  # what slurmctld has is checked there

    def beside(name: str) -> Conf:
        return slurmfiles.beside(conf, name)

    yield from readable(
        lambda: hooks.check_hooks(hooks.gather(conf, places.hooks, several=several)),
        lambda: slurmfiles.check_autodetect(beside("gres.conf"), [config.node]),
        lambda: slurmfiles.check_cgroup(
            conf, beside("cgroup.conf"), beside("gres.conf"), config.node, whole=whole, sliced=sliced
        ),
        lambda: slurmfiles.check_cli_filter(conf),
        lambda: containers.check_containers(containers.gather(conf), release),
    )


def _release(config: NodeConfig) -> tuple[int, ...]:
    try:
        return parse_release(query(config, "scontrol", ["--version"], config.scontrol_timeout))
    except (ScontrolError, SlurmError):
        return ()


def _agent(config: NodeConfig) -> Iterator[Finding]:
    if os.geteuid() != 0:
        yield Finding(UNKNOWN, "agent", "only root can query it", _AS_ROOT)
    elif agent_answers(config):
        yield Finding(OK, "agent", "answers")
    else:
        text = "is not running: the node does not report, and hooks are slow"
        yield Finding(FAIL, "agent", text, "systemctl enable --now migbatch-node, then: journalctl -u migbatch-node")


def _journal(config: NodeConfig) -> Iterator[Finding]:
    faults = 0
    with suppress(OSError):
        descriptor = os.open(config.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            faults = unwritable.load(descriptor).hooks
        finally:
            os.close(descriptor)
    if faults:
        text = f"the last {faults} hooks failed to write the journal in {config.state_dir}"
        yield Finding(FAIL, "journal", text, f"check that its disk is writable and not full: df {config.state_dir}")


def _drained(config: NodeConfig) -> Iterator[Finding]:
    message = failure.last(config.run_dir)
    try:
        text = query(config, "scontrol", ["-o", "show", "node", config.node], config.scontrol_timeout)
    except ScontrolError as error:
        yield Finding(UNKNOWN, drained.SUBJECT, str(error), "check ScontrolPath= and SlurmConf= in node.conf")
        return
    state = fields_of(text).get("State", "")
    yield from drained.check_drained(config.node, state, reason_of(text), message)


def check_job_maps(config: NodeConfig) -> Iterator[Finding]:
    """Check the directories in which GPU exporters look for jobs (JobMapDir, GpustatDir), if any is configured."""
    configured = [path for path in (config.job_map_dir, config.gpustat_dir) if path]
    problems = jobmaps.problems(config)
    for text in problems:
        advice = "correct JobMapDir= and GpustatDir= in node.conf, or the directory; jobs are not affected"
        yield Finding(FAIL, "job maps", f"exporters cannot map slices to jobs: {text}", advice)
    if configured and not problems:
        yield Finding(OK, "job maps", ", ".join(configured))
