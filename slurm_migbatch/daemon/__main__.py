"""`python -m slurm_migbatch.daemon`: migbatchd."""

from slurm_migbatch.daemon.main import main

main()
