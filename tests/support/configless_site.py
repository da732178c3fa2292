"""The stock site in configless mode: nodes have no slurm.conf of their own and get it from slurmctld."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.support.stock_site import StockSite

#: the only file kept on slurmd's machine is the site's own Epilog, which slurmctld does not send to nodes
_SLURMD = """set -e
if mountpoint -q /etc/slurm; then
    mkdir -p /run/kept
    cp -a /etc/slurm/epilog.sh /run/kept
    umount /etc/slurm
    rm -rf /etc/slurm/*
    cp -a /run/kept/* /etc/slurm
fi
exec /usr/sbin/slurmd -D --conf-server ctl
"""


class ConfiglessSite(StockSite):
    """A controller, a node with GPUs and a login node: `with ConfiglessSite(slurm_root) as site:`."""

    hosts: Sequence[str] = ("ctl", "h1", "login")
    #: the site has an Epilog of its own, and neither Prolog nor TaskProlog
    edits: Mapping[str, str] = {
        "SlurmdParameters=config_overrides": "SlurmdParameters=config_overrides\nSlurmctldParameters=enable_configless",
        "prolog=/etc/slurm/prolog.d/*.sh\n": "",
        '/bin/rmdir "/var/tmp/scratch-$SLURM_JOB_ID"': "true",
        'TaskProlog="/etc/slurm/task_prolog.sh"\n': "",
    }

    def bring_programs(self, *hosts: str) -> None:
        """Copy the programs named in slurm.conf to hosts, as docs/install.md says."""
        for host in hosts:
            for name in ("prolog", "epilog", "task_prolog"):
                if (path := self.directory / f"slurm/migbatch-{name}").exists():
                    self.on(host, ["cp", "-p", str(path), "/etc/slurm"])

    def _slurmd(self) -> list[str]:
        return ["/bin/sh", "-c", _SLURMD]
