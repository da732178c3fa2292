"""Slurm's own languages: GRES strings, node lists, time forms, and the client."""
