"""A private Slurm cluster on loopback with simulated GPUs, for trying and testing."""
