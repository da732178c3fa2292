"""Policies for training traces: thin adapters between the engine and the rules in `slurm_migbatch.lab.papers.queueing`."""
