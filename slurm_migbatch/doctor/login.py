"""Check a host on which users work. Standard library only, because its extra installs only click."""

from __future__ import annotations

import os
from collections.abc import Iterator

from slurm_migbatch.doctor import queries, slurmfiles
from slurm_migbatch.doctor.luaposix import check_posix
from slurm_migbatch.install import scripts
from slurm_migbatch.install.hosts import slurm_conf
from slurm_migbatch.install.slurmconf import Conf
from slurm_migbatch.node.auth import AuthError, MungeSigner
from slurm_migbatch.node.findings import FAIL, OK, UNKNOWN, Finding
from slurm_migbatch.query.login import LOGIN_CONF, LoginError, find_servers, show_config
from slurm_migbatch.slurm.settings import parse_settings


def examine(path: str = "", config: str = "") -> Iterator[Finding]:
    """Yield all findings of this host; `path`: slurm.conf, `config`: login.conf, if elsewhere."""
    conf = slurm_conf(path, "" if path else os.environ.get("SLURM_CONF", ""))
    if conf is None:
        text = "not found in Slurm's default location"
        yield Finding(UNKNOWN, "slurm.conf", text, "use --slurm-conf; a configless host has none to check")
    else:
        yield from slurmfiles.check_cli_filter(conf)
        if "lua" in scripts.plugins(conf.value("CliFilterPlugins")):
            effect = "srun and salloc refuse a model without mem=, and srun --gpus=n fails in shells of salloc"
            yield check_posix(_plugin_dirs(conf), "cli_filter_lua.so", effect)
    try:
        servers = find_servers(config)
    except LoginError as error:
        yield Finding(FAIL, "login.conf", str(error), f"write Servers=http://<controller>:6831 to {LOGIN_CONF}")
        return
    yield Finding(OK, "login.conf", f"{', '.join(servers.urls)} (named by {servers.source})")
    advice = f"check that migbatchd runs there with [query] enabled, on this port ({servers.source}), and the firewall"
    for url in servers.urls:
        yield from queries.check_answers(url, advice, f"correct Servers= in {LOGIN_CONF}")
    try:
        signer = MungeSigner(servers.munge_socket, None)
        signer.verify(signer.sign(b"", ""), b"", "")
    except AuthError as error:
        text = f"{error}: queries from this host cannot be authenticated"
        yield Finding(FAIL, "munge", text, "systemctl enable --now munge, with the cluster's /etc/munge/munge.key")
    else:
        yield Finding(OK, "munge", "makes credentials")


def _plugin_dirs(conf: Conf) -> list[str]:
    """Return the directories of Slurm's plugins; none if slurmctld does not answer."""
    try:
        return (conf.value("PluginDir") or parse_settings(show_config()).get("plugindir", "")).split(":")
    except LoginError:
        return []
