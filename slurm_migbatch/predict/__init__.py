"""From a workload to predicted figures on each slice."""
