"""What the papers propose and migbatchd does not run: baselines and studies of the lab."""
