"""Measure models and import measurements: one common table, its importers, and the measuring command."""
