"""Dynamic NVIDIA MIG for Slurm: Slurm schedules, migbatch shapes the supply, the node creates the slice."""
