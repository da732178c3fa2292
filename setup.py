"""The list of packages, which pyproject.toml cannot spell: two of them lie beside slurm_migbatch, not in it."""

from setuptools import find_packages, setup

DATA = ("gres_templates", "sbatch_examples")

setup(
    packages=[*find_packages(include=["slurm_migbatch*"]), *(f"slurm_migbatch.{folder}" for folder in DATA)],
    package_dir={f"slurm_migbatch.{folder}": folder for folder in DATA},
)
