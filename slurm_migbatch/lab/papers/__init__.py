"""Implement policies from papers that migbatchd does not use: baselines and studies of the lab."""
