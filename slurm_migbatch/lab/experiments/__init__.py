"""Run experiments with targets: migbatchd's decisions with the default configuration, on public data."""
