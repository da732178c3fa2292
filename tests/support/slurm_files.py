"""Lines of slurm.conf of a site with three MIG nodes, and what its nodes report."""

from __future__ import annotations

from slurm_migbatch import site

MAIN, GRES = "/etc/slurm/slurm.conf", "/etc/slurm/gres.conf"
COUNTS = {"7g.80gb": 0, "1g.10gb": 14, "none": 0}
SMALL = {"2g.12gb": 0, "1g.6gb": 4, "none": 0}
CATALOG = site.NodeLine("migcatalog", {"7g.80gb": 2, "1g.10gb": 14, "2g.12gb": 2, "1g.6gb": 4, "none": 0})
SITE = site.Site(
    (22, 5),
    [site.NodeLine("h[1-2]", COUNTS), site.NodeLine("m1", SMALL)],
    CATALOG,
    prolog="/etc/slurm/migbatch-prolog",
    epilog="/etc/slurm/migbatch-epilog",
    task_prolog="/etc/slurm/migbatch-task_prolog",
    job_submit=True,
)
H, M = "mig:7g.80gb:0,mig:1g.10gb:14,mig:none:0", "mig:2g.12gb:0,mig:1g.6gb:4,mig:none:0"
NODES = (
    "NodeName=h[1-2] CPUs=8 RealMemory=100\nNodeName=m1 CPUs=4 RealMemory=200 Feature=a30\nPartitionName=p Nodes=h1\n"
)
