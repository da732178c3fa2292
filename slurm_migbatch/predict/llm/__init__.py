"""Predict memory and serving speed of language models and other large public models."""
