"""Render configuration files for a Slurm site (and for the test bed, which is a small site)."""

from .conf import FORGETS, PREEMPT_EXEMPT, WAITING, NodeLine, Setting, Site, mig_gres, preemption, spare
from .render import render, template_loader

__all__ = [
    "FORGETS",
    "PREEMPT_EXEMPT",
    "WAITING",
    "NodeLine",
    "Setting",
    "Site",
    "mig_gres",
    "preemption",
    "render",
    "spare",
    "template_loader",
]
