"""The planner of offered slots and the advertiser that tells Slurm."""
