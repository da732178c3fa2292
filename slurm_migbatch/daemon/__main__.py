"""The program `migbatchd`, also as `python -m slurm_migbatch.daemon`."""

import sys

from slurm_migbatch.cli.common import run


def main() -> None:
    """Entry point."""
    sys.exit(run("slurm_migbatch.daemon.main:migbatchd", "migbatchd"))


if __name__ == "__main__":
    main()
