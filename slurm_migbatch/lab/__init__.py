"""Simulator, traces, baselines, experiments and evaluation: what the product is measured with, and never imports."""
