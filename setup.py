"""The list of packages, which pyproject.toml cannot spell: two of them lie beside slurm_migbatch, not in it."""

from setuptools import find_packages, setup

DATA = ("gres_templates", "sbatch_examples")
#: folders without modules
FILES = ("sbatch_examples.ondemand", "sbatch_examples.ondemand.template", "testbed.driver")

setup(
    packages=[*find_packages(include=["slurm_migbatch*"]), *(f"slurm_migbatch.{name}" for name in (*DATA, *FILES))],
    package_dir={f"slurm_migbatch.{folder}": folder for folder in DATA},
)
