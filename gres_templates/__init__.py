"""Jinja2 templates of what Slurm and systemd need, installed as the package slurm_migbatch.gres_templates."""
