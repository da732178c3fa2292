"""Adapt the rules of `lab.papers.queueing` to the engine, as policies for training traces."""
