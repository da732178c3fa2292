"""`python -m slurm_migbatch.cli`: the command migbatch."""

from slurm_migbatch.cli.main import main

main()
