"""Run a private Slurm cluster on loopback with simulated GPUs, for trials and tests."""
