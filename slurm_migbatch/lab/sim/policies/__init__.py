"""Policies for training traces: thin adapters between the engine and the rules in `lab.papers.queueing`."""
