"""Configuration files for a Slurm site (and for the test bed, which is a small site)."""

from .conf import Node, Partition, Site, mig_gres
from .render import TemplateMissing, render, template_folder

__all__ = ["Node", "Partition", "Site", "TemplateMissing", "mig_gres", "render", "template_folder"]
