"""Dynamic NVIDIA MIG for Slurm: Slurm schedules, migbatch shapes the supply, the node makes the slice."""
