"""Experiments with bars: what migbatchd decides with the configuration that ships, on public data."""
