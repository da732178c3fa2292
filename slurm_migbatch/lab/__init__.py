"""Simulate, benchmark and evaluate migbatch: simulator, traces, baselines and experiments, never imported by the
product.
"""
