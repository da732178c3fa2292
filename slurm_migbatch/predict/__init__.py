"""Predict time, rate and memory of a workload on each slice."""
